"""Evaluations that are killed, hang or are told to stop have the same results, on any number of ranks and two nodes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
from composer.utils import dist
from programs import can_confine
from tiny import finished_items, journal_lines, outcome, record

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.errors import GauntletError, print_problems
from llmfoundry_gauntlet.runtime import watchdog
from llmfoundry_gauntlet.runtime.distributed import global_rank
from llmfoundry_gauntlet.runtime.launcher import Launcher

STALLED = 3


def hang(how: str) -> None:
    """Make every batch from the 5th on hang, asleep or `holding` Python's lock."""
    watchdog.BACKSTOP_SECONDS = 2.0
    run, calls = Launcher.run, itertools.count()

    def run_or_hang(*arguments: object) -> object:
        if next(calls) < 5:
            return run(*arguments)
        if how == 'holding':
            ctypes.PyDLL(None).sleep(1000)  # like a regular expression with catastrophic backtracking
        time.sleep(1000)

    Launcher.run = run_or_hang


def job(folder: Path, hangs: tuple[int, str] | None, settings: dict[str, Any]) -> None:
    """Evaluate the saved model of a folder on its tasks; `hangs` is the rank that hangs, and how."""
    logging.basicConfig(format='%(message)s')
    if hangs is not None and hangs[0] == global_rank():
        hang(hangs[1])
    try:
        evaluate(**{'model': folder / 'model', 'device': 'cpu', **tiny.settings_of(folder), **settings})
    except GauntletError as error:
        print_problems(error)
        sys.exit(2)


def num_lines(out: Path) -> int:
    """Return the number of lines in the journal of an evaluation, which removes it at its end."""
    with contextlib.suppress(OSError):  # the folder may be removed at any moment
        return len(journal_lines(out))
    return 0


@dataclass(frozen=True, slots=True)
class World:
    """A folder with tasks of several hundred items, a saved model, and evaluations of it."""

    folder: Path

    def attempt(
        self,
        out: Path,
        num_ranks: int = 1,
        *,
        seconds: float = forks.PATIENCE,
        lines: int | None = None,
        kill: signal.Signals = signal.SIGKILL,
        hangs: tuple[int, str] | None = None,
        **settings: Any,
    ) -> list[int]:
        """Evaluate on some ranks, killed after some seconds or lines in the journal; return their exit statuses."""
        settings = {'out': out, 'tokens_per_batch': 120, 'resume': True, **settings}
        log, end = self.folder / 'errors.txt', time.monotonic() + seconds
        ranks = forks.start_ranks(job, [log] * num_ranks, self.folder, hangs, settings)
        while any(rank.exitcode is None for rank in ranks):
            if time.monotonic() > end or (lines is not None and num_lines(out) >= lines):
                for rank in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank.pid, kill)
                break
            time.sleep(0.005)
        return forks.statuses(ranks, log)

    def finish(self, out: Path, num_ranks: int = 1, **settings: Any) -> dict[str, Any]:
        """Evaluate to the end; return the times in the records."""
        assert self.attempt(out, num_ranks, **settings) == [0] * num_ranks, self.said
        assert not (out / 'journal').exists()
        return record(out)['timing']

    @property
    def said(self) -> str:
        """Return what all evaluations have written to standard error."""
        return (self.folder / 'errors.txt').read_text()


@pytest.fixture(scope='module')
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp('resume')
    tiny.write_tasks(folder, [*tiny.write_riddles(folder), tiny.write_programs(folder)])
    sums = [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(300)]
    tiny.write_rows(folder / 'sums.jsonl', sums)
    tiny.save(tiny.model(), folder / 'model')
    (folder / 'errors.txt').touch()
    return World(folder)


@pytest.fixture(scope='module')
def whole(world: World) -> Path:
    """Return the folder of an evaluation on one rank that is not killed."""
    world.finish(world.folder / 'whole')
    return world.folder / 'whole'


