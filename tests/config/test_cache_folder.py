import os
from pathlib import Path

from llmfoundry_gauntlet.config.resources import cache_folder

TOKENS = 'tokens'


def test_the_cache_folder_is_the_users_or_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv('LLMFOUNDRY_GAUNTLET_CACHE')
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setenv('HOME', str(tmp_path))
    assert cache_folder(TOKENS) == tmp_path / '.cache/llmfoundry_gauntlet/tokens'
    monkeypatch.setenv('XDG_CACHE_HOME', '/var/cache/me')
    assert cache_folder(TOKENS) == Path('/var/cache/me/llmfoundry_gauntlet/tokens')
    monkeypatch.setenv('XDG_CACHE_HOME', 'relative')  # to be ignored, by its specification
    assert cache_folder(TOKENS) == tmp_path / '.cache/llmfoundry_gauntlet/tokens'
    monkeypatch.setenv('LLMFOUNDRY_GAUNTLET_CACHE', '~/tokens')
    assert cache_folder(TOKENS) == tmp_path / 'tokens/tokens' and cache_folder('headers') == tmp_path / 'tokens/headers'
    for off in ('off', 'OFF'):
        monkeypatch.setenv('LLMFOUNDRY_GAUNTLET_CACHE', off)
        assert cache_folder(TOKENS) is None


def test_without_a_home_directory_there_is_no_cache(monkeypatch):
    for name in ('LLMFOUNDRY_GAUNTLET_CACHE', 'XDG_CACHE_HOME'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, 'expanduser', lambda path: path)  # as for an unknown user
    assert cache_folder(TOKENS) is None
