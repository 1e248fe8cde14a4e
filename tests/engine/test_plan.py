import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.engine.fake import FakeLanguageModel
from llmfoundry_gauntlet.engine.plan import assign, plan
from llmfoundry_gauntlet.values import ItemKey, ScoreRequest

tokens = st.integers(0, 3)  # few, so that rows repeat
request_parts = st.tuples(
    st.lists(tokens, min_size=1, max_size=6), st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=4)
)


def make_requests(parts) -> list[ScoreRequest]:
    requests = []
    for row, (context, continuations) in enumerate(parts):
        array = np.array(context, dtype=np.int32)
        requests.append(
            ScoreRequest(
                key=ItemKey('t/0-shot', row),
                contexts=(array,) * len(continuations),
                continuations=tuple(np.array(ids, dtype=np.int32) for ids in continuations),
            )
        )
    return requests


def outputs_by_key(batches) -> dict:
    model = FakeLanguageModel()
    return {output.key: output for batch in batches for output in model.run(batch)}


@given(st.lists(request_parts, max_size=12), st.integers(1, 40))
def test_the_batches_give_what_each_request_gives_alone(parts, tokens_per_batch: int):
    """Fails when rows are merged by context alone, or a read is shifted by one."""
    requests = make_requests(parts)
    found = outputs_by_key(plan(requests, tokens_per_batch=tokens_per_batch))
    assert found.keys() == {request.key for request in requests}
    for request in requests:
        alone = FakeLanguageModel().score(request)
        for here, there in zip(found[request.key].logprobs, alone.logprobs, strict=True):
            assert here.tolist() == there.tolist()


@given(st.lists(request_parts, min_size=1, max_size=12), st.integers(1, 60))
def test_batches_keep_to_the_budget_unless_one_item_alone_is_larger(parts, tokens_per_batch: int):
    batches = plan(make_requests(parts), tokens_per_batch=tokens_per_batch)
    for batch in batches:
        assert batch.num_padded_tokens <= tokens_per_batch or len(batch.requests) == 1
    widths = [max(len(row) for row in batch.rows) for batch in batches]
    assert widths == sorted(widths, reverse=True)


@given(st.lists(request_parts, max_size=12), st.randoms())
def test_the_order_of_the_requests_does_not_change_the_batches(parts, random):
    requests = make_requests(parts)
    shuffled = random.sample(requests, len(requests))
    first, second = (plan(order, tokens_per_batch=20) for order in (requests, shuffled))
    assert [[r.key for r in b.requests] for b in first] == [[r.key for r in b.requests] for b in second]


@given(st.lists(request_parts, max_size=12), st.integers(1, 5))
def test_every_rank_has_as_many_batches_and_all_batches_are_there(parts, num_ranks: int):
    """Fails when the filler is left out: Composer would stop with the shortest rank."""
    batches = plan(make_requests(parts), tokens_per_batch=10)
    ranks = assign(batches, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert {id(batch) for rank in ranks for batch in rank} == {id(batch) for batch in batches}


def test_single_token_choices_cost_no_row_beyond_their_context():
    requests = make_requests([([1, 2, 3], [[0], [1], [2], [3]])])
    (batch,) = plan(requests, tokens_per_batch=100)
    assert [row.tolist() for row in batch.rows] == [[1, 2, 3]]


def test_requests_that_cannot_be_scored_are_left_out():
    (request,) = make_requests([([1], [[2]])])
    unscorable = ScoreRequest(
        key=request.key, contexts=request.contexts, continuations=request.continuations, unscorable='too long'
    )
    assert plan([unscorable], tokens_per_batch=10) == []


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match='tokens_per_batch is 0'):
        plan([], tokens_per_batch=0)
    with pytest.raises(ValueError, match='num_ranks is 0'):
        assign([], num_ranks=0)


def test_short_rows_are_not_padded_to_long_ones():
    """Fails when a batch is closed by its budget alone: 7,600 padded tokens then hold the 5,050."""
    requests = make_requests([([1] * length, [[0]]) for length in range(1, 101)])
    batches = plan(requests, tokens_per_batch=4096)
    assert sum(batch.num_tokens for batch in batches) == 5050
    assert sum(batch.num_padded_tokens for batch in batches) < 1.1 * 5050