@pytest.fixture(scope='module')
def half_done(world: World) -> Path:
    """Return the folder of an evaluation that was killed after some items."""
    assert world.attempt(world.folder / 'half', lines=100) == [-9], world.said
    assert 100 <= num_lines(world.folder / 'half') < 600
    return world.folder / 'half'


@pytest.mark.parametrize('num_ranks', [2, pytest.param(3, marks=pytest.mark.long)])
def test_any_number_of_ranks_gives_identical_items_and_metrics(world: World, whole, tmp_path: Path, num_ranks: int):
    """Mutations: a rank's last batch is dropped; results are averaged per rank."""
    num_programs = 6 * 3 if can_confine() else 0
    metrics, samples = outcome(whole)
    assert metrics['gauntlet/items'] == 2 * (300 + 5 + 2) + 2 * 40 + num_programs
    assert len(samples) == 6 + 2 + bool(num_programs)
    assert len({json.loads(line)['num_tokens'][0] for line in samples['drawn_1-shot.jsonl'].splitlines()}) > 3
    world.finish(tmp_path, num_ranks, resume=False)
    assert outcome(tmp_path) == outcome(whole)
    assert record(tmp_path)['environment']['num_ranks'] == num_ranks


def test_killed_at_twenty_moments_and_resumed_on_other_ranks_results_are_identical(world: World, whole, tmp_path: Path):
    """Half of the moments are times, which may come before the first item; the others are lines of the journal."""
    draw = random.Random(20)
    kills = 0
    for out in map(tmp_path.joinpath, 'abcdefghijklmnopqrst'):
        lines = []
        for _ in range(5):
            if draw.random() < 0.5:
                world.attempt(out, draw.choice([1, 2, 3]), seconds=draw.uniform(0.3, 2.5))
            else:
                world.attempt(out, draw.choice([1, 2]), lines=draw.randrange(600))
            if (out / 'results.json').exists():
                break
            lines.append(num_lines(out))
            kills += 1
        assert lines == sorted(lines)  # nothing that was finished is lost
        world.finish(out, draw.choice([1, 2, 3]))
        assert outcome(out) == outcome(whole)
        if kills >= 20:
            return
    raise AssertionError('too few were killed')


def test_a_killed_evaluation_reuses_its_items(world: World, half_done: Path, whole, tmp_path: Path):
    out = Path(shutil.copytree(half_done, tmp_path / 'out'))
    (path,) = (out / 'journal').iterdir()
    path.write_bytes(b''.join(path.read_bytes().splitlines(True)[:-2]))  # so that part of a batch is finished
    before = finished_items(out)
    earlier = json.loads(b'{' + journal_lines(out)[-1].partition(b'{')[2])['seconds']
    timing = world.finish(out, 2)
    assert outcome(out) == outcome(whole)
    assert timing['seconds'] == pytest.approx(sum(timing['tasks'].values()) + earlier)  # of both attempts
    started, finished = (datetime.fromisoformat(timing[name]) for name in ('started', 'finished'))
    assert (finished - started).total_seconds() > timing['seconds'] - 1
    assert timing['reused_items'] == before


def test_a_finished_evaluation_does_not_run_again_and_elsewhere_is_written_from_its_items(
    world: World, whole: Path, tmp_path: Path
):
    def files() -> dict[Path, tuple[int, bytes]]:
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in whole.rglob('*') if path.is_file()}

    before, expected = files(), outcome(whole)
    world.finish(whole)
    assert files() == before
    out = Path(shutil.copytree(whole, tmp_path / 'copy'))
    assert world.finish(out)['reused_items'] == expected[0]['gauntlet/items']
    assert outcome(out) == expected
    assert record(out)['config']['save_folder'] == str(out)


