"""Balance of the Gauntlet's work over 2, 8 and 64 ranks: equal numbers of forwards, similar tokens, little waiting.

Composer makes all ranks wait for each other after every batch (`Trainer._iter_dataloader`), so an evaluation takes
as long as the costliest forward of every step.
"""

from __future__ import annotations

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


def made(cost: float, prefix: Ids | None = None) -> Batch:
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
    families = [(np.ones(5, np.int32), size) for size in family_sizes]
    batches = [made(10.0, prefix) for prefix, size in families for _ in range(size)] + [made(cost) for cost in costs]
    ranks = assign(batches, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len(set(map(len, ranks))) == 1
    assert {id(batch) for mine in ranks for batch in mine if batch.trees} == {id(batch) for batch in batches}
    for mine in ranks:
        cached = None
        for batch in mine:
            cached = cached if batch.trees else batch.prefix
            assert batch.prefix is None or batch.prefix is cached


@pytest.mark.parametrize(('num_ranks', 'waiting', 'repeated'), [(2, 0.08, 0.002), (8, 0.2, 0.03), (64, 0.5, 0.12)])
def test_ranks_have_similar_tokens_wait_little_and_repeat_little(
    sample_rows: PlannedEvaluation, num_ranks: int, waiting: float, repeated: float
):
    """`waiting` is the cost of the costliest batch of each step above the mean, `repeated` a share of all tokens.

    Mutations: units of a round in the order of ranks; rounds start with the cheapest; batches run twice.
    """
    ranks = assign(sample_rows.batches, num_ranks=num_ranks)
    tokens = [sum(batch.num_tokens for batch in mine) for mine in ranks]
    assert max(tokens) < 1.05 * np.mean(tokens)
    costs = np.array([[batch.cost for batch in mine] for mine in ranks])
    assert costs.max(axis=0).sum() < (1 + waiting) * costs.mean(axis=0).sum()
    once = {id(one if one.trees else one.prefix): one.num_tokens for mine in ranks for one in mine}
    assert sum(once.values()) > (1 - repeated) * sum(tokens)


def test_a_step_runs_a_prefix_on_all_ranks_or_none(sample_rows: PlannedEvaluation):
    """A rank that runs a prefix waits for ranks that run a batch.

    Mutation: deal units by cost only, which mixes half of the steps.
    """
    for num_ranks in RANKS[:2]:
        steps = list(zip(*assign(sample_rows.batches, num_ranks=num_ranks), strict=True))
        mixed = sum(len({bool(batch.trees) for batch in step}) == 2 for step in steps)
        assert mixed < 0.05 * len(steps)


def test_the_costliest_forward_is_in_the_first_round(sample_rows: PlannedEvaluation):
    """So running out of memory shows at once."""
    costliest = max(sample_rows.batches, key=lambda batch: batch.cost)
    longest_unit = 1 + max(
        sum(batch.prefix is other.prefix for batch in sample_rows.batches)
        for other in sample_rows.batches
        if other.prefix is not None
    )
    for num_ranks in RANKS:
        ranks = assign(sample_rows.batches, num_ranks=num_ranks)
        assert any(batch is costliest for mine in ranks for batch in mine[:longest_unit])


def test_ranks_get_continuous_batches_of_similar_cost(sample_rows: PlannedEvaluation):
    """Work is estimated from lengths of prompts and generations; ranks wait for each other after each batch."""
    ranks = assign_continuous_batches(sample_rows.continuous_batches, num_ranks=2)
    costs = [sum(batch.cost for batch in mine) for mine in ranks]
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
    assert len(batches) >= 4 and all(batch.prefix is not None for batch in batches)
    length = len(batches[0].prefix)
    whole = length + 40 * 25 + (100 - length) * sum(len(batch.trees) for batch in batches)
    found = scored_tokens(batches)
    assert sum(found.values()) == whole
    assert found['second'] in (30 * 25, 30 * 25 + length)
