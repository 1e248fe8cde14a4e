"""Attention inside the trees of a stream, compared with bare forwards."""

from __future__ import annotations

import networks
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import CPU, PREFIX_BUDGET, draw, request

from llmfoundry_gauntlet.engine import tree_attention as attending
from llmfoundry_gauntlet.engine.attention import AttentionRule, attend_by_name
from llmfoundry_gauntlet.engine.kv_cache import CachedAttention, KVCache
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import plan
from llmfoundry_gauntlet.engine.tree_attention import TreeLayout, packed_calls, spans_of
from llmfoundry_gauntlet.engine.trees import Stream, Tree, count_prefixes, lay_out_stream


def tree_of(requests) -> Tree:
    return Tree(requests=tuple(requests), num_tokens=count_prefixes(requests))


@pytest.mark.parametrize(
    ('block', 'queries', 'call'), [(1, 3, 0), (1, 512, 0), (512, 512, 6000), (64, 512, 6000), (40, 3, 50)]
)
@pytest.mark.parametrize('name', ['llama', 'gemma2', 'mistral, windows', *networks.WITH_MORE_RULES])
def test_attention_sees_only_ancestors(monkeypatch, name: str, block: int, queries: int, call: int):
    """Small trees in one call, as on a GPU; trees in many calls; few queries per mask.

    Also with windows and chunks, which count by depth in the tree and reach into a cached prefix; with sinks, values of
    another width than the queries', and queries scaled by position.

    Mutations: a tree that sees its neighbour; `ends` left out of the mask; keys without those of the path; windows by
    position in the stream, or with depths after the prefix counted from 0.
    """
    monkeypatch.setitem(attending.BLOCK, 'cpu', block)
    monkeypatch.setitem(attending.CALL, 'cpu', call)
    monkeypatch.setattr(attending, 'MAX_QUERIES', queries)
    monkeypatch.setattr(attending, 'PIECE', 2)
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix()]
    model = networks.network(name)
    outputs = networks.run(CausalLanguageModel(model, device=CPU), plan(requests, tokens_per_batch=PREFIX_BUDGET))
    networks.check_against_bare_forwards(model, requests, outputs)


