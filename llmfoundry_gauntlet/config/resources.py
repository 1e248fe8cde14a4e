"""Locate the package's YAML files and sample data, and the cache directory."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
FOLDERS = ('yamls', 'eval_data')

VARIABLE = 'LLMFOUNDRY_GAUNTLET_CACHE'  # a directory, or OFF
OFF = 'off'
FOLDER = 'llmfoundry_gauntlet'  # in the user's cache directory


def shipped(path: str | Path) -> Path:
    """Return a path, or the package's own file if nothing is there and it begins with 'yamls' or 'eval_data'."""
    path = Path(path)
    if path.parts[:1] and path.parts[0] in FOLDERS and not path.exists() and (PACKAGE / path).exists():
        return PACKAGE / path
    return path


def cache_folder(part: str) -> Path | None:
    """Return the directory of one cache: in the directory named by the environment, or in the user's cache directory.

    None if caching is disabled or there is no home directory.
    """
    named = os.environ.get(VARIABLE, '')
    if named:
        return None if named.lower() == OFF else Path(os.path.expanduser(named)) / part
    base = os.environ.get('XDG_CACHE_HOME', '')
    if not os.path.isabs(base):
        base = os.path.expanduser('~/.cache')
    return Path(base) / FOLDER / part if os.path.isabs(base) else None
