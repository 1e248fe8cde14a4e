"""The evaluation loop: this rank's steps, one evaluation after another, and the scores gathered from all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial

from llmfoundry_gauntlet.engine.decoding import NO_CACHE
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, plan
from llmfoundry_gauntlet.engine.probe import Probe
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.run import (
    Evaluation,
    PlannedEvaluation,
    PreparedEvaluation,
    conclude,
    share_seconds,
)
from llmfoundry_gauntlet.evaluation.subsets import Sizes, first_questions
from llmfoundry_gauntlet.runtime.distributed import gather
from llmfoundry_gauntlet.runtime.journal import SharedJournal
from llmfoundry_gauntlet.runtime.launcher import Launcher
from llmfoundry_gauntlet.runtime.plan_run import PlanRun
from llmfoundry_gauntlet.runtime.programs import BackgroundPrograms
from llmfoundry_gauntlet.runtime.progress import Work
from llmfoundry_gauntlet.runtime.runner import PLAN, EvaluatedModel, ModelRunner, ProbedModel
from llmfoundry_gauntlet.runtime.step_clock import StepClock
from llmfoundry_gauntlet.runtime.time_budget import sizes_within_budget
from llmfoundry_gauntlet.runtime.writer import Results, ResultWriter
from llmfoundry_gauntlet.scoring.code.execution import num_programs_run
from llmfoundry_gauntlet.scoring.mathematics import Comparer

log = logging.getLogger(__name__)

SOME_BATCHES = (
    'subset_num_batches: a score needs every item of its tasks; leave it out. For a quick try give subset_items, at '
    'most so many items of each task: EvalGauntlet(subset_items=10, ...). trainer.eval(eval_dataloader=...) runs other '
    'evaluators alone'
)
COSTLY = 2  # times the tokens of the fastest layout: worth a warning
SUBSET = 'subset'  # of a time budget: the number of questions per task, recorded to be resumed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One step of an evaluation, which Composer passes to `eval_forward` as a batch."""

    loop: EvaluationLoop
    run: Callable[[], Results]


