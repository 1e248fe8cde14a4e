"""Continuous batches: which requests are decoded together, and on which rank."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.engine.continuous import (
    CACHED_PER_TOKEN,
    LEAST_REQUESTS,
    MOST_BATCHES,
    TOKENS_PER_SLOT,
    ContinuousBatch,
    assign_continuous_batches,
    plan_continuous_batches,
    prompt_families,
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


def described(batches: list[ContinuousBatch]) -> list[tuple]:
    """Return batches as plain values."""
    return [(tuple(wanted.key for wanted in batch.requests), batch.num_slots, batch.cost) for batch in batches]


@given(parts, budgets)
def test_every_runnable_request_is_in_one_batch(wanted, tokens_per_batch: int):
    """Mutations: drop the last `yield` of `gather`; keep unscorable requests."""
    requests = make_requests(wanted)
    batches = plan_continuous_batches(requests, tokens_per_batch=tokens_per_batch)
    found = Counter(one.key for batch in batches for one in batch.requests)
    assert found == Counter(one.key for one in requests if one.unscorable is None)
    assert all(batch.requests and batch.tokens_per_batch == tokens_per_batch for batch in batches)


@given(parts, budgets)
def test_requests_with_the_same_prompt_are_neighbours(wanted, tokens_per_batch: int):
    """Also with different generation lengths. Mutations: order by length only; gather requests one by one."""
    batches = plan_continuous_batches(make_requests(wanted), tokens_per_batch=tokens_per_batch)
    in_order = [one.context.tobytes() for batch in batches for one in batch.requests]
    runs = [context for context, before in zip(in_order, [None, *in_order], strict=False) if context != before]
    assert len(runs) == len(set(runs))
    batch_of = [(one.context.tobytes(), number) for number, batch in enumerate(batches) for one in batch.requests]
    assert len(set(batch_of)) == len(runs)


@given(parts, budgets, st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(wanted, tokens_per_batch: int, random):
    """Mutation: no key in the order of requests."""
    requests = make_requests(wanted)
    expected = described(plan_continuous_batches(requests, tokens_per_batch=tokens_per_batch))
    random.shuffle(requests)
    assert described(plan_continuous_batches(requests, tokens_per_batch=tokens_per_batch)) == expected


@given(parts, budgets)
def test_slots_and_batch_sizes_are_bounded(wanted, tokens_per_batch: int):
    """Mutations: no `min` with the number of requests; groups never end; no limit by tokens."""
    batches = plan_continuous_batches(make_requests(wanted), tokens_per_batch=tokens_per_batch)
    for batch in batches:
        assert 1 <= batch.num_slots <= len(batch.requests)
        assert batch.num_slots == 1 or batch.num_slots * batch.longest <= CACHED_PER_TOKEN * tokens_per_batch
        assert batch.num_slots == 1 or batch.num_slots * TOKENS_PER_SLOT <= tokens_per_batch
        assert len(batch.requests) <= LEAST_REQUESTS or len({one.context.tobytes() for one in batch.requests}) == 1


@given(parts, budgets)
def test_longest_first_and_shared_prefixes_together(wanted, tokens_per_batch: int):
    """Mutation: order families by their tokens."""
    requests = [one for one in make_requests(wanted) if one.unscorable is None]
    found = prompt_families(requests)
    longest = [max(one.length for one in family) for family in found]
    assert longest == sorted(longest, reverse=True)
    in_batches = [
        one.key
        for batch in plan_continuous_batches(requests, tokens_per_batch=tokens_per_batch)
        for one in batch.requests
    ]
    assert in_batches == [one.key for family in found for one in family]


def test_families_by_hand():
    """Prompts share half of their tokens and 64, or all of the shorter one."""
    prefix = [*range(100)]
    prompts = [
        [*prefix, 7, 8],
        [5],
        [*prefix[:64], 3, *range(200, 260)],
        [5],
        [*prefix, *range(300, 401)],
        prefix[:63],
        [*prefix, 9],
    ]
    found = prompt_families([request(row, prompt) for row, prompt in enumerate(prompts)])
    assert [sorted(one.key.row for one in family) for family in found] == [[4], [0, 2, 6], [5], [1, 3]]


@pytest.mark.parametrize(
    ('length', 'tokens_per_batch', 'num_slots'),
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
def test_slots_by_hand(length: int, tokens_per_batch: int, num_slots: int):
    """One slot for 128 tokens of a batch, and 8 cached tokens for each of its tokens."""
    requests = [request(row, [row] * (length - 4), 4) for row in range(16)]
    for batch in plan_continuous_batches(requests, tokens_per_batch=tokens_per_batch):
        assert batch.num_slots == min(num_slots, len(batch.requests))


def test_the_longest_sequence_determines_the_slots():
    """Eight slots of 2,048 tokens, although the other sequences are short. Mutation: use the last request."""
    requests = [request(row, [row] * (2044 if row == 7 else 6), 4) for row in range(16)]
    (batch,) = plan_continuous_batches(requests, tokens_per_batch=2048)
    assert (batch.num_slots, batch.longest, batch.requests[0].key.row) == (8, 2048, 7)


def test_the_number_of_batches_suits_the_number_of_requests():
    """3,000 requests make 32 batches of 94; 66 make one of 64 and a rest; at least four per slot."""
    many = [request(row, [row] * 100, 28) for row in range(3000)]
    assert [len(batch.requests) for batch in plan_continuous_batches(many, tokens_per_batch=16_384)] == [94] * 31 + [86]
    assert MOST_BATCHES == 32
    assert [len(batch.requests) for batch in plan_continuous_batches(many[:66], tokens_per_batch=16_384)] == [64, 2]
    assert [len(batch.requests) for batch in plan_continuous_batches(many[:10], tokens_per_batch=256)] == [8, 2]


def test_requests_for_one_prompt_are_never_split():
    requests = [request(row, [row < 80] * 5, 3) for row in range(100)]
    assert sorted(len(batch.requests) for batch in plan_continuous_batches(requests, tokens_per_batch=2048)) == [20, 80]


def test_the_cost_of_a_batch_by_hand():
    """Prompts of 3 and 2 tokens, plus 4 times half of 6 + 6 + 8 tokens."""
    requests = [request(0, [1, 2, 3], 6), request(1, [1, 2, 3], 6), request(2, [4, 5], 8)]
    (batch,) = plan_continuous_batches(requests, tokens_per_batch=2048)
    assert batch.cost == 3 + 2 + 4 * 0.5 * 20
    assert batch.longest == 10


def test_a_batch_needs_at_least_one_token():
    with pytest.raises(ValueError, match='tokens_per_batch is 0; allowed: 1 or more'):
        plan_continuous_batches([], tokens_per_batch=0)


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_ranks_get_equal_numbers_of_batches_and_similar_work(costs, num_ranks: int):
    """When a rank gets its last batch, no rank has less work.

    Mutations: batches in the given order; batches counted instead of costed; no empty batches.
    """
    batches = [
        ContinuousBatch(requests=(request(row, [1]),), num_slots=1, tokens_per_batch=9, cost=cost)
        for row, cost in enumerate(costs)
    ]
    ranks = assign_continuous_batches(batches, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len(set(map(len, ranks))) == 1
    assert sorted(batch.requests[0].key for mine in ranks for batch in mine if batch.requests) == [
        batch.requests[0].key for batch in batches
    ]
    loads = [sum(batch.cost for batch in mine) for mine in ranks]
    for mine, load in zip(ranks, loads, strict=True):
        found = [batch.cost for batch in mine]
        assert found == sorted(found, reverse=True)
        given = [cost for cost in found if cost]
        assert load - min(given, default=0) <= min(loads)


def test_no_requests_make_no_batches():
    assert plan_continuous_batches([request(0, [1], unscorable=True)], tokens_per_batch=100) == []
    assert assign_continuous_batches([], num_ranks=3) == [[], [], []]
