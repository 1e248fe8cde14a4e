"""`gauntlet run`, killed or told to stop within generation, goes on with exactly the generations that have ended."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import tiny
from forks import PATIENCE, command, start_ranks, statuses, tail_of, wait_until
from tiny import outcome, record

from llmfoundry_gauntlet.engine.generate import DecodingLoop
from llmfoundry_gauntlet.results.journal import payloads, read_journal
from llmfoundry_gauntlet.types import ItemKey

KEPT = re.compile(r'interrupted by SIGTERM: (\d+) finished items are kept in (\S+)\nto go on: (.*)\n')


def num_generated(path: Path) -> int:
    """Return the number of generated items in a file of a journal."""
    written = [payload for payload in payloads(path.read_bytes()) if payload is not None]
    return sum(b'"item"' in payload and b'"text": null' not in payload for payload in written)


def run_and_wait(out: str, least: int, *words: str) -> None:
    """Run `gauntlet run`; with so many generated items in this rank's file, say so in a file and wait for a signal.

    They must be fewer than a batch has, after which ranks wait for each other.
    """
    rank = os.environ['RANK']
    of_rank = f'journal/*-rank{rank}.jsonl'
    earlier = set(Path(out).glob(of_rank))
    whole_step = DecodingLoop.step

    def step(loop: DecodingLoop) -> None:
        of_this_run = set(Path(out).glob(of_rank)) - earlier
        if sum(map(num_generated, of_this_run)) >= least:
            Path(f'{out}-waits-{rank}').touch()
            time.sleep(PATIENCE)
        whole_step(loop)

    DecodingLoop.step = step  # type: ignore[method-assign]
    command('run', *words, '--out', out)


class Runs:
    """Runs of a saved model on tasks that generate, in several continuous batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / 'log.txt'
        self.log.touch()
        tasks = {'icl_tasks': tiny.write_riddles(folder)}
        (folder / 'tasks.yaml').write_text(json.dumps(tasks))  # JSON is YAML
        tiny.save(tiny.model(), folder / 'model')
        settings = {'model': folder / 'model', 'tasks': folder / 'tasks.yaml', 'data-root': folder, 'device': 'cpu'}
        self.words: list[str] = []
        for name, value in {**settings, 'tokens-per-batch': 500, 'max-seq-len': 128}.items():
            self.words += [f'--{name}', str(value)]

    def finish(self, name: str, num_ranks: int, *more: str) -> Path:
        """Run to the end; return the folder of the records."""
        ranks = start_ranks(
            command, [self.log] * num_ranks, 'run', *self.words, '--out', str(self.folder / name), *more
        )
        assert statuses(ranks, self.log) == [0] * num_ranks, tail_of(self.log)
        return self.folder / name

    def end(self, name: str, num_ranks: int, least: int, number: signal.Signals, *more: str) -> list[int]:
        """End a run once each rank has generated so many items; return the statuses of its ranks."""
        out = self.folder / name
        ranks = start_ranks(run_and_wait, [self.log] * num_ranks, str(out), least, *self.words, *more)
        waiting = [Path(f'{out}-waits-{rank}') for rank in range(num_ranks)]

        def all_wait() -> bool:
            assert all(rank.exitcode is None for rank in ranks), tail_of(self.log)
            return all(path.exists() for path in waiting)

        wait_until(all_wait)
        for path in waiting:
            path.unlink()
        for rank in ranks:
            os.kill(rank.pid, number)
        return statuses(ranks, self.log)


@pytest.fixture(scope='module')
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp('generations'))


@pytest.fixture(scope='module')
def whole(runs: Runs) -> Path:
    """Return the folder of a run on one rank that is not ended."""
    return runs.finish('whole', 1)


def finished(out: Path) -> set[ItemKey]:
    """Return the finished items in a journal."""
    read = read_journal(out)
    assert read is not None
    return {key for key in read.results if not key.is_gold}


@pytest.mark.parametrize('num_ranks', [1, 2])
def test_killed_twice_among_generations_a_run_reuses_each_and_has_the_same_results(
    runs: Runs, whole: Path, num_ranks: int
):
    """Mutations: items are written at the end of their batch; a batch with unfinished items is rerun as a whole."""
    name = f'killed_{num_ranks}'
    killed = [-signal.SIGKILL] * num_ranks
    assert runs.end(name, num_ranks, 3, signal.SIGKILL) == killed, tail_of(runs.log)
    first = finished(runs.folder / name)
    assert runs.end(name, num_ranks, 5, signal.SIGKILL, '--resume') == killed, tail_of(runs.log)
    second = finished(runs.folder / name)
    assert 3 * num_ranks <= len(first)
    assert len(first) + 5 * num_ranks <= len(second) < 2 * 40

    out = runs.finish(name, 3 - num_ranks, '--resume')

    assert record(out)['timing']['reused_items'] == len(second)
    assert outcome(out) == outcome(whole)


def test_sigterm_among_generations_says_how_many_are_kept_and_how_to_go_on(runs: Runs, whole: Path):
    start = len(runs.log.read_text())
    assert runs.end('terminated', 1, 4, signal.SIGTERM) == [128 + signal.SIGTERM], tail_of(runs.log)
    said = runs.log.read_text()[start:]
    message = KEPT.search(said)
    assert message is not None, said
    out = runs.folder / 'terminated'
    assert message.groups() == (str(len(finished(out))), str(out / 'journal'), 'the same command with --resume')
    assert 'Traceback' not in said

    runs.finish('terminated', 1, '--resume')

    assert outcome(out) == outcome(whole)
