"""An evaluation as the steps that Composer's loop takes: the probe, this rank's batches, and a second look."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from composer.utils import dist

from llmfoundry_gauntlet.config.settings import AUTO
from llmfoundry_gauntlet.engine.assign import assign
from llmfoundry_gauntlet.engine.budget import automatic_budget
from llmfoundry_gauntlet.engine.generation import WAYS, ReplyWriter
from llmfoundry_gauntlet.engine.generation_probe import ReplyProbe, probe_replies
from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import LAYOUTS, PADDED_ROWS, Batch, plan
from llmfoundry_gauntlet.engine.pools import Pool, assign_pools
from llmfoundry_gauntlet.engine.probe import Probe, probe
from llmfoundry_gauntlet.engine.reply import ReplyDecoder
from llmfoundry_gauntlet.evaluation import PlannedEvaluation, PreparedEvaluation, plan_evaluation
from llmfoundry_gauntlet.tasks import type_of
from llmfoundry_gauntlet.values import ItemKey, ItemResult, Request

log = logging.getLogger(__name__)

Results = dict[ItemKey, ItemResult]

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
        """How many items the step computes."""
        return len(self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the probes found of a model, and the tokens of a batch, which stay so that evaluations can be compared."""

    scoring: Probe | None
    replies: ReplyProbe | None
    budget: int

    @property
    def certain(self) -> bool:
        """Whether it holds for later weights as well."""
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
        self.prepared = prepared
        self.tokenizer = tokenizer
        self.longest = prepared.longest
        self.longest_reply = prepared.longest_reply
        self.planned: PlannedEvaluation | None = None
        self.found: Found | None = None
        self.writer: ReplyWriter | None = None  # once replies are wanted of a model
        self.language_model: CausalLanguageModel | None = None  # once there is a model to run
        self.runs_programs = any(type_of(task).programs is not None for task in prepared.tasks.values())
        self.background = ThreadPoolExecutor(max_workers=1, thread_name_prefix='marking')
        self.running: list[Future[Results]] = []  # programs of finished pools

    def __iter__(self) -> Iterator[Step]:
        yield Step(loader=self, run=self._plan)
        planned = self.current_plan
        suspects: Results = {}
        for batch in self._share(planned.batches):
            yield self._step(partial(self._score, batch, suspects), batch)
        for pool in assign_pools(planned.pools, num_ranks=dist.get_world_size())[dist.get_global_rank()]:
            yield Step(
                loader=self,
                run=partial(self._write, pool),
                planned=planned,
                requests=pool.requests,
                num_tokens=sum(request.length for request in pool.requests),
            )
        if self.runs_programs:
            yield self._step(self._collect)
        found = {key for keys in dist.all_gather_object(list(suspects)) for key in keys}
        if planned.layout == PADDED_ROWS:  # where nothing spoils another row
            yield self._step(lambda: suspects)
        else:
            again = [request for request in self.prepared.score_requests if request.key in found]
            for batch in self._share(plan(again, tokens_per_batch=planned.tokens_per_batch, layout=PADDED_ROWS)):
                yield self._step(partial(self._score, batch, None), batch)
        self._model.forget()

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

    def _step(self, run: Callable[[], Results], batch: Batch | None = None) -> Step:
        requests = () if batch is None else batch.requests
        num_tokens = 0 if batch is None else batch.num_tokens
        return Step(loader=self, run=run, planned=self.planned, requests=requests, num_tokens=num_tokens)

    @staticmethod
    def _share(batches: Sequence[Batch]) -> list[Batch]:
        return assign(batches, num_ranks=dist.get_world_size())[dist.get_global_rank()]

    def _plan(self) -> Results:
        """Plans for what every rank can run, after a probe unless the model is known for certain."""
        found = self.found
        if found is None or not found.certain:
            budget = self._budget() if found is None else found.budget
            mine = Found(scoring=self._probe(), replies=self._probe_replies(), budget=budget)
            found = self.found = agreed(dist.all_gather_object(mine))
        if self.writer is not None and found.replies is not None:
            self.writer.way = found.replies.way
        if self.planned is None or self.planned.layout != found.layout:
            self.planned = plan_evaluation(
                self.prepared,
                tokens_per_batch=found.budget,
                layout=found.layout,
                way=str(found.scoring or ''),
                reply_way=str(found.replies or ''),
                hidden_token_id=self._model.hidden_token_id,
            )
            tokens = f'{self.planned.tokens_per_batch} tokens per batch'
            if found.scoring is not None:
                log.info('scoring: %s; %s', found.scoring, tokens)
            if found.replies is not None:
                log.info('replies: %s; %s', found.replies, tokens)
        return {}

    def _probe(self) -> Probe | None:
        """What the model can score with, where anything is to be scored."""
        if not self.prepared.score_requests:
            return None
        return probe(self._model, vocabulary=self._vocabulary, longest=self.longest)

    def _probe_replies(self) -> ReplyProbe | None:
        """How the model can write, where any reply is wanted."""
        if not self.longest_reply:
            return None
        if self.writer is None:
            ends = end_ids(self.tokenizer, self._model.model, reference=self.prepared.data.settings.reference)
            self.writer = ReplyWriter(self._model, ReplyDecoder(self.tokenizer, ends))
        return probe_replies(self.writer, vocabulary=self._vocabulary, longest=self.longest_reply)

    @property
    def _vocabulary(self) -> int:
        return min(len(self.tokenizer), self._model.vocabulary)

    def _budget(self) -> int:
        """The tokens of a batch that are wanted, or that suit this rank's device."""
        tokens = self.prepared.data.settings.tokens_per_batch
        if tokens != AUTO:
            return int(tokens)
        return automatic_budget(
            self._model.model.config,
            self._model.device,
            num_tokens=self.prepared.num_tokens,
            num_ranks=dist.get_world_size(),
            writes=self.longest_reply > 0,
        )

    def _score(self, batch: Batch, suspects: Results | None) -> Results:
        """The results of a batch; those that are not finite go to `suspects` where they are to be run again."""
        results = self.current_plan.results(self._model.run(batch))
        if suspects is not None:
            for key in [key for key, result in results.items() if not is_finite(result)]:
                suspects[key] = results.pop(key)
        return results

    def _write(self, pool: Pool) -> Results:
        """The results of a pool. Ranks wait for each other: replies take longer than can be foreseen.

        Programs are run while the model goes on; their results are collected after the last pool.
        """
        if self.writer is None:
            raise RuntimeError('the first step, which probes how replies are written, was not run')
        outputs = self.writer.write(pool)
        tasks = self.prepared.tasks
        programs = [one for one in outputs if type_of(tasks[one.key.task]).programs is not None]
        if programs:
            self.running.append(self.background.submit(self.current_plan.results, programs))
        keys = {output.key for output in programs}
        results = self.current_plan.results(output for output in outputs if output.key not in keys)
        dist.barrier()
        return results

    def _collect(self) -> Results:
        """The results of the programs that are still being run.

        Ranks ask each other now and then whether all are done, so that none waits longer than that in a collective.
        """
        waiting: set[Future[Results]] = set(self.running)
        while any(dist.all_gather_object(len(waiting))):
            waiting = wait(waiting, timeout=COLLECT_SECONDS).not_done
        found = {key: result for running in self.running for key, result in running.result().items()}
        self.running = []
        return found


def end_ids(tokenizer: Any, model: Any, *, reference: bool) -> set[int]:
    """The tokens that end a reply: the tokenizer's eos, and those of the model's own generation settings.

    With `reference` the tokenizer's alone, as llm-foundry gives to transformers.
    """
    ends = {tokenizer.eos_token_id}
    if not reference:
        own = getattr(getattr(model, 'generation_config', None), 'eos_token_id', None)
        ends.update(own if isinstance(own, (list, tuple)) else [own])
    return {end for end in ends if end is not None}


def agreed(found: Sequence[Found]) -> Found:
    """What every rank can run: the most careful ways and the smallest budget of all ranks."""
    scoring = [one.scoring for one in found if one.scoring is not None]
    replies = [one.replies for one in found if one.replies is not None]
    return Found(
        scoring=max(scoring, key=lambda probe: LAYOUTS.index(probe.layout), default=None),
        replies=max(replies, key=lambda probe: WAYS.index(probe.way), default=None),
        budget=min(one.budget for one in found),
    )


def is_finite(result: ItemResult) -> bool:
    """Whether all log-probabilities of an item are numbers."""
    return result.logprobs is None or all(map(math.isfinite, result.logprobs))
