"""The shares of tasks in the variance of a composite."""

from __future__ import annotations

import pytest
from clustered_items import METRIC, item, named, score_of

from llmfoundry_gauntlet.metrics.metrics import accuracy, task_score
from llmfoundry_gauntlet.metrics.statistics import variance_shares, weighted_sum
from llmfoundry_gauntlet.types import Measure


def accuracy_of(task: str, scores: list[float], clusters: str = '') -> Measure:
    """Return the accuracy of a task over items with these scores, of clusters named by letters if given."""
    names = [named(letter) for letter in clusters] or [''] * len(scores)
    items = [item(row, score, name, task=task) for row, (score, name) in enumerate(zip(scores, names, strict=True))]
    return score_of(items, task)


def test_variance_shares_are_those_of_independent_tasks():
    small = accuracy_of('small/0-shot', [1, 0, 0, 1])
    large = accuracy_of('large/0-shot', [1, 0] * 50)

    shares = variance_shares(weighted_sum([large, small], [0.5, 0.5], shift=0.1))

    variance_of_small, variance_of_large = small.standard_error**2, large.standard_error**2
    variance = variance_of_small + variance_of_large
    assert [*shares] == ['small/0-shot', 'large/0-shot']
    assert shares['small/0-shot'] == pytest.approx(variance_of_small / variance)
    assert shares['large/0-shot'] == pytest.approx(variance_of_large / variance)


def test_a_task_without_weight_has_no_share():
    small, large = accuracy_of('small/0-shot', [1, 0, 0, 1]), accuracy_of('large/0-shot', [1, 0] * 50)

    assert variance_shares(weighted_sum([small, large], [1.0, 0.0]))['small/0-shot'] == 1


def test_variance_shares_split_what_tasks_have_in_common():
    # Both vary with passages a and b: (0.5 + 0.25)² of deviations 0.5 and 0.25; half of the covariance to each.
    first, second = accuracy_of('first/0-shot', [1, 0], 'ab'), accuracy_of('second/0-shot', [1, 0], 'ab')

    shares = variance_shares(weighted_sum([first, second], [1.0, 0.5]))

    assert shares == pytest.approx({'first/0-shot': 2 / 3, 'second/0-shot': 1 / 3})


def test_variance_shares_of_categories_are_those_of_their_task():
    rows = [(1.0, 'law'), (0.0, 'law'), (1.0, 'art'), (0.0, 'art'), (0.0, 'art'), (1.0, 'lonely')]
    results = [item(row, score, category=category) for row, (score, category) in enumerate(rows)]
    with_categories = task_score('a/0-shot', [accuracy(METRIC)], results).accuracy
    other = accuracy_of('b/0-shot', [1, 0, 0])

    shares = variance_shares(weighted_sum([with_categories, other], [0.5, 0.5]))

    assert [*shares] == ['b/0-shot', 'a/0-shot']
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    'measure',
    [
        Measure(value=0.5),  # whose error is unknown
        accuracy_of('c/0-shot', [1, 1]),  # whose items are all right
    ],
)
def test_there_are_no_shares_without_a_variance(measure):
    assert variance_shares(measure) == {}
