"""Tests, power and verdicts of `gauntlet gate` from differences computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from clustered_items import credits_of, item, named, score_of, usual_error
from scipy.stats import t as student

from llmfoundry_gauntlet.metrics.comparison import Difference, difference
from llmfoundry_gauntlet.metrics.gate import (
    AVERAGES,
    OK,
    TASKS,
    UNCLEAR,
    WORSE,
    Evidence,
    GateRow,
    evidence,
    judged,
    verdict_of,
)

ALPHA = 0.05


def compared(lost: int, gained: int, num_items: int, task: str = 'a/0-shot') -> Difference:
    """Return the difference of two runs on a task, the second with some items more wrong and some more right."""
    first = [1.0] * lost + [0.0] * (num_items - lost)
    second = [0.0] * lost + [1.0] * gained + [0.0] * (num_items - lost - gained)
    return difference(credits_of(task, first), credits_of(task, second), num_items)


def evidence_of(lost: int, gained: int, num_items: int, margin: float, *, is_task: bool = False) -> Evidence:
    shown = evidence(compared(lost, gained, num_items).difference, margin, alpha=ALPHA, is_task=is_task)
    assert shown is not None
    return shown


def test_both_tests_are_one_sided_students():
    """20 items of 400 lost and 8 gained: -0.03, with the usual error of 400 items and 399 degrees of freedom."""
    error = usual_error([-1.0] * 20 + [1.0] * 8 + [0.0] * 372)
    below, above = student(399).cdf, student(399).sf

    shown = evidence_of(20, 8, 400, 0.05)

    assert shown.standard_error == pytest.approx(error, rel=1e-12)
    assert shown.p_worse == pytest.approx(below((-0.03 + 0.05) / error), rel=1e-9)
    assert shown.p_ok == pytest.approx(above((-0.03 + 0.05) / error), rel=1e-9)
    half_width = student(399).ppf(0.95) * error
    assert (shown.low, shown.high) == (pytest.approx(-0.03 - half_width), pytest.approx(-0.03 + half_width))


def test_power_is_the_share_of_equal_models_that_are_ok():
    """An equal model's difference is around 0: it is ok if it is above -m by 1.65 errors."""
    error = usual_error([-1.0] * 20 + [1.0] * 8 + [0.0] * 372)
    quantile = student(399).ppf(0.95)

    shown = evidence_of(20, 8, 400, 0.05)

    assert shown.power == pytest.approx(student(399).cdf(0.05 / error - quantile), rel=1e-9)
    assert shown.margin_needed == pytest.approx((quantile + student(399).ppf(0.8)) * error, rel=1e-9)
    at_that_margin = evidence_of(20, 8, 400, shown.margin_needed)
    assert at_that_margin.power == pytest.approx(0.8, rel=1e-9)


@pytest.mark.parametrize('margin', [0.001, 0.02, 0.05, 0.1])
def test_the_interval_decides(margin: float):
    """Mutation: a two-sided interval of 95 %, or another error for the interval than for the tests."""
    for lost in range(0, 60, 3):
        shown = evidence_of(lost, 15, 400, margin, is_task=True)
        assert (shown.low > -margin) == (shown.p_ok < ALPHA)
        assert (shown.high < -margin) == (shown.p_worse < ALPHA)


def test_without_a_margin_no_run_is_shown_to_be_ok():
    shown = evidence_of(0, 100, 400, 0.0)

    assert (shown.p_ok, shown.power) == (None, None)
    assert shown.p_worse > 0.999


def test_a_task_with_a_margin_has_at_least_the_error_of_a_share_as_large_as_the_margin():
    """Three items of 400 lost: their error is 0.0043, that of a share of 0.02 of 400 items is 0.007."""
    least = math.sqrt(0.02 * 0.98 / 400)
    of_items = usual_error([-1.0] * 3 + [0.0] * 397)
    assert of_items < least

    assert evidence_of(3, 0, 400, 0.02, is_task=True).standard_error == pytest.approx(least, rel=1e-12)
    assert evidence_of(3, 0, 400, 0.02).standard_error == pytest.approx(of_items, rel=1e-12)
    assert evidence_of(3, 0, 400, 0.0, is_task=True).standard_error == pytest.approx(of_items, rel=1e-12)


@pytest.mark.parametrize(('num_items', 'is_ok'), [(148, False), (149, True)])
def test_items_that_are_all_alike_are_ok_once_a_loss_would_have_shown(num_items: int, is_ok: bool):
    """Were 2 % of items lost, there would be none among 148 in 5.03 % of draws, none among 149 in 4.93 %."""
    shown = evidence_of(0, 0, num_items, 0.02, is_task=True)

    assert shown.p_ok == pytest.approx(0.98**num_items, rel=1e-12)
    assert shown.p_worse == 1.0
    assert (shown.p_ok < ALPHA) is is_ok
    assert shown.power == float(is_ok)
    assert (shown.low > -0.02) is is_ok
    assert shown.low == pytest.approx(-shown.margin_needed)
    assert shown.margin_needed == pytest.approx(1 - 0.05 ** (1 / num_items), rel=1e-12)


