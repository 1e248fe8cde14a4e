import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from llmfoundry_gauntlet.config.resources import cache_folder
from llmfoundry_gauntlet.tasks import token_cache as cache_module
from llmfoundry_gauntlet.tasks.token_cache import LEFTOVER_SECONDS, NO_CACHE, TOKENS, TokenCache, pack

EMPTY = pack([])


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


def test_entries_are_found_by_name(tmp_path):
    cache = TokenCache(tmp_path / 'new' / 'folder')
    assert cache.load('a') is None
    cache.store('a', EMPTY)
    assert cache.load('a') is not None and cache.load('b') is None
    assert [path.name for path in (tmp_path / 'new' / 'folder').iterdir()] == ['a.tokens']
    NO_CACHE.store('a', EMPTY)
    assert NO_CACHE.load('a') is None


def test_a_full_disk_leaves_no_file_and_one_warning(tmp_path, monkeypatch, caplog):
    def full(*_) -> None:
        raise OSError(28, 'No space left on device')

    cache = TokenCache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', full)
        cache.store('a', EMPTY)
    cache.store('b', EMPTY)
    assert not list(tmp_path.iterdir())
    assert len(caplog.records) == 1


def hold(folder: Path, claimed) -> None:
    with TokenCache(folder).claim('a') as is_mine:
        claimed.put(is_mine)
        signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Start a process that claims 'a' until it is killed."""
    context = multiprocessing.get_context('spawn')
    claimed = context.Queue()
    process = context.Process(target=hold, args=(tmp_path, claimed))
    process.start()
    assert claimed.get(timeout=60)
    yield process
    process.kill()
    process.join()


def test_a_claim_lasts_until_its_process_dies(tmp_path, holder):
    cache = TokenCache(tmp_path)
    with cache.claim('a') as is_mine:
        assert not is_mine
    with pytest.raises(KeyError), cache.claim('b') as is_mine:
        assert is_mine
        raise KeyError  # ends the claim too
    with cache.claim('b') as is_mine:
        assert is_mine
    holder.kill()
    holder.join()
    with cache.claim('a') as is_mine:
        assert is_mine


def age(path: Path, seconds: float) -> None:
    now = path.stat().st_mtime
    os.utime(path, (now - seconds, now - seconds))


def test_least_recently_used_entries_are_removed_first(tmp_path):
    cache = TokenCache(tmp_path)
    for seconds, name in enumerate('cab'):
        cache.store(name, EMPTY)
        age(tmp_path / f'{name}.tokens', 100 - seconds)
    size = (tmp_path / 'a.tokens').stat().st_size
    cache.load('c')  # is used now
    cache.trim(3 * size)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ['a', 'b', 'c']
    cache.trim(2 * size)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ['b', 'c']
    cache.trim(2 * size - 1)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ['c']


def test_leftovers_of_dead_processes_are_removed_after_a_day(tmp_path):
    for name in ('old.lock', 'old.unfinished', 'old.tokens', 'new.lock', 'new.unfinished', 'old.other'):
        (tmp_path / name).write_bytes(b'')
        if name.startswith('old'):
            age(tmp_path / name, LEFTOVER_SECONDS + 60)
    TokenCache(tmp_path).trim()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'new.lock', 'new.unfinished', 'old.other', 'old.tokens',
    ]  # fmt: skip


def test_without_file_locks_each_process_prepares_its_own(tmp_path, monkeypatch):
    def unsupported(*_, **__):
        raise OSError(37, 'No locks available')

    monkeypatch.setattr(cache_module, 'FileLock', unsupported)
    cache = TokenCache(tmp_path)
    with cache.claim('a') as is_mine:
        assert is_mine
        cache.store('a', EMPTY)
    assert cache.load('a') is not None
