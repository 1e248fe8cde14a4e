"""Composer evaluators over planned batches, and the forward that runs them.

Two traps of Composer 0.32 are avoided here. Its default `split_batch` cuts unknown batches by zip and drops items
without a word, so ours is the identity. And unequal numbers of batches end the evaluation with the shortest rank, so
all ranks get equally many, and the gathered items are checked against the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from composer.core import DataSpec, Evaluator, State
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PretrainedConfig

from llmfoundry_gauntlet.composer.models import resolve_max_seq_len
from llmfoundry_gauntlet.config.settings import AUTO
from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel, default_tokens_per_batch
from llmfoundry_gauntlet.engine.plan import Batch, assign
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.evaluation import (
    Evaluation,
    EvaluationData,
    PlannedEvaluation,
    conclude,
    plan_evaluation,
    share_seconds,
)
from llmfoundry_gauntlet.prompts.encode import Encoder
from llmfoundry_gauntlet.values import ItemKey, ItemResult, ScoreOutput

EvalInterval = Callable[[State, Any], bool]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatch:
    """A batch as Composer carries it, with the evaluation that it belongs to."""

    planned: PlannedEvaluation
    batch: Batch


class PlannedLoader:
    """This rank's batches, again at each evaluation. Not a torch DataLoader, whose iteration draws random numbers."""

    batch_size = 1  # Composer asks for it

    def __init__(self, planned: PlannedEvaluation) -> None:
        share = assign(planned.batches, num_ranks=dist.get_world_size())[dist.get_global_rank()]
        self.batches = [PlannedBatch(planned, batch) for batch in share]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[PlannedBatch]:
        return iter(self.batches)


def make_evaluator(
    label: str, planned: PlannedEvaluation, eval_interval: EvalInterval | None, metric_names: Sequence[str] = ()
) -> Evaluator:
    """An evaluator of this rank's share of the batches."""
    return Evaluator(
        label=label,
        dataloader=DataSpec(
            PlannedLoader(planned),
            split_batch=lambda batch, _: [batch],
            get_num_samples_in_batch=lambda batch: len(batch.batch.requests),
            get_num_tokens_in_batch=lambda batch: batch.batch.num_tokens,
        ),
        metric_names=list(metric_names),
        eval_interval=eval_interval,
        subset_num_batches=-1,
        device_eval_microbatch_size=1,
    )


def plan_for_model(data: EvaluationData, model: HuggingFaceModel, device_type: str) -> PlannedEvaluation:
    """The evaluation in the model's tokens, no longer than it can run. Raises ModelError."""
    settings = data.settings
    tokens = default_tokens_per_batch(device_type) if settings.tokens_per_batch == AUTO else settings.tokens_per_batch
    return plan_evaluation(
        data,
        Encoder(model.tokenizer),
        max_seq_len=longest_prompt(data, model.config),
        tokens_per_batch=tokens,
    )


def longest_prompt(data: EvaluationData, config: PretrainedConfig) -> int:
    """The max_seq_len of an evaluation: what is wanted, else the model's. Raises ModelError where it is too long."""
    own_limits = {task.key: task.max_seq_len for task in data.suite.tasks if task.max_seq_len is not None}
    return resolve_max_seq_len(data.settings.max_seq_len, config, own_limits)


class EvaluationRun:
    """One pass over a planned evaluation on this rank: runs batches, keeps item results, gathers them at the end."""

    def __init__(self, planned: PlannedEvaluation, language_model: CausalLanguageModel) -> None:
        self.planned = planned
        self.language_model = language_model
        self.started = time.perf_counter()
        self.results: dict[ItemKey, ItemResult] = {}
        self.busy_seconds = dict.fromkeys(planned.tasks, 0.0)

    def run(self, planned_batch: PlannedBatch, outputs: Any = None) -> list[ScoreOutput]:
        """Scores a batch; takes the place of `eval_forward`, whose second argument it ignores."""
        batch = planned_batch.batch
        start = time.perf_counter()
        scored = self.language_model.run(batch)
        self.results.update(self.planned.results(scored))
        seconds = time.perf_counter() - start
        sizes = [sum(len(ids) for ids in (*r.contexts, *r.continuations)) for r in batch.requests]
        for request, size in zip(batch.requests, sizes, strict=True):
            self.busy_seconds[request.key.task] += seconds * size / sum(sizes)
        return scored

    def finish(self) -> Evaluation:
        """Gathers all ranks' items by key and computes the scores, the same on every rank."""
        gathered = dist.all_gather_object((list(self.results.values()), self.busy_seconds))
        results: dict[ItemKey, ItemResult] = {}
        busy = dict.fromkeys(self.planned.tasks, 0.0)
        for part, seconds in gathered:
            for result in part:
                results.setdefault(result.key, result)
            for task, value in seconds.items():
                busy[task] += value
        wall = time.perf_counter() - self.started
        return conclude(self.planned, results, share_seconds(wall, busy))


def unwrapped(model: Any) -> HuggingFaceModel:
    """The Composer model below DDP. Raises ModelError unless it is a HuggingFaceModel with a tokenizer."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not isinstance(model, HuggingFaceModel):
        raise ModelError(f'the model is a {type(model).__name__}; allowed: a composer.models.HuggingFaceModel')
    if model.tokenizer is None:
        raise ModelError('the model has no tokenizer; construct HuggingFaceModel(model, tokenizer=...)')
    return model


def language_model(planned: PlannedEvaluation, model: HuggingFaceModel) -> CausalLanguageModel:
    """The engine's view of the model where it is now; under FSDP `model.model` is its root.

    With the reference's semantics real tokens that are equal to the padding token are masked as well.
    """
    tokenizer = model.tokenizer
    hidden = None
    if planned.data.settings.reference:
        hidden = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return CausalLanguageModel(model.model, device=next(model.parameters()).device, hidden_token_id=hidden)
