"""Evaluations that are killed and resumed, on any number of ranks, end with the same results."""

from __future__ import annotations

import json
import random
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tiny
from attempts import Attempt, journal_lines, outcome, said


@pytest.fixture(scope='module')
def undisturbed(folder: Path, attempt: Attempt) -> tuple[dict[str, float], dict[str, bytes]]:
    """Return the outcome of an evaluation that is not killed."""
    assert attempt(folder / 'undisturbed', 1) == [0], said(folder)
    assert not (folder / 'undisturbed' / 'journal').exists()
    return outcome(folder / 'undisturbed')


@pytest.fixture(scope='module')
def half_done(folder: Path, attempt: Attempt) -> Path:
    """Return the folder of an evaluation that was killed after some items."""
    assert attempt(folder / 'half', 1, lines=100) == [-9], said(folder)
    assert 100 <= len(journal_lines(folder / 'half')) < 600
    return folder / 'half'


@pytest.mark.slow
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
    timing = json.loads((out / 'results.json').read_text())['timing']
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
    record = json.loads((out / 'results.json').read_text())
    assert record['timing']['reused_items'] == undisturbed[0]['gauntlet/items']
    assert record['config']['save_folder'] == str(out)


@pytest.mark.slow
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
