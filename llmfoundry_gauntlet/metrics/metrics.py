"""Metrics of a task as pure functions of its item results: each is the mean of one value per item."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmfoundry_gauntlet.errors import plural
from llmfoundry_gauntlet.metrics.statistics import (
    SHARE,
    Bounds,
    cluster_number,
    cluster_numbers,
    mean,
    mean_over_categories,
    mean_over_clusters,
)
from llmfoundry_gauntlet.scoring.likelihood import best_of
from llmfoundry_gauntlet.types import ItemResult, Measure, TaskScore

if TYPE_CHECKING:
    from llmfoundry_gauntlet.types import ClusterNumbers

MAX_REASONS = 3
BEYOND = 1e-6  # a value may be this far outside its bounds, by the rounding of single precision
RENAMED = {'CutShare': 'TruncatedShare'}  # metrics by their earlier names, which are still read
NUM_BINS = 10


class Absent(ValueError):
    """Raised if a metric has no value, with the reason."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a task or a category: the mean of one value per item, with the standard error of that mean.

    `values` returns the values of one or more scored items, None for an item that does not count. It raises Absent if
    they are unknown. `bounds` are the lowest and the highest value that an item can have, None where there is no limit:
    intervals stay within them, and with both, as of a share, (0, 1), they are not empty where all items are alike.
    Without `has_error` the values depend on each other, so that no standard error is known.
    """

    name: str
    values: Callable[[Sequence[ItemResult]], Iterable[float | None]]
    bounds: tuple[float | None, float | None] = (None, None)
    has_error: bool = True

    def __post_init__(self) -> None:
        lowest, highest = self.limits
        if not lowest < highest:
            raise ValueError(f'{self.name}: bounds: are {self.bounds}; allowed: a lower and a higher number, or None')

    @property
    def limits(self) -> Bounds:
        """Return the bounds, infinite where there is no limit."""
        lowest, highest = self.bounds
        return -math.inf if lowest is None else lowest, math.inf if highest is None else highest


def accuracy(name: str) -> Metric:
    """Return the metric of the mean score, under the name given by a task type."""
    return Metric(name, scores_of, bounds=SHARE)


def item_metric(name: str, bounds: tuple[float | None, float | None] = (None, None)) -> Metric:
    """Return the metric of a value that the task type's scorer gives every item; absent if some items lack it."""
    return Metric(name, partial(item_metric_values, name), bounds=bounds)


def pass_at_1(name: str) -> Metric:
    """Return the metric of the mean over problems of the share of their programs that pass."""
    return Metric(name, problem_means, bounds=SHARE)


def passes_at(ks: Sequence[int]) -> tuple[Metric, ...]:
    """Return pass@k for each k."""
    chances = {k: problem_means if k == 1 else partial(pass_chances, k) for k in ks}
    return tuple(Metric(f'PassAt{k}', values, bounds=SHARE) for k, values in chances.items())


def task_score(
    task: str,
    metrics: Sequence[Metric],
    results: Sequence[ItemResult],
    *,
    allow_missing: bool = False,
) -> TaskScore:
    """Return the metrics of a task, in order; without any metric, only the counts.

    A task with categories has the plain mean over its categories. If any item is unscored there are no metrics, only
    the reason; with `allow_missing` they are taken over the scored items, if there are any.
    """
    names = sorted({result.category for result in results if result.category is not None}) if metrics else []

    def plain(name: str | None, members: Sequence[ItemResult]) -> TaskScore:
        stratum = task if name is None else f'{task}/{name}'
        return plain_score(task, stratum, metrics, members, allow_missing=allow_missing)

    if not names:
        return plain(None, results)
    parts: dict[str, list[ItemResult]] = {name: [] for name in names}
    for result in results:
        if result.category is not None:
            parts[result.category].append(result)
    categories = {name: plain(name, members) for name, members in parts.items()}
    return TaskScore(
        task=task,
        metrics={metric.name: mean_over(categories, metric, results) for metric in metrics},
        num_items=len(results),
        num_unscored=sum(score.num_unscored for score in categories.values()),
        num_shortened=sum(score.num_shortened for score in categories.values()),
        categories=categories,
    )


