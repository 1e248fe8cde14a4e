"""Batches onto ranks. Pure, and free of torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from llmfoundry_gauntlet.engine.plan import PAIRS_PER_TOKEN, STREAM, Batch, pairs

SHARES = 16  # of a rank's work: batches after one prefix that are more are shared out


def assign(batches: Sequence[Batch], *, num_ranks: int) -> list[list[Batch]]:
    """The forwards of each rank: about the same work, equally many, and like ones at the same step.

    Composer has all ranks wait for each other after every batch, so the dearest of a step is what it takes. Ranks go
    from round to round together, the round with the dearest batch first; in each, the rank that has had least gets
    the unit that is most. What a rank repeats, so that all take part in every collective, is the same by key.
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
    """Batches that a rank runs one after the other: single ones, or some after the same prefix, run first."""
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
    """A unit for every rank in each round, all of a round with as many forwards, and as like as can be.

    What is too short gets single batches, as dear as those of the others at that step, while there are any. Then it
    runs its prefix again; a rank without any unit runs the cheapest forward of all.
    """
    if not units:
        return []
    filler = min((unit[0] for unit in units), key=lambda batch: batch.cost)
    single = sorted((unit[0] for unit in units if unit[0].prefix is None), key=lambda batch: batch.cost)
    kept = [unit for unit in units if unit[0].prefix is not None]
    kept.sort(key=lambda unit: (-len(unit), -unit[-1].cost))  # one of few batches is full but for the last
    rounds = []
    for start in range(0, len(kept), num_ranks):
        mine = kept[start : start + num_ranks]
        spare = [[filler, closest(single, mine[-1][-1].cost, filler)] for _ in range(num_ranks - len(mine))]
        rounds.append([lengthened(unit, mine[0], single) for unit in mine + spare])
    single.reverse()
    for start in range(0, len(single), num_ranks):
        alone = [[batch] for batch in single[start : start + num_ranks]]
        rounds.append(alone + [[filler]] * (num_ranks - len(alone)))
    return rounds


def lengthened(unit: Sequence[Batch], pattern: Sequence[Batch], single: list[Batch]) -> list[Batch]:
    """The unit with as many forwards as `pattern`, by further ones before its last, taken out of `single`."""
    further = [closest(single, batch.cost, unit[0]) for batch in pattern[len(unit) - 1 : -1]]
    return [*unit[:-1], *further, unit[-1]]


def closest(single: list[Batch], cost: float, otherwise: Batch) -> Batch:
    """Takes the dearest batch of at most this cost, or the cheapest; `otherwise` where there is none."""
    return single.pop(max(0, bisect_right(single, cost, key=lambda batch: batch.cost) - 1)) if single else otherwise


def prefix_batch(batch: Batch) -> Batch:
    """The batch that runs the prefix of another, to be kept for those after it."""
    length = 0 if batch.prefix is None else len(batch.prefix)
    cost = length + pairs(length, length, STREAM) / PAIRS_PER_TOKEN
    return replace(batch, trees=(), num_tokens=length, cost=cost)


def cost_of(unit: Sequence[Batch]) -> float:
    """Tokens' worth of work."""
    return sum(batch.cost for batch in unit)
