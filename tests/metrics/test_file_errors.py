"""The error of a subset about the score of its whole files, and the shares of tasks in a composite's variance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from clustered_items import METRIC, item, named, score_of, usual_error

from llmfoundry_gauntlet.data.examples import in_turns
from llmfoundry_gauntlet.metrics.comparison import difference, spread_of_file
from llmfoundry_gauntlet.metrics.metrics import accuracy, task_score
from llmfoundry_gauntlet.metrics.statistics import (
    SHARE,
    interval,
    mean_over_clusters,
    variance_shares,
    weighted_sum,
)
from llmfoundry_gauntlet.types import Example, Measure


def file_error(measure: Measure) -> float | None:
    spread = spread_of_file(measure.spread)
    return None if spread is None else spread.standard_error


def over(values: Any, clusters: Any, file_sizes: Any, **options: Any) -> Measure:
    clusters = np.array(clusters, np.uint64)
    return mean_over_clusters(list(values), clusters, file_sizes=np.array(file_sizes), **options)


def test_the_error_of_a_subset_shrinks_with_its_share_of_the_file():
    """200 of 273 independent items: 1.9 times closer to the full score than to that of other items."""
    found = over([1.0, 0.0] * 100, range(200), [1] * 273)
    assert file_error(found) == pytest.approx(found.standard_error * math.sqrt(73 / 273))
    assert found.standard_error / file_error(found) == pytest.approx(1.934, abs=1e-3)
    assert spread_of_file(found.spread).freedom == pytest.approx(199)


def test_the_error_with_pairs_by_hand():
    # three of four pairs, one of them half: n = 5 of N = 8, P = (4 + 4 + 1) / 25
    # A is the sum of (m / 5 - M / 8)²: 2 x (2/5 - 1/4)², (1/5 - 1/4)², (1/4)²
    values, clusters = [1.0, 0.5, 0.0, 0.5, 1.0], [1, 1, 2, 2, 3]
    found = over(values, clusters, [2, 2, 2, 2])
    within = (2 * 0.25**2 + 2 * 0.25**2) / 2  # of two repeats
    between = found.standard_error**2 - within / 5
    # the half pair may be any, so that m M is 5 x 2
    a, p = 9 / 25 - 2 * 10 / 40 + 4 * (2 / 8) ** 2, 9 / 25
    assert a == pytest.approx(2 * (2 / 5 - 1 / 4) ** 2 + (1 / 5 - 1 / 4) ** 2 + (1 / 4) ** 2)
    assert file_error(found) == pytest.approx(math.sqrt(between * a / p + within * (1 / 5 - 1 / 8)))


def test_where_no_cluster_has_two_items_the_larger_error_is_taken():
    found = over([1.0, 0.0, 0.0, 1.0], range(4), [3] * 6)
    # as if items were independent: 4 of 18; if clusters were all alike, it would be 4 of 6
    assert file_error(found) == pytest.approx(found.standard_error * math.sqrt(14 / 18))


@pytest.mark.parametrize(
    ('file_sizes', 'expected'), [([1, 1, 1], None), ([], None), (None, None), ([1, 1, 1, 1], 0.5 * 2 / 3)]
)
def test_only_a_known_part_of_a_file_has_such_an_error(file_sizes, expected):
    sizes = None if file_sizes is None else np.array(file_sizes, np.int64)
    found = mean_over_clusters([1.0, 0.0, 0.0], np.arange(3, dtype=np.uint64), file_sizes=sizes)
    assert found.standard_error == pytest.approx(1 / 3)
    assert file_error(found) == (expected if expected is None else pytest.approx(1 / 3 * math.sqrt(1 / 4)))


def test_a_whole_task_adds_nothing_to_the_error_of_a_composite():
    part = over([1.0, 0.0, 0.0, 1.0], range(4), [1] * 16, stratum='part')
    whole = over([1.0, 0.0, 1.0], range(10, 13), [1] * 3, stratum='whole')
    found = weighted_sum([part, whole], [0.5, 0.5])
    assert found.standard_error == pytest.approx(math.hypot(part.standard_error, whole.standard_error) / 2)
    assert file_error(found) == pytest.approx(part.standard_error * math.sqrt(12 / 16) / 2)
    unknown = mean_over_clusters([1.0, 0.0], np.array([20, 21], np.uint64), stratum='unknown')
    assert file_error(weighted_sum([part, unknown], [0.5, 0.5])) is None


def test_the_error_of_categories_is_theirs_together():
    rows = {'law': [1.0, 0.0, 0.0, 1.0], 'physics': [1.0, 0.0], 'lonely': [1.0]}
    results = [
        item(10 * place + row, credit, category=name)
        for place, (name, credits) in enumerate(rows.items())
        for row, credit in enumerate(credits)
    ]
    sizes = {'law': np.ones(8, int), 'physics': np.ones(2, int), 'lonely': np.ones(1, int)}
    score = task_score('a/0-shot', [accuracy(METRIC)], results, file_sizes=sizes)
    law = usual_error(rows['law']) * math.sqrt(1 / 2)
    assert file_error(score.categories['law'].accuracy) == pytest.approx(law)
    assert file_error(score.accuracy) == pytest.approx(law / 3)  # the others are whole
    lost = task_score('a/0-shot', [accuracy(METRIC)], results, file_sizes={**sizes, 'art': np.ones(5, int)})
    assert file_error(lost.accuracy) is None  # nothing is known of a category without an item
    lonely = task_score('a/0-shot', [accuracy(METRIC)], results, file_sizes={**sizes, 'lonely': np.ones(4, int)})
    borrowed = abs(1.0 - 0.5) / 3 * math.sqrt(3 / 4)  # the distance from the other categories
    assert file_error(lonely.accuracy) == pytest.approx(math.hypot(law / 3, borrowed))


def test_generations_of_a_row_count_as_items_of_the_file():
    results = [item(row, float(sample < row), sample=sample) for row in range(3) for sample in range(4)]
    found = task_score('a/0-shot', [accuracy(METRIC)], results, file_sizes={None: np.full(6, 4)}).accuracy
    assert 0 < file_error(found) < found.standard_error


def test_a_difference_of_whole_files_is_about_other_items():
    one, other = (over(values, range(4), [1] * 4, stratum='a') for values in ([1, 0, 0, 1], [1, 1, 0, 1]))
    found = difference(one, other, 4)
    assert (found.is_of_file, found.difference.standard_error) == (False, pytest.approx(usual_error([0, 1, 0, 0])))


def test_runs_of_other_items_have_no_common_file_error():
    one = over([1.0, 0.0, 1.0], [1, 2, 3], [1] * 9, stratum='a')
    other = over([1.0, 0.0, 1.0, 0.0], [1, 2, 3, 3], [2] * 9, stratum='a')
    assert not difference(one, other, 3).is_of_file


def credits_of(task: str, credits: list[float], clusters: str = '') -> Measure:
    names = [named(letter) for letter in clusters] or [''] * len(credits)
    return score_of(
        [item(row, credit, name, task=task) for row, (credit, name) in enumerate(zip(credits, names, strict=True))],
        task,
    )


def test_variance_shares_are_those_of_independent_tasks():
    small, large = credits_of('small/0-shot', [1, 0, 0, 1]), credits_of('large/0-shot', [1, 0] * 50)
    composite = weighted_sum([large, small], [0.5, 0.5], shift=0.1)
    a, b = small.standard_error**2, large.standard_error**2
    shares = variance_shares(composite)
    assert shares == pytest.approx({'small/0-shot': a / (a + b), 'large/0-shot': b / (a + b)})
    assert [*shares] == ['small/0-shot', 'large/0-shot']
    assert variance_shares(weighted_sum([small, large], [1.0, 0.0]))['small/0-shot'] == 1


def test_variance_shares_split_what_tasks_have_in_common():
    # both vary with passages a and b: (0.5 + 0.25)² of deviations 0.5 and 0.25; halves of the covariance to each
    first, second = credits_of('first/0-shot', [1, 0], 'ab'), credits_of('second/0-shot', [1, 0], 'ab')
    shares = variance_shares(weighted_sum([first, second], [1.0, 0.5]))
    assert shares == pytest.approx({'first/0-shot': 2 / 3, 'second/0-shot': 1 / 3})
    assert sum(shares.values()) == pytest.approx(1)


def test_variance_shares_of_categories_are_those_of_their_task():
    rows = [(1.0, 'law'), (0.0, 'law'), (1.0, 'art'), (0.0, 'art'), (0.0, 'art'), (1.0, 'lonely')]
    results = [item(row, credit, category=name) for row, (credit, name) in enumerate(rows)]
    score = task_score('a/0-shot', [accuracy(METRIC)], results).accuracy
    other = credits_of('b/0-shot', [1, 0, 0])
    shares = variance_shares(weighted_sum([score, other], [0.5, 0.5]))
    assert [*shares] == ['b/0-shot', 'a/0-shot'] and sum(shares.values()) == pytest.approx(1)
    assert variance_shares(Measure(value=0.5)) == variance_shares(credits_of('c/0-shot', [1, 1])) == {}


# Simulation, with the cluster sizes of real files.

FILES = {  # the number of clusters of each size
    'winograd': {1: 10, 2: 123, 3: 1, 4: 2, 6: 1},
    'lsat_rc': {1: 1, 5: 6, 6: 11, 7: 13, 8: 10},
    'conlang': {20: 6, 21: 1, 23: 1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('file', 'num_items', 'correlation'),
    [
        ('winograd', 200, 0.0),
        ('winograd', 200, 0.3),
        ('winograd', 137, 0.0),
        ('lsat_rc', 41, 0.0),
        ('lsat_rc', 150, 0.2),
        ('lsat_rc', 250, 0.5),
        ('conlang', 100, 0.2),
    ],
)
def test_coverage_of_the_difference_over_whole_files(file: str, num_items: int, correlation: float):
    """Outcomes are fixed by a model; which items are taken is chance."""
    random = np.random.default_rng(num_items)
    sizes = np.repeat([*FILES[file]], [*FILES[file].values()])
    clusters = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
    orders = []
    for _ in range(20):  # clusters with other names are taken in another order
        names = random.permutation(len(sizes))[clusters]
        rows = [Example(row=row, content=None, cluster=f'{name:016x}') for row, name in enumerate(names)]
        orders.append(in_turns(rows)[:num_items])
    covered, draws = 0, 800
    for draw in range(draws):
        chosen = orders[draw % len(orders)]
        runs, truths = [], []
        for _ in range(2):
            common = np.repeat(random.normal(size=len(sizes)), sizes)
            own = random.normal(size=len(clusters))
            rights = (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own < 0.3).astype(float)
            truths.append(rights.mean())
            runs.append(mean_over_clusters(rights[chosen].tolist(), clusters[chosen], bounds=SHARE, file_sizes=sizes))
        found = difference(*runs, num_items)
        assert found.is_of_file
        low, high = interval(found.difference)
        covered += low <= truths[1] - truths[0] <= high
    assert 0.93 <= covered / draws <= 0.972
