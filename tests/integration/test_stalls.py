"""An evaluation that hangs is ended with its stack traces; SIGTERM ends one that keeps its finished items."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from attempts import Attempt, journal_lines, outcome, said

STALLED = 3


def test_a_hanging_rank_ends_with_its_stack_trace(folder: Path, attempt: Attempt):
    start = len(said(folder))
    assert attempt(folder / 'alone', 1, hangs=(0, 'asleep'), stall_seconds=2) == [STALLED]
    message = said(folder)[start:]
    assert all(fact in message for fact in ('rank 0: ', '2 s (stall_seconds)', ' step ', 'sums/', ' row '))
    assert 'in score_or_hang' in message and 'thread MainThread:' in message
    done = len(journal_lines(folder / 'alone'))
    assert done > 1
    assert attempt(folder / 'alone', 1) == [0], said(folder)  # finished items are reused
    assert json.loads((folder / 'alone/results.json').read_text())['timing']['reused_items'] == done - 1


@pytest.mark.parametrize('hanging', [0, 1])
def test_if_one_rank_hangs_all_ranks_print_stack_traces(folder: Path, attempt: Attempt, hanging: int):
    start = len(said(folder))
    assert attempt(folder / f'both_{hanging}', 2, hangs=(hanging, 'asleep'), stall_seconds=2) == [STALLED, STALLED]
    message = said(folder)[start:]
    assert 'gauntlet: rank 0: ' in message and 'gauntlet: rank 1: ' in message
    assert message.count('in score_or_hang') == 1 and message.count('thread MainThread:') == 2


def test_a_thread_that_holds_the_gil_is_ended_too(folder: Path, attempt: Attempt):
    start = len(said(folder))
    assert attempt(folder / 'locked', 1, hangs=(0, 'holding'), stall_seconds=2) == [1]
    assert 'in score_or_hang' in said(folder)[start:]


def test_without_stall_seconds_nothing_is_ended(folder: Path, attempt: Attempt):
    assert attempt(folder / 'patient', 1, seconds=8, hangs=(0, 'asleep'), stall_seconds=None) == [-9]


@pytest.fixture(scope='module')
def whole(folder: Path, attempt: Attempt) -> tuple[dict[str, float], dict[str, bytes]]:
    """Return the outcome of an evaluation that is not ended."""
    assert attempt(folder / 'whole', 1) == [0], said(folder)
    return outcome(folder / 'whole')


@pytest.mark.parametrize('num_ranks', [1, 2])
def test_sigterm_has_its_exit_status_and_finished_items_are_reused(
    folder: Path, attempt: Attempt, whole: tuple[dict[str, float], dict[str, bytes]], num_ranks: int
):
    out = folder / f'told_{num_ranks}'
    assert attempt(out, num_ranks, lines=60, kill=signal.SIGTERM) == [143] * num_ranks, said(folder)
    done = len(journal_lines(out))
    assert done >= 60
    assert attempt(out, 1) == [0], said(folder)
    assert outcome(out) == whole
    reused = json.loads((out / 'results.json').read_text())['timing']['reused_items']
    assert done - 2 * num_ranks <= reused < done
