"""Estimate the seconds of a plan: time a sample of each kind of its work, and extrapolate. Results are discarded."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from llmfoundry_gauntlet.engine.continuous import (
    ContinuousBatch,
    assign_continuous_batches,
    expected_tokens,
    prompt_tokens,
)
from llmfoundry_gauntlet.engine.generate import first_of_equal
from llmfoundry_gauntlet.engine.plan import Batch
from llmfoundry_gauntlet.engine.ranks import assign, prefix_batch, scored_tokens
from llmfoundry_gauntlet.errors import plural
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation
from llmfoundry_gauntlet.runtime.distributed import gather, global_rank, world_size
from llmfoundry_gauntlet.runtime.runner import ModelRunner
from llmfoundry_gauntlet.types import GenerateRequest, Generation, ItemKey

Returned = TypeVar('Returned')

NEW_TOKENS = 64  # maximum length of a timed generation

# Parts of an evaluation.
SCORING, GENERATING, PROGRAMS = 'scoring', 'generating', 'programs'


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedSeconds:
    """The seconds that a plan takes, as estimated on all ranks together.

    `by_part` are those of the slowest rank, `busy_by_task` those of all ranks, in which tasks share the time; `notes`
    say how they were estimated.
    """

    by_part: Mapping[str, float]
    busy_by_task: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def total(self) -> float:
        """Return the seconds of the whole plan."""
        return sum(self.by_part.values())


def estimated_seconds(planned: PlannedEvaluation, runner: ModelRunner, *, num_generations: int) -> EstimatedSeconds:
    """Return the seconds that a plan takes, by at most so many generations of each task.

    All ranks must call this, and each gets the same.
    """
    by_part = {SCORING: scoring_seconds(planned, runner)}
    busy_by_task: dict[str, float] = defaultdict(float)
    notes = []
    if planned.batches:
        notes.append('scoring: one batch was run, and scaled by its cost')
        tokens = scored_tokens(planned.batches)
        for task, num_tokens in tokens.items():
            busy_by_task[task] += by_part[SCORING] * num_tokens / tokens.total()
    if planned.continuous_batches:
        generations = time_generations(planned, runner, num_generations)
        notes += generations.notes
        for part, seconds_of_ranks in generations.by_part.items():
            by_part[part] = max(sum(by_task.values()) for by_task in seconds_of_ranks)
            for task, seconds in (pair for by_task in seconds_of_ranks for pair in by_task.items()):
                busy_by_task[task] += seconds
    return EstimatedSeconds(by_part=by_part, busy_by_task=busy_by_task, notes=tuple(notes))


def timed(device: torch.device, work: Callable[[], Returned]) -> tuple[float, Returned]:
    """Call a function; return the seconds it took, on the device too, and its result."""
    started = time.perf_counter()
    returned = work()
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, returned


# Scoring.


def scoring_seconds(planned: PlannedEvaluation, runner: ModelRunner) -> float:
    """Estimate the seconds of all batches by running and scoring that of median cost; the slowest rank counts."""
    if not planned.batches:
        return 0.0
    by_rank = assign(planned.batches, num_ranks=world_size())
    costs_of_steps: list[float] = [max(batch.cost for batch in batches) for batches in zip(*by_rank, strict=True)]
    steps_by_cost = sorted(range(len(costs_of_steps)), key=costs_of_steps.__getitem__)
    step = steps_by_cost[len(steps_by_cost) // 2]
    run_prefix = any(batches[step].prefix is not None for batches in by_rank)

    seconds = seconds_of_batch(by_rank[global_rank()][step], planned, runner, run_prefix=run_prefix)

    slowest_seconds: float = max(gather(seconds))
    cost_of_slowest = max(sum(batch.cost for batch in batches) for batches in by_rank)
    return slowest_seconds / costs_of_steps[step] * cost_of_slowest


def seconds_of_batch(batch: Batch, planned: PlannedEvaluation, runner: ModelRunner, *, run_prefix: bool) -> float:
    """Return the seconds to run and score a batch on this rank; all ranks make as many forwards."""
    model = runner.language_model
    if run_prefix:  # in the plan, the prefix runs in a separate step
        model.run(batch if batch.prefix is None else prefix_batch(batch))
    model.run(batch)  # warm-up: the first forward of a process takes longer
    seconds, _ = timed(model.device, lambda: planned.results(model.run(batch)))
    model.forget()
    return seconds


# Generations and their programs.


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSeconds:
    """The estimated seconds of each part by task, for each rank, and how they were estimated."""

    by_part: Mapping[str, Sequence[Mapping[str, float]]]
    notes: tuple[str, ...]


def time_generations(planned: PlannedEvaluation, runner: ModelRunner, num_generations: int) -> GenerationSeconds:
    """Estimate the seconds of generations and of their programs.

    Some generations of each task, of one token and then of more, and their programs are timed on every rank.
    """
    generator = runner.generator
    assert generator is not None  # set by the probe, as there are generations
    device = runner.language_model.device
    prompts, batch = (
        sample_batch(planned, num_generations=num_generations, most_tokens=most) for most in (1, NEW_TOKENS)
    )
    seconds_of_prompts, _ = timed(device, partial(generator.run, prompts))
    seconds_of_all, outputs = timed(device, partial(generator.run, batch))
    samples: dict[str, list[Generation]] = {}
    for output in outputs:
        samples.setdefault(output.key.task, []).append(output)
    seconds_of_program = {
        task: timed(device, partial(planned.results, generations))[0] / len(generations)
        for task, generations in samples.items()
        if planned.tasks[task].runs_programs
    }

    # The slowest rank counts in each: of a prompt token, of a generated token and of a program.
    num_prompt_tokens = prompt_tokens([prompts]).total()
    num_new_tokens = sum((output.num_tokens or 0) - 1 for output in outputs)
    of_ranks = gather(
        (
            seconds_of_prompts / max(1, num_prompt_tokens),
            max(0.0, seconds_of_all - seconds_of_prompts) / max(1, num_new_tokens),
            seconds_of_program,
        )
    )
    prompt_seconds = max(of_prompt for of_prompt, _, _ in of_ranks)
    token_seconds = max(of_token for _, of_token, _ in of_ranks)
    program_seconds = {task: max(of_program[task] for _, _, of_program in of_ranks) for task in seconds_of_program}

    generating, programs = [], []
    for batches in assign_continuous_batches(planned.continuous_batches, num_ranks=world_size()):
        seconds = defaultdict(float, {task: prompt_seconds * n for task, n in prompt_tokens(batches).items()})
        for request in (request for batch in batches for request in distinct(batch)):
            task = request.key.task
            seconds[task] += token_seconds * expected_tokens(samples[task], request.max_new_tokens)
        generating.append(seconds)
        num_items = Counter(request.key.task for batch in batches for request in batch.requests)
        programs.append({task: of_program * num_items[task] for task, of_program in program_seconds.items()})

    notes = [
        f'generating: timed and extrapolated from {plural(len(outputs), "generation")} of at most {NEW_TOKENS} tokens'
    ]
    if program_seconds:
        notes.append('programs: those of these generations were run, one at a time')
    return GenerationSeconds(by_part={GENERATING: generating, PROGRAMS: programs}, notes=tuple(notes))


def sample_batch(planned: PlannedEvaluation, *, num_generations: int, most_tokens: int) -> ContinuousBatch:
    """Return a batch of some evenly spaced requests of each task, each generating at most `most_tokens` tokens."""
    requests_by_task: dict[str, list[GenerateRequest]] = {}
    for batch in planned.continuous_batches:
        for request in distinct(batch):
            requests_by_task.setdefault(request.key.task, []).append(request)
    chosen: set[ItemKey] = set()
    for requests in requests_by_task.values():
        distance = -(-len(requests) // num_generations)
        chosen.update(request.key for request in requests[::distance])
    shortened = [
        replace(request, max_new_tokens=min(request.max_new_tokens, most_tokens))
        for batch in planned.continuous_batches
        for request in batch.requests
        if request.key in chosen
    ]
    num_slots = min(max(batch.num_slots for batch in planned.continuous_batches), len(shortened))
    tokens = planned.generation_tokens_per_batch
    return ContinuousBatch(requests=tuple(shortened), num_slots=num_slots, tokens_per_batch=tokens)


def distinct(batch: ContinuousBatch) -> list[GenerateRequest]:
    """Return the distinct requests of a batch; equal requests share a generation."""
    names = first_of_equal(batch.requests)
    return [request for request in batch.requests if names[request.key] == request.key]
