"""Attention inside the trees of a stream, against bare forwards."""

from __future__ import annotations

import sys
import types

import networks
import numpy as np
import pytest
import torch
from networks import CPU, PREFIX_BUDGET, WINDOW, draw, request

from llmfoundry_gauntlet.engine import tree_attention as attending
from llmfoundry_gauntlet.engine.layout import Tree, count_prefixes, lay_out_stream
from llmfoundry_gauntlet.engine.plan import STREAM, Batch, make_batch, plan
from llmfoundry_gauntlet.engine.tree_attention import NAME, Span, attend, spans_of, tree_attention, tree_layout

WITH_WINDOWS = ['mistral, windows', 'qwen2, windows on some layers', 'gemma2, eager', 'gemma3', 'cohere2']


def tree_of(requests) -> Tree:
    return Tree(requests=tuple(requests), num_tokens=count_prefixes(requests))


def one_tree(requests) -> Batch:
    return make_batch([tree_of(requests)], STREAM, None)


@pytest.mark.parametrize('name', WITH_WINDOWS)
def test_windows_count_by_depth_in_the_tree(name: str):
    """Four branches of 12 tokens after a trunk of 5: the last one's first token stands 37 tokens behind the trunk.

    It sees all of it, in a window of 8. Mutation: the window by position in the stream.
    """
    rng = np.random.default_rng(0)
    trunk = draw(rng, 5)
    requests = [request(0, trunk, [draw(rng, 13) for _ in range(4)])]
    batch = one_tree(requests)
    stream = lay_out_stream(batch.trees)
    last_branch = np.flatnonzero(stream.depths == len(trunk))[-1]
    assert last_branch == 5 + 3 * 12 and stream.depths[last_branch] < WINDOW
    model = networks.network(name)
    networks.check_against_bare_forwards(model, requests, networks.run(networks.untaught(model), [batch]))


@pytest.mark.parametrize('name', WITH_WINDOWS)
def test_windows_reach_into_a_kept_prefix_and_no_further(name: str):
    """Mutation: depths after the prefix counted from 0, or all of the prefix seen whatever the window."""
    requests = networks.requests_after_a_prefix()
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET)
    assert all(batch.prefix is not None for batch in batches)
    model = networks.network(name)
    outputs = networks.run(networks.untaught(model), batches)
    networks.check_against_bare_forwards(model, requests, outputs)


@pytest.mark.parametrize(('block', 'queries'), [(1, 3), (512, 512), (40, 3)])
@pytest.mark.parametrize('name', ['llama', 'gemma2, eager'])
def test_trees_that_share_a_call_see_nothing_of_each_other(monkeypatch, name: str, block: int, queries: int):
    """As on a GPU, where small trees are run together; and few queries under one mask.

    Mutations: `ends` left out of the mask; the cut at `MAX_QUERIES` off by one.
    """
    monkeypatch.setitem(attending.BLOCK, 'cpu', block)
    monkeypatch.setattr(attending, 'MAX_QUERIES', queries)
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix()]
    model = networks.network(name)
    outputs = networks.run(networks.untaught(model), plan(requests, tokens_per_batch=PREFIX_BUDGET))
    networks.check_against_bare_forwards(model, requests, outputs)


def test_the_calls_of_a_stream_are_its_chains_and_the_rest_of_each_tree():
    """A trunk of 4 with branches of 3 and 2, a chain of 5, two single tokens."""
    trees = [
        tree_of([request(0, [1, 2, 3, 4], [[5, 6, 7, 0], [8, 9, 0]])]),
        tree_of([request(1, [9, 9, 9, 9, 9], [[1]])]),
        tree_of([request(2, [3], [[1]])]),
        tree_of([request(3, [4], [[1]])]),
    ]
    stream = lay_out_stream(trees)
    assert spans_of(stream, 1) == [
        Span(0, 0, 7, True),
        Span(0, 7, 9, False),
        Span(9, 9, 14, True),
        Span(14, 14, 15, True),
        Span(15, 15, 16, True),
    ]
    assert spans_of(stream, 2)[-1] == Span(14, 14, 16, False)
    assert spans_of(stream, 512) == [Span(0, 0, 16, False)]


def test_a_mask_shows_ancestors_alone():
    """Of the tree 1 2 (3 4) (5), by hand; with a window of 2, the parent and itself."""
    tree = tree_of([request(0, [1, 2], [[3, 4, 0], [5, 0]])])
    layout = tree_layout(lay_out_stream([tree]), CPU)
    layout.spans = [Span(0, 0, 5, False)]
    ancestors = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert layout.mask(0, None).int().tolist() == ancestors
    parents = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 1, 0, 0, 1]]
    assert layout.mask(0, 2).int().tolist() == parents


def test_a_configuration_is_left_as_it_was_after_an_error_too():
    """Mutation: no `finally`."""
    config = networks.network().config
    layout = tree_layout(lay_out_stream([tree_of([request(0, [1], [[2]])])]), CPU)
    before = config._attn_implementation
    for fails in (False, True):
        with pytest.raises(ZeroDivisionError) if fails else torch.no_grad(), tree_attention(config, layout):
            assert config._attn_implementation == NAME
            if fails:
                raise ZeroDivisionError
        assert config._attn_implementation == before


def test_attention_without_a_layout_is_an_error():
    """A configuration that was saved or copied inside a stream must not attend to nothing in silence."""
    query = torch.zeros(1, 1, 1, 4)
    with pytest.raises(RuntimeError, match='gauntlet_trees attention is called outside of a token stream'):
        attend(torch.nn.Module(), query, query, query, None)


def varlen_as_documented(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    """What flash-attn 2 says of `flash_attn_varlen_func`, one sequence at a time."""
    assert cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.equal(cu_seqlens_k) and causal
    output = torch.empty_like(q)
    for start, stop in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        assert stop - start <= max_seqlen_q == max_seqlen_k
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum('qhd,khd->hqk', q[start:stop], k[start:stop].repeat_interleave(groups, 1))
        hidden = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        weights = (scores * softmax_scale).masked_fill(hidden, float('-inf')).softmax(-1)
        values = v[start:stop].repeat_interleave(groups, 1)
        output[start:stop] = torch.einsum('hqk,khd->qhd', weights, values)
    return output


def test_chains_are_packed_as_flash_attn_wants_them(monkeypatch):
    """The kernel itself needs a GPU and was not run; this is its documented contract."""
    module = types.ModuleType('flash_attn')
    module.flash_attn_varlen_func = varlen_as_documented
    monkeypatch.setitem(sys.modules, 'flash_attn', module)
    monkeypatch.setattr(attending, 'can_pack', lambda query: True)
    model = networks.network()
    requests = networks.mixed_requests()
    outputs = networks.run(networks.untaught(model), plan(requests, tokens_per_batch=400))
    networks.check_against_bare_forwards(model, requests, outputs)


def test_neighbouring_small_trees_may_share_a_call(monkeypatch):
    """As they do on a GPU. Fails when a tree sees its neighbour."""
    monkeypatch.setitem(attending.BLOCK, 'cpu', 64)
    model = networks.network()
    requests = networks.mixed_requests()
    outputs = networks.run(networks.untaught(model), plan(requests, tokens_per_batch=400))
    networks.check_against_bare_forwards(model, requests, outputs)
