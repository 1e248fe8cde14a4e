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

from llmfoundry_gauntlet.types import FileSample, ItemResult, Measure, Spread, Stratum

if TYPE_CHECKING:
    from llmfoundry_gauntlet.types import ClusterNumbers, Floats, Ints

CONFIDENCE = 0.95  # of intervals
NORMAL_QUANTILE = 1.959963984540054  # of a 95 % interval


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, independent of the order of the values."""
    return math.fsum(values) / len(values)


def mean_over_clusters(
    values: Sequence[float],
    clusters: ClusterNumbers,
    *,
    stratum: str = '',
    task: str = '',
    is_share: bool = False,
    file_sizes: Ints | None = None,
) -> Measure:
    """Return the mean of items' values with its spread; `clusters` has the number of each item's cluster.

    A cluster's deviation is the change of the mean without it (jackknife): e / (N - n) * sqrt((G - 1) / G) for its n of
    N items, with the sum e of their deviations from the mean, and G clusters. For clusters of the same size, the error
    is the paper's times sqrt(G / (G - 1)). For a single cluster of several items it is the standard deviation of an
    item, as if the items were fully correlated; for a single item it is unknown. With `is_share` values are between 0
    and 1. `file_sizes` are the numbers of items of all clusters in the data file, None if unknown.
    """
    import numpy as np

    center = mean(values)
    numbers, places, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    if len(values) < 2:
        return Measure(value=center)
    deviations = np.array(values, np.float64) - center
    sample = None if file_sizes is None else file_sample(deviations, places, sizes, file_sizes)
    if len(numbers) < 2:
        alone = Stratum(
            name=stratum,
            task=task,
            sample=sample,
            clusters=np.sort(numbers[0] + np.arange(len(values), dtype=np.uint64)),
            deviations=deviations / math.sqrt(len(values) - 1),
            freedom=1.0,
            is_borrowed=True,
        )
        return Measure(value=center, spread=spread_of_mean(alone, center, 1.0, is_share=is_share))
    if len(numbers) == len(values):
        sums = deviations[np.argsort(places)]
    else:
        members: list[list[float]] = [[] for _ in numbers]
        for place, deviation in zip(places.tolist(), deviations.tolist(), strict=True):
            members[place].append(deviation)
        sums = np.array([math.fsum(group) for group in members])
    num_effective = len(values) ** 2 / math.fsum((sizes.astype(np.float64) ** 2).tolist())
    found = Stratum(
        name=stratum,
        task=task,
        sample=sample,
        clusters=numbers,
        deviations=sums / (len(values) - sizes) * math.sqrt((len(numbers) - 1) / len(numbers)),
        freedom=max(1.0, num_effective - 1),
    )
    return Measure(value=center, spread=spread_of_mean(found, center, num_effective, is_share=is_share))


def spread_of_mean(stratum: Stratum, value: float, num_effective: float, *, is_share: bool) -> Spread:
    """Return the spread of a mean over the clusters of a stratum, equivalent to `num_effective` even clusters.

    For a share without variation, such as 0 of 100 items, the error on either side is that of Wilson's interval.
    """
    spread = spread_of([stratum])
    if not is_share:
        return spread
    variance = spread.standard_error**2
    varies = variance > 0 and 0 < value < 1
    num_items = value * (1 - value) / variance if varies else num_effective
    low, high = wilson(value, num_items, NORMAL_QUANTILE)
    below, above = (value - low) / NORMAL_QUANTILE, (high - value) / NORMAL_QUANTILE
    error = spread.standard_error
    return replace(
        spread,
        below=error if varies else max(error, below),
        above=error if varies else max(error, above),
        bounds=(0.0, 1.0),
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

    numbers, places = np.unique(np.concatenate([one.clusters for one in strata]), return_inverse=True)
    deviations = np.concatenate([one.deviations for one in strata])
    totals = np.zeros(len(numbers))
    np.add.at(totals, places, deviations)
    variance = math.fsum((totals**2).tolist())
    ends = np.cumsum([0, *(len(one.clusters) for one in strata)])
    parts = deviations * totals[places]
    return [float(parts[begin:end].sum()) for begin, end in itertools.pairwise(ends)], variance


def freedom_of_sum(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Return the degrees of freedom of a sum of variances (Satterthwaite 1946); for a sum of 0, that of `freedoms`."""
    uncertain = math.fsum(variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True))
    return math.fsum(variances) ** 2 / uncertain if uncertain > 0 else math.fsum(freedoms)


