"""Compute clustered standard errors and propagate them through every mean and composite.

The method is that of arXiv 2411.00640 with a jackknife over clusters. An estimate keeps the contribution of each
cluster of items to its deviation. Linear functions of estimates (rescaling, means over categories, composites,
differences of runs) apply to these deviations as well, so estimates that share items, such as a task counted twice,
are correlated correctly. A cluster has the same number everywhere. Sums are exact (`math.fsum`), so results do not
depend on the order of items.

Intervals and p-values use Student's t with the effective degrees of freedom: fewer than clusters if these are few or
uneven (Carter, Schnepel and Steigerwald 2017), and Satterthwaite's (1946) for a sum. The interval of a share is
Wilson's with the effective number of items, so that it is not empty at 0 and 1; that of a sum is combined from those
of its parts (Zou and Donner 2008).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmfoundry_gauntlet.types import ItemResult, Measure, Spread, Stratum

if TYPE_CHECKING:
    from llmfoundry_gauntlet.types import ClusterNumbers, Floats, Ints

CONFIDENCE = 0.95  # of intervals
NORMAL_QUANTILE = 1.959963984540054  # of a 95 % interval
Bounds = tuple[float, float]  # the lowest and the highest possible value
UNBOUNDED: Bounds = (-math.inf, math.inf)
SHARE: Bounds = (0.0, 1.0)
# Values that differ by less than this, relative to the largest of the numbers they were computed from, are equal.
ROUNDING = 1e-14


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, independent of the order of the values."""
    return math.fsum(values) / len(values)


def mean_over_clusters(
    values: Sequence[float],
    clusters: ClusterNumbers,
    *,
    stratum: str = '',
    task: str = '',
    bounds: Bounds = UNBOUNDED,
) -> Measure:
    """Return the mean of items' values with its spread; `clusters` has the number of each item's cluster.

    A cluster's deviation is the change of the mean without it (jackknife): e / (N - n) * sqrt((G - 1) / G) for its n of
    N items, with the sum e of their deviations from the mean, and G clusters. For clusters of the same size, the error
    is the paper's times sqrt(G / (G - 1)). For a single cluster of several items it is the standard deviation of an
    item, as if the items were fully correlated; for a single item it is unknown. Values are within the `bounds`.
    """
    import numpy as np

    center = mean(values)
    numbers, places, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    if len(values) < 2:
        return Measure(value=center)
    magnitude = max(map(abs, values))
    deviations = without_rounding(np.array(values, np.float64) - center, magnitude)
    if len(numbers) < 2:
        alone = Stratum(
            name=stratum,
            task=task,
            clusters=np.sort(numbers[0] + np.arange(len(values), dtype=np.uint64)),
            deviations=deviations / math.sqrt(len(values) - 1),
            freedom=1.0,
            is_borrowed=True,
        )
        return Measure(value=center, spread=spread_of_mean(alone, center, 1.0, bounds))
    if len(numbers) == len(values):
        sums = deviations[np.argsort(places)]
    else:
        members: list[list[float]] = [[] for _ in numbers]
        for place, deviation in zip(places.tolist(), deviations.tolist(), strict=True):
            members[place].append(deviation)
        sums = without_rounding(np.array([math.fsum(group) for group in members]), magnitude * sizes.astype(np.float64))
    num_effective = len(values) ** 2 / math.fsum((sizes.astype(np.float64) ** 2).tolist())
    found = Stratum(
        name=stratum,
        task=task,
        clusters=numbers,
        deviations=sums / (len(values) - sizes) * math.sqrt((len(numbers) - 1) / len(numbers)),
        freedom=max(1.0, num_effective - 1),
    )
    return Measure(value=center, spread=spread_of_mean(found, center, num_effective, bounds))


def without_rounding(values: Floats, magnitude: float | Floats) -> Floats:
    """Return the values with 0 for those that are only the rounding error of numbers of this magnitude."""
    import numpy as np

    return np.where(np.abs(values) <= ROUNDING * magnitude, 0.0, values)


def spread_of_mean(stratum: Stratum, value: float, num_effective: float, bounds: Bounds) -> Spread:
    """Return the spread of a mean over the clusters of a stratum, equivalent to `num_effective` even clusters.

    A mean of values with two bounds is treated as a share of the way from the lower to the upper one. For a share
    without variation, such as 0 of 100 items, the error on either side is that of Wilson's interval.
    """
    spread = replace(spread_of([stratum]), bounds=bounds)
    lowest, highest = bounds
    width = highest - lowest
    if math.isinf(width):
        return spread
    share, error = (value - lowest) / width, spread.standard_error / width
    varies = error > 0 and 0 < share < 1
    num_items = share * (1 - share) / error**2 if varies else num_effective
    low, high = wilson(share, num_items, NORMAL_QUANTILE)
    below, above = (share - low) / NORMAL_QUANTILE, (high - share) / NORMAL_QUANTILE
    return replace(
        spread,
        below=width * (error if varies else max(error, below)),
        above=width * (error if varies else max(error, above)),
        num_items=None if stratum.is_borrowed else num_items,
    )


