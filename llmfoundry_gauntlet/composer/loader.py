"""An evaluation as the steps that Composer's loop takes: the probe, this rank's batches, and a second look."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from composer.utils import dist

from llmfoundry_gauntlet.composer.journal import SharedJournal
from llmfoundry_gauntlet.composer.progress import Work
from llmfoundry_gauntlet.composer.time_budget import Measured, TimeBudget, summed
from llmfoundry_gauntlet.config.settings import AUTO
from llmfoundry_gauntlet.engine.continuous_batches import ContinuousBatch
from llmfoundry_gauntlet.engine.decoding import GENERATION_LAYOUTS
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel, automatic_budget
from llmfoundry_gauntlet.engine.plan import LAYOUTS, PADDED_ROWS, Batch, plan
from llmfoundry_gauntlet.engine.probe import Probe, probe, probe_generation, use_eager_attention
from llmfoundry_gauntlet.engine.ranks import assign, assign_continuous_batches
from llmfoundry_gauntlet.engine.stopping import GenerationDecoder, end_ids
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, PreparedEvaluation, plan_evaluation
from llmfoundry_gauntlet.types import Generation, ItemKey, ItemResult, Request, ScoreRequest

log = logging.getLogger(__name__)

Results = dict[ItemKey, ItemResult]
Part = TypeVar('Part', Batch, ContinuousBatch)

COLLECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One step of an evaluation as Composer carries it: what `eval_forward` runs.

    The first step has no plan yet: it makes it.
    """

    loader: EvaluationLoader
    run: Callable[[], Results]
    planned: PlannedEvaluation | None = None
    requests: tuple[Request, ...] = ()
    num_tokens: int = 0

    @property
    def num_items(self) -> int:
        """Return the number of items of the step."""
        return len(self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The results of the probes and the tokens per batch, which stay the same so that evaluations compare."""

    scoring: Probe | None
    replies: Probe | None
    budget: int

    @property
    def certain(self) -> bool:
        """Return whether it holds for later weights as well."""
        return all(probe is None or probe.certain for probe in (self.scoring, self.replies))

    @property
    def layout(self) -> str:
        """The layout of batches."""
        return LAYOUTS[0] if self.scoring is None else self.scoring.layout


class EvaluationLoader:
    """This rank's steps, again at each evaluation. Not a torch DataLoader, whose iteration draws random numbers.

    The first step finds out what the model allows; the batches follow from that, and after them the pools of replies.
    Items whose numbers are not finite, some of which may have been spoilt by others of their batch, are run once more
    by themselves at the end. `language_model` must be there before a step is run. `planned` is the latest plan, and
    stays while the layout is the same.
    """

    batch_size = 1  # Composer asks for it

    def __init__(self, prepared: PreparedEvaluation, tokenizer: Any) -> None:
        self.everything = prepared
        self.prepared = prepared  # what is run: everything, or what fits into the time
        self.tokenizer = tokenizer
        self.longest = prepared.longest
        self.longest_reply = prepared.longest_reply
        self.planned: PlannedEvaluation | None = None
        self.found: Found | None = None
        self.writer: TextGenerator | None = None  # once replies are wanted of a model
        self.language_model: CausalLanguageModel | None = None  # once there is a model to run
        self.runs_programs = any(task.runs_programs for task in prepared.tasks.values())
        self.background = ThreadPoolExecutor(max_workers=1, thread_name_prefix='marking')
        self.running: list[Future[Results]] = []  # programs of finished pools
        self.num_steps = 0  # begun and ended
        self.work = Work()  # of this rank, in this evaluation
        self.requests: Sequence[Request] = ()  # of the step that is run
        self.journal: SharedJournal | None = None  # of this evaluation, where there is to be one
        seconds = prepared.data.settings.budget_seconds
        self.budget = None if seconds is None else TimeBudget(prepared, seconds)
        self.busy_seconds = dict.fromkeys(prepared.tasks, 0.0)  # by task, of this evaluation
        self.tally = {key: Measured() for key in prepared.tasks}  # of this round

    def __iter__(self) -> Iterator[Step]:
        started = time.perf_counter()
        self._drop_programs()
        self.work = Work()
        self.busy_seconds = dict.fromkeys(self.everything.tasks, 0.0)
        yield Step(loader=self, run=partial(self._timed, self._plan, ()))
        if self.budget is not None and self.is_finding_out:
            yield from self._find_out(self.budget, started)
        else:
            yield from self._run(self.current_plan)
        self._model.forget()

    def _run(self, planned: PlannedEvaluation) -> Iterator[Step]:
        """This rank's steps of a plan."""
        suspects: Results = {}
        if self.journal is not None and dist.get_global_rank() == 0:
            suspects.update(self.journal.suspects)
        wanted: list[Batch | ContinuousBatch] = [*self._unfinished(planned.batches), *self._unfinished(planned.pools)]
        batches = self._share([part for part in wanted if isinstance(part, Batch)])
        everyones = assign_continuous_batches(
            [part for part in wanted if isinstance(part, ContinuousBatch)], num_ranks=dist.get_world_size()
        )
        pools = everyones[dist.get_global_rank()]
        mine: list[Batch | ContinuousBatch] = [*batches, *pools]
        self.work.add(num_requests(wanted), num_requests(mine), sum(part.cost for part in mine))
        for batch in batches:
            yield self._step(partial(self._score, batch, suspects), batch)
        for pool in pools:
            yield self._step(partial(self._write, pool), pool)
        if self.runs_programs:
            yield self._step(self._collect)
        found = {key for keys in dist.all_gather_object(list(suspects)) for key in keys}
        if planned.layout == PADDED_ROWS:  # where nothing spoils another row
            yield self._step(lambda: suspects)
        else:
            again = [request for request in planned.score_requests if request.key in found]
            tokens = planned.tokens_per_batch
            alone = plan(again, tokens_per_batch=tokens, layout=PADDED_ROWS, rotary=self._model.rotary)
            for batch in self._share(self._unfinished(alone, also_suspects=True)):
                yield self._step(partial(self._score, batch, None), batch)

    def _find_out(self, budget: TimeBudget, started: float) -> Iterator[Step]:
        """Rounds of more and more items, until those are known that fit into the time, which has `started`."""
        while keys := budget.next_round(max(dist.all_gather_object(time.perf_counter() - started))):
            begun, busy = time.perf_counter(), dict(self.busy_seconds)
            self.tally = {key: Measured() for key in self.everything.tasks}
            self.planned = self._planned(self.everything.only(keys))
            yield from self._run(self.planned)
            mine = {
                key: replace(one, busy_seconds=self.busy_seconds[key] - busy[key]) for key, one in self.tally.items()
            }
            gathered = dist.all_gather_object((mine, time.perf_counter() - begun))
            measured = {key: summed([part[key] for part, _ in gathered]) for key in mine}
            budget.learn(measured, max(seconds for _, seconds in gathered))
        budget.settle()
        self.prepared = budget.chosen()
        self.planned = self._planned(self.prepared)

    def settle(self, sizes: Mapping[str, int]) -> None:
        """Continue with the subset of an earlier job's time budget, unless one is already chosen."""
        if self.budget is None or self.budget.is_settled:
            return
        self.budget.restore(sizes)
        self.prepared, self.planned = self.budget.chosen(), None

    def stop(self) -> None:
        """End an evaluation, whether it is finished or has failed."""
        self._drop_programs()
        if self.journal is not None:
            self.journal.close()

    def _drop_programs(self) -> None:
        """Run no more programs of an evaluation that has failed; those that still run count for no other."""
        while self.running:
            self.running.pop().cancel()

    @property
    def is_finding_out(self) -> bool:
        """Return whether it is not known yet which items fit into the time; such an evaluation has no journal."""
        return self.budget is not None and not self.budget.is_settled

    @property
    def _model(self) -> CausalLanguageModel:
        if self.language_model is None:
            raise RuntimeError('a step was run before there was a model to run it with')
        return self.language_model

    @property
    def current_plan(self) -> PlannedEvaluation:
        """The latest plan. Raises RuntimeError before the first step."""
        if self.planned is None:
            raise RuntimeError('the first step, which makes the plan, was not run')
        return self.planned

    def _step(self, run: Callable[[], Results], part: Batch | ContinuousBatch | None = None) -> Step:
        requests = () if part is None else part.requests
        num_tokens = 0 if part is None else part.num_tokens
        timed = partial(self._timed, run, requests, 0.0 if part is None else part.cost)
        return Step(loader=self, run=timed, planned=self.planned, requests=requests, num_tokens=num_tokens)

    def _timed(self, run: Callable[[], Results], requests: Sequence[Request], cost: float = 0.0) -> Results:
        """The results of a step, its time noted for the tasks of its requests."""
        start = time.perf_counter()
        self.num_steps, self.requests = self.num_steps + 1, requests
        self.work.task = requests[0].key.task if requests else ''
        results = run()
        self.num_steps, self.requests = self.num_steps + 1, ()
        self.work.num_done += len(requests)
        self.work.cost_done += cost
        seconds = time.perf_counter() - start
        sizes = list(map(size_of, requests))
        whole = sum(sizes)
        for request, size in zip(requests, sizes, strict=True):
            self.busy_seconds[request.key.task] += seconds * size / whole
        return results

    @staticmethod
    def _share(batches: Sequence[Batch]) -> list[Batch]:
        return assign(batches, num_ranks=dist.get_world_size())[dist.get_global_rank()]

    def _unfinished(self, parts: Sequence[Part], *, also_suspects: bool = False) -> list[Part]:
        """The batches or pools with an item that no earlier attempt has finished; they are run whole.

        Suspects have been run once, among others; with `also_suspects` those that have not been run again count too.
        """
        journal = self.journal
        if journal is None:
            return list(parts)
        finished = journal.done if also_suspects else journal.done | journal.suspects.keys()
        return [part for part in parts if not finished.issuperset(request.key for request in part.requests)]

    def _keep(self, results: Results, journal: SharedJournal | None, *, suspect: bool = False) -> Results:
        """Return the results, once they are in the journal."""
        if journal is not None:
            journal.add(results, suspect=suspect)
        for result in () if suspect else results.values():
            self.tally[result.key.task].num_items += 1
            self.tally[result.key.task].num_right += result.credit or 0.0
        return results

    def _plan(self) -> Results:
        """Plans for what every rank can run, after a probe unless the model is known for certain.

        Returns what an earlier attempt at this evaluation has finished.
        """
        found = self.found
        if self.journal is not None:
            self.journal.read()
        if found is None or not found.certain:
            budget = self._budget() if found is None else found.budget
            mine = Found(scoring=self._probe(), replies=self._probe_replies(), budget=budget)
            found = self.found = agreed(dist.all_gather_object(mine))
            if any(dist.all_gather_object(bool(self._model.eager))):
                use_eager_attention(self._model, 'another rank found it off the eager attention that defines the model')
        if self.writer is not None and found.replies is not None:
            self.writer.layout = found.replies.layout
        if self.planned is None or self.planned.layout != found.layout:
            tokens = f'{found.budget} tokens per batch'
            if found.scoring is not None:
                log.info('scoring: %s; %s', found.scoring, tokens)
            if found.replies is not None:
                log.info('replies: %s; %s', found.replies, tokens)
            self.planned = None
        if self.is_finding_out:
            return {}
        if self.planned is None:
            self.planned = self._planned(self.prepared)
        if self.journal is None:
            return {}
        self.journal.begin({'tokens_per_batch': self.planned.tokens_per_batch, 'layout': self.planned.layout})
        return self.journal.results

    def _planned(self, prepared: PreparedEvaluation) -> PlannedEvaluation:
        """The batches and pools of these items, as the model can run them."""
        found = self.found
        assert found is not None  # as the probe is what the first step begins with
        return plan_evaluation(
            prepared,
            tokens_per_batch=found.budget,
            layout=found.layout,
            way=str(found.scoring or ''),
            reply_way=str(found.replies or ''),
            hidden_token_id=self._model.hidden_token_id,
            rotary=self._model.rotary,
        )

    def _probe(self) -> Probe | None:
        """Return what the model can score with, where anything is to be scored."""
        if not self.prepared.score_requests:
            return None
        return probe(self._model, vocabulary=self._vocabulary, longest=self.longest)

    def _probe_replies(self) -> Probe | None:
        """Return how the model can write, where any reply is wanted."""
        if not self.longest_reply:
            return None
        if self.writer is None:
            ends = end_ids(self.tokenizer, self._model.model, reference=self.prepared.data.settings.reference)
            self.writer = TextGenerator(self._model, GenerationDecoder(self.tokenizer, ends))
        return probe_generation(self.writer, vocabulary=self._vocabulary, longest=self.longest_reply)

    @property
    def _vocabulary(self) -> int:
        return min(len(self.tokenizer), self._model.vocabulary)

    def _budget(self) -> int:
        """The tokens of a batch that are wanted, or that suit this rank's device."""
        tokens = self.prepared.data.settings.tokens_per_batch
        if tokens != AUTO:
            return int(tokens)
        if self.journal is not None and 'tokens_per_batch' in self.journal.planned:
            return int(self.journal.planned['tokens_per_batch'])
        return automatic_budget(
            self._model.model.config,
            self._model.device,
            num_tokens=self.prepared.num_tokens,
            num_ranks=dist.get_world_size(),
            generates=self.longest_reply > 0,
        )

    def _score(self, batch: Batch, suspects: Results | None) -> Results:
        """The results of a batch; those that are not finite go to `suspects` where they are to be run again."""
        results = self.everything.results(self._model.run(batch))
        if suspects is not None:
            spoilt = {key: result for key, result in results.items() if not is_finite(result)}
            suspects.update(self._keep(spoilt, self.journal, suspect=True))
            results = {key: result for key, result in results.items() if key not in spoilt}
        return self._keep(results, self.journal)

    def _write(self, pool: ContinuousBatch) -> Results:
        """The results of a pool. Ranks wait for each other: replies take longer than can be foreseen.

        Programs are run while the model goes on; their results are collected after the last pool.
        """
        if self.writer is None:
            raise RuntimeError('the first step, which probes how replies are written, was not run')
        outputs = self.writer.generate(pool)
        tasks = self.prepared.tasks
        programs = [one for one in outputs if tasks[one.key.task].runs_programs]
        if programs:
            self.running.append(self.background.submit(self._mark, programs, self.journal))
        keys = {output.key for output in programs}
        results = self._mark([output for output in outputs if output.key not in keys], self.journal)
        dist.barrier()
        return results

    def _mark(self, outputs: Sequence[Generation], journal: SharedJournal | None) -> Results:
        """Score generations of the evaluation with this journal, which may have failed meanwhile."""
        return self._keep(self.everything.results(outputs), journal)

    def _collect(self) -> Results:
        """The results of the programs that are still being run.

        Ranks ask each other now and then whether all are done, so that none waits longer than that in a collective.
        """
        start = time.perf_counter()
        self.work.task = 'programs'
        waiting: set[Future[Results]] = set(self.running)
        while any(dist.all_gather_object(len(waiting))):
            waiting = wait(waiting, timeout=COLLECT_SECONDS).not_done
        found = {key: result for running in self.running for key, result in running.result().items()}
        self.running = []
        seconds = time.perf_counter() - start
        for key in found:
            self.busy_seconds[key.task] += seconds / len(found)
        return found


def agreed(found: Sequence[Found]) -> Found:
    """Return what every rank can run: the most careful layouts and the smallest budget of all ranks."""
    scoring = [one.scoring for one in found if one.scoring is not None]
    replies = [one.replies for one in found if one.replies is not None]
    return Found(
        scoring=max(scoring, key=lambda probe: LAYOUTS.index(probe.layout), default=None),
        replies=max(replies, key=lambda probe: GENERATION_LAYOUTS.index(probe.layout), default=None),
        budget=min(one.budget for one in found),
    )


def num_requests(parts: Sequence[Batch | ContinuousBatch]) -> int:
    """Items of these batches and pools."""
    return sum(len(part.requests) for part in parts)


def size_of(request: Request) -> int:
    """Tokens that a request's work goes with."""
    if isinstance(request, ScoreRequest):
        return sum(len(ids) for ids in (*request.contexts, *request.continuations))
    return request.length


def is_finite(result: ItemResult) -> bool:
    """Return whether all log-probabilities of an item are numbers."""
    return result.logprobs is None or all(map(math.isfinite, result.logprobs))
