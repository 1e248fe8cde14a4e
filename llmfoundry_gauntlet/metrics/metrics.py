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
NO_MEAN = 'it is no mean over items'  # why a metric has no standard error

GOLD_BITS_PER_BYTE = 'GoldBitsPerByte'
LOSSES = (GOLD_BITS_PER_BYTE, 'BrierScore', 'CalibrationError')  # the lower the better
# Facts of an item that generates: the number of tokens of the right generation, or why its bits are not known.
GOLD_TOKENS, NO_GOLD_BITS = 'gold_tokens', 'no_gold_bits_per_byte'
NOT_MEASURED = 'the row has no gold answer, or the generation is from elsewhere, without the likelihood of one'


class Absent(ValueError):
    """Raised if a metric has no value, with the reason."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a task or a category: the mean of one value per item, with the standard error of that mean.

    `values` returns the values of one or more scored items, None for an item that does not count. It raises Absent if
    they are unknown. `bounds` are the lowest and the highest value that an item can have, None where there is no limit:
    intervals stay within them, and with both, as of a share, (0, 1), they are not empty where all items are alike.
    Without `has_error` the values depend on each other, so that no standard error is known.

    A metric that is no mean has an `aggregate`, which returns it from the items; it raises Absent too. With `combine`
    the metric of a task with categories follows from their scores and the task's items, and is not their plain mean;
    without `in_categories` it is one of the whole task alone. A metric with `is_loss` is better the lower it is.
    """

    name: str
    values: Callable[[Sequence[ItemResult]], Iterable[float | None]]
    bounds: tuple[float | None, float | None] = (None, None)
    has_error: bool = True
    aggregate: Callable[[Sequence[ItemResult]], float] | None = None
    combine: Callable[[Mapping[str, TaskScore], Sequence[ItemResult]], Measure] | None = None
    in_categories: bool = True
    is_loss: bool = False

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
    if not names:
        return plain_score(task, task, metrics, results, allow_missing=allow_missing)

    results_by_category: dict[str, list[ItemResult]] = {name: [] for name in names}
    for result in results:
        if result.category is not None:
            results_by_category[result.category].append(result)
    of_categories = [metric for metric in metrics if metric.in_categories]
    categories = {
        name: plain_score(task, f'{task}/{name}', of_categories, of_category, allow_missing=allow_missing)
        for name, of_category in results_by_category.items()
    }
    return TaskScore(
        task=task,
        metrics={metric.name: over_categories(categories, metric, results) for metric in metrics},
        num_items=len(results),
        num_unscored=sum(score.num_unscored for score in categories.values()),
        num_shortened=sum(score.num_shortened for score in categories.values()),
        categories=categories,
    )


def over_categories(categories: Mapping[str, TaskScore], metric: Metric, results: Sequence[ItemResult]) -> Measure:
    """Return a metric of a task with categories: as the metric combines them, else their plain mean."""
    if metric.combine is None:
        return mean_over(categories, metric, results)
    return metric.combine(categories, results)


