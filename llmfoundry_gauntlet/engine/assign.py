"""Batches onto ranks. Pure, and free of torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from llmfoundry_gauntlet.engine.plan import PAIRS_PER_TOKEN, STREAM, Batch, pairs
from llmfoundry_gauntlet.values import Ids


def assign(batches: Sequence[Batch], *, num_ranks: int) -> list[list[Batch]]:
    """The forwards of each rank: spread by cost, the same number for every rank, the dearest batches first.

    Batches after the same kept prefix stay together, in shares of at most a quarter of a rank's work, and follow a
    batch that runs the prefix. Ranks that would have fewer forwards repeat a small one, so that all take part in every
    collective; what it gives a second time is the same by key.
    """
    if num_ranks < 1:
        raise ValueError(f'num_ranks is {num_ranks}; allowed: 1 or more')
    if not batches:
        return [[] for _ in range(num_ranks)]
    share = sum(batch.cost for batch in batches) / num_ranks / 4
    units = sorted(units_of(batches, share), key=lambda unit: -cost_of(unit))
    loads = [(0.0, rank) for rank in range(num_ranks)]
    chosen: list[list[list[Batch]]] = [[] for _ in range(num_ranks)]
    for unit in units:
        load, rank = heapq.heappop(loads)
        chosen[rank].append(unit)
        heapq.heappush(loads, (load + cost_of(unit), rank))
    ranks = [
        [batch for unit in sorted(merged(mine), key=lambda unit: -max(batch.cost for batch in unit)) for batch in unit]
        for mine in chosen
    ]
    fillers = [batch for unit in units for batch in unit if batch.prefix is None or not batch.trees]
    filler = min(fillers, key=lambda batch: batch.cost)
    longest = max(map(len, ranks))
    return [rank + [filler] * (longest - len(rank)) for rank in ranks]


def units_of(batches: Sequence[Batch], share: float) -> list[list[Batch]]:
    """Batches that a rank runs one after the other: single ones, or some after the same prefix, run first."""
    units: list[list[Batch]] = []
    for batch in batches:
        if batch.prefix is None:
            units.append([batch])
        elif units and units[-1][0].prefix is batch.prefix and cost_of(units[-1]) + batch.cost <= share:
            units[-1].append(batch)
        else:
            units.append([prefix_batch(batch.prefix), batch])
    return units


def merged(units: Sequence[list[Batch]]) -> list[list[Batch]]:
    """A rank's units, those after the same prefix as one, which runs it once."""
    after: dict[int, list[Batch]] = {}
    for unit in units:
        prefix = unit[0].prefix
        if prefix is not None and id(prefix) in after:
            after[id(prefix)].extend(unit[1:])
        else:
            after[id(unit[0] if prefix is None else prefix)] = list(unit)
    return list(after.values())


def prefix_batch(prefix: Ids) -> Batch:
    """The batch that runs a prefix, to be kept for those after it."""
    cost = len(prefix) + pairs(len(prefix), len(prefix), STREAM) / PAIRS_PER_TOKEN
    return Batch(layout=STREAM, trees=(), num_tokens=len(prefix), cost=cost, prefix=prefix)


def cost_of(unit: Sequence[Batch]) -> float:
    """Tokens' worth of work."""
    return sum(batch.cost for batch in unit)
