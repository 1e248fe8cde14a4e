"""Metrics of a task as pure functions of its item results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from llmfoundry_gauntlet.values import ItemResult, Measure, TaskScore

MAX_REASONS = 3


def task_score(
    task: str,
    metrics: Sequence[str],
    results: Sequence[ItemResult],
    *,
    passes_at: Sequence[int] = (),
    allow_missing: bool = False,
) -> TaskScore:
    """The metrics of a task: the accuracy first, then marks, and pass@k for each k of `passes_at`; without any, counts.

    A task with categories has the plain mean over its categories. Where any item is unscored there are no metrics,
    only the reason; with `allow_missing` they are taken over the items that are scored, if there are any.
    """
    names = sorted({result.category for result in results if result.category is not None}) if metrics else []
    if not names:
        return plain_score(task, metrics, results, passes_at=passes_at, allow_missing=allow_missing)
    categories = {
        name: plain_score(
            task,
            metrics,
            [result for result in results if result.category == name],
            passes_at=passes_at,
            allow_missing=allow_missing,
        )
        for name in names
    }
    return TaskScore(
        task=task,
        metrics={metric: mean_over(categories, metric, results) for metric in (*metrics, *pass_names(passes_at))},
        num_items=len(results),
        num_unscored=sum(score.num_unscored for score in categories.values()),
        num_truncated=sum(score.num_truncated for score in categories.values()),
        categories=categories,
    )


def mean_over(categories: Mapping[str, TaskScore], metric: str, results: Sequence[ItemResult]) -> Measure:
    """A metric's plain mean over categories, absent where it is in any of them."""
    values = [score.metrics[metric].value for score in categories.values()]
    if None in values:
        reasons = dict.fromkeys(score.metrics[metric].reason for score in categories.values())
        return Measure(value=None, reason=unscored_reason(results) or '; '.join(filter(None, reasons)))
    return Measure(value=mean(values))


def plain_score(
    task: str,
    metrics: Sequence[str],
    results: Sequence[ItemResult],
    *,
    passes_at: Sequence[int],
    allow_missing: bool,
) -> TaskScore:
    """Means over items that are not told apart by category."""
    reason = unscored_reason(results)
    scored = [result for result in results if result.credit is not None]
    if allow_missing and scored:
        reason = None
    measures: dict[str, Measure] = {}
    if reason is not None:
        measures = dict.fromkeys((*metrics, *pass_names(passes_at)), Measure(value=None, reason=reason))
    elif metrics:
        measures[metrics[0]] = Measure(value=mean([result.credit for result in scored]))
        for mark in metrics[1:]:
            measures[mark] = mean_mark(mark, scored)
        for k in passes_at:
            value, error = pass_at(k, scored)
            measures[f'PassAt{k}'], measures[f'PassAt{k}StandardError'] = value, error
    return TaskScore(
        task=task,
        metrics=measures,
        num_items=len(results),
        num_unscored=sum(result.credit is None for result in results),
        num_truncated=sum(result.truncated for result in results),
    )


def mean_mark(mark: str, results: Sequence[ItemResult]) -> Measure:
    """The mean of a mark, absent where some items lack it."""
    values = [result.marks[mark] for result in results if mark in result.marks]
    if len(values) < len(results):
        return Measure(
            value=None, reason=f'{mark} is not known of {len(results) - len(values)} of {len(results)} items'
        )
    return Measure(value=mean(values))


def pass_names(passes_at: Sequence[int]) -> list[str]:
    """The metrics of pass@k for each k."""
    return [name for k in passes_at for name in (f'PassAt{k}', f'PassAt{k}StandardError')]


def pass_at(k: int, results: Sequence[ItemResult]) -> tuple[Measure, Measure]:
    """The probability that one of k programs passes, as a mean over problems, and its standard error over problems.

    Unbiased, from n programs of which c pass: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).
    """
    credits: dict[tuple[str | None, int, str | None], list[float]] = {}
    for result in results:
        credits.setdefault((result.key.file, result.key.row, result.key.variant), []).append(result.credit)
    if fewest := [len(values) for values in credits.values() if len(values) < k]:
        short = Measure(value=None, reason=f'{len(fewest)} problems have less than {k} programs')
        return short, short
    chances = []
    for values in credits.values():
        n, c = len(values), sum(value == 1 for value in values)
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


def mean(values: Sequence[float | None]) -> float:
    """The arithmetic mean; every value must be there."""
    return sum(values) / len(values)