def mean_over(categories: Mapping[str, TaskScore], metric: Metric, results: Sequence[ItemResult]) -> Measure:
    """Return a metric's plain mean over categories; absent if it is absent in any of them.

    The categories are fixed and the items vary: each category counts with its own error.
    """
    measures = {name: score.metrics[metric.name] for name, score in categories.items()}
    if any(measure.value is None for measure in measures.values()):
        reasons = dict.fromkeys(measure.reason for measure in measures.values() if measure.reason is not None)
        return Measure(value=None, reason=unscored_reason(results) or '; '.join(reasons))
    if not metric.has_error:
        return Measure(value=mean([measure.value for measure in measures.values() if measure.value is not None]))
    first_results: dict[str, ItemResult] = {}
    for result in results:
        if result.category is not None:
            first_results.setdefault(result.category, result)
    clusters = {category: cluster_number(result) for category, result in first_results.items()}
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
    scored = [result for result in results if result.score is not None]
    reason = unscored_reason(results)
    if allow_missing and scored:
        reason = None
    if reason is None:
        clusters = cluster_numbers(scored)
        measures = {metric.name: compute_metric(metric, scored, clusters, stratum=stratum) for metric in metrics}
    else:
        measures = {metric.name: Measure(value=None, reason=reason) for metric in metrics}
    return TaskScore(
        task=task,
        metrics=measures,
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
        if metric.aggregate is not None:
            return Measure(value=metric.aggregate(results), no_error=NO_MEAN)
        values = list(metric.values(results))
    except Absent as error:
        return Measure(value=None, reason=str(error))
    known = [value for value in values if value is not None]
    if not known:
        return Measure(value=None, reason='no item has a value')
    lowest, highest = metric.limits
    outside = [value for value in known if not (math.isfinite(value) and lowest - BEYOND <= value <= highest + BEYOND)]
    if outside:
        return Measure(
            value=None, reason=f'{metric.name} of an item is {outside[0]:g}; allowed: from {lowest:g} to {highest:g}'
        )
    if not metric.has_error:
        return Measure(value=mean(known))
    has_value = [value is not None for value in values]
    task = results[0].key.task
    return mean_over_clusters(known, clusters[has_value], stratum=stratum, task=task, bounds=metric.limits)


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
        first, *_ = places
        means[first] = mean(scores_of(results[place] for place in places))
    return means


def scored_once(results: Sequence[ItemResult]) -> list[ItemResult]:
    """Return the first generation of each prompt, which has the score of all of them."""
    return [results[first] for first, *_ in places_by_problem(results)]


def places_by_problem(results: Sequence[ItemResult]) -> list[list[int]]:
    """Return the positions of each problem's programs."""
    places: dict[tuple[str | None, int, str | None], list[int]] = {}
    for place, result in enumerate(results):
        problem = result.key.file, result.key.row, result.key.variant
        places.setdefault(problem, []).append(place)
    return list(places.values())


def pass_chances(k: int, results: Sequence[ItemResult]) -> list[float | None]:
    """Return the probability that at least one of k programs passes, at the position of each problem's first program.

    Unbiased, from n programs of which c pass: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).
    """
    problems = places_by_problem(results)
    num_too_few = sum(len(places) < k for places in problems)
    if num_too_few:
        raise Absent(f'fewer than {plural(k, "program")} for {plural(num_too_few, "problem")}')
    chances: list[float | None] = [None] * len(results)
    for places in problems:
        first, *_ = places
        n = len(places)
        c = sum(results[place].score == 1 for place in places)
        chances[first] = 1 - math.comb(n - c, k) / math.comb(n, k)
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
    return Metric(GOLD_BITS_PER_BYTE, bits_per_byte, bounds=(0.0, None))


def gold_bits_of_generations() -> Metric:
    """Return the same metric for items that generate, of which the right generation was scored by likelihood."""
    return Metric(GOLD_BITS_PER_BYTE, generation_bits, bounds=(0.0, None))


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
    num_bytes = sizes(results, lambda result: result.num_bytes)
    return [
        -logprobs[gold] / math.log(2) / lengths[gold]
        for (logprobs, gold), lengths in zip(choice_scores(results), num_bytes, strict=True)
    ]


def generation_bits(results: Sequence[ItemResult]) -> list[float | None]:
    """Return the bits per byte of each prompt's right generation, at the position of the first one of the model.

    Every sample of a prompt has them, as some of its samples may be unscored.
    """
    reasons = [
        result.facts.get(NO_GOLD_BITS, NOT_MEASURED) for result in results if GOLD_BITS_PER_BYTE not in result.metrics
    ]
    if reasons:
        ((commonest, _),) = Counter(reasons).most_common(1)
        items = plural(len(results), 'item')
        raise Absent(f'{GOLD_BITS_PER_BYTE} is not known of {len(reasons)} of {items}: {commonest}')
    bits: list[float | None] = [None] * len(results)
    for first, *_ in places_by_problem(results):
        bits[first] = results[first].metrics[GOLD_BITS_PER_BYTE]
    return bits


def gold_probabilities(results: Sequence[ItemResult]) -> list[float]:
    """Return the gold choice's probability among the choices, for each item."""
    return [probabilities(logprobs)[gold] for logprobs, gold in choice_scores(results)]


def matches(lengths_of: Callable[[ItemResult], tuple[int, ...] | None], results: Sequence[ItemResult]) -> list[float]:
    """Return each item's `gold_share` by log-probability per unit of length."""
    shares = []
    for (logprobs, gold), lengths in zip(choice_scores(results), sizes(results, lengths_of), strict=True):
        per_unit = [logprob / length for logprob, length in zip(logprobs, lengths, strict=True)]
        shares.append(gold_share(per_unit, gold))
    return shares


def calibration_gaps(results: Sequence[ItemResult]) -> list[float]:
    """Return values whose mean is the expected calibration error over bins of equal width (arXiv 1706.04599).

    A bin's confidence is the mean probability of the preferred choices, its gap the confidence minus the accuracy. An
    item's value is its own gap times the sign of its bin's gap, so that the mean of the values is the mean absolute gap
    of the bins, weighted by their number of items.
    """
    confidences, bins = confidences_of(results)
    accuracies = [gold_share(logprobs, gold) for logprobs, gold in choice_scores(results)]
    gaps = [confidence - accuracy for confidence, accuracy in zip(confidences, accuracies, strict=True)]
    gap_of_bin = sums_by_bin(gaps, bins)
    return [math.copysign(1.0, gap_of_bin[own_bin]) * gap for gap, own_bin in zip(gaps, bins, strict=True)]


def calibration_bias(results: Sequence[ItemResult]) -> list[float]:
    """Return values whose mean is the expected calibration error of a perfectly calibrated model.

    Its preferred choices are correct with their own probability; a bin's gap is approximated as normal, and its
    expected absolute value is used.
    """
    confidences, bins = confidences_of(results)
    variances = sums_by_bin([confidence * (1 - confidence) for confidence in confidences], bins)
    num_items = Counter(bins)
    expected_gaps = {own_bin: math.sqrt(2 / math.pi * variance) for own_bin, variance in variances.items()}
    return [expected_gaps[own_bin] / num_items[own_bin] for own_bin in bins]


def sums_by_bin(values: Sequence[float], bins: Sequence[int]) -> dict[int, float]:
    """Return the exact sum of the values in each bin."""
    values_by_bin: dict[int, list[float]] = {}
    for value, own_bin in zip(values, bins, strict=True):
        values_by_bin.setdefault(own_bin, []).append(value)
    return {own_bin: math.fsum(of_bin) for own_bin, of_bin in values_by_bin.items()}


def confidences_of(results: Sequence[ItemResult]) -> tuple[list[float], list[int]]:
    """Return the probability of each item's preferred choice, and its bin."""
    confidences = [max(probabilities(logprobs)) for logprobs, _ in choice_scores(results)]
    return confidences, [min(int(confidence * NUM_BINS), NUM_BINS - 1) for confidence in confidences]


def brier_scores(results: Sequence[ItemResult]) -> list[float]:
    """Return, for each item, the squared distance of the choices' probabilities from the gold: 0 (best) to 2."""
    scores = []
    for logprobs, gold in choice_scores(results):
        distances = [probability - (place == gold) for place, probability in enumerate(probabilities(logprobs))]
        scores.append(math.fsum(distance**2 for distance in distances))
    return scores


def majority(results: Sequence[ItemResult]) -> list[float]:
    """Return, for each item, 1 if its gold is the most common one, else 0: the score of always choosing that."""
    counts = Counter(result.gold for result in results)
    most = max(counts.values())
    commonest = min((gold for gold, count in counts.items() if count == most), key=str)
    return [float(result.gold == commonest) for result in results]


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
    lengths = [of_choices for of_choices in map(lengths_of, results) if of_choices]
    if len(lengths) < len(results):
        raise Absent(f'the lengths of choices are not known of {len(results) - len(lengths)} of {len(results)} items')
    return [tuple(max(length, 1) for length in of_choices) for of_choices in lengths]


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
