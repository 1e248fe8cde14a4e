"""Running a model: numbers, memory, and its state afterwards. Families are tested in tests/engine/test_probe.py."""

from __future__ import annotations

import logging

import networks
import numpy as np
import pytest
import torch
from memory_limits import limit_tokens, peak_bytes
from networks import CPU, PREFIX_BUDGET, draw, request
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import LlamaConfig, LlamaForCausalLM

from llmfoundry_gauntlet.engine.logits import unchanged
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import FORKED, LAYOUTS, PADDED_ROWS, STREAM, plan
from llmfoundry_gauntlet.engine.ranks import prefix_batch
from llmfoundry_gauntlet.engine.trees import lay_out_rows, lay_out_stream
from llmfoundry_gauntlet.errors import ModelError


def probed(model) -> CausalLanguageModel:
    """Return a model as the probe leaves it: its logits are those of its output layer."""
    language_model = CausalLanguageModel(model, device=CPU)
    language_model.tail = unchanged
    return language_model


def all_requests():
    return [*networks.mixed_requests(), *networks.requests_after_a_prefix()]


@pytest.mark.parametrize('layout', LAYOUTS)
def test_tokens_per_batch_changes_no_score(layout: str):
    """Batches of one item, of a few, and of all; a stream with and without a cached prefix.

    Mutations: `ends` left out of a mask; reads of padded rows counted with another width.
    """
    model, requests = networks.network(), all_requests()
    for tokens_per_batch in (50, PREFIX_BUDGET, 300, 5000):
        batches = plan(requests, tokens_per_batch=tokens_per_batch, layout=layout)
        outputs = networks.run(CausalLanguageModel(model, device=CPU), batches)
        networks.check_against_bare_forwards(model, requests, outputs)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_repeated_batches_are_bitwise_equal(layout: str):
    """Mutation: `new_empty` for the zeros of an attention mask, or dropout on weights."""
    language_model = CausalLanguageModel(networks.network(), device=CPU)
    batches = plan(all_requests(), tokens_per_batch=PREFIX_BUDGET, layout=layout)
    first, second = networks.run(language_model, batches), networks.run(language_model, batches)
    for key, output in first.items():
        for one, other in zip(output.logprobs, second[key].logprobs, strict=True):
            assert one.tobytes() == other.tobytes()


def test_a_cached_prefix_runs_once_per_evaluation():
    """Its keys and values belong to the weights that made them. Mutation: `forget` does nothing."""
    model, requests = networks.network(), networks.requests_after_a_prefix()
    language_model = CausalLanguageModel(model, device=CPU)
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET)
    lengths = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs['input_ids'].numel()), with_kwargs=True
    )
    networks.run(language_model, batches)
    assert lengths == [len(batches[0].prefix), *(batch.num_tokens for batch in batches)]
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    language_model.forget()
    networks.check_against_bare_forwards(model, requests, networks.run(language_model, batches))


def test_real_tokens_equal_to_padding_are_hidden_only_with_reference_semantics():
    """Fix 2: the reference hides real eos tokens if pad is eos."""
    model = networks.network()
    (batch,) = plan([request(0, [5, 7, 9], [[3]])], tokens_per_batch=100, layout=PADDED_ROWS)

    (seen,) = CausalLanguageModel(model, device=CPU).run(batch)
    (hidden,) = CausalLanguageModel(model, device=CPU, hidden_token_id=7).run(batch)

    networks.check_against_bare_forwards(model, batch.requests, {seen.key: seen})
    assert abs(seen.logprobs[0] - hidden.logprobs[0]).max() > 0.01


# Memory.


