"""Compute clustered standard errors and propagate them through every mean and composite.

The method is that of arXiv 2411.00640 with a jackknife over clusters. An estimate keeps the contribution of each
cluster of items to its deviation. Linear functions of estimates (rescaling, means over categories, composites,
differences of runs) apply to these deviations as well, so estimates that share items, such as a task counted twice,
are correlated correctly. A cluster has the same number everywhere. Sums are exact (`math.fsum`), so results do not
depend on the order of items.

Intervals and p-values use Student's t with the effective degrees of freedom: fewer than clusters if these are few or
uneven, and Satterthwaite's (1946) for a sum. For uneven clusters they are those of Carter, Schnepel and Steigerwald
(2017) in the case that items of a cluster are alike and clusters vary equally, which is conservative. The interval of a
share is Wilson's with the number of independent items that have its error, as of a survey (Korn and Graubard 1998), so
that it is not empty at 0 and 1; that of a sum is combined from those of its parts (Zou and Donner 2008).
docs/statistics.md derives them.
"""

from __future__ import annotations

import functools
import hashlib
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
RARE_ITEMS = 2.0  # items of the rarer outcome as much as which the variance of independent items counts
# Values that differ by less than this, relative to the largest of the numbers they were computed from, are equal.
ROUNDING = 1e-12


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
    center = mean(values)
    if len(values) < 2:
        return Measure(value=center)
    magnitude = max(map(abs, values))
    deviations = deviations_from(center, values, magnitude)
    if (clusters == clusters[0]).all():
        the_stratum, num_effective = stratum_of_one_cluster(deviations, clusters), 1.0
    else:
        the_stratum, num_effective = stratum_of_clusters(deviations, clusters, magnitude)
    named = replace(the_stratum, name=stratum, task=task)
    return Measure(value=center, spread=spread_of_mean(named, center, num_effective, bounds))


def deviations_from(center: float, values: Sequence[float], magnitude: float) -> Floats:
    """Return the distance of each value from the center."""
    import numpy as np

    return without_rounding(np.array(values, np.float64) - center, magnitude)


def stratum_of_one_cluster(deviations: Floats, clusters: ClusterNumbers) -> Stratum:
    """Return the stratum of items of a single cluster, which deviate as much as one of them."""
    import numpy as np

    num_items = len(deviations)
    # Each item has a number of its own, near that of the cluster.
    numbers = np.sort(clusters[0] + np.arange(num_items, dtype=np.uint64))
    return Stratum(
        name='',
        clusters=numbers,
        deviations=deviations / math.sqrt(num_items - 1),
        freedom=1.0,
        is_borrowed=True,
    )


def stratum_of_clusters(deviations: Floats, clusters: ClusterNumbers, magnitude: float) -> tuple[Stratum, float]:
    """Return the stratum of items in several clusters, and the number of even clusters that it is worth."""
    import numpy as np

    numbers, cluster_of_item, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    num_items, num_clusters = len(deviations), len(numbers)
    if num_clusters == num_items:
        sums = deviations[np.argsort(cluster_of_item)]
    else:
        sums = sums_of_items(deviations, cluster_of_item, sizes, magnitude)
    num_effective = num_items**2 / math.fsum((sizes.astype(np.float64) ** 2).tolist())
    jackknife = math.sqrt((num_clusters - 1) / num_clusters)
    the_stratum = Stratum(
        name='',
        clusters=numbers,
        deviations=sums / (num_items - sizes) * jackknife,
        freedom=max(1.0, num_effective - 1),
    )
    return the_stratum, num_effective


def sums_of_items(deviations: Floats, cluster_of_item: Ints, sizes: Ints, magnitude: float) -> Floats:
    """Return the exact sum of each cluster's deviations, which does not depend on the order of items."""
    import numpy as np

    by_cluster: list[list[float]] = [[] for _ in sizes]
    for cluster, deviation in zip(cluster_of_item.tolist(), deviations.tolist(), strict=True):
        by_cluster[cluster].append(deviation)
    sums = np.array([math.fsum(of_cluster) for of_cluster in by_cluster])
    return without_rounding(sums, magnitude * sizes.astype(np.float64))


def without_rounding(values: Floats, magnitude: float | Floats) -> Floats:
    """Return the values with 0 for those that are only the rounding error of numbers of this magnitude."""
    import numpy as np

    return np.where(np.abs(values) <= ROUNDING * magnitude, 0.0, values)


