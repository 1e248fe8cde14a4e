"""Evaluations that are killed and go on: with any number of ranks they end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
from paths import ROOT

HERE = Path(__file__).parent
UNTIL_DONE = 120  # seconds
NEVER = 1_000_000  # lines
SUMS = [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(300)]

Attempt = Callable[..., list[int]]


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of several hundred items and a saved model."""
    folder = tmp_path_factory.mktemp('resume')
    tiny.write_tasks(folder, replies=True)
    (folder / 'sums.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in SUMS))
    tiny.model().save_pretrained(folder / 'model')
    tiny.tokenizer().save_pretrained(folder / 'model')
    return folder


@pytest.fixture(scope='module')
def attempt(folder: Path) -> Iterator[Attempt]:
    """Evaluates on so many ranks, killed after so many seconds or lines in the journal; the exit statuses."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join([str(HERE), str(ROOT)])}
    with (folder / 'errors.txt').open('w') as errors:
        worker = subprocess.Popen(
            [sys.executable, str(HERE / 'resume_worker.py'), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )

        def attempt(
            out: Path, num_ranks: int, seconds: float = UNTIL_DONE, lines: int = NEVER, **settings: object
        ) -> list[int]:
            settings = {'out': out, 'tokens_per_batch': 120, 'resume': 'true', **settings}
            words = [f'{key}={value}' for key, value in settings.items() if value is not None]
            assert worker.stdin is not None and worker.stdout is not None
            print(num_ranks, seconds, lines, *words, file=worker.stdin, flush=True)
            while True:  # the evaluation may print as well
                line = worker.stdout.readline()
                assert line, (folder / 'errors.txt').read_text()[-2000:]
                if all(word.lstrip('-').isdigit() for word in line.split()):
                    return [int(word) for word in line.split()]

        yield attempt
        with worker:  # closes its pipes
            worker.kill()


def said(folder: Path) -> str:
    """What all attempts have written to standard error."""
    return (folder / 'errors.txt').read_text()


def outcome(out: Path) -> tuple[dict[str, float], dict[str, bytes]]:
    """Metrics without timings, and every samples file."""
    record = json.loads((out / 'results.json').read_text())
    metrics = {key: value for key, value in record['metrics'].items() if not key.startswith('gauntlet/seconds')}
    return metrics, {path.name: path.read_bytes() for path in sorted((out / 'samples').iterdir())}


@pytest.fixture(scope='module')
def undisturbed(folder: Path, attempt: Attempt) -> tuple[dict[str, float], dict[str, bytes]]:
    """What an evaluation finds that nobody kills."""
    assert attempt(folder / 'undisturbed', 1) == [0], said(folder)
    assert not (folder / 'undisturbed' / 'journal').exists()
    return outcome(folder / 'undisturbed')


def journal_lines(out: Path) -> list[bytes]:
    """All lines of the journal."""
    return [line for path in sorted((out / 'journal').glob('*')) for line in path.read_bytes().splitlines(True)]


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


@pytest.mark.slow
def test_an_evaluation_in_training_goes_on_when_the_job_comes_back_to_its_batch(tmp_path: Path):
    """Composer resumes at the last checkpoint, which is before the evaluation that was killed."""

    def train(folder: Path, mode: str) -> int:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, str(HERE / 'train_resume_worker.py'), str(folder), mode]
        environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join([str(HERE), str(ROOT)])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, -9), done.stderr[-3000:]
        return done.returncode

    assert train(tmp_path / 'whole', 'whole') == 0
    assert train(tmp_path / 'killed', 'kill') == -9
    out = tmp_path / 'killed/records/ba4'
    lines = len(journal_lines(out))
    assert lines > 2 and not (out / 'results.json').exists()
    assert train(tmp_path / 'killed', 'whole') == 0
    assert outcome(out) == outcome(tmp_path / 'whole/records/ba4')
    assert json.loads((out / 'results.json').read_text())['timing']['reused_items'] == lines - 1
    earlier = json.loads((tmp_path / 'killed/records/ba2/results.json').read_text())
    assert earlier['timing']['reused_items'] == 0
