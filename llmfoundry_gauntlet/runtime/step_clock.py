"""The clock of an evaluation's steps: its progress on this rank, and the seconds of each task."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from llmfoundry_gauntlet.engine.continuous import ContinuousBatch
from llmfoundry_gauntlet.engine.plan import Batch
from llmfoundry_gauntlet.errors import plural
from llmfoundry_gauntlet.runtime.progress import BatchWork, Work
from llmfoundry_gauntlet.runtime.writer import Results
from llmfoundry_gauntlet.types import ItemKey, Request, ScoreRequest

SHOWN_ITEMS = 3  # items named in the report of a rank that hangs


class StepClock:
    """The progress and the seconds of one evaluation after another, each begun by `restart`."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self.tasks = tuple(tasks)
        self.num_steps = 0  # steps begun plus steps ended, in all evaluations
        self.work = Work()  # progress of the current evaluation on this rank
        self.busy_seconds = dict.fromkeys(self.tasks, 0.0)  # by task, in the current evaluation
        self._started = 0.0
        self._requests: Sequence[Request] = ()  # of the current step

    def restart(self) -> None:
        """Begin an evaluation, of which only the first step is known."""
        self._started = time.perf_counter()
        self.work = Work(num_steps=1, earlier_paces=self.work.paces(time.monotonic()))
        self.busy_seconds = dict.fromkeys(self.tasks, 0.0)

    def pause(self) -> None:
        """End the current kind of work: the training that follows an evaluation is no part of its pace."""
        self.work.begin(None, time.monotonic())

    @property
    def wall_seconds(self) -> float:
        """Return the seconds since the evaluation began."""
        return time.perf_counter() - self._started

    def timed(
        self,
        run: Callable[[], Results],
        batch: Batch | ContinuousBatch | None = None,
        work: BatchWork | None = None,
    ) -> Callable[[], Results]:
        """Return the step that calls `run`, as a function that counts it and its time.

        The time goes to the tasks of the step's batch, if it has one. `work`, if given, is done after the step.
        """
        requests = () if batch is None else batch.requests
        return partial(self._run_timed, run, requests, work)

    def _run_timed(self, run: Callable[[], Results], requests: Sequence[Request], work: BatchWork | None) -> Results:
        started = time.perf_counter()
        self.work.begin(None if work is None else work.kind, time.monotonic())
        self.work.task = requests[0].key.task if requests else ''
        self.num_steps += 1
        self._requests = requests

        # A step that hangs or fails never ends: `doing` goes on to name its items.
        results = run()

        self.num_steps += 1
        self._requests = ()
        if work is not None:
            work.progress.of_cost = work.progress.of_requests = 1.0
        self._share_by_size(time.perf_counter() - started, requests)
        return results

    def _share_by_size(self, seconds: float, requests: Sequence[Request]) -> None:
        """Add the time of a batch to that of its tasks, in proportion to the tokens of their requests."""
        sizes = [size_of(request) for request in requests]
        size_of_batch = sum(sizes)
        for request, size in zip(requests, sizes, strict=True):
            seconds_of_request = seconds * size / size_of_batch
            self.busy_seconds[request.key.task] += seconds_of_request

    def share_equally(self, seconds: float, items: Collection[ItemKey]) -> None:
        """Add time to that of the tasks of these items, in equal parts."""
        for key in items:
            self.busy_seconds[key.task] += seconds / len(items)

    def doing(self) -> str:
        """Describe this rank's current step and its items."""
        keys = [request.key for request in self._requests]
        if not keys:
            return f'step {self.num_steps}, without items of its own: the plan, programs, or between two steps'
        shown = '; '.join(described(key) for key in keys[:SHOWN_ITEMS])
        num_further = len(keys) - SHOWN_ITEMS
        further = f' and {num_further} more' if num_further > 0 else ''
        tasks = ', '.join(dict.fromkeys(key.task for key in keys))
        return f'step {self.num_steps}, {plural(len(keys), "item")} of {tasks}: {shown}{further}'


def described(key: ItemKey) -> str:
    """Return the name of an item: its task and row, and its file and variant if it has any."""
    parts = [f'{key.task} row {key.row}', key.file, key.variant]
    return ' '.join(part for part in parts if part)


def size_of(request: Request) -> int:
    """Return a request's size in tokens, as a measure of its work."""
    if isinstance(request, ScoreRequest):
        return sum(len(ids) for ids in (*request.contexts, *request.continuations))
    return request.length
