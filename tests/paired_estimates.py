"""Independent computation of the differences of `recorded_runs`, with NumPy, from samples and rows.

Clusters, text sizes and weights come from the rows, not from the program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import AGIEVAL, AVERAGES, BASELINES, CATEGORIES, LINES, QUESTIONS, ROWS, Sample, samples_of

Value = Callable[[Sample], float]


def cluster_of(key: str, row: int) -> str:
    """Return what a row shares with the others of its cluster."""
    return ROWS[key][row].get('passage') or ROWS[key][row]['context']


def score_of(sample: Sample) -> float:
    return sample['score']


def bits_per_byte(key: str) -> Value:
    """Return the bits per byte of the gold continuation's text in the data."""

    def bits(sample: Sample) -> float:
        row = ROWS[key][sample['row']]
        if key == LINES:
            text, gold = row['continuation'], 0
        else:
            text, gold = row['choices'][row['gold']], row['gold']
        return -sample['logprobs'][gold] / math.log(2) / len(text.encode())

    return bits


class Estimate:
    """A number, and each cluster's part of its deviation."""

    def __init__(self, value: float, parts: Mapping[str, float]) -> None:
        self.value, self.parts = value, dict(parts)

    @property
    def error(self) -> float:
        return float(np.sqrt(np.sum(np.square(list(self.parts.values())))))


def mean_of(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Return the mean with the error of a jackknife over clusters."""
    mean = float(np.mean(values))
    deviations = {}
    for left_out in set(clusters):
        others = [value for value, cluster in zip(values, clusters, strict=True) if cluster != left_out]
        deviations[left_out] = mean - np.mean(others)
    scale = math.sqrt((len(deviations) - 1) / len(deviations))
    return Estimate(mean, {cluster: deviation * scale for cluster, deviation in deviations.items()})


def combined(estimates: Iterable[Estimate], weights: Iterable[float]) -> Estimate:
    parts: dict[str, float] = defaultdict(float)
    value = 0.0
    for estimate, weight in zip(estimates, weights, strict=True):
        value += weight * estimate.value
        for name, part in estimate.parts.items():
            parts[name] += weight * part
    return Estimate(value, parts)


def over_items(key: str, rows: Sequence[int], values: Sequence[float]) -> Estimate:
    """Return the mean of a task's items, or the mean over its categories."""
    values_by_category: dict[str | None, list[float]] = defaultdict(list)
    clusters_by_category: dict[str | None, list[str]] = defaultdict(list)
    for row, value in zip(rows, values, strict=True):
        category = ROWS[key][row].get('category')
        values_by_category[category].append(value)
        clusters_by_category[category].append(cluster_of(key, row))
    means = [mean_of(of_category, clusters_by_category[name]) for name, of_category in values_by_category.items()]
    return combined(means, [1 / len(means)] * len(means))


def paired(key: str, first: Path, second: Path, value: Value = score_of) -> Estimate:
    """Return the mean difference over the items that both runs have scored."""

    def values_by_row(run: Path) -> dict[int, float]:
        return {sample['row']: value(sample) for sample in samples_of(run, key) if sample['score'] is not None}

    of_first, of_second = values_by_row(first), values_by_row(second)
    rows = sorted(of_first.keys() & of_second.keys())
    return over_items(key, rows, [of_second[row] - of_first[row] for row in rows])


def composites_of(tasks: Mapping[str, Estimate], sizes: Mapping[str, int]) -> dict[str, Estimate]:
    """Return categories and averages of differences or slopes, where baselines only scale."""
    composites = {}
    for name, members in CATEGORIES.items():
        num_items = sum(sizes[key] for key in members)
        weights = [sizes[key] / num_items / (1 - BASELINES[key]) for key in members]
        composites[name] = combined([tasks[key] for key in members], weights)
    for name, members in AVERAGES.items():
        categories = [composites[member] for member in members]
        composites[name] = combined(categories, [1 / len(members)] * len(members))
    return composites


def score_differences(first: Path, second: Path) -> dict[str, Estimate]:
    """Return the differences of each question's share of right variants and of agreeing pairs."""
    shares = {'accuracy': share_of_right, 'consistency_rate': agreement}
    passages = [question['passage'] for question in QUESTIONS]
    differences = {}
    for perturbation in ('option_order', 'prompt'):
        of_first, of_second = variants_by_row(first, perturbation), variants_by_row(second, perturbation)
        for metric, share in shares.items():
            values = [share(of_second[row]) - share(of_first[row]) for row in range(len(QUESTIONS))]
            differences[f'agieval {perturbation} {metric}'] = mean_of(values, passages)
    return differences


def error_over_prompts(first: Path, second: Path) -> float:
    """Return the error of the difference of agieval's accuracies over passages and prompts, from crossed variances."""
    of_runs = [variants_by_row(run, 'prompt') for run in (first, second)]
    differences = []
    for row in range(len(QUESTIONS)):
        of_first, of_second = ({sample['variant']: sample['score'] for sample in of_run[row]} for of_run in of_runs)
        differences.append([of_second[prompt] - of_first[prompt] for prompt in sorted(of_first)])
    values = np.array(differences)
    num_questions, num_prompts = values.shape
    over_questions = mean_of(values.mean(1).tolist(), [question['passage'] for question in QUESTIONS]).error ** 2

    of_prompts = values.mean(0).var(ddof=1) / num_prompts
    left = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    passages = np.array([question['passage'] for question in QUESTIONS])
    sums = np.array([left[passages == passage].sum(0) for passage in np.unique(passages)])
    num_passages = len(sums)
    scale = num_passages / (num_passages - 1) * num_prompts / (num_prompts - 1)
    of_both = (sums**2).sum() / (num_questions * num_prompts) ** 2 * scale
    return math.sqrt(over_questions + max(0.0, of_prompts - of_both))


def variants_by_row(run: Path, perturbation: str) -> dict[int, list[Sample]]:
    """Return the samples of all variants of each question."""
    variants: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples_of(run, AGIEVAL):
        if sample['variant'].partition(':')[0] == perturbation:
            variants[sample['row']].append(sample)
    return variants


def share_of_right(variants: Sequence[Sample]) -> float:
    return float(np.mean([sample['score'] for sample in variants]))


def agreement(variants: Sequence[Sample]) -> float:
    """Return the share of pairs of variants with the same option."""
    texts = [shown(sample)[sample['predicted']] for sample in variants]
    return float(np.mean([text == other for text, other in combinations(texts, 2)]))


def shown(sample: Sample) -> list[str]:
    """Return the options of a question as a variant shows them."""
    options, gold = ['x', 'y', 'z'], sample['row'] % 3
    perturbation, _, letter = sample['variant'].partition(':')
    if perturbation == 'option_order':
        index = 'ABC'.index(letter)
        options[gold], options[index] = options[index], options[gold]
    return options


def check_differences(group: Mapping[str, Any], expected: Mapping[str, Estimate], *, num_groups: int = 3) -> None:
    """Check the numbers of a group of differences in the JSON output, corrected for its size and that of all groups."""
    assert list(group) == list(expected)
    for name, estimate in expected.items():
        entry = group[name]
        difference = entry['difference']
        assert difference['value'] == pytest.approx(estimate.value, abs=1e-13), name
        assert difference['standard_error'] == pytest.approx(estimate.error, abs=1e-13), name
        assert entry['second']['value'] - entry['first']['value'] == pytest.approx(estimate.value, abs=1e-13), name
    smallest = min(group.values(), key=lambda entry: entry['p_value'])
    assert smallest['p_holm'] == pytest.approx(min(1.0, smallest['p_value'] * len(group) * num_groups), rel=1e-12)
