"""Simulation: the interval of a subset's score covers that of its whole file, with the cluster sizes of real files."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from llmfoundry_gauntlet.data.examples import in_turns
from llmfoundry_gauntlet.metrics.comparison import difference, spread_of_file
from llmfoundry_gauntlet.metrics.statistics import interval, mean_over_clusters, weighted_sum
from llmfoundry_gauntlet.types import Example

DRAWS, ORDERS = 800, 20
FILES = {  # the number of clusters of each size
    'winograd': {1: 10, 2: 123, 3: 1, 4: 2, 6: 1},
    'lsat_rc': {1: 1, 5: 6, 6: 11, 7: 13, 8: 10},
    'conlang': {20: 6, 21: 1, 23: 1},
}


@pytest.mark.parametrize(
    ('file', 'num_items', 'correlation'),
    [
        ('winograd', 200, 0.0),
        ('winograd', 200, 0.3),
        ('winograd', 137, 0.0),
        ('lsat_rc', 41, 0.0),
        ('lsat_rc', 150, 0.2),
        ('lsat_rc', 250, 0.5),
        ('conlang', 100, 0.2),
    ],
)
@pytest.mark.parametrize('is_difference', [False, True])
def test_coverage_of_the_full_score(file: str, num_items: int, correlation: float, is_difference: bool):
    """Outcomes are fixed by a model; which items are taken is chance. The error for other items covers too often."""
    random = np.random.default_rng(num_items)
    sizes = np.repeat([*FILES[file]], [*FILES[file].values()])
    clusters = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
    orders = []
    for _ in range(ORDERS):  # clusters with other names are taken in another order
        names = random.permutation(len(sizes))[clusters]
        rows = [Example(row=row, content=None, cluster=f'{name:016x}') for row, name in enumerate(names)]
        orders.append(in_turns(rows)[:num_items])
    covered = of_others = 0
    for draw in range(DRAWS):
        taken = orders[draw % ORDERS]
        runs = []
        for _ in range(1 + is_difference):
            common = np.repeat(random.normal(size=len(sizes)), sizes)
            own = random.normal(size=len(clusters))
            rights = (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own < 0.3).astype(float)
            subset = mean_over_clusters(rights[taken].tolist(), clusters[taken], is_share=True, file_sizes=sizes)
            runs.append((rights.mean(), subset))
        if is_difference:
            truth = runs[1][0] - runs[0][0]
            found = difference(runs[0][1], runs[1][1], num_items)
            assert found.is_of_file
            measure, wide = found.difference, weighted_sum([runs[1][1], runs[0][1]], [1.0, -1.0])
        else:
            truth, wide = runs[0]
            measure = replace(wide, spread=spread_of_file(wide.spread))
        low, high = interval(measure)
        covered += low <= truth <= high
        low, high = interval(wide)
        of_others += low <= truth <= high
    assert 0.93 <= covered / DRAWS <= 0.972
    assert num_items < 100 or of_others / DRAWS > 0.98
