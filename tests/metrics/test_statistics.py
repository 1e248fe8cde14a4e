"""Standard errors by the formulas of arXiv 2411.00640, of items, tasks and categories."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from clustered_items import METRIC, item, named, score_of, usual_error
from hypothesis import assume, given
from hypothesis import strategies as st

from llmfoundry_gauntlet.metrics.metrics import accuracy, task_score
from llmfoundry_gauntlet.metrics.statistics import (
    SHARE,
    cluster_number,
    cluster_numbers,
    interval,
    mean_over_categories,
    mean_over_clusters,
    weighted_sum,
)
from llmfoundry_gauntlet.types import ItemKey, Measure

VALUES = st.floats(-1e3, 1e3, allow_nan=False)
CLUSTERED = st.lists(st.tuples(VALUES, st.integers(0, 5)), min_size=1, max_size=25)


def over(values: Sequence[float], clusters: Sequence[int]) -> Measure:
    return mean_over_clusters(values, np.array(clusters, np.uint64))


def alone(values: Sequence[float], first: int = 0) -> Measure:
    """Return the mean of independent items whose cluster numbers start at `first`."""
    return over(values, range(first, first + len(values)))


def deviations_of(measure: Measure) -> dict[int, float]:
    """Return the deviation of each cluster, those of all strata added."""
    deviations: dict[int, float] = {}
    for stratum in measure.spread.strata:
        for number, deviation in zip(stratum.clusters.tolist(), stratum.deviations.tolist(), strict=True):
            deviations[number] = deviations.get(number, 0.0) + deviation
    return deviations


def share_of(values: Sequence[float], *, first: int = 0, stratum: str = '') -> Measure:
    """Return the mean of independent items whose values are from 0 to 1; their clusters start at `first`."""
    clusters = np.arange(first, first + len(values), dtype=np.uint64)
    return mean_over_clusters(values, clusters, stratum=stratum, bounds=SHARE)


# One task.


def test_the_clustered_error_by_hand():
    measure = over([1, 1, 0, 0, 0, 1], [7, 7, 9, 9, 9, 8])

    # The means without cluster 7 (0 0 0 1), 9 (1 1 1) and 8 (1 1 0 0 0), of three clusters.
    means_without = [1 / 4, 1.0, 2 / 5]
    expected = math.sqrt(2 / 3 * math.fsum((0.5 - mean) ** 2 for mean in means_without))
    assert measure.value == 0.5
    assert measure.standard_error == pytest.approx(expected, rel=1e-14)
    assert measure.spread.freedom == pytest.approx(36 / (4 + 9 + 1) - 1)  # of 36 / 14 even clusters


def test_the_error_of_clusters_of_one_size_is_the_sum_over_pairs_of_a_cluster():
    random = np.random.default_rng(5)
    clusters = np.repeat(np.arange(12), 4)
    values = random.random(48) + clusters / 10
    deviations = values - values.mean()
    paper = math.sqrt((np.outer(deviations, deviations) * (clusters[:, None] == clusters)).sum()) / 48

    measure = over(values.tolist(), clusters)

    assert measure.standard_error == pytest.approx(paper * math.sqrt(12 / 11), rel=1e-12)
    assert measure.spread.freedom == pytest.approx(11)
    assert paper > 1.5 * usual_error(values.tolist())  # where items of a cluster are alike


@given(CLUSTERED)
def test_the_clustered_error_is_a_jackknife(pairs):
    values, clusters = (list(part) for part in zip(*pairs, strict=True))
    numbers = sorted(set(clusters))
    assume(len(numbers) > 1)
    center = np.mean(values)
    means_without = [np.mean([value for value, cluster in pairs if cluster != number]) for number in numbers]
    jackknife = np.sqrt(np.sum(np.square(center - means_without)) * (len(numbers) - 1) / len(numbers))

    measure = over(values, clusters)

    assert measure.value == pytest.approx(center, abs=1e-12)
    assert measure.standard_error == pytest.approx(jackknife, abs=1e-9)
    assert sorted(deviations_of(measure)) == numbers


@given(st.lists(VALUES, min_size=2, max_size=25))
def test_the_error_of_independent_items_is_the_usual_one(values):
    assert alone(values).standard_error == pytest.approx(usual_error(values), abs=1e-11)


@pytest.mark.parametrize(
    ('values', 'clusters'),
    [
        ([1, 0.5, 0, 0.5], [30, 10, 20, 40]),
        ([0.5, 0.5, 0, 1], [40, 10, 20, 30]),
    ],
)
def test_deviations_are_ordered_by_cluster(values, clusters):
    # 0.5, -0.5, 0 and 0 from the mean, times sqrt(4 / 3) / 4.
    part = 0.5 * math.sqrt(4 / 3) / 4

    deviations = deviations_of(over(values, clusters))

    assert deviations == pytest.approx({10: 0, 20: -part, 30: part, 40: 0}, rel=1e-14)


def test_the_same_items_in_another_order_differ_by_exactly_nothing():
    measure = over([1, 0.5, 0, 0.5], [30, 10, 20, 40])
    reordered = over([0.5, 0, 1, 0.5], [10, 20, 30, 40])

    assert weighted_sum([measure, reordered], [1.0, -1.0]).standard_error == 0


@given(st.lists(VALUES, min_size=2, max_size=9))
def test_a_single_cluster_has_the_standard_deviation_of_its_items(values):
    measure = over(values, [3] * len(values))

    assert measure.standard_error == pytest.approx(statistics.stdev(values), abs=1e-9)
    (stratum,) = measure.spread.strata
    assert stratum.is_borrowed
    assert stratum.freedom == 1


def test_the_error_of_a_single_item_is_unknown():
    assert over([0.5], [3]).spread is None


@given(st.data())
def test_the_order_of_items_changes_no_bit(data):
    pairs = data.draw(CLUSTERED)
    shuffled = data.draw(st.permutations(pairs))
    measure, of_shuffled = (over(*(list(part) for part in zip(*order, strict=True))) for order in (pairs, shuffled))
    assert (measure.value, measure.standard_error) == (of_shuffled.value, of_shuffled.standard_error)


@given(st.data())
def test_the_order_of_results_changes_no_bit(data):
    fields = st.tuples(st.sampled_from([0.0, 1 / 3, 0.5, 1.0]), st.sampled_from('ab'), st.sampled_from(['', *'cdef']))
    rows = data.draw(st.lists(fields, min_size=1, max_size=20))
    results = [
        item(row, score, cluster and named(cluster), category=category)
        for row, (score, category, cluster) in enumerate(rows)
    ]
    without_categories = [replace(result, category=None) for result in results]
    for in_order in (results, without_categories):
        measure, of_shuffled = score_of(in_order), score_of(data.draw(st.permutations(in_order)))
        assert (measure.value, measure.standard_error) == (of_shuffled.value, of_shuffled.standard_error)


# Sums.


def test_independent_parts_add_in_quadrature():
    values, others = [1, 0, 0, 1, 1], [0.2, 0.9, 0.4]

    total = weighted_sum([alone(values), alone(others, first=5)], [0.25, -3.0])

    expected = math.hypot(0.25 * usual_error(values), 3 * usual_error(others))
    assert total.value == pytest.approx(0.25 * 0.6 - 3 * 0.5)
    assert total.standard_error == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize('weights', [[0.5, 0.5], [0.25, 0.75], [2.0, -1.0]])
def test_a_measure_counted_twice_has_its_own_error(weights):
    measure = over([1, 0, 0, 1, 1, 0], [1, 1, 2, 2, 3, 4])
    assert measure.standard_error > 0.1

    total = weighted_sum([measure, measure], weights)

    assert total.value == pytest.approx(measure.value, rel=1e-14)
    assert total.standard_error == pytest.approx(measure.standard_error, rel=1e-14)


@given(CLUSTERED)
def test_a_difference_from_itself_has_no_error(pairs):
    values, clusters = (list(part) for part in zip(*pairs, strict=True))
    assume(len(set(clusters)) > 1)

    difference = weighted_sum([over(values, clusters)] * 2, [1.0, -1.0])

    assert (difference.value, difference.standard_error) == (0, 0)


def test_a_shift_changes_only_the_value():
    measure = alone([1, 0, 0, 1, 1])

    shifted = weighted_sum([measure], [1.0], shift=-0.25)

    assert shifted.value == pytest.approx(0.35)
    assert shifted.standard_error == measure.standard_error


KNOWN, UNKNOWN = alone([1, 0, 0]), Measure(value=0.5)


@pytest.mark.parametrize('measures', [[KNOWN, UNKNOWN], [UNKNOWN, KNOWN], [UNKNOWN]])
def test_an_unknown_error_of_a_part_makes_the_error_unknown(measures):
    total = weighted_sum(measures, [1.0] * len(measures))

    assert total.value == pytest.approx(math.fsum(measure.value for measure in measures))
    assert total.spread is None


# Each mean of 0 and 1 deviates by 0.5 * sqrt(2) / 2 in either of its clusters.
PART = math.sqrt(2) / 4


@pytest.mark.parametrize(
    ('other', 'deviations'),
    [
        ([1, 0], {1: PART, 2: 0.0, 3: -PART}),  # cluster 2 is hard in the first task, easy in the other
        ([0, 1], {1: PART, 2: -2 * PART, 3: PART}),  # hard in both
    ],
)
def test_deviations_of_a_cluster_are_added_before_squaring(other, deviations):
    total = weighted_sum([over([1, 0], [1, 2]), over(other, [2, 3])], [1.0, 1.0])

    assert deviations_of(total) == pytest.approx(deviations)


@pytest.mark.parametrize(
    ('other', 'apart', 'error'),
    [
        ('10', False, 0.5),  # the passage that is easy in one is easy in the other
        ('01', False, 0.0),
        ('10', True, math.sqrt(0.125)),  # 0.5 * hypot(0.5, 0.5)
        ('01', True, math.sqrt(0.125)),
    ],
)
def test_tasks_with_shared_clusters_are_correlated(other: str, apart: bool, error: float):
    names = [named('c'), named('d')] if apart else [named('a'), named('b')]
    first = score_of([item(0, 1.0, named('a')), item(1, 0.0, named('b'))])
    second = score_of(
        [item(row, float(other[row]), names[row], task='b/0-shot') for row in range(2)],
        'b/0-shot',
    )
    assert first.standard_error == second.standard_error == pytest.approx(0.5)

    mean = weighted_sum([first, second], [0.5, 0.5])

    assert mean.value == 0.5
    assert mean.standard_error == pytest.approx(error, abs=1e-15)


# Clusters of results.


def test_samples_and_variants_of_a_row_without_cluster_are_one_cluster():
    results = [
        item(0, 1.0),
        item(0, 0.0),
        item(0, 0.0, key=ItemKey('a/0-shot', 0, sample=3)),
        item(0, 0.0, key=ItemKey('a/0-shot', 0, variant='option_order:B')),
    ]

    assert len({cluster_number(result) for result in results}) == 1


def test_other_rows_files_and_tasks_without_cluster_are_other_clusters():
    results = [
        item(0, 1.0),
        item(1, 1.0),
        item(0, 1.0, task='a/5-shot'),
        item(0, 1.0, key=ItemKey('a/0-shot', 0, 'algebra')),
        item(0, 1.0, key=ItemKey('a/0-shot', 0, 'geometry')),
    ]

    assert len({cluster_number(result) for result in results}) == len(results)


def test_cluster_names_are_hexadecimal_numbers():
    results = [
        item(0, 1.0, '00000000000000ff'),
        item(1, 1.0, 'f' * 16, task='b/0-shot'),
        item(2, 0.0, '0' * 16),
    ]

    numbers = cluster_numbers(results)

    assert numbers.dtype == np.uint64
    assert numbers.tolist() == [255, 2**64 - 1, 0]
    assert list(deviations_of(score_of(results))) == [0, 255, 2**64 - 1]


def test_samples_of_a_row_are_one_cluster():
    scores_of_rows = [[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]]
    samples = [
        item(row, float(score), key=ItemKey('a/0-shot', row, sample=sample))
        for row, scores in enumerate(scores_of_rows)
        for sample, score in enumerate(scores)
    ]

    measure = score_of(samples)

    assert measure.value == pytest.approx(5 / 12)
    assert measure.standard_error == pytest.approx(usual_error([0.75, 0.0, 0.5]), rel=1e-14)  # of the rows' means


# Intervals and degrees of freedom.


@pytest.mark.parametrize(
    ('measure', 'expected'),
    [
        # Mean 2 and error 1 of three items, and the quantile of two degrees of freedom.
        (alone([1, 1, 4]), (2 - 4.30265, 2 + 4.30265)),
        # Mean 1 and error 1 of two clusters of one size, and the quantile of one degree.
        (over([0, 0, 2, 2], [1, 1, 2, 2]), (1 - 12.7062, 1 + 12.7062)),
    ],
)
def test_intervals_are_those_of_students_t(measure, expected):
    assert interval(measure) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    'measure',
    [
        Measure(value=0.5),
        Measure(value=None, reason='did not run'),
    ],
)
def test_without_an_error_there_is_no_interval(measure):
    assert interval(measure) is None


def test_the_interval_of_a_share_is_wilsons():
    # The standard error is that of 9 items (10 less one degree of freedom), with Student's t of 9 degrees of freedom.
    share, num_items, t = 0.3, 9, 2.26216
    shrink = 1 + t**2 / num_items
    center = (share + t**2 / (2 * num_items)) / shrink
    half_width = t / shrink * math.sqrt(share * (1 - share) / num_items + (t / (2 * num_items)) ** 2)

    measure = share_of([1.0] * 3 + [0.0] * 7)

    assert interval(measure) == pytest.approx((center - half_width, center + half_width), abs=1e-5)


@pytest.mark.parametrize(
    ('value', 'bounds'),
    [
        (0.0, (0, 0.27753)),  # 1.96² / (10 + 1.96²) above 0
        (1.0, (0.72247, 1)),
    ],
)
def test_a_share_of_0_or_1_has_an_interval_though_its_error_is_0(value, bounds):
    measure = share_of([value] * 10)

    assert measure.standard_error == 0
    assert interval(measure) == pytest.approx(bounds, abs=1e-4)


NONE = share_of([0.0] * 100, stratum='none')
SOME = share_of([0.0, 1.0] * 50, first=100, stratum='some')


def test_a_sum_with_a_share_of_0_has_room_above_only():
    total = weighted_sum([NONE, SOME], [0.5, 0.5])

    low, high = interval(total)
    t = 1.984217  # of 99 degrees of freedom, as only the second share varies
    beyond = 1.96**2 / (100 + 1.96**2) / 1.96  # Wilson's end of 0 of 100, in standard errors
    assert total.spread.freedom == pytest.approx(99)
    assert total.value - low == pytest.approx(t * SOME.standard_error / 2, abs=1e-5)
    assert high - total.value == pytest.approx(t * math.hypot(SOME.standard_error, beyond) / 2, abs=1e-5)


def test_a_share_that_is_subtracted_has_its_room_on_the_other_side():
    low, high = interval(weighted_sum([NONE, SOME], [0.5, 0.5]))

    turned = interval(weighted_sum([NONE, SOME], [-0.5, 0.5]))

    assert turned == pytest.approx((0.25 - (high - 0.25), 0.25 + (0.25 - low)), abs=1e-9)


def in_stratum(measure: Measure, name: str) -> Measure:
    """Return the measure with this name for its stratum."""
    (stratum,) = measure.spread.strata
    return replace(measure, spread=replace(measure.spread, strata=(replace(stratum, name=name),)))


def test_freedom_of_a_sum_is_satterthwaites():
    first = in_stratum(over([1.0, 3.0, 2.0], [1, 2, 3]), 'first')  # two degrees of freedom
    second = in_stratum(over([1.0, 2.0, 9.0, 4.0], [4, 5, 6, 7]), 'second')  # three

    total = weighted_sum([first, second], [2.0, 0.5])

    variance_of_first = 4 * first.standard_error**2
    variance_of_second = 0.25 * second.standard_error**2
    variance = variance_of_first + variance_of_second
    assert total.spread.freedom == pytest.approx(variance**2 / (variance_of_first**2 / 2 + variance_of_second**2 / 3))


def test_a_stratum_counted_twice_has_its_own_freedom():
    measure = over([1.0, 3.0, 2.0], [1, 2, 3])

    assert weighted_sum([measure] * 2, [0.5, 0.5]).spread.freedom == pytest.approx(2)


# Categories.


def test_the_error_of_a_mean_over_categories():
    scores_by_category = {'history': [1, 0, 0, 1, 1], 'law': [0, 1], 'physics': [0, 0, 1]}
    rows = itertools.count()
    results = [
        item(next(rows), float(score), category=category)
        for category, scores in scores_by_category.items()
        for score in scores
    ]

    score = task_score('a/0-shot', [accuracy(METRIC)], results)

    errors = {category: usual_error(scores) for category, scores in scores_by_category.items()}
    found_errors = {category: part.accuracy.standard_error for category, part in score.categories.items()}
    assert found_errors == pytest.approx(errors)
    assert score.accuracy.value == pytest.approx((0.6 + 0.5 + 1 / 3) / 3)
    assert score.accuracy.standard_error == pytest.approx(math.hypot(*errors.values()) / 3, rel=1e-14)


def test_shares_of_questions_in_few_categories_have_the_interval_of_their_error():
    """Questions asked in ten orders vary less than rights and wrongs, also if the questions of a category are equal.

    Mutation: the variance of a right or wrong item is mixed in, which makes the interval 3.6 errors wide to each side.
    """
    shares_by_category = {'law': [0.1, 0.2, 0.1], 'history': [0.2, 0.2, 0.2], 'physics': [0.1, 0.2, 0.2]}
    measures, first_clusters = {}, {}
    clusters = itertools.count()
    for category, shares in shares_by_category.items():
        numbers = np.array([next(clusters) for _ in shares], np.uint64)
        first_clusters[category] = int(numbers[0])
        measures[category] = mean_over_clusters(shares, numbers, stratum=category, task='t', bounds=SHARE)

    whole = mean_over_categories(measures, first_clusters, bounds=SHARE)

    low, high = interval(whole)
    assert 1.9 < (high - low) / 2 / whole.standard_error < 3.2


def test_categories_with_a_shared_passage_are_correlated():
    rows = [
        (1.0, 'a', 'law'),
        (0.0, 'b', 'law'),
        (1.0, 'a', 'history'),
        (0.0, 'b', 'history'),
    ]
    results = [
        item(row, score, named(cluster), category=category) for row, (score, cluster, category) in enumerate(rows)
    ]

    # Each category has an error of 0.5, made of the same two passages; of independent ones it were 0.5 / sqrt(2).
    assert score_of(results).standard_error == pytest.approx(0.5)


def test_a_category_of_one_item_borrows_its_error_from_the_others():
    results = [
        item(0, 1.0, category='law'),
        item(1, 0.0, category='law'),
        item(2, 1.0, category='physics'),
    ]

    score = task_score('a/0-shot', [accuracy(METRIC)], results)

    # The mean of law is 0.5, its error 0.5. Physics has one item, whose distance from law's mean is its error.
    error_of_law = 0.5
    error_of_physics = 1.0 - 0.5
    assert score.categories['law'].accuracy.standard_error == pytest.approx(error_of_law)
    assert score.accuracy.value == pytest.approx((0.5 + 1.0) / 2)
    assert score.accuracy.standard_error == pytest.approx(math.hypot(error_of_law, error_of_physics) / 2)
    assert [stratum.is_borrowed for stratum in score.accuracy.spread.strata] == [False, True]


def test_categories_of_one_cluster_each_are_collapsed():
    """With one item each, the error is nearly that of independent items: times 3 / sqrt(3 * 2)."""
    scores = [1.0, 0.0, 0.0]
    results = [item(row, score, category=str(row)) for row, score in enumerate(scores)]

    measure = task_score('a/0-shot', [accuracy(METRIC)], results).accuracy

    # The distances from the mean of the other two are 1, -0.5 and -0.5, over three.
    assert measure.standard_error == pytest.approx(math.sqrt(1.5) / 3)
    assert measure.standard_error == pytest.approx(usual_error(scores) * math.sqrt(3 / 2))


ONE_UNSCORED = [item(0, 1.0), item(1, 0.0), item(2, None)]


def test_an_absent_accuracy_has_no_error():
    score = task_score('a/0-shot', [accuracy(METRIC)], ONE_UNSCORED)

    assert score.accuracy.value is None
    assert score.accuracy.standard_error is None


def test_the_accuracy_of_the_scored_items_has_their_error():
    score = task_score('a/0-shot', [accuracy(METRIC)], ONE_UNSCORED, allow_missing=True)

    assert score.accuracy.standard_error == pytest.approx(0.5)