class EvaluationLoop:
    """Yield this rank's steps of each evaluation. Not a torch DataLoader, because iterating one draws random numbers.

    The first step probes the model and plans; the steps of the plan follow (see `PlanRun`). Call `finish` after the
    last step, and `stop` after an evaluation that has finished or failed.
    """

    batch_size = 1  # read by Composer

    def __init__(self, prepared: PreparedEvaluation, model: EvaluatedModel) -> None:
        # The evaluation.
        self.everything = prepared
        self.prepared = prepared  # the items to evaluate: all, or those that fit in the time budget
        self.planned: PlannedEvaluation | None = None  # the latest plan, reused while the layout stays the same
        self.budget_seconds = prepared.data.settings.budget_seconds
        self.sizes: dict[str, int] | None = None  # questions per task that fit in the time budget, once they are chosen
        self.choosing_seconds = 0.0  # that the choice took

        # The parts that run it.
        self.runner = ModelRunner(model, prepared)
        self.launcher = Launcher()
        self.programs = BackgroundPrograms()
        self.comparer = Comparer()  # which starts processes at the first MATH answer, until `stop`
        self.clock = StepClock(prepared.tasks)

        # The current evaluation.
        self.journal: SharedJournal | None = None
        self.steps: Generator[Step, None, None] | None = None
        self.results: Results = {}  # of this rank
        self.is_complete = False  # every step has run
        self.evaluation: Evaluation | None = None  # of all ranks, after `finish`

    def __iter__(self) -> Iterator[Step]:
        self.steps = self._steps()
        return self.steps

    def _steps(self) -> Generator[Step, None, None]:
        """Yield this rank's steps of one evaluation."""
        self.clock.restart()
        self._drop_unfinished()
        self.results, self.evaluation, self.is_complete = {}, None, False
        self.use(self.runner.model)
        self.runner.language_model.forget()  # prefixes cached for earlier weights
        yield self._step(self.clock.timed(self._plan))
        yield from self._run(self.current_plan)
        self.runner.language_model.forget()
        self.is_complete = True

    def _step(self, run: Callable[[], Results]) -> Step:
        return Step(loop=self, run=partial(self._run_step, run))

    def _run_step(self, run: Callable[[], Results]) -> Results:
        """Run a step, and keep its results for `finish`."""
        results = run()
        self.results.update(results)
        return results

    def _run(self, planned: PlannedEvaluation) -> Iterator[Step]:
        """Yield this rank's steps of a plan."""
        plan_run = PlanRun(
            planned,
            runner=self.runner,
            launcher=self.launcher,
            programs=self.programs,
            writer=ResultWriter(self.everything, self.journal, self.comparer),
            clock=self.clock,
        )
        for run in plan_run.steps():
            yield self._step(run)

    def _plan(self) -> Results:
        """Probe the model if needed, plan what every rank can run, and return the results of an earlier attempt."""
        if self.journal is not None:
            self.journal.read()
        recorded = {} if self.journal is None else self.journal.planned  # by an earlier attempt
        found = self.runner.probe(recorded)
        if self.planned is None or self.planned.layout != found.layout:
            log_probes(found)
            self.planned = None

        if self.budget_seconds is not None and self.sizes is None:
            # The items of an earlier attempt are of its subset; timed anew, the subset would be another.
            self.use_subset(recorded[SUBSET] if SUBSET in recorded else self._choose_subset(self.budget_seconds))
        if self.planned is None:
            self.planned = self.runner.planned(self.prepared)
            warn_of_fallbacks(self.planned, found)
        if self.journal is None:
            return {}

        plan = {name: getattr(self.planned, name) for name in PLAN}
        if self.sizes is not None:
            plan[SUBSET] = self.sizes
        self.journal.begin(plan)
        return self.journal.results

    def _choose_subset(self, budget_seconds: float) -> Sizes:
        """Return the number of questions of each task that fit in the time."""
        self.clock.work.task = 'choosing the items that fit in the time budget'
        started = time.perf_counter()
        sizes = sizes_within_budget(self.everything, self.runner, budget_seconds)
        self.choosing_seconds = time.perf_counter() - started
        log.info(
            'time_budget %gs: %d of %d questions, the same at every evaluation; chosen in %.1f s',
            budget_seconds,
            sum(sizes.values()),
            self.everything.num_questions,
            self.choosing_seconds,
        )
        return sizes

    def use(self, model: EvaluatedModel) -> bool:
        """Evaluate this model; return whether its network, or a part of it, is another than before."""
        is_new = self.runner.use(model)
        if is_new:
            self.planned = None
        return is_new

    def use_subset(self, sizes: Sizes) -> None:
        """Evaluate the first questions of each task, as many as fit in the time budget, from now on.

        The first choice stays, and without a time budget all questions are asked.
        """
        if self.budget_seconds is None or self.sizes is not None:
            return
        asked = {key: self.everything.data.asked(key) for key in self.everything.tasks}
        self.prepared, self.planned = self.everything.only(first_questions(asked, sizes)), None
        self.sizes = dict(sizes)

    @property
    def current_plan(self) -> PlannedEvaluation:
        """Return the latest plan. Raise RuntimeError if the first step, which makes it, has not run."""
        if self.planned is None:
            raise RuntimeError('the first step, which makes the plan, was not run')
        return self.planned

    @property
    def work(self) -> Work:
        """Return the progress of the current evaluation on this rank."""
        return self.clock.work

    def progress(self) -> tuple[int, ...]:
        """Return counters that change whenever there is progress: steps, forwards, decoding steps, programs."""
        return self.clock.num_steps, *self.runner.progress(), num_programs_run()

    def doing(self) -> str:
        """Describe this rank's current step and its items."""
        return self.clock.doing()

    def finish(self) -> Evaluation:
        """Gather the results of all ranks by item, only once, and return the scores, the same on every rank.

        Raise ConfigError if only some of the steps were run, as `trainer.eval(subset_num_batches=...)` does.
        """
        if self.evaluation is None:
            if not self.is_complete:
                raise ConfigError(SOME_BATCHES)
            self.evaluation = self._conclude(self.current_plan)
        return self.evaluation

    def _conclude(self, planned: PlannedEvaluation) -> Evaluation:
        """Return the scores of the results of all ranks."""
        of_all_ranks = gather((list(self.results.values()), self.clock.busy_seconds))
        busy_seconds = {task: sum(seconds[task] for _, seconds in of_all_ranks) for task in planned.tasks}

        # Several ranks may have run an item, as filler for instance; the first one's result counts.
        results: Results = {}
        for results_of_rank, _ in of_all_ranks:
            for result in results_of_rank:
                results.setdefault(result.key, result)
        seconds = share_seconds(self.clock.wall_seconds, busy_seconds)
        return conclude(planned, results, seconds, self.comparer)

    def stop(self) -> None:
        """Clean up after an evaluation that has finished or failed."""
        self.clock.pause()
        if self.steps is not None:
            self.steps.close()  # an evaluation that failed is between two steps
            self.steps = None
        self._drop_unfinished()
        self.comparer.close()
        if self.journal is not None:
            self.journal.close()

    def _drop_unfinished(self) -> None:
        """Drop what an evaluation that failed has left: the batch on the device, and programs."""
        self.launcher.drop()
        self.programs.cancel()


def warn_of_fallbacks(planned: PlannedEvaluation, probed: ProbedModel) -> None:
    """Warn if the model runs more than twice the tokens of the fastest layout, with the reason of the probe.

    A model that tells too little to be sure is probed again later, so that is no reason.
    """
    scoring, generation = probed.scoring, probed.generation
    if scoring is not None and scoring.certain and scoring.layout == PADDED_ROWS:
        shared = plan(planned.score_requests, tokens_per_batch=planned.tokens_per_batch)
        num_shared = sum(batch.num_tokens for batch in shared)
        warn_if_costly('scoring', planned.num_model_tokens, num_shared, scoring)

    if generation is not None and generation.certain and generation.layout == NO_CACHE:
        num_tokens, num_cached = 0, 0
        for request in planned.generate_requests:
            num_prompt, num_new = len(request.context), request.max_new_tokens
            num_cached += num_prompt + num_new
            num_tokens += num_new * num_prompt + num_new * (num_new - 1) // 2
        warn_if_costly('generation', num_tokens, num_cached, generation)


def warn_if_costly(kind: str, num_tokens: int, num_fastest: int, probe: Probe) -> None:
    """Warn if the tokens to be run are more than twice those of the fastest layout."""
    ratio = num_tokens / max(1, num_fastest)
    if ratio > COSTLY:
        log.warning('%s runs up to %.0f times the tokens of the fastest layout: %s', kind, ratio, probe)


def log_probes(probed: ProbedModel) -> None:
    """Log the layouts in which the model runs, and the tokens per batch."""
    if probed.scoring is not None:
        log.info('scoring: %s; %d tokens per batch', probed.scoring, probed.budget.scoring)
    if probed.generation is not None:
        log.info('generation: %s; %d tokens per batch', probed.generation, probed.budget.generation)
