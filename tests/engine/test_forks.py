"""Contexts that run once in the model's own attention and cache, before copies of their states for each choice."""

from __future__ import annotations

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
from llmfoundry_gauntlet.engine.decoding import CACHE, NO_CACHE, GenerationDecoder
from llmfoundry_gauntlet.engine.forks import CachedRows, lay_out_forks, rows_after
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.kv_cache import KVCache
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import FORKED, PADDED_ROWS, plan
from llmfoundry_gauntlet.engine.probe import probe, probe_generation
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
    layout = lay_out_forks([first, second])
    assert layout.contexts.tolist() == [[1, 2, 3], [10, 10, 11]]
    assert layout.context_lengths.tolist() == [3, 2]
    assert layout.context_reads.tolist() == [2, 2, 2, 5]
    assert layout.rows.tolist() == [[5, 5], [7, 8], [12, 12]]
    assert layout.row_lengths.tolist() == [1, 2, 1]
    assert layout.context_of_row.tolist() == [0, 0, 1]
    assert layout.row_reads.tolist() == [0, 2, 3, 4]
    # Scored tokens in order: 4 | 5 6 | 7 8 9 | 12 13. Contexts read 4, 5, 7 and 12; rows the others.
    assert layout.targets.tolist() == [4, 5, 6, 7, 8, 9, 12, 13]
    assert layout.order.tolist() == [0, 1, 3, 6, 2, 4, 5, 7]


def test_rows_see_what_comes_before_them():
    contexts = rows_after(2, np.zeros((2, 3), np.int32), np.array([3, 1]), pads_left=True)
    assert contexts.mask.astype(int).tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]
    assert contexts.positions.tolist() == [[2, 3, 4], [2, 2, 2]]
    rows = contexts.continued(np.array([1, 0]), np.zeros((2, 2), np.int32), np.array([2, 1]))
    assert rows.mask.astype(int).tolist() == [[1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]
    assert rows.positions.tolist() == [[3, 4], [5, 6]]


@needs_states
@pytest.mark.parametrize(('num_after_prefix', 'forks_after_prefix'), [(3, False), (6, True)])
@pytest.mark.parametrize('name', HYBRIDS)
def test_contexts_run_once_before_their_choices(name: str, num_after_prefix: int, forks_after_prefix: bool):
    """Scores are those of padded rows, with fewer tokens; after a cached prefix few contexts are run as whole rows."""
    language_model = hybrid(name)
    assert layout_of(language_model) == FORKED
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix(num_after_prefix)]
    batches = plan(requests, tokens_per_batch=networks.PREFIX_BUDGET, layout=FORKED)
    rows = plan(requests, tokens_per_batch=networks.PREFIX_BUDGET, layout=PADDED_ROWS)
    assert {batch.forks for batch in batches if batch.prefix is not None} == {forks_after_prefix}
    assert {batch.forks for batch in batches if batch.prefix is None} == {True, False}
    assert sum(batch.num_tokens for batch in batches) < sum(batch.num_tokens for batch in rows)

    expected = networks.run(language_model, rows)
    found = networks.run(language_model, batches)
    for key, output in expected.items():
        for of_rows, of_forks in zip(output.logprobs, found[key].logprobs, strict=True):
            np.testing.assert_allclose(of_forks, of_rows, atol=1e-4)


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
    eager = {'LEAST_PREFIX': 3, 'LEAST_SAVED_BY_PREFIX': 0, 'LEAST_FORKED': 2, 'LEAST_SHARED_BY_FORK': 1}
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
            key=ItemKey('t', row), contexts=(ids(*range(20)),) * 3, continuations=(ids(1, 2), ids(3, 4), ids(5, 6))
        )
        for row in range(30)
    ]
    with patch.object(planning, 'MOST_ROWS', 12):
        batches = plan(requests, tokens_per_batch=4096, layout=FORKED)
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

    def shifted(requests: Any) -> Any:
        layout = lay_out(requests)
        layout.context_of_row[:] = np.roll(layout.context_of_row, 1)
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
    assert probe_generation(generator, **sizes).layout == CACHE
    states_of = KVCache.states_of
    monkeypatch.setattr(KVCache, 'states_of', lambda cache, slot: [0 * state for state in states_of(cache, slot)])
    assert probe_generation(generator, **sizes).layout == NO_CACHE
