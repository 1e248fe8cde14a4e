"""Test whether a run is worse than another by more than a margin: the tests, power and verdicts of `gauntlet gate`.

Two one-sided tests are made of a paired difference d, the second run minus the first, and its margin m. One presumes
that the true difference is at least -m, and proves harm: the run is worse. The other presumes that it is at most -m,
and proves that there is none beyond the margin (non-inferiority): the run is ok. It needs a margin above 0. What
neither proves is unclear.

Rows are many, so proofs of harm are corrected for their number in each family (Holm 1979), and for that of families: an
equal run is blocked by any of them with a probability of at most alpha. All required rows must be ok, which needs no
correction (an intersection-union test; Berger 1982).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmfoundry_gauntlet.metrics.comparison import POWER, Difference, holm_in_families
from llmfoundry_gauntlet.metrics.statistics import ROUNDING, student_quantile
from llmfoundry_gauntlet.types import Measure, Spread

FAMILIES = TASKS, CATEGORIES, AVERAGES, SCORE = 'tasks', 'categories', 'averages', 'score'
WORSE, OK, UNCLEAR = 'worse', 'ok', 'unclear'


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The tests of a paired difference against a margin; all but probabilities are in the unit of the score.

    * `standard_error`: that of the tests, over items.
    * `low`, `high`: the interval with the confidence 1 - 2 alpha, the one that decides. `p_ok` is below alpha exactly
      if `low` is above -m, and `p_worse` if `high` is below -m.
    * `p_worse`: the probability of a difference this low if the run is worse by the margin, and not more.
    * `p_ok`: that of a difference this high if it is worse by the margin, or more; None for a margin of 0.
    * `power`: how often a run that is as good as the first is ok; None for a margin of 0.
    * `margin_needed`: the margin with which such a run is ok in 80 % of cases.
    """

    standard_error: float
    low: float
    high: float
    p_worse: float
    p_ok: float | None
    power: float | None
    margin_needed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """A score of two runs, the margin of its difference, and its verdict; None if it has no standard error."""

    name: str
    family: str
    compared: Difference
    margin: float
    is_required: bool
    evidence: Evidence | None
    p_holm: float | None = None  # p_worse, corrected for the number of rows
    verdict: str | None = None

    @property
    def is_underpowered(self) -> bool:
        """Return whether the row is unclear, and would be in most cases were both runs equally good."""
        power = None if self.evidence is None else self.evidence.power
        return self.verdict == UNCLEAR and power is not None and power < 0.5


def evidence(difference: Measure, margin: float, *, alpha: float, is_task: bool) -> Evidence | None:
    """Return what a difference, the second run minus the first, says about a margin; None without a standard error.

    A task with a margin has at least the error of items of which a share as large as the margin became wrong. Of two
    runs that differ in a few items only, those few would tell too little about it: a model whose quantization costs 2 %
    may by luck differ in no item at all.
    """
    spread = difference.spread
    if difference.value is None or spread is None:
        return None
    if spread.standard_error <= ROUNDING:
        return evidence_of_constant(difference.value, spread, margin, alpha=alpha)

    error, freedom = spread.standard_error, spread.freedom
    if is_task and margin > 0:
        num_effective = freedom + 1  # even clusters that the task is worth
        error = max(error, math.sqrt(margin * (1 - margin) / num_effective))
    quantile = student_quantile(freedom, 1 - alpha)
    from_margin = (difference.value + margin) / error
    return Evidence(
        standard_error=error,
        low=difference.value - quantile * error,
        high=difference.value + quantile * error,
        p_worse=student_below(from_margin, freedom),
        p_ok=student_below(-from_margin, freedom) if margin > 0 else None,
        power=student_below(margin / error - quantile, freedom) if margin > 0 else None,
        margin_needed=(quantile + student_quantile(freedom, POWER)) * error,
    )


def evidence_of_constant(value: float, spread: Spread, margin: float, *, alpha: float) -> Evidence | None:
    """Return what it says about a margin that every cluster has the same difference, most often 0.

    Then no variance can be estimated. But were the true difference at the margin, some clusters would differ from this
    value, even if each by as much as it can. With the largest share q of clusters that may have it, G of them all do
    with a probability of q to the power of G: for a value of 0 and shares, (1 - margin) ** G. None if a difference has
    no bounds.
    """
    lowest, highest = spread.bounds
    if math.isinf(lowest) or math.isinf(highest):
        return None
    clusters = {number for stratum in spread.strata for number in stratum.clusters.tolist()}
    num_clusters = len(clusters)

    p_worse = p_not_worse = 1.0
    if value < -margin:
        p_worse = ((highest + margin) / (highest - value)) ** num_clusters
    if value > -margin:
        p_not_worse = ((-margin - lowest) / (value - lowest)) ** num_clusters

    # The ends of the interval are the margins at which one of the probabilities is alpha.
    share = alpha ** (1 / num_clusters)
    margin_needed = -lowest * (1 - share)
    power = float(margin > margin_needed)
    return Evidence(
        standard_error=0.0,
        low=lowest + (value - lowest) * share,
        high=highest - (highest - value) * share,
        p_worse=p_worse,
        p_ok=p_not_worse if margin > 0 else None,
        power=power if margin > 0 else None,
        margin_needed=margin_needed,
    )


def student_below(value: float, freedom: float) -> float:
    """Return the probability of a value of Student's t that is at most this one."""
    from scipy.special import stdtr

    return float(stdtr(freedom, value))


def judged(rows: Sequence[GateRow], alpha: float) -> list[GateRow]:
    """Return the rows with their verdicts; proofs of harm are corrected for all rows given."""
    p_values: dict[str, list[float | None]] = {}
    for row in rows:
        p_values.setdefault(row.family, []).append(None if row.evidence is None else row.evidence.p_worse)
    corrected_values = {family: iter(values) for family, values in holm_in_families(p_values).items()}

    with_verdicts = []
    for row in rows:
        p_holm = next(corrected_values[row.family])
        with_verdicts.append(replace(row, p_holm=p_holm, verdict=verdict_of_row(row, p_holm, alpha)))
    return with_verdicts


def verdict_of_row(row: GateRow, p_holm: float | None, alpha: float) -> str | None:
    """Return the verdict of a row, given its corrected probability; None without evidence."""
    if row.evidence is None or p_holm is None:
        return None
    if p_holm < alpha:
        return WORSE
    p_ok = row.evidence.p_ok
    return OK if p_ok is not None and p_ok < alpha else UNCLEAR


def verdict_of(rows: Sequence[GateRow]) -> str:
    """Return the verdict on the run: worse if any row is, ok if all required rows are, else unclear."""
    if any(row.verdict == WORSE for row in rows):
        return WORSE
    return OK if all(row.verdict == OK for row in rows if row.is_required) else UNCLEAR
