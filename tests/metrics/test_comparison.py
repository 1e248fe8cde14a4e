"""Differences of two runs and trends of checkpoints, checked with NumPy and hand-computed numbers.

Measures are made by `mean_over_clusters`, as those of tasks are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.metrics.comparison import (
    difference,
    holm,
    holm_in_families,
    levels_in_families,
    p_value,
    slope_of,
    trend,
)
from llmfoundry_gauntlet.metrics.statistics import SHARE, mean_over_clusters, spread_of
from llmfoundry_gauntlet.types import Measure, Stratum

ABSENT = Measure(value=None, reason='2 of 9 items unscored: there is no answer')


def measure(values: Sequence[float], clusters: Sequence[int] | None = None) -> Measure:
    """Return the mean of items, each its own cluster by default."""
    numbers = range(len(values)) if clusters is None else clusters
    return mean_over_clusters(list(map(float, values)), np.array(list(numbers), np.uint64))


def known(value: float, error: float, freedom: float) -> Measure:
    """Return a measure of two clusters with the given standard error and degrees of freedom."""
    deviations = np.array([error, -error]) / math.sqrt(2)
    stratum = Stratum(name='', clusters=np.array([1, 2], np.uint64), deviations=deviations, freedom=freedom)
    return Measure(value=value, spread=spread_of([stratum]))


def clustered_error(values: np.ndarray, clusters: Sequence[int]) -> float:
    """Return the standard error of a jackknife over clusters."""
    numbers = np.array(clusters)
    without = np.array([values[numbers != number].mean() for number in np.unique(numbers)])
    return float(np.sqrt(((without - values.mean()) ** 2).sum() * (len(without) - 1) / len(without)))


# Differences.


def test_a_difference_is_second_minus_first_with_a_paired_error():
    first = [0, 1, 0, 1, 1, 0, 0, 1]
    second = [1, 1, 0, 1, 1, 1, 0, 0]

    comparison = difference(measure(first), measure(second), 8)

    # The items change by 1, 0, 0, 0, 0, 1, 0 and -1: a mean of 1/8, and squares that sum to 3.
    sum_of_squares = 3 - 8 * (1 / 8) ** 2
    error = math.sqrt(sum_of_squares / 7 / 8)
    assert comparison.difference.value == pytest.approx(5 / 8 - 4 / 8, abs=1e-15)
    assert comparison.difference.standard_error == pytest.approx(error, abs=1e-15)
    assert comparison.p_value == pytest.approx(0.59833, abs=1e-5)  # of t = 0.5517 with seven degrees of freedom
    assert comparison.p_holm is None


def test_a_difference_keeps_both_measures_and_the_number_of_items():
    first = measure([0, 1, 0, 1, 1, 0, 0, 1])
    second = measure([1, 1, 0, 1, 1, 1, 0, 0])

    comparison = difference(first, second, 8)

    assert comparison.first.value == 0.5
    assert comparison.second.value == 0.625
    assert comparison.num_items == 8


SCORES = st.sampled_from([0.0, 0.25, 0.5, 1.0])
# Items of two runs: the first score, the second score, the cluster. There are at least two clusters.
ITEMS = st.lists(st.tuples(SCORES, SCORES, st.integers(0, 5)), min_size=2, max_size=25).filter(
    lambda items: len({cluster for _, _, cluster in items}) > 1
)


@given(ITEMS)
def test_the_error_of_a_difference_is_clustered(items):
    first, second, clusters = zip(*items, strict=True)
    changes = np.array(second) - np.array(first)

    change = difference(measure(first, clusters), measure(second, clusters), len(items)).difference

    assert change.value == pytest.approx(changes.mean(), abs=1e-14)
    assert change.standard_error == pytest.approx(clustered_error(changes, clusters), abs=1e-14)


@given(ITEMS)
def test_runs_in_the_other_order_have_the_opposite_difference(items):
    first_scores, second_scores, clusters = zip(*items, strict=True)
    first, second = measure(first_scores, clusters), measure(second_scores, clusters)

    forward = difference(first, second, len(items)).difference
    backward = difference(second, first, len(items)).difference

    assert backward.value == -forward.value
    assert backward.standard_error == pytest.approx(forward.standard_error, abs=1e-16)


@pytest.mark.parametrize(
    ('t', 'freedom', 'expected'),
    [
        (0.0, 5, 1.0),
        (1.0, 1, 0.5),  # of a Cauchy distribution
        (-1.0, 2, 1 - 1 / math.sqrt(3)),  # t / sqrt(2 + t²)
        (2.262157, 9, 0.05),
        (-2.570582, 5, 0.05),
        (1.959964, 1e9, 0.05),
        (10.0, 1e9, 1.523971e-23),  # twice the tail of a normal distribution beyond 10
    ],
)
def test_the_p_value_is_two_sided_of_students_t(t: float, freedom: float, expected: float):
    error = 0.03
    value = t * error

    assert p_value(known(value, error, freedom)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ('first', 'second', 'reason'),
    [
        (ABSENT, measure([0, 1]), ABSENT.reason),
        (measure([0, 1]), ABSENT, ABSENT.reason),
        # If both are absent, the reason is the first one's.
        (Measure(value=None, reason='did not run'), ABSENT, 'did not run'),
    ],
)
def test_a_difference_with_an_absent_measure_has_its_reason(first, second, reason):
    comparison = difference(first, second, 9)

    assert comparison.difference == Measure(value=None, reason=reason)
    assert comparison.p_value is None
    assert comparison.detectable is None
    assert comparison.num_items == 9
    assert (comparison.first, comparison.second) == (first, second)


def test_a_single_item_has_no_error_and_no_p_value():
    comparison = difference(measure([0]), measure([1]), 1)

    assert comparison.difference == Measure(value=1.0)
    assert comparison.difference.standard_error is None
    assert comparison.p_value is None
    assert comparison.detectable is None


def test_equal_runs_have_no_difference():
    values = [0.1, 0.7, 1 / 3, 0.2, 0.9]
    clusters = [1, 1, 2, 3, 3]

    comparison = difference(measure(values, clusters), measure(values, clusters), 5)

    assert comparison.difference.value == 0
    assert comparison.difference.standard_error == 0
    assert comparison.p_value == 1.0
    assert comparison.detectable is None


@pytest.mark.parametrize(
    ('first', 'second', 'clusters', 'num_clusters'),
    [
        ([0] * 6, [1] * 6, range(6), 6),
        ([0] * 6, [1] * 6, [1, 1, 2, 2, 3, 3], 3),
        # Nothing in binary is a third or a tenth.
        ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6], range(3), 3),
        ([1, 0, 0] * 3, [1, 1, 0] * 3, [1, 1, 1, 2, 2, 2, 3, 3, 3], 3),
    ],
    ids=['items', 'clusters', 'tenths', 'thirds'],
)
def test_equal_differences_of_all_clusters_are_a_sign_test(first, second, clusters, num_clusters):
    """All signs are equal in 2 of 2 ** G cases."""
    comparison = difference(measure(first, clusters), measure(second, clusters), len(first))

    assert comparison.difference.standard_error == pytest.approx(0, abs=1e-15)
    assert comparison.p_value == 2.0 ** (1 - num_clusters)
    assert comparison.detectable is None


@pytest.mark.parametrize('level', [0.05, 0.05 / 9, 0.05 / 57])
@pytest.mark.parametrize('num_items', [5, 40])
def test_the_minimum_detectable_effect_has_80_percent_power_at_the_level_of_a_star(level: float, num_items: int):
    """By simulation: an estimate with normal error, and its squared error from a chi-squared distribution."""
    random = np.random.default_rng(3)
    second = [float(number % 3 == 0) for number in range(num_items)]
    compared = replace(difference(measure([0.0] * num_items), measure(second), num_items), level=level)
    freedom = num_items - 1
    effect = compared.detectable / compared.difference.standard_error

    estimates = effect + random.normal(size=200_000)
    errors = np.sqrt(random.chisquare(freedom, 200_000) / freedom)
    p_values = 2 * scipy.stats.t.sf(np.abs(estimates / errors), freedom)

    assert np.mean(p_values < level) == pytest.approx(0.8, abs=0.005)


def test_the_minimum_detectable_effect_is_that_of_a_z_test_with_many_items():
    values = [0.0, 1.0] * 5000
    compared = difference(measure([0.0] * 10_000), measure(values), 10_000)

    # The normal quantiles 0.975 and 0.8; 0.05 / 2 / 57 leaves the quantile 3.3283.
    error = compared.difference.standard_error
    assert compared.detectable == pytest.approx((1.95996 + 0.84162) * error, rel=1e-3)
    assert replace(compared, level=0.05 / 57).detectable == pytest.approx((3.32831 + 0.84162) * error, rel=1e-3)


def test_a_difference_that_no_share_can_have_is_not_detectable():
    """Of four items, at the level of 57 comparisons, it takes more than 10 errors of 0.25."""
    first, second = ([float(number < right) for number in range(4)] for right in (1, 2))
    shares = [mean_over_clusters(rights, np.arange(4, dtype=np.uint64), bounds=SHARE) for rights in (first, second)]

    compared = difference(*shares, 4)

    assert compared.difference.standard_error == pytest.approx(0.25)
    assert replace(compared, level=0.05 / 57, difference=measure([0, 0, 1, 0])).detectable > 1.0
    assert replace(compared, level=0.05 / 57).detectable is None


# Holm's correction.


@pytest.mark.parametrize(
    ('given_values', 'expected'),
    [
        ([], []),
        ([None], [None]),
        # 4 are known: 0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.04 * 1, which is below the one before it.
        ([0.01, 0.04, None, 0.03, 0.005], [0.03, 0.06, None, 0.06, 0.02]),
        # A p-value is at most 1.
        ([None, 0.6, 0.7, None], [None, 1.0, 1.0, None]),
        # Equal values stay equal.
        ([0.02, 0.02, 0.02], [0.06, 0.06, 0.06]),
    ],
)
def test_holm_correction_by_hand(given_values, expected):
    assert holm(given_values) == pytest.approx(expected, abs=1e-15)


def test_families_are_corrected_each_and_for_their_number():
    """Three families have p-values: by Holm within one, then three times as large; the fourth does not count."""
    families = {'tasks': [0.001, None, 0.01], 'composites': [0.02], 'score': [0.4], 'others': [None]}

    corrected = holm_in_families(families)

    assert corrected['tasks'] == pytest.approx([0.001 * 2 * 3, None, 0.01 * 3])
    assert corrected['composites'] == pytest.approx([0.02 * 3])
    assert corrected['score'] == [1.0]
    assert corrected['others'] == [None]


def test_the_level_of_a_family_is_that_of_its_smallest_p_value():
    families = {'tasks': [0.001, None, 0.01], 'composites': [0.02], 'others': [None]}

    assert levels_in_families(families) == pytest.approx(
        {'tasks': 0.05 / 2 / 2, 'composites': 0.05 / 2, 'others': 0.05}
    )


def test_tables_without_p_values_have_nothing_to_correct():
    assert holm_in_families({'tasks': [None], 'score': []}) == {'tasks': [None], 'score': []}
    assert levels_in_families({'tasks': [None], 'score': []}) == {'tasks': 0.05, 'score': 0.05}


# Trends.


@pytest.mark.parametrize('batches', [[0, 10, 20, 30, 40], [5, 6, 100, 5000], [0, 1]])
def test_the_slope_is_least_squares_with_a_paired_error(batches):
    # 30 items of 11 clusters, each on a line of its own.
    random = np.random.default_rng(len(batches))
    centered_batches = np.array(batches) - np.mean(batches)
    scores = random.random(30) + np.outer(centered_batches, random.normal(size=30))  # [checkpoints, items]
    clusters = random.integers(0, 11, 30).tolist()

    measures = [measure(scores_of_items, clusters) for scores_of_items in scores]
    slope = slope_of(batches, measures)

    slope_of_means = np.polyfit(batches, scores.mean(axis=1), 1)[0]
    slopes_of_items = np.polyfit(batches, scores, 1)[0]
    assert slope.value == pytest.approx(slope_of_means, rel=1e-9)
    assert slope.standard_error == pytest.approx(clustered_error(slopes_of_items, clusters), rel=1e-9)
    assert trend(batches, measures).slope.value == slope.value


def test_a_slope_has_the_errors_over_items_and_over_checkpoints_together():
    """The root of the sum of their squares, with the fewer degrees of freedom.

    Mutation: the larger of both is taken.
    """
    batches = [0, 1, 2, 3]
    # Items rise by different amounts, and stray together.
    strays = np.array([0.1, -0.1, -0.1, 0.1])
    of_items = np.array([0.0 * np.arange(4), 0.1 * np.arange(4), 0.2 * np.arange(4), 0.3 * np.arange(4)]) + strays

    slope = trend(batches, [measure(values) for values in of_items.T]).slope

    over_items = np.std([0.0, 0.1, 0.2, 0.3], ddof=1) / 2
    over_checkpoints = math.sqrt(4 * 0.01 / 2 / 5)  # two degrees of freedom; the squares of -1.5 to 1.5 sum to 5
    assert slope.value == pytest.approx(0.15)
    assert slope.standard_error == pytest.approx(math.hypot(over_items, over_checkpoints))
    assert slope.spread.freedom == 2


def residuals_of(values: Sequence[float]) -> np.ndarray:
    """Return the distances of values at 0, 1, 2 and so on from their least-squares line."""
    batches = range(len(values))
    return np.array(values) - np.polyval(np.polyfit(batches, values, 1), batches)


def corrected_correlation(residuals: np.ndarray) -> float:
    """Return the correlation of neighbors, corrected for the bias of a short series."""
    correlation = (residuals[1:] @ residuals[:-1]) / (residuals @ residuals)
    return correlation + (1 + 4 * correlation) / len(residuals)


def test_the_slope_varies_with_checkpoints():
    """The items move together, so that only the distances from the line tell how sure it is."""
    values = [0.2, 0.3, 0.7, 0.4, 0.5, 0.9]
    residuals = residuals_of(values)
    assert corrected_correlation(residuals) < 0  # so that the error is not widened

    slope = trend(list(range(6)), [measure([value, value]) for value in values]).slope

    # The squares of -2.5, -1.5, ... 2.5 sum to 17.5.
    assert slope.standard_error == pytest.approx(math.sqrt(residuals @ residuals / 4 / 17.5))
    assert slope.spread.freedom == 1  # of two items


def test_resemblance_of_neighbouring_checkpoints_widens_the_error():
    values = [0.0, 0.1, 0.2, 0.3, 0.2, 0.1, 0.0, -0.1, -0.2, -0.3, -0.2, -0.1] * 2
    residuals = residuals_of(values)
    correlation = min(0.9, corrected_correlation(residuals))
    inflation = (1 + correlation) / (1 - correlation)
    squares_of_batches = sum((batch - 11.5) ** 2 for batch in range(24))
    plain = math.sqrt(residuals @ residuals / 22 / squares_of_batches)

    slope = trend(list(range(24)), [Measure(value=value) for value in values]).slope

    assert slope.standard_error == pytest.approx(plain * math.sqrt(inflation))
    assert slope.standard_error > 3 * plain
    assert slope.spread.freedom == pytest.approx(max(1, 22 / inflation))


@pytest.mark.parametrize(
    ('batches', 'values'),
    [
        ([0, 1, 2, 3], [0.0, 0.25, 0.5, 0.75]),
        ([10, 20, 30], [0.5, 0.5, 0.5]),
        # Nothing in binary is a tenth or a third.
        ([0, 100, 200, 300], [0.1, 0.2, 0.3, 0.4]),
        ([0, 100, 200], [0.6, 0.4, 0.2]),
    ],
)
def test_a_steady_trend_has_no_noise_and_no_ratio(batches, values):
    steady = trend(batches, [Measure(value=value) for value in values])

    assert steady.noise == pytest.approx(0, abs=1e-15)
    assert steady.signal_to_noise is None


def test_the_noise_of_alternating_scores():
    scores = [Measure(value=value) for value in (0.2, 0.4, 0.2, 0.4, 0.2)]

    level = trend([0, 10, 20, 30, 40], scores)

    # Steps 0.2, -0.2, 0.2, -0.2 about 0: a variance of 4 * 0.04 / 3. Of five scores it is 2 * 5 / 4 times theirs.
    variance_of_steps = 4 * 0.04 / 3
    noise = math.sqrt(variance_of_steps * 4 / 10)
    assert level.slope.value == pytest.approx(0, abs=1e-17)
    assert level.noise == pytest.approx(noise, abs=1e-15)
    assert level.signal_to_noise == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize('sign', [1, -1])
def test_steps_are_per_batch_and_falling_scores_are_signal(sign):
    scores = [Measure(value=0.5 + sign * value) for value in (0.0, 0.3, 0.6)]

    rising_or_falling = trend([0, 10, 30], scores)

    # The line by hand: 9 / (1400 / 3) a batch, over 30 batches.
    slope = 27 / 1400
    # At 0.02 a batch, steps of 0.3 where 0.2 and 0.4 were due stray by 0.1 and -0.1: a variance of 0.02, which of three
    # scores is 2 * 3 / 2 times theirs.
    noise = math.sqrt(0.02 / 3)
    assert rising_or_falling.slope.value == pytest.approx(sign * slope, abs=1e-15)
    assert rising_or_falling.noise == pytest.approx(noise, abs=1e-15)
    assert rising_or_falling.signal_to_noise == pytest.approx(sign * 30 * slope / noise, abs=1e-11)


def test_a_trend_with_an_absent_score_is_absent():
    absent = trend([0, 10, 20], [measure([0, 1]), ABSENT, Measure(value=None, reason='another')])

    assert absent.slope == ABSENT
    assert absent.noise is None
    assert absent.signal_to_noise is None


def test_a_trend_of_two_scores_without_errors_has_a_slope_alone():
    without_errors = trend([100, 300], [measure([0, 1]), Measure(value=0.75)])

    assert without_errors.slope.value == pytest.approx(0.25 / 200, abs=1e-18)
    assert without_errors.slope.standard_error is None
    assert without_errors.noise is None
    assert without_errors.signal_to_noise is None
