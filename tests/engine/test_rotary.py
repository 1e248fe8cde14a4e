"""Length-dependent rotary frequencies: each request has its own, and the model is restored."""

from __future__ import annotations

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


def rows_around_the_base() -> list[ScoreRequest]:
    """Return much shorter rows, one of exactly 32 tokens, one of 33, equally long ones, and choices on both sides."""
    rng = np.random.default_rng(0)
    shared = draw(rng, 12)
    shapes = [(0, (3, 2)), (16, (4,)), (17, (4,)), (28, (3,)), (18, (1, 6)), (28, (3, 1)), (36, (8,))]
    return [
        request(row, [*shared, *draw(rng, count)], [draw(rng, length) for length in lengths])
        for row, (count, lengths) in enumerate(shapes)
    ]


def rows_of(one: ScoreRequest) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return contexts and continuations."""
    return [*zip(one.contexts, one.continuations, strict=True)]


@cache
def sums_by_row(kind: str, padded_to: int) -> list[list[float]]:
    """Return summed log-probabilities of each request by bare forwards of a fresh network, one row each.

    Rows are padded to their request's longest, or to `padded_to` tokens, as llm-foundry does.
    """
    found = []
    for one in rows_around_the_base():
        length = max(padded_to, *(len(context) + len(ids) for context, ids in rows_of(one)))
        found.append(
            [
                networks.alone(networks.stretched(kind), *row, length - sum(map(len, row)))[0].sum(dtype=np.float64)
                for row in rows_of(one)
            ]
        )
    return found


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
        expected = [value for one in chosen for value in sums_by_row(kind, padded_to)[one.key.row]]
        for tokens_per_batch in (1, 90, 1000):
            batches = plan(chosen, tokens_per_batch=tokens_per_batch, layout=layout, rotary=rotary)
            halves = [half for batch in batches[::-1] for half in batch.halves()]
            outputs = networks.run(language_model, batches[::-1] if tokens_per_batch < 1000 else halves)
            np.testing.assert_allclose(networks.sums_of(outputs, chosen), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize('padded_to', [0, 128])
@pytest.mark.parametrize('kind', STRETCHED)
def test_a_cached_prefix_has_the_frequencies_of_its_batches(kind: str, padded_to: int):
    """Rows of 95 tokens. Mutation: no length for a prefix that runs by itself."""
    requests = networks.requests_after_a_prefix()
    rotary = networks.rotary(kind, padded_to=padded_to or None)
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, rotary=rotary)
    assert all(batch.prefix is not None for batch in batches)
    language_model = CausalLanguageModel(networks.stretched(kind), device=CPU, rotary=rotary)
    expected = [
        networks.alone(networks.stretched(kind), *row, max(padded_to, 95) - sum(map(len, row)))[0].sum(dtype=np.float64)
        for one in requests
        for row in rows_of(one)
    ]
    outputs = networks.run(language_model, batches)
    np.testing.assert_allclose(networks.sums_of(outputs, requests), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize('kind', STRETCHED)
def test_a_stretched_model_runs_in_a_stream(kind: str):
    """The probe has rows longer and shorter than the base. Mutation: probe batches without a length."""
    language_model = CausalLanguageModel(networks.stretched(kind), device=CPU, rotary=networks.rotary(kind))
    found = probe(language_model, vocabulary=networks.VOCABULARY, longest=60)
    assert found.layout == STREAM, found.reason


@pytest.mark.parametrize('kind', STRETCHED)
def test_training_and_evaluation_do_not_change_each_others_frequencies(kind: str):
    """Bitwise, with rows of exactly the base, at which dynamic NTK does not reset itself, and after long rows.

    Mutations: the rotary embedding left as it was run; no `reset_length`.
    """
    model, rotary, requests = networks.stretched(kind), networks.rotary(kind), rows_around_the_base()
    (embedding,) = [module for module in model.modules() if hasattr(module, 'inv_freq')]
    language_model = CausalLanguageModel(model, device=CPU, rotary=rotary)
    batches = plan(requests, tokens_per_batch=90, rotary=rotary)
    for length in (BASE, 100):
        ids = [token % networks.VOCABULARY for token in range(length)]
        before, state = networks.logits_of(model, ids), dict(vars(embedding))
        outputs = networks.run(language_model, batches)
        expected = [value for sums in sums_by_row(kind, 0) for value in sums]
        np.testing.assert_allclose(networks.sums_of(outputs, requests), expected, rtol=0, atol=2e-5)
        handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            language_model.run(batches[0])
        handle.remove()
        assert vars(embedding) == state
        assert torch.equal(networks.logits_of(model, ids), before)


def test_the_rotary_length_by_hand():
    """Choices of 3 and 6 after 30 tokens; a prompt of 30 and 2 or 3 tokens to generate."""
    scored = request(0, [1] * 30, [[2] * 3, [2] * 6])
    prompts = [
        GenerateRequest(key=ItemKey('t/0-shot', 0), context=np.ones(30, np.int32), max_new_tokens=count)
        for count in (2, 3)
    ]
    dynamic = RotaryLengths(base=32, scales_by_length=True)
    longrope = RotaryLengths(base=32, scales_by_length=False)
    assert [dynamic.of(one) for one in (scored, *prompts)] == [36, 32, 33]
    assert [longrope.of(one) for one in (scored, *prompts)] == [33, 32, 33]
    padded = RotaryLengths(base=32, scales_by_length=True, padded_to={'t/0-shot': 64, 'u/0-shot': 99})
    assert [padded.of(one) for one in (scored, *prompts)] == [64, 32, 33]