def test_items_alike_count_by_their_clusters():
    """200 items on ten passages say as much about a loss as ten."""
    credits = [item(row, 1.0, named('0123456789'[row % 10])) for row in range(200)]
    same = difference(score_of(credits), score_of(credits), 200).difference

    shown = evidence(same, 0.02, alpha=ALPHA, is_task=True)

    assert shown.p_ok == pytest.approx(0.98**10, rel=1e-12)


def test_items_that_are_all_lost_are_worse():
    """By a sign test: each of the items could have been gained as well."""
    shown = evidence_of(12, 0, 12, 0.0, is_task=True)

    assert shown.p_worse == pytest.approx(0.5**12, rel=1e-12)
    assert (shown.low, shown.high < 0) == (-1.0, True)


def test_a_single_item_is_absent():
    [row] = judged([row_of('one', compared(1, 0, 1), 0.0)], ALPHA)

    assert (row.evidence, row.p_holm, row.verdict) == (None, None, None)


def test_a_difference_without_bounds_and_variation_is_absent():
    same = compared(0, 0, 100).difference
    assert same.spread is not None
    unbounded = replace(same, spread=replace(same.spread, bounds=(-math.inf, math.inf)))

    assert evidence(unbounded, 0.02, alpha=ALPHA, is_task=False) is None


def row_of(name: str, of: Difference, margin: float, *, family: str = TASKS, is_required: bool = False) -> GateRow:
    shown = evidence(of.difference, margin, alpha=ALPHA, is_task=family == TASKS)
    return GateRow(name=name, family=family, compared=of, margin=margin, is_required=is_required, evidence=shown)


def test_harm_is_corrected_for_rows_and_families_and_the_proof_of_no_harm_is_not():
    """Mutation: alpha for each family, or a correction over all rows."""
    rows = [
        row_of('lost', compared(30, 12, 400), 0.0),
        row_of('lost less', compared(24, 12, 400), 0.0),
        row_of('same', compared(12, 12, 400), 0.0),
        row_of('average', compared(12, 12, 400), 0.05, family=AVERAGES, is_required=True),
    ]
    lost, lost_less, same, average = (row.evidence.p_worse for row in rows)
    of_one_family = [3 * lost, 2 * lost_less, same]
    assert of_one_family[0] < ALPHA / 2
    assert ALPHA / 2 < of_one_family[1] < ALPHA

    of_two, of_one = judged(rows, ALPHA), judged(rows[:3], ALPHA)

    assert [row.p_holm for row in of_two] == pytest.approx([6 * lost, 4 * lost_less, 1.0, 1.0], rel=1e-12)
    assert [row.verdict for row in of_two] == [WORSE, UNCLEAR, UNCLEAR, OK]
    assert [row.p_holm for row in of_one] == pytest.approx(of_one_family, rel=1e-12)
    assert [row.verdict for row in of_one] == [WORSE, WORSE, UNCLEAR]
    assert average > 0.5


@pytest.mark.parametrize(
    ('tasks', 'average', 'expected'),
    [
        ((12, 12), (12, 12), OK),
        ((12, 12), (20, 8), UNCLEAR),
        ((40, 2), (12, 12), WORSE),
        ((40, 2), (20, 8), WORSE),
        ((12, 12), (60, 2), WORSE),
    ],
)
def test_any_row_can_block_and_all_required_ones_must_be_ok(
    tasks: tuple[int, int], average: tuple[int, int], expected: str
):
    rows = [
        row_of('task', compared(*tasks, 400), 0.0),
        row_of('average', compared(*average, 400), 0.05, family=AVERAGES, is_required=True),
        row_of('other', compared(20, 8, 400), 0.05, family=AVERAGES),
    ]

    assert verdict_of(judged(rows, ALPHA)) == expected


def test_a_row_that_would_be_unclear_for_most_equal_models_is_underpowered():
    few, many = (row_of('average', compared(n // 20, n // 20, n), 0.03, family=AVERAGES) for n in (100, 2000))
    of_few, of_many = judged([few], ALPHA)[0], judged([many], ALPHA)[0]

    assert (of_few.verdict, of_few.is_underpowered) == (UNCLEAR, True)
    assert of_few.evidence.power < 0.5
    assert (of_many.verdict, of_many.is_underpowered) == (OK, False)
