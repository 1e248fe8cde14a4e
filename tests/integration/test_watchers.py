"""Watchers as processes: next to a training, several on one folder, killed, terminated, and on two ranks."""

from __future__ import annotations

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
from watched import options_of, record, start

HERE = Path(__file__).parent
PATIENCE = 240  # seconds, generous for a busy machine
PATHS = os.pathsep.join(map(str, (HERE, HERE.parent, ROOT)))
ENVIRONMENT = {'OMP_NUM_THREADS': '1', 'PYTHONPATH': PATHS}
ALL = (2, 4, 6, 8)


@pytest.fixture(scope='module', autouse=True)
def forks() -> Iterator[None]:
    """Give the fork server the import paths of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


def tail_of(log: Path) -> str:
    return log.read_text()[-3000:] if log.exists() else ''


def status_of(process: Any, log: Path) -> int:
    """Wait for a job and return its exit status, negative if it was killed by a signal."""
    process.join(PATIENCE)
    assert process.exitcode is not None, tail_of(log)
    return int(process.exitcode)


def until(condition: Callable[[], bool], log: Path) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, tail_of(log)
        time.sleep(0.02)


def write_sums(folder: Path, number: int) -> None:
    rows = [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(number)]
    (folder / 'sums.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for eight batches with a checkpoint every other batch, each evaluated by the callback."""
    folder = tmp_path_factory.mktemp('trained')
    tiny.write_tasks(folder)
    write_sums(folder, 300)
    assert status_of(start('train', folder / 'train.log', folder, 0), folder / 'train.log') == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """Return a folder with the same tasks and no checkpoints yet."""
    for path in trained.glob('*.*'):
        shutil.copy(path, tmp_path)
    return tmp_path


def copy_checkpoints(trained: Path, folder: Path) -> None:
    shutil.copytree(trained / 'checkpoints', folder / 'checkpoints', symlinks=True, dirs_exist_ok=True)


def watch_arguments(folder: Path, *more: Any) -> list[str]:
    """Return the arguments of a watch of a folder."""
    small = ['--tokens-per-batch', '120', '--device', 'cpu', '--poll', '0.2s', '--settle', '0.3s']
    return [
        str(word) for word in (folder / 'checkpoints', *options_of(folder), *small, '--out', folder / 'watched', *more)
    ]


def claims(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return all claims; those that are being written are empty."""
    paths = (folder / 'checkpoints/.gauntlet').glob('*/*@*.json')
    return {path: json.loads(path.read_text() or '{"owner": "", "expires": 1e12}') for path in paths}


def all_done(folder: Path) -> bool:
    is_done = all((folder / f'watched/ba{batch}/results.json').exists() for batch in ALL)
    return is_done and not any(claim['expires'] > time.time() for claim in claims(folder).values())


def assert_same_as_training(watched: Path, training: Path) -> None:
    """Check that metrics and samples are equal and that there are no other records."""
    assert sorted(path.name for path in watched.iterdir()) == [f'ba{batch}' for batch in ALL]
    for batch in ALL:
        assert outcome(watched / f'ba{batch}') == outcome(training / f'ba{batch}')
        point = record(watched / f'ba{batch}')['training']
        assert point['batch'] == batch and Path(point['checkpoint']).name == f'ep0-ba{batch}-rank0.pt'


def test_a_watcher_next_to_a_training_gives_the_results_of_the_callback(folder: Path):
    log = folder / 'watch.log'
    watcher = start('watch', log, *watch_arguments(folder))  # before the folder exists
    assert status_of(start('train', folder / 'train.log', folder, 0.2), folder / 'train.log') == 0
    until(lambda: all_done(folder), log)
    watcher.terminate()
    assert status_of(watcher, log) == 143, tail_of(log)
    assert_same_as_training(folder / 'watched', folder / 'training')
    assert 'damaged' not in log.read_text()


def test_two_watchers_share_the_work_and_evaluate_each_checkpoint_once(trained: Path, folder: Path):
    logs = [folder / 'one.log', folder / 'two.log']
    watchers = [start('watch', log, *watch_arguments(folder)) for log in logs]
    for log in logs:
        until(lambda log=log: 'watching' in tail_of(log), log)
    copy_checkpoints(trained, folder)
    until(lambda: all_done(folder), logs[0])
    for watcher in watchers:
        watcher.terminate()
    assert [status_of(*pair) for pair in zip(watchers, logs, strict=True)] == [143, 143]
    assert_same_as_training(folder / 'watched', trained / 'training')
    owners = [int(claim['owner'].rpartition(':')[2]) for claim in claims(folder).values()]
    assert set(owners) == {watcher.pid for watcher in watchers} and len(owners) == 4
    evaluations = [line for log in logs for line in log.read_text().splitlines() if ': 614 items in ' in line]
    assert len(evaluations) == 4


@pytest.mark.parametrize(
    ('number', 'status'),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_another_watcher_resumes_the_evaluation_of_one_that_ended(
    trained: Path, folder: Path, number: int, status: int
):
    """It resumes at once after SIGTERM or SIGINT, and when the claim has expired after SIGKILL."""
    copy_checkpoints(trained, folder)
    log, out = folder / 'first.log', folder / 'watched/ba8'
    watcher = start('watch', log, *watch_arguments(folder, '--claim-expires', '3s'))
    until(lambda: len(journal_lines(out)) >= 100, log)
    os.kill(watcher.pid, number)
    assert status_of(watcher, log) == status, tail_of(log)
    is_killed = number == signal.SIGKILL
    (claim,) = claims(folder).values()
    assert bool(claim['expires']) == is_killed
    num_lines = len(journal_lines(out))
    log = folder / 'second.log'
    assert status_of(start('watch', log, *watch_arguments(folder, '--once')), log) == 0, tail_of(log)
    assert (f':{watcher.pid}' in log.read_text().partition('taken over from ')[2]) == is_killed
    # Identity lines and an incomplete last line do not count.
    assert num_lines - 5 <= record(out)['timing']['reused_items'] < num_lines
    assert all_done(folder)
    assert_same_as_training(folder / 'watched', trained / 'training')
    order = [line.split()[2] for line in log.read_text().splitlines() if ' running by ' in line]
    assert [name for name in order if 'ba8' not in name] == [f'ep0-ba{batch}-rank0.pt:' for batch in (6, 4, 2)]


@pytest.mark.slow
def test_two_ranks_exit_on_sigterm_and_then_give_the_same_results_while_only_rank_0_logs(trained: Path, folder: Path):
    copy_checkpoints(trained, folder)
    (folder / 'checkpoints/ep0-ba1-rank0.pt').write_bytes(b'torn')
    log, environment = folder / 'launcher.log', {**os.environ, **ENVIRONMENT}
    launcher = [str(Path(sys.executable).parent / 'composer'), '-n', '2', '--stderr', str(folder / 'rank{rank}.txt')]
    command = [*launcher, '-m', 'llmfoundry_gauntlet', 'watch', *watch_arguments(folder)]
    with log.open('w') as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        until(lambda: len(journal_lines(folder / 'watched/ba8')) >= 100, log)
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 143, tail_of(log)
    assert [claim['expires'] for claim in claims(folder).values()] == [0]
    assert len(journal_lines(folder / 'watched/ba8')) >= 100
    done = subprocess.run([*command, '--once'], capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr[-3000:]
    assert_same_as_training(folder / 'watched', trained / 'training')
    assert done.stdout.count('ep0-ba1-rank0.pt: damaged') == 1
    assert ': done ' in done.stderr
    assert ': done ' not in (folder / 'rank1.txt').read_text()
