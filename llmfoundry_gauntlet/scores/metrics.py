"""Metrics of a task as pure functions of its item results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from llmfoundry_gauntlet.values import ItemResult, Measure, TaskScore

MAX_REASONS = 3


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a task or a category. `value` makes it of the results of items that are scored, one at least."""

    name: str
    value: Callable[[Sequence[ItemResult]], Measure]


def accuracy(name: str) -> Metric:
    """The mean credit, under the name that a task type gives it."""
    return Metric(name, lambda results: Measure(value=mean(credits_of(results))))


def mark(name: str) -> Metric:
    """The mean of a mark that the task type's `judge` gives every item, absent where some items lack it."""
    return Metric(name, partial(mean_mark, name))


def passes_at(ks: Sequence[int]) -> tuple[Metric, ...]:
    """pass@k for each k, and its standard error beside it."""

    def part(k: int, place: int, results: Sequence[ItemResult]) -> Measure:
        return pass_at(k, results)[place]

    return tuple(
        Metric(name, partial(part, k, place))
        for k in ks
        for place, name in enumerate((f'PassAt{k}', f'PassAt{k}StandardError'))
    )


def task_score(
    task: str, metrics: Sequence[Metric], results: Sequence[ItemResult], *, allow_missing: bool = False
) -> TaskScore:
    """The metrics of a task, in order; without any, counts alone.

    A task with categories has the plain mean over its categories. Where any item is unscored there are no metrics,
    only the reason; with `allow_missing` they are taken over the items that are scored, if there are any.
    """
    names = sorted({result.category for result in results if result.category is not None}) if metrics else []
    if not names:
        return plain_score(task, metrics, results, allow_missing=allow_missing)
    categories = {
        name: plain_score(
            task, metrics, [result for result in results if result.category == name], allow_missing=allow_missing
        )
        for name in names
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
    """A metric's plain mean over categories, absent where it is in any of them."""
    measures = [score.metrics[metric] for score in categories.values()]
    values = [measure.value for measure in measures if measure.value is not None]
    if len(values) < len(measures):
        reasons = dict.fromkeys(measure.reason for measure in measures if measure.reason is not None)
        return Measure(value=None, reason=unscored_reason(results) or '; '.join(reasons))
    return Measure(value=mean(values))


def plain_score(
    task: str, metrics: Sequence[Metric], results: Sequence[ItemResult], *, allow_missing: bool
) -> TaskScore:
    """Metrics over items that are not told apart by category."""
    reason = unscored_reason(results)
    scored = [result for result in results if result.credit is not None]
    if allow_missing and scored:
        reason = None
    return TaskScore(
        task=task,
        metrics={
            metric.name: metric.value(scored) if reason is None else Measure(value=None, reason=reason)
            for metric in metrics
        },
        num_items=len(results),
        num_unscored=len(results) - len(scored),
        num_truncated=sum(result.truncated for result in results),
    )


def mean_mark(name: str, results: Sequence[ItemResult]) -> Measure:
    """The mean of a mark, absent where some items lack it."""
    values = [result.marks[name] for result in results if name in result.marks]
    if len(values) < len(results):
        return Measure(
            value=None, reason=f'{name} is not known of {len(results) - len(values)} of {len(results)} items'
        )
    return Measure(value=mean(values))


def pass_at(k: int, results: Sequence[ItemResult]) -> tuple[Measure, Measure]:
    """The probability that one of k programs passes, as a mean over problems, and its standard error over problems.

    Unbiased, from n programs of which c pass: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).
    """
    problems: dict[tuple[str | None, int, str | None], list[ItemResult]] = {}
    for result in results:
        problems.setdefault((result.key.file, result.key.row, result.key.variant), []).append(result)
    if fewest := [group for group in problems.values() if len(group) < k]:
        short = Measure(value=None, reason=f'{len(fewest)} problems have less than {k} programs')
        return short, short
    chances = []
    for group in problems.values():
        n, c = len(group), sum(result.credit == 1 for result in group)
        chances.append(1 - math.comb(n - c, k) / math.comb(n, k))
    value = Measure(value=mean(chances))
    if len(chances) < 2:
        return value, Measure(value=None, reason='a single problem has no standard error')
    return value, Measure(value=statistics.stdev(chances) / math.sqrt(len(chances)))


def unscored_reason(results: Sequence[ItemResult]) -> str | None:
    """'n of m items unscored: ...' with the commonest reasons, None where every item has its credit."""
    if not results:
        return 'there are no items'
    reasons = [result.reason or 'no reason given' for result in results if result.credit is None]
    if not reasons:
        return None
    commonest = sorted(set(reasons), key=lambda reason: (-reasons.count(reason), reason))[:MAX_REASONS]
    return f'{len(reasons)} of {len(results)} items unscored: {"; ".join(commonest)}'


def credits_of(results: Iterable[ItemResult]) -> list[float]:
    """The credits of items that are scored."""
    return [result.credit for result in results if result.credit is not None]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)
