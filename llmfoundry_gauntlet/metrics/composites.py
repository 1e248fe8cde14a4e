"""Category scores and averages of a gauntlet (llm-foundry 0.22, `callbacks/eval_gauntlet_callback.py`).

Also the allocation of an evaluation's items to its tasks that makes them as precise as possible for their cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmfoundry_gauntlet.config.tasks import BenchmarkSpec, CategorySpec, GauntletSpec
from llmfoundry_gauntlet.metrics.statistics import weighted_sum
from llmfoundry_gauntlet.types import Composites, Measure

STEPS = 60  # of a bisection
LARGEST = 1e18  # scale of an allocation

Sizes = Mapping[str, int]  # number of questions by task


def compute_composites(
    gauntlet: GauntletSpec,
    accuracies: Mapping[str, Measure],
    num_items: Mapping[str, int],
    *,
    reference: bool,
) -> Composites:
    """Return composites from the accuracy and size of each task, keyed by '{label}/{n}-shot'.

    Composites that cannot be computed are absent, with the reason. With `reference`, averages are taken over the
    categories that have a score, and an average over none is 0, as in llm-foundry.
    """
    categories = {
        category.name: category_score(gauntlet, category, accuracies, num_items) for category in gauntlet.categories
    }
    average = average_reference if reference else average_corrected
    averages = {name: average(members, categories) for name, members in gauntlet.named_averages.items()}
    return Composites(categories=categories, averages=averages)


def category_score(
    gauntlet: GauntletSpec,
    category: CategorySpec,
    accuracies: Mapping[str, Measure],
    num_items: Mapping[str, int],
) -> Measure:
    """Return the weighted mean of the category's rescaled accuracies."""
    missing: dict[str, list[str]] = {}
    scores, weights = [], []
    for benchmark in category.benchmarks:
        accuracy = accuracies.get(benchmark.key, Measure(value=None, reason='did not run'))
        if accuracy.value is None:
            missing.setdefault(accuracy.reason or '', []).append(benchmark.key)
            continue
        scores.append(rescale(gauntlet, benchmark, accuracy))
        weights.append(weight(gauntlet.weighting, num_items[benchmark.key]))
    if missing:
        groups = [f'{", ".join(keys)} ({reason})' for reason, keys in missing.items()]
        return Measure(value=None, reason='benchmarks without a score: ' + ', '.join(groups))
    return weighted_sum(scores, [one / sum(weights) for one in weights])


def rescale(gauntlet: GauntletSpec, benchmark: BenchmarkSpec, accuracy: Measure) -> Measure:
    """Return the accuracy above chance, as a share of the possible accuracy above chance."""
    if not gauntlet.subtract_random_baseline:
        return accuracy
    scale = 1 / (1 - benchmark.random_baseline) if gauntlet.rescale_accuracy else 1.0
    return weighted_sum([accuracy], [scale], shift=-benchmark.random_baseline * scale)


def weight(weighting: str, num_items: int) -> float:
    """Return a benchmark's weight in its category."""
    if weighting == 'SAMPLE_SZ':
        return max(num_items, 1)
    if weighting == 'LOG_SAMPLE_SZ':
        return max(math.log2(max(num_items, 1)), 1)
    return 1


def average_corrected(members: tuple[str, ...], categories: Mapping[str, Measure]) -> Measure:
    """Return the plain mean over the named categories; absent if any of them is."""
    unknown = [name for name in members if name not in categories]
    absent = [name for name in members if name in categories and categories[name].value is None]
    if unknown or absent:
        parts = []
        if unknown:
            parts.append(f'the gauntlet has no category {", ".join(unknown)}')
        if absent:
            parts.append(f'categories without a score: {", ".join(absent)}')
        return Measure(value=None, reason='; '.join(parts))
    return mean_of([categories[name] for name in members])


def average_reference(members: tuple[str, ...], categories: Mapping[str, Measure]) -> Measure:
    """Return llm-foundry's average: over the categories that have a score, 0 if none has."""
    left = [measure for name, measure in categories.items() if name in members and measure.value is not None]
    return mean_of(left) if left else Measure(value=0.0)


def mean_of(measures: Sequence[Measure]) -> Measure:
    """Return the plain mean of measures that have values."""
    return weighted_sum(measures, [1 / len(measures)] * len(measures))


def slopes(gauntlet: GauntletSpec, num_items: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return the derivative of each composite with respect to the accuracy of each of these tasks."""
    found: dict[str, dict[str, float]] = {}
    for category in gauntlet.categories:
        there = [benchmark for benchmark in category.benchmarks if benchmark.key in num_items]
        weights = [weight(gauntlet.weighting, num_items[benchmark.key]) for benchmark in there]
        found[category.name] = {
            benchmark.key: one / sum(weights) / (1 - benchmark.random_baseline if gauntlet.rescale_accuracy else 1)
            for benchmark, one in zip(there, weights, strict=True)
        }
    for name, members in gauntlet.named_averages.items():
        of_members = [found.get(member, {}) for member in members]
        found[name] = {
            key: sum(part.get(key, 0.0) for part in of_members) / len(members)
            for key in dict.fromkeys(key for part in of_members for key in part)
        }
    return found


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
    `standard_error` is the larger of that of a model near chance and that of one halfway to 1. `detectable` is the
    minimum detectable effect between two models, with 80 % power at a level of 5 %, if they agree by chance only; it is
    smaller for models that agree more.
    """

    share: float
    num_items: int
    seconds: float
    standard_error: float
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
