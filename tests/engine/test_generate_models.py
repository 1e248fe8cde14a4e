"""Generations of models with special needs: hidden tokens, length-dependent rotary embeddings, half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import generations
import networks
import numpy as np
import pytest
import torch
from generations import generator_of, letters, request, tokens
from networks import draw

from llmfoundry_gauntlet.engine.continuous import plan_continuous_batches
from llmfoundry_gauntlet.engine.decoding import CACHE, NO_CACHE, PROMPT_STREAM
from llmfoundry_gauntlet.engine.kv_cache import CachedAttention, KVCache
from llmfoundry_gauntlet.types import GenerateRequest

HIDDEN = 7
# With several prompts and sequences each; windows and caps are tested by the probe's tests.
FAMILIES = [
    ('llama', PROMPT_STREAM),
    ('llama', CACHE),
    ('llama', NO_CACHE),
    ('gpt2', CACHE),
    ('opt', PROMPT_STREAM),
    ('opt', CACHE),
    ('mpt', PROMPT_STREAM),
    ('bloom', PROMPT_STREAM),
    ('bloom', CACHE),
]


@pytest.mark.parametrize(('name', 'layout'), FAMILIES)
def test_hidden_tokens_are_masked_only_in_prompts(name: str, layout: str):
    """Prompts are padded as `generate` pads them, with an attention mask; some need no padding.

    Mutations: hidden tokens are seen, count as positions, or are hidden in generations.
    """
    rng = np.random.default_rng(5)
    contexts = [draw(rng, 9), [HIDDEN, *draw(rng, 4)], [*draw(rng, 8), HIDDEN, HIDDEN, 99], draw(rng, 2)]
    contexts[0][4] = HIDDEN
    requests = [request(row, context, 8 - row) for row, context in enumerate(contexts)]
    requests.append(request(2, contexts[2], 5, sample=1))
    model = networks.network(name)
    expected = generations.generated_alone(model, requests, HIDDEN)
    assert expected[:3] != generations.generated_alone(model, requests[:3])
    written = generations.common_token(expected)
    assert all(context[-1] != written for context in contexts)
    for hidden, wanted in ((HIDDEN, expected), (written, generations.generated_alone(model, requests, written))):
        for num_slots in (1, 2, 5):
            generator = generator_of(model, layout, hidden_token_id=hidden)
            assert generations.texts(generator, requests, num_slots) == [letters(ids) for ids in wanted]


@pytest.mark.parametrize('loaded', ['eager', 'sdpa'])
@pytest.mark.parametrize(('name', 'layout'), FAMILIES)
def test_a_prompt_may_end_in_hidden_tokens_or_hold_nothing_else(name: str, layout: str, loaded: str):
    """As with eager attention in `generate`: the last token of such a prompt does not see itself.

    Mutations: it does; its position is not 1; padding is another token than the hidden one.
    """
    rng = np.random.default_rng(8)
    contexts = [[*draw(rng, 6), HIDDEN], [HIDDEN], [*draw(rng, 3), HIDDEN, HIDDEN], [HIDDEN] * 4, draw(rng, 9)]
    requests = [request(row, context, 6) for row, context in enumerate(contexts)]
    expected = generations.generated_alone(networks.network(name, attn_implementation='eager'), requests, HIDDEN)
    if loaded == 'sdpa' and name in networks.EAGER_ALONE:
        loaded = 'eager'
    for chosen in (requests, requests[::-1], requests[1:2], requests[3:]):
        model = networks.network(name, attn_implementation=loaded)
        generator = generator_of(model, layout, hidden_token_id=HIDDEN)
        wanted = [letters(expected[one.key.row]) for one in chosen]
        assert generations.texts(generator, chosen, len(chosen)) == wanted


def filled_up(kind: str, one: GenerateRequest) -> Callable[[list[int]], torch.Tensor]:
    """Return logits of a bare forward of a fresh network, padded to the longest possible generation."""
    length = len(one.context) + one.max_new_tokens
    model = networks.stretched(kind)
    return lambda ids: networks.logits_of(model, [*ids, *[0] * (length - len(ids))])[len(ids) - 1]


@pytest.mark.parametrize('layout', [PROMPT_STREAM, CACHE, NO_CACHE])
@pytest.mark.parametrize('kind', networks.STRETCHED)
def test_rotary_frequencies_of_a_generation_are_its_own(kind: str, layout: str):
    """Its length is that of the prompt and the longest possible generation. Mutation: no length."""
    rng = np.random.default_rng(6)
    requests = [request(row, draw(rng, length), 6) for row, length in enumerate((3, 41, 12, 26, 27, 41))]
    requests.append(request(6, requests[2].context, 4))
    expected = {one.key: letters(generations.by_bare_forwards(filled_up(kind, one), one)) for one in requests}
    rotary = networks.rotary(kind)
    for chosen in (requests, requests[::-1], requests[:1], requests[2:5]):
        generator = generator_of(networks.stretched(kind), layout, rotary=rotary)
        batches = plan_continuous_batches(chosen, tokens_per_batch=1000, rotary=rotary)
        found = {generation.key: generation.text for batch in batches for generation in generator.generate(batch)}
        assert found == {one.key: expected[one.key] for one in chosen}


def check_within_rounding(model: Any, requests: list[GenerateRequest], texts: list[str], eps: float) -> None:
    """Check that every token is within a few roundings of the most probable one by a bare forward."""
    for one, text in zip(requests, texts, strict=True):
        assert len(text) == one.max_new_tokens
        ids = one.context.tolist()
        logits = networks.logits_of(model, [*ids, *tokens(text)])[len(ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens(text))[:, None]).squeeze(1)
        assert (logits.amax(dim=1) - chosen).max() <= 4 * eps * logits.abs().max()


@pytest.mark.parametrize(('dtype', 'mixed'), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize(('name', 'layout'), FAMILIES)
def test_half_and_mixed_precision_generate_the_most_probable_tokens(
    name: str, layout: str, dtype: torch.dtype, mixed: bool
):
    """Mutations: keys and values in float32, which the model refuses; the forward outside of autocast."""
    model, requests = networks.network(name), generations.mixed_requests()
    model = model if mixed else model.to(dtype)
    generator = generator_of(model, layout)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16, enabled=mixed):
        texts = generations.texts(generator, requests)
        check_within_rounding(model, requests, texts, torch.finfo(dtype).eps)
    assert generator.rounding == torch.finfo(dtype).eps


# Prompts in a stream.


def test_a_shared_prefix_of_prompts_runs_once():
    """A prefix of 20 tokens, 3 more of each of four prompts, and an unrelated fifth prompt."""
    model = networks.network()
    requests = [request(row, [5] * 20 + [30 + row] * 3, 3) for row in range(4)]
    requests += [request(4, [9] * 6, 4), request(4, [9] * 6, 4, sample=1)]
    generator = generator_of(model, PROMPT_STREAM)
    expected = [letters(ids) for ids in generations.generated_alone(model, requests)]
    assert generations.texts(generator, requests, 6, tokens_per_batch=1000) == expected
    assert (generator.usage.prompt_tokens, generator.usage.padding_tokens) == (20 + 4 * 3 + 6, 0)


@pytest.mark.parametrize('num_slots', [1, 2, 4, 6])
def test_a_nan_prompt_does_not_affect_prompts_with_the_same_prefix(num_slots: int):
    """In a stream they share a tree, in which unseen tokens are multiplied by zero. They run again in rows, fewer at a
    time; then a short prompt gets the slot of a longer one.

    Mutations: no `take_back`, or one that clears nothing.
    """
    model, poison = networks.network(), 50
    contexts = [*([5] * 70 + [last] * 3 for last in (30, poison, 31, 32)), [9, 9]]
    requests = [request(row, context, 4) for row, context in enumerate(contexts)]
    requests[2:2] = [request(1, contexts[1], 4, sample=1)]
    expected = [(letters(ids), True) for ids in generations.generated_alone(model, requests)]
    assert all(letters([poison]) not in text for text, _ in expected)
    expected[1] = expected[2] = ('', False)

    networks.poison(model, poison)
    found = generations.run(generator_of(model, PROMPT_STREAM), requests, num_slots, tokens_per_batch=100)
    assert [(one.text, one.is_finite) for one in found] == expected


@pytest.mark.parametrize(('counts_masked', 'positions'), [(True, [0, 1, 2, 3]), (False, [0, 0, 1, 2])])
def test_positions_of_biases_count_masked_tokens_as_the_model_does(counts_masked: bool, positions: list[int]):
    """A prompt of three tokens, the second masked, and a step: MPT counts columns, Bloom the tokens that are seen."""
    cache = KVCache(1, longest_context=3, device=networks.CPU)
    cache.enter([3], torch.tensor([[True, False, True]]))
    prompt = CachedAttention(cache, 3, None, counts_masked=counts_masked)
    assert prompt.positions[0].tolist() == positions[:3]
    assert prompt.seen[0].int().tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 1]]  # a masked token does not see itself
    cache.step()
    step = CachedAttention(cache, 1, None, counts_masked=counts_masked)
    assert step.positions[0, :4].tolist() == positions
    assert step.seen[0, 0, :5].int().tolist() == [1, 0, 1, 1, 0]
