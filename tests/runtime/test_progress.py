"""Progress reports of an evaluation."""

from __future__ import annotations

import fcntl
import io
import itertools
import logging
import os
import pty
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import generations
import pytest
import tiny

from llmfoundry_gauntlet.engine.continuous import BatchProgress, GenerationProgress
from llmfoundry_gauntlet.runtime import runner, step_clock
from llmfoundry_gauntlet.runtime.evaluate import evaluate
from llmfoundry_gauntlet.runtime.progress import (
    GENERATION,
    KINDS,
    SCORING,
    BatchWork,
    Work,
    describe_progress,
    is_terminal,
    progress_report,
)
from llmfoundry_gauntlet.runtime.progress import log as progress_log
from llmfoundry_gauntlet.types import GenerateRequest


def scored(num_items: int, cost: float, *, is_done: bool = False) -> BatchWork:
    """Return the work of a scored batch."""
    progress = BatchProgress(of_cost=1.0, of_requests=1.0) if is_done else BatchProgress()
    return BatchWork(kind=SCORING, num_items=num_items, cost=cost, progress=progress)


# A rank with 30 of 100 items, 12 of which it has done, which was a quarter of its work: 40 of all are taken for done.
A_QUARTER = Work(
    num_items=100,
    batches=[scored(12, 200.0, is_done=True), scored(18, 600.0)],
    spans=[(None, -7.0), (SCORING, 0.0)],
    task='boolq/10-shot',
)


def generating(progress: BatchProgress, **more: Any) -> Work:
    """Return 20 s of work on 10 of 20 items, those of this rank, after 50 s of probing."""
    batch = BatchWork(kind=GENERATION, num_items=10, cost=200.0, progress=progress)
    return Work(num_items=20, batches=[batch], spans=[(None, 30.0), (GENERATION, 80.0)], **more)


UNENDED = BatchProgress(of_cost=0.25, num_generated=1234)
SOME_ENDED = BatchProgress(of_cost=0.25, of_requests=0.1, num_generated=1234)
# As many tokens to score, half of them done, as to generate.
BOTH_KINDS = [
    scored(5, 100.0, is_done=True),
    scored(5, 100.0),
    BatchWork(kind=GENERATION, num_items=10, cost=200.0),
]


@pytest.mark.parametrize(
    ('work', 'now', 'described'),
    [
        (A_QUARTER, 2.2, '40 of 100 items, 18.2 items/s, 00:06 left, boolq/10-shot'),
        (A_QUARTER, 250.0, '40 of 100 items, 0.16 items/s, 12:30 left, boolq/10-shot'),
        (A_QUARTER, 1300.0, '40 of 100 items, 0.0308 items/s, 1:05:00 left, boolq/10-shot'),
        # Until a generation has ended, none is assumed to be shorter than its limit.
        (generating(UNENDED), 100.0, '0 of 20 items, 01:00 left if no generation ends early, 2,468 tokens generated'),
        (generating(SOME_ENDED), 100.0, '2 of 20 items, 0.1 items/s, 01:00 left, 2,468 tokens generated'),
        (
            # A tenth of the work at 0.2 s per token, as in the evaluation before: (20 s + 4 s) / (50 + 20) tokens.
            generating(UNENDED, earlier_paces={GENERATION: 0.2}),
            100.0,
            '0 of 20 items, 00:51 left, 2,468 tokens generated',
        ),
        (Work(), 5.0, 'probing the model'),
        (Work(num_items=4, batches=[scored(4, 8.0)]), 5.0, '0 of 4 items'),
    ],
)
def test_the_time_left_follows_from_the_share_done_after_the_plan(work: Work, now: float, described: str):
    assert describe_progress(work, now) == described


@pytest.mark.parametrize(
    ('earlier_paces', 'seconds_left'),
    [
        # A token took 0.1 s: 10 s of scoring, and 4 times 20 s of generation, which is not measured yet.
        ({}, 10 + 4 * 20),
        # A token took 0.1 s in scoring, or for the first tenth of all its tokens 0.4 s, as in the evaluation before:
        # (10 + 20 * 0.4) s / (100 + 20) tokens.
        ({SCORING: 0.4, GENERATION: 0.3}, 100 * 18 / 120 + 200 * 0.3),
    ],
)
def test_scoring_and_generation_have_their_own_pace(earlier_paces: dict[str, float], seconds_left: float):
    work = Work(batches=BOTH_KINDS, spans=[(None, 0.0), (SCORING, 30.0)], earlier_paces=earlier_paces)
    assert work.seconds_left(40.0) == pytest.approx(seconds_left)


