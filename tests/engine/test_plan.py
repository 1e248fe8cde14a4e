from collections.abc import Sequence

import fake_model
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.engine import plan as planning
from llmfoundry_gauntlet.engine.plan import LAYOUTS, PADDED_ROWS, Batch, plan
from llmfoundry_gauntlet.engine.ranks import assign
from llmfoundry_gauntlet.engine.trees import count_prefixes, lay_out_rows, lay_out_stream
from llmfoundry_gauntlet.types import ItemKey, ScoreRequest

tokens = st.integers(0, 2)  # few, so that sequences begin alike
contexts = st.lists(tokens, min_size=1, max_size=8)
choices = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=4)
shared_context = st.tuples(st.lists(contexts, min_size=1, max_size=1), choices)
own_contexts = choices.flatmap(
    lambda ids: st.tuples(st.lists(contexts, min_size=len(ids), max_size=len(ids)), st.just(ids))
)
request_parts = st.one_of(shared_context, own_contexts)


def make_requests(parts) -> list[ScoreRequest]:
    """Return requests from (contexts, continuations); a single context is that of all continuations."""
    requests = []
    for row, (texts, continuations) in enumerate(parts):
        arrays = tuple(np.array(text, dtype=np.int32) for text in texts)
        requests.append(
            ScoreRequest(
                key=ItemKey('t/0-shot', row),
                contexts=arrays * (len(continuations) if len(arrays) == 1 else 1),
                continuations=tuple(np.array(ids, dtype=np.int32) for ids in continuations),
            )
        )
    return requests


def sequences(request: ScoreRequest) -> list[tuple[int, ...]]:
    """Return the tokens the model must read for each continuation."""
    pairs = zip(request.contexts, request.continuations, strict=True)
    return [(*context.tolist(), *continuation[:-1].tolist()) for context, continuation in pairs]


def prefixes(requests) -> set[tuple[int, ...]]:
    """Return every prefix of every sequence."""
    rows = [row for request in requests for row in sequences(request)]
    return {row[: length + 1] for row in rows for length in range(len(row))}


@pytest.fixture(params=[1, 30, 2048])
def cheap_and_expensive_tokens(request, monkeypatch):
    """Make trees of all sizes and cached prefixes pay off with a handful of tokens."""
    monkeypatch.setattr(planning, 'PAIRS_PER_TOKEN', request.param)
    monkeypatch.setattr(planning, 'LEAST_PREFIX', 1)
    monkeypatch.setattr(planning, 'LEAST_SAVED_BY_PREFIX', 0.05)
    monkeypatch.setattr(planning, 'BRANCHES', 2)


pytestmark = pytest.mark.usefixtures('cheap_and_expensive_tokens')
any_requests = st.lists(request_parts, max_size=12)
budgets = st.integers(1, 60)
layouts = st.sampled_from(LAYOUTS)


@given(any_requests, budgets, layouts)
def test_batches_score_as_single_requests(parts, tokens_per_batch: int, layout: str):
    """Fails if a token sees one that is not its ancestor, sequences are merged by context only, or a read is off by
    one.
    """
    requests = make_requests(parts)
    batches = plan(requests, tokens_per_batch=tokens_per_batch, layout=layout)
    found = {output.key: output for batch in batches for output in fake_model.run(batch)}
    assert found.keys() == {request.key for request in requests}
    for request in requests:
        alone = fake_model.score(request)
        for here, there in zip(found[request.key].logprobs, alone.logprobs, strict=True):
            assert here.tolist() == there.tolist()


@given(any_requests, budgets)
def test_every_path_holds_its_tokens_once(parts, tokens_per_batch: int):
    """The path of a read through its tree is the request's own sequence; each distinct prefix of a tree runs once."""
    for batch in plan(make_requests(parts), tokens_per_batch=tokens_per_batch):
        cached = [] if batch.prefix is None else batch.prefix.tolist()
        stream = lay_out_stream(batch.trees, len(cached))
        # The path of a token is what it sees: the cached prefix, its ancestors in the tree, and itself.
        paths = []
        for index in range(len(stream.tokens)):
            ancestors = np.flatnonzero(stream.ends[: index + 1] > index)
            paths.append((*cached, *stream.tokens[ancestors].tolist()))
        assert [len(path) - 1 for path in paths] == stream.depths.tolist()

        # Each token of a continuation is read after all of the row before it.
        beginnings = []
        for request in batch.requests:
            for row, context, ids in zip(sequences(request), request.contexts, request.continuations, strict=True):
                beginnings += [row[: len(context) + offset] for offset in range(len(ids))]
        assert [paths[index] for index in stream.reads] == beginnings

        start = 0
        for tree in batch.trees:
            paths_of_tree = paths[start : start + tree.num_tokens]
            start += tree.num_tokens
            assert len(set(paths_of_tree)) == len(paths_of_tree)
            assert set(paths_of_tree) == {prefix for prefix in prefixes(tree.requests) if len(prefix) > len(cached)}