def mean_over(
    categories: Mapping[str, TaskScore],
    metric: Metric,
    results: Sequence[ItemResult],
) -> Measure:
    """Return a metric's plain mean over categories; absent if it is absent in any of them.

    The categories are fixed and the items vary: each category counts with its own error.
    """
    measures = {name: score.metrics[metric.name] for name, score in categories.items()}
    if any(measure.value is None for measure in measures.values()):
        reasons = dict.fromkeys(measure.reason for measure in measures.values() if measure.reason is not None)
        return Measure(value=None, reason=unscored_reason(results) or '; '.join(reasons))
    if not metric.has_error:
        return Measure(value=mean([measure.value for measure in measures.values() if measure.value is not None]))
    clusters = {result.category: cluster_number(result) for result in reversed(results) if result.category is not None}
    task = results[0].key.task
    return mean_over_categories(measures, clusters, stratum=task, bounds=metric.limits)


def plain_score(
    task: str,
    stratum: str,
    metrics: Sequence[Metric],
    results: Sequence[ItemResult],
    *,
    allow_missing: bool,
) -> TaskScore:
    """Return metrics over items, regardless of category; `stratum` is the name of these items in spreads."""
    reason = unscored_reason(results)
    scored = [result for result in results if result.score is not None]
    if allow_missing and scored:
        reason = None
    clusters = cluster_numbers(scored if reason is None else ())
    return TaskScore(
        task=task,
        metrics={
            metric.name: compute_metric(metric, scored, clusters, stratum=stratum)
            if reason is None
            else Measure(value=None, reason=reason)
            for metric in metrics
        },
        num_items=len(results),
        num_unscored=len(results) - len(scored),
        num_shortened=sum(result.prompt_shortened for result in results),
    )


def compute_metric(
    metric: Metric,
    results: Sequence[ItemResult],
    clusters: ClusterNumbers | None = None,
    *,
    stratum: str = '',
) -> Measure:
    """Return a metric of scored results. `clusters` has their cluster numbers, uint64 [N]."""
    if clusters is None:
        clusters = cluster_numbers(results)
    try:
        values = list(metric.values(results))
    except Absent as error:
        return Measure(value=None, reason=str(error))
    known = [value for value in values if value is not None]
    if not known:
        return Measure(value=None, reason='no item has a value')
    lowest, highest = metric.limits
    outside = [v for v in known if not (math.isfinite(v) and lowest - BEYOND <= v <= highest + BEYOND)]
    if outside:
        return Measure(
            value=None, reason=f'{metric.name} of an item is {outside[0]:g}; allowed: from {lowest:g} to {highest:g}'
        )
    if not metric.has_error:
        return Measure(value=mean(known))
    numbers = clusters[[value is not None for value in values]]
    return mean_over_clusters(
        known,
        numbers,
        stratum=stratum,
        task=results[0].key.task,
        bounds=metric.limits,
    )


def item_metric_values(name: str, results: Sequence[ItemResult]) -> list[float]:
    """Return a metric of every item that has it."""
    values = [result.metrics[name] for result in results if name in result.metrics]
    if len(values) < len(results):
        raise Absent(f'{name} is not known of {len(results) - len(values)} of {plural(len(results), "item")}')
    return values


def problem_means(results: Sequence[ItemResult]) -> list[float | None]:
    """Return the mean score of each problem's programs, at the position of the first one.

    With one program a problem, or equally many, their mean is that of all programs.
    """
    means: list[float | None] = [None] * len(results)
    for places in places_by_problem(results):
        means[places[0]] = mean([score for place in places if (score := results[place].score) is not None])
    return means


