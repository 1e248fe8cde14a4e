"""Evaluations that are killed, hang or are told to stop end with the same results on any number of ranks."""

from __future__ import annotations

import json
import random
import shutil
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tiny
from attempts import Attempt, journal_lines, outcome, said
from programs import can_confine
from watched import record

STALLED = 3


@pytest.fixture(scope='module')
def half_done(folder: Path, attempt: Attempt) -> Path:
    """Return the folder of an evaluation that was killed after some items."""
    assert attempt(folder / 'half', 1, lines=100) == [-9], said(folder)
    assert 100 <= len(journal_lines(folder / 'half')) < 600
    return folder / 'half'


@pytest.mark.parametrize('num_ranks', [2, pytest.param(3, marks=pytest.mark.long)])
def test_any_number_of_ranks_gives_identical_items_and_metrics(
    folder: Path, attempt: Attempt, undisturbed, num_ranks: int
):
    """Mutations: a rank's last batch is dropped; results are averaged per rank."""
    num_programs = 6 * 3 if can_confine() else 0
    metrics, samples = undisturbed
    assert metrics['gauntlet/items'] == 2 * (300 + 5 + 2) + 2 * 40 + num_programs
    assert len(samples) == 6 + 2 + bool(num_programs)
    assert len({json.loads(line)['num_tokens'][0] for line in samples['drawn_1-shot.jsonl'].splitlines()}) > 3
    out = folder / f'out_{num_ranks}'
    assert attempt(out, num_ranks, resume=False) == [0] * num_ranks, said(folder)
    assert outcome(out) == undisturbed
    assert record(out)['environment']['num_ranks'] == num_ranks


def test_killed_at_twenty_moments_and_resumed_on_other_ranks_results_are_identical(
    folder: Path, attempt: Attempt, undisturbed
):
    """Half of the moments are times, which may come before the first item; the others are lines of the journal."""
    draw = random.Random(20)
    kills = 0
    while kills < 20:
        out = folder / 'out'
        shutil.rmtree(out, ignore_errors=True)
        lines = []
        for _ in range(5):
            if draw.random() < 0.5:
                attempt(out, draw.choice([1, 2, 3]), seconds=draw.uniform(0.3, 2.5))
            else:
                attempt(out, draw.choice([1, 2]), lines=draw.randrange(600))
            if (out / 'results.json').exists():
                break
            lines.append(len(journal_lines(out)))
            kills += 1
        assert lines == sorted(lines)  # nothing that was finished is lost
        num_ranks = draw.choice([1, 2, 3])
        assert attempt(out, num_ranks) == [0] * num_ranks, said(folder)
        assert outcome(out) == undisturbed
        assert not (out / 'journal').exists()


def test_a_killed_evaluation_reuses_its_items(folder: Path, attempt: Attempt, half_done: Path, undisturbed):
    out = Path(shutil.copytree(half_done, folder / 'once'))
    (path,) = (out / 'journal').iterdir()
    path.write_bytes(b''.join(path.read_bytes().splitlines(True)[:-2]))  # so that part of a batch is finished
    before = len(journal_lines(out))
    earlier = json.loads(b'{' + journal_lines(out)[-1].partition(b'{')[2])['seconds']
    assert attempt(out, 2) == [0, 0], said(folder)
    assert outcome(out) == undisturbed
    timing = record(out)['timing']
    assert timing['seconds'] == pytest.approx(sum(timing['tasks'].values()) + earlier)  # of both attempts
    started, finished = (datetime.fromisoformat(timing[name]) for name in ('started', 'finished'))
    assert (finished - started).total_seconds() > timing['seconds'] - 1
    assert before - 5 <= timing['reused_items'] < before  # without identities and a torn last line


def test_a_finished_evaluation_does_not_run_again_and_its_files_stay(folder: Path, attempt: Attempt, undisturbed):
    out = folder / 'undisturbed'

    def files() -> dict[Path, tuple[int, bytes]]:
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob('*') if path.is_file()}

    before = files()
    assert attempt(out, 1) == [0], said(folder)
    assert files() == before and outcome(out) == undisturbed