@given(st.lists(request_parts, min_size=1, max_size=12))
def test_prefix_counts_equal_tree_sizes(parts):
    requests = make_requests(parts)
    assert count_prefixes(requests) == len(prefixes(requests))


@given(any_requests, budgets)
def test_a_batch_counts_the_tokens_it_runs(parts, tokens_per_batch: int):
    for batch in plan(make_requests(parts), tokens_per_batch=tokens_per_batch):
        num_cached = 0 if batch.prefix is None else len(batch.prefix)
        assert batch.num_tokens == len(lay_out_stream(batch.trees, num_cached).tokens)


@given(any_requests, budgets, layouts)
def test_batches_keep_to_the_budget(parts, tokens_per_batch: int, layout: str):
    """Except for a single larger item."""
    for batch in plan(make_requests(parts), tokens_per_batch=tokens_per_batch, layout=layout):
        assert batch.num_tokens <= tokens_per_batch or len(batch.requests) == 1
        if layout == PADDED_ROWS:
            assert batch.num_tokens >= lay_out_rows(batch.requests).tokens.size


@given(any_requests, layouts, st.randoms())
def test_the_order_of_the_requests_does_not_change_the_batches(parts, layout: str, random):
    requests = make_requests(parts)
    shuffled = random.sample(requests, len(requests))

    batches = plan(requests, tokens_per_batch=20, layout=layout)
    batches_of_shuffled = plan(shuffled, tokens_per_batch=20, layout=layout)

    assert keys_by_batch(batches) == keys_by_batch(batches_of_shuffled)


def keys_by_batch(batches: Sequence[Batch]) -> list[list[ItemKey]]:
    return [[request.key for request in batch.requests] for batch in batches]


@given(any_requests, budgets, layouts)
def test_halves_have_all_requests_and_give_the_same_outputs(parts, tokens_per_batch: int, layout: str):
    for batch in plan(make_requests(parts), tokens_per_batch=tokens_per_batch, layout=layout):
        halves = batch.halves()

        assert len(halves) == min(2, len(batch.requests))
        keys = [request.key for request in batch.requests]
        assert [key for of_half in keys_by_batch(halves) for key in of_half] == keys
        output_of = {output.key: output for output in fake_model.run(batch)}
        for half in halves:
            for output in fake_model.run(half):
                expected = output_of[output.key]
                assert [ids.tolist() for ids in output.logprobs] == [ids.tolist() for ids in expected.logprobs]


