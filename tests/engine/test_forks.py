"""Contexts that run once in the model's own attention and cache, before copies of their states for each choice."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import every_family
import networks
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfoundry_gauntlet.engine import forks, model
from llmfoundry_gauntlet.engine import plan as planning
from llmfoundry_gauntlet.engine.continuous import ContinuousBatch
from llmfoundry_gauntlet.engine.decoding import CACHE, FORKED_PROMPTS, NO_CACHE, GenerationDecoder
from llmfoundry_gauntlet.engine.forks import CachedRows, lay_out_forks, rows_after
from llmfoundry_gauntlet.engine.generate import PromptGroup, TextGenerator, share_prefixes
from llmfoundry_gauntlet.engine.kv_cache import KVCache
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import FORKED, PADDED_ROWS, RowStates, padded_lengths, plan
from llmfoundry_gauntlet.engine.probe import probe, probe_generation
from llmfoundry_gauntlet.engine.trees import Tree
from llmfoundry_gauntlet.types import GenerateRequest, ItemKey, Sampling, ScoreRequest

# Of each kind of state one type: Mamba 2 beside attention, the gated delta rule, convolutions.
HYBRIDS = ('falcon_h1', 'qwen3_5_text', 'lfm2')
needs_states = pytest.mark.skipif(
    not networks.IS_TRANSFORMERS_5, reason='below transformers 5 caches of hybrids cannot be copied'
)


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def hybrid(name: str) -> CausalLanguageModel:
    return CausalLanguageModel(every_family.build(name), device=torch.device('cpu'))


def layout_of(language_model: CausalLanguageModel) -> str:
    return probe(language_model, vocabulary=every_family.VOCABULARY, longest=every_family.LONGEST).layout


def test_forks_are_laid_out_as_by_hand():
    first = ScoreRequest(
        key=ItemKey('t', 0), contexts=(ids(1, 2, 3),) * 3, continuations=(ids(4), ids(5, 6), ids(7, 8, 9))
    )
    second = ScoreRequest(key=ItemKey('t', 1), contexts=(ids(10, 11),), continuations=(ids(12, 13),))
    layout = lay_out_forks(
        [Tree(requests=(first,), num_tokens=0, fork=3), Tree(requests=(second,), num_tokens=0, fork=2)]
    )
    assert layout.contexts.tolist() == [[1, 2, 3], [10, 10, 11]]
    assert layout.context_lengths.tolist() == [3, 2]
    assert layout.context_reads.tolist() == [2, 2, 2, 5]
    (group,) = layout.groups
    assert group.rows.tolist() == [[5, 5], [7, 8], [12, 12]]
    assert group.lengths.tolist() == [1, 2, 1]
    assert group.context_of_row.tolist() == [0, 0, 1]
    assert group.reads.tolist() == [0, 2, 3, 4]
    # Scored tokens in order: 4 | 5 6 | 7 8 9 | 12 13. Contexts read 4, 5, 7 and 12; rows the others.
    assert layout.targets.tolist() == [4, 5, 6, 7, 8, 9, 12, 13]
    assert layout.order.tolist() == [0, 1, 3, 6, 2, 4, 5, 7]


def test_rows_of_similar_length_run_together_where_that_saves_more_than_a_forward():
    assert padded_lengths([]) == []
    assert padded_lengths([20, 3, 18, 2]) == [20, 20, 20, 20]
    assert padded_lengths([3, 100, 90, 2]) == [3, 100, 100, 3]
    assert padded_lengths([200, 100, 10]) == [200, 100, 10]


@needs_states
@pytest.mark.parametrize('name', HYBRIDS)
def test_rows_in_several_forwards_have_the_scores_of_padded_rows(name: str):
    rng = np.random.default_rng(2)
    requests = [
        ScoreRequest(
            key=ItemKey('t', row),
            contexts=(ids(*rng.integers(3, 20, 20 + row)),) * 4,
            continuations=tuple(ids(*rng.integers(3, 20, length)) for length in (1, 3, 40 + row, 80)),
        )
        for row in range(4)
    ]
    language_model = hybrid_once(name)
    (batch,) = plan(requests, tokens_per_batch=2048, layout=FORKED)
    layout = lay_out_forks(batch.trees)
    assert [group.rows.shape for group in layout.groups] == [(4, 2), (4, 42), (4, 79)]
    assert batch.num_tokens == 4 * 23 + 4 * (2 + 42 + 79)
    rows = plan(requests, tokens_per_batch=2048, layout=PADDED_ROWS)
    expected = networks.sums_of(networks.run(language_model, rows), requests)
    found = networks.sums_of(networks.run(language_model, [batch]), requests)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_rows_see_what_comes_before_them():
    contexts = rows_after(2, np.zeros((2, 3), np.int32), np.array([3, 1]), pads_left=True)
    assert contexts.mask.astype(int).tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]
    assert contexts.positions.tolist() == [[2, 3, 4], [2, 2, 2]]
    rows = contexts.continued(np.array([1, 0]), np.zeros((2, 2), np.int32), np.array([2, 1]))
    assert rows.mask.astype(int).tolist() == [[1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]
    # No position is beyond a row: rotary frequencies may depend on the largest.
    assert rows.positions.tolist() == [[3, 4], [5, 5]]


@needs_states
@pytest.mark.parametrize('name', HYBRIDS)
def test_contexts_run_once_before_their_choices(name: str):
    """Scores are those of padded rows, with fewer tokens, also after a cached prefix."""
    language_model = hybrid(name)
    assert layout_of(language_model) == FORKED
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix(6)]
    batches = plan(requests, tokens_per_batch=networks.PREFIX_BUDGET, layout=FORKED)
    rows = plan(requests, tokens_per_batch=networks.PREFIX_BUDGET, layout=PADDED_ROWS)
    assert {batch.forks for batch in batches if batch.prefix is not None} == {True}
    assert {batch.forks for batch in batches if batch.prefix is None} == {True, False}
    assert sum(batch.num_tokens for batch in batches) < sum(batch.num_tokens for batch in rows)

    expected = networks.run(language_model, rows)
    found = networks.run(language_model, batches)
    for key, output in expected.items():
        for of_rows, of_forks in zip(output.logprobs, found[key].logprobs, strict=True):
            np.testing.assert_allclose(of_forks, of_rows, atol=1e-4)


def variants(row: int, question: list[int], rng: np.random.Generator, count: int = 5) -> list[ScoreRequest]:
    """Return variants of a question that differ in their last tokens, as under another order of the options."""
    prompts = [ids(*question, *rng.permutation(12) + 3) for _ in range(count)]
    letters = (ids(1), ids(2))
    return [
        ScoreRequest(key=ItemKey('t', row, variant=str(number)), contexts=(prompt,) * 2, continuations=letters)
        for number, prompt in enumerate(prompts)
    ]


def test_requests_fork_after_the_prefix_that_saves_most():
    """Variants after their question, and not all after the instruction, which the first request begins with."""
    rng = np.random.default_rng(0)
    instruction = [5] * 10
    alone = ScoreRequest(key=ItemKey('t', 9), contexts=(ids(*instruction, *[2] * 30),), continuations=(ids(3),))
    questions = [[*instruction, *[number] * 60] for number in (3, 4)]
    requests = [alone, *variants(0, questions[0], rng), *variants(1, questions[1], rng)]
    (forked, whole) = plan(requests, tokens_per_batch=512, layout=FORKED)
    assert [tree.fork for tree in forked.trees] == [70, 70]
    assert [len(tree.requests) for tree in forked.trees] == [5, 5]
    assert forked.num_tokens == 2 * 70 + 10 * 12
    assert [tree.fork for tree in whole.trees] == [0]
    assert whole.num_tokens == 40


def test_a_group_that_forks_is_no_larger_than_a_batch():
    rng = np.random.default_rng(0)
    requests = variants(0, [3] * 60, rng, count=20)
    batches = plan(requests, tokens_per_batch=150, layout=FORKED)
    assert len(batches) > 1
    assert all(batch.num_tokens <= 150 for batch in batches)
    # Nor than what the states of its rows take, which is that of 100 tokens each.
    batches = plan(requests, tokens_per_batch=1000, layout=FORKED, row_states=RowStates(per_token=0, per_row=100))
    assert [len(batch.requests) for batch in batches] == [10, 10]


def test_one_request_with_other_shots_does_not_take_the_prefix_from_the_rest():
    """As the question that is among the fixed shots and has a spare one instead."""
    rng = np.random.default_rng(0)
    shots = rng.integers(3, 20, 200)
    others = [*shots[:80], *rng.integers(3, 20, 120)]
    prompts = [ids(*shots, *rng.integers(3, 20, 30)) for _ in range(20)] + [ids(*others, *rng.integers(3, 20, 30))]
    requests = [
        ScoreRequest(key=ItemKey('t', row), contexts=(prompt,), continuations=(ids(1),))
        for row, prompt in enumerate(prompts)
    ]
    batches = plan(requests, tokens_per_batch=512, layout=FORKED)
    prefixes = {len(batch.prefix) for batch in batches if batch.prefix is not None}
    assert prefixes == {200}
    num_after = sum(batch.num_tokens for batch in batches)
    assert num_after == 20 * 30 + 230


def test_families_are_those_that_save_most():
    """Two subjects of an exam, which begin with the same instruction, have a prefix each."""
    rng = np.random.default_rng(0)
    instruction = rng.integers(3, 20, 70)
    subjects = [[*instruction, *rng.integers(3, 20, 130)] for _ in range(2)]
    prompts = sorted([*subject, *rng.integers(3, 20, 20)] for subject in subjects for _ in range(12))
    ordered = planning.sort_requests(
        [
            ScoreRequest(key=ItemKey('t', row), contexts=(ids(*prompt),), continuations=(ids(1),))
            for row, prompt in enumerate(prompts)
        ]
    )
    families = planning.prefix_families(ordered, tokens_per_batch=512)
    assert [(family.begin, family.end, family.prefix) for family in families] == [(0, 12, 200), (12, 24, 200)]
    # Of two questions each, the instruction of all saves more than nothing.
    few = [ordered[0], ordered[1], ordered[12], ordered[13]]
    families = planning.prefix_families(few, tokens_per_batch=512)
    assert [(family.begin, family.end, family.prefix) for family in families] == [(0, 4, 70)]


def test_choices_with_contexts_of_their_own_fork_where_these_part():
    """Such as the two readings of a pronoun."""
    sentence = [3] * 30
    request = ScoreRequest(
        key=ItemKey('t', 0),
        contexts=(ids(*sentence, 4, 5), ids(*sentence, 6)),
        continuations=(ids(7, 8, 9), ids(7, 8, 9)),
    )
    (batch,) = plan([request], tokens_per_batch=512, layout=FORKED)
    assert [tree.fork for tree in batch.trees] == [30]
    assert batch.num_tokens == 30 + 2 * 4
    layout = lay_out_forks(batch.trees)
    assert layout.context_reads.tolist() == []
    (group,) = layout.groups
    assert group.rows.tolist() == [[4, 5, 7, 8], [6, 7, 8, 8]]
    assert group.reads.tolist() == [1, 2, 3, 4, 5, 6]
    assert layout.order.tolist() == [0, 1, 2, 3, 4, 5]


def test_contexts_after_a_prefix_are_cut_to_one_length():
    """Padding between the prefix and a context would count; what is cut is part of each row."""
    prefix = [3] * 70
    lengths = (12, 11, 10, 9)
    requests = [
        ScoreRequest(
            key=ItemKey('t', length),
            contexts=(ids(*prefix, *[length] * length),) * 3,
            continuations=(ids(1, 2), ids(2, 1), ids(1)),
        )
        for length in lengths
    ]
    with patch.object(planning, 'MOST_PADDED', 2):
        (batch,) = plan(requests, tokens_per_batch=160, layout=FORKED)
    assert batch.prefix is not None
    assert batch.prefix.tolist() == prefix
    assert {tree.fork for tree in batch.trees} == {9}
    # The choice of a single token is read from the end of its context, which is a row where it was cut.
    layout = lay_out_forks(batch.trees, len(prefix))
    assert layout.contexts.shape == (4, 9)
    (group,) = layout.groups
    assert sorted(group.lengths.tolist()) == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]
    assert batch.num_tokens == 4 * 9 + 11 * 4


@needs_states
@pytest.mark.parametrize('name', HYBRIDS)
def test_forks_of_every_kind_have_the_scores_of_padded_rows(name: str):
    """Variants of questions, choices with contexts of their own, and contexts of unequal length after a prefix."""
    rng = np.random.default_rng(1)
    instruction = rng.integers(3, 20, 70).tolist()
    requests = networks.mixed_requests()
    for row in range(20, 24):
        question = [*instruction, *rng.integers(3, 20, 8 + row % 3)]
        requests += variants(row, question, rng)
        choices = tuple(ids(*rng.integers(3, 20, 3)) for _ in range(3))
        requests.append(ScoreRequest(key=ItemKey('t', row + 10), contexts=(ids(*question),) * 3, continuations=choices))
    language_model = hybrid_once(name)
    batches = plan(requests, tokens_per_batch=256, layout=FORKED)
    forks_after_prefix = {tree.fork for batch in batches if batch.prefix is not None for tree in batch.trees}
    assert len(forks_after_prefix - {0}) > 0
    expected = networks.sums_of(
        networks.run(language_model, plan(requests, tokens_per_batch=256, layout=PADDED_ROWS)), requests
    )
    found = networks.sums_of(networks.run(language_model, batches), requests)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@needs_states
def test_the_probe_measures_what_a_row_leaves_in_the_cache():
    language_model = hybrid_once('falcon_h1')
    config = language_model.model.config
    num_layers, bytes_of_number = config.num_hidden_layers, 4
    head_width = config.hidden_size // config.num_attention_heads
    keys_and_values = 2 * config.num_key_value_heads * head_width
    scan = config.mamba_n_heads * config.mamba_d_head * config.mamba_d_state
    channels = config.mamba_d_ssm + 2 * config.mamba_n_groups * config.mamba_d_state
    convolution = channels * config.mamba_d_conv
    activations = model.activation_bytes(config)
    states = language_model.row_states
    assert states.per_token * activations == pytest.approx(num_layers * bytes_of_number * keys_and_values)
    assert states.per_row * activations == pytest.approx(num_layers * bytes_of_number * (scan + convolution))


# Of two tokens, so that many share prefixes, and contexts are prefixes of others.
texts = st.lists(st.sampled_from([3, 4]), min_size=1, max_size=30)
choices = st.lists(st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=4), min_size=1, max_size=3)


@needs_states
@pytest.mark.parametrize('name', HYBRIDS)
@given(parts=st.lists(st.tuples(texts, choices), min_size=1, max_size=8), tokens_per_batch=st.integers(30, 200))
@settings(max_examples=12, derandomize=True)
def test_any_requests_have_the_scores_of_padded_rows(name: str, parts: Any, tokens_per_batch: int):
    requests = [
        ScoreRequest(
            key=ItemKey('t', row),
            contexts=(ids(*context),) * len(continuations),
            continuations=tuple(ids(*continuation) for continuation in continuations),
        )
        for row, (context, continuations) in enumerate(parts)
    ]
    eager = {'LEAST_PREFIX': 3, 'LEAST_SAVED_BY_PREFIX': 0, 'LEAST_AFTER_PREFIX': 0, 'COPY_TOKENS': 0}
    with patch.multiple(planning, **eager):
        batches = plan(requests, tokens_per_batch=tokens_per_batch, layout=FORKED)
    rows = plan(requests, tokens_per_batch=tokens_per_batch, layout=PADDED_ROWS)
    language_model = hybrid_once(name)
    expected = networks.sums_of(networks.run(language_model, rows), requests)
    found = networks.sums_of(networks.run(language_model, batches), requests)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@cache
def hybrid_once(name: str) -> CausalLanguageModel:
    """Return a probed hybrid, the same for all examples."""
    language_model = hybrid(name)
    assert layout_of(language_model) == FORKED
    return language_model


def test_a_batch_copies_states_for_a_limited_number_of_rows():
    """They take memory however short the rows are. Mutation: limit the tokens alone."""
    requests = [
        ScoreRequest(
            key=ItemKey('t', row),
            contexts=(ids(*range(row, row + 20)),) * 3,
            continuations=(ids(1, 2), ids(3, 4), ids(5, 6)),
        )
        for row in range(30)
    ]
    states = RowStates(per_token=0, per_row=4096 / 12)
    batches = plan(requests, tokens_per_batch=4096, layout=FORKED, row_states=states)
    assert [len(batch.requests) for batch in batches] == [4] * 7 + [2]


def see_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let contexts see their padding."""

    def seen(*arguments: Any, **options: Any) -> CachedRows:
        rows = rows_after(*arguments, **options)
        return CachedRows(tokens=rows.tokens, mask=np.ones_like(rows.mask), positions=rows.positions)

    monkeypatch.setattr(model, 'rows_after', seen)


