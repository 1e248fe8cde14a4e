"""Category scores and averages of a gauntlet (llm-foundry 0.22, `callbacks/eval_gauntlet_callback.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from llmfoundry_gauntlet.config.tasks import BenchmarkSpec, CategorySpec, GauntletSpec
from llmfoundry_gauntlet.metrics.statistics import weighted_sum
from llmfoundry_gauntlet.types import Composites, Measure


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
