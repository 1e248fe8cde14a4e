"""Estimate the cost of an evaluation: prepare and plan it as usual, and time a sample of each kind of work."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, Unpack

import torch

from llmfoundry_gauntlet.config.run import RunOptions
from llmfoundry_gauntlet.engine.continuous import (
    ContinuousBatch,
    assign_continuous_batches,
    expected_tokens,
    prompt_tokens,
)
from llmfoundry_gauntlet.engine.generate import first_of_equal
from llmfoundry_gauntlet.engine.ranks import Estimate, TaskEstimate, assign, prefix_batch, scored_tokens
from llmfoundry_gauntlet.errors import ConfigError, plural
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData
from llmfoundry_gauntlet.evaluation.precision import precision_plan
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, share_seconds
from llmfoundry_gauntlet.metrics.composites import TargetEstimate
from llmfoundry_gauntlet.runtime.distributed import gather, global_rank, world_size
from llmfoundry_gauntlet.runtime.evaluate import opened
from llmfoundry_gauntlet.runtime.loop import EvaluationLoop
from llmfoundry_gauntlet.runtime.precision import precision_context
from llmfoundry_gauntlet.runtime.unchanged import evaluation_mode
from llmfoundry_gauntlet.types import GenerateRequest, Generation

Returned = TypeVar('Returned')

NEW_TOKENS = 64  # maximum length of a timed generation
NUM_GENERATIONS = 6  # maximum number of timed generations per task


def estimate(model: str | Path, **settings: Unpack[RunOptions]) -> Estimate:
    """Estimate the cost of `evaluate` with the same arguments; nothing is written. Raise GauntletError."""
    if settings.get('time_budget') is not None:
        raise ConfigError('time_budget: its subset is found by running items; leave it out of a dry run')
    started = time.perf_counter()
    with opened(model, **settings) as subject:
        loop, hardware = subject.gauntlet.loop, subject.hardware
        assert loop is not None  # set when the items were prepared
        preparing = time.perf_counter() - started
        with (
            torch.no_grad(),
            evaluation_mode(subject.network),
            precision_context(hardware.precision, hardware.device),
        ):
            return measure(loop, preparing)


def measure(loop: EvaluationLoop, preparing_seconds: float = 0.0) -> Estimate:
    """Plan an evaluation with the loop's model and time a sample of each kind of work; results are discarded."""
    probing, _ = timed(loop, next(iter(loop)).run)
    planned = loop.current_plan
    tokens = scored_tokens(planned.batches)
    scoring = scoring_seconds(loop, planned)
    seconds = {'probing the model': probing, 'scoring': scoring}
    busy = defaultdict(float, {task: scoring * count / tokens.total() for task, count in tokens.items()})
    notes = ['scoring: one batch was run, and scaled by its cost'] if planned.batches else []
    if planned.continuous_batches:
        parts, generation_notes = time_generations(loop, planned)
        for name, of_ranks in parts.items():
            seconds[name] = max(sum(by_task.values()) for by_task in of_ranks)
            for task, part in (pair for by_task in of_ranks for pair in by_task.items()):
                busy[task] += part
        notes += generation_notes
    tasks = tuple(task_estimates(planned, share_seconds(sum(seconds.values()), busy)))
    average, targets = target_estimates(planned.data, tasks)
    return Estimate(
        tasks=tasks,
        average=average,
        targets=targets,
        seconds={name: value for name, value in seconds.items() if value},
        preparing_seconds=preparing_seconds,
        num_ranks=world_size(),
        notes=tuple(notes),
    )


def target_estimates(
    data: EvaluationData, tasks: Sequence[TaskEstimate]
) -> tuple[str | None, tuple[TargetEstimate, ...]]:
    """Return the name of the gauntlet's average and the cost of precision targets for it; (None, ()) without any."""
    if data.suite.gauntlet is None:
        return None, ()
    target = data.settings.precision
    average = None if target is None else target.average
    plan = precision_plan(data.suite.tasks, data.examples, data.suite.gauntlet, average)
    if not plan.has_tasks:
        return None, ()
    seconds = {one.task: one.seconds / max(1, len(data.asked(one.task))) for one in tasks}
    return plan.average, plan.estimates(seconds)


def task_estimates(planned: PlannedEvaluation, seconds: Mapping[str, float]) -> list[TaskEstimate]:
    """Return the planned items, tokens and seconds of each task."""
    tokens = scored_tokens(planned.batches) + prompt_tokens(planned.continuous_batches)
    most_tokens_of: Counter[str] = Counter()
    for batch in planned.continuous_batches:
        for request in distinct(batch):
            most_tokens_of[request.key.task] += request.max_new_tokens
    num_items = Counter(key.task for key in planned.items)
    shortened = Counter(key.task for key, item in planned.items.items() if item.request.prompt_shortened)
    return [
        TaskEstimate(
            task=task,
            num_items=num_items[task],
            num_tokens=tokens[task],
            generation_tokens=most_tokens_of[task],
            num_shortened=shortened[task],
            seconds=seconds.get(task, 0.0),
        )
        for task in planned.tasks
    ]


