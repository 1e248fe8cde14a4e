"""Evaluations that are killed and go on: with any number of ranks they end as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import tiny
from attempts import Attempt, journal_lines, outcome, said

HERE = Path(__file__).parent


@pytest.fixture(scope='module')
def undisturbed(folder: Path, attempt: Attempt) -> tuple[dict[str, float], dict[str, bytes]]:
    """What an evaluation finds that nobody kills."""
    assert attempt(folder / 'undisturbed', 1) == [0], said(folder)
    assert not (folder / 'undisturbed' / 'journal').exists()
    return outcome(folder / 'undisturbed')


@pytest.fixture(scope='module')
def half_done(folder: Path, attempt: Attempt) -> Path:
    """An evaluation that was killed when some items were finished."""
    assert attempt(folder / 'half', 1, lines=100) == [-9], said(folder)
    assert 100 <= len(journal_lines(folder / 'half')) < 600
    return folder / 'half'


@pytest.mark.slow
def test_killed_at_twenty_moments_and_resumed_on_other_ranks_it_ends_byte_for_byte_the_same(
    folder: Path, attempt: Attempt, undisturbed
):
    draw = random.Random(20)
    kills = 0
    while kills < 20:
        out = folder / 'out'
        shutil.rmtree(out, ignore_errors=True)
        lines = []
        for _ in range(4):
            attempt(out, draw.choice([1, 2, 3]), draw.uniform(0.5, 5))
            if (out / 'results.json').exists():
                break
            lines.append(len(journal_lines(out)))
            kills += 1
        assert lines == sorted(lines)  # nothing that was finished is lost
        num_ranks = draw.choice([1, 2, 3])
        assert attempt(out, num_ranks) == [0] * num_ranks, said(folder)
        assert outcome(out) == undisturbed
        assert not (out / 'journal').exists()


def test_an_evaluation_that_was_killed_goes_on_where_it_was(
    folder: Path, attempt: Attempt, half_done: Path, undisturbed
):
    out = Path(shutil.copytree(half_done, folder / 'once'))
    (path,) = (out / 'journal').iterdir()
    path.write_bytes(b''.join(path.read_bytes().splitlines(True)[:-2]))  # so that a batch is there in part
    before = len(journal_lines(out))
    assert attempt(out, 2) == [0, 0], said(folder)
    assert outcome(out) == undisturbed
    timing = json.loads((out / 'results.json').read_text())['timing']
    assert before - 5 <= timing['reused_items'] < before  # but for identities and a torn last line


def test_a_finished_evaluation_is_not_run_again(folder: Path, attempt: Attempt, undisturbed):
    out = folder / 'finished'
    shutil.copytree(folder / 'undisturbed', out)
    assert attempt(out, 1) == [0], said(folder)
    assert outcome(out) == undisturbed
    timing = json.loads((out / 'results.json').read_text())['timing']
    assert timing['reused_items'] == undisturbed[0]['gauntlet/items']


@pytest.mark.slow
def test_a_torn_last_line_is_dropped_and_a_damaged_one_named(
    folder: Path, attempt: Attempt, half_done: Path, undisturbed
):
    out = Path(shutil.copytree(half_done, folder / 'damaged'))
    (path,) = (out / 'journal').iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    lines = path.read_bytes().splitlines(True)
    shutil.copytree(out, folder / 'torn')
    assert attempt(folder / 'torn', 1) == [0], said(folder)
    assert outcome(folder / 'torn') == undisturbed
    path.write_bytes(b''.join([*lines[:4], lines[4].replace(b'"credit": ', b'"credit":  '), *lines[5:]]))
    assert attempt(out, 2) == [2, 2]
    assert f'{path}:5: is damaged' in said(folder) and '--repair-journal' in said(folder)
    assert attempt(out, 1, repair_journal='true') == [0], said(folder)
    assert outcome(out) == undisturbed


@pytest.mark.parametrize(
    ('change', 'named'),
    [
        ('model', 'model '),
        ('max_seq_len', 'max_seq_len 128 (now 100)'),
        ('semantics', 'semantics corrected (now reference)'),
        ('tokens_per_batch', 'tokens_per_batch 120 (now 200)'),
        ('subset_items', 'items '),
    ],
)
def test_a_journal_of_another_model_or_of_other_settings_is_refused(
    folder: Path, attempt: Attempt, half_done: Path, change: str, named: str, tmp_path: Path
):
    out = Path(shutil.copytree(half_done, tmp_path / 'other'))
    values = {'max_seq_len': 100, 'semantics': 'reference', 'tokens_per_batch': 200, 'subset_items': 3}
    if change == 'model':
        shutil.move(folder / 'model', folder / 'first_model')
        tiny.model(seed=1).save_pretrained(folder / 'model')
        tiny.tokenizer().save_pretrained(folder / 'model')
    start = len(said(folder))
    try:
        before = journal_lines(out)
        assert attempt(out, 1, **{change: values.get(change)}) == [2], said(folder)
        message = said(folder)[start:]
        assert 'is the journal of another evaluation: ' in message and named in message
        assert journal_lines(out) == before  # nothing computed is lost
    finally:
        if change == 'model':
            shutil.rmtree(folder / 'model')
            shutil.move(folder / 'first_model', folder / 'model')
