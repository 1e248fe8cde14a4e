"""Balance of the Gauntlet's work over 2, 8 and 64 ranks: equal numbers of forwards, similar tokens, little waiting.

Composer makes all ranks wait for each other after every batch (`Trainer._iter_dataloader`), so an evaluation takes
as long as the costliest forward of every step. Each test prints what it measures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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

    num_steps: int
    above_mean: float
    waiting: float
    repeated: float


def spread_of(ranks: Sequence[Sequence[Batch]] | Sequence[Sequence[ContinuousBatch]]) -> Spread:
    """Return the shares of ranks, which must have equal numbers of parts."""
    assert len(set(map(len, ranks))) == 1
    tokens = np.array([[part.num_tokens for part in mine] for mine in ranks])
    costs = np.array([[part.cost for part in mine] for mine in ranks])
    once = {name_of(part): part.num_tokens for mine in ranks for part in mine}
    return Spread(
        num_steps=tokens.shape[1],
        above_mean=tokens.sum(axis=1).max() / tokens.sum(axis=1).mean() - 1,
        waiting=costs.max(axis=0).sum() / costs.mean(axis=0).sum() - 1,
        repeated=1 - sum(once.values()) / tokens.sum(),
    )


def name_of(part: Batch | ContinuousBatch) -> int:
    """Return a name that equal parts share; every rank makes its own batch for a prefix."""
    is_prefix = isinstance(part, Batch) and not part.trees
    return id(part.prefix if is_prefix else part)


def spread_over_ranks(batches: Sequence[Batch]) -> dict[int, Spread]:
    """Return and print the work of the batches for each number of ranks."""
    found = {}
    for num_ranks in RANKS:
        ranks = assign(batches, num_ranks=num_ranks)
        ran = {id(batch) for mine in ranks for batch in mine if batch.trees}
        assert ran == {id(batch) for batch in batches}
        found[num_ranks] = one = spread_of(ranks)
        print(
            f'{num_ranks:>3} ranks: {one.num_steps} forwards each, of {len(batches)} batches; tokens of the busiest '
            f'{one.above_mean:.2%} above the mean, {one.waiting:.1%} waiting, {one.repeated:.2%} of tokens repeated'
        )
    return found


def prepared(tasks: object, data_root: Path, tokenizer: object, max_seq_len: int) -> PreparedEvaluation:
    """Return all items of the tasks, including programs, which are generated but not run."""
    settings = decode_settings({'tasks': tasks, 'data_root': str(data_root)})
    return prepare_evaluation(load_data(settings), Encoder(tokenizer), max_seq_len=max_seq_len)


class PieceTokenizer:
    """A tokenizer with a token for each word of up to six letters, with its space, and for every other character.

    It makes about as many tokens of the real files as a byte-level BPE with 50,000 entries, in a quarter of the time.
    """

    eos_token_id = 2
    pad_token_id = 0

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __len__(self) -> int:
        return 50_000

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        special = [1] if add_special_tokens else []
        return {'input_ids': [special + [self.id(piece) for piece in PIECES.findall(text)] for text in texts]}

    def id(self, piece: str) -> int:
        """Return a token's own number, above those of special tokens."""
        return self.ids.setdefault(piece, len(self.ids) + 3)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return the text of token ids."""
        pieces = {number: piece for piece, number in self.ids.items()}
        return ''.join(pieces.get(number, '') for number in ids)


@pytest.fixture(scope='module')
def sample_rows() -> PlannedEvaluation:
    """Return the 57 tasks over the sample data; batches are small as there are about a thousand items."""
    from character_tokenizer import CharacterTokenizer

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
        print(f'{num_ranks} ranks: {mixed} of {len(steps)} steps are of prefixes on some ranks alone')
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


def test_ranks_get_equal_numbers_of_continuous_batches(sample_rows: PlannedEvaluation):
    """Work is estimated from lengths of prompts and generations; ranks wait for each other after each batch."""
    batches = sample_rows.continuous_batches
    ranks = assign_continuous_batches(batches, num_ranks=2)
    costs = [sum(batch.cost for batch in mine) for mine in ranks]
    print(f'{len(batches)} batches on 2 ranks: {max(costs) / np.mean(costs) - 1:.2%} above the mean')
    assert len(set(map(len, ranks))) == 1
    assert max(costs) / np.mean(costs) - 1 < ABOVE_MEAN


@pytest.mark.long
@pytest.mark.parametrize('device', ['cuda', 'cpu'])
def test_ranks_share_the_real_gauntlet_evenly(real_rows: PreparedEvaluation, device: str):
    """With the batch size that `tokens_per_batch: auto` chooses if memory is no limit."""
    tokens_per_batch = MOST_TOKENS[device]
    assert LEAST_BATCHES * tokens_per_batch * RANKS[-1] <= real_rows.num_tokens  # nothing is halved for so many ranks
    planned = plan_evaluation(real_rows, tokens_per_batch=tokens_per_batch)
    print(f'{device}: {len(planned.items):,} items, {planned.num_model_tokens:,} tokens, {tokens_per_batch} a batch')
    found = spread_over_ranks(planned.batches)
    assert all(one.above_mean < ABOVE_MEAN for one in found.values())
    assert all(one.repeated < 0.02 for one in found.values())
    most = {'cuda': (0.02, 0.04, 0.1), 'cpu': (0.06, 0.13, 0.23)}[device]
    assert all(found[num_ranks].waiting < limit for num_ranks, limit in zip(RANKS, most, strict=True))
    for num_ranks in RANKS:
        batches = planned.continuous_batches
        ranks = assign_continuous_batches(batches, num_ranks=num_ranks)
        costs = [sum(batch.cost for batch in mine) for mine in ranks]
        above = max(costs) / np.mean(costs) - 1
        print(f'{num_ranks:>3} ranks: {len(ranks[0])} of {len(batches)} batches each, {above:.1%} above the mean')
        assert len(set(map(len, ranks))) == 1
        assert above < ABOVE_MEAN or len(batches) < 2 * num_ranks  # a batch is decoded by one rank


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
