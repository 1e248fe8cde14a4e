"""Differences between two runs over the same items, and trends over several checkpoints, with standard errors.

Runs are paired: a difference is taken item by item, so item difficulty that both runs share drops out of its error
(arXiv 2411.00640, section 4).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import stdev

from llmfoundry_gauntlet.metrics.statistics import (
    ROUNDING,
    mean,
    spread_of,
    student_quantile,
    student_tail,
    weighted_sum,
)
from llmfoundry_gauntlet.types import Measure, Spread, Stratum

LEVEL = 0.05  # the share of tables of equal runs in which any difference may be called clear
POWER = 0.8  # of a minimum detectable effect
MAX_CORRELATION = 0.9  # of adjacent checkpoints
OF_CHECKPOINTS = 2**64 - 1  # a cluster that has no items, so that it varies by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The measure of the second run minus that of the first. `num_items` counts the items that both have.

    `p_value` is two-sided, from Student's t; `p_holm` is corrected for all simultaneous comparisons
    (`holm_in_families`). `level` is what `p_value` must be below to be clear if nothing else is, which is the first
    step of that correction. They are None, but for the level, if the error is unknown. `over_prompts` is the difference
    of two of SCORE's means over prompts, with its error over questions and prompts; None for others.
    """

    first: Measure
    second: Measure
    difference: Measure
    num_items: int
    p_value: float | None
    p_holm: float | None = None
    level: float = LEVEL
    over_prompts: Measure | None = None

    @property
    def detectable(self) -> float | None:
        """Return the minimum detectable effect: the true difference that is found at `level` with a power of 80 %.

        None if unknown, also because all items differ by the same amount, and if no possible difference is so large.
        The error is taken to be the same whatever the difference, which is too little near 0 and 1, where the error of
        a share grows with it.
        """
        spread = self.difference.spread
        if spread is None or spread.standard_error == 0:
            return None
        effect = errors_to_detect(spread.freedom, self.level) * spread.standard_error
        _, largest_possible = spread.bounds
        return effect if effect <= largest_possible else None


@functools.lru_cache(maxsize=10_000)
def errors_to_detect(freedom: float, level: float) -> float:
    """Return how many standard errors a true difference must be to have the power in a two-sided test of Student's t.

    It is exact for a normal estimate: the noncentrality with which t exceeds its quantile so often. That it falls below
    the opposite quantile is so rare as not to count.
    """
    from scipy.special import nctdtrinc

    critical = student_quantile(freedom, 1 - level / 2)
    return float(nctdtrinc(freedom, 1 - POWER, critical))


def difference(first: Measure, second: Measure, num_items: int) -> Difference:
    """Return the second measure minus the first; absent if either is, with its reason."""
    for measure in (first, second):
        if measure.value is None:
            return Difference(first=first, second=second, difference=measure, num_items=num_items, p_value=None)
    contrast = weighted_sum([second, first], [1.0, -1.0])
    contrast = replace(contrast, spread=spread_of_contrast(contrast.spread))
    return Difference(first=first, second=second, difference=contrast, num_items=num_items, p_value=p_value(contrast))


def spread_of_contrast(spread: Spread | None) -> Spread | None:
    """Return the spread of a difference or a slope: that of its items, if they vary.

    Items that are all right in one run still differ from those of another, so nothing is added for a share without
    variation.
    """
    if spread is None or spread.standard_error == 0:
        return spread
    return replace(spread, below=spread.standard_error, above=spread.standard_error)


def p_value(measure: Measure) -> float | None:
    """Return the probability of a value this far from 0 by chance; None without a standard error.

    If every cluster differs by the same amount, so that the error is 0, it is the p-value of a sign test; for a
    composite of several tasks this approximates, as all their clusters count alike.
    """
    if measure.value is None or measure.spread is None:
        return None
    if measure.spread.standard_error > 0:
        return student_tail(measure.value / measure.spread.standard_error, measure.spread.freedom)
    clusters = {number for stratum in measure.spread.strata for number in stratum.clusters.tolist()}
    return 1.0 if measure.value == 0 else 2.0 ** (1 - len(clusters))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values corrected for multiple comparisons (Holm 1979); None stays None and is not counted."""
    known = sorted((value, place) for place, value in enumerate(p_values) if value is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (value, place) in enumerate(known):
        highest = max(highest, min(1.0, value * (len(known) - rank)))
        corrected[place] = highest
    return corrected


def holm_in_families(families: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
    """Return the p-values of a table, corrected within each family (Holm) and for the number of families (Bonferroni).

    So equal runs have any corrected p-value below 5 % in at most 5 % of tables, however many families these have. A
    family without p-values does not count.
    """
    num_families = num_tested(families)
    corrected: dict[str, list[float | None]] = {}
    for name, p_values in families.items():
        corrected[name] = [
            None if of_family is None else min(1.0, num_families * of_family) for of_family in holm(p_values)
        ]
    return corrected


def levels_in_families(families: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """Return the level of each family's first step: what a p-value must be below to be clear if no other one is."""
    num_families = num_tested(families)
    levels = {}
    for name, p_values in families.items():
        num_known = sum(value is not None for value in p_values)
        levels[name] = LEVEL / max(1, num_known * num_families)
    return levels


