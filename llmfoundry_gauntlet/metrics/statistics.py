"""Estimates with their standard errors, clustered, and carried through every mean that is made of them.

The method is that of arXiv 2411.00640. An estimate keeps what each cluster of items adds to its deviation from what it
estimates. Whatever is linear in estimates (rescaling, means over categories, composites, differences of two runs) is
the same in these deviations, so that what has items in common, as a task that counts twice, is correlated as it should
be. Clusters have the same numbers wherever they appear. Sums are exact (`math.fsum`): no order of items changes a bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmfoundry_gauntlet.types import ItemResult, Measure, Spread

if TYPE_CHECKING:
    from llmfoundry_gauntlet.types import ClusterNumbers


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, whatever the order of the values."""
    return math.fsum(values) / len(values)


def mean_over_clusters(values: Sequence[float], clusters: ClusterNumbers) -> Measure:
    """The mean of the values of items, with the spread of their clusters: `clusters` has the number of each item's.

    A cluster's deviation is the sum of its items' deviations from the mean, over their number. As these use up a degree
    of freedom, the variance is that of the paper times G / (G - 1) for G clusters: for clusters of one item the usual
    error of a mean. A single cluster has no spread.
    """
    import numpy as np

    center = mean(values)
    numbers, places = np.unique(clusters, return_inverse=True)
    if len(numbers) < 2:
        return Measure(value=center)
    deviations = np.array(values, np.float64) - center
    if len(numbers) == len(values):
        sums = deviations[np.argsort(places)]
    else:
        members: list[list[float]] = [[] for _ in numbers]
        for place, deviation in zip(places.tolist(), deviations.tolist(), strict=True):
            members[place].append(deviation)
        sums = np.array([math.fsum(group) for group in members])
    scale = math.sqrt(len(numbers) / (len(numbers) - 1)) / len(values)
    return Measure(value=center, spread=Spread(clusters=numbers, deviations=sums * scale))


def weighted_sum(measures: Sequence[Measure], weights: Sequence[float], shift: float = 0.0) -> Measure:
    """`shift` and the sum of measures, which have values, each times its weight, and how that varies.

    The spread is not known where that of any measure is not.
    """
    import numpy as np

    value = math.fsum([shift, *(m.value * w for m, w in zip(measures, weights, strict=True) if m.value is not None)])
    spreads = [measure.spread for measure in measures]
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads) or not known:
        return Measure(value=value)
    numbers, places = np.unique(np.concatenate([spread.clusters for spread in known]), return_inverse=True)
    parts = [spread.deviations * weight for spread, weight in zip(known, weights, strict=True)]
    deviations = np.zeros(len(numbers))
    np.add.at(deviations, places, np.concatenate(parts))
    return Measure(value=value, spread=Spread(clusters=numbers, deviations=deviations))


def cluster_numbers(results: Sequence[ItemResult]) -> ClusterNumbers:
    """The number of each item's cluster, uint64 [N]; an item without one is a cluster by itself, all its samples."""
    import numpy as np

    return np.array([cluster_number(result) for result in results], np.uint64)


def cluster_number(result: ItemResult) -> int:
    """The number of an item's cluster, from its 16 hexadecimal digits."""
    if result.cluster:
        return int(result.cluster, 16)
    key = result.key
    digest = hashlib.sha256(repr((key.task, key.file, key.row)).encode())
    return int.from_bytes(digest.digest()[:8], 'big')