def test_a_damaged_line_is_an_error_and_repair_drops_it(world: World, half_done: Path, whole, tmp_path: Path):
    out = Path(shutil.copytree(half_done, tmp_path / 'damaged'))
    (path,) = (out / 'journal').iterdir()
    lines = path.read_bytes()[:-7].splitlines(True)  # the last line is torn
    path.write_bytes(b''.join([*lines[:4], lines[4].replace(b'"score": ', b'"score":  '), *lines[5:]]))
    assert world.attempt(out, 2) == [2, 2]
    assert f'{path}:5: ' in world.said and 'repair_journal: true' in world.said
    world.finish(out, repair_journal=True)
    assert outcome(out) == outcome(whole)


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
    world: World, half_done: Path, tmp_path: Path, change: str, value: Any, named: str
):
    out = Path(shutil.copytree(half_done, tmp_path / 'other'))
    if change == 'model':
        value = tiny.save(tiny.model(seed=1), tmp_path / value)
    start, before = len(world.said), journal_lines(out)
    assert world.attempt(out, **{change: value}) == [2], world.said
    message = world.said[start:]
    assert str(out) in message and named in message
    assert journal_lines(out) == before  # no result is lost


@pytest.mark.parametrize(('num_ranks', 'hanging'), [(1, 0), (2, 0), (2, 1)])
def test_if_a_rank_hangs_all_end_with_stack_traces_and_finished_items_are_reused(
    world: World, tmp_path: Path, num_ranks: int, hanging: int
):
    start = len(world.said)
    assert world.attempt(tmp_path, num_ranks, hangs=(hanging, 'asleep'), stall_seconds=2) == [STALLED] * num_ranks
    message = world.said[start:]
    assert all(f'gauntlet: rank {rank}: ' in message for rank in range(num_ranks))
    assert message.count('in run_or_hang') == 1 and message.count('thread MainThread:') == num_ranks
    if num_ranks == 1:
        assert all(fact in message for fact in ('2 s (stall_seconds)', ' step ', 'sums/', ' row '))
        done = finished_items(tmp_path)
        assert done > 0
        assert world.finish(tmp_path)['reused_items'] == done


def test_a_thread_that_holds_the_gil_is_ended_too(world: World, tmp_path: Path):
    start = len(world.said)
    assert world.attempt(tmp_path, hangs=(0, 'holding'), stall_seconds=2) == [1]
    assert 'in run_or_hang' in world.said[start:]


def compare_timeouts() -> None:
    """Compare the timeout of this job's collectives, 7 s, with those of two watchdogs."""
    logging.basicConfig(level=logging.WARNING)
    dist.initialize_dist('cpu', timeout=7.0)
    for stall_seconds in (6, 7):
        watchdog.check_timeout(stall_seconds)


def test_a_timeout_of_collectives_below_the_watchdogs_is_a_warning(tmp_path: Path):
    """It is a private field of torch, whose absence would be no error. Mutation: read a field of another name."""
    log = tmp_path / 'log.txt'
    forks.run(compare_timeouts, log, num_ranks=2)
    lines = [line for line in log.read_text().splitlines() if 'collectives time out' in line]
    assert len(lines) == 2 and all('stall_seconds is 7, but collectives time out after 7 s' in line for line in lines)


def test_without_stall_seconds_nothing_is_ended(world: World, tmp_path: Path):
    assert world.attempt(tmp_path, seconds=8, hangs=(0, 'asleep'), stall_seconds=None) == [-9]


@pytest.mark.parametrize('num_ranks', [1, 2])
def test_sigterm_has_its_exit_status_and_finished_items_are_reused(world: World, whole, tmp_path: Path, num_ranks: int):
    assert world.attempt(tmp_path, num_ranks, lines=60, kill=signal.SIGTERM) == [143] * num_ranks, world.said
    done = finished_items(tmp_path)
    assert done > 0
    assert world.finish(tmp_path)['reused_items'] == done
    assert outcome(tmp_path) == outcome(whole)


