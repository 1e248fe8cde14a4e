"""Estimates with clustered standard errors, carried through every mean and composite.

The method is that of arXiv 2411.00640. An estimate keeps the contribution of each cluster of items to its deviation.
Linear functions of estimates (rescaling, means over categories, composites, differences of runs) are the same functions
of these deviations, so estimates that share items, such as a task counted twice, are correlated correctly. A cluster
has the same number everywhere. Sums are exact (`math.fsum`): no order of items changes a bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.metrics.composites import weight
from llmfoundry_gauntlet.types import ItemResult, Measure, Spread

if TYPE_CHECKING:
    from llmfoundry_gauntlet.types import ClusterNumbers

STEPS = 60  # of a bisection
PRIOR = 8.0  # items, half of them right, that count beside those that were measured


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCosts:
    """Costs and spread of a task.

    `seconds` is the time per item, `share_right` the accuracy on `num_measured` items. At least `least` and at most
    `most` items are taken. `weight` is the effect of the task's accuracy on composites.
    """

    seconds: float
    share_right: float
    num_measured: int
    least: int
    most: int
    weight: float

    @property
    def deviation(self) -> float:
        """Return the standard deviation of an item's score, shrunk towards that of an even chance for little data."""
        right = (self.share_right * self.num_measured + PRIOR / 2) / (self.num_measured + PRIOR)
        return math.sqrt(right * (1 - right))


def allocate(tasks: Mapping[str, TaskCosts], seconds: float) -> dict[str, int]:
    """Return the number of items of each task that fit in the time together, or the least of each if that takes longer.

    The variance of a sum of accuracies falls most if items go where they reduce it most for their time: the number of
    items is proportional to weight times deviation over the square root of the seconds per item (Neyman allocation with
    costs), within the limits.
    """

    def sizes(scale: float) -> dict[str, int]:
        return {
            key: min(
                task.most, max(task.least, int(scale * task.weight * task.deviation / math.sqrt(task.seconds + 1e-9)))
            )
            for key, task in tasks.items()
        }

    def takes(chosen: Mapping[str, int]) -> float:
        return math.fsum(tasks[key].seconds * number for key, number in chosen.items())

    low, high = 0.0, 1.0
    while takes(sizes(high)) <= seconds and sizes(high) != {key: task.most for key, task in tasks.items()}:
        low, high = high, 2 * high
    if takes(sizes(high)) <= seconds:
        return sizes(high)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if takes(sizes(middle)) <= seconds else (low, middle)
    return sizes(low)


def influences(gauntlet: GauntletSpec | None, num_items: Mapping[str, int]) -> dict[str, float]:
    """Return the effect of each task's accuracy on composites: the root of the sum of squares over all composites.

    Tasks in no composite count like the mean of the others; without a gauntlet all count alike.
    """
    if gauntlet is None:
        return dict.fromkeys(num_items, 1.0)
    slopes: dict[str, dict[str, float]] = {}  # of each composite, by task
    for category in gauntlet.categories:
        there = [benchmark for benchmark in category.benchmarks if benchmark.key in num_items]
        weights = [weight(gauntlet.weighting, num_items[benchmark.key]) for benchmark in there]
        slopes[category.name] = {
            benchmark.key: one / sum(weights) / (1 - benchmark.random_baseline if gauntlet.rescale_accuracy else 1)
            for benchmark, one in zip(there, weights, strict=True)
        }
    for name, members in gauntlet.named_averages.items():
        of_members = [slopes.get(member, {}) for member in members]
        slopes[name] = {
            key: sum(part.get(key, 0.0) for part in of_members) / len(members) for key in set().union(*of_members)
        }
    held = sorted(set().union(*slopes.values()))
    found = {key: math.hypot(*(part.get(key, 0.0) for part in slopes.values())) for key in held}
    mean = math.hypot(*found.values()) / math.sqrt(len(found)) if found else 1.0
    return {key: found.get(key, mean) for key in num_items}
