"""One Composer evaluator per task, for people who drive the Trainer themselves."""

from __future__ import annotations

import re
from typing import Any

import torch
from composer.core import Evaluator
from composer.models import HuggingFaceModel
from composer.utils import dist
from torchmetrics import Metric

from llmfoundry_gauntlet.composer.evaluators import (
    attach_model,
    make_evaluator,
    prepare_for_model,
    unwrapped,
)
from llmfoundry_gauntlet.composer.loader import EvaluationLoader, Step
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, conclude, one_task
from llmfoundry_gauntlet.metrics.keys import error_name, with_errors
from llmfoundry_gauntlet.tasks import metrics_of
from llmfoundry_gauntlet.types import ItemKey, ItemResult


class TaskMetric(Metric):
    """A metric of the task whose batches it sees, or of one of its categories, or its error, for torchmetrics.

    `compute` gathers all ranks' items and is nan where the metric is absent: torchmetrics knows no reason.
    """

    full_state_update = False

    def __init__(self, name: str, category: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.category = category
        self.planned: PlannedEvaluation | None = None
        self.results: dict[ItemKey, ItemResult] = {}

    def update(self, planned: PlannedEvaluation, results: dict[ItemKey, ItemResult]) -> None:
        """Keeps the item results of a step."""
        self.planned = planned
        self.results.update(results)

    def reset(self) -> None:
        """Forgets all items."""
        super().reset()
        self.results = {}

    def compute(self) -> torch.Tensor:
        """Its value, from 0 to 1."""
        results = {key: result for part in dist.all_gather_object(self.results) for key, result in part.items()}
        if self.planned is None:
            return torch.tensor(torch.nan)
        (score,) = conclude(self.planned, results, {}).scores.values()
        part = score if self.category is None else score.categories[self.category]
        value = dict(with_errors(part.metrics))[self.name]
        return torch.tensor(torch.nan if value is None else value)


def build_icl_evaluators(tasks: Any, model: HuggingFaceModel, **settings: Any) -> list[Evaluator]:
    """Evaluators for `Trainer(eval_dataloader=...)`, one per task and number of shots, labelled '{label}/{n}-shot'.

    `tasks` is a path, a list of paths or the list of tasks itself; `settings` are those of EvaluationSettings that
    concern single tasks (data_root, max_seq_len, tokens_per_batch, semantics, truncation). `model` learns to run the
    evaluators' batches and reports their metrics among its own, so evaluators of other data should name theirs
    (`metrics_of`). Tasks whose programs cannot be run here are left out. Raises ConfigError, DataError, ModelError.
    """
    if settings.get('score') is not None:
        raise ConfigError('score: a data set of SCORE is no single evaluator; use the callback EvalGauntlet(score=...)')
    if settings.get('time_budget') is not None:
        raise ConfigError('time_budget: is shared out among tasks; use the callback EvalGauntlet(time_budget=...)')
    data = load_data(decode_settings({**settings, 'tasks': tasks, 'save_folder': None}, 'build_icl_evaluators'))
    prepared_tasks = prepare_for_model(data, unwrapped(model))
    evaluators = []
    metrics: dict[str, TaskMetric] = {}
    data = prepared_tasks.data
    for key in data.examples:
        prepared = one_task(prepared_tasks, key)
        own: dict[str, TaskMetric] = {}
        categories = sorted({example.category for example in data.asked(key) if example.category is not None})
        names = [metric.name for metric in metrics_of(prepared.tasks[key])]
        errors = [error_name(name, is_accuracy=name == names[0]) for name in names]
        for name in (*names, *errors):
            own.update((f'{category}/{name}', TaskMetric(name, category)) for category in categories)
            own[name] = TaskMetric(name)
        metrics.update(own)
        evaluators.append(
            make_evaluator(
                key, EvaluationLoader(prepared, model.tokenizer), None, [f'^{re.escape(name)}$' for name in own]
            )
        )
    teach(model, metrics)
    return evaluators


def teach(model: HuggingFaceModel, metrics: dict[str, TaskMetric]) -> None:
    """Makes a model run planned batches and report these metrics; all else it does as before."""
    eval_forward, update_metric, get_metrics = model.eval_forward, model.update_metric, model.get_metrics

    def run_step_or_forward(batch: Any, outputs: Any = None) -> Any:
        if isinstance(batch, Step):
            if batch.planned is None:
                attach_model(batch.loader, model)
            return batch.run()
        return eval_forward(batch, outputs)

    def update_ours_or_theirs(batch: Any, outputs: Any, metric: Metric) -> Any:
        if isinstance(batch, Step):
            return None if batch.planned is None else metric.update(batch.planned, outputs)
        if isinstance(metric, TaskMetric):
            return None
        return update_metric(batch, outputs, metric)

    def get_all_metrics(is_train: bool = False) -> dict[str, Metric]:
        return get_metrics(is_train) if is_train else {**get_metrics(is_train), **metrics}

    vars(model).update(
        eval_forward=run_step_or_forward, update_metric=update_ours_or_theirs, get_metrics=get_all_metrics
    )