def weighted_sum(measures: Sequence[Measure], weights: Sequence[float], shift: float = 0.0) -> Measure:
    """Return `shift` plus the weighted sum of measures that have values, with its spread.

    The spread is unknown if that of any measure is.
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
    spread = spread_of(joined(strata))
    independent = math.fsum((weight * part.standard_error) ** 2 for part, weight in known)
    shared = spread.standard_error / math.sqrt(independent) if independent > 0 else 1.0
    sides, bounds = [], []
    for part, weight in known:
        ends = ((part.below, part.bounds[0]), (part.above, part.bounds[1]))
        (below, low), (above, high) = ends if weight > 0 else ends[::-1]
        sides.append((weight * below, weight * above))
        bounds.append((weight * low, weight * high) if weight else (0.0, 0.0))
    return Measure(
        value=value,
        spread=replace(
            spread,
            below=shared * math.hypot(*(below for below, _ in sides)),
            above=shared * math.hypot(*(above for _, above in sides)),
            bounds=(shift + sum(low for low, _ in bounds), shift + sum(high for _, high in bounds)),
        ),
    )


def mean_over_categories(
    measures: Mapping[str, Measure],
    clusters: Mapping[str, int],
    *,
    stratum: str = '',
    is_share: bool,
    file_sizes: Mapping[str, Ints] | None = None,
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
    distances: dict[int, float] = {}  # by cluster, which categories may share
    for name in alone:
        distance = values[name] - mean([value for other, value in values.items() if other != name])
        distances[clusters[name]] = distances.get(clusters[name], 0.0) + distance
    numbers = sorted(distances)
    sample = None
    if file_sizes is not None:
        samples = [spread.strata[0].sample for name in alone if (spread := measures[name].spread) is not None]
        num_single = len(alone) - len(samples)  # categories with a single item
        sample = FileSample(
            sizes=np.concatenate([np.ones(num_single, np.int64), *(one.sizes for one in samples if one is not None)]),
            file_sizes=np.concatenate([file_sizes[name] for name in alone]),
            residuals=np.zeros(0),
        )
    collapsed = Stratum(
        task=stratum,
        sample=sample,
        name=f'{stratum}: categories of one cluster: {", ".join(alone)}',
        clusters=np.array(numbers, np.uint64),
        deviations=np.array([distances[number] for number in numbers]) / len(alone),
        freedom=max(1, len(alone) - 1),
        is_borrowed=True,
    )
    center = mean([values[name] for name in alone])
    together = Measure(value=center, spread=spread_of_mean(collapsed, center, len(alone), is_share=is_share))
    others = [one for name, one in measures.items() if name not in alone]
    weights = [1 / len(measures)] * len(others)
    found = weighted_sum([*others, together], [*weights, len(alone) / len(measures)])
    return replace(found, value=plain.value)  # bit-identical to the plain mean


def joined(strata: Iterable[Stratum]) -> list[Stratum]:
    """Merge strata with the same name: their deviations are added by cluster."""
    import numpy as np

    groups: dict[str, list[Stratum]] = {}
    for stratum in strata:
        groups.setdefault(stratum.name, []).append(stratum)
    found = []
    for members in groups.values():
        if len(members) > 1:
            numbers, places = np.unique(np.concatenate([one.clusters for one in members]), return_inverse=True)
            deviations = np.zeros(len(numbers))
            np.add.at(deviations, places, np.concatenate([one.deviations for one in members]))
            members = [
                replace(
                    members[0],
                    clusters=numbers,
                    deviations=deviations,
                    freedom=min(one.freedom for one in members),
                    is_borrowed=any(one.is_borrowed for one in members),
                    sample=joined_sample([one.sample for one in members]),
                )
            ]
        found += members
    return found


def scaled(stratum: Stratum, weight: float) -> Stratum:
    """Return the contribution of a stratum to an estimate with this weight."""
    sample = stratum.sample and replace(stratum.sample, residuals=stratum.sample.residuals * weight)
    return replace(stratum, deviations=stratum.deviations * weight, sample=sample)


def file_sample(deviations: Floats, places: Ints, sizes: Ints, file_sizes: Ints) -> FileSample:
    """Return the items' part of a data file, given their deviations and the index of each item's cluster."""
    import numpy as np

    if not len(sizes) < len(places) < file_sizes.sum():  # nothing is left out, or no cluster has two items
        return FileSample(sizes=sizes, file_sizes=file_sizes, residuals=np.zeros(0))
    residuals = deviations - (np.bincount(places, deviations) / sizes)[places]
    order = np.argsort(places, kind='stable')  # the same for all runs over these items
    return FileSample(sizes=sizes, file_sizes=file_sizes, residuals=residuals[order])


def joined_sample(samples: Sequence[FileSample | None]) -> FileSample | None:
    """Merge samples of the same items of a file; return None if the items differ."""
    import numpy as np

    known = [one for one in samples if one is not None]
    if len(known) < len(samples) or not all(np.array_equal(one.sizes, known[0].sizes) for one in known):
        return None
    return replace(known[0], residuals=np.sum([one.residuals for one in known], axis=0))


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
    if spread.num_items is not None:  # without variation among the items, no variance is estimated
        return wilson(measure.value, spread.num_items, quantile if spread.standard_error > 0 else NORMAL_QUANTILE)
    low, high = measure.value - quantile * spread.below, measure.value + quantile * spread.above
    return max(low, spread.bounds[0]), min(high, spread.bounds[1])


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
