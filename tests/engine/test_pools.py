"""Which requests are written together, and on which rank."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.engine.pools import (
    CACHED_PER_TOKEN,
    LEAST_POOL,
    MOST_POOLS,
    TOKENS_PER_ROW,
    Pool,
    assign_pools,
    families,
    plan_pools,
)
from llmfoundry_gauntlet.types import GenerateRequest, ItemKey

# Few tokens and lengths, so that prompts are equal.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
parts = st.lists(st.tuples(prompts, st.integers(1, 5), st.booleans()), max_size=60)
budgets = st.integers(1, 600)


def request(row: int, context, max_new_tokens: int = 1, *, unscorable: bool = False) -> GenerateRequest:
    return GenerateRequest(
        key=ItemKey('t/0-shot', row),
        context=np.array(context, dtype=np.int32),
        max_new_tokens=max_new_tokens,
        unscorable='too long' if unscorable else None,
    )


def make_requests(wanted) -> list[GenerateRequest]:
    return [
        request(row, [1, *context], count, unscorable=not scorable)
        for row, (context, count, scorable) in enumerate(wanted)
    ]


def told(pools: list[Pool]) -> list[tuple]:
    """Pools as plain values."""
    return [(tuple(wanted.key for wanted in pool.requests), pool.num_rows, pool.cost) for pool in pools]


@given(parts, budgets)
def test_every_request_that_can_be_asked_is_in_one_pool(wanted, tokens_per_batch: int):
    """Mutations: the last `yield` of `gather` left out; unscorable requests kept."""
    requests = make_requests(wanted)
    pools = plan_pools(requests, tokens_per_batch=tokens_per_batch)
    found = Counter(one.key for pool in pools for one in pool.requests)
    assert found == Counter(one.key for one in requests if one.unscorable is None)
    assert all(pool.requests and pool.tokens_per_batch == tokens_per_batch for pool in pools)


@given(parts, budgets)
def test_requests_with_one_prompt_follow_each_other_in_one_pool(wanted, tokens_per_batch: int):
    """Also where their replies may be of different lengths. Mutations: groups of neighbours in order of length alone;
    requests gathered one by one."""
    pools = plan_pools(make_requests(wanted), tokens_per_batch=tokens_per_batch)
    in_order = [one.context.tobytes() for pool in pools for one in pool.requests]
    runs = [context for context, before in zip(in_order, [None, *in_order], strict=False) if context != before]
    assert len(runs) == len(set(runs))
    pool_of = [(one.context.tobytes(), number) for number, pool in enumerate(pools) for one in pool.requests]
    assert len(set(pool_of)) == len(runs)


@given(parts, budgets, st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(wanted, tokens_per_batch: int, random):
    """Mutation: no key in the order of requests."""
    requests = make_requests(wanted)
    expected = told(plan_pools(requests, tokens_per_batch=tokens_per_batch))
    random.shuffle(requests)
    assert told(plan_pools(requests, tokens_per_batch=tokens_per_batch)) == expected


@given(parts, budgets)
def test_rows_are_bounded_by_tokens_and_pools_by_their_share(wanted, tokens_per_batch: int):
    """Mutations: no `min` with the number of requests; groups gathered for ever; no limit by tokens."""
    pools = plan_pools(make_requests(wanted), tokens_per_batch=tokens_per_batch)
    for pool in pools:
        assert 1 <= pool.num_rows <= len(pool.requests)
        assert pool.num_rows == 1 or pool.num_rows * pool.longest <= CACHED_PER_TOKEN * tokens_per_batch
        assert pool.num_rows == 1 or pool.num_rows * TOKENS_PER_ROW <= tokens_per_batch
        assert len(pool.requests) <= LEAST_POOL or len({one.context.tobytes() for one in pool.requests}) == 1


@given(parts, budgets)
def test_the_longest_come_first_and_what_begins_alike_together(wanted, tokens_per_batch: int):
    """Mutation: families in the order of their tokens."""
    requests = [one for one in make_requests(wanted) if one.unscorable is None]
    found = families(requests)
    longest = [max(one.length for one in family) for family in found]
    assert longest == sorted(longest, reverse=True)
    in_pools = [one.key for pool in plan_pools(requests, tokens_per_batch=tokens_per_batch) for one in pool.requests]
    assert in_pools == [one.key for family in found for one in family]


def test_families_by_hand():
    """Half of a prompt and 64 tokens are alike, or all of a shorter one."""
    trunk = [*range(100)]
    prompts = [
        [*trunk, 7, 8],
        [5],
        [*trunk[:64], 3, *range(200, 260)],
        [5],
        [*trunk, *range(300, 401)],
        trunk[:63],
        [*trunk, 9],
    ]
    found = families([request(row, prompt) for row, prompt in enumerate(prompts)])
    assert [sorted(one.key.row for one in family) for family in found] == [[4], [0, 2, 6], [5], [1, 3]]


@pytest.mark.parametrize(
    ('length', 'tokens_per_batch', 'num_rows'),
    [
        (128, 2048, 16),
        (1024, 2048, 16),
        (1025, 2048, 15),
        (2048, 2048, 8),
        (20_000, 2048, 1),
        (10, 127, 1),
        (64, 384, 3),
    ],
)
def test_rows_by_hand(length: int, tokens_per_batch: int, num_rows: int):
    """A row for 128 tokens of a batch, and 8 tokens kept for each of its tokens."""
    requests = [request(row, [row] * (length - 4), 4) for row in range(16)]
    for pool in plan_pools(requests, tokens_per_batch=tokens_per_batch):
        assert pool.num_rows == min(num_rows, len(pool.requests))


def test_the_longest_row_of_a_pool_says_how_many_it_has():
    """Eight of 2,048 tokens, although the others are short. Mutation: those of the last request."""
    requests = [request(row, [row] * (2044 if row == 7 else 6), 4) for row in range(16)]
    (pool,) = plan_pools(requests, tokens_per_batch=2048)
    assert (pool.num_rows, pool.longest, pool.requests[0].key.row) == (8, 2048, 7)


def test_many_requests_make_enough_pools_and_few_make_pools_worth_having():
    """3,000 in 32 pools of 94, 66 in one of 64 and what is left; four for each row where rows are few."""
    many = [request(row, [row] * 100, 28) for row in range(3000)]
    assert [len(pool.requests) for pool in plan_pools(many, tokens_per_batch=16_384)] == [94] * 31 + [86]
    assert MOST_POOLS == 32
    assert [len(pool.requests) for pool in plan_pools(many[:66], tokens_per_batch=16_384)] == [64, 2]
    assert [len(pool.requests) for pool in plan_pools(many[:10], tokens_per_batch=256)] == [8, 2]


def test_more_requests_for_one_prompt_than_a_pool_has_stay_together():
    requests = [request(row, [row < 80] * 5, 3) for row in range(100)]
    assert sorted(len(pool.requests) for pool in plan_pools(requests, tokens_per_batch=2048)) == [20, 80]


def test_the_cost_counts_a_prompt_once_and_half_of_what_may_be_written():
    """Two prompts of 3 and 2 tokens, and 4 times half of 6 + 6 + 8 tokens."""
    requests = [request(0, [1, 2, 3], 6), request(1, [1, 2, 3], 6), request(2, [4, 5], 8)]
    (pool,) = plan_pools(requests, tokens_per_batch=2048)
    assert pool.cost == 3 + 2 + 4 * 0.5 * 20
    assert pool.longest == 10


def test_a_batch_without_tokens_is_a_mistake():
    with pytest.raises(ValueError, match='tokens_per_batch is 0; allowed: 1 or more'):
        plan_pools([], tokens_per_batch=0)


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_ranks_get_equally_many_pools_and_about_the_same_work(costs, num_ranks: int):
    """No rank had more than another when it was given its last pool, and those were the cheapest.

    Mutations: pools in the order given; pools counted instead of their cost; no empty pools.
    """
    pools = [
        Pool(requests=(request(row, [1]),), num_rows=1, tokens_per_batch=9, cost=cost) for row, cost in enumerate(costs)
    ]
    ranks = assign_pools(pools, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len(set(map(len, ranks))) == 1
    assert sorted(pool.requests[0].key for mine in ranks for pool in mine if pool.requests) == [
        pool.requests[0].key for pool in pools
    ]
    loads = [sum(pool.cost for pool in mine) for mine in ranks]
    for mine, load in zip(ranks, loads, strict=True):
        found = [pool.cost for pool in mine]
        assert found == sorted(found, reverse=True)
        given = [cost for cost in found if cost]
        assert load - min(given, default=0) <= min(loads)


def test_nothing_to_write_is_no_pool_on_any_rank():
    assert plan_pools([request(0, [1], unscorable=True)], tokens_per_batch=100) == []
    assert assign_pools([], num_ranks=3) == [[], [], []]
