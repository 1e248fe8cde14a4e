"""Evaluations on some ranks that are killed or hang, and what they leave."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import tiny

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.composer import progress
from llmfoundry_gauntlet.composer.loop import EvaluationLoader
from llmfoundry_gauntlet.errors import GauntletError, print_problems

Attempt = Callable[..., list[int]]
Outcome = tuple[dict[str, float], dict[str, bytes]]  # metrics without timings, and every samples file


def hang(how: str) -> None:
    """Make every batch from the 5th on hang, asleep or `holding` Python's lock."""
    progress.BACKSTOP_SECONDS = 2.0
    score, calls = EvaluationLoader._score, itertools.count()

    def score_or_hang(*arguments: object) -> object:
        if next(calls) < 5:
            return score(*arguments)
        if how == 'holding':
            ctypes.PyDLL(None).sleep(1000)  # like a regular expression with catastrophic backtracking
        time.sleep(1000)

    EvaluationLoader._score = score_or_hang


def job(folder: Path, hangs: tuple[int, str] | None, settings: dict[str, Any]) -> None:
    """Evaluate the saved model of a folder on its tasks; `hangs` is the rank that hangs, and how."""
    logging.basicConfig(format='%(message)s')
    if hangs is not None and hangs[0] == progress.dist.get_global_rank():
        hang(hangs[1])
    try:
        evaluate(**{'model': folder / 'model', 'device': 'cpu', **tiny.settings_of(folder), **settings})
    except GauntletError as error:
        print_problems(error)
        sys.exit(2)


def attempt(
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
    ranks = forks.start_ranks(job, [log] * num_ranks, folder, hangs, settings)
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


def outcome(out: Path) -> Outcome:
    """Return what an evaluation has recorded."""
    record = json.loads((out / 'results.json').read_text())
    metrics = {key: value for key, value in record['metrics'].items() if not key.startswith('gauntlet/seconds')}
    return metrics, {path.name: path.read_bytes() for path in sorted((out / 'samples').iterdir())}


def journal_lines(out: Path) -> list[bytes]:
    """Return all lines of the journal."""
    return [line for path in sorted((out / 'journal').glob('*')) for line in path.read_bytes().splitlines(True)]