def spread_of_mean(stratum: Stratum, value: float, num_effective: float, bounds: Bounds) -> Spread:
    """Return the spread of a mean over the clusters of a stratum, equivalent to `num_effective` even clusters.

    A mean of values with two bounds is treated as a share of the way from the lower to the upper one, of as many
    independent items as have its error. For a share without variation, such as 0 of 100 items, which has no error, they
    are the even clusters, and the error on either side is that of Wilson's interval with the normal quantile.
    """
    spread = replace(spread_of([stratum]), bounds=bounds)
    lowest, highest = bounds
    width = highest - lowest
    if math.isinf(width):
        return spread
    share = (value - lowest) / width
    error = spread.standard_error / width
    if error > 0 and 0 < share < 1:
        num_items = share * (1 - share) / error**2
        below = above = error
    else:
        num_items = num_effective
        low, high = wilson(share, num_items, NORMAL_QUANTILE)
        below = max(error, (share - low) / NORMAL_QUANTILE)
        above = max(error, (high - share) / NORMAL_QUANTILE)
    return replace(
        spread,
        below=width * below,
        above=width * above,
        num_items=None if stratum.is_borrowed else num_items,
    )


def wilson(share: float, num_items: float, quantile: float) -> tuple[float, float]:
    """Return the ends of Wilson's interval of a share of independent items.

    It approximates: with few items on one side, such as 1 of 200, it covers 88 to 98 %, as few values are possible.
    """
    weight = quantile**2 / num_items
    shrink = 1 + weight
    center = (share + weight / 2) / shrink
    half_width = math.sqrt(weight * share * (1 - share) + weight**2 / 4) / shrink
    # Rounding may take an end past 0, 1 or the share itself.
    low = min(share, center - half_width)
    high = max(share, center + half_width)
    return max(0.0, low), min(1.0, high)


def spread_of(strata: Sequence[Stratum]) -> Spread:
    """Return the spread of a sum of strata, which may share clusters."""
    parts, variance = parts_of_variance(strata)
    error = math.sqrt(variance)
    return Spread(
        strata=tuple(strata),
        standard_error=error,
        freedom=freedom_of_sum(parts, [stratum.freedom for stratum in strata]),
        below=error,
        above=error,
    )


def parts_of_variance(strata: Sequence[Stratum]) -> tuple[list[float], float]:
    """Return each stratum's part of the variance of their sum, including covariances, and the variance."""
    import numpy as np

    deviations = np.concatenate([stratum.deviations for stratum in strata])
    clusters = np.concatenate([stratum.clusters for stratum in strata])
    _, cluster_of_deviation, totals = sums_by_cluster(clusters, deviations)
    variance = math.fsum((totals**2).tolist())

    # A deviation counts with the total of its cluster, in which other strata take part.
    parts = deviations * totals[cluster_of_deviation]
    ends = np.cumsum([len(stratum.clusters) for stratum in strata])
    return [float(of_stratum.sum()) for of_stratum in np.split(parts, ends[:-1])], variance


def sums_by_cluster(clusters: ClusterNumbers, deviations: Floats) -> tuple[ClusterNumbers, Ints, Floats]:
    """Return the distinct clusters, the place of each given cluster among them, and the sum of each one's deviations.

    Deviations that cancel but for rounding have the sum 0.
    """
    import numpy as np

    numbers, places = np.unique(clusters, return_inverse=True)
    sums = np.asarray(np.bincount(places, weights=deviations), np.float64)
    magnitudes = np.asarray(np.bincount(places, weights=np.abs(deviations)), np.float64)
    return numbers, places, without_rounding(sums, magnitudes)


