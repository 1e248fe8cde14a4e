"""An evaluation that hangs ends, and says where it was; one that is told to end does so, and keeps what it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attempts import Attempt, journal_lines, outcome, said

STALLED = 3


def test_a_rank_that_hangs_ends_with_the_place_where_it_was(folder: Path, attempt: Attempt):
    start = len(said(folder))
    assert attempt(folder / 'alone', 1, hangs=0, stall_seconds=2) == [STALLED]
    message = said(folder)[start:]
    assert 'gauntlet: rank 0: no progress for 2 s (stall_seconds); at step ' in message
    assert ' items of sums/' in message and ': sums/' in message and ' row ' in message
    assert 'in score_or_hang' in message and 'thread MainThread:' in message
    done = len(journal_lines(folder / 'alone'))
    assert done > 1
    assert attempt(folder / 'alone', 1) == [0], said(folder)  # what was finished is not lost
    assert json.loads((folder / 'alone/results.json').read_text())['timing']['reused_items'] == done - 1


@pytest.mark.parametrize('hanging', [0, 1])
def test_where_one_rank_hangs_each_says_where_it_is(folder: Path, attempt: Attempt, hanging: int):
    start = len(said(folder))
    assert attempt(folder / f'both_{hanging}', 2, hangs=hanging, stall_seconds=2) == [STALLED, STALLED]
    message = said(folder)[start:]
    assert 'gauntlet: rank 0: ' in message and 'gauntlet: rank 1: ' in message
    assert message.count('in score_or_hang') == 1 and message.count('thread MainThread:') == 2


def test_a_thread_that_keeps_pythons_lock_is_ended_as_well(folder: Path, attempt: Attempt):
    start = len(said(folder))
    assert attempt(folder / 'locked', 1, hangs=0, how='holding', stall_seconds=2) == [1]
    assert 'in score_or_hang' in said(folder)[start:]


def test_without_a_limit_nothing_is_ended(folder: Path, attempt: Attempt):
    assert attempt(folder / 'patient', 1, seconds=8, hangs=0, stall_seconds=None) == [-9]


@pytest.fixture(scope='module')
def whole(folder: Path, attempt: Attempt) -> tuple[dict[str, float], dict[str, bytes]]:
    """What an evaluation finds that nobody ends."""
    assert attempt(folder / 'whole', 1) == [0], said(folder)
    return outcome(folder / 'whole')


@pytest.mark.parametrize('num_ranks', [1, 2])
def test_sigterm_ends_with_its_status_and_what_is_finished_is_used_again(
    folder: Path, attempt: Attempt, whole: tuple[dict[str, float], dict[str, bytes]], num_ranks: int
):
    out = folder / f'told_{num_ranks}'
    assert attempt(out, num_ranks, lines=60, signal='SIGTERM') == [143] * num_ranks, said(folder)
    done = len(journal_lines(out))
    assert done >= 60
    assert attempt(out, 1) == [0], said(folder)
    assert outcome(out) == whole
    reused = json.loads((out / 'results.json').read_text())['timing']['reused_items']
    assert done - 2 * num_ranks <= reused < done
