"""Category scores and averages of a gauntlet (llm-foundry 0.22, `callbacks/eval_gauntlet_callback.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

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


def compute_gold_bits(
    gauntlet: GauntletSpec, bits: Mapping[str, Measure], num_items: Mapping[str, int]
) -> dict[str, Measure]:
    """Return the bits per byte of gold answers for each category and average, from those of each task.

    Tasks have the weights that they have in the score. There is no chance to subtract from a loss, and an average over
    some of its categories alone would be no average, whatever llm-foundry makes of accuracies.
    """
    plain = replace(gauntlet, subtract_random_baseline=False, rescale_accuracy=False)
    return compute_composites(plain, bits, num_items, reference=False).by_name


def category_score(
    gauntlet: GauntletSpec,
    category: CategorySpec,
    accuracies: Mapping[str, Measure],
    num_items: Mapping[str, int],
) -> Measure:
    """Return the weighted mean of the category's rescaled accuracies."""
    keys_by_reason: dict[str, list[str]] = {}
    scores, weights = [], []
    for benchmark in category.benchmarks:
        accuracy = accuracies.get(benchmark.key, Measure(value=None, reason='did not run'))
        if accuracy.value is None:
            keys_by_reason.setdefault(accuracy.reason or '', []).append(benchmark.key)
            continue
        scores.append(rescale(gauntlet, benchmark, accuracy))
        weights.append(weight(gauntlet.weighting, num_items[benchmark.key]))
    if keys_by_reason:
        groups = [f'{", ".join(keys)} ({reason})' for reason, keys in keys_by_reason.items()]
        return Measure(value=None, reason='benchmarks without a score: ' + ', '.join(groups))
    whole = sum(weights)
    return weighted_sum(scores, [of_benchmark / whole for of_benchmark in weights])


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
    by_composite: dict[str, dict[str, float]] = {}
    for category in gauntlet.categories:
        benchmarks = [benchmark for benchmark in category.benchmarks if benchmark.key in num_items]
        weights = {benchmark.key: weight(gauntlet.weighting, num_items[benchmark.key]) for benchmark in benchmarks}
        whole = sum(weights.values())
        of_category = {}
        for benchmark in benchmarks:
            above_chance = 1 - benchmark.random_baseline if gauntlet.rescale_accuracy else 1
            of_category[benchmark.key] = weights[benchmark.key] / whole / above_chance
        by_composite[category.name] = of_category

    for name, members in gauntlet.named_averages.items():
        of_members = [by_composite.get(member, {}) for member in members]
        keys = dict.fromkeys(key for of_member in of_members for key in of_member)
        by_composite[name] = {
            key: sum(of_member.get(key, 0.0) for of_member in of_members) / len(members) for key in keys
        }
    return by_composite
