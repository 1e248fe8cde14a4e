"""Write files atomically: readers find all of a file or none, even if the writer is killed or the power fails."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

UNFINISHED = '.unfinished'  # suffix of files being written, or left behind by a killed writer


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write or replace a file atomically, creating missing folders. Raise OSError.

    If interrupted, the path has either its old content or all of the new.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unfinished_path(path.parent)
    with ExitStack() as on_failure:
        on_failure.callback(remove, unfinished)
        write_synced(unfinished, chunks)
        os.replace(unfinished, path)
        on_failure.pop_all()
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file if that is possible."""
    with suppress(OSError):
        os.unlink(path)


def unfinished_path(folder: Path) -> Path:
    """Return a new hidden name in a folder."""
    return folder / f'.{uuid.uuid4().hex}{UNFINISHED}'


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a new file and sync it to disk. Raise OSError."""
    with path.open('xb') as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk. Raise OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(handle)
