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
    found: dict[int, float] = {}
    for stratum in measure.spread.strata:
        for number, deviation in zip(stratum.clusters.tolist(), stratum.deviations.tolist(), strict=True):
            found[number] = found.get(number, 0.0) + deviation
    return found


def test_the_clustered_error_by_hand():
    # mean 0.5; without a cluster it is 1/4, 3/4 (three right of four) and 2/5 of the rest; G = 3
    found = over([1, 1, 0, 0, 0, 1], [7, 7, 9, 9, 9, 8])
    without = [1 / 4, 1.0, 2 / 5]  # 0 0 0 1, then 1 1 1, then 1 1 0 0 0
    assert found.value == 0.5
    expected = math.sqrt(2 / 3 * math.fsum((0.5 - value) ** 2 for value in without))
    assert found.standard_error == pytest.approx(expected, rel=1e-14)
    assert found.spread.freedom == pytest.approx(36 / (4 + 9 + 1) - 1)  # of 36 / 14 even clusters


def test_the_error_of_clusters_of_one_size_is_the_sum_over_pairs_of_a_cluster():
    random = np.random.default_rng(5)
    clusters = np.repeat(np.arange(12), 4)
    values = random.random(48) + clusters / 10
    deviations = values - values.mean()
    paper = math.sqrt((np.outer(deviations, deviations) * (clusters[:, None] == clusters)).sum()) / 48
    found = over(values.tolist(), clusters)
    assert found.standard_error == pytest.approx(paper * math.sqrt(12 / 11), rel=1e-12)
    assert found.spread.freedom == pytest.approx(11)
    assert paper > 1.5 * usual_error(values.tolist())  # where items of a cluster are alike


@given(CLUSTERED)
def test_the_clustered_error_is_a_jackknife(pairs):
    values, clusters = (list(part) for part in zip(*pairs, strict=True))
    numbers = sorted(set(clusters))
    assume(len(numbers) > 1)
    center = np.mean(values)
    without = [np.mean([value for value, cluster in pairs if cluster != number]) for number in numbers]
    expected = np.sqrt(np.sum(np.square(center - without)) * (len(numbers) - 1) / len(numbers))
    found = over(values, clusters)
    assert found.value == pytest.approx(center, abs=1e-12)
    assert found.standard_error == pytest.approx(expected, abs=1e-9)
    assert sorted(deviations_of(found)) == numbers


@given(st.lists(VALUES, min_size=2, max_size=25))
def test_the_error_of_independent_items_is_the_usual_one(values):
    assert alone(values).standard_error == pytest.approx(usual_error(values), abs=1e-11)


def test_deviations_are_ordered_by_cluster():
    # 0.5, -0.5, 0 and 0 from the mean, times sqrt(4 / 3) / 4, in whatever order the items come
    part = 0.5 * math.sqrt(4 / 3) / 4
    for values, clusters in (([1, 0.5, 0, 0.5], [30, 10, 20, 40]), ([0.5, 0.5, 0, 1], [40, 10, 20, 30])):
        found = over(values, clusters)
        assert deviations_of(found) == pytest.approx({10: 0, 20: -part, 30: part, 40: 0}, rel=1e-14)
    same = weighted_sum(
        [over([1, 0.5, 0, 0.5], [30, 10, 20, 40]), over([0.5, 0, 1, 0.5], [10, 20, 30, 40])], [1.0, -1.0]
    )
    assert same.standard_error == 0


@given(st.lists(VALUES, min_size=2, max_size=9))
def test_a_single_cluster_has_the_standard_deviation_of_its_items(values):
    found = over(values, [3] * len(values))
    assert found.standard_error == pytest.approx(statistics.stdev(values), abs=1e-9)
    (stratum,) = found.spread.strata
    assert stratum.is_borrowed and stratum.freedom == 1
    assert over(values[:1], [3]).spread is None


