"""Generations of models with special needs: hidden tokens, length-dependent rotary embeddings, half precision."""

from __future__ import annotations

from typing import Any

import generations
import networks
import numpy as np
import pytest
import torch
from generations import generator_of, letters, request, tokens
from networks import draw

from llmfoundry_gauntlet.engine import generate
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
    ('deepseek_v3', PROMPT_STREAM),
    ('llama4', PROMPT_STREAM),
]
# Rounding in half precision sends tokens of these to other experts.
OF_EXPERTS = [('gpt_oss', PROMPT_STREAM)] if networks.IS_TRANSFORMERS_5 else []


def requests_with_hidden_tokens() -> list[GenerateRequest]:
    """Return prompts with the hidden token inside, first, before the last token, and none; one has two samples."""
    rng = np.random.default_rng(5)
    contexts = [draw(rng, 9), [HIDDEN, *draw(rng, 4)], [*draw(rng, 8), HIDDEN, HIDDEN, 99], draw(rng, 2)]
    contexts[0][4] = HIDDEN
    requests = [request(row, context, 8 - row) for row, context in enumerate(contexts)]
    second_sample = request(2, contexts[2], 5, sample=1)
    return [*requests, second_sample]


def check_with_hidden_token(hidden: int, model: Any, layout: str, expected: list[list[int]]) -> None:
    """Check the generations of the requests above, for several numbers of slots."""
    expected_texts = [letters(ids) for ids in expected]
    for num_slots in (1, 2, 5):
        generator = generator_of(model, layout, hidden_token_id=hidden)
        assert generations.texts(generator, requests_with_hidden_tokens(), num_slots) == expected_texts


@pytest.mark.parametrize(('name', 'layout'), [*FAMILIES, *OF_EXPERTS])
def test_hidden_tokens_of_prompts_are_masked(name: str, layout: str):
    """Prompts are padded as `generate` pads them, with an attention mask; some need no padding.

    Mutations: hidden tokens are seen, or count as positions.
    """
    model, requests = networks.network(name), requests_with_hidden_tokens()
    expected = generations.generated_alone(model, requests, HIDDEN)
    assert expected[:3] != generations.generated_alone(model, requests[:3])  # the mask makes a difference

    check_with_hidden_token(HIDDEN, model, layout, expected)


def test_hidden_tokens_that_all_prompts_share_are_masked(monkeypatch: pytest.MonkeyPatch):
    """Mutation: keys that all slots share are read once, without a mask."""
    monkeypatch.setattr(generate, 'LEAST_SHARED', 4)
    rng = np.random.default_rng(6)
    prefix = [*draw(rng, 3), HIDDEN, HIDDEN, *draw(rng, 3)]
    requests = [request(row, [*prefix, *draw(rng, 2)], 6) for row in range(3)]
    model = networks.network()
    expected = [letters(ids) for ids in generations.generated_alone(model, requests, HIDDEN)]

    assert generations.texts(generator_of(model, PROMPT_STREAM, hidden_token_id=HIDDEN), requests) == expected


@pytest.mark.parametrize(('name', 'layout'), [*FAMILIES, *OF_EXPERTS])
def test_the_hidden_token_is_not_masked_in_generations(name: str, layout: str):
    """Mutation: it is."""
    model, requests = networks.network(name), requests_with_hidden_tokens()
    # A token that some generations of these requests have, and at which no prompt ends.
    generated = generations.common_token(generations.generated_alone(model, requests, HIDDEN))
    assert all(request.context[-1] != generated for request in requests)

    check_with_hidden_token(generated, model, layout, generations.generated_alone(model, requests, generated))