@pytest.mark.parametrize(
    'spans',
    [
        [(None, 0.0), (SCORING, 1000.0), (GENERATION, 1010.0)],
        # Other work between the two kinds, and between two batches of one.
        [(SCORING, 0.0), (None, 10.0), (GENERATION, 1010.0)],
        [(None, 0.0), (SCORING, 10.0), (None, 15.0), (SCORING, 1005.0), (GENERATION, 1010.0)],
    ],
)
def test_probing_before_or_between_the_work_is_no_part_of_the_time_left(spans: list[tuple[str | None, float]]):
    """Scoring took 10 s, half of generation 20 s. Mutation: a span of None counts as work."""
    half_done = BatchProgress(of_cost=0.5, of_requests=0.5)
    generation = BatchWork(kind=GENERATION, num_items=10, cost=400.0, progress=half_done)
    work = Work(num_items=20, batches=[scored(10, 100.0, is_done=True), generation], spans=spans)

    # Before generation was measured, its tokens were assumed to take 4 times 0.1 s, which counts for a tenth of them.
    pace = (20 + 40 * 0.4) / (200 + 40)
    assert work.seconds_left(1030.0) == pytest.approx(200 * pace)
    assert describe_progress(work, 1030.0) == f'15 of 20 items, 0.5 items/s, 00:{200 * pace:.0f} left'


def test_time_after_the_work_is_no_part_of_its_pace():
    """Mutation: the next kind of work does not end the one before."""
    work = Work(batches=[scored(5, 100.0, is_done=True)])
    work.begin(SCORING, 10.0)
    work.begin(SCORING, 15.0)
    work.begin(None, 30.0)
    assert work.paces(1000.0) == {SCORING: 20.0 / 100}


# Of a sampled generation task with two stop strings and a tiny model; at most 400 tokens.
NUM_GENERATED = [
    400,
    151,
    47,
    17,
    400,
    297,
    194,
    386,
    218,
    400,
    400,
    98,
    222,
    400,
    400,
    400,
    298,
    400,
    336,
    400,
    400,
    259,
    60,
    400,
    389,
    103,
    187,
    400,
    131,
    170,
    159,
    112,
    251,
    400,
    206,
    325,
    400,
    400,
    400,
    400,
]
MOST_GENERATED = 400
NUM_SLOTS = 16


def replayed(progress: BatchProgress) -> Iterator[float]:
    """Follow the recorded generations and yield the seconds of each step, most of which do not depend on the slots."""
    requests = [generations.request(row, range(120), MOST_GENERATED) for row in range(len(NUM_GENERATED))]
    following = GenerationProgress(requests, progress)
    waiting, running = list(requests), dict[GenerateRequest, int]()
    while waiting or running:
        seconds = 0.02 + 0.001 * len(running)
        while waiting and len(running) < NUM_SLOTS:
            running[waiting.pop(0)] = 0
            seconds += 0.03
        for request in list(running):
            running[request] += 1
            if running[request] == NUM_GENERATED[request.key.row]:
                following.end(request, running[request])
                del running[request]
        following.update(running.items())
        yield seconds


