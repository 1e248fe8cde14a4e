"""What an evaluation would take: it is prepared and planned as ever, and a few parts of the plan are timed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from composer.core import get_precision_context
from composer.utils import dist, model_eval_mode

from llmfoundry_gauntlet.composer.evaluate import opened
from llmfoundry_gauntlet.composer.evaluators import attach_model, unwrapped
from llmfoundry_gauntlet.composer.loader import EvaluationLoader, size_of
from llmfoundry_gauntlet.engine.assign import assign, prefix_batch
from llmfoundry_gauntlet.engine.estimate import (
    Estimate,
    TaskEstimate,
    expected_tokens,
    prompt_tokens,
    scored_tokens,
    strata,
)
from llmfoundry_gauntlet.engine.generation import first_of_equal
from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import Batch
from llmfoundry_gauntlet.engine.pools import Pool, assign_pools
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation import PlannedEvaluation, share_seconds
from llmfoundry_gauntlet.values import GenerateRequest, Generation

Answer = TypeVar('Answer')
Seconds = dict[str, float]  # by task

NUM_BATCHES = 12  # that are timed
NEW_TOKENS = 64  # of a reply that is timed, at most
LEAST_REPLIES, MOST_REPLIES = 1, 6  # of a task
MOST_SECONDS = 30.0  # for batches, and for the prompts of replies; the least is timed in any case


def estimate(model: str | Path, *, out: str | Path | None = None, **settings: Any) -> Estimate:
    """What `evaluate` would take with the same arguments, which are checked in the same way; nothing is written.

    Raises GauntletError.
    """
    if settings.get('time_budget') is not None:
        raise ConfigError('time_budget: which items fit is found out by running them; leave it out of a dry run')
    started = time.perf_counter()
    with opened(model, out=out, **settings) as (trainer, callback):
        state, loader = trainer.state, callback.loader
        assert loader is not None  # as the Trainer is made
        attach_model(loader, unwrapped(state.model))
        preparing = time.perf_counter() - started
        with (
            torch.no_grad(),
            model_eval_mode(state.model),
            get_precision_context(state.precision, state.precision_config),
        ):
            return measure(loader, preparing)


def measure(loader: EvaluationLoader, preparing_seconds: float = 0.0) -> Estimate:
    """Plans an evaluation with the model that the loader has, and times a few batches and replies; no item is kept."""
    finding, _ = timed(loader, next(iter(loader)).run)
    planned = loader.current_plan
    scoring, by_task, num_timed = time_batches(loader, planned)
    replies = time_replies(loader, planned) if planned.pools else Replies()
    ranks = assign_pools(planned.pools, num_ranks=dist.get_world_size())
    writing, programs = [replies.seconds_of(pools) for pools in ranks], [replies.program_seconds(p) for p in ranks]
    busy = {task: sum(part.get(task, 0.0) for part in (by_task, *writing, *programs)) for task in planned.tasks}
    seconds = {
        'finding out what the model can run': finding,
        'scoring': scoring,
        'replies': max(sum(part.values()) for part in writing),
        'programs': max(sum(part.values()) for part in programs),
    }
    return Estimate(
        tasks=tuple(task_estimates(planned, share_seconds(sum(seconds.values()), busy))),
        seconds={name: value for name, value in seconds.items() if value},
        preparing_seconds=preparing_seconds,
        num_ranks=dist.get_world_size(),
        notes=tuple(notes(planned, num_timed, replies)),
    )


def task_estimates(planned: PlannedEvaluation, seconds: Mapping[str, float]) -> list[TaskEstimate]:
    """What the plan has of each task."""
    tokens = scored_tokens(planned.batches) + prompt_tokens(planned.pools)
    most_written: Counter[str] = Counter()
    for pool in planned.pools:
        for request in distinct(pool):
            most_written[request.key.task] += request.max_new_tokens
    num_items = Counter(key.task for key in planned.items)
    truncated = Counter(key.task for key, item in planned.items.items() if item.request.truncated)
    return [
        TaskEstimate(
            task=task,
            num_items=num_items[task],
            num_tokens=tokens[task],
            reply_tokens=most_written[task],
            num_truncated=truncated[task],
            seconds=seconds.get(task, 0.0),
        )
        for task in planned.tasks
    ]


def distinct(pool: Pool) -> list[GenerateRequest]:
    """The requests of a pool whose replies are written; equal ones share one."""
    names = first_of_equal(pool.requests)
    return [request for request in pool.requests if names[request.key] == request.key]


def timed(loader: EvaluationLoader, work: Callable[[], Answer]) -> tuple[float, Answer]:
    """Seconds, and what came of it."""
    device = None if loader.language_model is None else loader.language_model.device
    started = time.perf_counter()
    answer = work()
    if device is not None and device.type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, answer


def time_batches(loader: EvaluationLoader, planned: PlannedEvaluation) -> tuple[float, Seconds, int]:
    """Seconds of all batches, those by task of all ranks together, and how many were timed.

    Steps are in groups of like cost; of each group the one in the middle is timed, marks and all, and stands for it.
    All ranks take the same steps with as many forwards, and the slowest counts, as ranks wait for each other.
    """
    model = loader.language_model
    assert model is not None  # as the plan was made with it
    steps = list(zip(*assign(planned.batches, num_ranks=dist.get_world_size()), strict=True))
    costs = [max(batch.cost for batch in step) for step in steps]
    groups = strata(costs, NUM_BATCHES)
    rates: dict[int, float] = {}  # seconds for a token's worth of work, by group
    spent = 0.0
    for place in in_spread_order(len(groups)):
        if spent > MOST_SECONDS:
            break
        middle = groups[place][len(groups[place]) // 2]
        batch = steps[middle][dist.get_global_rank()]
        if any(one.prefix is not None for one in steps[middle]):  # whose forward is another step of the plan
            model.run(batch if batch.prefix is None else prefix_batch(batch))
        if not rates:
            model.run(batch)  # the first forward of a process takes longer
        mine, _ = timed(loader, partial(run_and_mark, model, planned, batch))
        seconds = max(dist.all_gather_object(mine))
        rates[place] = seconds / costs[middle]
        spent += seconds
    model.forget()
    whole = 0.0
    by_task = dict.fromkeys(planned.tasks, 0.0)
    for place, group in enumerate(groups):
        rate = rates[min(rates, key=lambda other: abs(other - place))]
        whole += rate * sum(costs[member] for member in group)
        for batch in (batch for member in group for batch in steps[member]):
            sizes = list(map(size_of, batch.requests))
            for request, size in zip(batch.requests, sizes, strict=True):
                by_task[request.key.task] += rate * batch.cost * size / sum(sizes)
    return whole, by_task, len(rates)


def run_and_mark(model: CausalLanguageModel, planned: PlannedEvaluation, batch: Batch) -> None:
    """All that is done with a batch."""
    planned.results(model.run(batch))


def in_spread_order(number: int) -> list[int]:
    """Places so that those that come first lie far apart: the ends, then the middle, then the middles between."""
    order = list(dict.fromkeys([0, number - 1])) if number else []
    while len(order) < number:
        taken = sorted(order)
        gaps = [(low, high) for low, high in pairwise(taken) if high - low > 1]
        order += [(low + high) // 2 for low, high in gaps]
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """What writing some replies took: seconds for a token of a prompt, for a written token, and for a program.

    `samples` are the replies by task, cut at NEW_TOKENS. `programs` has the tasks whose replies are run.
    """

    prompt_seconds: float = 0.0
    token_seconds: float = 0.0
    samples: Mapping[str, Sequence[Generation]] = field(default_factory=dict)
    programs: Mapping[str, float] = field(default_factory=dict)

    def seconds_of(self, pools: Sequence[Pool]) -> Seconds:
        """Seconds of writing the replies to these pools, by task."""
        found = dict.fromkeys(self.samples, 0.0)
        for task, count in prompt_tokens(pools).items():
            found[task] += self.prompt_seconds * count
        for pool in pools:
            for request in distinct(pool):
                task = request.key.task
                found[task] += self.token_seconds * expected_tokens(self.samples[task], request.max_new_tokens)
        return found

    def program_seconds(self, pools: Sequence[Pool]) -> Seconds:
        """Seconds of running the programs in the replies to these pools, by task."""
        counts = Counter(request.key.task for pool in pools for request in pool.requests)
        return {task: seconds * counts[task] for task, seconds in self.programs.items()}


def time_replies(loader: EvaluationLoader, planned: PlannedEvaluation) -> Replies:
    """Writes a few replies of each task, the same on every rank: prompts alone, then some tokens; runs their programs.

    As many of each task as there is time for, by what the prompts of one each take.
    """
    writer = loader.writer
    assert writer is not None  # as there are pools
    num_rows = max(pool.num_rows for pool in planned.pools)
    num_tasks = len({request.key.task for pool in planned.pools for request in pool.requests})
    first = sample_pool(planned, LEAST_REPLIES, num_rows, most_tokens=1)
    seconds = max(dist.all_gather_object(timed(loader, partial(writer.run, first))[0]))
    number = max(MOST_REPLIES, -(-num_rows // num_tasks))
    number = max(LEAST_REPLIES, min(number, int(MOST_SECONDS / max(seconds, 1e-9))))
    prompts = sample_pool(planned, number, num_rows, most_tokens=1)
    pool = sample_pool(planned, number, num_rows, most_tokens=NEW_TOKENS)
    in_prompts, _ = timed(loader, partial(writer.run, prompts))
    in_all, outputs = timed(loader, partial(writer.run, pool))
    samples: dict[str, list[Generation]] = {}
    for output in outputs:
        samples.setdefault(output.key.task, []).append(output)
    num_written = sum((output.num_tokens or 0) - 1 for output in outputs)
    found = (
        in_prompts / max(1, sum(prompt_tokens([prompts]).values())),
        max(0.0, in_all - in_prompts) / max(1, num_written),
        {
            task: timed(loader, partial(planned.results, replies))[0] / len(replies)
            for task, replies in samples.items()
            if planned.tasks[task].runs_programs
        },
    )
    everyones = dist.all_gather_object(found)
    return Replies(
        prompt_seconds=max(prompt for prompt, _, _ in everyones),
        token_seconds=max(token for _, token, _ in everyones),
        samples=samples,
        programs={task: max(programs[task] for _, _, programs in everyones) for task in found[2]},
    )


def sample_pool(planned: PlannedEvaluation, number: int, num_rows: int, *, most_tokens: int) -> Pool:
    """A pool of at most so many requests of each task, spread over it, with shorter replies."""
    by_task: dict[str, list[GenerateRequest]] = {}
    for pool in planned.pools:
        for request in distinct(pool):
            by_task.setdefault(request.key.task, []).append(request)
    chosen = {request.key for requests in by_task.values() for request in requests[:: -(-len(requests) // number)]}
    requests = [
        replace(request, max_new_tokens=min(request.max_new_tokens, most_tokens))
        for pool in planned.pools
        for request in pool.requests
        if request.key in chosen
    ]
    return Pool(
        requests=tuple(requests),
        num_rows=min(num_rows, len(requests)),
        tokens_per_batch=planned.tokens_per_batch,
    )


def notes(planned: PlannedEvaluation, num_timed: int, replies: Replies) -> list[str]:
    """How the seconds were found out, and what they leave out."""
    found = []
    if planned.batches:
        found.append(f'scoring: {num_timed} of {len(planned.batches)} batches were run, and scaled by their cost')
    if replies.samples:
        count = sum(map(len, replies.samples.values()))
        found.append(
            f'replies: {count} were written up to {NEW_TOKENS} tokens; all are taken to end as often at each token'
        )
    if replies.programs:
        found.append('programs: those of these replies were run; they are counted as if the model waited for them')
    return found
