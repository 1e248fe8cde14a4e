"""Composer evaluators over planned batches, and the forward that runs them.

Two traps of Composer 0.32 are avoided here. Its default `split_batch` cuts unknown batches by zip and drops items
without a word, so ours is the identity. And unequal numbers of batches end the evaluation with the shortest rank, so
all ranks get equally many, and the gathered items are checked against the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from composer.core import DataSpec, Evaluator, State
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PretrainedConfig

from llmfoundry_gauntlet.composer.loader import EvaluationLoader, Results, Step
from llmfoundry_gauntlet.composer.models import position_limit, resolve_max_seq_len, rotary_lengths
from llmfoundry_gauntlet.config.resources import cache_folder
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData
from llmfoundry_gauntlet.evaluation.run import (
    Evaluation,
    PreparedEvaluation,
    conclude,
    prepare_evaluation,
    share_seconds,
)
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.token_cache import TOKENS, TokenCache

EvalInterval = Callable[[State, Any], bool]


def make_evaluator(
    label: str, loader: EvaluationLoader, eval_interval: EvalInterval | None, metric_names: Sequence[str] = ()
) -> Evaluator:
    """An evaluator of this rank's steps."""
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
    """The evaluation in the model's tokens, no longer than it can run. Raises ModelError."""
    prepared = prepare_evaluation(
        data,
        Encoder(model.tokenizer),
        max_seq_len=longest_prompt(data, model.config),
        cache=TokenCache(cache_folder(TOKENS)),
    )
    check_generations_fit(prepared, model.config)
    return prepared


def longest_prompt(data: EvaluationData, config: PretrainedConfig) -> int:
    """The max_seq_len of an evaluation: what is wanted, else the model's. Raises ModelError where it is too long."""
    own_limits = {task.key: task.max_seq_len for task in data.suite.tasks if task.max_seq_len is not None}
    return resolve_max_seq_len(data.settings.max_seq_len, config, own_limits)


def check_generations_fit(prepared: PreparedEvaluation, config: PretrainedConfig) -> None:
    """Raise ModelError where a generation would go past the model's positions.

    Only llm-foundry's truncation lets one go past `max_seq_len` (see `Preparation.reply_limit`).
    """
    limit = position_limit(config)
    for request in prepared.generate_requests:
        if limit is not None and request.length > max(limit, prepared.max_seq_len):
            raise ModelError(
                f'{request.key.task}: a prompt of {len(request.context)} tokens and a generation of '
                f'{request.max_new_tokens} make {request.length}, but the model ({config.model_type}) has positions '
                f'for {limit}; give a smaller generation_kwargs.max_new_tokens or max_seq_len'
            )


class EvaluationRun:
    """One pass over an evaluation on this rank: runs steps, keeps item results, gathers them at the end."""

    def __init__(self, loader: EvaluationLoader) -> None:
        self.loader = loader
        self.started = time.perf_counter()
        self.results: Results = {}

    def run(self, step: Step, outputs: Any = None) -> Results:
        """Runs a step; takes the place of `eval_forward`, whose second argument it ignores."""
        found = step.run()
        self.results.update(found)
        return found

    def finish(self) -> Evaluation:
        """Gathers all ranks' items by key and computes the scores, the same on every rank."""
        planned = self.loader.current_plan
        found = self.results
        if self.loader.budget is not None:  # what has been run and does not fit into the time is left out
            found = {key: result for key, result in found.items() if key in planned.items}
        gathered = dist.all_gather_object((list(found.values()), self.loader.busy_seconds))
        results: Results = {}
        busy = dict.fromkeys(planned.tasks, 0.0)
        for part, seconds in gathered:
            for result in part:
                results.setdefault(result.key, result)
            for task, value in seconds.items():
                busy[task] += value
        wall = time.perf_counter() - self.started
        return conclude(planned, results, share_seconds(wall, busy))


def unwrapped(model: Any) -> HuggingFaceModel:
    """The Composer model below DDP. Raises ModelError unless it is a HuggingFaceModel with a tokenizer."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not isinstance(model, HuggingFaceModel):
        raise ModelError(f'the model is a {type(model).__name__}; allowed: a composer.models.HuggingFaceModel')
    if model.tokenizer is None:
        raise ModelError('the model has no tokenizer; construct HuggingFaceModel(model, tokenizer=...)')
    return model


def attach_model(loader: EvaluationLoader, model: HuggingFaceModel) -> None:
    """Gives a loader the engine's view of the model before each evaluation; under FSDP `model.model` is its root.

    With the reference's semantics real tokens that are equal to the padding token are masked as well, and rotary
    frequencies are those of rows that are padded to max_seq_len.
    """
    if loader.language_model is None:
        tokenizer: Any = model.tokenizer
        hidden, padded_to = None, {}
        prepared = loader.prepared
        if prepared.data.settings.reference:
            hidden = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            padded_to = {
                key: min(task.max_seq_len or prepared.max_seq_len, prepared.max_seq_len)
                for key, task in prepared.tasks.items()
            }
        loader.language_model = CausalLanguageModel(
            model.model,
            device=next(model.parameters()).device,
            hidden_token_id=hidden,
            rotary=rotary_lengths(model.config, padded_to),
        )
    loader.language_model.forget()  # what was kept before belongs to other weights
