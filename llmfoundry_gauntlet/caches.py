"""The folder of what this package would otherwise compute again: token ids, compiled headers."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = 'LLMFOUNDRY_GAUNTLET_CACHE'  # a folder, or OFF
OFF = 'off'
FOLDER = 'llmfoundry_gauntlet'  # in the user's cache folder


def cache_folder(part: str) -> Path | None:
    """Where `part` is kept: in the folder that the environment names, by default one in the user's cache folder.

    None where it is off, and for a user who has no home.
    """
    named = os.environ.get(VARIABLE, '')
    if named:
        return None if named.lower() == OFF else Path(os.path.expanduser(named)) / part
    base = os.environ.get('XDG_CACHE_HOME', '')
    if not os.path.isabs(base):
        base = os.path.expanduser('~/.cache')
    return Path(base) / FOLDER / part if os.path.isabs(base) else None
