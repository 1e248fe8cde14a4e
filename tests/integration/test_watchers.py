"""Watchers as processes: next to a training, several on one folder, killed, terminated, and on two ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from forks import PATIENCE, start, start_ranks, statuses, tail_of
from tiny import journal_lines, outcome, record
from watched import options_of, train_slowly, watch

ALL = (2, 4, 6, 8)


def until(condition: Callable[[], bool], log: Path) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, tail_of(log)
        time.sleep(0.02)


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for eight batches with a checkpoint every other batch, next to two watchers that started before."""
    folder = tmp_path_factory.mktemp('trained')
    tiny.write_tasks(folder)
    tiny.write_rows(folder / 'sums.jsonl', [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(150)])
    logs = [folder / 'one.log', folder / 'two.log']
    watchers = [start(watch, log, *watch_arguments(folder)) for log in logs]
    assert statuses([start(train_slowly, folder / 'train.log', folder, 0.2)], folder / 'train.log') == [0]
    until(lambda: all_done(folder), logs[0])
    for watcher, log in zip(watchers, logs, strict=True):
        watcher.terminate()
        assert statuses([watcher], log) == [143], tail_of(log)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """Return a folder with the same tasks and checkpoints."""
    for path in trained.glob('*.*'):
        shutil.copy(path, tmp_path)
    others = shutil.ignore_patterns('.gauntlet')
    shutil.copytree(trained / 'checkpoints', tmp_path / 'checkpoints', symlinks=True, ignore=others)
    return tmp_path


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


def test_two_watchers_next_to_a_training_give_the_results_of_the_callback_each_checkpoint_once(trained: Path):
    assert_same_as_training(trained / 'watched', trained / 'training')
    logs = [(trained / name).read_text() for name in ('one.log', 'two.log')]
    assert 'damaged' not in ''.join(logs)
    evaluations = [[line for line in log.splitlines() if ': 314 items in ' in line] for log in logs]
    assert sum(map(len, evaluations)) == 4 and all(evaluations)
    owners = {claim['owner'] for claim in claims(trained).values()}
    assert len(claims(trained)) == 4 and len(owners) == 2


@pytest.mark.parametrize(('number', 'status'), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_another_watcher_resumes_the_evaluation_of_one_that_ended(
    trained: Path, folder: Path, number: int, status: int
):
    """It resumes at once after a signal that can be caught, and when the claim has expired after SIGKILL."""
    log, out = folder / 'first.log', folder / 'watched/ba8'
    watcher = start(watch, log, *watch_arguments(folder, '--claim-expires', '3s'))
    until(lambda: len(journal_lines(out)) >= 50, log)
    os.kill(watcher.pid, number)
    assert statuses([watcher], log) == [status], tail_of(log)
    is_killed = number == signal.SIGKILL
    (claim,) = claims(folder).values()
    assert bool(claim['expires']) == is_killed
    num_lines = len(journal_lines(out))
    log = folder / 'second.log'
    assert statuses([start(watch, log, *watch_arguments(folder, '--once'))], log) == [0], tail_of(log)
    assert (f':{watcher.pid}' in log.read_text().partition('taken over from ')[2]) == is_killed
    # Identity lines and an incomplete last line do not count.
    assert num_lines - 5 <= record(out)['timing']['reused_items'] < num_lines
    assert all_done(folder)
    assert_same_as_training(folder / 'watched', trained / 'training')
    order = [line.split()[2] for line in log.read_text().splitlines() if ' running by ' in line]
    assert [name for name in order if 'ba8' not in name] == [f'ep0-ba{batch}-rank0.pt:' for batch in (6, 4, 2)]


def test_two_ranks_exit_on_sigterm_and_then_give_the_same_results_while_only_rank_0_logs(trained: Path, folder: Path):
    (folder / 'checkpoints/ep0-ba1-rank0.pt').write_bytes(b'torn')
    logs = [folder / f'rank{rank}.txt' for rank in (0, 1)]
    ranks = start_ranks(watch, logs, *watch_arguments(folder))
    until(lambda: len(journal_lines(folder / 'watched/ba8')) >= 50, logs[0])
    for rank in ranks:
        rank.terminate()
    assert statuses(ranks, logs[0]) == [143, 143]
    assert [claim['expires'] for claim in claims(folder).values()] == [0]
    ranks = start_ranks(watch, logs, *watch_arguments(folder, '--once'))
    assert statuses(ranks, logs[0]) == [1, 0]
    assert record(folder / 'watched/ba8')['timing']['reused_items'] >= 45
    assert_same_as_training(folder / 'watched', trained / 'training')
    assert logs[0].read_text().count('\nep0-ba1-rank0.pt: damaged') == 1
    assert 'ep0-ba2-rank0.pt: done ' in logs[0].read_text() and 'ep0-' not in logs[1].read_text()
