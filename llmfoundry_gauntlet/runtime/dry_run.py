"""Estimate the cost of an evaluation: prepare and plan it as usual, and time a sample of each kind of work."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

import torch

from llmfoundry_gauntlet.config.run import RunOptions
from llmfoundry_gauntlet.engine.continuous import prompt_tokens
from llmfoundry_gauntlet.engine.ranks import scored_tokens
from llmfoundry_gauntlet.evaluation.estimate import Estimate, TargetEstimate, TaskEstimate
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, share_seconds
from llmfoundry_gauntlet.evaluation.subsets import precision_plan
from llmfoundry_gauntlet.runtime.distributed import world_size
from llmfoundry_gauntlet.runtime.evaluate import opened
from llmfoundry_gauntlet.runtime.loop import EvaluationLoop
from llmfoundry_gauntlet.runtime.precision import precision_context
from llmfoundry_gauntlet.runtime.timed_sample import distinct, estimated_seconds, timed
from llmfoundry_gauntlet.runtime.unchanged import evaluation_mode

NUM_GENERATIONS = 6  # maximum number of timed generations per task


def estimate(model: str | Path, **settings: Unpack[RunOptions]) -> Estimate:
    """Estimate the cost of `evaluate` with the same arguments; nothing is written. Raise GauntletError."""
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
    """Plan an evaluation with the loop's model and time a sample of each kind of work; results are discarded.

    With a time budget the first step chooses a subset, and the estimate is that of its evaluation.
    """
    device = loop.runner.language_model.device
    first_step_seconds, _ = timed(device, next(iter(loop)).run)
    planned = loop.current_plan
    estimated = estimated_seconds(planned, loop.runner, num_generations=NUM_GENERATIONS)
    seconds = {
        'probing the model': first_step_seconds - loop.choosing_seconds,
        'choosing the subset': loop.choosing_seconds,
        **estimated.by_part,
    }
    tasks = tuple(task_estimates(planned, share_seconds(sum(seconds.values()), estimated.busy_by_task)))
    average, targets = target_estimates(planned.data, tasks)
    return Estimate(
        tasks=tasks,
        average=average,
        targets=targets,
        seconds={name: value for name, value in seconds.items() if value},
        preparing_seconds=preparing_seconds,
        num_ranks=world_size(),
        notes=(*estimated.notes, *budget_notes(loop)),
    )


def budget_notes(loop: EvaluationLoop) -> list[str]:
    """Return a line with the size of the time budget's subset, if there is one."""
    if loop.sizes is None:
        return []
    num_chosen, num_all = sum(loop.sizes.values()), loop.everything.num_questions
    return [f'time_budget {loop.budget_seconds:g}s: {num_chosen:,} of {num_all:,} questions fit']


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
    seconds_of_question = {task.task: task.seconds / max(1, len(data.asked(task.task))) for task in tasks}
    return plan.average, plan.estimates(seconds_of_question)


def task_estimates(planned: PlannedEvaluation, seconds: Mapping[str, float]) -> list[TaskEstimate]:
    """Return the planned items, tokens and seconds of each task."""
    tokens = scored_tokens(planned.batches) + prompt_tokens(planned.continuous_batches)
    most_tokens: Counter[str] = Counter()
    for batch in planned.continuous_batches:
        for request in distinct(batch):
            most_tokens[request.key.task] += request.max_new_tokens
    items = [item for key, item in planned.items.items() if not key.is_gold]
    num_items = Counter(item.key.task for item in items)
    num_shortened = Counter(item.key.task for item in items if item.request.prompt_shortened)
    return [
        TaskEstimate(
            task=task,
            num_items=num_items[task],
            num_tokens=tokens[task],
            generation_tokens=most_tokens[task],
            num_shortened=num_shortened[task],
            seconds=seconds.get(task, 0.0),
        )
        for task in planned.tasks
    ]