@pytest.mark.skipif(
    networks.IS_TRANSFORMERS_5,
    reason="`generate` of transformers 5 gives masked tokens position 0, llm-foundry's and ours 1",
)
@pytest.mark.parametrize('loaded', ['eager', 'sdpa'])
@pytest.mark.parametrize(('name', 'layout'), FAMILIES)
def test_a_prompt_may_end_in_hidden_tokens_or_hold_nothing_else(name: str, layout: str, loaded: str):
    """As with eager attention in `generate`: the last token of such a prompt does not see itself.

    Mutations: it does; its position is not 1; padding is another token than the hidden one.
    """
    rng = np.random.default_rng(8)
    contexts = [
        [*draw(rng, 6), HIDDEN],
        [HIDDEN],
        [*draw(rng, 3), HIDDEN, HIDDEN],
        [HIDDEN] * 4,
        draw(rng, 9),
    ]
    requests = [request(row, context, 6) for row, context in enumerate(contexts)]
    eager = networks.network(name, attn_implementation='eager')
    texts = [letters(ids) for ids in generations.generated_alone(eager, requests, HIDDEN)]
    if loaded == 'sdpa' and name in networks.EAGER_ALONE:
        loaded = 'eager'

    # All, all in the other order, and each prompt of nothing else as the first one.
    for rows in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1], [3, 4]):
        model = networks.network(name, attn_implementation=loaded)
        generator = generator_of(model, layout, hidden_token_id=HIDDEN)
        chosen = [requests[row] for row in rows]
        assert generations.texts(generator, chosen, len(chosen)) == [texts[row] for row in rows]


def generated_at_full_length(kind: str, request: GenerateRequest) -> str:
    """Return what bare forwards of a fresh network generate, each padded to the longest possible generation."""
    model = networks.stretched(kind)
    length = len(request.context) + request.max_new_tokens

    def logits_after(ids: list[int]) -> torch.Tensor:
        padding = [0] * (length - len(ids))
        return networks.logits_of(model, ids + padding)[len(ids) - 1]

    return letters(generations.by_bare_forwards(logits_after, request))


@pytest.mark.parametrize('layout', [PROMPT_STREAM, CACHE, NO_CACHE])
@pytest.mark.parametrize('kind', networks.STRETCHED)
def test_rotary_frequencies_of_a_generation_are_its_own(kind: str, layout: str):
    """Its length is that of the prompt and the longest possible generation. Mutation: no length."""
    rng = np.random.default_rng(6)
    # Of 32 tokens, at which frequencies change: far below, beyond, exactly (26 + 6), and one more.
    requests = [request(row, draw(rng, length), 6) for row, length in enumerate((3, 41, 12, 26, 27, 41))]
    requests.append(request(6, requests[2].context, 4))
    expected = {request.key: generated_at_full_length(kind, request) for request in requests}
    rotary = networks.rotary(kind)

    for chosen in (requests, requests[::-1], requests[:1], requests[2:5]):
        generator = generator_of(networks.stretched(kind), layout, rotary=rotary)
        text_of = {}
        for batch in plan_continuous_batches(chosen, tokens_per_batch=1000, rotary=rotary):
            for generation in generator.generate(batch):
                text_of[generation.key] = generation.text
        assert text_of == {request.key: expected[request.key] for request in chosen}


def check_within_rounding(model: Any, requests: list[GenerateRequest], texts: list[str], eps: float) -> None:
    """Check that every token is within a few roundings of the most probable one by a bare forward."""
    for wanted, text in zip(requests, texts, strict=True):
        ids = tokens(text)
        assert len(ids) == wanted.max_new_tokens

        # The logits of a token are those of the position before it.
        first = len(wanted.context) - 1
        logits = networks.logits_of(model, [*wanted.context.tolist(), *ids])[first:-1]
        logits_of_ids = logits.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        below_most_probable = logits.amax(dim=1) - logits_of_ids
        assert below_most_probable.max() <= 4 * eps * logits.abs().max()


