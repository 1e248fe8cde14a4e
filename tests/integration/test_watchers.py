"""Watchers as processes: beside a training, several on one folder, killed, ended, and on two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from attempts import journal_lines, outcome
from paths import ROOT
from watch_worker import start

HERE = Path(__file__).parent
PATIENCE = 240  # seconds that something may take on a busy machine
SUMS = [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(300)]
QUICK = ('--poll', '0.2s', '--settle', '0.3s')


def environment() -> dict[str, str]:
    return {
        **os.environ,
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': os.pathsep.join([str(HERE), str(HERE.parent), str(ROOT)]),
    }


@pytest.fixture(scope='module', autouse=True)
def forks() -> Iterator[None]:
    """Have the process that jobs are forks of import from the folders that tests import from."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        yield


def status_of(process: Any) -> int:
    """Return the exit status of a job, negative if a signal ended it."""
    process.join(PATIENCE)
    assert process.exitcode is not None, 'it does not end'
    return int(process.exitcode)


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of eight batches with a checkpoint every other one, all evaluated by the callback."""
    folder = tmp_path_factory.mktemp('trained')
    write_tasks(folder)
    assert status_of(start('train', folder / 'train.log', folder, 8, 0)) == 0, said(folder / 'train.log')
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """The same tasks, and no checkpoints yet."""
    for path in trained.glob('*.*'):
        shutil.copy(path, tmp_path)
    return tmp_path


def write_tasks(folder: Path) -> None:
    """Several hundred items."""
    tiny.write_tasks(folder)
    (folder / 'sums.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in SUMS))


def words(folder: Path, *more: Any) -> list[Any]:
    """A watch of what is below a folder."""
    tasks = ['--tasks', folder / 'tasks.yaml', '--gauntlet', folder / 'gauntlet.yaml', '--data-root', folder]
    small = ['--tokens-per-batch', '120', '--device', 'cpu']
    return [folder / 'checkpoints', *tasks, *small, '--out', folder / 'watched', *QUICK, *more]


def said(log: Path) -> str:
    return log.read_text()[-3000:] if log.exists() else ''


def until(condition: Callable[[], bool], log: Path) -> None:
    """Waits for something that must come."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, said(log)
        time.sleep(0.02)


