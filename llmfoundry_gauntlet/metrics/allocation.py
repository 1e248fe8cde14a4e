"""Allocate items to tasks within a time budget so that composites become as precise as possible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.metrics.composites import weight

STEPS = 60  # of a bisection
PRIOR = 8.0  # items, half of them right, that count beside those that were measured


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCosts:
    """Costs and spread of a task.

    `seconds` is the time per item, `share_right` the accuracy on `num_measured` items. At least `least` and at most
    `most` items are taken. `weight` is the effect of the task's accuracy on composites.
    """

    seconds: float
    share_right: float
    num_measured: int
    least: int
    most: int
    weight: float

    @property
    def deviation(self) -> float:
        """Return the standard deviation of an item's score, shrunk towards that of an even chance for little data."""
        right = (self.share_right * self.num_measured + PRIOR / 2) / (self.num_measured + PRIOR)
        return math.sqrt(right * (1 - right))


def allocate(tasks: Mapping[str, TaskCosts], seconds: float) -> dict[str, int]:
    """Return the number of items of each task that fit in the time together, or the least of each if that takes longer.

    The variance of a sum of accuracies falls most if items go where they reduce it most for their time: the number of
    items is proportional to weight times deviation over the square root of the seconds per item (Neyman allocation with
    costs), within the limits.
    """

    def sizes(scale: float) -> dict[str, int]:
        return {
            key: min(
                task.most, max(task.least, int(scale * task.weight * task.deviation / math.sqrt(task.seconds + 1e-9)))
            )
            for key, task in tasks.items()
        }

    def takes(chosen: Mapping[str, int]) -> float:
        return math.fsum(tasks[key].seconds * number for key, number in chosen.items())

    low, high = 0.0, 1.0
    while takes(sizes(high)) <= seconds and sizes(high) != {key: task.most for key, task in tasks.items()}:
        low, high = high, 2 * high
    if takes(sizes(high)) <= seconds:
        return sizes(high)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if takes(sizes(middle)) <= seconds else (low, middle)
    return sizes(low)


def influences(gauntlet: GauntletSpec | None, num_items: Mapping[str, int]) -> dict[str, float]:
    """Return the effect of each task's accuracy on composites: the root of the sum of squares over all composites.

    Tasks in no composite count like the mean of the others; without a gauntlet all count alike.
    """
    if gauntlet is None:
        return dict.fromkeys(num_items, 1.0)
    slopes: dict[str, dict[str, float]] = {}  # of each composite, by task
    for category in gauntlet.categories:
        there = [benchmark for benchmark in category.benchmarks if benchmark.key in num_items]
        weights = [weight(gauntlet.weighting, num_items[benchmark.key]) for benchmark in there]
        slopes[category.name] = {
            benchmark.key: one / sum(weights) / (1 - benchmark.random_baseline if gauntlet.rescale_accuracy else 1)
            for benchmark, one in zip(there, weights, strict=True)
        }
    for name, members in gauntlet.named_averages.items():
        of_members = [slopes.get(member, {}) for member in members]
        slopes[name] = {
            key: sum(part.get(key, 0.0) for part in of_members) / len(members) for key in set().union(*of_members)
        }
    held = sorted(set().union(*slopes.values()))
    found = {key: math.hypot(*(part.get(key, 0.0) for part in slopes.values())) for key in held}
    mean = math.hypot(*found.values()) / math.sqrt(len(found)) if found else 1.0
    return {key: found.get(key, mean) for key in num_items}
