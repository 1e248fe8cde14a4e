"""Share out planned work to ranks, and estimate it. Pure, and free of torch."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from llmfoundry_gauntlet.engine.plan import (
    PADDED_ROWS,
    PAIRS_PER_TOKEN,
    Batch,
    ContinuousBatch,
    num_distinct_rows,
    pairs,
)
from llmfoundry_gauntlet.engine.trees import Tree, count_prefixes
from llmfoundry_gauntlet.types import Generation

SHARES = 16  # of a rank's work: batches after one prefix that are more are shared out


def assign(batches: Sequence[Batch], *, num_ranks: int) -> list[list[Batch]]:
    """Return the forwards of each rank: about the same work, equally many, and similar ones at the same step.

    Composer has all ranks wait for each other after every batch, so a step takes as long as its costliest batch. Ranks
    go from round to round together, the round with the costliest batch first; in each, the rank that has had least
    gets the unit that costs most. What a rank repeats, so that all take part in every collective, is the same by key.
    """
    if num_ranks < 1:
        raise ValueError(f'num_ranks is {num_ranks}; allowed: 1 or more')
    share = math.inf if num_ranks == 1 else cost_of(batches) / num_ranks / SHARES
    rounds = rounds_of(units_of(batches, share), num_ranks)
    loads = [0.0] * num_ranks
    ranks: list[list[Batch]] = [[] for _ in range(num_ranks)]
    for units in sorted(rounds, key=lambda units: -max(batch.cost for unit in units for batch in unit)):
        least_first = sorted(range(num_ranks), key=loads.__getitem__)
        for rank, unit in zip(least_first, sorted(units, key=lambda unit: -cost_of(unit)), strict=True):
            ranks[rank] += unit
            loads[rank] += cost_of(unit)
    return ranks


def units_of(batches: Sequence[Batch], share: float) -> list[list[Batch]]:
    """Return batches that a rank runs one after the other: single ones, or some after the same prefix, run first."""
    units: list[list[Batch]] = []
    for batch in batches:
        if batch.prefix is None:
            units.append([batch])
        elif units and units[-1][0].prefix is batch.prefix and cost_of(units[-1]) + batch.cost <= share:
            units[-1].append(batch)
        else:
            units.append([prefix_batch(batch), batch])
    return units


def rounds_of(units: Sequence[list[Batch]], num_ranks: int) -> list[list[list[Batch]]]:
    """Return rounds with a unit for every rank, all of a round with as many forwards, and as similar as can be.

    A shorter unit gets single batches that cost about as much as those of the others at that step, while there are any.
    Then it runs its prefix again; a rank without any unit runs the cheapest forward of all.
    """
    if not units:
        return []
    filler = min((unit[0] for unit in units), key=lambda batch: batch.cost)
    single = sorted((unit[0] for unit in units if unit[0].prefix is None), key=lambda batch: batch.cost)
    cached = [unit for unit in units if unit[0].prefix is not None]
    cached.sort(key=lambda unit: (-len(unit), -unit[-1].cost))  # one of few batches is full but for the last
    rounds = []
    for start in range(0, len(cached), num_ranks):
        mine = cached[start : start + num_ranks]
        spare = [[filler, closest(single, mine[-1][-1].cost, filler)] for _ in range(num_ranks - len(mine))]
        rounds.append([lengthened(unit, mine[0], single) for unit in mine + spare])
    single.reverse()
    for start in range(0, len(single), num_ranks):
        alone = [[batch] for batch in single[start : start + num_ranks]]
        rounds.append(alone + [[filler]] * (num_ranks - len(alone)))
    return rounds


def lengthened(unit: Sequence[Batch], pattern: Sequence[Batch], single: list[Batch]) -> list[Batch]:
    """Return the unit with as many forwards as `pattern`, by further ones before its last, taken out of `single`."""
    further = [closest(single, batch.cost, unit[0]) for batch in pattern[len(unit) - 1 : -1]]
    return [*unit[:-1], *further, unit[-1]]


def closest(single: list[Batch], cost: float, otherwise: Batch) -> Batch:
    """Take the costliest batch of at most this cost, or the cheapest; `otherwise` if there is none."""
    return single.pop(max(0, bisect_right(single, cost, key=lambda batch: batch.cost) - 1)) if single else otherwise


def prefix_batch(batch: Batch) -> Batch:
    """Return the batch that runs the prefix of another, to be cached for those after it."""
    length = 0 if batch.prefix is None else len(batch.prefix)
    cost = length + pairs(length, length) / PAIRS_PER_TOKEN
    return replace(batch, trees=(), num_tokens=length, cost=cost)


def cost_of(unit: Sequence[Batch]) -> float:
    """Return the cost of a unit in tokens."""
    return sum(batch.cost for batch in unit)


def assign_continuous_batches(batches: Sequence[ContinuousBatch], *, num_ranks: int) -> list[list[ContinuousBatch]]:
    """Return the continuous batches of each rank, by cost, the costliest first; empty ones make numbers equal."""
    loads = [(0.0, rank) for rank in range(num_ranks)]
    ranks: list[list[ContinuousBatch]] = [[] for _ in range(num_ranks)]
    for batch in sorted(batches, key=lambda batch: -batch.cost):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(batch)
        heapq.heappush(loads, (load + batch.cost, rank))
    empty = ContinuousBatch(requests=(), num_slots=1, tokens_per_batch=1)
    longest = max(map(len, ranks))
    return [mine + [empty] * (longest - len(mine)) for mine in ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEstimate:
    """The work of one task.

    `num_tokens` are those of contexts, choices and prompts, each distinct prefix once, as the model is given them; a
    prefix of several tasks counts for the first of them. `reply_tokens` are the most that can be generated.
    """

    task: str
    num_items: int
    num_tokens: int
    generation_tokens: int
    num_truncated: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated cost of an evaluation. Its `seconds` by part add up to those of the tasks.

    `preparing_seconds` is what reading data and loading the model took; a real run spends it as well, before the
    evaluation. `notes` say how the rest was estimated.
    """

    tasks: tuple[TaskEstimate, ...]
    seconds: Mapping[str, float]
    preparing_seconds: float
    num_ranks: int
    notes: tuple[str, ...]

    @property
    def total_seconds(self) -> float:
        """Return the seconds of the evaluation itself."""
        return sum(self.seconds.values())