def places_by_problem(results: Sequence[ItemResult]) -> list[list[int]]:
    """Return the positions of each problem's programs."""
    problems: dict[tuple[str | None, int, str | None], list[int]] = {}
    for place, result in enumerate(results):
        problems.setdefault((result.key.file, result.key.row, result.key.variant), []).append(place)
    return list(problems.values())


def pass_chances(k: int, results: Sequence[ItemResult]) -> list[float | None]:
    """Return the probability that at least one of k programs passes, at the position of each problem's first program.

    Unbiased, from n programs of which c pass: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).
    """
    problems = places_by_problem(results)
    if fewest := [places for places in problems if len(places) < k]:
        raise Absent(f'fewer than {plural(k, "program")} for {plural(len(fewest), "problem")}')
    chances: list[float | None] = [None] * len(results)
    for places in problems:
        n, c = len(places), sum(results[place].score == 1 for place in places)
        chances[places[0]] = 1 - math.comb(n - c, k) / math.comb(n, k)
    return chances


def unscored_reason(results: Sequence[ItemResult]) -> str | None:
    """Return 'n of m items unscored: ...' with the most common reasons, None if all items are scored."""
    if not results:
        return 'there are no items'
    reasons = [result.reason or 'no reason given' for result in results if result.score is None]
    if not reasons:
        return None
    commonest = sorted(set(reasons), key=lambda reason: (-reasons.count(reason), reason))[:MAX_REASONS]
    return f'{len(reasons)} of {plural(len(results), "item")} unscored: {"; ".join(commonest)}'


def scores_of(results: Iterable[ItemResult]) -> list[float]:
    """Return the scores of scored items."""
    return [result.score for result in results if result.score is not None]


def gold_bits_per_byte() -> Metric:
    """Return the metric of the gold continuation's bits per byte, a mean over items."""
    return Metric('GoldBitsPerByte', bits_per_byte, bounds=(0.0, None))


def choice_metrics() -> tuple[Metric, ...]:
    """Return the metrics of tasks with several choices of which one is correct."""
    return (
        gold_bits_per_byte(),
        Metric('GoldProbability', gold_probabilities, bounds=SHARE),
        Metric('CharacterNormalizedMatch', partial(matches, lambda result: result.num_characters), bounds=SHARE),
        Metric('ByteNormalizedMatch', partial(matches, lambda result: result.num_bytes), bounds=SHARE),
        Metric('TokenNormalizedMatch', partial(matches, lambda result: result.num_tokens), bounds=SHARE),
        Metric('CalibrationError', calibration_gaps, has_error=False),
        Metric('CalibrationBias', calibration_bias, has_error=False),
        Metric('BrierScore', brier_scores, bounds=(0.0, 2.0)),
        Metric('MajorityClass', majority, bounds=SHARE),
    )


def bits_per_byte(results: Sequence[ItemResult]) -> list[float]:
    """Return -log2 of the gold choice's probability per byte, for each item."""
    return [
        -logprobs[gold] / math.log(2) / lengths[gold]
        for (logprobs, gold), lengths in zip(choice_scores(results), sizes(results, lambda r: r.num_bytes), strict=True)
    ]


def gold_probabilities(results: Sequence[ItemResult]) -> list[float]:
    """Return the gold choice's probability among the choices, for each item."""
    return [probabilities(logprobs)[gold] for logprobs, gold in choice_scores(results)]


def matches(lengths_of: Callable[[ItemResult], tuple[int, ...] | None], results: Sequence[ItemResult]) -> list[float]:
    """Return each item's `gold_share` by log-probability per unit of length."""
    return [
        gold_share([logprob / length for logprob, length in zip(logprobs, lengths, strict=True)], gold)
        for (logprobs, gold), lengths in zip(choice_scores(results), sizes(results, lengths_of), strict=True)
    ]


