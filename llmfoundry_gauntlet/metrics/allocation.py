"""Allocate an evaluation's items to its tasks so that composites are as precise as possible for their cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.metrics.composites import slopes

STEPS = 60  # of a bisection
LARGEST = 1e18  # scale of an allocation

Sizes = Mapping[str, int]  # number of questions by task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCosts:
    """The cost of a task's questions and their effect on the error of composites.

    `cost` of a question is in seconds or any other unit, `deviation` the standard deviation that a single question
    gives a composite. At least `least` and at most `most` questions are taken.
    """

    cost: float
    deviation: float
    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEstimate:
    """The cost and the errors of a precision target.

    `share` is the fraction by which the error of the average may exceed its error with all items (0: all items).
    `standard_error` is relative to all possible items, `standard_error_of_file` to the whole files (`file_errors`);
    each is the larger of that of a model near chance and that of one halfway to 1. `detectable` is the minimum
    detectable effect between two models, with 80 % power at a level of 5 %, if they agree by chance only; it is smaller
    for models that agree more.
    """

    share: float
    num_items: int
    seconds: float
    standard_error: float
    standard_error_of_file: float
    detectable: float


def allocate(tasks: Mapping[str, TaskCosts], goes_on: Callable[[Sizes], bool]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the last of a series of growing allocations with `goes_on` true, and the first with it false.

    If it is false for all, both have the minimum of every task; if it is true for all, the maximum. A composite gains
    most precision for its cost if the number of questions is proportional to the deviation divided by the square root
    of the cost (Neyman allocation with costs), within the limits.
    """

    def sizes(scale: float) -> dict[str, int]:
        return {
            key: min(task.most, max(task.least, int(scale * task.deviation / math.sqrt(task.cost + 1e-9))))
            for key, task in tasks.items()
        }

    low, high, most = 0.0, 1.0, {key: task.most for key, task in tasks.items()}
    if not goes_on(sizes(low)) or goes_on(most):
        end = most if goes_on(sizes(low)) else sizes(low)
        return end, end
    while goes_on(sizes(high)) and high < LARGEST:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if goes_on(sizes(middle)) else (low, middle)
    return sizes(low), sizes(high)


def influences(
    gauntlet: GauntletSpec | None, num_items: Mapping[str, int], average: str | None = None
) -> dict[str, float]:
    """Return the effect of each task's accuracy on one average, or on all composites: the root of the sum of squares.

    Tasks without an effect get the root mean square of the others; without a gauntlet all tasks get 1.
    """
    if gauntlet is None:
        return dict.fromkeys(num_items, 1.0)
    of_composites = slopes(gauntlet, num_items)
    parts = [of_composites[average]] if average is not None else [*of_composites.values()]
    held = {key for part in parts for key in part}
    found = {key: math.hypot(*(part.get(key, 0.0) for part in parts)) for key in sorted(held)}
    mean = math.hypot(*found.values()) / math.sqrt(len(found)) if found else 1.0
    return {key: found.get(key, mean) for key in num_items}