@pytest.mark.parametrize('vocabulary', [32_768, 131_072])
@pytest.mark.parametrize('layout', [STREAM, PADDED_ROWS])
def test_peak_memory_is_the_model_plus_a_chunk_of_logits(tmp_path, layout: str, vocabulary: int):
    """Within 10 %, for 4,096 tokens of which 1,088 are read, also with the vocabulary of Llama 3.

    Mutations: `reading` without chunks; an unknown tail, so that all logits are made.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    requests = [request(row, draw(rng, 48), [draw(rng, 17)]) for row in range(64)]
    (batch,) = plan(requests, tokens_per_batch=4096, layout=layout)
    assert batch.num_tokens == 4096
    tokens = lay_out_rows(requests).tokens if layout == PADDED_ROWS else lay_out_stream(batch.trees).tokens[None]
    with torch.no_grad():
        ids = torch.from_numpy(tokens).long()
        inputs = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'use_cache': False}  # no mask is made then
        bare = peak_bytes(lambda: model.model(**inputs), tmp_path / 'bare.json')
    language_model = probed(model)
    ours = peak_bytes(lambda: language_model.run(batch), tmp_path / 'ours.json')
    assert bare > 4096 * 512 * 4  # the inner width of a layer, at least
    assert ours <= 1.1 * bare + 512 * vocabulary * 4


@pytest.mark.parametrize('layout', LAYOUTS)
def test_batches_that_do_not_fit_are_halved(layout: str, caplog):
    """The model fails above 300 tokens in a forward; batches of 500 follow, in halves of at most 250, with one warning.

    Mutations: `most_tokens` not kept; a half's tokens counted without its rows.
    """
    rng = np.random.default_rng(0)
    requests = [request(row, draw(rng, 20), [draw(rng, 6) for _ in range(4)]) for row in range(37)]
    batches = plan(requests, tokens_per_batch=500, layout=layout)
    assert all(batch.num_tokens > 450 for batch in batches[:3])
    model = networks.network()
    expected = networks.run(CausalLanguageModel(model, device=CPU), batches)
    limit = 150 if layout == FORKED else 300  # forks run contexts and choices in two forwards
    sizes = limit_tokens(model, limit)
    language_model = CausalLanguageModel(model, device=CPU)
    with caplog.at_level(logging.WARNING):
        outputs = networks.run(language_model, batches)
    assert outputs.keys() == expected.keys()
    for key, output in outputs.items():
        np.testing.assert_allclose(np.concatenate(output.logprobs), np.concatenate(expected[key].logprobs), atol=1e-5)
    assert [size > limit for size in sizes] == [True] + [False] * (len(sizes) - 1)
    (message,) = caplog.messages
    assert f'out of memory with {batches[0].num_tokens} tokens' in message
    assert f'tokens_per_batch: {batches[0].num_tokens // 2} avoids it' in message


def test_a_cached_prefix_survives_halving():
    model, requests = networks.network(), networks.requests_after_a_prefix(12)
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET)
    assert max(batch.num_tokens for batch in batches) > 80 and batches[0].prefix is not None
    expected = networks.run(CausalLanguageModel(model, device=CPU), batches)
    limit_tokens(model, 80)
    outputs = networks.run(CausalLanguageModel(model, device=CPU), batches)
    np.testing.assert_allclose(networks.sums_of(outputs, requests), networks.sums_of(expected, requests), atol=1e-5)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_an_item_or_prefix_that_does_not_fit_is_an_error(layout: str):
    """Mutation: halve forever."""
    model = networks.network()
    limit_tokens(model, 30)
    items = [request(0, [5] * 10, [[3]]), request(1, [6] * 50, [[3]])]
    batches = plan(items, tokens_per_batch=100, layout=layout)
    with pytest.raises(ModelError, match=r'row=1.*50 tokens do not fit into the memory of the device: 50 tokens'):
        networks.run(CausalLanguageModel(model, device=CPU), batches)
    if layout == STREAM:
        (batch, *_) = plan(networks.requests_after_a_prefix(), tokens_per_batch=PREFIX_BUDGET)
        with pytest.raises(ModelError, match='a cached prefix: 70 tokens do not fit into the memory of the device'):
            CausalLanguageModel(model, device=CPU).run(prefix_batch(batch))


# Wrapped models.


def test_a_compiled_model_scores_uncompiled():
    """Every batch has another shape. Mutation: ignore `_orig_mod`, or keep `lm_head.forward`."""
    model, requests = networks.network(), all_requests()
    with networks.compiled_for_training(model) as compiled:
        batches = plan(requests, tokens_per_batch=PREFIX_BUDGET)
        outputs = networks.run(CausalLanguageModel(compiled, device=CPU), batches)
    networks.check_against_bare_forwards(model, requests, outputs)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_a_model_with_activation_checkpointing_gives_the_same_numbers(layout: str):
    """Layers are wrapped as Composer does."""
    model, requests = networks.network(), all_requests()
    expected = networks.sums_alone(model, requests)
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.model.layers))
    assert '_checkpoint_wrapped_module' in dict(model.model.layers[0].named_children())
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=layout)
    outputs = networks.run(CausalLanguageModel(model, device=CPU), batches)
    np.testing.assert_allclose(networks.sums_of(outputs, requests), expected, rtol=0, atol=1e-5)