@given(st.data())
def test_the_order_of_items_changes_no_bit(data):
    pairs = data.draw(CLUSTERED)
    shuffled = data.draw(st.permutations(pairs))
    one, other = (over(*(list(part) for part in zip(*order, strict=True))) for order in (pairs, shuffled))
    assert (one.value, one.standard_error) == (other.value, other.standard_error)


@given(st.data())
def test_the_order_of_results_changes_no_bit(data):
    parts = st.tuples(st.sampled_from([0.0, 1 / 3, 0.5, 1.0]), st.sampled_from('ab'), st.sampled_from(['', *'cdef']))
    results = [
        item(row, credit, cluster and named(cluster), category=category)
        for row, (credit, category, cluster) in enumerate(data.draw(st.lists(parts, min_size=1, max_size=20)))
    ]
    for entries in (results, [replace(result, category=None) for result in results]):
        one, other = score_of(entries), score_of(data.draw(st.permutations(entries)))
        assert (one.value, one.standard_error) == (other.value, other.standard_error)


def test_independent_parts_add_in_quadrature():
    one, other = [1, 0, 0, 1, 1], [0.2, 0.9, 0.4]
    found = weighted_sum([alone(one), alone(other, first=5)], [0.25, -3.0])
    assert found.value == pytest.approx(0.25 * 0.6 - 3 * 0.5)
    assert found.standard_error == pytest.approx(math.hypot(0.25 * usual_error(one), 3 * usual_error(other)), rel=1e-14)


def test_a_measure_counted_twice_has_its_own_error():
    one = over([1, 0, 0, 1, 1, 0], [1, 1, 2, 2, 3, 4])
    assert one.standard_error > 0.1
    for weights in ([0.5, 0.5], [0.25, 0.75], [2.0, -1.0]):
        found = weighted_sum([one, one], weights)
        assert found.value == pytest.approx(one.value, rel=1e-14)
        assert found.standard_error == pytest.approx(one.standard_error, rel=1e-14)


@given(CLUSTERED)
def test_a_difference_from_itself_has_no_error(pairs):
    values, clusters = (list(part) for part in zip(*pairs, strict=True))
    assume(len(set(clusters)) > 1)
    found = weighted_sum([over(values, clusters)] * 2, [1.0, -1.0])
    assert (found.value, found.standard_error) == (0, 0)


def test_a_shift_changes_only_the_value():
    one = alone([1, 0, 0, 1, 1])
    found = weighted_sum([one], [1.0], shift=-0.25)
    assert found.value == pytest.approx(0.35)
    assert found.standard_error == one.standard_error


def test_an_unknown_error_of_a_part_makes_the_error_unknown():
    known, unknown = alone([1, 0, 0]), Measure(value=0.5)
    for measures in ([known, unknown], [unknown, known], [unknown]):
        found = weighted_sum(measures, [1.0] * len(measures))
        assert found.value == pytest.approx(math.fsum(measure.value for measure in measures))
        assert found.spread is None


def test_deviations_of_a_cluster_are_added_before_squaring():
    # of clusters 1, 2 and 2, 3; each mean deviates by 0.5 * sqrt(2) / 2 in its clusters
    part = math.sqrt(2) / 4
    for other, shared in (([1, 0], 0.0), ([0, 1], -2 * part)):
        found = weighted_sum([over([1, 0], [1, 2]), over(other, [2, 3])], [1.0, 1.0])
        assert deviations_of(found) == pytest.approx({1: part, 2: shared, 3: -part if shared == 0 else part})


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
    found = weighted_sum([first, second], [0.5, 0.5])
    assert found.value == 0.5
    assert found.standard_error == pytest.approx(error, abs=1e-15)


def test_rows_without_cluster_are_their_own_clusters():
    same = [
        item(0, 1.0),
        item(0, 0.0, key=ItemKey('a/0-shot', 0, sample=3)),
        item(0, 0.0, key=ItemKey('a/0-shot', 0, variant='option_order:B')),
    ]
    others = [
        item(1, 1.0),
        item(0, 1.0, task='a/5-shot'),
        item(0, 1.0, key=ItemKey('a/0-shot', 0, 'algebra')),
        item(0, 1.0, key=ItemKey('a/0-shot', 0, 'geometry')),
    ]
    assert len({cluster_number(result) for result in same}) == 1
    assert len({cluster_number(result) for result in (same[0], *others)}) == 5
    assert cluster_number(item(0, 1.0)) == cluster_number(item(0, 0.0))


