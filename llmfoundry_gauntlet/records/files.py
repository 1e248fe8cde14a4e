"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from llmfoundry_gauntlet.errors import RecordError


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes text lines under a temporary name beside `path`, then renames. Raises RecordError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}.')
        try:
            with os.fdopen(
                handle, 'w', encoding='utf-8', errors='backslashreplace'
            ) as file:  # as JSON spells surrogates
                file.writelines(f'{line}\n' for line in lines)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        raise RecordError(f'{path}: cannot be written: {error.strerror or error}') from error


def check_writable(folder: Path) -> None:
    """Raises RecordError where a folder, which may not be there yet, could not be made or written into."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise RecordError(
            f'{folder}: nothing can be written there ({error.strerror or error}); give another folder, or the right '
            'to write into this one'
        ) from error
