"""Run a plan on this rank: scored batches, generations, programs, and items that are rerun by themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from llmfoundry_gauntlet.engine.continuous import ContinuousBatch, assign_continuous_batches
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, Batch, plan
from llmfoundry_gauntlet.engine.ranks import assign
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation
from llmfoundry_gauntlet.runtime.distributed import gather, global_rank, meet, world_size
from llmfoundry_gauntlet.runtime.launcher import Launcher
from llmfoundry_gauntlet.runtime.programs import BackgroundPrograms
from llmfoundry_gauntlet.runtime.progress import GENERATION, SCORING, BatchWork
from llmfoundry_gauntlet.runtime.runner import ModelRunner
from llmfoundry_gauntlet.runtime.step_clock import StepClock
from llmfoundry_gauntlet.runtime.writer import Results, ResultWriter
from llmfoundry_gauntlet.types import Generation, ItemResult, ScoreOutput

ResultsOf = Callable[[Sequence[ScoreOutput]], Results]


class PlanRun:
    """One run of a plan, without what the journal has already.

    Items with non-finite log-probabilities, which other items in the batch may have caused, are suspects: they are put
    aside, and rerun as padded rows at the end.
    """

    def __init__(
        self,
        planned: PlannedEvaluation,
        *,
        runner: ModelRunner,
        launcher: Launcher,
        programs: BackgroundPrograms,
        writer: ResultWriter,
        clock: StepClock,
    ) -> None:
        self.planned = planned
        self.runner = runner
        self.launcher = launcher
        self.programs = programs
        self.writer = writer
        self.clock = clock
        self.runs_programs = any(task.runs_programs for task in planned.tasks.values())
        self.suspects: Results = {}  # of this rank
        # All ranks have the suspects of an earlier attempt; one must report them.
        if writer.journal is not None and global_rank() == 0:
            self.suspects.update(writer.journal.suspects)

    def steps(self) -> Iterator[Callable[[], Results]]:
        """Yield this rank's steps, which return the results that are known by then.

        All ranks have equally many, as steps and this function contain collectives: the shares are filled up for that.
        """
        scored = self.writer.unfinished(self.planned.batches)
        generated = self.writer.not_generated(self.planned.continuous_batches)
        batches = share_of(scored)
        generations = assign_continuous_batches(generated, num_ranks=world_size())[global_rank()]

        scoring_works = [work_of(batch) for batch in batches]
        generation_works = [work_of(generation) for generation in generations]
        self.clock.work.add(num_items([*scored, *generated]), [*scoring_works, *generation_works])
        self.clock.work.num_steps += len(batches) + len(generations) + self.runs_programs

        yield from self._scoring(batches, scoring_works, self._score_or_put_aside)

        for generation, work in zip(generations, generation_works, strict=True):
            generate = partial(self._generate, generation, work)
            yield self.clock.timed(generate, generation, work)

        # Programs run in the background of scoring and generation, and are waited for when the model has no more work.
        if self.runs_programs:
            yield self.clock.timed(self._collect)

        yield from self._rerun_suspects()

    def _scoring(
        self, batches: Sequence[Batch], works: Sequence[BatchWork | None], results_of: ResultsOf
    ) -> Iterator[Callable[[], Results]]:
        """Yield the steps that score these batches."""
        # The launcher lays out the following batch while the device runs this one; after the last there is none.
        pairs = pairwise([*batches, None])
        for (batch, following), work in zip(pairs, works, strict=True):
            assert batch is not None
            score = partial(self._score, batch, following, results_of)
            yield self.clock.timed(score, batch, work)

    def _score(self, batch: Batch, following: Batch | None, results_of: ResultsOf) -> Results:
        """Start a batch and return the results of the one before; of this one too, if no other follows."""
        results: Results = {}
        for outputs in self.launcher.run(self.runner.language_model, batch, following):
            results.update(results_of(outputs))
        return results

    def _score_or_put_aside(self, outputs: Sequence[ScoreOutput]) -> Results:
        """Score the outputs of a batch, write and return the finite results, and put the suspects aside."""
        results = self.writer.results_of(outputs)
        not_finite = {key: result for key, result in results.items() if not is_finite(result)}
        finite = {key: result for key, result in results.items() if key not in not_finite}

        self.writer.write_suspects(not_finite)
        self.suspects.update(not_finite)
        self.writer.write(finite)
        return finite

    def _generate(self, generation: ContinuousBatch, work: BatchWork) -> Results:
        """Generate a batch and return its results, except for programs, which run in the background until `_collect`.

        Each item is scored and written as soon as its generation has ended, as a batch may take hours. Ranks wait for
        each other afterwards, because the duration of generations cannot be predicted.
        """
        if self.runner.generator is None:
            raise RuntimeError('the first step, which probes the model, was not run')
        results: Results = {}

        def keep(generations: Sequence[Generation]) -> None:
            results.update(self._score_texts(generations))

        self.runner.generator.generate(generation, work.progress, keep)
        meet()
        return results

    def _score_texts(self, generations: Sequence[Generation]) -> Results:
        """Score and write generations and return their results; programs are only started."""
        texts: list[Generation] = []
        for generation in generations:
            if self.planned.tasks[generation.key.task].runs_programs:
                self.programs.submit(partial(self.writer.score_program, generation))
            else:
                texts.append(generation)
        return self.writer.score(texts)

    def _collect(self) -> Results:
        """Wait for all programs of all ranks and return the results of this rank's."""
        started = time.perf_counter()
        self.clock.work.task = 'programs'
        results = self.programs.collect()
        self.clock.share_equally(time.perf_counter() - started, results.keys())
        return results

    def _rerun_suspects(self) -> Iterator[Callable[[], Results]]:
        """Yield the steps that run the suspects of all ranks as padded rows, which do not affect each other."""
        suspects_by_rank = gather(list(self.suspects))
        suspect_keys = {key for keys in suspects_by_rank for key in keys}
        if self.planned.layout == PADDED_ROWS:
            # They were such rows already: a rerun would change nothing.
            self.clock.work.num_steps += 1
            yield self.clock.timed(lambda: self.suspects)
            return

        requests = [request for request in self.planned.score_requests if request.key in suspect_keys]
        rows = plan(
            requests,
            tokens_per_batch=self.planned.tokens_per_batch,
            layout=PADDED_ROWS,
            rotary=self.runner.language_model.rotary,
        )
        batches = share_of(self.writer.unfinished(rows, also_suspects=True))
        self.clock.work.num_steps += len(batches)
        no_works = [None] * len(batches)  # their items are counted as done already
        yield from self._scoring(batches, no_works, self.writer.score)


def share_of(batches: Sequence[Batch]) -> list[Batch]:
    """Return this rank's share of scored batches."""
    return assign(batches, num_ranks=world_size())[global_rank()]


def work_of(batch: Batch | ContinuousBatch) -> BatchWork:
    """Return the work of a batch, none of which is done yet."""
    kind = GENERATION if isinstance(batch, ContinuousBatch) else SCORING
    return BatchWork(kind=kind, num_items=num_items([batch]), cost=batch.cost)


def num_items(batches: Sequence[Batch | ContinuousBatch]) -> int:
    """Return the number of items in these batches; right generations are no further items to those who watch."""
    return sum(not request.key.is_gold for batch in batches for request in batch.requests)


def is_finite(result: ItemResult) -> bool:
    """Return whether all log-probabilities of an item are finite."""
    return result.logprobs is None or all(map(math.isfinite, result.logprobs))