def test_cluster_names_are_hexadecimal_numbers():
    results = [item(0, 1.0, '00000000000000ff'), item(1, 1.0, 'f' * 16, task='b/0-shot'), item(2, 0.0, '0' * 16)]
    found = cluster_numbers(results)
    assert (found.dtype, found.tolist()) == (np.uint64, [255, 2**64 - 1, 0])
    assert list(deviations_of(score_of(results))) == [0, 255, 2**64 - 1]


def test_samples_of_a_row_are_one_cluster():
    credits = [[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]]
    samples = [
        item(row, float(credit), key=ItemKey('a/0-shot', row, sample=sample))
        for row, values in enumerate(credits)
        for sample, credit in enumerate(values)
    ]
    found = score_of(samples)
    assert found.value == pytest.approx(5 / 12)
    assert found.standard_error == pytest.approx(usual_error([0.75, 0.0, 0.5]), rel=1e-14)  # of the rows' means


def test_intervals_are_those_of_students_t():
    # mean 2, error 1 of three items: 4.303 is the quantile of two degrees of freedom
    assert interval(alone([1, 1, 4])) == pytest.approx((2 - 4.30265, 2 + 4.30265), abs=1e-4)
    # 12.706 for one: two clusters of one size
    assert interval(over([0, 0, 2, 2], [1, 1, 2, 2])) == pytest.approx((1 - 12.7062, 1 + 12.7062), abs=1e-4)
    assert interval(Measure(value=0.5)) is None
    assert interval(Measure(value=None, reason='did not run')) is None


def test_the_interval_of_a_share_is_wilsons():
    # 3 of 10 items, and t = 2.2622 of nine degrees of freedom; the error is that of nine items
    n, p, t = 9, 0.3, 2.26216
    middle, half = (p + t**2 / 2 / n) / (1 + t**2 / n), t / (1 + t**2 / n) * math.sqrt(p * 0.7 / n + (t / 2 / n) ** 2)
    found = mean_over_clusters([1.0] * 3 + [0.0] * 7, np.arange(10, dtype=np.uint64), bounds=SHARE)
    assert interval(found) == pytest.approx((middle - half, middle + half), abs=1e-5)
    for value, expected in ((0.0, (0, 0.27753)), (1.0, (0.72247, 1))):  # 1.96² / (10 + 1.96²) from the end
        found = mean_over_clusters([value] * 10, np.arange(10, dtype=np.uint64), bounds=SHARE)
        assert found.standard_error == 0
        assert interval(found) == pytest.approx(expected, abs=1e-4)


def test_a_sum_with_a_share_of_0_has_room_above_only():
    none = mean_over_clusters([0.0] * 100, np.arange(100, dtype=np.uint64), stratum='none', bounds=SHARE)
    some = mean_over_clusters([0.0, 1.0] * 50, np.arange(100, 200, dtype=np.uint64), stratum='some', bounds=SHARE)
    found = weighted_sum([none, some], [0.5, 0.5])
    low, high = interval(found)
    t = 1.984217  # of 99 degrees of freedom, as only the second share varies
    assert found.spread.freedom == pytest.approx(99)
    assert found.value - low == pytest.approx(t * some.standard_error / 2, abs=1e-5)
    beyond = 1.96**2 / (100 + 1.96**2) / 1.96  # Wilson's end of 0 of 100, in standard errors
    assert high - found.value == pytest.approx(t * math.hypot(some.standard_error, beyond) / 2, abs=1e-5)
    turned = interval(weighted_sum([none, some], [-0.5, 0.5]))
    assert turned == pytest.approx((0.25 - (high - 0.25), 0.25 + (0.25 - low)), abs=1e-9)