def test_while_recorded_generations_run_the_time_left_falls():
    """The share of the work rises at every step, up to 1; the time left rises by a twentieth of the whole at most.

    Mutations: count a batch only when it ends; a generation that ended counts as it is.
    """
    batches = [BatchWork(kind=GENERATION, num_items=40, cost=40 * 920.0) for _ in range(2)]
    work, now = Work(num_items=80, batches=batches), 100.0
    work.begin(GENERATION, now)
    shares, left = [work.share], []
    for batch in batches:
        for seconds in replayed(batch.progress):
            now += seconds
            shares.append(work.share)
            left.append(work.seconds_left(now))
        assert (batch.progress.of_cost, batch.progress.of_requests) == (1.0, 1.0)
        assert batch.progress.num_generated == sum(NUM_GENERATED)
    assert shares == sorted(shares) and shares[-1] == 1.0
    whole = now - 100.0
    # Before a fifth is done, a few prompts and generations that end early are most of what has been measured.
    settled = [seconds for share, seconds in zip(shares[1:], left, strict=True) if share > 0.2]
    least = list(itertools.accumulate(settled, min))
    assert all(seconds <= before + 0.05 * whole for seconds, before in zip(settled, least, strict=True))
    # At half of the time, about half of it is left.
    assert left[len(left) // 2] == pytest.approx(whole / 2, rel=0.3)


def test_a_repeated_generation_does_not_turn_progress_back():
    """As after running out of memory: what ended is kept, the rest begins again. Mutation: no `max` in `update`."""
    requests = [generations.request(row, [1] * 20, 5) for row in range(2)]
    progress = BatchProgress()
    first = GenerationProgress(requests, progress)
    first.end(requests[0], 3)
    first.update([(requests[1], 4)])
    assert progress.of_cost == pytest.approx((40 + 36) / (40 + 40))
    again = GenerationProgress(requests, progress)
    again.end(requests[0], 3)
    again.update([(requests[1], 1)])
    assert (progress.of_cost, progress.of_requests) == (pytest.approx(76 / 80), 0.5)
    assert progress.num_generated == 3 + 4


def test_without_a_terminal_lines_are_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, progress_log.name)
    deadline = time.monotonic() + 60
    with progress_report('gauntlet ba7', lambda: A_QUARTER, stream=io.StringIO(), line_seconds=0.01):
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(caplog.messages) >= 2
    assert all(message.startswith('gauntlet ba7: 25%, 40 of 100 items, ') for message in caplog.messages)
    num_lines = len(caplog.messages)
    time.sleep(0.05)
    assert len(caplog.messages) == num_lines


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """Return both ends of a terminal of 40 rows and 120 columns."""
    ours, theirs = pty.openpty()
    resize(theirs, 40, 120)
    with os.fdopen(theirs, 'w') as stream:
        yield ours, stream
    os.close(ours)


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack('HHHH', rows, columns, 0, 0))


def test_on_a_terminal_a_bar_is_drawn_and_removed(terminal: tuple[int, TextIO]):
    ours, stream = terminal
    seen = b''
    with progress_report('gauntlet ba7', lambda: A_QUARTER, stream=stream):
        while b'25%' not in seen:
            seen += os.read(ours, 4096)
    stream.write('end')
    stream.flush()
    while b'end' not in seen:
        seen += os.read(ours, 4096)
    assert b'gauntlet ba7  25%|' in seen and b'40 of 100 items' in seen
    assert seen.rpartition(b'\r')[2] == b'end'
    resize(stream.fileno(), 0, 0)  # as in some containers
    assert stream.isatty() and not is_terminal(stream)


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


def test_an_evaluation_leaves_its_probes_out_of_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each probe takes 1,000 s and more, a forward 1 s. Mutation: the step that probes counts as scoring."""
    clock = Clock()
    monkeypatch.setattr(step_clock, 'time', clock)
    for name in ('probe', 'probe_generation'):
        probe = getattr(runner, name)

        def slow(*arguments: Any, probe: Callable[..., Any] = probe, **more: Any) -> Any:
            clock.advance(1000.0)
            return probe(*arguments, **more)

        monkeypatch.setattr(runner, name, slow)
    settings = tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path))
    loop = tiny.loop_of({**settings, 'tokens_per_batch': 200})
    loop.runner.model.model.register_forward_pre_hook(lambda *_: clock.advance(1.0))

    steps = iter(loop)
    next(steps).run()
    probed_at = clock.now
    for step in steps:
        step.run()

    assert probed_at > 2000.0
    seconds = {kind: loop.work.seconds(kind, clock.now) for kind in KINDS}
    assert sum(seconds.values()) == clock.now - probed_at
    assert all(seconds.values())


def test_an_evaluation_counts_all_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last report says that everything is done, each item once."""
    seen: list[Work] = []

    @contextmanager
    def noted(title: str, work: Callable[[], Work]) -> Iterator[None]:
        with progress_report(title, work):
            yield
            seen.append(work())

    monkeypatch.setattr('llmfoundry_gauntlet.runtime.gauntlet.progress_report', noted)
    settings = tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path))
    evaluate(tiny.save(tiny.model(), tmp_path / 'model'), **settings)
    (work,) = seen
    num_own = sum(batch.num_items for batch in work.batches)
    assert (work.num_items, num_own, work.num_finished) == (28 + 80,) * 3
    assert work.cost() > 0 and work.share == 1.0
    assert 'gauntlet-progress' not in [thread.name for thread in threading.enumerate()]
