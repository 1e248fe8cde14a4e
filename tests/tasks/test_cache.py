import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from llmfoundry_gauntlet.config.resources import cache_folder
from llmfoundry_gauntlet.tasks import token_cache as cache_module
from llmfoundry_gauntlet.tasks.packed import pack
from llmfoundry_gauntlet.tasks.token_cache import LEFTOVER_SECONDS, NO_CACHE, TOKENS, TokenCache

EMPTY = pack([])


def test_the_folder_is_the_users_unless_the_environment_names_one(monkeypatch, tmp_path):
    monkeypatch.delenv('LLMFOUNDRY_GAUNTLET_CACHE')
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setenv('HOME', str(tmp_path))
    assert cache_folder(TOKENS) == tmp_path / '.cache/llmfoundry_gauntlet/tokens'
    monkeypatch.setenv('XDG_CACHE_HOME', '/var/cache/me')
    assert cache_folder(TOKENS) == Path('/var/cache/me/llmfoundry_gauntlet/tokens')
    monkeypatch.setenv('XDG_CACHE_HOME', 'relative')  # is to be ignored, says its specification
    assert cache_folder(TOKENS) == tmp_path / '.cache/llmfoundry_gauntlet/tokens'
    monkeypatch.setenv('LLMFOUNDRY_GAUNTLET_CACHE', '~/tokens')
    assert cache_folder(TOKENS) == tmp_path / 'tokens/tokens' and cache_folder('headers') == tmp_path / 'tokens/headers'
    for off in ('off', 'OFF'):
        monkeypatch.setenv('LLMFOUNDRY_GAUNTLET_CACHE', off)
        assert cache_folder(TOKENS) is None


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    for name in ('LLMFOUNDRY_GAUNTLET_CACHE', 'XDG_CACHE_HOME'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, 'expanduser', lambda path: path)  # as where the user is in no list
    assert cache_folder(TOKENS) is None


def test_what_is_stored_is_found_under_its_name_alone(tmp_path):
    cache = TokenCache(tmp_path / 'new' / 'folder')
    assert cache.load('a') is None
    cache.store('a', EMPTY)
    assert cache.load('a') is not None and cache.load('b') is None
    assert [path.name for path in (tmp_path / 'new' / 'folder').iterdir()] == ['a.tokens']
    NO_CACHE.store('a', EMPTY)
    assert NO_CACHE.load('a') is None


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    def full(*_) -> None:
        raise OSError(28, 'No space left on device')

    cache = TokenCache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', full)
        cache.store('a', EMPTY)
    cache.store('b', EMPTY)
    assert not list(tmp_path.iterdir())
    assert len(caplog.records) == 1 and 'No space left' in caplog.text


def hold(folder: Path, claimed) -> None:
    with TokenCache(folder).claim('a') as is_mine:
        claimed.put(is_mine)
        signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Another process, which has claimed 'a' and keeps it until it is killed."""
    context = multiprocessing.get_context('spawn')
    claimed = context.Queue()
    process = context.Process(target=hold, args=(tmp_path, claimed))
    process.start()
    assert claimed.get(timeout=60)
    yield process
    process.kill()
    process.join()


def test_a_name_is_one_processes_until_it_dies(tmp_path, holder):
    cache = TokenCache(tmp_path)
    with cache.claim('a') as is_mine:
        assert not is_mine
    with cache.claim('b') as is_mine:
        assert is_mine
    holder.kill()
    holder.join()
    with cache.claim('a') as is_mine:
        assert is_mine


def test_a_claim_ends_with_an_error_too(tmp_path):
    cache = TokenCache(tmp_path)
    with pytest.raises(KeyError), cache.claim('a') as is_mine:
        assert is_mine
        raise KeyError
    with cache.claim('a') as is_mine:
        assert is_mine


def age(path: Path, seconds: float) -> None:
    now = path.stat().st_mtime
    os.utime(path, (now - seconds, now - seconds))


def test_what_was_not_used_for_longest_goes_first(tmp_path):
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


def test_what_dead_processes_left_goes_after_a_day(tmp_path):
    for name in ('old.lock', 'old.unfinished', 'old.tokens', 'new.lock', 'new.unfinished', 'old.other'):
        (tmp_path / name).write_bytes(b'')
        if name.startswith('old'):
            age(tmp_path / name, LEFTOVER_SECONDS + 60)
    TokenCache(tmp_path).trim()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'new.lock', 'new.unfinished', 'old.other', 'old.tokens',
    ]  # fmt: skip


def test_where_no_lock_can_be_had_each_process_makes_and_keeps_its_own(tmp_path, monkeypatch):
    def unsupported(*_, **__):
        raise OSError(37, 'No locks available')

    monkeypatch.setattr(cache_module, 'FileLock', unsupported)
    cache = TokenCache(tmp_path)
    with cache.claim('a') as is_mine:
        assert is_mine
        cache.store('a', EMPTY)
    assert cache.load('a') is not None
