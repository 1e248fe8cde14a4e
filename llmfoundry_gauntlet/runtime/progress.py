"""Report the progress of an evaluation: a bar on a terminal, else a log line every 30 seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TextIO

from tqdm import tqdm

from llmfoundry_gauntlet.engine.continuous import BatchProgress
from llmfoundry_gauntlet.runtime.distributed import repeated

log = logging.getLogger(__name__)

LINE_SECONDS = 30.0
BAR_SECONDS = 0.5
NUM_TASK = 40  # characters shown of a task's name

# The kinds of work, in the order in which an evaluation begins them.
SCORING = 'scoring'
GENERATION = 'generation'
KINDS = (SCORING, GENERATION)
# Until generation has been measured, a token of its cost is assumed to take this much longer than one of scoring
# (3 to 4 for models of 1 and 10 million parameters on a CPU).
GENERATION_PACE = 4.0
ASSUMED_SHARE = 0.1  # of the work of a kind, during which its assumed pace gives way to the measured one


@dataclass(slots=True, kw_only=True)
class BatchWork:
    """The work of one batch: its kind, `SCORING` or `GENERATION`, its items, and its cost in tokens."""

    kind: str
    num_items: int
    cost: float
    progress: BatchProgress = field(default_factory=BatchProgress)


@dataclass(slots=True)
class Work:
    """The work of an evaluation and this rank's progress; without batches before the plan is made.

    `num_items` counts the items of all ranks, `batches` are this rank's, `num_steps` its steps as far as known. Ranks
    run steps of similar cost at the same time, so this rank's progress represents that of all. `spans` are the kinds of
    work that this rank has begun, in order, with the times on `time.monotonic`; None is other work, such as probing.
    `earlier_paces` are those of the evaluation before, by kind.

    The reporting thread reads while the evaluation runs: lists only grow, and each value is set in one piece.
    """

    num_steps: int = 0
    num_items: int = 0
    batches: list[BatchWork] = field(default_factory=list)
    spans: list[tuple[str | None, float]] = field(default_factory=list)
    earlier_paces: Mapping[str, float] = field(default_factory=dict)
    task: str = ''  # of the current step

    def add(self, num_items: int, batches: Sequence[BatchWork]) -> None:
        """Add planned work: the items of all ranks, and the batches of this rank."""
        self.num_items += num_items
        self.batches += batches

    def begin(self, kind: str | None, now: float) -> None:
        """Note that work of a kind begins, unless it goes on."""
        if not self.spans or self.spans[-1][0] != kind:
            self.spans.append((kind, now))

    def cost(self, kind: str | None = None) -> float:
        """Return the cost of the work of a kind, or of all."""
        return sum(batch.cost for batch in self.batches if kind in (None, batch.kind))

    def cost_done(self, kind: str | None = None) -> float:
        """Return the cost of the work of a kind, or of all, that is done."""
        return sum(batch.cost * batch.progress.of_cost for batch in self.batches if kind in (None, batch.kind))

    @property
    def share(self) -> float:
        """Return the fraction of work done, 0 to 1."""
        cost = self.cost()
        return min(1.0, self.cost_done() / cost) if cost else 0.0

    @property
    def num_finished(self) -> int:
        """Return the estimated number of finished items on all ranks."""
        num_done = sum(batch.num_items * batch.progress.of_requests for batch in self.batches)
        return self._on_all_ranks(num_done)

    @property
    def num_generated(self) -> int:
        """Return the estimated number of generated tokens on all ranks."""
        num_generated = sum(batch.progress.num_generated for batch in self.batches)
        return self._on_all_ranks(num_generated)

    def _on_all_ranks(self, number: float) -> int:
        """Return a number of all ranks, given that of this one, in the proportion of their items."""
        num_own = sum(batch.num_items for batch in self.batches)
        return round(self.num_items * number / num_own) if num_own else 0

    def seconds(self, kind: str, now: float) -> float:
        """Return the time spent on work of a kind until `now`."""
        spans = [*self.spans, (None, now)]
        durations = []
        # Each span lasts until the next one begins.
        for (kind_of_span, begun), (_, ended) in pairwise(spans):
            if kind_of_span == kind:
                durations.append(ended - begun)
        return sum(durations)

    def paces(self, now: float) -> dict[str, float]:
        """Return the seconds per token of each kind of work whose pace is known.

        The measured pace of a kind begins as the one before, for a small part of its work, lest the time left jumps.
        """
        paces: dict[str, float] = {}
        for kind in KINDS:
            assumed_pace = self.earlier_paces.get(kind)
            if assumed_pace is None and kind == GENERATION and SCORING in paces:
                assumed_pace = GENERATION_PACE * paces[SCORING]

            # The assumed pace counts as if a part of the work had been done at it.
            assumed_cost = assumed_seconds = 0.0
            if assumed_pace is not None:
                assumed_cost = ASSUMED_SHARE * self.cost(kind)
                assumed_seconds = assumed_cost * assumed_pace

            cost = self.cost_done(kind) + assumed_cost
            if cost:
                paces[kind] = (self.seconds(kind, now) + assumed_seconds) / cost
        return paces

    @property
    def assumes_limits(self) -> bool:
        """Return whether the time left is that of generations which all reach their token limits.

        How long they will be is unknown until some have ended, from when on their pace includes it.
        """
        generating = [batch.progress for batch in self.batches if batch.kind == GENERATION]
        has_begun = any(progress.of_cost > 0 for progress in generating)
        has_ended = any(progress.of_requests > 0 for progress in generating)
        return has_begun and not has_ended and GENERATION not in self.earlier_paces

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated time left, None as long as nothing is known about the pace of some work."""
        paces = self.paces(now)
        seconds = 0.0
        for kind in KINDS:
            cost_left = self.cost(kind) - self.cost_done(kind)
            if cost_left <= 0:
                continue
            if kind not in paces:
                return None
            seconds += cost_left * paces[kind]
        return seconds


