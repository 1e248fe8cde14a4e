"""Metrics of a task as pure functions of its item results: each is the mean of one value per item."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmfoundry_gauntlet.metrics.statistics import cluster_numbers, mean_over_clusters, weighted_sum
from llmfoundry_gauntlet.types import ItemResult, Measure, TaskScore

if TYPE_CHECKING:
    from llmfoundry_gauntlet.types import ClusterNumbers

MAX_REASONS = 3
RENAMED = {'CutShare': 'TruncatedShare'}  # metrics by their earlier names, which are still read


class Absent(ValueError):
    """Raised if a metric has no value, with the reason."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a task or a category: the mean of one value per item, with the standard error of that mean.

    `values` returns them for scored items, at least one; None for an item that does not count. It raises Absent if
    there is no such number.
    """

    name: str
    values: Callable[[Sequence[ItemResult]], Iterable[float | None]]


def accuracy(name: str) -> Metric:
    """Return the mean score, under the name given by a task type."""
    return Metric(name, scores_of)


def item_metric(name: str) -> Metric:
    """Return the mean of a metric that the task type's scorer gives every item; absent if some items lack it."""
    return Metric(name, partial(item_metric_values, name))


def passes_at(ks: Sequence[int]) -> tuple[Metric, ...]:
    """Return pass@k for each k."""
    return tuple(Metric(f'PassAt{k}', partial(pass_chances, k)) for k in ks)


def task_score(
    task: str, metrics: Sequence[Metric], results: Sequence[ItemResult], *, allow_missing: bool = False
) -> TaskScore:
    """Return the metrics of a task, in order; only counts without any metric.

    A task with categories has the plain mean over its categories. If any item is unscored there are no metrics, only
    the reason; with `allow_missing` they are taken over the scored items, if there are any.
    """
    names = sorted({result.category for result in results if result.category is not None}) if metrics else []
    if not names:
        return plain_score(task, metrics, results, allow_missing=allow_missing)
    parts: dict[str, list[ItemResult]] = {name: [] for name in names}
    for result in results:
        if result.category is not None:
            parts[result.category].append(result)
    categories = {
        name: plain_score(task, metrics, members, allow_missing=allow_missing) for name, members in parts.items()
    }
    return TaskScore(
        task=task,
        metrics={metric.name: mean_over(categories, metric.name, results) for metric in metrics},
        num_items=len(results),
        num_unscored=sum(score.num_unscored for score in categories.values()),
        num_truncated=sum(score.num_truncated for score in categories.values()),
        categories=categories,
    )


def mean_over(categories: Mapping[str, TaskScore], metric: str, results: Sequence[ItemResult]) -> Measure:
    """Return a metric's plain mean over categories; absent if it is absent in any of them.

    The categories are fixed and the items vary: each category counts with its own error.
    """
    measures = [score.metrics[metric] for score in categories.values()]
    if any(measure.value is None for measure in measures):
        reasons = dict.fromkeys(measure.reason for measure in measures if measure.reason is not None)
        return Measure(value=None, reason=unscored_reason(results) or '; '.join(reasons))
    return weighted_sum(measures, [1 / len(measures)] * len(measures))


def plain_score(
    task: str, metrics: Sequence[Metric], results: Sequence[ItemResult], *, allow_missing: bool
) -> TaskScore:
    """Return metrics over items, regardless of category."""
    reason = unscored_reason(results)
    scored = [result for result in results if result.score is not None]
    if allow_missing and scored:
        reason = None
    clusters = cluster_numbers(scored if reason is None else ())
    return TaskScore(
        task=task,
        metrics={
            metric.name: measure(metric, scored, clusters) if reason is None else Measure(value=None, reason=reason)
            for metric in metrics
        },
        num_items=len(results),
        num_unscored=len(results) - len(scored),
        num_truncated=sum(result.truncated for result in results),
    )


def measure(metric: Metric, results: Sequence[ItemResult], clusters: ClusterNumbers | None = None) -> Measure:
    """Return a metric of scored results. `clusters` has the numbers of their clusters, uint64 [N]."""
    if clusters is None:
        clusters = cluster_numbers(results)
    try:
        values = list(metric.values(results))
    except Absent as error:
        return Measure(value=None, reason=str(error))
    known = [value is not None for value in values]
    if not any(known):
        return Measure(value=None, reason='no item has a value')
    return mean_over_clusters([value for value in values if value is not None], clusters[known])


def item_metric_values(name: str, results: Sequence[ItemResult]) -> list[float]:
    """Return a metric of every item that has it."""
    values = [result.metrics[name] for result in results if name in result.metrics]
    if len(values) < len(results):
        raise Absent(f'{name} is not known of {len(results) - len(values)} of {len(results)} items')
    return values


def pass_chances(k: int, results: Sequence[ItemResult]) -> list[float | None]:
    """Yield the probability that one of k programs passes, at each problem's first program.

    Unbiased, from n programs of which c pass: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).
    """
    problems: dict[tuple[str | None, int, str | None], list[int]] = {}
    for place, result in enumerate(results):
        problems.setdefault((result.key.file, result.key.row, result.key.variant), []).append(place)
    if fewest := [places for places in problems.values() if len(places) < k]:
        raise Absent(f'{len(fewest)} problems have less than {k} programs')
    chances: list[float | None] = [None] * len(results)
    for places in problems.values():
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
    return f'{len(reasons)} of {len(results)} items unscored: {"; ".join(commonest)}'


def scores_of(results: Iterable[ItemResult]) -> list[float]:
    """Return the scores of scored items."""
    return [result.score for result in results if result.score is not None]
