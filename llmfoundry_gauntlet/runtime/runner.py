"""The model side of an evaluation: items for the model, probes that all ranks agree on, and the batches it runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from transformers import PretrainedConfig

from llmfoundry_gauntlet.config.resources import cache_folder
from llmfoundry_gauntlet.config.settings import AUTO
from llmfoundry_gauntlet.engine.decoding import GENERATION_LAYOUTS, NO_CACHE, GenerationDecoder, end_ids
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.lengths import position_limit, resolve_max_seq_len, rotary_lengths
from llmfoundry_gauntlet.engine.model import Budget, CausalLanguageModel, automatic_budget
from llmfoundry_gauntlet.engine.plan import FORKED, LAYOUTS
from llmfoundry_gauntlet.engine.probe import Probe, check_attention, probe, probe_generation, use_eager_attention
from llmfoundry_gauntlet.errors import ModelError, as_given
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData
from llmfoundry_gauntlet.evaluation.run import (
    PlannedEvaluation,
    PreparedEvaluation,
    plan_evaluation,
    prepare_evaluation,
)
from llmfoundry_gauntlet.results.journal import Identity
from llmfoundry_gauntlet.runtime.distributed import gather, world_size
from llmfoundry_gauntlet.runtime.gathered import gathered_at_a_time
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.prepare import TOKENS

PLAN = ('tokens_per_batch', 'generation_tokens_per_batch', 'requests_per_batch', 'layout')  # recorded to be resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """The probe results and the tokens per batch, reused by all evaluations of a training run."""

    scoring: Probe | None
    generation: Probe | None
    budget: Budget
    is_current: bool = True  # of the network that is there now

    @property
    def certain(self) -> bool:
        """Return whether the probes also hold for later weights and need not be repeated."""
        return self.is_current and all(probe is None or probe.certain for probe in (self.scoring, self.generation))

    @property
    def layout(self) -> str:
        """Return the batch layout."""
        return LAYOUTS[0] if self.scoring is None else self.scoring.layout


class EvaluatedModel(Protocol):
    """A network that works like a Hugging Face causal language model, and its tokenizer.

    ModelAndTokenizer is one, and Composer's HuggingFaceModel, whose network may be replaced between evaluations. Under
    FSDP `model` is the root module.
    """

    @property
    def model(self) -> Any:
        """Return the network."""

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelAndTokenizer:
    """An EvaluatedModel of its two parts."""

    model: Any
    tokenizer: Any


class ModelRunner:
    """Run a model for the items of an evaluation."""

    def __init__(self, model: EvaluatedModel, prepared: PreparedEvaluation) -> None:
        self.model = model
        self.tokenizer: Any = model.tokenizer
        self.prepared = prepared  # all items
        self.probed: ProbedModel | None = None
        self.generator: TextGenerator | None = None  # set by the first probe if any task generates
        self.network: Any = model.model
        self.modules: list[Any] = []  # of the network, as it was in the latest evaluation

    def use(self, model: EvaluatedModel) -> bool:
        """Run the network that is now in a model; return whether it, or a part of it, is another than before.

        Then it is probed anew. Raise ModelError if it cannot run the items.
        """
        self.model = model
        earlier, modules = self.modules, list(model.model.modules())
        is_same = len(modules) == len(earlier) and all(map(operator.is_, modules, earlier))
        has_changed = bool(earlier) and not is_same
        self.modules = modules
        if model.model is self.network and not has_changed:
            return False
        check_network(model.model, self.prepared)
        self.network = model.model
        self.__dict__.pop('language_model', None)
        self.generator = None
        if self.probed is not None:
            self.probed = replace(self.probed, is_current=False)
        return True

    @cached_property
    def language_model(self) -> CausalLanguageModel:
        """Return the model wrapped for the engine, as it is once Composer has sharded it.

        With reference semantics real tokens that equal the padding token are also masked, and rotary frequencies are
        those of rows padded to max_seq_len.
        """
        hidden, padded_to = None, {}
        if self.prepared.data.settings.reference:
            hidden = self.tokenizer.pad_token_id
            hidden = self.tokenizer.eos_token_id if hidden is None else hidden
            padded_to = {key: self.prepared.max_seq_len_of(key) for key in self.prepared.tasks}
        return CausalLanguageModel(
            self.model.model,
            device=next(self.model.model.parameters()).device,
            hidden_token_id=hidden,
            rotary=rotary_lengths(self.model.model.config, padded_to),
        )

    def progress(self) -> tuple[int, int]:
        """Return the numbers of forwards and decoding steps so far."""
        return self.language_model.num_forwards, 0 if self.generator is None else self.generator.usage.steps

    def probe(self, recorded: Identity) -> ProbedModel:
        """Return what every rank can run; probe the model unless earlier probes still hold.

        `recorded` has the tokens per batch of an earlier attempt, if there was one.
        """
        probed = self.probed
        if probed is None or not probed.certain:
            self._compare_attention()
            scoring, generation = self._probe(), self._probe_generation()
            budget = self._budget(scoring, generation, recorded) if probed is None else probed.budget
            on_this_rank = ProbedModel(scoring=scoring, generation=generation, budget=budget)
            probed = self.probed = agreed(gather(on_this_rank))
            if any(gather(bool(self.language_model.eager))):
                reason = 'another rank found it off the eager attention that defines the model'
                use_eager_attention(self.language_model, reason)
            self.language_model.shortens_scans = all(gather(self.language_model.shortens_scans))
            if self.generator is not None and probed.generation is not None:
                self.generator.layout = probed.generation.layout
        return probed

    def planned(self, prepared: PreparedEvaluation) -> PlannedEvaluation:
        """Return the plan for these items, in the layout that the model supports."""
        probed = self.probed
        assert probed is not None  # set by `probe`
        return plan_evaluation(
            prepared,
            tokens_per_batch=probed.budget.scoring,
            generation_tokens_per_batch=probed.budget.generation,
            requests_per_batch=probed.budget.requests,
            layout=probed.layout,
            scoring=str(probed.scoring or ''),
            generation=str(probed.generation or ''),
            hidden_token_id=self.language_model.hidden_token_id,
            rotary=self.language_model.rotary,
            row_states=self.language_model.row_states,
        )

    def _compare_attention(self) -> None:
        """Compare the model's attention with the eager one, once for scoring and generation."""
        self.language_model.attention_compared = 0  # with these weights
        longest = max(self.prepared.longest, self.prepared.longest_generation)
        check_attention(self.language_model, vocabulary=self._vocabulary, longest=longest)

    def _probe(self) -> Probe | None:
        """Probe the model for scoring; return None if nothing is scored."""
        if not self.prepared.score_requests:
            return None
        return probe(self.language_model, vocabulary=self._vocabulary, longest=self.prepared.longest)

    def _probe_generation(self) -> Probe | None:
        """Probe the model for generation; return None if nothing is generated."""
        if not self.prepared.longest_generation:
            return None
        if self.generator is None:
            reference = self.prepared.data.settings.reference
            ends = end_ids(self.tokenizer, self.language_model.model, reference=reference)
            self.generator = TextGenerator(self.language_model, GenerationDecoder(self.tokenizer, ends))
        longest = self.prepared.longest_generation
        return probe_generation(self.generator, vocabulary=self._vocabulary, longest=longest)

    @property
    def _vocabulary(self) -> int:
        return min(len(self.tokenizer), self.language_model.vocabulary)

    def _budget(self, scoring: Probe | None, generation: Probe | None, recorded: Identity) -> Budget:
        """Return the tokens per batch: from the settings or an earlier attempt, else chosen for the device."""
        tokens = self.prepared.data.settings.tokens_per_batch
        if tokens != AUTO:
            return Budget(scoring=tokens, generation=tokens)
        if set(PLAN) <= recorded.keys():
            return Budget(
                scoring=recorded['tokens_per_batch'],
                generation=recorded['generation_tokens_per_batch'],
                requests=recorded['requests_per_batch'],
            )
        cached_bytes = 0
        if self.generator is not None and generation is not None and generation.layout != NO_CACHE:
            cached_bytes = self.generator.cached_bytes
        return automatic_budget(
            self.language_model.model.config,
            self.language_model.device,
            cached_bytes=cached_bytes,
            forks=scoring is not None and scoring.layout == FORKED,
            num_tokens=self.prepared.num_tokens,
            num_generations=len(self.prepared.generate_requests),
            num_ranks=world_size(),
            gathered_bytes=gathered_at_a_time(self.language_model.model) if self.language_model.in_step else 0,
        )