def distinct(batch: ContinuousBatch) -> list[GenerateRequest]:
    """Return the distinct requests of a batch; equal requests share a generation."""
    names = first_of_equal(batch.requests)
    return [request for request in batch.requests if names[request.key] == request.key]


def timed(loop: EvaluationLoop, work: Callable[[], Returned]) -> tuple[float, Returned]:
    """Call a function; return the seconds it took and its result."""
    device = loop.runner.language_model.device
    started = time.perf_counter()
    answer = work()
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, answer


def scoring_seconds(loop: EvaluationLoop, planned: PlannedEvaluation) -> float:
    """Estimate the seconds of all batches by running and scoring that of median cost; the slowest rank counts."""
    if not planned.batches:
        return 0.0
    model = loop.runner.language_model
    by_rank = assign(planned.batches, num_ranks=world_size())
    steps = sorted(range(len(by_rank[0])), key=lambda step: max(batches[step].cost for batches in by_rank))
    step = steps[len(steps) // 2]
    batch = by_rank[global_rank()][step]
    if any(batches[step].prefix is not None for batches in by_rank):  # in the plan, the prefix runs in a separate step
        model.run(batch if batch.prefix is None else prefix_batch(batch))
    model.run(batch)  # warm-up: the first forward of a process takes longer
    seconds, _ = timed(loop, lambda: planned.results(model.run(batch)))
    model.forget()
    slowest = max(gather(seconds))
    cost = max(batches[step].cost for batches in by_rank)
    return slowest / cost * max(sum(batch.cost for batch in batches) for batches in by_rank)


def time_generations(
    loop: EvaluationLoop, planned: PlannedEvaluation
) -> tuple[dict[str, list[dict[str, float]]], list[str]]:
    """Estimate the seconds of generations and of their programs, by task for each rank; and say how.

    A few generations of each task, of one token and then of more, and their programs are timed on every rank.
    """
    generator = loop.runner.generator
    assert generator is not None  # set by the probe, as there are generations
    prompts, batch = (sample_batch(planned, most_tokens=most) for most in (1, NEW_TOKENS))
    in_prompts, _ = timed(loop, partial(generator.run, prompts))
    in_all, outputs = timed(loop, partial(generator.run, batch))
    samples: dict[str, list[Generation]] = {}
    for output in outputs:
        samples.setdefault(output.key.task, []).append(output)
    programs = {
        task: timed(loop, partial(planned.results, generations))[0] / len(generations)
        for task, generations in samples.items()
        if planned.tasks[task].runs_programs
    }
    num_generated = sum((output.num_tokens or 0) - 1 for output in outputs)
    of_prompts = in_prompts / max(1, prompt_tokens([prompts]).total())
    of_tokens = max(0.0, in_all - in_prompts) / max(1, num_generated)
    measured = gather((of_prompts, of_tokens, programs))
    prompt_seconds = max(prompt for prompt, _, _ in measured)
    token_seconds = max(token for _, token, _ in measured)
    program_seconds = {task: max(seconds[task] for _, _, seconds in measured) for task in programs}
    parts: dict[str, list[dict[str, float]]] = {'generating': [], 'programs': []}
    for batches in assign_continuous_batches(planned.continuous_batches, num_ranks=world_size()):
        generating = defaultdict(float, {task: prompt_seconds * n for task, n in prompt_tokens(batches).items()})
        for request in (request for batch in batches for request in distinct(batch)):
            task = request.key.task
            generating[task] += token_seconds * expected_tokens(samples[task], request.max_new_tokens)
        counts = Counter(request.key.task for batch in batches for request in batch.requests)
        parts['generating'].append(generating)
        parts['programs'].append({task: one * counts[task] for task, one in program_seconds.items()})
    notes = [
        f'generating: timed and extrapolated from {plural(len(outputs), "generation")} of at most {NEW_TOKENS} tokens'
    ]
    if programs:
        notes.append('programs: those of these generations were run, one at a time')
    return parts, notes


def sample_batch(planned: PlannedEvaluation, *, most_tokens: int) -> ContinuousBatch:
    """Return a batch of a few evenly spaced requests of each task, each generating at most `most_tokens` tokens."""
    by_task: dict[str, list[GenerateRequest]] = {}
    for batch in planned.continuous_batches:
        for request in distinct(batch):
            by_task.setdefault(request.key.task, []).append(request)
    chosen = {one.key for of_task in by_task.values() for one in of_task[:: -(-len(of_task) // NUM_GENERATIONS)]}
    requests = [
        replace(request, max_new_tokens=min(request.max_new_tokens, most_tokens))
        for batch in planned.continuous_batches
        for request in batch.requests
        if request.key in chosen
    ]
    num_slots = min(max(batch.num_slots for batch in planned.continuous_batches), len(requests))
    tokens = planned.generation_tokens_per_batch
    return ContinuousBatch(requests=tuple(requests), num_slots=num_slots, tokens_per_batch=tokens)
