"""The evaluation loop: yield this rank's steps to Composer's loop and gather the scores."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

from llmfoundry_gauntlet.engine.continuous import ContinuousBatch, assign_continuous_batches
from llmfoundry_gauntlet.engine.model import Outputs
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, Batch, plan
from llmfoundry_gauntlet.engine.ranks import assign
from llmfoundry_gauntlet.errors import ConfigError, plural
from llmfoundry_gauntlet.evaluation.run import (
    Evaluation,
    PlannedEvaluation,
    PreparedEvaluation,
    conclude,
    share_seconds,
)
from llmfoundry_gauntlet.runtime.distributed import gather, global_rank, meet, world_size
from llmfoundry_gauntlet.runtime.journal import SharedJournal
from llmfoundry_gauntlet.runtime.progress import GENERATION, SCORING, BatchWork, Work
from llmfoundry_gauntlet.runtime.runner import PLAN, EvaluatedModel, ModelRunner
from llmfoundry_gauntlet.runtime.time_budget import Measured, TimeBudget, summed
from llmfoundry_gauntlet.scoring.code.execution import num_programs_run
from llmfoundry_gauntlet.types import Generation, ItemKey, ItemResult, Request, ScoreRequest

log = logging.getLogger(__name__)

Results = dict[ItemKey, ItemResult]
Part = TypeVar('Part', Batch, ContinuousBatch)

COLLECT_SECONDS = 5.0
SOME_BATCHES = (
    'subset_num_batches: a score needs every item of its tasks; leave it out. For a quick try give subset_items, at '
    'most so many items of each task: EvalGauntlet(subset_items=10, ...). trainer.eval(eval_dataloader=...) runs other '
    'evaluators alone'
)
SHOWN_ITEMS = 3  # items named in the report of a rank that hangs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One step of an evaluation, which Composer passes to `eval_forward` as a batch."""

    loader: EvaluationLoader
    run: Callable[[], Results]