def test_a_finished_evaluation_in_another_place_is_written_again_from_its_items(
    folder: Path, attempt: Attempt, undisturbed
):
    out = Path(shutil.copytree(folder / 'undisturbed', folder / 'finished'))
    assert attempt(out, 1) == [0], said(folder)
    assert outcome(out) == undisturbed
    assert record(out)['timing']['reused_items'] == undisturbed[0]['gauntlet/items']
    assert record(out)['config']['save_folder'] == str(out)


def test_a_damaged_line_is_an_error_and_repair_drops_it(folder: Path, attempt: Attempt, half_done: Path, undisturbed):
    out = Path(shutil.copytree(half_done, folder / 'damaged'))
    (path,) = (out / 'journal').iterdir()
    lines = path.read_bytes()[:-7].splitlines(True)  # the last line is torn
    path.write_bytes(b''.join([*lines[:4], lines[4].replace(b'"score": ', b'"score":  '), *lines[5:]]))
    assert attempt(out, 2) == [2, 2]
    assert f'{path}:5: ' in said(folder) and '--repair-journal' in said(folder)
    assert attempt(out, 1, repair_journal=True) == [0], said(folder)
    assert outcome(out) == undisturbed


@pytest.mark.parametrize(
    ('change', 'value', 'named'),
    [
        ('model', 'another_model', 'model '),
        ('max_seq_len', 100, 'max_seq_len 128 (now 100)'),
        ('semantics', 'reference', 'semantics corrected (now reference)'),
        ('tokens_per_batch', 200, 'tokens_per_batch 120 (now 200)'),
        ('subset_items', 3, 'items '),
    ],
)
def test_a_journal_of_another_model_or_other_settings_is_an_error(
    folder: Path, attempt: Attempt, half_done: Path, change: str, value: Any, named: str, tmp_path: Path
):
    out = Path(shutil.copytree(half_done, tmp_path / 'other'))
    if change == 'model':
        value = tiny.save(tiny.model(seed=1), tmp_path / value)
    start, before = len(said(folder)), journal_lines(out)
    assert attempt(out, 1, **{change: value}) == [2], said(folder)
    message = said(folder)[start:]
    assert str(out) in message and named in message
    assert journal_lines(out) == before  # no result is lost


@pytest.mark.parametrize(('num_ranks', 'hanging'), [(1, 0), (2, 0), (2, 1)])
def test_if_a_rank_hangs_all_end_with_stack_traces_and_finished_items_are_reused(
    folder: Path, attempt: Attempt, num_ranks: int, hanging: int
):
    start, out = len(said(folder)), folder / f'hanging_{num_ranks}_{hanging}'
    assert attempt(out, num_ranks, hangs=(hanging, 'asleep'), stall_seconds=2) == [STALLED] * num_ranks
    message = said(folder)[start:]
    assert all(f'gauntlet: rank {rank}: ' in message for rank in range(num_ranks))
    assert message.count('in score_or_hang') == 1 and message.count('thread MainThread:') == num_ranks
    if num_ranks == 1:
        assert all(fact in message for fact in ('2 s (stall_seconds)', ' step ', 'sums/', ' row '))
        done = len(journal_lines(out))
        assert done > 1
        assert attempt(out, 1) == [0], said(folder)
        assert record(out)['timing']['reused_items'] == done - 1


def test_a_thread_that_holds_the_gil_is_ended_too(folder: Path, attempt: Attempt):
    start = len(said(folder))
    assert attempt(folder / 'locked', 1, hangs=(0, 'holding'), stall_seconds=2) == [1]
    assert 'in score_or_hang' in said(folder)[start:]


def test_without_stall_seconds_nothing_is_ended(folder: Path, attempt: Attempt):
    assert attempt(folder / 'patient', 1, seconds=8, hangs=(0, 'asleep'), stall_seconds=None) == [-9]


@pytest.mark.parametrize('num_ranks', [1, 2])
def test_sigterm_has_its_exit_status_and_finished_items_are_reused(
    folder: Path, attempt: Attempt, undisturbed, num_ranks: int
):
    out = folder / f'told_{num_ranks}'
    assert attempt(out, num_ranks, lines=60, kill=signal.SIGTERM) == [143] * num_ranks, said(folder)
    done = len(journal_lines(out))
    assert done >= 60
    assert attempt(out, 1) == [0], said(folder)
    assert outcome(out) == undisturbed
    assert done - 2 * num_ranks <= record(out)['timing']['reused_items'] < done