def wilson(share: float, num_items: float, quantile: float) -> tuple[float, float]:
    """Return the ends of Wilson's interval of a share of independent items."""
    weight = quantile**2 / num_items
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * share * (1 - share) + weight**2 / 4) / (1 + weight)
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def spread_of(strata: Sequence[Stratum]) -> Spread:
    """Return the spread of a sum of strata, which may share clusters."""
    variances, variance = parts_of_variance(strata)
    error = math.sqrt(variance)
    return Spread(
        strata=tuple(strata),
        standard_error=error,
        freedom=freedom_of_sum(variances, [one.freedom for one in strata]),
        below=error,
        above=error,
    )


def parts_of_variance(strata: Sequence[Stratum]) -> tuple[list[float], float]:
    """Return each stratum's part of the variance of their sum, including covariances, and the variance."""
    import numpy as np

    deviations = np.concatenate([one.deviations for one in strata])
    _, places, totals = sums_by_cluster(np.concatenate([one.clusters for one in strata]), deviations)
    variance = math.fsum((totals**2).tolist())
    ends = np.cumsum([0, *(len(one.clusters) for one in strata)])
    parts = deviations * totals[places]
    return [float(parts[begin:end].sum()) for begin, end in itertools.pairwise(ends)], variance


def sums_by_cluster(clusters: ClusterNumbers, deviations: Floats) -> tuple[ClusterNumbers, Ints, Floats]:
    """Return the distinct clusters, the place of each given cluster among them, and the sum of each one's deviations.

    Deviations that cancel but for rounding have the sum 0.
    """
    import numpy as np

    numbers, places = np.unique(clusters, return_inverse=True)
    sums, magnitudes = np.zeros(len(numbers)), np.zeros(len(numbers))
    np.add.at(sums, places, deviations)
    np.add.at(magnitudes, places, np.abs(deviations))
    return numbers, places, without_rounding(sums, magnitudes)