class Nodes:
    """Two nodes with a launcher, a cache and a home each, and one or two working directories that get a folder `out`.

    The first node's cache is in a directory of its own, the second's in its home.
    """

    def __init__(self, folder: Path, world: World, *, shares: bool, num_ranks: int = 1) -> None:
        self.folder = folder
        self.homes = [folder / f'home{node}' for node in range(2)]
        for home in self.homes:
            home.mkdir()
        self.places = [folder if shares else home for home in self.homes]
        self.outs = [place / 'out' for place in self.places]
        self.caches = [self.homes[0] / 'cache', self.homes[1] / '.cache/llmfoundry_gauntlet']
        self.num_ranks = num_ranks
        settings = {'model': f'{world.folder}/model', 'tokens_per_batch': 120, 'device': 'cpu', 'resume': True}
        settings |= {**tiny.settings_of(world.folder), 'out': 'out'}
        (folder / 'eval.yaml').write_text(json.dumps(settings))

    def run(self, lines: int | None = None) -> list[int]:
        """Evaluate, ended by SIGTERM once each node's journal has this many lines; return the launchers' statuses."""
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = free.getsockname()[1]
        shared = {name: value for name, value in os.environ.items() if name != 'LLMFOUNDRY_GAUNTLET_CACHE'}
        shared |= {'PYTHONPATH': forks.PATHS, 'OMP_NUM_THREADS': '1'}
        caches = [{'LLMFOUNDRY_GAUNTLET_CACHE': str(self.caches[0])}, {'XDG_CACHE_HOME': ''}]
        command = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', f'--nproc_per_node={self.num_ranks}']
        command += ['--master_addr=127.0.0.1', f'--master_port={port}']
        evaluation = ['-m', 'llmfoundry_gauntlet', 'eval', str(self.folder / 'eval.yaml')]
        launchers = []
        for node, (home, place) in enumerate(zip(self.homes, self.places, strict=True)):
            with (self.folder / f'node{node}.txt').open('ab') as log:
                words = [*command, f'--node_rank={node}', *evaluation]
                environment = {**shared, **caches[node], 'HOME': str(home)}
                launchers.append(subprocess.Popen(words, cwd=place, env=environment, stdout=log, stderr=log))
        while lines is not None and min(map(num_lines, self.outs)) < lines:
            assert None in [launcher.poll() for launcher in launchers], self.said
            time.sleep(0.005)
        for launcher in launchers if lines is not None else ():
            launcher.send_signal(signal.SIGTERM)
        return [launcher.wait(forks.PATIENCE) for launcher in launchers]

    @property
    def said(self) -> str:
        """Return the end of what both have printed."""
        return '\n'.join(forks.tail_of(self.folder / f'node{node}.txt') for node in range(2))


@pytest.mark.parametrize(('shares', 'num_ranks'), [(True, 1), pytest.param(False, 2, marks=pytest.mark.long)])
def test_two_nodes_score_as_one_rank(world: World, whole, tmp_path: Path, shares: bool, num_ranks: int):
    """Records are in the working directory of the first node, token ids in the cache directory of each."""
    nodes = Nodes(tmp_path, world, shares=shares, num_ranks=num_ranks)
    assert nodes.run() == [0, 0], nodes.said
    assert outcome(nodes.outs[0]) == outcome(whole)
    found = record(nodes.outs[0])
    assert found['environment']['num_ranks'] == 2 * num_ranks
    assert sorted(path.name for path in nodes.outs[0].iterdir()) == ['results.json', 'samples']
    assert shares or not any(nodes.outs[1].glob('*'))
    for cache in nodes.caches:
        assert len([*cache.glob('tokens/*.tokens')]) == len(found['tasks'])


def test_nodes_without_a_shared_folder_resume_from_the_journals_of_both(world: World, whole, tmp_path: Path):
    """Mutation: only the first node's journal is read."""
    nodes = Nodes(tmp_path, world, shares=False)
    assert 0 not in nodes.run(lines=10), nodes.said
    done = [finished_items(out) for out in nodes.outs]
    assert min(done) > 0
    assert nodes.run() == [0, 0], nodes.said
    assert outcome(nodes.outs[0]) == outcome(whole)
    assert record(nodes.outs[0])['timing']['reused_items'] == sum(done)
    assert not (nodes.outs[1] / 'journal').exists()
