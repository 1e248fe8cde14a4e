"""Atomic writes: readers find a complete file or none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from failing_disk import failing_disk

from llmfoundry_gauntlet.data.stores import UNFINISHED, sync_folder, write_atomically

OLD, NEW = b'old' * 5000, [b'new' * 9000, memoryview(b'est')]
OPERATIONS = ['mkdir', 'open', 'fsync', 'replace', 'open', 'fsync']


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(tmp_path: Path):
    with failing_disk() as done:
        write_atomically(tmp_path / 'a', NEW)
    assert done == OPERATIONS
    assert (tmp_path / 'a').read_bytes() == b''.join(NEW)


@pytest.mark.parametrize('killed', [False, True])
@pytest.mark.parametrize('at', range(1, len(OPERATIONS)))  # the folder exists: creating it may fail
@pytest.mark.parametrize('before', [None, OLD])
def test_after_any_failure_there_is_the_old_file_or_the_new(
    tmp_path: Path, at: int, killed: bool, before: bytes | None
):
    path = tmp_path / 'a'
    if before is not None:
        path.write_bytes(before)
    with failing_disk(at, killed=killed), pytest.raises(OSError, match=f'operation {at}'):
        write_atomically(path, NEW)
    found = path.read_bytes() if path.exists() else None
    assert found == (before if at <= OPERATIONS.index('replace') else b''.join(NEW))
    others = [other.name for other in tmp_path.iterdir() if other != path]
    if not killed:
        assert not others
    assert all(name.startswith('.') and name.endswith(UNFINISHED) for name in others)


def test_an_error_in_the_content_leaves_no_file(tmp_path: Path):
    def content() -> Iterator[bytes]:
        yield b'begun'
        raise ValueError('no more')

    with pytest.raises(ValueError, match='no more'):
        write_atomically(tmp_path / 'a', content())
    assert not list(tmp_path.iterdir())


def test_permissions_follow_the_umask(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / 'below' / 'a', [b''])
    finally:
        os.umask(before)
    assert (tmp_path / 'below' / 'a').stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(('number', 'is_error'), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_file_systems_that_cannot_sync_folders_are_no_error(tmp_path: Path, number: int, is_error: bool):
    with mock.patch('os.fsync', side_effect=OSError(number, 'as on a network file system')):
        if is_error:
            with pytest.raises(OSError, match='network'):
                sync_folder(tmp_path)
        else:
            sync_folder(tmp_path)