@contextlib.contextmanager
def progress_report(
    title: str, work: Callable[[], Work], *, stream: TextIO | None = None, line_seconds: float = LINE_SECONDS
) -> Iterator[None]:
    """Report the progress of an evaluation, the current state of which `work` returns, until the context ends.

    On a terminal draw a bar and remove it at the end; elsewhere log a line every `line_seconds`.
    """
    stream = stream or sys.stderr
    if not is_terminal(stream):

        def write_line() -> None:
            description = describe_progress(work(), time.monotonic())
            log.info('%s: %.0f%%, %s', title, 100 * work().share, description)

        with repeated(write_line, line_seconds, 'gauntlet-progress'):
            yield
        return

    layout = '{desc} {percentage:3.0f}%|{bar}|{postfix}'
    with tqdm(total=100, desc=title, bar_format=layout, leave=False, file=stream) as bar:

        def draw() -> None:
            bar.n = 100 * work().share
            bar.set_postfix_str(describe_progress(work(), time.monotonic()))

        with repeated(draw, BAR_SECONDS, 'gauntlet-progress'):
            yield


def is_terminal(stream: TextIO) -> bool:
    """Return whether a bar can be drawn; on a terminal without a size, as in some containers, tqdm draws nothing."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def describe_progress(work: Work, now: float) -> str:
    """Describe the progress of work and the estimated time left; `now` is the time on `time.monotonic`."""
    if not work.batches:
        return work.task or 'probing the model'
    parts = [f'{work.num_finished} of {work.num_items} items']
    seconds = sum(work.seconds(kind, now) for kind in KINDS)
    if work.num_finished and seconds:
        parts.append(f'{work.num_finished / seconds:.3g} items/s')
    seconds_left = work.seconds_left(now)
    if work.share < 1 and seconds_left is not None:
        condition = ' if no generation ends early' if work.assumes_limits else ''
        parts.append(f'{tqdm.format_interval(seconds_left)} left{condition}')
    if work.num_generated:
        parts.append(f'{work.num_generated:,} tokens generated')
    if work.task:
        parts.append(work.task if len(work.task) <= NUM_TASK else f'{work.task[: NUM_TASK - 3]}...')
    return ', '.join(parts)
