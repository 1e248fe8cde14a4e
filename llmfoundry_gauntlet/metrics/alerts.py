"""Alerts in training: a score that has fallen further than it usually varies from one evaluation to the next.

Checkpoints differ by more than the draw of items explains, so a fall beyond the standard error is common in healthy
runs. What is unusual is learned from the run itself: the change of a score, against the mean of the three evaluations
before, is compared with all its earlier changes. The first eleven evaluations, which leave fewer than eight of these,
never alert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

from llmfoundry_gauntlet.metrics.statistics import ROUNDING, mean, student_tail, weighted_sum
from llmfoundry_gauntlet.types import Measure

NUM_BEFORE = 3  # evaluations whose mean a score is compared with
LEAST_CHANGES = 8  # earlier ones, from which to learn what is usual
RATE = 0.05  # of training runs of NUM_PLANNED evaluations in which nothing happens, the share with any alert
NUM_PLANNED = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A score that has fallen, at a training batch (step).

    * `value`: the score; `before`: the mean of the three evaluations before.
    * `usual_change`: the mean of the earlier changes, a little above 0 in a run that improves.
    * `error`: the standard deviation of a change, from the earlier ones, or from the items if that is larger.
    * `p_value`: the probability of so low a change in a run like the past one; an alert has one below `level`.
    """

    name: str
    batch: int
    value: float
    before: float
    usual_change: float
    error: float
    p_value: float
    level: float

    @property
    def change(self) -> float:
        """Return the change of the score."""
        return self.value - self.before

    def __str__(self) -> str:
        return (
            f'{self.name} fell to {self.value:.3f}, {self.change:+.3f} from the mean of the {NUM_BEFORE} evaluations '
            f'before (usual: {self.usual_change:+.3f}, error {self.error:.3f}, p {self.p_value:.1g})'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedScore:
    """A score over evaluations of the same items, the oldest first; the values of all, the latest with their spreads.

    `latest` has those of NUM_BEFORE evaluations before this one, and of this one.
    """

    values: Sequence[float]
    latest: Sequence[Measure]

    @property
    def is_silent(self) -> bool:
        """Return whether there are too few earlier changes to know what is usual."""
        return len(self.values) - 1 < NUM_BEFORE + LEAST_CHANGES


def alerts_of(watched: Mapping[str, WatchedScore], batch: int) -> tuple[Alert, ...] | None:
    """Return the alerts of an evaluation at a training batch; None if all scores are silent.

    The rate of false alerts is divided by the number of watched scores and of planned evaluations. How many will come
    is not known: NUM_PLANNED, or this one's number if that is larger. In a run of 400 the rate is then .05 * (1 +
    log(10)) = .17 at most.
    """
    audible = {name: score for name, score in watched.items() if not score.is_silent}
    if not audible:
        return None
    found = []
    for name, score in audible.items():
        level = RATE / (max(NUM_PLANNED, len(score.values)) * len(watched))
        alert = alert_of(name, score, batch, level)
        if alert is not None:
            found.append(alert)
    return tuple(found)


def alert_of(name: str, score: WatchedScore, batch: int, level: float) -> Alert | None:
    """Return the alert of a score; None if it has not fallen, not unusually far, or has no standard error."""
    *past, value = score.values
    weight = 1 / NUM_BEFORE
    *before, now = score.latest
    change = weighted_sum([now, *before], [1.0, *[-weight] * NUM_BEFORE])
    if change.value is None or change.value >= 0 or change.spread is None:
        return None
    earlier = changes(past)
    usual, error = usual_change(earlier, change.spread.standard_error)
    p_value = probability_of_fall(change.value, usual, error, len(earlier))
    if p_value >= level:
        return None
    return Alert(
        name=name,
        batch=batch,
        value=value,
        before=value - change.value,
        usual_change=usual,
        error=error,
        p_value=p_value,
        level=level,
    )


def changes(values: Sequence[float]) -> list[float]:
    """Return how far each value, from the fourth on, is from the mean of the three before it."""
    return [
        value - mean(values[place - NUM_BEFORE : place]) for place, value in enumerate(values) if place >= NUM_BEFORE
    ]


def usual_change(earlier: Sequence[float], item_error: float) -> tuple[float, float]:
    """Return the mean of the earlier changes, and the standard error of a new one from it.

    A change varies at least as much as the draw of items makes it. The mean is known up to its own error.
    """
    deviation = max(item_error, stdev(earlier))
    return mean(earlier), deviation * math.sqrt(1 + 1 / len(earlier))


def probability_of_fall(change: float, usual: float, error: float, num_earlier: int) -> float:
    """Return the probability that a change is this far below the usual one, by Student's t; 1 if it is not below."""
    if change >= usual:
        return 1.0
    if error <= ROUNDING:
        return 0.0  # it has never varied
    return student_tail((change - usual) / error, num_earlier - 1) / 2