def claims(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the claim on each checkpoint."""
    found = {}
    for path in sorted((folder / 'checkpoints/.gauntlet').glob('*/*.json')):
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            claim = json.loads(path.read_text())
            found[claim['checkpoint']] = claim
    return found


def states(folder: Path) -> dict[str, str]:
    return {name: claim['state'] for name, claim in claims(folder).items()}


def all_done(folder: Path, *batches: int) -> bool:
    return states(folder) == {f'ep0-ba{batch}-rank0.pt': 'done' for batch in batches}


def assert_same_as_training(watched: Path, training: Path, *batches: int) -> None:
    """Metrics and samples, and nothing else in the folder of records."""
    assert sorted(path.name for path in watched.iterdir()) == sorted(f'ba{batch}' for batch in batches)
    for batch in batches:
        assert outcome(watched / f'ba{batch}') == outcome(training / f'ba{batch}')
        record = json.loads((watched / f'ba{batch}/results.json').read_text())
        assert record['training']['batch'] == batch
        assert Path(record['training']['checkpoint']).name == f'ep0-ba{batch}-rank0.pt'


def test_beside_a_training_every_checkpoint_is_evaluated_as_the_callback_does(folder: Path):
    log = folder / 'watch.log'
    watcher = start('watch', log, *words(folder))  # before there is anything
    training = start('train', folder / 'train.log', folder, 8, 0.2)
    assert status_of(training) == 0, said(folder / 'train.log')
    until(lambda: all_done(folder, 2, 4, 6, 8), log)
    watcher.terminate()
    assert status_of(watcher) == 143, said(log)
    assert_same_as_training(folder / 'watched', folder / 'training', 2, 4, 6, 8)
    text = log.read_text()
    assert 'damaged' not in text and 'deleted' not in text


def test_two_watchers_share_the_work_and_evaluate_each_checkpoint_once(trained: Path, folder: Path):
    logs = [folder / 'one.log', folder / 'two.log']
    watchers = [start('watch', log, *words(folder)) for log in logs]
    for log in logs:
        until(lambda log=log: 'watching' in said(log), log)
    shutil.copytree(trained / 'checkpoints', folder / 'checkpoints', symlinks=True, dirs_exist_ok=True)
    until(lambda: all_done(folder, 2, 4, 6, 8), logs[0])
    for watcher in watchers:
        watcher.terminate()
    assert [status_of(watcher) for watcher in watchers] == [143, 143]
    assert_same_as_training(folder / 'watched', trained / 'training', 2, 4, 6, 8)
    owners = {int(claim['owner'].rpartition(':')[2]) for claim in claims(folder).values()}
    assert owners == {watcher.pid for watcher in watchers}
    evaluations = [line for log in logs for line in log.read_text().splitlines() if ': 614 items in ' in line]
    assert len(evaluations) == 4


def half_done(folder: Path, trained: Path) -> tuple[Any, Path]:
    """A watcher that is in the middle of its first evaluation, and its log."""
    shutil.copytree(trained / 'checkpoints', folder / 'checkpoints', symlinks=True)
    log = folder / 'first.log'
    watcher = start('watch', log, *words(folder, '--claim-expires', '3s'))
    out = folder / 'watched/ba8'
    until(lambda: len(journal_lines(out)) >= 100, log)
    return watcher, log


def reused(folder: Path, batch: int) -> int:
    return int(json.loads((folder / f'watched/ba{batch}/results.json').read_text())['timing']['reused_items'])


def test_what_a_killed_watcher_was_at_is_taken_over_when_its_claim_expires(trained: Path, folder: Path):
    watcher, log = half_done(folder, trained)
    watcher.kill()
    assert status_of(watcher) == -9, said(log)
    assert states(folder) == {'ep0-ba8-rank0.pt': 'running'}
    num_lines = len(journal_lines(folder / 'watched/ba8'))
    log = folder / 'second.log'
    assert status_of(start('watch', log, *words(folder, '--once'))) == 0, said(log)
    assert f':{watcher.pid}' in log.read_text().partition('taken over from ')[2].partition('\n')[0]
    assert all_done(folder, 2, 4, 6, 8)
    assert num_lines - 5 <= reused(folder, 8) < num_lines  # but for identities and a torn last line
    assert_same_as_training(folder / 'watched', trained / 'training', 2, 4, 6, 8)
    order = [line.split()[2] for line in log.read_text().splitlines() if ' running by ' in line]
    assert order.index('ep0-ba6-rank0.pt:') < order.index('ep0-ba4-rank0.pt:') < order.index('ep0-ba2-rank0.pt:')


@pytest.mark.parametrize(
    ('number', 'status'), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_watcher_that_is_told_to_end_leaves_its_checkpoint_to_others_at_once(
    trained: Path, folder: Path, number: int, status: int
):
    watcher, log = half_done(folder, trained)
    os.kill(watcher.pid, number)
    assert status_of(watcher) == status, said(log)
    assert 'ep0-ba8-rank0.pt: released; what is finished is kept' in log.read_text()
    assert states(folder) == {'ep0-ba8-rank0.pt': 'released'}
    num_lines = len(journal_lines(folder / 'watched/ba8'))
    log = folder / 'second.log'
    assert status_of(start('watch', log, *words(folder, '--once'))) == 0, said(log)
    assert num_lines - 5 <= reused(folder, 8) < num_lines
    assert outcome(folder / 'watched/ba8') == outcome(trained / 'training/ba8')


def launched(folder: Path, *more: Any) -> list[str]:
    """The command of a watch on two ranks."""
    launcher = str(Path(sys.executable).parent / 'composer')
    command = [launcher, '-n', '2', '--stderr', str(folder / 'rank{rank}.txt'), '-m', 'llmfoundry_gauntlet', 'watch']
    return command + [str(word) for word in words(folder, *more)]


@pytest.mark.slow
def test_two_ranks_that_are_told_to_end_do_so_together(trained: Path, folder: Path):
    rows = [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(6000)]
    (folder / 'sums.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    shutil.copytree(trained / 'checkpoints', folder / 'checkpoints', symlinks=True)
    log = folder / 'launcher.log'
    with log.open('w') as file:
        process = subprocess.Popen(launched(folder), stdout=file, stderr=file, env=environment())
        until(lambda: len(journal_lines(folder / 'watched/ba8')) >= 100, log)
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 143, said(log)
    assert states(folder) == {'ep0-ba8-rank0.pt': 'released'}
    assert len(journal_lines(folder / 'watched/ba8')) >= 100


@pytest.mark.slow
def test_on_two_ranks_the_numbers_are_the_same_and_only_the_first_speaks(trained: Path, folder: Path):
    shutil.copytree(trained / 'checkpoints', folder / 'checkpoints', symlinks=True)
    (folder / 'checkpoints/ep0-ba9-rank0.pt').write_bytes(b'torn')
    done = subprocess.run(launched(folder, '--once'), capture_output=True, text=True, env=environment())
    assert done.returncode == 1, done.stderr[-3000:]
    assert_same_as_training(folder / 'watched', trained / 'training', 2, 4, 6, 8)
    assert done.stdout.count('Checkpoints') == 1 and 'damaged' in done.stdout
    assert ' done by ' in done.stderr
    assert ' done by ' not in (folder / 'rank1.txt').read_text()