def freedom_of_sum(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Return the degrees of freedom of a sum of variances (Satterthwaite 1946); for a sum of 0, that of `freedoms`."""
    uncertain = math.fsum(variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True))
    return math.fsum(variances) ** 2 / uncertain if uncertain > 0 else math.fsum(freedoms)


def weighted_sum(measures: Sequence[Measure], weights: Sequence[float], shift: float = 0.0) -> Measure:
    """Return `shift` plus the weighted sum of measures that have values, with its spread.

    The spread is unknown if that of any measure is. A single measure keeps its interval, on the new scale.
    """
    value = math.fsum([shift, *(m.value * w for m, w in zip(measures, weights, strict=True) if m.value is not None)])
    known = [
        (measure.spread, weight)
        for measure, weight in zip(measures, weights, strict=True)
        if measure.spread is not None
    ]
    if len(known) < len(measures) or not known:
        return Measure(value=value)
    strata = [scaled(stratum, weight) for part, weight in known for stratum in part.strata]
    spread = spread_of(merge_strata(strata))
    independent = math.fsum((weight * part.standard_error) ** 2 for part, weight in known)
    shared = spread.standard_error / math.sqrt(independent) if independent > 0 else 1.0
    sides, bounds = [], []
    for part, weight in known:
        ends = ((part.below, part.bounds[0]), (part.above, part.bounds[1]))
        (below, low), (above, high) = ends if weight > 0 else ends[::-1]
        sides.append((weight * below, weight * above))
        bounds.append((weight * low, weight * high) if weight else (0.0, 0.0))
    num_items = known[0][0].num_items if len(known) == 1 and known[0][1] else None
    return Measure(
        value=value,
        spread=replace(
            spread,
            below=shared * math.hypot(*(below for below, _ in sides)),
            above=shared * math.hypot(*(above for _, above in sides)),
            bounds=(shift + sum(low for low, _ in bounds), shift + sum(high for _, high in bounds)),
            num_items=num_items,
        ),
    )


def mean_over_categories(
    measures: Mapping[str, Measure],
    clusters: Mapping[str, int],
    *,
    stratum: str = '',
    bounds: Bounds,
) -> Measure:
    """Return the plain mean over a fixed set of categories; `clusters` has the number of one cluster of each.

    Categories with a single cluster borrow their errors from the distance of each mean from that of all other
    categories (collapsed strata; Cochran 1977, section 5A.12). This is conservative, as categories differ.
    """
    import numpy as np

    values = {name: one.value for name, one in measures.items() if one.value is not None}
    alone = [name for name, one in measures.items() if one.spread is None or one.spread.strata[0].is_borrowed]
    plain = weighted_sum(list(measures.values()), [1 / len(measures)] * len(measures))
    if not alone or len(measures) < 2:
        return plain
    magnitude = max(map(abs, values.values()))
    distances: dict[int, float] = {}  # by cluster, which categories may share
    for name in alone:
        distance = values[name] - mean([value for other, value in values.items() if other != name])
        if abs(distance) <= ROUNDING * magnitude:
            distance = 0.0
        distances[clusters[name]] = distances.get(clusters[name], 0.0) + distance
    numbers = sorted(distances)
    collapsed = Stratum(
        task=stratum,
        name=f'{stratum}: categories of one cluster: {", ".join(alone)}',
        clusters=np.array(numbers, np.uint64),
        deviations=np.array([distances[number] for number in numbers]) / len(alone),
        freedom=max(1, len(alone) - 1),
        is_borrowed=True,
    )
    center = mean([values[name] for name in alone])
    together = Measure(value=center, spread=spread_of_mean(collapsed, center, len(alone), bounds))
    others = [one for name, one in measures.items() if name not in alone]
    weights = [1 / len(measures)] * len(others)
    found = weighted_sum([*others, together], [*weights, len(alone) / len(measures)])
    return replace(found, value=plain.value)  # bit-identical to the plain mean


def merge_strata(strata: Iterable[Stratum]) -> list[Stratum]:
    """Merge strata with the same name: their deviations are added by cluster."""
    import numpy as np

    groups: dict[str, list[Stratum]] = {}
    for stratum in strata:
        groups.setdefault(stratum.name, []).append(stratum)
    found = []
    for members in groups.values():
        if len(members) > 1:
            clusters = np.concatenate([one.clusters for one in members])
            numbers, _, deviations = sums_by_cluster(clusters, np.concatenate([one.deviations for one in members]))
            members = [
                replace(
                    members[0],
                    clusters=numbers,
                    deviations=deviations,
                    freedom=min(one.freedom for one in members),
                    is_borrowed=any(one.is_borrowed for one in members),
                )
            ]
        found += members
    return found


def scaled(stratum: Stratum, weight: float) -> Stratum:
    """Return the contribution of a stratum to an estimate with this weight."""
    return replace(stratum, deviations=stratum.deviations * weight)


def variance_shares(measure: Measure) -> dict[str, float]:
    """Return the share of each task in the variance of a composite, the largest first; {} without a variance.

    They sum to 1; tasks that share sources each count half of the variance that these have in common.
    """
    strata = () if measure.spread is None else measure.spread.strata
    parts, variance = parts_of_variance(strata) if strata else ([], 0.0)
    if variance == 0:
        return {}
    found: dict[str, float] = {}
    for stratum, part in zip(strata, parts, strict=True):
        found[stratum.task] = found.get(stratum.task, 0.0) + part / variance
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def interval(measure: Measure) -> tuple[float, float] | None:
    """Return the 95 % confidence interval, None without a spread."""
    if measure.value is None or measure.spread is None:
        return None
    spread, quantile = measure.spread, student_quantile(measure.spread.freedom)
    lowest, highest = spread.bounds
    if spread.num_items is not None:
        width = highest - lowest
        share = min(max((measure.value - lowest) / width, 0.0), 1.0)  # rounding may take it past an end
        # Without variation among the items, no variance is estimated.
        low, high = wilson(share, spread.num_items, quantile if spread.standard_error > 0 else NORMAL_QUANTILE)
        return lowest + width * low, lowest + width * high
    low, high = measure.value - quantile * spread.below, measure.value + quantile * spread.above
    return max(low, lowest), min(high, highest)


@functools.lru_cache(maxsize=10_000)
def student_quantile(freedom: float, probability: float = (1 + CONFIDENCE) / 2) -> float:
    """Return a quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def student_tail(value: float, freedom: float) -> float:
    """Return the probability of a value of Student's t that is at least this far from 0."""
    from scipy.special import stdtr

    return float(2 * stdtr(freedom, -abs(value)))


def cluster_numbers(results: Sequence[ItemResult]) -> ClusterNumbers:
    """Return each item's cluster number, uint64 [N]; an item without a cluster is its own."""
    import numpy as np

    return np.array([cluster_number(result) for result in results], np.uint64)


def cluster_number(result: ItemResult) -> int:
    """Return the number of an item's cluster, from its 16 hexadecimal digits, or of the row, which is its own."""
    if result.cluster:
        return int(result.cluster, 16)
    key = result.key
    digest = hashlib.sha256(repr((key.task, key.file, key.row)).encode())
    return int.from_bytes(digest.digest()[:8], 'big')
