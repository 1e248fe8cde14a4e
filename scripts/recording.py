"""Paths, digests and files shared by the recorders of test fixtures."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
FIXTURES = REPOSITORY / 'tests' / 'fixtures'
DATA_ROOT = REPOSITORY.parent / 'shared' / 'data' / 'local_data'
SCORE_ROOT = REPOSITORY.parent / 'shared' / 'data' / 'score'

Row = dict[str, Any]


def digest(data: str | bytes) -> str:
    """Return the sha256 of bytes or of a text in UTF-8, in hex."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file of JSON lines, without their line ends."""
    return path.read_text('utf-8').removesuffix('\n').split('\n')


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of packages."""
    return {name: version(name) for name in packages}


def write_fixture(path: Path, fixture: dict[str, Any], *, limit: int) -> None:
    """Write compact JSON. Raise ValueError if it takes `limit` bytes or more."""
    text = json.dumps(fixture, separators=(',', ':')) + '\n'
    if len(text) >= limit:
        raise ValueError(f'{path.name} takes {len(text)} bytes; allowed: below {limit}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, 'utf-8')
    print(f'{path.name}: {len(text)} bytes', flush=True)
