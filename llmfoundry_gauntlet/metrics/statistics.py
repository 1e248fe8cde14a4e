"""Estimates with clustered standard errors, carried through every mean and composite.

The method is that of arXiv 2411.00640. An estimate keeps the contribution of each cluster of items to its deviation.
Linear functions of estimates (rescaling, means over categories, composites, differences of runs) are the same functions
of these deviations, so estimates that share items, such as a task counted twice, are correlated correctly. A cluster
has the same number everywhere. Sums are exact (`math.fsum`): no order of items changes a bit.
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
    """Return the arithmetic mean, independent of the order of the values."""
    return math.fsum(values) / len(values)


def mean_over_clusters(values: Sequence[float], clusters: ClusterNumbers) -> Measure:
    """Return the mean of items' values with the spread of their clusters: `clusters` has the number of each item's.

    A cluster's deviation is the sum of its items' deviations from the mean, over the number of items. As these use up a
    degree of freedom, the variance is that of the paper times G / (G - 1) for G clusters: for clusters of one item the
    usual error of a mean. A single cluster has no spread.
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
    """Return `shift` plus the weighted sum of measures that have values, with its spread.

    The spread is unknown if that of any measure is.
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
    """Return the number of each item's cluster, uint64 [N]; an item without one is its own cluster."""
    import numpy as np

    return np.array([cluster_number(result) for result in results], np.uint64)


def cluster_number(result: ItemResult) -> int:
    """Return the number of an item's cluster, from its 16 hexadecimal digits."""
    if result.cluster:
        return int(result.cluster, 16)
    key = result.key
    digest = hashlib.sha256(repr((key.task, key.file, key.row)).encode())
    return int.from_bytes(digest.digest()[:8], 'big')
