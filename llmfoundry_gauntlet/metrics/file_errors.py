"""Compute the error of a subset relative to its whole data files.

The score of a subset has two errors: relative to all possible items, and relative to the whole data files, which is
smaller, as the subset is part of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from llmfoundry_gauntlet.metrics.statistics import freedom_of_sum, spread_of
from llmfoundry_gauntlet.types import FileSample, Spread, Stratum


def spread_of_file(spread: Spread) -> Spread | None:
    """Return the spread relative to the value over the whole data files; None if unknown, or if no item is left out.

    Each stratum's part of the variance shrinks to that of the items left out (see `stratum_of_file`).
    """
    shares = [one.sample.share for one in spread.strata if one.sample is not None]
    if len(shares) < len(spread.strata) or min(shares) == 1:
        return None
    found = spread_of([stratum_of_file(one) for one in spread.strata])
    error = spread.standard_error
    ratio = found.standard_error / error if error > 0 else math.sqrt(1 - min(shares))
    return replace(
        found,
        below=spread.below * ratio,
        above=spread.above * ratio,
        bounds=spread.bounds,
        num_items=None if spread.num_items is None or ratio == 0 else spread.num_items / ratio**2,
    )


def stratum_of_file(stratum: Stratum) -> Stratum:
    """Return a stratum with deviations from the value over its whole data file.

    For n of N items, with m of the M items of each cluster, and variances b between and w within clusters, the squared
    error is b A + w (1 / n - 1 / N), where A is the sum of (m / n - M / N)²; relative to the population it is
    b P + w / n, where P is the sum of (m / n)². If no cluster has two items, b and w cannot be separated, and the
    larger error is taken.
    """
    sample = stratum.sample
    variance = float(stratum.deviations @ stratum.deviations)
    if sample is None or sample.share == 1 or variance == 0:
        return replace(stratum, deviations=stratum.deviations * 0.0, sample=None)
    n, num_all = int(sample.sizes.sum()), int(sample.file_sizes.sum())
    shares, file_shares = sample.sizes / n, sample.file_sizes / num_all
    of_clusters = float(shares @ shares)
    between = float(file_shares @ file_shares) - 2 * shared(sample) / (n * num_all) + of_clusters
    within = 1 / n - 1 / num_all
    freedom = stratum.freedom
    if not len(sample.residuals):
        left = variance * max(between / of_clusters, within * n)
    else:
        num_repeats = n - len(sample.sizes)
        inner = float(sample.residuals @ sample.residuals) / num_repeats
        outer = max(0.0, variance - inner / n)
        left = outer * between / of_clusters + inner * within
        parts = [variance * between / of_clusters, inner * (within - between / of_clusters / n)]
        freedom = freedom_of_sum(parts, [freedom, num_repeats])
    deviations = stratum.deviations * math.sqrt(left / variance)
    return replace(stratum, deviations=deviations, freedom=freedom, sample=None)


def shared(sample: FileSample) -> float:
    """Return the expected sum over clusters of sampled times all items, for subsets that take clusters in turns."""
    import numpy as np

    left, file_sizes = int(sample.sizes.sum()), sample.file_sizes
    taken, turn = np.zeros(len(file_sizes)), 0
    while left > 0:
        takes = file_sizes > turn
        num_taken = min(left, int(takes.sum()))
        taken += takes * (num_taken / takes.sum())
        left, turn = left - num_taken, turn + 1
    return float(taken @ file_sizes)
