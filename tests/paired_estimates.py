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

SCORED = ('accuracy', 'consistency_rate')

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
        text, gold = (row['continuation'], 0) if key == LINES else (row['choices'][row['gold']], row['gold'])
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
    center = float(np.mean(values))
    parts = {
        name: center - np.mean([value for value, one in zip(values, clusters, strict=True) if one != name])
        for name in set(clusters)
    }
    scale = math.sqrt((len(parts) - 1) / len(parts))
    return Estimate(center, {name: part * scale for name, part in parts.items()})


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
    groups: dict[str | None, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        groups[ROWS[key][row].get('category')].append(place)
    means = [
        mean_of([values[place] for place in places], [cluster_of(key, rows[place]) for place in places])
        for places in groups.values()
    ]
    return combined(means, [1 / len(means)] * len(means))


def paired(key: str, first: Path, second: Path, value: Value = score_of) -> Estimate:
    """Return the mean difference over the items that both runs have scored."""
    ours, theirs = (
        {sample['row']: value(sample) for sample in samples_of(run, key) if sample['score'] is not None}
        for run in (first, second)
    )
    rows = sorted(ours.keys() & theirs.keys())
    return over_items(key, rows, [theirs[row] - ours[row] for row in rows])


def composites_of(tasks: Mapping[str, Estimate], sizes: Mapping[str, int]) -> dict[str, Estimate]:
    """Return categories and averages of differences or slopes, where baselines only scale."""
    found = {}
    for name, members in CATEGORIES.items():
        whole = sum(sizes[key] for key in members)
        weights = [sizes[key] / whole / (1 - BASELINES[key]) for key in members]
        found[name] = combined([tasks[key] for key in members], weights)
    for name, members in AVERAGES.items():
        found[name] = combined([found[member] for member in members], [1 / len(members)] * len(members))
    return found


def score_differences(first: Path, second: Path) -> dict[str, Estimate]:
    """Return the differences of each question's share of right variants and of agreeing pairs."""
    shares = []
    for run in (first, second):
        groups: dict[tuple[str, int], list[Sample]] = defaultdict(list)
        for sample in samples_of(run, AGIEVAL):
            groups[sample['variant'].partition(':')[0], sample['row']].append(sample)
        shares.append(
            {name: (np.mean([s['score'] for s in group]), agreement(group)) for name, group in groups.items()}
        )
    found = {}
    for perturbation in ('option_order', 'prompt'):
        for place, name in enumerate(SCORED):
            rows = range(len(QUESTIONS))
            values = [shares[1][perturbation, row][place] - shares[0][perturbation, row][place] for row in rows]
            found[f'agieval {perturbation} {name}'] = mean_of(values, [QUESTIONS[row]['passage'] for row in rows])
    return found


def agreement(group: Sequence[Sample]) -> float:
    texts = [shown(sample)[sample['predicted']] for sample in group]
    return float(np.mean([one == other for one, other in combinations(texts, 2)]))


def shown(sample: Sample) -> list[str]:
    """Return the options of a question as a variant shows them."""
    options, gold = ['x', 'y', 'z'], sample['row'] % 3
    perturbation, _, letter = sample['variant'].partition(':')
    if perturbation == 'option_order':
        place = 'ABC'.index(letter)
        options[gold], options[place] = options[place], options[gold]
    return options


def check_differences(found: Mapping[str, Any], expected: Mapping[str, Estimate]) -> None:
    """Check the numbers of a group of differences in the JSON output, which is corrected for its size."""
    assert list(found) == list(expected)
    for name, estimate in expected.items():
        one = found[name]
        assert one['difference']['value'] == pytest.approx(estimate.value, abs=1e-13), name
        assert one['difference']['standard_error'] == pytest.approx(estimate.error, abs=1e-13), name
        assert one['second']['value'] - one['first']['value'] == pytest.approx(estimate.value, abs=1e-13), name
    smallest = min(found.values(), key=lambda one: one['p_value'])
    assert smallest['p_holm'] == min(1.0, smallest['p_value'] * len(found))