def agreed(of_ranks: Sequence[ProbedModel]) -> ProbedModel:
    """Return what every rank can run: the least preferred of the ranks' layouts and the smallest token budget."""
    scoring = [probed.scoring for probed in of_ranks if probed.scoring is not None]
    generation = [probed.generation for probed in of_ranks if probed.generation is not None]
    budgets = [probed.budget for probed in of_ranks]
    return ProbedModel(
        scoring=max(scoring, key=lambda probe: LAYOUTS.index(probe.layout), default=None),
        generation=max(generation, key=lambda probe: GENERATION_LAYOUTS.index(probe.layout), default=None),
        budget=Budget(
            scoring=min(budget.scoring for budget in budgets),
            generation=min(budget.generation for budget in budgets),
            requests=budgets[0].requests,
        ),
    )


def prepare_for_model(data: EvaluationData, model: EvaluatedModel) -> PreparedEvaluation:
    """Return all items tokenized for the model, no longer than it can run. Raise ModelError."""
    prepared = prepare_evaluation(
        data,
        Encoder(model.tokenizer),
        max_seq_len=longest_prompt(data, model.model.config),
        cache=cache_folder(TOKENS),
    )
    check_generations_fit(prepared, model.model.config)
    return prepared


def longest_prompt(data: EvaluationData, config: PretrainedConfig) -> int:
    """Return max_seq_len from the settings, or else the model's. Raise ModelError if it is too long for the model."""
    own_limits = {task.key: task.max_seq_len for task in data.suite.tasks if task.max_seq_len is not None}
    return resolve_max_seq_len(data.settings.max_seq_len, config, own_limits)


