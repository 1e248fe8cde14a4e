"""Evaluations that are killed or hang, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluation_worker
import forks

Attempt = Callable[..., list[int]]


def evaluate(
    folder: Path,
    out: Path,
    num_ranks: int = 1,
    *,
    seconds: float = forks.PATIENCE,
    lines: int | None = None,
    kill: signal.Signals = signal.SIGKILL,
    hangs: tuple[int, str] | None = None,
    **settings: Any,
) -> list[int]:
    """Evaluate on some ranks, killed after some seconds or lines in the journal; return their exit statuses."""
    settings = {'out': out, 'tokens_per_batch': 120, 'resume': True, **settings}
    log, end = folder / 'errors.txt', time.monotonic() + seconds
    ranks = forks.start_ranks(evaluation_worker.main, [log] * num_ranks, folder, hangs, settings)
    while any(rank.exitcode is None for rank in ranks):
        if time.monotonic() > end or (lines is not None and num_lines(out) >= lines):
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, kill)
            break
        time.sleep(0.005)
    return forks.statuses(ranks, log)


def num_lines(out: Path) -> int:
    """Return the number of lines in the journal of an evaluation, which removes it at its end."""
    with contextlib.suppress(OSError):  # the folder may be removed at any moment
        return len(journal_lines(out))
    return 0


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
