"""Category scores and averages of a gauntlet (llm-foundry 0.22, `callbacks/eval_gauntlet_callback.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmfoundry_gauntlet.config.tasks import BenchmarkSpec, CategorySpec, GauntletSpec
from llmfoundry_gauntlet.metrics.statistics import weighted_sum
from llmfoundry_gauntlet.types import Composites, Measure

STEPS = 60  # of a bisection
PRIOR = 8.0  # items, half of them right, that count beside those that were measured


def compute_composites(
    gauntlet: GauntletSpec,
    accuracies: Mapping[str, Measure],
    num_items: Mapping[str, int],
    *,
    reference: bool,
) -> Composites:
    """Return composites from the accuracy and size of each task, keyed by '{label}/{n}-shot'.

    What cannot be computed is absent, with the reason. With `reference`, averages are taken over the categories that
    are left, and an average over none is 0, as in llm-foundry.
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