def copy_another_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continue the states of another context."""
    lay_out = forks.lay_out_forks

    def shifted(*arguments: Any) -> Any:
        layout = lay_out(*arguments)
        for group in layout.groups:
            group.context_of_row[:] = np.roll(group.context_of_row, 1)
        return layout

    monkeypatch.setattr(model, 'lay_out_forks', shifted)


def share_a_prefix_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the cache of a prefix itself, which each batch then leaves longer."""

    def same(cache: Any, num_rows: int) -> Any:
        cache.reorder_cache(torch.zeros(num_rows, dtype=torch.long))
        return cache

    monkeypatch.setattr(model, 'copied', same)


@needs_states
@pytest.mark.parametrize('fault', [see_padding, copy_another_context, share_a_prefix_that_changes])
@pytest.mark.parametrize('name', HYBRIDS)
def test_the_probe_refuses_wrong_forks(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    assert layout_of(hybrid(name)) == PADDED_ROWS


@needs_states
@pytest.mark.parametrize('name', HYBRIDS)
def test_generations_of_one_prompt_begin_with_its_states(name: str):
    """Also those that get a slot later, when the states of the slot have moved on."""
    language_model = hybrid(name)
    decoder = GenerationDecoder(every_family.Letters())
    prompts = [ids(3, 1, 4, 1, 5, 9), ids(2, 7)]
    requests = [
        GenerateRequest(
            key=ItemKey('t', row, sample=sample),
            context=prompt,
            max_new_tokens=4 + sample % 3,
            sampling=Sampling(temperature=1.0, seed=sample),
        )
        for row, prompt in enumerate(prompts)
        for sample in range(5)
    ]
    batch = ContinuousBatch(requests=tuple(requests), num_slots=3, tokens_per_batch=64)
    texts = {}
    for layout in (CACHE, NO_CACHE):
        generations = TextGenerator(language_model, decoder, layout).run(batch)
        texts[layout] = [generation.text for generation in generations]
    assert texts[CACHE] == texts[NO_CACHE]
    assert len(set(texts[CACHE])) > 5


@needs_states
@pytest.mark.parametrize('name', HYBRIDS)
def test_the_probe_refuses_states_of_another_slot(name: str, monkeypatch: pytest.MonkeyPatch):
    language_model = hybrid(name)
    generator = TextGenerator(language_model, GenerationDecoder(every_family.Letters()))
    sizes = {'vocabulary': every_family.VOCABULARY, 'longest': every_family.LONGEST}
    assert probe_generation(generator, **sizes).layout == FORKED_PROMPTS
    states_of = KVCache.states_of
    monkeypatch.setattr(KVCache, 'states_of', lambda cache, slot: [0 * state for state in states_of(cache, slot)])
    assert probe_generation(generator, **sizes).layout == NO_CACHE


@needs_states
@pytest.mark.parametrize('name', HYBRIDS)
def test_prompts_run_what_they_share_once(name: str):
    """Prompts of several lengths after one prefix, more than enter at a time, beside others."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 20, 90)
    prompts = [ids(*shared, *rng.integers(3, 20, 4 + row % 3)) for row in range(9)]
    prompts.append(ids(*rng.integers(3, 20, 20)))
    prompts.sort(key=lambda prompt: prompt.tolist())
    requests = [
        GenerateRequest(key=ItemKey('t', row), context=prompt, max_new_tokens=3 + row % 4)
        for row, prompt in enumerate(prompts)
    ]
    batch = ContinuousBatch(requests=tuple(requests), num_slots=4, tokens_per_batch=2048)
    texts, num_tokens = {}, {}
    for layout in (FORKED_PROMPTS, CACHE, NO_CACHE):
        generator = TextGenerator(hybrid_once(name), GenerationDecoder(every_family.Letters()), layout)
        with patch.object(generator, 'forward_tokens', 16):
            texts[layout] = [generation.text for generation in generator.run(batch)]
        num_tokens[layout] = generator.usage.prompt_tokens
    assert texts[FORKED_PROMPTS] == texts[CACHE] == texts[NO_CACHE]
    # The prefix once for all prompts: it is kept while they enter.
    num_rests = sum(map(len, prompts)) - 9 * len(shared)
    assert num_tokens[FORKED_PROMPTS] == len(shared) + num_rests
    assert num_tokens[CACHE] == sum(map(len, prompts))


def test_prompts_share_nothing_where_the_forwards_of_their_lengths_cost_more():
    shared = [3] * 90
    alike = [PromptGroup(context=ids(*shared, 4, number), waiting=deque()) for number in range(5)]
    uneven = [PromptGroup(context=ids(*shared, *[5] * number), waiting=deque()) for number in range(1, 6)]
    share_prefixes(alike, forward_tokens=128)
    share_prefixes(uneven, forward_tokens=128)
    assert {prompt.shared for prompt in alike} == {91}
    assert {prompt.shared for prompt in uneven} == {0}


def forget_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the rest of a prompt with states of zero."""
    keep = KVCache.keep_prompt

    def emptied(cache: KVCache, tokens: Any) -> Any:
        kept = keep(cache, tokens)
        return replace(kept, states=[0 * state for state in kept.states])

    monkeypatch.setattr(KVCache, 'keep_prompt', emptied)


def shift_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the rest of a prompt without its first token."""
    run_after = TextGenerator.run_after

    def shifted(generator: TextGenerator, kept: Any, rests: Any, cache: KVCache) -> torch.Tensor:
        return run_after(generator, kept, [np.roll(rest, 1) for rest in rests], cache)

    monkeypatch.setattr(TextGenerator, 'run_after', shifted)


@needs_states
@pytest.mark.parametrize('fault', [forget_what_was_kept, shift_rests])
@pytest.mark.parametrize('name', HYBRIDS)
def test_the_probe_refuses_wrong_forks_of_prompts(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    generator = TextGenerator(hybrid(name), GenerationDecoder(every_family.Letters()))
    sizes = {'vocabulary': every_family.VOCABULARY, 'longest': every_family.LONGEST}
    assert probe_generation(generator, **sizes).layout == CACHE