def freedom_of_sum(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Return the degrees of freedom of a sum of variances (Satterthwaite 1946); for a sum of 0, that of `freedoms`.

    The sum is approximated by a chi-squared distribution with the same mean and variance.
    """
    uncertainty = math.fsum(variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True))
    if uncertainty > 0:
        return math.fsum(variances) ** 2 / uncertainty
    return math.fsum(freedoms)


def weighted_sum(measures: Sequence[Measure], weights: Sequence[float], shift: float = 0.0) -> Measure:
    """Return `shift` plus the weighted sum of measures that have values, with its spread.

    The spread is unknown if that of any measure is. A single measure keeps its interval, on the new scale.
    """
    weighted = [
        measure.value * weight for measure, weight in zip(measures, weights, strict=True) if measure.value is not None
    ]
    value = math.fsum([shift, *weighted])
    rounding = ROUNDING * math.fsum(map(abs, [shift, *weighted]))
    if abs(value) <= rounding:
        value = 0.0
    spreads = [measure.spread for measure in measures if measure.spread is not None]
    if len(spreads) < len(measures) or not spreads:
        return Measure(value=value)
    return Measure(value=value, spread=spread_of_sum(spreads, weights, shift, rounding))


def spread_of_sum(spreads: Sequence[Spread], weights: Sequence[float], shift: float, rounding: float) -> Spread:
    """Return the spread of `shift` plus the weighted sum of estimates; an error up to `rounding` is 0.

    Its sides are those of a sum of independent parts (MOVER, Zou and Donner 2008), both widened or narrowed in the
    ratio of the error with the clusters that parts share to that without. This approximates: clusters could widen the
    sides differently.
    """
    strata = [
        scaled(stratum, weight) for spread, weight in zip(spreads, weights, strict=True) for stratum in spread.strata
    ]
    of_sum = spread_of(merge_strata(strata))
    if of_sum.standard_error <= rounding:
        of_sum = spread_of([scaled(stratum, 0.0) for stratum in of_sum.strata])
    independent_error = math.sqrt(
        math.fsum((weight * spread.standard_error) ** 2 for spread, weight in zip(spreads, weights, strict=True))
    )
    ratio = of_sum.standard_error / independent_error if independent_error > 0 else 1.0

    # With a weight below 0 a part's upper side becomes the sum's lower one.
    below, above, lowest, highest = [], [], [], []
    for spread, weight in zip(spreads, weights, strict=True):
        lower, upper = weight * spread.below, weight * spread.above
        low, high = (weight * bound for bound in spread.bounds) if weight else (0.0, 0.0)
        if weight <= 0:
            lower, upper, low, high = upper, lower, high, low
        below.append(lower)
        above.append(upper)
        lowest.append(low)
        highest.append(high)

    is_scaled = len(spreads) == 1 and weights[0] != 0  # and is no sum
    return replace(
        of_sum,
        below=ratio * math.hypot(*below),
        above=ratio * math.hypot(*above),
        bounds=(shift + sum(lowest), shift + sum(highest)),
        num_items=spreads[0].num_items if is_scaled else None,
        share_freedom=spreads[0].share_freedom if is_scaled else None,
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
    weight = 1 / len(measures)
    plain = weighted_sum(list(measures.values()), [weight] * len(measures))
    if len(measures) < 2:
        return plain
    alone = [
        name for name, measure in measures.items() if measure.spread is None or measure.spread.strata[0].is_borrowed
    ]
    parts = [measure for name, measure in measures.items() if name not in alone]
    weights = [weight] * len(parts)
    counts = [part.spread.strata[0].freedom + 1 for part in parts if part.spread is not None]
    if alone:
        values = {name: measure.value for name, measure in measures.items() if measure.value is not None}
        collapsed = collapsed_stratum(values, alone, clusters, task=stratum)
        center = mean([values[name] for name in alone])
        parts.append(Measure(value=center, spread=spread_of_mean(collapsed, center, len(alone), bounds)))
        weights.append(len(alone) / len(measures))
        counts.append(len(alone))

    with_errors = weighted_sum(parts, weights)
    spreads = [part.spread for part in parts if part.spread is not None]
    # The value is bit-identical to the plain mean.
    return replace(plain, spread=with_pooled_share(with_errors, spreads, weights, counts, bounds))


def with_pooled_share(
    whole: Measure, parts: Sequence[Spread], weights: Sequence[float], counts: Sequence[float], bounds: Bounds
) -> Spread | None:
    """Return the spread of a mean over categories, `whole`, with the interval of a share over the items of all.

    A category of a few items is often all wrong or all right by chance, and its Wilson interval is wide; the sides of
    57 such categories, added up, hold any true value. So the mean is one share, of as many independent items as have
    its error (Korn and Graubard 1998). Where categories without variation take part and few items have the rarer
    outcome, the error itself is uncertain: the variance of independent items of the same share is mixed in, and counts
    as much as `RARE_ITEMS`. `counts` are the independent items of each part.
    """
    spread = whole.spread
    lowest, highest = bounds
    width = highest - lowest
    if spread is None or whole.value is None or math.isinf(width):
        return spread

    share = min(max((whole.value - lowest) / width, 0.0), 1.0)  # rounding may take it past an end
    variance_of_item = share * (1 - share)
    # The factors from the variance of an item to that of the mean, by part.
    factors = [weight**2 / count for weight, count in zip(weights, counts, strict=True)]
    num_independent = 1 / math.fsum(factors)
    if spread.standard_error == 0 or variance_of_item == 0:
        low, high = wilson(share, num_independent, NORMAL_QUANTILE)
        return replace(
            spread,
            below=width * (share - low) / NORMAL_QUANTILE,
            above=width * (high - share) / NORMAL_QUANTILE,
            num_items=num_independent,
        )

    variances = [(weight * part.standard_error / width) ** 2 for weight, part in zip(weights, parts, strict=True)]
    by_shared_clusters = (spread.standard_error / width) ** 2 / math.fsum(variances)  # 1 if none are shared
    if not all(variances):
        num_rare = num_independent * min(share, 1 - share)
        mixed_in = RARE_ITEMS / (num_rare + RARE_ITEMS)
        # Items that are shares themselves, as a question's over its variants, vary less than rights and wrongs.
        factors_of_varying = [factor for factor, variance in zip(factors, variances, strict=True) if variance]
        observed = math.fsum(variances) / math.fsum(factors_of_varying)
        variance_mixed_in = min(variance_of_item, observed)
        variances = [
            (1 - mixed_in) * variance + mixed_in * factor * variance_mixed_in
            for variance, factor in zip(variances, factors, strict=True)
        ]
    return replace(
        spread,
        below=spread.standard_error,
        above=spread.standard_error,
        num_items=variance_of_item / (by_shared_clusters * math.fsum(variances)),
        share_freedom=freedom_of_sum(variances, [part.strata[0].freedom for part in parts]),
    )


def collapsed_stratum(
    values: Mapping[str, float], alone: Sequence[str], clusters: Mapping[str, int], *, task: str
) -> Stratum:
    """Return the stratum of the categories `alone`, each deviating by its distance from all other categories."""
    import numpy as np

    magnitude = max(map(abs, values.values()))
    distances: dict[int, float] = {}  # by cluster, which categories may share
    for name in alone:
        distance = values[name] - mean([value for other, value in values.items() if other != name])
        if abs(distance) <= ROUNDING * magnitude:
            distance = 0.0
        distances[clusters[name]] = distances.get(clusters[name], 0.0) + distance
    numbers = sorted(distances)
    return Stratum(
        task=task,
        name=f'{task}: categories of one cluster: {", ".join(alone)}',
        clusters=np.array(numbers, np.uint64),
        deviations=np.array([distances[number] for number in numbers]) / len(alone),
        freedom=max(1, len(alone) - 1),
        is_borrowed=True,
    )


def merge_strata(strata: Iterable[Stratum]) -> list[Stratum]:
    """Merge strata with the same name: their deviations are added by cluster."""
    by_name: dict[str, list[Stratum]] = {}
    for stratum in strata:
        by_name.setdefault(stratum.name, []).append(stratum)
    return [merged(of_name) for of_name in by_name.values()]


def merged(strata: Sequence[Stratum]) -> Stratum:
    """Return one stratum in place of several with the same name; a single one is unchanged."""
    import numpy as np

    if len(strata) == 1:
        return strata[0]
    clusters = np.concatenate([stratum.clusters for stratum in strata])
    deviations = np.concatenate([stratum.deviations for stratum in strata])
    numbers, _, sums = sums_by_cluster(clusters, deviations)
    return replace(
        strata[0],
        clusters=numbers,
        deviations=sums,
        freedom=min(stratum.freedom for stratum in strata),
        is_borrowed=any(stratum.is_borrowed for stratum in strata),
    )


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
    shares: dict[str, float] = {}
    for stratum, part in zip(strata, parts, strict=True):
        shares[stratum.task] = shares.get(stratum.task, 0.0) + part / variance
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


def interval(measure: Measure) -> tuple[float, float] | None:
    """Return the 95 % confidence interval, None without a spread."""
    if measure.value is None or measure.spread is None:
        return None
    spread = measure.spread
    quantile = student_quantile(spread.freedom)
    lowest, highest = spread.bounds
    if spread.num_items is None:
        low = measure.value - quantile * spread.below
        high = measure.value + quantile * spread.above
        return max(low, lowest), min(high, highest)

    if spread.share_freedom is not None:
        quantile = student_quantile(spread.share_freedom)
    width = highest - lowest
    share = min(max((measure.value - lowest) / width, 0.0), 1.0)  # rounding may take it past an end
    if spread.standard_error == 0:
        quantile = NORMAL_QUANTILE  # without variation among the items, no variance is estimated
    low, high = wilson(share, spread.num_items, quantile)
    return lowest + width * low, lowest + width * high


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
