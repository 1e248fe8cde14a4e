"""Alerts from the changes of scores, with expected values from the formulas, and simulated training runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from clustered_items import credits_of, usual_error
from scipy.stats import t as student

from llmfoundry_gauntlet.metrics.alerts import (
    LEAST_CHANGES,
    NUM_BEFORE,
    NUM_PLANNED,
    RATE,
    Alert,
    WatchedScore,
    alerts_of,
    changes,
    probability_of_fall,
    usual_change,
)

NUM_ITEMS = 100
BATCH = 500


def score(num_right: Sequence[int]) -> WatchedScore:
    """Return the score of evaluations of the same items, of which so many are right, always the first ones."""
    measures = [credits_of('a/0-shot', [1.0] * right + [0.0] * (NUM_ITEMS - right)) for right in num_right]
    return WatchedScore(values=[right / NUM_ITEMS for right in num_right], latest=measures[-NUM_BEFORE - 1 :])


def alerts(num_right: Sequence[int], num_watched: int = 1) -> tuple[Alert, ...] | None:
    steady = {f'steady {number}': score([50, 51] * (len(num_right) // 2 + 1)) for number in range(1, num_watched)}
    return alerts_of({'average': score(num_right), **steady}, BATCH)


UP_AND_DOWN = [50, 52, 51, 53, 50, 52, 54, 51, 53, 52, 54]


def test_a_change_is_from_the_mean_of_the_three_evaluations_before():
    assert changes([1.0, 2.0, 6.0, 5.0, 1.0]) == pytest.approx([5 - 3, 1 - 13 / 3])


def test_a_fall_is_compared_with_the_usual_changes_by_students_t():
    """Mutation: no widening by 1 + 1 / n, n degrees of freedom, or two-sided."""
    past = [right / NUM_ITEMS for right in UP_AND_DOWN]
    earlier = [value - statistics.fmean(past[place - 3 : place]) for place, value in enumerate(past) if place >= 3]
    change = 0.30 - statistics.fmean(past[-3:])
    # Of 100 items the first 30 stay right, 22 to 24 in the mean of the three before are lost.
    items = [0.0] * 30 + [-1.0] * 22 + [-2 / 3] + [-1 / 3] + [0.0] * 46
    items = sorted(items)
    item_error = usual_error(items)
    deviation = max(item_error, statistics.stdev(earlier))
    error = deviation * math.sqrt(1 + 1 / 8)
    usual = statistics.fmean(earlier)

    [alert] = alerts([*UP_AND_DOWN, 30])

    assert (alert.name, alert.batch, alert.value) == ('average', BATCH, 0.30)
    assert alert.change == pytest.approx(change, rel=1e-9)
    assert alert.before == pytest.approx(statistics.fmean(past[-3:]), rel=1e-9)
    assert alert.usual_change == pytest.approx(usual, rel=1e-9)
    assert alert.error == pytest.approx(error, rel=1e-9)
    assert alert.p_value == pytest.approx(student(7).cdf((change - usual) / error), rel=1e-9)
    assert alert.level == RATE / NUM_PLANNED
    assert 'average fell to 0.300, -0.230 from the mean of the 3 evaluations before' in str(alert)


def test_the_spread_of_the_past_counts_if_it_is_larger_than_the_error_over_items():
    """Mutation: the error over items alone, which alerts in most healthy runs."""
    wild = [50, 70, 45, 75, 40, 72, 44, 71, 43, 74, 41]

    assert alerts([*UP_AND_DOWN, 33]) != ()
    assert alerts([*wild, 33]) == ()


def test_the_error_over_items_counts_if_the_past_was_calmer():
    """Mutation: the past alone. Of a score that never changed, a loss of five items of 100 is within the draw."""
    assert usual_change([0.0] * 8, 0.02)[1] == pytest.approx(0.02 * math.sqrt(1 + 1 / 8))
    assert alerts([50] * 11 + [45]) == ()


def test_eleven_evaluations_are_silent():
    """Mutation: an alert at the eleventh, or none at the twelfth."""
    assert alerts([*UP_AND_DOWN[:10], 0]) is None
    assert len(alerts([*UP_AND_DOWN, 0])) == 1
    assert NUM_BEFORE + LEAST_CHANGES == 11


def test_the_level_is_divided_by_the_watched_scores_and_the_evaluations():
    long = UP_AND_DOWN * 8

    [alone] = alerts([*long, 0])
    [among_four] = alerts([*long, 0], num_watched=4)

    assert alone.level == pytest.approx(RATE / 89)
    assert among_four.level == pytest.approx(RATE / 89 / 4)


def test_a_score_that_rises_less_than_usual_is_no_alert():
    """It has not fallen, however unusual that is."""
    climbing = [5 * number for number in range(11)]

    assert alerts([*climbing, 46]) == ()
    assert len(alerts([*climbing, 10])) == 1


def test_a_score_that_never_varied_alerts_when_all_of_it_is_lost():
    """All items change by the same amount, so that both errors are 0."""
    [alert] = alerts([NUM_ITEMS] * 11 + [0])

    assert (alert.change, alert.p_value) == (-1.0, 0.0)


def test_a_score_without_a_standard_error_is_no_alert():
    whole = score([*UP_AND_DOWN, 0])
    measures = [type(measure)(value=measure.value) for measure in whole.latest]

    assert alerts_of({'average': WatchedScore(values=whole.values, latest=measures)}, BATCH) == ()


# Simulated training runs

NUM_EVALUATIONS = NUM_PLANNED
FALL_AT = 30  # the number of the evaluation at which a score falls, from 0
ITEM_ERROR = 1 / math.sqrt(2)  # of a score, so that the difference of two has an error of 1


def simulated_runs(random: np.random.Generator, num_runs: int, noise: float, correlation: float) -> np.ndarray:
    """Return the scores of training runs [num_runs, evaluations] in units of the error of a difference over items.

    They climb steadily, with noise of the checkpoints of which neighbors are correlated.
    """
    drawn = random.normal(size=(num_runs, NUM_EVALUATIONS))
    of_checkpoints = np.zeros_like(drawn)
    of_checkpoints[:, 0] = drawn[:, 0]
    for place in range(1, NUM_EVALUATIONS):
        own = math.sqrt(1 - correlation**2) * drawn[:, place]
        of_checkpoints[:, place] = correlation * of_checkpoints[:, place - 1] + own
    of_items = ITEM_ERROR * random.normal(size=drawn.shape)
    return 0.5 * np.arange(NUM_EVALUATIONS) + of_items + noise * of_checkpoints


def alerts_at(scores: Sequence[float], place: int) -> bool:
    """Return whether there is an alert at an evaluation, as `alert_of` decides it."""
    *earlier, change = changes(scores[: place + 1])
    usual, error = usual_change(earlier, ITEM_ERROR * math.sqrt(1 + 1 / NUM_BEFORE))
    level = RATE / max(NUM_PLANNED, place + 1)
    return change < 0 and probability_of_fall(change, usual, error, len(earlier)) < level


@pytest.mark.long
@pytest.mark.parametrize(
    ('noise', 'correlation', 'seen_of_8', 'seen_of_4'),
    [(0, 0, 1.0, 0.91), (1, 0, 0.97, 0.32), (1, 0.7, 1.0, 0.53), (2, 0.7, 0.77, 0.15)],
)
def test_healthy_runs_hardly_ever_alert_and_a_fall_is_seen_at_once(
    noise: float, correlation: float, seen_of_8: float, seen_of_4: float
):
    """In at most 6 % of runs of 40 evaluations, whatever the noise.

    If each score alerted that is below the one before with p < .05, over items, it would be 46 to 100 %.
    """
    random = np.random.default_rng(4)
    runs = simulated_runs(random, 1500, noise, correlation).tolist()
    places = range(NUM_BEFORE + LEAST_CHANGES, NUM_EVALUATIONS)

    healthy = np.mean([any(alerts_at(scores, place) for place in places) for scores in runs])
    seen = {}
    for fall in (8, 4):
        fallen = [[*scores[:FALL_AT], *(value - fall for value in scores[FALL_AT:])] for scores in runs]
        seen[fall] = np.mean([alerts_at(scores, FALL_AT) for scores in fallen])

    assert healthy <= 0.06
    assert seen[8] == pytest.approx(seen_of_8, abs=0.03)
    assert seen[4] == pytest.approx(seen_of_4, abs=0.05)
