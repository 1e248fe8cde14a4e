"""The metrics of the latest evaluation in `state.eval_metrics`, where Composer's EarlyStopper and others look for them.

They stand under a task's label as those of an evaluator of that task would, `eval_metrics['copa/0-shot']`, and all of
them by their keys in loggers under the label of the callback's evaluator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from composer.core import State
from composer.loggers import Logger
from torchmetrics import Metric

from llmfoundry_gauntlet.composer.trainer_loop import set_dataloader
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.metrics.keys import composite_values, score_values, task_values, valid_key, with_errors
from llmfoundry_gauntlet.types import TaskScore

Metrics = Mapping[str, Mapping[str, Metric]]  # by label and name


class KnownValue(Metric):
    """A torchmetrics Metric with a value that is known already; nan if it is absent, as torchmetrics has no None."""

    full_state_update = False

    def __init__(self, value: float | None) -> None:
        super().__init__()
        self.value = math.nan if value is None else value
        self.update()

    def update(self) -> None:
        """Do nothing, but torchmetrics warns if a metric is computed before an update."""

    def compute(self) -> torch.Tensor:
        """Return the value."""
        return torch.tensor(self.value)


def metrics_by_label(evaluation: Evaluation, label: str) -> Metrics:
    """Return all metrics of an evaluation: of each task by name, and under `label` all by their keys in loggers."""
    metrics = {task: known(values_of(score)) for task, score in evaluation.scores.items()}

    # As loggers get them.
    logged: list[tuple[str, float | None]] = []
    for score in evaluation.scores.values():
        logged += task_values(score)
    if evaluation.composites is not None:
        logged += composite_values(evaluation.composites)
    for dataset, perturbations in evaluation.robustness.items():
        for perturbation, robustness in perturbations.items():
            logged += score_values(dataset, perturbation, robustness)
    metrics[label] = known((valid_key(key), value) for key, value in logged)
    return metrics


def values_of(score: TaskScore) -> Iterator[tuple[str, float | None]]:
    """Yield name and value of each metric of a task and, as `category/name`, of its categories."""
    yield from with_errors(score.metrics)
    for category, part in score.categories.items():
        for name, value in with_errors(part.metrics):
            yield f'{category}/{name}', value


def known(values: Iterable[tuple[str, float | None]]) -> dict[str, Metric]:
    """Return a Metric for each value by name."""
    return {name: KnownValue(value) for name, value in values}


def call_watchers(state: State, logger: Logger, tasks: Collection[str]) -> None:
    """Call `eval_end` of the callbacks that watch one of these tasks, as at the end of an evaluator with its label.

    They are recognized by an attribute `dataloader_label`, as Composer's EarlyStopper and ThresholdStopper have.
    """
    dataloader, label, length = state.dataloader, state.dataloader_label, state.dataloader_len
    for callback in state.callbacks:
        watched = getattr(callback, 'dataloader_label', None)
        if isinstance(watched, str) and watched in tasks and watched != label:
            state.set_dataloader(dataloader, watched)
            try:
                callback.eval_end(state, logger)
            finally:
                set_dataloader(state, dataloader, label, length)
