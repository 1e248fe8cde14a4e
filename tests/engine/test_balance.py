"""Balance of the Gauntlet's work over 2, 8 and 64 ranks: equal numbers of forwards, similar tokens, little waiting.

Composer makes all ranks wait for each other after every batch (`Trainer._iter_dataloader`), so an evaluation takes
as long as the costliest forward of every step.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from character_tokenizer import CharacterTokenizer
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.continuous import assign_continuous_batches
from llmfoundry_gauntlet.engine.plan import STREAM, Batch, plan
from llmfoundry_gauntlet.engine.ranks import assign, scored_tokens
from llmfoundry_gauntlet.engine.trees import Tree
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import Ids, ItemKey, ScoreRequest

RANKS = (2, 8, 64)


@pytest.fixture(scope='module')
def sample_rows() -> PlannedEvaluation:
    """Return the 57 tasks over the sample data; batches are small as there are about a thousand items."""
    settings = {'tasks': str(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml'), 'data_root': str(ROOT / 'eval_data')}
    data = load_data(decode_settings(settings))
    prepared = prepare_evaluation(data, Encoder(CharacterTokenizer()), max_seq_len=512)
    return plan_evaluation(prepared, tokens_per_batch=512)


def batch_of_cost(cost: float, prefix: Ids | None = None) -> Batch:
    """Return a batch of a one-token request with the given cost."""
    ids = np.ones(1, np.int32)
    request = ScoreRequest(key=ItemKey('t/0-shot', 0), contexts=(ids,), continuations=(ids,))
    tree = Tree(requests=(request,), num_tokens=1)
    return Batch(layout=STREAM, trees=(tree,), num_tokens=1, cost=cost, prefix=prefix)


@given(st.lists(st.integers(1, 12), max_size=8), st.lists(st.floats(1, 4000), max_size=40), st.integers(1, 9))
def test_batches_of_any_prefix_group_are_assigned(family_sizes: list[int], costs: list[float], num_ranks: int):
    """Every batch runs once, with or without a prefix, with equal numbers on all ranks, each after its prefix.

    Mutations: short units are not lengthened; a gap before a unit's last batch is filled with another prefix.
    """
    batches = []
    for size in family_sizes:
        prefix = np.ones(5, np.int32)
        batches += [batch_of_cost(10.0, prefix) for _ in range(size)]
    batches += [batch_of_cost(cost) for cost in costs]

    ranks = assign(batches, num_ranks=num_ranks)

    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert {id(batch) for rank in ranks for batch in rank if batch.trees} == {id(batch) for batch in batches}
    for rank in ranks:
        cached = None
        for batch in rank:
            if not batch.trees:  # it runs its prefix
                cached = batch.prefix
            assert batch.prefix is None or batch.prefix is cached


@pytest.mark.parametrize(
    ('num_ranks', 'waiting', 'repeated'),
    [
        (2, 0.08, 0.002),
        (8, 0.2, 0.03),
        (64, 0.5, 0.12),
    ],
)
def test_ranks_have_similar_tokens_wait_little_and_repeat_little(
    sample_rows: PlannedEvaluation, num_ranks: int, waiting: float, repeated: float
):
    """`waiting` is the cost of the costliest batch of each step above the mean, `repeated` a share of all tokens.

    Mutations: units of a round in the order of ranks; rounds start with the cheapest; batches run twice.
    """
    ranks = assign(sample_rows.batches, num_ranks=num_ranks)

    tokens = [sum(batch.num_tokens for batch in rank) for rank in ranks]
    assert max(tokens) < 1.05 * np.mean(tokens)

    costs = np.array([[batch.cost for batch in rank] for rank in ranks])  # [ranks, steps]
    assert costs.max(axis=0).sum() < (1 + waiting) * costs.mean(axis=0).sum()

    # A batch is known by itself, one that only runs a prefix by that.
    tokens_of_distinct = {}
    for batch in itertools.chain(*ranks):
        tokens_of_distinct[id(batch if batch.trees else batch.prefix)] = batch.num_tokens
    assert sum(tokens_of_distinct.values()) > (1 - repeated) * sum(tokens)


@pytest.mark.parametrize('num_ranks', RANKS[:2])
def test_a_step_runs_a_prefix_on_all_ranks_or_none(sample_rows: PlannedEvaluation, num_ranks: int):
    """A rank that runs a prefix waits for ranks that run a batch.

    Mutation: deal units by cost only, which mixes half of the steps.
    """
    ranks = assign(sample_rows.batches, num_ranks=num_ranks)

    steps = list(zip(*ranks, strict=True))
    mixed = [step for step in steps if len({bool(batch.trees) for batch in step}) == 2]
    assert len(mixed) < 0.05 * len(steps)


@pytest.mark.parametrize('num_ranks', RANKS)
def test_the_costliest_forward_is_in_the_first_round(sample_rows: PlannedEvaluation, num_ranks: int):
    """So running out of memory shows at once."""
    batches = sample_rows.batches
    costliest = max(batches, key=lambda batch: batch.cost)
    followers_of_prefix = Counter(id(batch.prefix) for batch in batches if batch.prefix is not None)
    longest_unit = 1 + max(followers_of_prefix.values())

    ranks = assign(batches, num_ranks=num_ranks)

    first_round = [batch for rank in ranks for batch in rank[:longest_unit]]
    assert any(batch is costliest for batch in first_round)


def test_ranks_get_continuous_batches_of_similar_cost(sample_rows: PlannedEvaluation):
    """Work is estimated from lengths of prompts and generations; ranks wait for each other after each batch."""
    ranks = assign_continuous_batches(sample_rows.continuous_batches, num_ranks=2)
    costs = [sum(batch.cost for batch in rank) for rank in ranks]
    assert max(costs) < 1.05 * np.mean(costs)


def test_a_shared_prefix_counts_once():
    """Forty rows of 25 tokens after the same 100; a choice of a single token adds nothing."""
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
    assert len(batches) >= 4
    assert all(batch.prefix is not None for batch in batches)

    tokens_of_task = scored_tokens(batches)

    # The tokens of the 100 that the prefix lacks run in every tree.
    length = len(batches[0].prefix)
    num_trees = sum(len(batch.trees) for batch in batches)
    assert sum(tokens_of_task.values()) == length + 40 * 25 + (100 - length) * num_trees
    assert tokens_of_task['second'] in (30 * 25, 30 * 25 + length)
