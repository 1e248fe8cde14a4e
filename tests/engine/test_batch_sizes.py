"""Continuous batches (requests that are decoded together, and their ranks), and `tokens_per_batch: auto`, by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3Config, GPT2Config, LlamaConfig, MptConfig

from llmfoundry_gauntlet.engine.continuous import (
    CACHED_PER_TOKEN,
    LEAST_REQUESTS,
    TOKENS_PER_SLOT,
    ContinuousBatch,
    assign_continuous_batches,
    expected_tokens,
    plan_continuous_batches,
    prompt_families,
)
from llmfoundry_gauntlet.engine.model import Budget, automatic_budget, budget_in_memory
from llmfoundry_gauntlet.types import GenerateRequest, Generation, ItemKey

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


def sizes(requests: list[GenerateRequest], tokens_per_batch: int) -> list[int]:
    return [len(batch.requests) for batch in plan_continuous_batches(requests, tokens_per_batch=tokens_per_batch)]


@given(parts, budgets)
def test_batches_hold_every_runnable_request_once(wanted, tokens_per_batch: int):
    """In the order of families, the longest first.

    Mutations: drop the last `yield` of `gather_requests`; keep unscorable requests; order by length only or families by
    their tokens; gather requests one by one.
    """
    requests = make_requests(wanted)
    runnable = [request for request in requests if request.unscorable is None]

    batches = plan_continuous_batches(requests, tokens_per_batch=tokens_per_batch)

    in_order = [request for batch in batches for request in batch.requests]
    assert Counter(request.key for request in in_order) == Counter(request.key for request in runnable)

    # Equal prompts are in one batch.
    prompts_and_batches = set()
    for number, batch in enumerate(batches):
        prompts_and_batches |= {(request.context.tobytes(), number) for request in batch.requests}
    assert len(prompts_and_batches) == len({request.context.tobytes() for request in runnable})

    # Families follow one another, that with the longest request first.
    families = prompt_families(runnable)
    longest = [max(request.length for request in family) for family in families]
    assert longest == sorted(longest, reverse=True)
    assert [request.key for request in in_order] == [request.key for family in families for request in family]


@given(parts, budgets)
def test_batches_keep_to_their_limits(wanted, tokens_per_batch: int):
    """A single slot, or the requests for one prompt, may be more.

    Mutations: no `min` with the number of requests; no limit by tokens.
    """
    for batch in plan_continuous_batches(make_requests(wanted), tokens_per_batch=tokens_per_batch):
        assert batch.tokens_per_batch == tokens_per_batch
        assert 1 <= batch.num_slots <= len(batch.requests)
        if batch.num_slots > 1:
            assert batch.num_slots * batch.longest <= CACHED_PER_TOKEN * tokens_per_batch
            assert batch.num_slots * TOKENS_PER_SLOT <= tokens_per_batch
        prompts_of_batch = {request.context.tobytes() for request in batch.requests}
        assert len(batch.requests) <= LEAST_REQUESTS or len(prompts_of_batch) == 1


@given(parts, budgets, st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_change_the_batches(wanted, tokens_per_batch: int, random):
    """Mutation: no key in the order."""
    requests = make_requests(wanted)
    shuffled = random.sample(requests, len(requests))

    batches = plan_continuous_batches(requests, tokens_per_batch=tokens_per_batch)
    batches_of_shuffled = plan_continuous_batches(shuffled, tokens_per_batch=tokens_per_batch)

    for batch, other in zip(batches, batches_of_shuffled, strict=True):
        assert [request.key for request in batch.requests] == [request.key for request in other.requests]
        assert batch.num_slots == other.num_slots
        assert batch.cost == other.cost


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
    families = prompt_families([request(row, prompt) for row, prompt in enumerate(prompts)])
    rows_by_family = [sorted(request.key.row for request in family) for family in families]
    assert rows_by_family == [[4], [0, 2, 6], [5], [1, 3]]


@pytest.mark.parametrize(
    ('length', 'tokens_per_batch', 'num_slots'),
    [
        # 2,048 tokens have 16 slots.
        (128, 2048, 16),
        # 16 * 1,024 tokens are as many as 8 * 2,048; with one more each, 15 sequences fit.
        (1024, 2048, 16),
        (1025, 2048, 15),
        # Never less than one.
        (20_000, 2048, 1),
        (10, 127, 1),
        # 384 tokens have three slots.
        (64, 384, 3),
    ],
)
def test_slots_by_hand(length: int, tokens_per_batch: int, num_slots: int):
    """One slot for 128 tokens of a batch, and 8 cached tokens for each of its tokens.

    The longest sequence counts, although others are short. Mutation: use the last request.
    """
    requests = []
    for row in range(16):
        length_of_row = length if row == 7 else 10
        requests.append(request(row, [row] * (length_of_row - 4), 4))

    batch, *_ = plan_continuous_batches(requests, tokens_per_batch=tokens_per_batch)

    assert batch.num_slots == min(num_slots, len(batch.requests))
    assert batch.longest == length


@pytest.mark.parametrize(
    ('num_requests', 'tokens_per_batch', 'expected'),
    [
        # 32 batches.
        (3000, 16_384, [94] * 31 + [86]),
        # One batch of 64 requests and a rest.
        (66, 16_384, [64, 2]),
        # At least four requests for each of two slots.
        (10, 256, [8, 2]),
    ],
)
def test_the_number_of_batches_suits_the_number_of_requests(
    num_requests: int, tokens_per_batch: int, expected: list[int]
):
    requests = [request(row, [row] * 100, 28) for row in range(num_requests)]
    assert sizes(requests, tokens_per_batch) == expected


def test_requests_for_one_prompt_are_never_split():
    requests = [request(row, [row < 80] * 5, 3) for row in range(100)]
    assert sorted(sizes(requests, 2048)) == [20, 80]


def test_requests_that_cannot_be_scored_make_no_batch():
    assert sizes([request(0, [1], unscorable=True)], 100) == []


def test_a_budget_of_zero_is_an_error():
    with pytest.raises(ValueError, match='tokens_per_batch is 0; allowed: 1 or more'):
        sizes([], 0)


def test_the_cost_of_a_batch_by_hand():
    """Prompts of 3 and 2 tokens, plus 4 times half of 6 + 6 + 8 tokens."""
    requests = [request(0, [1, 2, 3], 6), request(1, [1, 2, 3], 6), request(2, [4, 5], 8)]
    (batch,) = plan_continuous_batches(requests, tokens_per_batch=2048)
    assert batch.cost == 3 + 2 + 4 * 0.5 * 20
    assert batch.longest == 10


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
    # Batches without requests fill up ranks.
    assigned = [batch.requests[0].key for rank in ranks for batch in rank if batch.requests]
    assert sorted(assigned) == [batch.requests[0].key for batch in batches]

    loads = [sum(batch.cost for batch in rank) for rank in ranks]
    for rank, load in zip(ranks, loads, strict=True):
        costs_of_rank = [batch.cost for batch in rank]
        assert costs_of_rank == sorted(costs_of_rank, reverse=True)
        last_cost = min((cost for cost in costs_of_rank if cost), default=0)
        assert load - last_cost <= min(loads)


@pytest.mark.parametrize(
    ('lengths', 'most', 'expected'),
    [
        # Two ended in 10 tokens together, two were truncated after 5: 2 ends in 20 tokens.
        ([(4, False), (6, False), (5, True), (5, True)], 30, sum(0.9**before for before in range(30))),
        ([(4, False), (6, False), (5, True), (5, True)], 1, 1.0),
        ([(8, True)] * 3, 100, 100),  # none ended
        ([], 7, 7),
        ([(1, False)] * 3, 100, 1.0),  # all ended at once
    ],
)
def test_expected_length_is_geometric(lengths, most: int, expected: float):
    """Each token ends a generation with the same probability."""
    generations = [
        Generation(key=ItemKey('a', 0), text='', num_tokens=count, is_truncated=is_truncated)
        for count, is_truncated in lengths
    ]
    assert expected_tokens(generations, most) == pytest.approx(expected)


# `tokens_per_batch: auto`.

# A token of scoring takes 4 * (6 * width + 3 * feed-forward width) bytes. A token of generation also takes those of 9
# tokens in the KV cache, each with 2 * layers * key-value heads * head width values of 2 bytes in bfloat16. Half of the
# free memory less 2**29 bytes, 0.54 GB, is for the batch.
GIB, GB = 2**30, 10**9
OF_7B = LlamaConfig(hidden_size=4096, intermediate_size=11008)  # 4 * (24,576 + 33,024) = 230,400
OF_70B = LlamaConfig(hidden_size=8192, intermediate_size=28672)  # 4 * (49,152 + 86,016) = 540,672
CACHED_125M = 2 * 12 * 12 * 64 * 2  # 36,864
CACHED_7B = 2 * 32 * 32 * 128 * 2  # 524,288: 4,948,992 a token with the scoring part
CACHED_70B = 2 * 80 * 8 * 128 * 2  # 327,680: 3,489,792


@pytest.mark.parametrize(
    ('config', 'cached_bytes', 'free', 'scoring', 'generation'),
    [
        # 80 GB less 0.25 GB of weights leave 39.34 GB: 711,000 and 101,600 tokens, more than 32,768.
        (MptConfig(d_model=768), CACHED_125M, 79.75 * GB, 32768, 32768),
        # 13.48 GB of weights leave 32.72 GB: 142,000 tokens, and 6,612, of which the power of two is 4,096.
        (OF_7B, CACHED_7B, 66.52 * GB, 32768, 4096),
        # 70B over 64 ranks: weights 2.20 GB, gathered 7.62 GB. 70.18 GB free leave 34.55 GB: 63,900 and 9,901 tokens.
        (OF_70B, CACHED_70B, 70.18 * GB, 32768, 8192),
        # Half of 4 GiB less half a GiB is 1.5 GiB: 6,990 tokens of 7B, 325 with the cache.
        (OF_7B, CACHED_7B, 4 * GIB, 4096, 256),
        # GPT-2 names no feed-forward width: 4 * 768. 29,127 tokens of 55,296 bytes, 4,161 of 387,072.
        (GPT2Config(), CACHED_125M, 4 * GIB, 16384, 4096),
        # A multimodal model's text part counts.
        (Gemma3Config(text_config={'hidden_size': 4096, 'intermediate_size': 11008}), 0, 4 * GIB, 4096, 4096),
        # Less than the chunk of logits alone: one token, never none.
        (OF_7B, CACHED_7B, GIB // 2, 1, 1),
    ],
)
def test_scoring_and_generation_fill_half_of_the_free_memory(
    config: Any, cached_bytes: int, free: float, scoring: int, generation: int
):
    budget = budget_in_memory(config, int(free), cached_bytes=cached_bytes)
    assert budget == Budget(scoring=scoring, generation=generation)


@pytest.mark.parametrize(
    ('num_tokens', 'num_ranks', 'tokens'),
    [
        (10**9, 1, 2048),
        (16384, 2, 2048),
        (16383, 2, 1024),  # not four batches each
        (1, 64, 1024),  # never less: small batches are slow
        (10**9, 64, 2048),
    ],
)
def test_each_rank_gets_four_batches_on_a_cpu(num_tokens: int, num_ranks: int, tokens: int):
    work = {'num_tokens': num_tokens, 'num_generations': 0, 'num_ranks': num_ranks}
    budget = automatic_budget(LlamaConfig(), torch.device('cpu'), cached_bytes=10**6, **work)
    assert budget.scoring == budget.generation == tokens


@pytest.mark.parametrize(
    ('num_generations', 'num_ranks', 'requests', 'num_batches'),
    [
        (2000, 1, 500, 4),
        (2000, 8, 64, 32),
        (2000, 64, 31, 65),
        (20_000, 8, 625, 32),
        (300, 64, 16, 19),  # fewer would not be faster
    ],
)
def test_each_rank_gets_a_continuous_batch(num_generations: int, num_ranks: int, requests: int, num_batches: int):
    """Prompts of 100 tokens, generations of 28 tokens, 256 slots. Mutation: the same number for all ranks."""
    work = {'num_tokens': 10**9, 'num_generations': num_generations, 'num_ranks': num_ranks}
    prompts = [request(row, np.full(100, row), 28) for row in range(num_generations)]

    budget = automatic_budget(LlamaConfig(), torch.device('cpu'), cached_bytes=10**6, **work)
    batches = plan_continuous_batches(prompts, tokens_per_batch=32_768, requests_per_batch=budget.requests)
    ranks = assign_continuous_batches(batches, num_ranks=num_ranks)

    assert budget.requests == requests
    assert len(batches) == num_batches
    busy_ranks = [rank for rank in ranks if rank[0].requests]
    assert len(busy_ranks) == min(num_ranks, num_batches)
