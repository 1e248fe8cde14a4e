"""Metrics of a task as pure functions of its item results."""

from __future__ import annotations

from collections.abc import Sequence

from llmfoundry_gauntlet.values import ItemResult, Measure, TaskScore

MAX_REASONS = 3


def task_score(task: str, metric: str, results: Sequence[ItemResult]) -> TaskScore:
    """Accuracy of a task under the name `metric`.

    A task with categories has the plain mean over its categories. Where any item is unscored there is no accuracy,
    only the reason.
    """
    names = sorted({result.category for result in results if result.category is not None})
    if not names:
        return plain_score(task, metric, results)
    categories = {
        name: plain_score(task, metric, [result for result in results if result.category == name]) for name in names
    }
    absent = [name for name in names if categories[name].metrics[metric].value is None]
    if absent:
        overall = Measure(value=None, reason=unscored_reason(results))
    else:
        overall = Measure(value=mean([categories[name].metrics[metric].value for name in names]))
    return TaskScore(
        task=task,
        metrics={metric: overall},
        num_items=len(results),
        num_unscored=sum(score.num_unscored for score in categories.values()),
        num_truncated=sum(score.num_truncated for score in categories.values()),
        categories=categories,
    )


def plain_score(task: str, metric: str, results: Sequence[ItemResult]) -> TaskScore:
    """Mean credit of items that are not told apart by category."""
    reason = unscored_reason(results)
    accuracy = (
        Measure(value=mean([result.credit for result in results]))
        if reason is None
        else Measure(value=None, reason=reason)
    )
    return TaskScore(
        task=task,
        metrics={metric: accuracy},
        num_items=len(results),
        num_unscored=sum(result.credit is None for result in results),
        num_truncated=sum(result.truncated for result in results),
    )


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
