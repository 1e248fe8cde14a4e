"""Files that a reader finds whole or not at all, whenever the writer is killed or the power fails."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

UNFINISHED = '.unfinished'  # ends the names of files that are being written, or that a killed writer left behind


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file in one step, in place of one that may be there. Missing folders are made. Raises OSError.

    Whatever stops it, the path has its old content or all of the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unfinished_path(path.parent)
    with contextlib.ExitStack() as stack:
        stack.callback(remove, unfinished)
        write_synced(unfinished, chunks)
        os.replace(unfinished, path)
        stack.pop_all()
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a file if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def unfinished_path(folder: Path) -> Path:
    """Return a new hidden name in a folder."""
    return folder / f'.{uuid.uuid4().hex}{UNFINISHED}'


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a new file, and return once it is on the disk. Raises OSError."""
    with path.open('xb') as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return once all files of a folder have their present names on the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not sync folders
            raise
    finally:
        os.close(handle)