class EvaluationLoader:
    """Yield this rank's steps of each evaluation. Not a torch DataLoader, because iterating one draws random numbers.

    The first step probes the model and plans; scored batches and then generations follow. Items with non-finite
    log-probabilities, which other items in the batch may have caused, are rerun as padded rows at the end. Call
    `finish` after the last step.
    """

    batch_size = 1  # read by Composer

    def __init__(self, prepared: PreparedEvaluation, model: EvaluatedModel) -> None:
        self.everything = prepared
        self.prepared = prepared  # the items to evaluate: all, or those that fit in the time budget
        self.runner = ModelRunner(model, prepared)
        self.planned: PlannedEvaluation | None = None  # the latest plan, reused while the layout stays the same
        self.runs_programs = any(task.runs_programs for task in prepared.tasks.values())
        self.background = ThreadPoolExecutor(max_workers=1, thread_name_prefix='gauntlet-programs')
        self.running: list[Future[Results]] = []  # programs of finished batches
        self.launched: Callable[[], Results] | None = None  # the batch that the device is running
        self.num_steps = 0  # steps begun plus steps ended
        self.work = Work()  # progress of the current evaluation on this rank
        self.requests: Sequence[Request] = ()  # of the current step
        self.journal: SharedJournal | None = None  # of the current evaluation, if any
        seconds = prepared.data.settings.budget_seconds
        self.budget = None if seconds is None else TimeBudget(prepared, seconds)
        self.opening: Callable[[], AbstractContextManager[None]] = nullcontext  # the context in which all steps run
        self.steps: Generator[Step, None, None] | None = None  # of the current evaluation
        self.is_complete = False  # every step of the current evaluation has run
        self.started = 0.0
        self.results: Results = {}  # of this rank in the current evaluation
        self.evaluation: Evaluation | None = None  # of all ranks, after `finish`
        self.busy_seconds = dict.fromkeys(prepared.tasks, 0.0)  # by task, in the current evaluation
        self.tally = {key: Measured() for key in prepared.tasks}  # by task, in the current round of the time budget

    def __iter__(self) -> Iterator[Step]:
        self.steps = self._steps()
        return self.steps

    def _steps(self) -> Generator[Step, None, None]:
        """Yield this rank's steps of one evaluation."""
        self.started = time.perf_counter()
        self._drop_unfinished()
        self.work = Work(num_steps=1, earlier_paces=self.work.paces(time.monotonic()))
        self.results, self.evaluation, self.is_complete = {}, None, False
        self.busy_seconds = dict.fromkeys(self.everything.tasks, 0.0)
        with self.opening():
            self.use(self.runner.model)
            self.runner.language_model.forget()  # prefixes cached for earlier weights
            yield self._step(self._plan)
            if self.budget is not None and not self.budget.is_settled:
                yield from self._find_subset(self.budget)
            else:
                yield from self._run(self.current_plan)
            self.runner.language_model.forget()
            self.is_complete = True

    def use(self, model: EvaluatedModel) -> bool:
        """Evaluate this model; return whether its network, or a part of it, is another than before."""
        is_new = self.runner.use(model)
        if is_new:
            self.planned = None
        return is_new

    def _run(self, planned: PlannedEvaluation) -> Iterator[Step]:
        """Yield this rank's steps of a plan."""
        suspects: Results = {}
        if self.journal is not None and global_rank() == 0:
            suspects.update(self.journal.suspects)
        wanted: list[Batch | ContinuousBatch] = [
            *self._unfinished(planned.batches),
            *self._unfinished(planned.continuous_batches),
        ]
        batches = self._share([part for part in wanted if isinstance(part, Batch)])
        everyones = assign_continuous_batches(
            [part for part in wanted if isinstance(part, ContinuousBatch)], num_ranks=world_size()
        )
        generations = everyones[global_rank()]
        mine: list[Batch | ContinuousBatch] = [*batches, *generations]
        works = [work_of(part) for part in mine]
        self.work.add(num_requests(wanted), works)
        self.work.num_steps += len(mine) + self.runs_programs
        yield from self._scoring(batches, works[: len(batches)], suspects)
        for generating, work in zip(generations, works[len(batches) :], strict=True):
            yield self._step(partial(self._generate, generating, work), generating, work)
        if self.runs_programs:
            yield self._step(self._collect)
        found = {key for keys in gather(list(suspects)) for key in keys}
        if planned.layout == PADDED_ROWS:  # rows do not affect each other, so a rerun would change nothing
            self.work.num_steps += 1
            yield self._step(lambda: suspects)
        else:
            again = [request for request in planned.score_requests if request.key in found]
            tokens = planned.tokens_per_batch
            alone = plan(again, tokens_per_batch=tokens, layout=PADDED_ROWS, rotary=self.runner.language_model.rotary)
            rerun = self._share(self._unfinished(alone, also_suspects=True))
            self.work.num_steps += len(rerun)
            yield from self._scoring(rerun, [None] * len(rerun), None)

    def _scoring(
        self, batches: Sequence[Batch], works: Sequence[BatchWork | None], suspects: Results | None
    ) -> Iterator[Step]:
        """Yield the steps that score these batches. Non-finite results go to `suspects`, if given, to be rerun."""
        for (batch, following), work in zip(pairwise([*batches, None]), works, strict=True):
            assert batch is not None
            yield self._step(partial(self._score, batch, following, suspects), batch, work)

    def _find_subset(self, budget: TimeBudget) -> Iterator[Step]:
        """Yield the steps of rounds with more and more items until the time budget has found its subset."""
        while keys := budget.next_round(max(gather(time.perf_counter() - self.started))):
            begun, busy = time.perf_counter(), dict(self.busy_seconds)
            self.tally = {key: Measured() for key in self.everything.tasks}
            self.planned = self.runner.planned(self.everything.only(keys))
            yield from self._run(self.planned)
            mine = {
                key: replace(one, busy_seconds=self.busy_seconds[key] - busy[key]) for key, one in self.tally.items()
            }
            gathered = gather((mine, time.perf_counter() - begun))
            measured = {key: summed([part[key] for part, _ in gathered]) for key in mine}
            budget.learn(measured, max(seconds for _, seconds in gathered))
        budget.settle()
        self.prepared = budget.chosen()
        self.planned = self.runner.planned(self.prepared)

    def settle(self, sizes: Mapping[str, int]) -> None:
        """Use the subset of an earlier job's time budget, unless one has already been chosen."""
        if self.budget is None or self.budget.is_settled:
            return
        self.budget.sizes = dict(sizes)
        self.prepared, self.planned = self.budget.chosen(), None

    def progress(self) -> tuple[int, ...]:
        """Return counters that change whenever there is progress: steps, forwards, decoding steps, programs."""
        return self.num_steps, *self.runner.progress(), num_programs_run()

    def doing(self) -> str:
        """Describe this rank's current step and its items."""
        keys = [request.key for request in self.requests]
        if not keys:
            return f'step {self.num_steps}, without items of its own: the plan, programs, or between two steps'
        shown = [' '.join(filter(None, (f'{key.task} row {key.row}', key.file, key.variant))) for key in keys]
        further = f' and {len(keys) - SHOWN_ITEMS} more' if len(keys) > SHOWN_ITEMS else ''
        tasks = ', '.join(dict.fromkeys(key.task for key in keys))
        return (
            f'step {self.num_steps}, {plural(len(keys), "item")} of {tasks}: {"; ".join(shown[:SHOWN_ITEMS])}{further}'
        )

    def stop(self) -> None:
        """Clean up after an evaluation that has finished or failed."""
        self.work.begin(None, time.monotonic())  # the training that follows is no part of its pace
        if self.steps is not None:
            self.steps.close()  # an evaluation that failed is in the middle of its context
        self.opening, self.steps = nullcontext, None
        self._drop_unfinished()
        if self.journal is not None:
            self.journal.close()

    def _drop_unfinished(self) -> None:
        """Drop the batch and cancel the programs of a failed evaluation; programs still running are ignored."""
        self.launched = None
        while self.running:
            self.running.pop().cancel()

    @property
    def is_finding_subset(self) -> bool:
        """Return whether this evaluation finds the subset for the time budget; such an evaluation has no journal."""
        return self.budget is not None and not self.budget.is_settled

    @property
    def current_plan(self) -> PlannedEvaluation:
        """Return the latest plan. Raise RuntimeError if the first step, which makes it, has not run."""
        if self.planned is None:
            raise RuntimeError('the first step, which makes the plan, was not run')
        return self.planned

    def _step(
        self,
        run: Callable[[], Results],
        part: Batch | ContinuousBatch | None = None,
        work: BatchWork | None = None,
    ) -> Step:
        return Step(loader=self, run=partial(self._timed, run, part, work))

    def _timed(
        self,
        run: Callable[[], Results],
        part: Batch | ContinuousBatch | None,
        work: BatchWork | None,
    ) -> Results:
        """Run a step, store its results and split its time among the tasks of its batch, if it has one."""
        start = time.perf_counter()
        self.work.begin(None if work is None else work.kind, time.monotonic())
        requests: Sequence[Request] = () if part is None else part.requests
        self.num_steps, self.requests = self.num_steps + 1, requests
        self.work.task = requests[0].key.task if requests else ''
        results = run()
        self.results.update(results)
        self.num_steps, self.requests = self.num_steps + 1, ()
        if work is not None:
            work.progress.of_cost = work.progress.of_requests = 1.0
        seconds = time.perf_counter() - start
        sizes = list(map(size_of, requests))
        whole = sum(sizes)
        for request, size in zip(requests, sizes, strict=True):
            self.busy_seconds[request.key.task] += seconds * size / whole
        return results

    @staticmethod
    def _share(batches: Sequence[Batch]) -> list[Batch]:
        return assign(batches, num_ranks=world_size())[global_rank()]

    def _unfinished(self, parts: Sequence[Part], *, also_suspects: bool = False) -> list[Part]:
        """Return the batches with at least one unfinished item; such a batch is rerun as a whole.

        Items with non-finite results in an earlier attempt count as finished; with `also_suspects` only if they were
        also rerun as padded rows.
        """
        journal = self.journal
        if journal is None:
            return list(parts)
        finished = journal.done if also_suspects else journal.done | journal.suspects.keys()
        return [part for part in parts if not finished.issuperset(request.key for request in part.requests)]

    def _keep(self, results: Results, journal: SharedJournal | None, *, suspect: bool = False) -> Results:
        """Write results to the journal, count them for the time budget, and return them."""
        if journal is not None:
            journal.add(results, suspect=suspect)
        for result in () if suspect else results.values():
            self.tally[result.key.task].num_items += 1
            self.tally[result.key.task].num_right += result.score or 0.0
        return results

    def _plan(self) -> Results:
        """Probe the model if needed, plan what every rank can run, and return the results of an earlier attempt."""
        if self.journal is not None:
            self.journal.read()
        found = self.runner.probe({} if self.journal is None else self.journal.planned)
        if self.planned is None or self.planned.layout != found.layout:
            if found.scoring is not None:
                log.info('scoring: %s; %d tokens per batch', found.scoring, found.budget.scoring)
            if found.generation is not None:
                log.info('generation: %s; %d tokens per batch', found.generation, found.budget.generation)
            self.planned = None
        if self.is_finding_subset:
            return {}
        if self.planned is None:
            self.planned = self.runner.planned(self.prepared)
        if self.journal is None:
            return {}
        recorded = self.journal.planned  # that of an earlier version lacks some of these
        self.journal.begin({name: getattr(self.planned, name) for name in PLAN if not recorded or name in recorded})
        return self.journal.results

    def _score(self, batch: Batch, following: Batch | None, suspects: Results | None) -> Results:
        """Start a batch; while the device runs it, lay out the next and return the results of the one before.

        The last one's are returned too.
        """
        outputs = self.runner.language_model.launch(batch)
        results = self._finish_batch()
        self.launched = partial(self._results_of, outputs, suspects)
        if following is None:
            return results | self._finish_batch()
        self.runner.language_model.lay_out(following)
        return results

    def _finish_batch(self) -> Results:
        """Return the results of the batch that was launched last, if any."""
        launched, self.launched = self.launched, None
        return {} if launched is None else launched()

    def _results_of(self, outputs: Outputs, suspects: Results | None) -> Results:
        results = self.everything.results(outputs())
        if suspects is not None:
            not_finite = {key: result for key, result in results.items() if not is_finite(result)}
            suspects.update(self._keep(not_finite, self.journal, suspect=True))
            results = {key: result for key, result in results.items() if key not in not_finite}
        return self._keep(results, self.journal)

    def _generate(self, batch: ContinuousBatch, work: BatchWork) -> Results:
        """Generate a batch and return its results, except for programs, which run in the background until `_collect`.

        Ranks wait for each other afterwards, because the duration of generations cannot be predicted.
        """
        if self.runner.generator is None:
            raise RuntimeError('the first step, which probes the model, was not run')
        outputs = self.runner.generator.generate(batch, work.progress)
        tasks = self.prepared.tasks
        programs = [one for one in outputs if tasks[one.key.task].runs_programs]
        if programs:
            self.running.append(self.background.submit(self._score_generations, programs, self.journal))
        keys = {output.key for output in programs}
        results = self._score_generations([output for output in outputs if output.key not in keys], self.journal)
        meet()
        return results

    def _score_generations(self, outputs: Sequence[Generation], journal: SharedJournal | None) -> Results:
        """Score generations of the evaluation that owns this journal; it may have failed in the meantime."""
        return self._keep(self.everything.results(outputs), journal)

    def _collect(self) -> Results:
        """Wait for all programs and return their results.

        Ranks exchange their state every COLLECT_SECONDS, so that no collective waits for longer.
        """
        start = time.perf_counter()
        self.work.task = 'programs'
        waiting: set[Future[Results]] = set(self.running)
        while any(gather(len(waiting))):
            waiting = wait(waiting, timeout=COLLECT_SECONDS).not_done
        found = {key: result for running in self.running for key, result in running.result().items()}
        self.running = []
        seconds = time.perf_counter() - start
        for key in found:
            self.busy_seconds[key.task] += seconds / len(found)
        return found

    def finish(self) -> Evaluation:
        """Gather the results of all ranks by item, only once, and return the scores, the same on every rank.

        Raise ConfigError if only some of the steps were run, as `trainer.eval(subset_num_batches=...)` does.
        """
        if self.evaluation is None:
            if not self.is_complete:
                raise ConfigError(SOME_BATCHES)
            planned = self.current_plan
            # The rounds of a time budget may have run items outside the subset.
            own = [result for result in self.results.values() if self.budget is None or result.key in planned.items]
            gathered = gather((own, self.busy_seconds))
            busy = {task: sum(seconds[task] for _, seconds in gathered) for task in planned.tasks}
            results: Results = {}
            for part, _ in gathered:
                for result in part:
                    results.setdefault(result.key, result)
            wall_seconds = time.perf_counter() - self.started
            self.evaluation = conclude(planned, results, share_seconds(wall_seconds, busy))
        return self.evaluation


def work_of(part: Batch | ContinuousBatch) -> BatchWork:
    """Return the work of a batch, none of which is done yet."""
    kind = GENERATION if isinstance(part, ContinuousBatch) else SCORING
    return BatchWork(kind=kind, num_items=len(part.requests), cost=part.cost)


def num_requests(parts: Sequence[Batch | ContinuousBatch]) -> int:
    """Return the number of items in these batches."""
    return sum(len(part.requests) for part in parts)


def size_of(request: Request) -> int:
    """Return a request's size in tokens, as a measure of its work."""
    if isinstance(request, ScoreRequest):
        return sum(len(ids) for ids in (*request.contexts, *request.continuations))
    return request.length


def is_finite(result: ItemResult) -> bool:
    """Return whether all log-probabilities of an item are finite."""
    return result.logprobs is None or all(map(math.isfinite, result.logprobs))