def calibration_gaps(results: Sequence[ItemResult]) -> list[float]:
    """Return values whose mean is the expected calibration error over bins of equal width (arXiv 1706.04599).

    A bin's confidence is the mean probability of the preferred choices, its gap the confidence minus the accuracy. An
    item's value is its own gap times the sign of its bin's gap, so that the mean of the values is the mean absolute gap
    of the bins, weighted by their number of items.
    """
    confidences, bins = confidences_of(results)
    rights = [gold_share(logprobs, gold) for logprobs, gold in choice_scores(results)]
    gaps = [confidence - right for confidence, right in zip(confidences, rights, strict=True)]
    totals = [math.fsum(gap for gap, place in zip(gaps, bins, strict=True) if place == b) for b in range(NUM_BINS)]
    return [math.copysign(1.0, totals[place]) * gap for gap, place in zip(gaps, bins, strict=True)]


def calibration_bias(results: Sequence[ItemResult]) -> list[float]:
    """Return values whose mean is the expected calibration error of a perfectly calibrated model.

    Its preferred choices are correct with their own probability; a bin's gap is approximated as normal, and its
    expected absolute value is used.
    """
    confidences, bins = confidences_of(results)
    counts = Counter(bins)
    sizes = {
        b: math.sqrt(
            2 / math.pi * math.fsum(c * (1 - c) for c, place in zip(confidences, bins, strict=True) if place == b)
        )
        for b in counts
    }
    return [sizes[place] / counts[place] for place in bins]


def confidences_of(results: Sequence[ItemResult]) -> tuple[list[float], list[int]]:
    """Return the probability of each item's preferred choice, and its bin."""
    confidences = [max(probabilities(logprobs)) for logprobs, _ in choice_scores(results)]
    return confidences, [min(int(confidence * NUM_BINS), NUM_BINS - 1) for confidence in confidences]


def brier_scores(results: Sequence[ItemResult]) -> list[float]:
    """Return, for each item, the squared distance of the choices' probabilities from the gold: 0 (best) to 2."""
    return [
        math.fsum((p - (place == gold)) ** 2 for place, p in enumerate(probabilities(logprobs)))
        for logprobs, gold in choice_scores(results)
    ]


def majority(results: Sequence[ItemResult]) -> list[float]:
    """Return, for each item, 1 if its gold is the most common one, else 0: the score of always choosing that."""
    counts = Counter(result.gold for result in results)
    most = min((gold for gold, count in counts.items() if count == max(counts.values())), key=str)
    return [float(result.gold == most) for result in results]


def choice_scores(results: Sequence[ItemResult]) -> Iterator[tuple[tuple[float, ...], int]]:
    """Yield log-probabilities and the gold choice of each item. Raise Absent if any are missing or not finite."""
    known = [
        (result.logprobs, result.gold)
        for result in results
        if result.logprobs is not None and all(map(math.isfinite, result.logprobs))
    ]
    if len(known) < len(results):
        raise Absent(f'{len(results) - len(known)} of {len(results)} items have no finite log-probabilities')
    for logprobs, gold in known:
        assert isinstance(gold, int)  # the index of a choice, as choices are scored
        yield logprobs, gold


def sizes(
    results: Sequence[ItemResult], lengths_of: Callable[[ItemResult], tuple[int, ...] | None]
) -> list[tuple[int, ...]]:
    """Return the lengths of each item's choices, at least 1. Raise Absent if some are unknown."""
    known = [tuple(max(length, 1) for length in found) for result in results if (found := lengths_of(result))]
    if len(known) < len(results):
        raise Absent(f'the lengths of choices are not known of {len(results) - len(known)} of {len(results)} items')
    return known


def probabilities(logprobs: Sequence[float]) -> list[float]:
    """Return probabilities normalized over the choices."""
    highest = max(logprobs)
    parts = [math.exp(logprob - highest) for logprob in logprobs]
    whole = math.fsum(parts)
    return [part / whole for part in parts]


def gold_share(scores: Sequence[float], gold: int) -> float:
    """Return 1 if the gold choice has the highest score, 1/k in a k-way tie that includes it, else 0.

    Scores tie if they are equal up to the rounding error of numbers of their size.
    """
    best = best_of(scores)
    return 1 / len(best) if gold in best else 0.0
