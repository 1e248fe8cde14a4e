"""Length-dependent rotary frequencies: each request has its own, and the model is restored."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import networks
import numpy as np
import pytest
import torch
from networks import CPU, PREFIX_BUDGET, STRETCHED, draw, request

from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import LAYOUTS, STREAM, plan
from llmfoundry_gauntlet.engine.probe import probe
from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.types import GenerateRequest, ItemKey, ScoreRequest

BASE = 32
PADDED = 64
TOLERANCE = 2e-5  # in nats: rounding of the sum of a continuation's float32 log-probabilities


def rows_around_the_base() -> list[ScoreRequest]:
    """Return requests whose longest rows are shorter than 32 tokens, exactly that, or longer; all begin alike."""
    rng = np.random.default_rng(0)
    shared = draw(rng, 12)
    # Each row: the tokens of the context after the shared ones, and the lengths of the choices.
    shapes = [
        # Rows of at most 15 tokens.
        (0, (3, 2)),
        # Rows of 32 and of 33 tokens.
        (16, (4,)),
        (17, (4,)),
        # Rows of 43 tokens.
        (28, (3,)),
        # A choice on each side of 32 tokens.
        (18, (1, 6)),
        # As long as a row above, and longer than all others.
        (28, (3, 1)),
        (36, (8,)),
    ]
    requests = []
    for row, (num_own_tokens, lengths) in enumerate(shapes):
        context = [*shared, *draw(rng, num_own_tokens)]
        choices = [draw(rng, length) for length in lengths]
        requests.append(request(row, context, choices))
    return requests


def sums_at_length(kind: str, request: ScoreRequest, length: int) -> list[float]:
    """Return a request's summed log-probabilities by bare forwards of fresh networks, in rows padded to `length`."""
    sums = []
    for context, continuation in zip(request.contexts, request.continuations, strict=True):
        padding = length - len(context) - len(continuation)
        logprobs, _ = networks.alone(networks.stretched(kind), context, continuation, padding)
        sums.append(logprobs.sum(dtype=np.float64))
    return sums


@cache
def sums_by_row(kind: str, padded_to: int) -> list[list[float]]:
    """Return those sums for the rows around the base.

    Rows are padded to their request's longest, or to `padded_to` tokens, as llm-foundry does.
    """
    sums = []
    for wanted in rows_around_the_base():
        rows = zip(wanted.contexts, wanted.continuations, strict=True)
        longest = max(len(context) + len(continuation) for context, continuation in rows)
        sums.append(sums_at_length(kind, wanted, max(padded_to, longest)))
    return sums