@pytest.mark.parametrize(
    ('dtype', 'mixed'),
    [
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.bfloat16, True),  # weights in float32, under autocast
    ],
)
@pytest.mark.parametrize(('name', 'layout'), FAMILIES)
def test_half_and_mixed_precision_generate_the_most_probable_tokens(
    name: str, layout: str, dtype: torch.dtype, mixed: bool
):
    """Mutations: keys and values in float32, which the model refuses; the forward outside of autocast."""
    model, requests = networks.network(name), generations.mixed_requests()
    if not mixed:
        model = model.to(dtype)
    generator = generator_of(model, layout)
    eps = torch.finfo(dtype).eps

    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16, enabled=mixed):
        texts = generations.texts(generator, requests)
        check_within_rounding(model, requests, texts, eps)
    assert generator.rounding == eps


# Prompts in a stream.


def test_a_shared_prefix_of_prompts_runs_once():
    """A prefix of 20 tokens, 3 more of each of four prompts, and an unrelated fifth prompt of 6 with two samples."""
    model = networks.network()
    requests = [request(row, [5] * 20 + [30 + row] * 3, 3) for row in range(4)]
    requests += [request(4, [9] * 6, 4), request(4, [9] * 6, 4, sample=1)]
    expected = [letters(ids) for ids in generations.generated_alone(model, requests)]
    generator = generator_of(model, PROMPT_STREAM)

    texts = generations.texts(generator, requests, 6, tokens_per_batch=1000)

    assert texts == expected
    assert generator.usage.prompt_tokens == 20 + 4 * 3 + 6
    assert generator.usage.padding_tokens == 0


@pytest.mark.parametrize('num_slots', [1, 2, 4, 6])
def test_a_nan_prompt_does_not_affect_prompts_with_the_same_prefix(num_slots: int):
    """In a stream they share a tree, in which unseen tokens are multiplied by zero. They run again in rows, fewer at a
    time; then a short prompt gets the slot of a longer one.

    Mutations: no `take_back`, or one that clears nothing.
    """
    model, poison = networks.network(), 50
    prefix = [5] * 70
    poisoned_prompt = prefix + [poison] * 3
    requests = [
        request(0, prefix + [30] * 3, 4),
        request(1, poisoned_prompt, 4),
        request(1, poisoned_prompt, 4, sample=1),
        request(2, prefix + [31] * 3, 4),
        request(3, prefix + [32] * 3, 4),
        request(4, [9, 9], 4),
    ]
    texts = [letters(ids) for ids in generations.generated_alone(model, requests)]
    assert all(letters([poison]) not in text for text in texts)
    networks.poison(model, poison)

    outcomes = generations.run(generator_of(model, PROMPT_STREAM), requests, num_slots, tokens_per_batch=100)

    poisoned = [generation for generation in outcomes if generation.key.row == 1]
    assert [(generation.text, generation.is_finite) for generation in poisoned] == [('', False)] * 2
    others = [(request.key, text, True) for request, text in zip(requests, texts, strict=True) if request.key.row != 1]
    finite = [generation for generation in outcomes if generation.key.row != 1]
    assert [(generation.key, generation.text, generation.is_finite) for generation in finite] == others


@pytest.mark.parametrize(
    ('counts_masked', 'positions'),
    [
        (True, [0, 1, 2, 3]),  # MPT counts columns
        (False, [0, 0, 1, 2]),  # Bloom counts the tokens that are seen
    ],
)
def test_positions_of_biases_count_masked_tokens_as_the_model_does(counts_masked: bool, positions: list[int]):
    """A prompt of three tokens, the second masked, and a step."""
    cache = KVCache(1, longest_context=3, device=networks.CPU)
    cache.enter([3], torch.tensor([[True, False, True]]))

    prompt = CachedAttention(cache, 3, None, counts_masked=counts_masked)
    assert prompt.positions[0].tolist() == positions[:3]
    assert prompt.seen[0].int().tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 1]]  # a masked token does not see itself

    cache.step()
    step = CachedAttention(cache, 1, None, counts_masked=counts_masked)
    assert step.positions[0, :4].tolist() == positions
    assert step.seen[0, 0, :5].int().tolist() == [1, 0, 1, 1, 0]