def check_network(network: Any, prepared: PreparedEvaluation) -> None:
    """Raise ModelError if a network that replaced another has too few positions or tokens for the items."""
    limit = position_limit(network.config)
    longest = max(prepared.longest, prepared.longest_generation)
    if limit is not None and longest > limit:
        raise ModelError(
            f'the network of the model was replaced by one ({network.config.model_type}) with positions for {limit} '
            f'tokens, but an item has {longest}; give {as_given("max_seq_len", limit)}'
        )
    vocabulary = network.config.get_text_config().vocab_size
    highest = highest_token(prepared)
    if highest >= vocabulary:
        raise ModelError(
            f'the network of the model was replaced by one ({network.config.model_type}) for {vocabulary} tokens, but '
            f'an item has the token id {highest}; its tokenizer must be the same'
        )


def highest_token(prepared: PreparedEvaluation) -> int:
    """Return the highest token id in all requests."""
    sequences = [request.context for request in prepared.generate_requests]
    for request in prepared.score_requests:
        sequences += [*request.contexts, *request.continuations]
    return max((int(ids.max()) for ids in sequences if len(ids)), default=0)


def check_generations_fit(prepared: PreparedEvaluation, config: PretrainedConfig) -> None:
    """Raise ModelError if a prompt and its generation would exceed the model's positions.

    Only llm-foundry's truncation lets them exceed `max_seq_len` (see `Preparation.token_limit`).
    """
    limit = position_limit(config)
    for request in prepared.generate_requests:
        if limit is not None and request.length > max(limit, prepared.max_seq_len):
            raise ModelError(
                f'{request.key.task}: a prompt of {len(request.context)} tokens and a generation of '
                f'{request.max_new_tokens} make {request.length}, but the model ({config.model_type}) has positions '
                f'for {limit}; give a smaller generation_kwargs.max_new_tokens or max_seq_len'
            )