@pytest.mark.parametrize('padded_to', [0, PADDED])
@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('kind', STRETCHED)
def test_no_row_changes_the_frequencies_of_another(kind: str, layout: str, padded_to: int):
    """They follow the request's longest row, or its padded rows, in every batch, its halves, and every order.

    Mutations: no `rotary_length`; requests with different frequencies in one batch; `rope_length` left out of `halves`.
    """
    requests = rows_around_the_base()
    rotary = networks.rotary(kind, padded_to=padded_to or None)
    language_model = CausalLanguageModel(networks.stretched(kind), device=CPU, rotary=rotary)
    for chosen in (requests, requests[:2], requests[::-1], requests[3:4]):
        expected = np.concatenate([sums_by_row(kind, padded_to)[request.key.row] for request in chosen])
        for tokens_per_batch in (1, 90, 1000):
            batches = plan(chosen, tokens_per_batch=tokens_per_batch, layout=layout, rotary=rotary)[::-1]
            # Large batches are run in halves, as after running out of memory.
            if tokens_per_batch == 1000:
                batches = [half for batch in batches for half in batch.halves()]
            outputs = networks.run(language_model, batches)
            np.testing.assert_allclose(networks.sums_of(outputs, chosen), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('padded_to', [0, 128])
@pytest.mark.parametrize('kind', STRETCHED)
def test_a_cached_prefix_has_the_frequencies_of_its_batches(kind: str, padded_to: int):
    """Rows of 95 tokens. Mutation: no length for a prefix that runs by itself."""
    requests = networks.requests_after_a_prefix()
    rotary = networks.rotary(kind, padded_to=padded_to or None)
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, rotary=rotary)
    assert all(batch.prefix is not None for batch in batches)
    language_model = CausalLanguageModel(networks.stretched(kind), device=CPU, rotary=rotary)
    expected = np.concatenate([sums_at_length(kind, request, max(padded_to, 95)) for request in requests])

    outputs = networks.run(language_model, batches)

    np.testing.assert_allclose(networks.sums_of(outputs, requests), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('kind', STRETCHED)
def test_a_stretched_model_runs_in_a_stream(kind: str):
    """The probe has rows longer and shorter than the base. Mutation: probe batches without a length."""
    language_model = CausalLanguageModel(networks.stretched(kind), device=CPU, rotary=networks.rotary(kind))

    probed = probe(language_model, vocabulary=networks.VOCABULARY, longest=60)

    assert probed.layout == STREAM, probed.reason


# A row of exactly the base, at which dynamic NTK does not reset itself, and one after which frequencies are stretched.
LENGTHS_OF_TRAINING = (BASE, 100)


def ids_of_training(length: int) -> list[int]:
    return [token % networks.VOCABULARY for token in range(length)]


@pytest.mark.parametrize('kind', STRETCHED)
def test_training_does_not_change_the_frequencies_of_an_evaluation(kind: str):
    """Mutation: no `reset_length`."""
    model, rotary, requests = networks.stretched(kind), networks.rotary(kind), rows_around_the_base()
    language_model = CausalLanguageModel(model, device=CPU, rotary=rotary)
    batches = plan(requests, tokens_per_batch=90, rotary=rotary)
    expected = np.concatenate(sums_by_row(kind, 0))

    for length in LENGTHS_OF_TRAINING:
        networks.logits_of(model, ids_of_training(length))
        outputs = networks.run(language_model, batches)
        np.testing.assert_allclose(networks.sums_of(outputs, requests), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('kind', STRETCHED)
@pytest.mark.parametrize('length', LENGTHS_OF_TRAINING)
def test_an_evaluation_does_not_change_the_frequencies_of_training(kind: str, length: int):
    """Bitwise, also after an error in the model. Mutation: the rotary embedding left as it was run."""
    model, rotary = networks.stretched(kind), networks.rotary(kind)
    (embedding,) = [module for module in model.modules() if hasattr(module, 'inv_freq')]
    language_model = CausalLanguageModel(model, device=CPU, rotary=rotary)
    batches = plan(rows_around_the_base(), tokens_per_batch=90, rotary=rotary)
    logits = networks.logits_of(model, ids_of_training(length))
    attributes = dict(vars(embedding))

    networks.run(language_model, batches)
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        language_model.run(batches[0])
    handle.remove()

    assert vars(embedding) == attributes
    assert torch.equal(networks.logits_of(model, ids_of_training(length)), logits)


@pytest.mark.parametrize(
    ('rule', 'of_choices'),
    [
        # The longest row has 36 tokens.
        (RotaryLengths(base=32, scales_by_length=True), 36),
        # LongRoPE has two sets of frequencies: any length beyond the base is the base and one.
        (RotaryLengths(base=32, scales_by_length=False), 33),
        # Rows of this task are padded.
        (RotaryLengths(base=32, scales_by_length=True, padded_to={'t/0-shot': 64, 'u/0-shot': 99}), 64),
    ],
)
def test_the_rotary_length_by_hand(rule: RotaryLengths, of_choices: int):
    """Choices of 3 and 6 after 30 tokens; a prompt of 30 and 2 or 3 tokens to generate, which are never padded."""
    choices = request(0, [1] * 30, [[2] * 3, [2] * 6])
    prompt = GenerateRequest(key=ItemKey('t/0-shot', 0), context=np.ones(30, np.int32), max_new_tokens=2)
    longer = replace(prompt, max_new_tokens=3)

    assert rule.of(choices) == of_choices
    assert rule.of(prompt) == 32
    assert rule.of(longer) == 33
