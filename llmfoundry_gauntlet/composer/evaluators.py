"""Composer evaluators: one for all tasks, used by the callback, or one per task.

Two traps of Composer 0.32 are avoided here. Its default `split_batch` zips unknown batches and silently drops items, so
ours is the identity. And with unequal numbers of batches the evaluation ends with the shortest rank, so all ranks get
equally many, and the gathered items are checked against the plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer.core import DataSpec, Evaluator, State
from composer.models import HuggingFaceModel
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric
from transformers import PretrainedConfig

from llmfoundry_gauntlet.composer.loader import EvaluationLoader, Step
from llmfoundry_gauntlet.composer.models import position_limit, resolve_max_seq_len
from llmfoundry_gauntlet.config.resources import cache_folder
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import ConfigError, ModelError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation, one_task, prepare_evaluation
from llmfoundry_gauntlet.metrics.keys import error_name, with_errors
from llmfoundry_gauntlet.tasks import metrics_of
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.token_cache import TOKENS, TokenCache

EvalInterval = Callable[[State, Any], bool]


def make_evaluator(
    label: str, loader: EvaluationLoader, eval_interval: EvalInterval | None, metric_names: Sequence[str] = ()
) -> Evaluator:
    """Return an evaluator that runs this rank's steps."""
    return Evaluator(
        label=label,
        dataloader=DataSpec(
            loader,
            split_batch=lambda step, _: [step],
            get_num_samples_in_batch=lambda step: step.num_items,
            get_num_tokens_in_batch=lambda step: step.num_tokens,
        ),
        metric_names=list(metric_names),
        eval_interval=eval_interval,
        subset_num_batches=-1,
        device_eval_microbatch_size=1,
    )


def prepare_for_model(data: EvaluationData, model: HuggingFaceModel) -> PreparedEvaluation:
    """Return all items in the model's tokens, no longer than it can run. Raise ModelError."""
    prepared = prepare_evaluation(
        data,
        Encoder(model.tokenizer),
        max_seq_len=longest_prompt(data, model.config),
        cache=TokenCache(cache_folder(TOKENS)),
    )
    check_generations_fit(prepared, model.config)
    return prepared


def longest_prompt(data: EvaluationData, config: PretrainedConfig) -> int:
    """Return the settings' max_seq_len, or else the model's. Raise ModelError if it is too long for the model."""
    own_limits = {task.key: task.max_seq_len for task in data.suite.tasks if task.max_seq_len is not None}
    return resolve_max_seq_len(data.settings.max_seq_len, config, own_limits)


def check_generations_fit(prepared: PreparedEvaluation, config: PretrainedConfig) -> None:
    """Raise ModelError if a generation would exceed the model's positions.

    Only llm-foundry's truncation allows one to exceed `max_seq_len` (see `Preparation.token_limit`).
    """
    limit = position_limit(config)
    for request in prepared.generate_requests:
        if limit is not None and request.length > max(limit, prepared.max_seq_len):
            raise ModelError(
                f'{request.key.task}: a prompt of {len(request.context)} tokens and a generation of '
                f'{request.max_new_tokens} make {request.length}, but the model ({config.model_type}) has positions '
                f'for {limit}; give a smaller generation_kwargs.max_new_tokens or max_seq_len'
            )


def unwrapped(model: Any) -> HuggingFaceModel:
    """Return the Composer model inside DDP. Raise ModelError unless it is a HuggingFaceModel with a tokenizer."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not isinstance(model, HuggingFaceModel):
        raise ModelError(f'the model is a {type(model).__name__}; allowed: a composer.models.HuggingFaceModel')
    if model.tokenizer is None:
        raise ModelError('the model has no tokenizer; construct HuggingFaceModel(model, tokenizer=...)')
    return model


class TaskMetric(Metric):
    """A metric of the task that is evaluated, or of one of its categories, or its standard error, for torchmetrics.

    Its value is that of all ranks together, nan if the metric is absent, for which torchmetrics has no reason.
    """

    full_state_update = False

    def __init__(self, name: str, category: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.category = category
        self.loader: EvaluationLoader | None = None

    def update(self, loader: EvaluationLoader) -> None:
        """Note whose results are wanted; the loader keeps them."""
        self.loader = loader

    def compute(self) -> torch.Tensor:
        """Return the value, from 0 to 1."""
        if self.loader is None:
            return torch.tensor(torch.nan)
        (score,) = self.loader.finish().scores.values()
        part = score if self.category is None else score.categories[self.category]
        value = dict(with_errors(part.metrics))[self.name]
        return torch.tensor(torch.nan if value is None else value)


def build_icl_evaluators(tasks: Any, model: HuggingFaceModel, **settings: Any) -> list[Evaluator]:
    """Return evaluators for `Trainer(eval_dataloader=...)`, one per task and number of shots: '{label}/{n}-shot'.

    `tasks` is a path, a list of paths or the list of tasks itself; `settings` are those of EvaluationSettings that
    concern single tasks (data_root, max_seq_len, tokens_per_batch, semantics, truncation). `model` is changed to run
    the evaluators' steps and to report their metrics among its own, so evaluators of other data should name theirs
    (`metric_names`). Tasks whose programs cannot run here are left out. Raise ConfigError, DataError, ModelError.
    """
    if settings.get('score') is not None:
        raise ConfigError('score: not available for single evaluators; use the callback EvalGauntlet(score=...)')
    if settings.get('time_budget') is not None:
        raise ConfigError('time_budget: is divided among tasks; use the callback EvalGauntlet(time_budget=...)')
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
            make_evaluator(key, EvaluationLoader(prepared, model), None, [f'^{re.escape(name)}$' for name in own])
        )
    extend_model(model, metrics)
    return evaluators


def extend_model(model: HuggingFaceModel, metrics: dict[str, TaskMetric]) -> None:
    """Make a model run evaluation steps and report these metrics; all else stays as before."""
    eval_forward, update_metric, get_metrics = model.eval_forward, model.update_metric, model.get_metrics

    def run_step_or_forward(batch: Any, outputs: Any = None) -> Any:
        return batch.run() if isinstance(batch, Step) else eval_forward(batch, outputs)

    def update_ours_or_theirs(batch: Any, outputs: Any, metric: Metric) -> Any:
        if isinstance(metric, TaskMetric):
            return metric.update(batch.loader) if isinstance(batch, Step) else None
        return None if isinstance(batch, Step) else update_metric(batch, outputs, metric)

    def get_all_metrics(is_train: bool = False) -> dict[str, Metric]:
        return get_metrics(is_train) if is_train else {**get_metrics(is_train), **metrics}

    vars(model).update(
        eval_forward=run_step_or_forward, update_metric=update_ours_or_theirs, get_metrics=get_all_metrics
    )