def num_tested(families: Mapping[str, Sequence[float | None]]) -> int:
    """Return the number of families that have any p-value."""
    return sum(any(value is not None for value in p_values) for p_values in families.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The trend of a score over the checkpoints of a run.

    `slope` is that of the least-squares line, per training batch; its error is that over items and that over
    checkpoints together. `noise` is the variation of the score between checkpoints, `signal_to_noise` the line's change
    over the run divided by it, negative if the score falls (after arXiv 2508.13144, whose signal is the spread of
    several models and whose noise is that of the last checkpoints). They are None with too few checkpoints, or without
    noise.
    """

    slope: Measure
    noise: float | None
    signal_to_noise: float | None


def trend(batches: Sequence[int], scores: Sequence[Measure]) -> Trend:
    """Return the trend of scores at these training batches, two or more, in ascending order."""
    missing = next((score for score in scores if score.value is None), None)
    if missing is not None:
        return Trend(slope=missing, noise=None, signal_to_noise=None)
    values = [score.value for score in scores if score.value is not None]
    slope = slope_of(batches, scores)
    noise = step_noise(batches, values)
    if noise is not None and noise <= ROUNDING * max(map(abs, values)):
        noise = 0.0

    # Without noise there is nothing to compare the change with.
    signal_to_noise = None
    if noise and slope.value is not None:
        change = slope.value * (batches[-1] - batches[0])
        signal_to_noise = change / noise

    slope = replace(slope, spread=spread_of_slope(slope.spread, checkpoint_spread(batches, values)))
    return Trend(slope=slope, noise=noise, signal_to_noise=signal_to_noise)


def spread_of_slope(of_items: Spread | None, of_checkpoints: Spread | None) -> Spread | None:
    """Return the spread of a slope whose items and whose checkpoints could have been others.

    The error is the root of the sum of the squares of both. This is conservative, as the distances of scores from the
    line already have a part that is due to items; but neither error contains the other, and the larger one alone calls
    up to 9 % of flat series a trend where items have slopes of their own. The degrees of freedom are the fewer ones.
    """
    spreads = [spread for spread in (of_items, of_checkpoints) if spread is not None]
    if not spreads:
        return None
    both = spread_of([stratum for spread in spreads for stratum in spread.strata])
    return replace(both, freedom=min(spread.freedom for spread in spreads))


def slope_of(batches: Sequence[int], scores: Sequence[Measure]) -> Measure:
    """Return the slope of the least-squares line, per batch, with its error over items."""
    center = mean(batches)
    squares = math.fsum((batch - center) ** 2 for batch in batches)
    slope = weighted_sum(scores, [(batch - center) / squares for batch in batches])
    return replace(slope, spread=spread_of_contrast(slope.spread))


def checkpoint_spread(batches: Sequence[int], values: Sequence[float]) -> Spread | None:
    """Return the spread of a least-squares slope from the residuals of the scores; None for two checkpoints.

    Residuals of adjacent checkpoints are correlated. With their autocorrelation r, corrected for the bias of short
    series (Kendall 1954), the variance grows by (1 + r) / (1 - r), and the K - 2 degrees of freedom shrink by it: both
    hold for long series of an AR(1) process, and approximate short ones. In simulations with 4 to 40 checkpoints fewer
    flat series look like a trend than with Newey and West's estimate, but 7 to 28 % still may where r is .5 to .9.
    """
    import numpy as np

    num_scores = len(values)
    if num_scores < 3:
        return None
    x = np.array(batches, np.float64) - mean(batches)
    y = np.array(values) - mean(values)
    squares_of_x = float(x @ x)
    residuals = y - (x @ y) / squares_of_x * x
    squares = float(residuals @ residuals)
    if math.sqrt(squares) <= ROUNDING * max(map(abs, values)):
        return None
    correlation = float(residuals[1:] @ residuals[:-1]) / squares
    unbiased = correlation + (1 + 4 * correlation) / num_scores
    unbiased = min(max(unbiased, 0.0), MAX_CORRELATION)
    inflation = (1 + unbiased) / (1 - unbiased)
    freedom = num_scores - 2
    error = math.sqrt(squares / freedom / squares_of_x * inflation)
    stratum = Stratum(
        name='checkpoints',
        clusters=np.array([OF_CHECKPOINTS], np.uint64),
        deviations=np.array([error]),
        freedom=max(1.0, freedom / inflation),
    )
    return spread_of([stratum])


def step_noise(batches: Sequence[int], values: Sequence[float]) -> float | None:
    """Return the standard deviation of a score around its trend, from the variation of its steps.

    The mean slope is subtracted from the steps, so that a steady climb does not count as noise. For K independent
    scores with the same variance, the expected variance of K - 1 steps about their mean is 2 K / (K - 1) times that
    variance. Of scores whose neighbors resemble each other it is less: with an autocorrelation of .7 about half of the
    standard deviation.
    """
    num_scores = len(values)
    if num_scores < 3:
        return None
    rate = (values[-1] - values[0]) / (batches[-1] - batches[0])
    points = list(zip(batches, values, strict=True))
    deviations = [
        following - value - rate * (next_batch - batch) for (batch, value), (next_batch, following) in pairwise(points)
    ]
    return stdev(deviations) * math.sqrt((num_scores - 1) / (2 * num_scores))
