"""Balance of the Gauntlet's work over 2, 8 and 64 ranks: equal numbers of forwards, similar tokens, little waiting.

Composer makes all ranks wait for each other after every batch (`Trainer._iter_dataloader`), so an evaluation takes
as long as the costliest forward of every step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from character_tokenizer import CharacterTokenizer
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.engine.continuous import (
    LEAST_BATCHES,
    ContinuousBatch,
    assign_continuous_batches,
)
from llmfoundry_gauntlet.engine.model import MOST_TOKENS
from llmfoundry_gauntlet.engine.plan import STREAM, Batch, plan
from llmfoundry_gauntlet.engine.ranks import assign, scored_tokens
from llmfoundry_gauntlet.engine.trees import Tree
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import (
    PlannedEvaluation,
    PreparedEvaluation,
    plan_evaluation,
    prepare_evaluation,
)
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import Ids, ItemKey, ScoreRequest

TASKS = str(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')
STAND_INS = {'safety/bbq.jsonl': 'safety/bbq_standin.jsonl'}  # of the real files, where the first is not there
RANKS = (2, 8, 64)
ABOVE_MEAN = 0.05
PIECES = re.compile(r' ?\w{1,6}|.', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The work of each rank.

    `above_mean` is the busiest rank's share of tokens above the mean. `waiting` is the cost of the costliest part of
    every step above the mean of ranks; `repeated` is the share of tokens run only to take part, and of prefixes run
    more than once.
    """

    above_mean: float
    waiting: float
    repeated: float


def spread_over_ranks(batches: Sequence[Batch]) -> dict[int, Spread]:
    """Return the work of the batches for each number of ranks, which must all run equally many."""
    found = {}
    for num_ranks in RANKS:
        ranks = assign(batches, num_ranks=num_ranks)
        assert len(set(map(len, ranks))) == 1
        assert {id(batch) for mine in ranks for batch in mine if batch.trees} == {id(batch) for batch in batches}
        tokens = np.array([[batch.num_tokens for batch in mine] for mine in ranks])
        costs = np.array([[batch.cost for batch in mine] for mine in ranks])
        # Every rank makes its own batch for a prefix.
        once = {id(one if one.trees else one.prefix): one.num_tokens for mine in ranks for one in mine}
        found[num_ranks] = Spread(
            above_mean=tokens.sum(axis=1).max() / tokens.sum(axis=1).mean() - 1,
            waiting=costs.max(axis=0).sum() / costs.mean(axis=0).sum() - 1,
            repeated=1 - sum(once.values()) / tokens.sum(),
        )
    return found


def above_mean(batches: Sequence[ContinuousBatch], num_ranks: int) -> float:
    """Return the share of the costliest rank above the mean of ranks, which must all get equally many batches."""
    ranks = assign_continuous_batches(batches, num_ranks=num_ranks)
    assert len(set(map(len, ranks))) == 1
    costs = [sum(batch.cost for batch in mine) for mine in ranks]
    return max(costs) / np.mean(costs) - 1


def prepared(tasks: object, data_root: Path, tokenizer: object, max_seq_len: int) -> PreparedEvaluation:
    """Return all items of the tasks, including programs, which are generated but not run."""
    settings = decode_settings({'tasks': tasks, 'data_root': str(data_root)})
    return prepare_evaluation(load_data(settings), Encoder(tokenizer), max_seq_len=max_seq_len)


class PieceTokenizer(CharacterTokenizer):
    """A tokenizer with a token for each word of up to six letters, with its space, and for every other character.

    It makes about as many tokens of the real files as a byte-level BPE with 50,000 entries, in a quarter of the time.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        special = [1] if add_special_tokens else []
        return {
            'input_ids': [
                special + [self.ids.setdefault(piece, len(self.ids) + 3) for piece in PIECES.findall(text)]
                for text in texts
            ]
        }


@pytest.fixture(scope='module')
def sample_rows() -> PlannedEvaluation:
    """Return the 57 tasks over the sample data; batches are small as there are about a thousand items."""
    return plan_evaluation(prepared(TASKS, ROOT / 'eval_data', CharacterTokenizer(), 512), tokens_per_batch=512)


@pytest.fixture(scope='module')
def real_rows() -> PreparedEvaluation:
    """Return all Gauntlet tasks whose real files are available."""
    data_root = ROOT.parent / 'shared/data/local_data'
    if not data_root.is_dir():
        pytest.skip('the real evaluation files (../shared/data/local_data) are not here')
    entries = [
        {**entry, 'dataset_uri': name}
        for entry in read_yaml(TASKS)['icl_tasks']
        for name in (entry['dataset_uri'], STAND_INS.get(entry['dataset_uri'], ''))
        if (data_root / name).is_file()
    ]
    assert len(entries) > 40
    return prepared(entries, data_root, PieceTokenizer(), 2048)


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


def test_ranks_have_equal_forwards_and_similar_tokens(sample_rows: PlannedEvaluation):
    """Mutations: units of a round in the order of ranks; rounds start with the cheapest; no forwards repeated."""
    found = spread_over_ranks(sample_rows.batches)
    assert all(one.above_mean < ABOVE_MEAN for one in found.values())
    assert found[2].waiting < 0.08
    assert found[8].waiting < 0.2
    assert found[64].waiting < 0.5


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
    assert above_mean(sample_rows.continuous_batches, 2) < ABOVE_MEAN


@pytest.mark.long
@pytest.mark.parametrize('device', ['cuda', 'cpu'])
def test_ranks_share_the_real_gauntlet_evenly(real_rows: PreparedEvaluation, device: str):
    """With the batch size that `tokens_per_batch: auto` chooses if memory is no limit."""
    tokens_per_batch = MOST_TOKENS[device]
    assert LEAST_BATCHES * tokens_per_batch * RANKS[-1] <= real_rows.num_tokens  # nothing is halved for so many ranks
    planned = plan_evaluation(real_rows, tokens_per_batch=tokens_per_batch)
    found = spread_over_ranks(planned.batches)
    assert all(one.above_mean < ABOVE_MEAN for one in found.values())
    assert all(one.repeated < 0.02 for one in found.values())
    most = {'cuda': (0.02, 0.04, 0.1), 'cpu': (0.06, 0.13, 0.23)}[device]
    assert all(found[num_ranks].waiting < limit for num_ranks, limit in zip(RANKS, most, strict=True))
    batches = planned.continuous_batches
    for num_ranks in RANKS:  # a batch is decoded by one rank
        assert above_mean(batches, num_ranks) < ABOVE_MEAN or len(batches) < 2 * num_ranks


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