def scored_tokens(batches: Sequence[Batch]) -> Counter[str]:
    """Return the tokens that the model is given to score, by task; a cached prefix counts once."""
    found: Counter[str] = Counter()
    prefix = None
    for batch in batches:
        if batch.prefix is not None and batch.prefix is not prefix:
            found[batch.requests[0].key.task] += len(batch.prefix)
        prefix = batch.prefix
        for task, count in tokens_of_batch(batch):
            found[task] += count
    return found


def tokens_of_batch(batch: Batch) -> Iterator[tuple[str, int]]:
    """Yield the tokens of a batch by task, in parts; they add up to its own."""
    if batch.layout == PADDED_ROWS:
        width = max(tree.num_tokens for tree in batch.trees)
        for request in batch.requests:
            yield request.key.task, num_distinct_rows(request) * width
        return
    for tree in batch.trees:
        yield from tokens_of_tree(tree)


def tokens_of_tree(tree: Tree) -> Iterator[tuple[str, int]]:
    """Yield the tokens of a tree by task: what is added to those of the requests before."""
    parts = [(task, len(list(requests))) for task, requests in groupby(tree.requests, lambda request: request.key.task)]
    rest = tree.num_tokens
    for place in range(len(parts) - 1, 0, -1):
        task, size = parts[place]
        num_before = sum(count for _, count in parts[:place])
        added = count_prefixes(tree.requests[: num_before + size]) - count_prefixes(tree.requests[:num_before])
        yield task, added
        rest -= added
    yield parts[0][0], rest


def prompt_tokens(batches: Sequence[ContinuousBatch]) -> Counter[str]:
    """Return the tokens of the prompts to generate for, by task; equal prompts of a batch count once."""
    found: Counter[str] = Counter()
    for batch in batches:
        prompts = {request.context.tobytes(): request for request in reversed(batch.requests)}
        for request in prompts.values():
            found[request.key.task] += len(request.context)
    return found


def expected_tokens(generations: Sequence[Generation], most: int) -> float:
    """Return the expected length of a generation of at most `most` tokens, as likely to end at each token as these.

    Truncated ones count only as not having ended so far.
    """
    num_ended = sum(not generation.is_truncated for generation in generations)
    num_tokens = sum(generation.num_tokens or 0 for generation in generations)
    if not num_ended or not num_tokens:
        return float(most)
    share = num_ended / num_tokens
    return (1 - (1 - share) ** most) / share
