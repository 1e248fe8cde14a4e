"""What a plan takes, from parts that were timed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmfoundry_gauntlet.engine.estimate import expected_tokens, scored_tokens
from llmfoundry_gauntlet.engine.plan import plan
from llmfoundry_gauntlet.types import Generation, ItemKey, ScoreRequest


def reply(num_tokens: int, *, is_cut: bool) -> Generation:
    return Generation(key=ItemKey('a', 0), text='', num_tokens=num_tokens, is_cut=is_cut)


def test_a_prefix_of_several_batches_counts_once_for_the_first_of_its_tasks():
    """Forty rows of 25 tokens of their own after the same 100; one choice of a single token adds nothing."""
    shared = np.arange(100, dtype=np.int32)
    requests = [
        ScoreRequest(
            key=ItemKey('first' if row < 10 else 'second', row),
            contexts=(np.concatenate([shared, np.full(25, 200 + row, np.int32)]),),
            continuations=(np.array([7], np.int32),),
        )
        for row in range(40)
    ]
    batches = plan(requests, tokens_per_batch=300)
    assert len(batches) >= 4 and all(batch.prefix is not None for batch in batches)
    length = len(batches[0].prefix)
    whole = length + 40 * 25 + (100 - length) * sum(len(batch.trees) for batch in batches)
    found = scored_tokens(batches)
    assert sum(found.values()) == whole
    assert found['second'] in (30 * 25, 30 * 25 + length)


def test_replies_that_end_at_each_token_with_a_fixed_chance_take_the_mean_of_the_geometric_distribution():
    """Two ended in 10 tokens together, two were cut after 5: 2 ends in 20 tokens."""
    replies = [reply(4, is_cut=False), reply(6, is_cut=False), reply(5, is_cut=True), reply(5, is_cut=True)]
    chance = 2 / 20
    expected = math.fsum((1 - chance) ** before for before in range(30))  # tokens that are reached
    assert expected_tokens(replies, 30) == pytest.approx(expected)
    assert expected_tokens(replies, 1) == pytest.approx(1.0)


def test_replies_that_never_ended_take_the_most():
    assert expected_tokens([reply(8, is_cut=True)] * 3, 100) == 100
    assert expected_tokens([], 7) == 7


def test_replies_that_end_at_once_take_a_token():
    assert expected_tokens([reply(1, is_cut=False)] * 3, 100) == pytest.approx(1.0)
