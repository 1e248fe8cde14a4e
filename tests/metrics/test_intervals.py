"""Errors and intervals where items do not vary: of metrics with bounds, in composites, tables and loggers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy
from clustered_items import credits_of, item

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.comparison import difference
from llmfoundry_gauntlet.metrics.composites import compute_composites
from llmfoundry_gauntlet.metrics.keys import metric_stream
from llmfoundry_gauntlet.metrics.metrics import Metric, compute_metric, item_metric, task_score
from llmfoundry_gauntlet.metrics.statistics import interval, mean_over_clusters
from llmfoundry_gauntlet.results.report.printing import absences
from llmfoundry_gauntlet.results.report.scores import ScoreRow
from llmfoundry_gauntlet.results.report.tables import Column
from llmfoundry_gauntlet.types import Measure, TaskScore

Z = 1.959963984540054
END_OF_NONE = Z**2 / (5 + Z**2)  # of Wilson's interval of 0 of 5
ERROR_OF_NONE = END_OF_NONE / Z
GENERATION = {'dataset_uri': 'rows.jsonl', 'num_fewshot': [0], 'icl_task_type': 'generation_task_with_answers'}


def generation_metrics() -> dict[str, Metric]:
    (task,) = decode_tasks({'label': 'g', **GENERATION})
    return {metric.name: metric for metric in task.metrics()}


def decode_tasks(*entries):
    return load_suite(list(entries)).tasks


def of_values(metric: Metric, values: list[float]) -> Measure:
    return compute_metric(metric, [item(row, 0.0, metrics={metric.name: value}) for row, value in enumerate(values)])


SHARES = [
    metric
    for name, metric in generation_metrics().items()
    if not name.endswith('Accuracy') and name != 'GoldBitsPerByte'
]
SHARES.append(item_metric('OfAPlugin', bounds=(0, 1)))


@pytest.mark.parametrize('metric', SHARES, ids=lambda metric: metric.name)
def test_a_metric_that_is_a_share_has_an_interval_at_0_and_1(metric: Metric):
    assert interval(of_values(metric, [0.0] * 5)) == pytest.approx((0, END_OF_NONE))
    assert interval(of_values(metric, [1.0] * 5)) == pytest.approx((1 - END_OF_NONE, 1))


@pytest.mark.parametrize('metric', SHARES, ids=lambda metric: metric.name)
def test_every_metric_that_is_a_share_has_the_interval_of_an_accuracy(metric: Metric):
    four_of_five = [1.0] * 4 + [0.0]

    low, high = interval(of_values(metric, four_of_five))

    assert 0 < low < 0.8 < high < 1  # 0.24 and 1.36 by Student's t
    assert (low, high) == interval(credits_of('a/0-shot', four_of_five))


@pytest.mark.parametrize(
    ('bounds', 'values', 'expected'),
    [
        ((-1, 1), [-1.0] * 5, (-1, 2 * END_OF_NONE - 1)),
        ((0, 2), [2.0] * 5, (2 - 2 * END_OF_NONE, 2)),
        # the mean 0.7 of three, error 0.7, and t = 4.3027 of two degrees of freedom
        ((0, None), [0.0, 0.0, 2.1], (0, 0.7 + 4.30265 * 0.7)),
        ((None, 0), [0.0, 0.0, -2.1], (-0.7 - 4.30265 * 0.7, 0)),
        ((None, None), [0.0, 0.0, 2.1], (0.7 - 4.30265 * 0.7, 0.7 + 4.30265 * 0.7)),
    ],
)
def test_intervals_stay_within_the_bounds_of_a_metric(bounds, values, expected):
    assert interval(of_values(item_metric('Margin', bounds=bounds), values)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (1.2, '1.2'),
        (-0.5, '-0.5'),
        (math.nan, 'nan'),
    ],
)
def test_a_value_outside_the_bounds_or_not_a_number_makes_the_metric_absent(value, text):
    measure = of_values(item_metric('NumberShare', bounds=(0, 1)), [0.0, value])

    assert measure.value is None
    assert 'NumberShare' in measure.reason
    assert text in measure.reason


def test_an_infinite_value_makes_a_metric_without_bounds_absent():
    assert 'inf' in of_values(item_metric('Margin'), [0.0, math.inf]).reason


def test_bounds_in_the_wrong_order_are_an_error():
    with pytest.raises(ValueError, match='bounds'):
        item_metric('NumberShare', bounds=(1, 0))


SCALES = pytest.mark.parametrize('scale', [1e-12, 0.1, 1 / 3, 1e9])


@SCALES
def test_rounding_of_values_is_no_standard_error(scale: float):
    alike = [scale * 0.1] * 3 + [scale * (0.3 - 0.2)] * 4

    measure = mean_over_clusters(alike, np.arange(7, dtype=np.uint64))

    assert measure.spread.standard_error == 0


@SCALES
def test_rounding_of_the_means_of_passages_is_no_standard_error(scale: float):
    passages = [(0.1, 0.7), (0.4, 0.4), (0.3, 0.5)]  # whose means are the same
    values = [scale * value for passage in passages for value in passage]

    measure = mean_over_clusters(values, np.repeat(np.arange(3, dtype=np.uint64), 2))

    assert measure.spread.standard_error == 0


@SCALES
def test_small_variation_is_a_standard_error(scale: float):
    values = [scale, scale * (1 + 1e-9), scale * (1 + 2e-9)]

    measure = mean_over_clusters(values, np.arange(3, dtype=np.uint64))

    assert measure.spread.standard_error == pytest.approx(scale * 1e-9 / math.sqrt(3), rel=1e-5)


def test_categories_with_equal_means_borrow_no_rounding_error():
    thirds = [item(row, 1 / 3, category=category) for row, category in enumerate('abcdefg')]
    metric = Metric('M', lambda results: [result.score for result in results])

    measure = task_score('a/0-shot', [metric], thirds).accuracy

    assert measure.spread.standard_error == 0


def gauntlet_of(*names: str, baseline: float = 0.0):
    benchmarks = [{'name': name, 'num_fewshot': 0, 'random_baseline': baseline} for name in names]
    block = {'categories': [{'name': 'all', 'benchmarks': benchmarks}], 'averages': {'average': ['all']}}
    return load_suite(None, block).gauntlet


@pytest.mark.parametrize('credits', [[0.0] * 5, [1.0] * 5, [1.0, 1.0, 0.0, 1.0, 1.0, 0.5]])
@pytest.mark.parametrize('baseline', [0.0, 0.25])
def test_a_category_and_its_only_task_have_the_same_interval(credits: list[float], baseline: float):
    accuracy = credits_of('a/0-shot', credits)
    gauntlet = gauntlet_of('a', baseline=baseline)

    composites = compute_composites(gauntlet, {'a/0-shot': accuracy}, {'a/0-shot': 5}, reference=False).by_name

    rescaled = [(end - baseline) / (1 - baseline) for end in interval(accuracy)]
    assert interval(composites['all']) == pytest.approx(rescaled)
    assert interval(composites['average']) == pytest.approx(rescaled)
    assert composites['all'].standard_error == pytest.approx(accuracy.standard_error / (1 - baseline))


@pytest.fixture
def none_and_half() -> dict[str, TaskScore]:
    """Return the scores of a task with 0 of 5 and of one with 10 of 20 right."""
    none = [item(row, 0.0) for row in range(5)]
    half = [item(row, float(row % 2), task='b/0-shot') for row in range(20)]
    return {
        'a/0-shot': task_score('a/0-shot', accuracy_metrics(), none),
        'b/0-shot': task_score('b/0-shot', accuracy_metrics(), half),
    }


def test_a_half_at_0_of_5_is_not_known_exactly_in_composites_tables_and_loggers(none_and_half):
    accuracies = {task: score.accuracy for task, score in none_and_half.items()}
    error_of_half = accuracies['b/0-shot'].standard_error
    error = math.hypot(ERROR_OF_NONE, error_of_half) / 2  # towards higher values

    composites = compute_composites(gauntlet_of('a', 'b'), accuracies, dict.fromkeys(accuracies, 5), reference=False)
    stream = metric_stream(none_and_half, composites, {}, dict.fromkeys(accuracies, 1.0))

    assert composites.categories['all'].standard_error == pytest.approx(error)
    assert stream['icl/metrics/eval_gauntlet/all/standard_error'] == pytest.approx(error)
    assert Column('score', with_error=True).error(composites.categories['all']) == f'{error:.3f}'


def test_a_task_at_0_of_5_has_its_interval_in_tables(none_and_half):
    none = none_and_half['a/0-shot'].accuracy

    assert none.standard_error == 0
    assert interval(none) == pytest.approx((0, END_OF_NONE))
    assert Column('score', with_error=True).error(none) == '[0.00, 0.43]'


def accuracy_metrics() -> list[Metric]:
    return [Metric('Accuracy', lambda results: [result.score for result in results], bounds=(0, 1))]


def test_categories_without_variation_are_small_samples_of_their_task():
    """0 of 2 in one category of many says little about the error of all: the variance is right on average."""
    results = [
        item(0, 0.0, category='a'),
        item(1, 0.0, category='a'),
        item(2, 0.0, category='b'),
        item(3, 1.0, category='b'),
        item(4, 1.0, category='c'),
        item(5, 0.0, category='c'),
    ]

    measure = task_score('a/0-shot', accuracy_metrics(), results).accuracy

    assert measure.standard_error == pytest.approx(math.sqrt(2 * 0.5**2) / 3)


def of_categories(values_by_category: dict[str, list[float]]) -> Measure:
    """Return the accuracy of a task with these items in each category."""
    rows = itertools.count()
    results = [
        item(next(rows), value, category=category)
        for category, values in values_by_category.items()
        for value in values
    ]
    return task_score('a/0-shot', accuracy_metrics(), results).accuracy


def wilson_by_scipy(num_right: int, num_items: int) -> tuple[float, float]:
    found = scipy.stats.binomtest(num_right, num_items).proportion_ci(method='wilson')
    return found.low, found.high


@pytest.mark.parametrize('num_right', [0, 1])
def test_the_interval_of_categories_that_are_all_wrong_or_all_right_is_that_of_all_their_items(num_right: int):
    """60 categories of 4 items each are worth 240 items. Mutation: the sides of the categories are added up."""
    measure = of_categories({f'{number:02}': [float(num_right)] * 4 for number in range(60)})

    assert interval(measure) == pytest.approx(wilson_by_scipy(240 * num_right, 240))


def test_a_small_category_makes_the_items_of_a_mean_worth_less():
    """The mean of 2 and 20 items has the variance of an item times (1/2 + 1/20) / 4, that of 7.27 items."""
    end = Z**2 / (80 / 11 + Z**2)

    assert interval(of_categories({'a': [0.0] * 2, 'b': [0.0] * 20})) == pytest.approx((0, end))


def test_few_right_items_in_categories_by_hand():
    """One of 4 right, and none of 4. Mutations: no variance is mixed in; all degrees of freedom are those of one."""
    measure = of_categories({'a': [1.0, 0.0, 0.0, 0.0], 'b': [0.0] * 4})

    share = 1 / 8
    variance_of_a = (0.25 * 0.75 / 3) / 4  # with a weight of a half
    of_independent_items = share * (1 - share) / 4 / 4
    # One of 8 items is right, so that the two that are mixed in count two thirds.
    of_a = variance_of_a / 3 + of_independent_items * 2 / 3
    of_b = of_independent_items * 2 / 3
    num_items = share * (1 - share) / (of_a + of_b)
    freedom = (of_a + of_b) ** 2 / (of_a**2 / 3 + of_b**2 / 3)
    quantile = scipy.stats.t.ppf(0.975, freedom)
    center = (share + quantile**2 / num_items / 2) / (1 + quantile**2 / num_items)
    half = math.sqrt(quantile**2 / num_items * share * (1 - share) + (quantile**2 / num_items / 2) ** 2)
    half /= 1 + quantile**2 / num_items

    assert interval(measure) == pytest.approx((center - half, center + half))
    assert measure.standard_error == pytest.approx(math.sqrt(variance_of_a))  # the variation of items alone


def test_where_all_categories_vary_their_variances_are_not_changed():
    measure = of_categories({'a': [1.0, 0.0, 0.0, 0.0], 'b': [1.0, 0.0, 1.0, 0.0]})

    share = 3 / 8
    variance = (0.25 * 0.75 / 3 + 0.5 * 0.5 / 3) / 4
    assert measure.spread.num_items == pytest.approx(share * (1 - share) / variance)


def test_a_metric_without_bounds_has_no_share_of_categories():
    metric = Metric('Margin', lambda results: [result.score for result in results])
    results = [item(row, float(row == 0), category='ab'[row % 2]) for row in range(8)]

    measure = task_score('a/0-shot', [metric], results).accuracy

    assert measure.spread.num_items is None
    low, _ = interval(measure)
    assert low < 0


SMALL = pytest.mark.parametrize('scale', [1e-14, 1.0, 1e9])


@SMALL
def test_a_difference_is_0_where_it_is_below_the_rounding_of_its_values(scale: float):
    """All items rise by a tenth, which is no number in binary; those near the mean deviate by little."""
    first = [scale * value for value in (0.3, 0.30001, 0.29999, 0.30002, 0.29998)]
    second = [value + scale * 0.1 for value in first]
    measures = [mean_over_clusters(values, np.arange(5, dtype=np.uint64)) for values in (first, second)]

    compared = difference(*measures, 5)

    assert compared.difference.standard_error == 0
    assert compared.p_value == 2.0**-4  # a sign test of five
    assert compared.detectable is None
    assert difference(measures[0], measures[0], 5).difference.value == 0


@SMALL
def test_small_numbers_differ_however_small_they_are(scale: float):
    first = [scale * value for value in (0.1, 0.2, 0.3, 0.4)]
    second = [scale * value for value in (0.2, 0.25, 0.5, 0.4)]
    measures = [mean_over_clusters(values, np.arange(4, dtype=np.uint64)) for values in (first, second)]

    compared = difference(*measures, 4)

    error = np.std([0.1, 0.05, 0.2, 0.0], ddof=1) / 2
    assert compared.difference.standard_error == pytest.approx(scale * error)
    assert compared.p_value == pytest.approx(2 * scipy.stats.t.sf(0.0875 / error, 3))


def test_a_difference_has_the_error_of_its_items_also_where_one_run_is_all_wrong():
    none = credits_of('a/0-shot', [0.0] * 10)
    some = credits_of('a/0-shot', [0.0, 1.0] * 5)

    gain = difference(none, some, 10).difference

    assert gain.standard_error == pytest.approx(some.standard_error)
    assert Column('diff', with_error=True).error(gain) == f'{some.standard_error:.3f}'


def row_of(value: float, *, error: float | None, num_items: int) -> ScoreRow:
    ends = None if error is None else value
    return ScoreRow(
        run='r',
        batch=0,
        kind='task',
        name='t',
        value=value,
        standard_error=error,
        low=ends,
        high=ends,
        num_items=num_items,
    )


def test_a_note_about_items_with_the_same_value_asks_for_no_items():
    (note,) = absences([('t', row_of(0.1, error=0.0, num_items=3))])

    assert 'same value' in note
    assert 'two' not in note


def test_a_note_about_a_single_item_asks_for_two():
    (note,) = absences([('t', row_of(0.1, error=None, num_items=1))])

    assert 'two questions' in note
