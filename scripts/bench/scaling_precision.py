"""How precise a gauntlet's average becomes in a given time, by the allocation that `time_budget` uses. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmfoundry_gauntlet.config.specs import GauntletSpec
from llmfoundry_gauntlet.scores.allocation import TaskCosts, allocate, influences
from llmfoundry_gauntlet.scores.composites import compute_composites
from llmfoundry_gauntlet.values import Measure

AVERAGE = 'default_average'  # over all categories, of a gauntlet that names none
KNOWN = 10**9  # items that the assumed accuracy counts as measured on, so that it is taken as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What fits into some seconds: items, the seconds that they take, and the average's standard error."""

    items: int
    seconds: float
    standard_error: float


def slopes_of(gauntlet: GauntletSpec, items: Mapping[str, int]) -> dict[str, float]:
    """How much the average moves with each task's accuracy; it is linear in them."""

    def average(accuracies: Mapping[str, float]) -> float:
        measures = {key: Measure(value=value) for key, value in accuracies.items()}
        value = compute_composites(gauntlet, measures, items, reference=False).averages[AVERAGE].value
        if value is None:
            raise ValueError('a task of the gauntlet has no accuracy')
        return value

    start = average(dict.fromkeys(items, 0.0))
    return {key: average({**dict.fromkeys(items, 0.0), key: 1.0}) - start for key in items}


def assumed_accuracies(gauntlet: GauntletSpec, above_chance: float) -> dict[str, float]:
    """Each task's accuracy, where a model has this share of what can be had above chance."""
    return {
        benchmark.key: benchmark.random_baseline + above_chance * (1 - benchmark.random_baseline)
        for category in gauntlet.categories
        for benchmark in category.benchmarks
    }


def standard_error(slopes: Mapping[str, float], accuracies: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """Of the average, over independent items that are right or wrong."""
    return math.sqrt(
        math.fsum(slopes[key] ** 2 * accuracies[key] * (1 - accuracies[key]) / sizes[key] for key in sizes)
    )


def precision_in(
    seconds: float,
    gauntlet: GauntletSpec,
    item_seconds: Mapping[str, float],
    items: Mapping[str, int],
    accuracies: Mapping[str, float],
) -> Precision:
    """What `time_budget` of so many seconds gives, where an item of a task takes `item_seconds`; at least two each."""
    weights = influences(gauntlet, items)
    costs = {
        key: TaskCosts(
            seconds=item_seconds[key],
            share_right=accuracies[key],
            num_measured=KNOWN,
            least=min(2, items[key]),
            most=items[key],
            weight=weights[key],
        )
        for key in items
    }
    sizes = allocate(costs, seconds)
    return Precision(
        items=sum(sizes.values()),
        seconds=math.fsum(item_seconds[key] * number for key, number in sizes.items()),
        standard_error=standard_error(slopes_of(gauntlet, items), accuracies, sizes),
    )
