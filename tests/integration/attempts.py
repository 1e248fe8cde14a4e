"""Helpers of the tests of evaluations that are killed or hang."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

UNTIL_DONE = 120  # seconds
NEVER = 1_000_000  # lines

Attempt = Callable[..., list[int]]


def said(folder: Path) -> str:
    """Return what all attempts have written to standard error."""
    return (folder / 'errors.txt').read_text()


def outcome(out: Path) -> tuple[dict[str, float], dict[str, bytes]]:
    """Return the metrics without timings, and every samples file."""
    record = json.loads((out / 'results.json').read_text())
    metrics = {key: value for key, value in record['metrics'].items() if not key.startswith('gauntlet/seconds')}
    return metrics, {path.name: path.read_bytes() for path in sorted((out / 'samples').iterdir())}


def journal_lines(out: Path) -> list[bytes]:
    """Return all lines of the journal."""
    return [line for path in sorted((out / 'journal').glob('*')) for line in path.read_bytes().splitlines(True)]
