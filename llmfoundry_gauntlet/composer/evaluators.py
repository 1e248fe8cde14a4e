"""One Composer Evaluator per task, for `Trainer(eval_dataloader=...)` without the callback."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from composer.core import Evaluator
from composer.models import HuggingFaceModel
from torchmetrics import Metric

from llmfoundry_gauntlet.composer.trainer_loop import composer_model_of, make_evaluator
from llmfoundry_gauntlet.config.settings import AUTO, ERROR, LOGGED, TasksSource
from llmfoundry_gauntlet.evaluation.inputs import load_inputs
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation, one_task
from llmfoundry_gauntlet.metrics.keys import error_name, is_logged, task_group, with_errors
from llmfoundry_gauntlet.runtime.loop import EvaluationLoop, Step
from llmfoundry_gauntlet.runtime.runner import prepare_for_model


class TaskMetric(Metric):
    """A torchmetrics Metric for a metric, or its standard error, of the evaluated task or one of its categories.

    The value covers all ranks. It is nan if the metric is absent, as torchmetrics cannot express a missing value.
    """

    full_state_update = False

    def __init__(self, name: str, category: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.category = category
        self.loop: EvaluationLoop | None = None

    def update(self, loop: EvaluationLoop) -> None:
        """Remember the loop, which holds the results."""
        self.loop = loop

    def compute(self) -> torch.Tensor:
        """Return the value, from 0 to 1."""
        if self.loop is None:
            return torch.tensor(torch.nan)
        (score,) = self.loop.finish().scores.values()
        metrics = score.metrics if self.category is None else score.categories[self.category].metrics
        value_by_name = dict(with_errors(metrics))
        value = value_by_name[self.name]
        return torch.tensor(torch.nan if value is None else value)


def build_icl_evaluators(
    tasks: TasksSource,
    model: HuggingFaceModel,
    *,
    data_root: str | Path = 'eval_data',
    only: Sequence[str] | None = None,
    num_fewshot: int | None = None,
    missing: str = ERROR,
    subset_items: int | None = None,
    max_seq_len: int | None = None,
    tokens_per_batch: int | Literal['auto'] = AUTO,
    semantics: str = 'corrected',
    truncation: str | None = None,
    fewshot: str = 'reference',
    apply_chat_template: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    fewshot_as_turns: bool = False,
    reasoning_markers: Sequence[str] | None = None,
    sandbox: str = AUTO,
    log: Sequence[str] = LOGGED[:-1],
) -> list[Evaluator]:
    """Return Evaluators for `Trainer(eval_dataloader=...)`, one per task and number of shots: '{label}/{n}-shot'.

    `tasks` is a path, a list of paths or the list of tasks itself; the others are the fields of EvaluationSettings that
    apply to single tasks. SCORE, composites, a time budget, a precision target and records need the callback
    EvalGauntlet. `model` is patched in place to run the steps and to report these metrics along with its own, so
    Evaluators for other data should name theirs (`metric_names`). Tasks whose programs cannot run here are left out.
    Raise ConfigError, DataError, ModelError.
    """
    settings = {
        'tasks': tasks,
        'data_root': data_root,
        'only': only,
        'num_fewshot': num_fewshot,
        'missing': missing,
        'subset_items': subset_items,
        'max_seq_len': max_seq_len,
        'tokens_per_batch': tokens_per_batch,
        'semantics': semantics,
        'truncation': truncation,
        'fewshot': fewshot,
        'apply_chat_template': apply_chat_template,
        'chat_template_kwargs': chat_template_kwargs,
        'system_prompt': system_prompt,
        'fewshot_as_turns': fewshot_as_turns,
        'reasoning_markers': reasoning_markers,
        'sandbox': sandbox,
        'log': log,
        'save_folder': None,
    }
    inputs = load_inputs(settings, 'build_icl_evaluators')
    prepared = prepare_for_model(inputs, composer_model_of(model))
    evaluators = []
    all_metrics: dict[str, TaskMetric] = {}
    for key in prepared.data.examples:
        metrics = task_metrics(prepared, key)
        loop = EvaluationLoop(one_task(prepared, key), model)
        patterns = [f'^{re.escape(name)}$' for name in metrics]
        evaluators.append(make_evaluator(key, loop, None, patterns))
        all_metrics.update(metrics)
    extend_model(model, all_metrics)
    return evaluators


def task_metrics(prepared: PreparedEvaluation, key: str) -> dict[str, TaskMetric]:
    """Return the logged metrics of a task and, as `category/name`, of its categories, with their standard errors."""
    data = prepared.data
    categories = sorted({example.category for example in data.asked(key) if example.category is not None})
    names = [metric.name for metric in prepared.tasks[key].metrics()]
    accuracy = names[0]
    error_names = [error_name(name, is_accuracy=name == accuracy) for name in names]

    metrics: dict[str, TaskMetric] = {}
    for name in (*names, *error_names):
        if not is_logged(name, task_group(name, accuracy), data.settings.log):
            continue
        for category in categories:
            metrics[f'{category}/{name}'] = TaskMetric(name, category)
        metrics[name] = TaskMetric(name)
    return metrics


def extend_model(model: HuggingFaceModel, metrics: dict[str, TaskMetric]) -> None:
    """Patch a model in place to run evaluation steps and report these metrics; other batches run as before."""
    eval_forward = model.eval_forward
    update_metric = model.update_metric
    get_metrics = model.get_metrics

    def run_step_or_forward(batch: Any, outputs: Any = None) -> Any:
        return batch.run() if isinstance(batch, Step) else eval_forward(batch, outputs)

    def update_matching_metric(batch: Any, outputs: Any, metric: Metric) -> Any:
        is_ours = isinstance(metric, TaskMetric)
        if isinstance(batch, Step) != is_ours:
            return None  # a metric of other evaluators than this batch's
        return metric.update(batch.loop) if is_ours else update_metric(batch, outputs, metric)

    def get_all_metrics(is_train: bool = False) -> dict[str, Metric]:
        return get_metrics(is_train) if is_train else {**get_metrics(is_train), **metrics}

    vars(model).update(
        eval_forward=run_step_or_forward,
        update_metric=update_matching_metric,
        get_metrics=get_all_metrics,
    )
