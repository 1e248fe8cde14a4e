"""Run requests of another program on a model: without tasks, records and ranks of an evaluation of ours."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch

from llmfoundry_gauntlet.config.settings import AUTO
from llmfoundry_gauntlet.engine.continuous import assign_continuous_batches, plan_continuous_batches
from llmfoundry_gauntlet.engine.decoding import NO_CACHE, GenerationDecoder, end_ids
from llmfoundry_gauntlet.engine.generate import OnFinished, TextGenerator
from llmfoundry_gauntlet.engine.lengths import rotary_lengths
from llmfoundry_gauntlet.engine.model import Budget, CausalLanguageModel, automatic_budget
from llmfoundry_gauntlet.engine.plan import FORKED, PADDED_ROWS, longest_row, plan
from llmfoundry_gauntlet.engine.probe import Probe, probe, probe_generation
from llmfoundry_gauntlet.engine.ranks import assign
from llmfoundry_gauntlet.engine.rounding import CANNOT
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.runtime.launcher import Launcher
from llmfoundry_gauntlet.runtime.runner import EvaluatedModel
from llmfoundry_gauntlet.types import GenerateRequest, ScoreOutput, ScoreRequest

log = logging.getLogger(__name__)

OnOutputs = Callable[[Sequence[ScoreOutput]], None]


class RequestRunner:
    """Run requests on a network, which may be trained between the calls.

    It is probed at the first call, and again for longer rows. `tokens_per_batch` is a number, or auto.
    """

    def __init__(self, model: EvaluatedModel, *, tokens_per_batch: int | str = AUTO) -> None:
        self.model = model
        self.tokens_per_batch = tokens_per_batch
        network = model.model
        self.language_model = CausalLanguageModel(
            network,
            device=next(network.parameters()).device,
            rotary=rotary_lengths(network.config, {}),
        )
        decoder = GenerationDecoder(model.tokenizer, end_ids(model.tokenizer, network, reference=False))
        self.generator = TextGenerator(self.language_model, decoder)
        self.scoring: Probe | None = None
        self.generation: Probe | None = None
        self._longest_scored = 0  # tokens of the longest row that was probed
        self._longest_generated = 0

    def probe_scoring(self, requests: Sequence[ScoreRequest]) -> None:
        """Choose the layout in which to score these requests. Raise ModelError if the model cannot run any."""
        longest = max(longest_row(request) for request in requests)
        if self.scoring is not None and self.scoring.certain and longest <= self._longest_scored:
            return
        with unrunnable_as_model_error():
            self.scoring = probe(self.language_model, vocabulary=self._vocabulary, longest=longest)
        self._longest_scored = longest
        log.info('log-likelihoods: %s', self.scoring)

    def probe_generation(self, requests: Sequence[GenerateRequest]) -> None:
        """Choose the layout in which to generate for these requests. Raise ModelError if the model cannot run any."""
        longest = max(request.length for request in requests)
        if self.generation is not None and self.generation.certain and longest <= self._longest_generated:
            return
        with unrunnable_as_model_error():
            self.generation = probe_generation(self.generator, vocabulary=self._vocabulary, longest=longest)
        self._longest_generated = longest
        self.generator.layout = self.generation.layout
        log.info('generation: %s', self.generation)

    def score(self, requests: Sequence[ScoreRequest], on_outputs: OnOutputs) -> None:
        """Score requests after `probe_scoring`; `on_outputs` gets the output of each once, in any order.

        Outputs that are not finite, which other requests of their batch may have caused, are those of a rerun as padded
        rows.
        """
        assert self.scoring is not None
        layout = self.scoring.layout
        requests_by_key = {request.key: request for request in requests}
        suspects: list[ScoreRequest] = []

        def keep_finite(outputs: Sequence[ScoreOutput]) -> None:
            finite = [output for output in outputs if is_finite(output) or layout == PADDED_ROWS]
            known = {output.key for output in finite}
            suspects.extend(requests_by_key[output.key] for output in outputs if output.key not in known)
            on_outputs(finite)

        num_tokens = sum(longest_row(request) for request in requests)
        budget = self._budget(num_tokens=num_tokens).scoring
        self._score_in(layout, requests, budget, keep_finite)
        if suspects:
            self._score_in(PADDED_ROWS, suspects, budget, on_outputs)
        self.language_model.forget()  # frees the cached prefix, which is of these weights

    def generate(self, requests: Sequence[GenerateRequest], on_finished: OnFinished) -> None:
        """Generate for requests after `probe_generation`; `on_finished` gets each generation once, as it has ended."""
        num_tokens = sum(request.length for request in requests)
        budget = self._budget(num_tokens=num_tokens, num_generations=len(requests))
        batches = plan_continuous_batches(
            requests,
            tokens_per_batch=budget.generation,
            requests_per_batch=budget.requests,
            rotary=self.language_model.rotary,
        )
        (in_order,) = assign_continuous_batches(batches, num_ranks=1)
        for batch in in_order:
            self.generator.generate(batch, on_finished=on_finished)

    def _score_in(self, layout: str, requests: Sequence[ScoreRequest], budget: int, on_outputs: OnOutputs) -> None:
        """Score requests in a layout, laying out each batch while the device runs the one before."""
        batches = plan(
            requests,
            tokens_per_batch=budget,
            layout=layout,
            rotary=self.language_model.rotary,
            row_states=self.language_model.row_states,
        )
        (in_order,) = assign(batches, num_ranks=1)
        launcher = Launcher()
        for batch, following in pairwise([*in_order, None]):
            assert batch is not None
            for outputs in launcher.run(self.language_model, batch, following):
                on_outputs(outputs)

    @property
    def _vocabulary(self) -> int:
        return min(len(self.model.tokenizer), self.language_model.vocabulary)

    def _budget(self, *, num_tokens: int, num_generations: int = 0) -> Budget:
        """Return the tokens per batch: those that were given, else chosen for the device."""
        if not isinstance(self.tokens_per_batch, str):
            return Budget(scoring=self.tokens_per_batch, generation=self.tokens_per_batch)
        caches = self.generation is not None and self.generation.layout != NO_CACHE
        return automatic_budget(
            self.language_model.model.config,
            self.language_model.device,
            cached_bytes=self.generator.cached_bytes if caches else 0,
            forks=self.scoring is not None and self.scoring.layout == FORKED,
            num_tokens=num_tokens,
            num_generations=num_generations,
            num_ranks=1,
        )


@contextmanager
def unrunnable_as_model_error() -> Iterator[None]:
    """Raise ModelError for errors of a model that does not take the inputs of a causal language model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except CANNOT as error:
        raise ModelError(f'the model cannot run padded rows: {type(error).__name__}: {error}') from error


def is_finite(output: ScoreOutput) -> bool:
    """Return whether all log-probabilities of an output are finite."""
    return all(math.isfinite(logprobs.sum()) for logprobs in output.logprobs)