# Of two tokens, so that many share prefixes, which end before, at and after the ends of windows and chunks.
prefixes = st.lists(st.sampled_from([3, 4]), min_size=1, max_size=3 * networks.WINDOW)
choices = st.lists(st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize('name', networks.WITH_MORE_RULES)
@given(parts=st.lists(st.tuples(prefixes, choices), min_size=1, max_size=6), tokens_per_batch=st.integers(30, 200))
@settings(max_examples=12, derandomize=True)
def test_any_trees_have_the_scores_of_bare_forwards(
    name: str, parts: list[tuple[list[int], list[list[int]]]], tokens_per_batch: int
):
    """Mutations: a window one token longer; chunks that begin one token later; no sink; values padded on the left."""
    model = networks.network(name)
    requests = [request(row, context, continuations) for row, (context, continuations) in enumerate(parts)]

    outputs = networks.run(CausalLanguageModel(model, device=CPU), plan(requests, tokens_per_batch=tokens_per_batch))

    expected = networks.sums_alone(model, requests)
    np.testing.assert_allclose(networks.sums_of(outputs, requests), expected, rtol=0, atol=1e-4)


def four_trees() -> Stream:
    """Return a context of 4 with branches of 3 and 2, a chain of 5, and two single tokens."""
    return lay_out_stream(
        [
            tree_of([request(0, [1, 2, 3, 4], [[5, 6, 7, 0], [8, 9, 0]])]),
            tree_of([request(1, [9, 9, 9, 9, 9], [[1]])]),
            tree_of([request(2, [3], [[1]])]),
            tree_of([request(3, [4], [[1]])]),
        ]
    )


def test_a_tree_is_laid_out_depth_first_with_its_longest_branch_first():
    """So that the chain, which needs no mask, is long."""
    stream = lay_out_stream([tree_of([request(0, [7, 8], [[1, 5], [9, 4, 3, 6]])])])
    assert stream.tokens.tolist() == [7, 8, 9, 4, 3, 1]
    assert stream.reads.tolist() == [1, 5, 1, 2, 3, 4]


def packed(stream: Stream) -> list[list[tuple[list[int], list[int]]]]:
    """Return the queries and keys of each sequence in each call of the variable-length kernel."""
    calls = []
    for call in packed_calls(stream, CPU):
        keys_of_call = torch.arange(len(stream.tokens)) if call.keys is None else call.keys
        queries = torch.arange(call.start, call.stop).split(call.bounds.diff().tolist())
        keys = keys_of_call.split(call.key_bounds.diff().tolist())
        assert call.longest == max(map(len, queries))
        assert call.longest_key == max(map(len, keys))
        calls.append(
            [(of_path.tolist(), keys_of_path.tolist()) for of_path, keys_of_path in zip(queries, keys, strict=True)]
        )
    return calls


def numbers(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


# The paths of `four_trees`, as their queries and keys.
FIRST_PATH = (numbers(0, 7), numbers(0, 7))
ITS_BRANCH = ([7, 8], [0, 1, 2, 3, 7, 8])  # after the four tokens of the context
CHAINS = [
    (numbers(9, 14), numbers(9, 14)),
    ([14], [14]),
    ([15], [15]),
]


def test_paths_are_packed_with_their_ancestors():
    assert packed(four_trees()) == [[FIRST_PATH, ITS_BRANCH, *CHAINS]]


def test_a_packed_call_has_at_most_max_keys_keys(monkeypatch):
    monkeypatch.setattr(attending, 'MAX_KEYS', 13)  # the 7 and 6 keys of the first two paths

    assert packed(four_trees()) == [[FIRST_PATH, ITS_BRANCH], CHAINS]


def test_the_keys_of_packed_paths_begin_with_a_cached_prefix(monkeypatch):
    """Here the first two tokens of the context; keys are numbered from them on, and two trees share them."""
    monkeypatch.setattr(attending, 'MAX_KEYS', 26)
    tree = tree_of([request(0, [1, 2, 3, 4], [[5, 6, 7, 0], [8, 9, 0]])])

    stream = lay_out_stream([tree, tree], num_cached=2)

    assert packed(stream) == [
        [
            (numbers(0, 5), numbers(0, 7)),
            ([5, 6], [0, 1, 2, 3, 7, 8]),
            (numbers(7, 12), [0, 1, *numbers(9, 14)]),
            ([12, 13], [0, 1, 9, 10, 14, 15]),
        ]
    ]


def test_packed_paths_end_with_their_chunk_and_have_its_keys_alone():
    """Chunks of three positions. Mutations: keys of earlier chunks; a path over two chunks."""
    (call,) = packed_calls(four_trees(), CPU, chunk=3)

    queries = torch.arange(16).split(call.bounds.diff().tolist())
    keys = torch.arange(16) if call.keys is None else call.keys
    pairs = [
        (of_path.tolist(), keys_of_path.tolist())
        for of_path, keys_of_path in zip(queries, keys.split(call.key_bounds.diff().tolist()), strict=True)
    ]
    assert pairs == [
        # The first path has positions 0 to 6, its branch 4 and 5, after position 3 of the context.
        ([0, 1, 2], [0, 1, 2]),
        ([3, 4, 5], [3, 4, 5]),
        ([6], [6]),
        ([7, 8], [3, 7, 8]),
        ([9, 10, 11], [9, 10, 11]),
        ([12, 13], [12, 13]),
        ([14], [14]),
        ([15], [15]),
    ]


def test_a_chunk_that_begins_after_a_cached_prefix_has_none_of_its_keys():
    """Keys are numbered from the prefix on, which is a chunk of its own. Mutation: take all keys in their order."""
    tree = tree_of([request(0, [1, 2, 3], [[4, 0]])])

    (call,) = packed_calls(lay_out_stream([tree], num_cached=2), CPU, chunk=2)

    assert call.keys is not None
    assert call.keys.tolist() == [2, 3]


# One query of two heads, with scores ln 1, ln 2 and ln 5 for three keys whose values are 1, 2 and 3.
SCORES = np.log([1.0, 2.0, 5.0])
# Sinks of weight 8, as much as all keys together, and of weight 0.
SINKS = torch.tensor([np.log(8.0), -np.inf])
MEANS = [(1 + 4 + 15) / 16, (1 + 4 + 15) / 8]


def one_query_after_two_tokens(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value [1, 2, 3, 8] of a chain of three tokens, of which the last has the scores above."""
    query, key, value = torch.zeros(3, 1, 2, 3, 8, dtype=dtype)
    query[..., 0] = 1
    key[..., 0] = torch.from_numpy(SCORES)
    value[..., 0] = torch.tensor([1.0, 2.0, 3.0])
    return query, key, value


@pytest.mark.parametrize('num_cached', [0, 2])
@pytest.mark.parametrize('cap', [None, 1e6])  # far above the scores: the path of caps without an effect of theirs
def test_a_sink_takes_its_share_of_the_weights(cap: float | None, num_cached: int):
    """Under the causal mask of a chain, and under a mask of its own after a cached prefix.

    Mutations: the sign of the sink; a sink for another head; no sink.
    """
    query, key, value = one_query_after_two_tokens()
    tree = tree_of([request(0, [1, 2, 3], [[4]])])
    prefix = {0: (key[:, :, :num_cached], value[:, :, :num_cached])}
    layout = TreeLayout(lay_out_stream([tree], num_cached), CPU, prefix)

    new = slice(num_cached, None)
    rule = AttentionRule(scaling=1.0, sinks=SINKS, softcap=cap)
    output = layout.attend(query[:, :, new], key[:, :, new], value[:, :, new], rule)

    np.testing.assert_allclose(output[0, -1, :, 0], MEANS, rtol=1e-5)


def test_a_sink_takes_its_share_of_the_weights_of_a_decoding_step():
    """Mutation: no sink in the cache."""
    query, key, value = one_query_after_two_tokens()
    cache = KVCache(1, longest_context=2, device=CPU)
    cache.enter([2], torch.ones(1, 2, dtype=torch.bool))
    cache.take_stream({0: (key[:, :, :2], value[:, :, :2])}, torch.tensor([[0, 1]]))
    cache.step()

    attention = CachedAttention(cache, 1, None, counts_masked=False)
    output = attention.attend(query[:, :, 2:], key[:, :, 2:], value[:, :, 2:], AttentionRule(scaling=1.0, sinks=SINKS))

    np.testing.assert_allclose(output[0, 0, :, 0], MEANS, rtol=1e-5)


def two_trees_with_long_branches(num_cached: int) -> Stream:
    """Return twice a context of 300 with two branches of 200, each with a twig of 50, less a cached prefix."""
    rng = np.random.default_rng(0)
    context = draw(rng, 300)
    branches = [np.concatenate([context, draw(rng, 200)]) for _ in range(4)]
    requests = [request(row, branch, [draw(rng, 51), [3]]) for row, branch in enumerate(branches)]
    return lay_out_stream([tree_of(requests[:2]), tree_of(requests[2:])], num_cached)


@pytest.mark.parametrize('num_cached', [0, 2])
def test_spans_hold_every_token_once_with_all_its_ancestors_as_keys(num_cached: int):
    stream = two_trees_with_long_branches(num_cached)
    places = torch.arange(num_cached + len(stream.tokens))

    spans = spans_of(stream, CPU)

    assert len(stream.tokens) == 2 * (300 + 2 * 250 - num_cached)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == len(stream.tokens)
    for span in spans:
        keys = span.of(places, 0).tolist()
        assert keys == sorted(set(keys))
        assert keys[-1] == num_cached + span.stop - 1
        for query in range(span.start, span.stop):
            ancestors = num_cached + np.flatnonzero(stream.ends[: query + 1] > query)
            assert {*range(num_cached), *ancestors.tolist()} <= set(keys)


@pytest.mark.parametrize('num_cached', [0, 2])
def test_long_branches_do_not_share_keys(num_cached: int):
    stream = two_trees_with_long_branches(num_cached)
    places = torch.arange(num_cached + len(stream.tokens))

    spans = spans_of(stream, CPU)

    num_keys = [len(span.of(places, 0)) for span in spans]
    num_pairs = sum((span.stop - span.start) * count for span, count in zip(spans, num_keys, strict=True))
    least_pairs = (stream.depths + 1).sum()  # every token with its ancestors and itself alone
    assert num_pairs < 1.25 * least_pairs
    # Some span leaves out tokens before it: those of another branch.
    assert any(count < span.stop and not span.chain for span, count in zip(spans, num_keys, strict=True))


def test_attention_without_a_layout_is_an_error():
    """So a configuration saved or copied inside a stream cannot silently attend to nothing."""
    query = torch.zeros(1, 1, 1, 4)
    with pytest.raises(RuntimeError, match='gauntlet_attention is called outside of an evaluation'):
        attend_by_name(torch.nn.Module(), query, query, query, None)
