"""Assign planned batches to ranks and estimate their work. Pure; imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from llmfoundry_gauntlet.engine.plan import (
    PADDED_ROWS,
    PAIRS_PER_TOKEN,
    Batch,
    num_distinct_rows,
    pairs,
)
from llmfoundry_gauntlet.engine.trees import Tree, count_prefixes

SHARES = 16  # batches after one prefix are split over ranks beyond 1 / 16 of a rank's work


def assign(batches: Sequence[Batch], *, num_ranks: int) -> list[list[Batch]]:
    """Return the batches of each rank: about equal work, equally many, and similar ones at the same step.

    In Composer all ranks wait for each other after every batch, so a step takes as long as its costliest batch. The
    work is divided into rounds, the one with the costliest batch first; in each round the least loaded rank gets the
    costliest unit. Filler batches keep the number equal; their results have the same item keys and count once.
    """
    if num_ranks < 1:
        raise ValueError(f'num_ranks is {num_ranks}; allowed: 1 or more')
    # A single rank never splits what follows one prefix: it would only run the prefix again.
    max_cost = math.inf if num_ranks == 1 else unit_cost(batches) / num_ranks / SHARES
    rounds = rounds_of(units_of(batches, max_cost), num_ranks)
    rounds.sort(key=costliest_batch, reverse=True)
    loads = [0.0] * num_ranks
    ranks: list[list[Batch]] = [[] for _ in range(num_ranks)]
    for units in rounds:
        least_first = sorted(range(num_ranks), key=loads.__getitem__)
        costliest_first = sorted(units, key=unit_cost, reverse=True)
        for rank, unit in zip(least_first, costliest_first, strict=True):
            ranks[rank] += unit
            loads[rank] += unit_cost(unit)
    return ranks


def units_of(batches: Sequence[Batch], max_cost: float) -> list[list[Batch]]:
    """Return units of batches that a rank runs in sequence: single batches, or a prefix and batches that follow it."""
    units: list[list[Batch]] = []
    for batch in batches:
        if batch.prefix is None:
            units.append([batch])
            continue
        follows = bool(units) and units[-1][0].prefix is batch.prefix
        if follows and unit_cost(units[-1]) + batch.cost <= max_cost:
            units[-1].append(batch)
        else:
            units.append([prefix_batch(batch), batch])
    return units


def rounds_of(units: Sequence[list[Batch]], num_ranks: int) -> list[list[list[Batch]]]:
    """Return rounds with one unit per rank, equal in forwards within a round and similar in cost.

    A shorter unit is extended with single batches of about the same cost as those of the other ranks at that step and,
    once there are none left, with repetitions of its prefix. A rank without a unit repeats the cheapest batch.
    """
    if not units:
        return []
    first_batches = [unit[0] for unit in units]
    filler = min(first_batches, key=batch_cost)
    single = sorted((batch for batch in first_batches if batch.prefix is None), key=batch_cost)
    cached = [unit for unit in units if unit[0].prefix is not None]
    # Units with prefixes come first: they take the single batches that fit them.
    with_prefixes = rounds_of_prefixes(cached, single, filler, num_ranks)
    return [*with_prefixes, *rounds_of_single(single, filler, num_ranks)]


def rounds_of_prefixes(
    units: list[list[Batch]], single: list[Batch], filler: Batch, num_ranks: int
) -> list[list[list[Batch]]]:
    """Return rounds of units that begin with a prefix; batches to fill them up are taken from `single`."""
    # Neighbours are alike in length and in their last batches; the others of a unit are full.
    units = sorted(units, key=lambda unit: (-len(unit), -unit[-1].cost))
    rounds = []
    for start in range(0, len(units), num_ranks):
        of_round = units[start : start + num_ranks]
        longest, shortest = of_round[0], of_round[-1]
        while len(of_round) < num_ranks:
            of_round.append([filler, take_batch(single, shortest[-1].cost, filler)])
        rounds.append([lengthened(unit, longest, single) for unit in of_round])
    return rounds


def rounds_of_single(single: Sequence[Batch], filler: Batch, num_ranks: int) -> list[list[list[Batch]]]:
    """Return rounds of single batches, which are sorted by cost: the costliest first."""
    costliest_first = single[::-1]
    rounds = []
    for start in range(0, len(costliest_first), num_ranks):
        of_round = [[batch] for batch in costliest_first[start : start + num_ranks]]
        of_round += [[filler]] * (num_ranks - len(of_round))
        rounds.append(of_round)
    return rounds


def lengthened(unit: Sequence[Batch], pattern: Sequence[Batch], single: list[Batch]) -> list[Batch]:
    """Return the unit with as many forwards as `pattern`, extended before its last with batches taken from `single`."""
    missing = pattern[len(unit) - 1 : -1]
    further = [take_batch(single, batch.cost, unit[0]) for batch in missing]
    return [*unit[:-1], *further, unit[-1]]


def take_batch(single: list[Batch], cost: float, otherwise: Batch) -> Batch:
    """Remove and return the costliest batch of at most this cost, else the cheapest; `otherwise` if there is none."""
    if not single:
        return otherwise
    num_cheaper = bisect_right(single, cost, key=batch_cost)
    return single.pop(max(0, num_cheaper - 1))


def prefix_batch(batch: Batch) -> Batch:
    """Return the batch that runs and caches the prefix of another."""
    length = 0 if batch.prefix is None else len(batch.prefix)
    cost = length + pairs(length, length) / PAIRS_PER_TOKEN
    return replace(batch, trees=(), num_tokens=length, cost=cost)


def unit_cost(unit: Sequence[Batch]) -> float:
    """Return the cost of a unit in tokens."""
    return sum(batch.cost for batch in unit)


def batch_cost(batch: Batch) -> float:
    """Return the cost of a batch in tokens."""
    return batch.cost


def costliest_batch(units: Sequence[Sequence[Batch]]) -> float:
    """Return the cost of the costliest batch of some units."""
    return max(batch.cost for unit in units for batch in unit)


def scored_tokens(batches: Sequence[Batch]) -> Counter[str]:
    """Return the input tokens of scoring by task; a cached prefix counts once."""
    num_tokens: Counter[str] = Counter()
    prefix = None
    for batch in batches:
        if batch.prefix is not None and batch.prefix is not prefix:
            num_tokens[batch.requests[0].key.task] += len(batch.prefix)
        prefix = batch.prefix
        for task, count in tokens_of_batch(batch):
            num_tokens[task] += count
    return num_tokens


def tokens_of_batch(batch: Batch) -> Iterator[tuple[str, int]]:
    """Yield the tokens of a batch by task, in parts that add up to `num_tokens`."""
    if batch.layout == PADDED_ROWS:
        width = max(tree.num_tokens for tree in batch.trees)
        for request in batch.requests:
            yield request.key.task, num_distinct_rows(request, batch.padded_to) * width
        return
    for tree in batch.trees:
        yield from tokens_of_tree(tree)


def tokens_of_tree(tree: Tree) -> Iterator[tuple[str, int]]:
    """Yield the tokens of a tree by task: those that it adds to the requests before it."""
    spans_of_tasks = []  # adjacent requests of one task: where they start and end
    end = 0
    for task, requests in groupby(tree.requests, key=lambda request: request.key.task):
        start, end = end, end + len(list(requests))
        spans_of_tasks.append((task, start, end))
    # From the last on, so that the first gets the rest: a tree of one task, as most are, is not counted again.
    num_left = tree.num_tokens
    for task, start, end in reversed(spans_of_tasks[1:]):
        num_added = count_prefixes(tree.requests[:end]) - count_prefixes(tree.requests[:start])
        yield task, num_added
        num_left -= num_added
    yield spans_of_tasks[0][0], num_left