@given(any_requests, budgets, st.integers(1, 5))
def test_ranks_have_equal_forwards_and_all_batches(parts, tokens_per_batch: int, num_ranks: int):
    """Fails without the filler: Composer would stop with the shortest rank."""
    batches = plan(make_requests(parts), tokens_per_batch=tokens_per_batch)
    ranks = assign(batches, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert {id(batch) for rank in ranks for batch in rank if batch.trees} == {id(batch) for batch in batches}

    # A prefix is run before it is needed, as a forward that is counted.
    for rank in ranks:
        cached = None
        for batch in rank:
            runs_prefix_alone = not batch.trees
            if runs_prefix_alone:
                cached = batch.prefix
            assert batch.prefix is None or batch.prefix is cached


def shots_and_questions(num_items: int) -> list[ScoreRequest]:
    """Return items with 100 common tokens, 20 of their own, and four choices of 5."""
    rng = np.random.default_rng(0)
    shots = rng.integers(0, 1000, 100).tolist()
    items = []
    for _ in range(num_items):
        question = rng.integers(0, 1000, 20).tolist()
        choices = rng.integers(0, 1000, (4, 5)).tolist()
        items.append(([[*shots, *question]], choices))
    return make_requests(items)


def test_a_common_prefix_runs_once(monkeypatch):
    monkeypatch.undo()
    batches = plan(shots_and_questions(200), tokens_per_batch=1024)
    assert {id(batch.prefix) for batch in batches} == {id(batches[0].prefix)}
    assert 100 <= len(batches[0].prefix) <= 101  # two items may begin alike by chance
    # Each item runs its question, and all but the last token of each choice.
    assert sum(batch.num_tokens for batch in batches) <= 200 * (20 + 4 * 4)

    (rank,) = assign(batches, num_ranks=1)
    assert [not batch.trees for batch in rank] == [True] + [False] * len(batches)


def test_prompts_with_short_common_prefixes_are_not_joined(monkeypatch):
    """Joining would save a tenth of the tokens and double the attention."""
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    shot = rng.integers(0, 1000, 50).tolist()
    prompts = [[*shot, *rng.integers(0, 1000, 900).tolist()] for _ in range(4)]

    (batch,) = plan(make_requests([([prompt], [[1, 2]]) for prompt in prompts]), tokens_per_batch=4096)

    assert [len(tree.requests) for tree in batch.trees] == [1, 1, 1, 1]


def test_ranks_share_the_work_evenly(monkeypatch):
    """Within 5 % of the mean cost if each rank has several batches."""
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, 99, rng.integers(5, 400)).tolist() for _ in range(3000)]
    batches = plan(make_requests([([context], [[1, 2]]) for context in contexts]), tokens_per_batch=1024)

    ranks = assign(batches, num_ranks=8)

    costs = [sum(batch.cost for batch in rank) for rank in ranks]
    assert max(costs) < 1.05 * sum(costs) / 8


def test_single_token_choices_cost_nothing_beyond_their_context():
    requests = make_requests([([[1, 2, 3]], [[0], [1], [2], [3]])])
    for layout in LAYOUTS:
        (batch,) = plan(requests, tokens_per_batch=100, layout=layout)
        assert batch.num_tokens == 3


def test_unscorable_requests_are_left_out():
    (request,) = make_requests([([[1]], [[2]])])
    unscorable = ScoreRequest(
        key=request.key, contexts=request.contexts, continuations=request.continuations, unscorable='too long'
    )
    assert plan([unscorable], tokens_per_batch=10) == []


def test_a_budget_of_zero_is_an_error():
    with pytest.raises(ValueError, match='tokens_per_batch is 0'):
        plan([], tokens_per_batch=0)


def test_no_ranks_are_an_error():
    with pytest.raises(ValueError, match='num_ranks is 0'):
        assign([], num_ranks=0)


def test_short_rows_are_not_padded_to_long_ones():
    """Fails if only the budget closes a batch: 7,600 padded tokens would then hold the 5,050."""
    requests = make_requests([([[1] * length], [[0]]) for length in range(1, 101)])
    batches = plan(requests, tokens_per_batch=4096, layout=PADDED_ROWS)
    assert sum(batch.num_tokens for batch in batches) < 1.1 * 5050


@pytest.mark.parametrize('first', [0, 1000], ids=['sorted before', 'sorted after'])
def test_an_item_with_a_shorter_prefix_does_not_shorten_that_of_others(monkeypatch, first: int):
    """With fixed shots an item that is a shot itself has another shot there.

    Fails without `ends_family`, and without `begins_family` if that item is the first in order.
    """
    monkeypatch.undo()
    rng = np.random.default_rng(1)
    shots = rng.integers(500, 1000, 400).tolist()
    contexts = [[*shots, *rng.integers(0, 1000, 20).tolist()] for _ in range(900)]
    contexts[7] = [*shots[:90], *rng.integers(first, first + 400, 330).tolist()]

    batches = plan(make_requests([([context], [[1, 2]]) for context in contexts]), tokens_per_batch=4096)

    lengths = {len(batch.prefix) for batch in batches if batch.prefix is not None}
    assert lengths <= {400, 401}  # items after the shots may begin alike by chance
    # The other item runs whole, and each of the others 20 tokens and one of its choice.
    assert sum(batch.num_tokens for batch in batches) <= 899 * 21 + 421
