"""Text files that are written completely or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmfoundry_gauntlet.data.atomic import write_atomically
from llmfoundry_gauntlet.errors import RecordError


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write text lines atomically. Raises RecordError."""
    try:
        write_atomically(path, encoded(lines))
    except OSError as error:
        raise RecordError(f'{path}: cannot be written: {error.strerror or error}') from error


def encoded(lines: Iterable[str]) -> Iterator[bytes]:
    """Yield text lines as bytes; surrogates are escaped as JSON does."""
    return (f'{line}\n'.encode('utf-8', 'backslashreplace') for line in lines)


def check_writable(folder: Path) -> None:
    """Raise RecordError if a folder, which may not exist yet, cannot be created or written to."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise RecordError(
            f'{folder}: nothing can be written there ({error.strerror or error}); give another folder, or the right '
            'to write into this one'
        ) from error