def test_freedom_of_a_sum_is_satterthwaites():
    one, other = over([1.0, 3.0, 2.0], [1, 2, 3]), over([1.0, 2.0, 9.0, 4.0], [4, 5, 6, 7])
    measures = [replace_stratum(one, 'one'), replace_stratum(other, 'other')]
    found = weighted_sum(measures, [2.0, 0.5]).spread
    variances = [4 * one.standard_error**2, 0.25 * other.standard_error**2]
    assert found.freedom == pytest.approx(sum(variances) ** 2 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 3))
    assert weighted_sum([measures[0]] * 2, [0.5, 0.5]).spread.freedom == pytest.approx(2)  # the same stratum twice


def replace_stratum(measure: Measure, name: str) -> Measure:
    (stratum,) = measure.spread.strata
    return replace(measure, spread=replace(measure.spread, strata=(replace(stratum, name=name),)))


def test_the_error_of_a_mean_over_categories():
    parts = {'history': [1, 0, 0, 1, 1], 'law': [0, 1], 'physics': [0, 0, 1]}
    rows = itertools.count()
    results = [item(next(rows), float(credit), category=name) for name, credits in parts.items() for credit in credits]
    score = task_score('a/0-shot', [accuracy(METRIC)], results)
    errors = {name: usual_error(credits) for name, credits in parts.items()}
    assert {name: part.accuracy.standard_error for name, part in score.categories.items()} == pytest.approx(errors)
    assert score.accuracy.value == pytest.approx((0.6 + 0.5 + 1 / 3) / 3)
    expected = math.sqrt(math.fsum(error**2 for error in errors.values())) / 3
    assert score.accuracy.standard_error == pytest.approx(expected, rel=1e-14)


def test_categories_with_a_shared_passage_are_correlated():
    # each category has an error of 0.5, made of the same two passages; of independent ones it were 0.5 / sqrt(2)
    results = [
        item(row, credit, named(cluster), category=category)
        for row, (credit, cluster, category) in enumerate(
            [(1.0, 'a', 'law'), (0.0, 'b', 'law'), (1.0, 'a', 'history'), (0.0, 'b', 'history')]
        )
    ]
    assert score_of(results).standard_error == pytest.approx(0.5)


def test_a_category_of_one_item_borrows_its_error_from_the_others():
    results = [item(0, 1.0, category='law'), item(1, 0.0, category='law'), item(2, 1.0, category='physics')]
    score = task_score('a/0-shot', [accuracy(METRIC)], results)
    assert score.categories['law'].accuracy.standard_error == pytest.approx(0.5)
    assert score.accuracy.value == pytest.approx(0.75)
    # physics is half above the mean of the others
    assert score.accuracy.standard_error == pytest.approx(math.hypot(0.5, 0.5) / 2)
    assert [stratum.is_borrowed for stratum in score.accuracy.spread.strata] == [False, True]


def test_categories_of_one_cluster_each_are_collapsed():
    """With one item each, the error is nearly that of independent items: times 3 / sqrt(3 * 2)."""
    credits = [1.0, 0.0, 0.0]
    results = [item(row, credit, category=str(row)) for row, credit in enumerate(credits)]
    accuracy_of = task_score('a/0-shot', [accuracy(METRIC)], results).accuracy
    # distances from the mean of the other two: 1, -0.5, -0.5, over three
    assert accuracy_of.standard_error == pytest.approx(math.sqrt(1.5) / 3)
    assert accuracy_of.standard_error == pytest.approx(usual_error(credits) * math.sqrt(3 / 2))


def test_an_absent_accuracy_has_no_error():
    score = task_score('a/0-shot', [accuracy(METRIC)], [item(0, 1.0), item(1, 0.0), item(2, None)])
    assert (score.accuracy.value, score.accuracy.standard_error) == (None, None)
    left = task_score('a/0-shot', [accuracy(METRIC)], [item(0, 1.0), item(1, 0.0), item(2, None)], allow_missing=True)
    assert left.accuracy.standard_error == pytest.approx(0.5)
