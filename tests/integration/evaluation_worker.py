"""Evaluate the saved model of a folder; optionally hang."""

from __future__ import annotations

import ctypes
import itertools
import logging
import sys
import time
from pathlib import Path
from typing import Any

import tiny

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.composer import progress
from llmfoundry_gauntlet.composer.loop import EvaluationLoader
from llmfoundry_gauntlet.errors import GauntletError, print_problems


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


def main(folder: Path, hangs: tuple[int, str] | None, settings: dict[str, Any]) -> None:
    """Evaluate the tasks of a folder; `hangs` is the rank that hangs, and how."""
    logging.basicConfig(format='%(message)s')
    if hangs is not None and hangs[0] == progress.dist.get_global_rank():
        hang(hangs[1])
    try:
        evaluate(**{'model': folder / 'model', 'device': 'cpu', **tiny.settings_of(folder), **settings})
    except GauntletError as error:
        print_problems(error)
        sys.exit(2)
