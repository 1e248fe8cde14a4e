"""Simulation: 95 % intervals cover the true value in 95 % of cases.

Each draw takes new items, or new clusters of items. Populations are so large compared with a draw that repeated items
do not matter.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from clustered_items import item

from llmfoundry_gauntlet.metrics.comparison import difference, holm, p_value, trend
from llmfoundry_gauntlet.metrics.metrics import accuracy, choice_metrics, compute_metric, task_score
from llmfoundry_gauntlet.metrics.statistics import NORMAL_QUANTILE, SHARE, interval, mean_over_clusters
from llmfoundry_gauntlet.types import Measure

DRAWS = 2000
METRICS = {metric.name: metric for metric in choice_metrics()}


def coverages(
    draw: Callable[[], Mapping[str, Measure]], truths: Mapping[str, float], draws: int = DRAWS
) -> dict[str, float]:
    """Return how often the interval of each estimate covers its true value."""
    covered = dict.fromkeys(truths, 0)
    for _ in range(draws):
        for name, found in draw().items():
            low, high = interval(found)
            covered[name] += low <= truths[name] <= high
    return {name: count / draws for name, count in covered.items()}


def test_coverage_over_passages_and_checkpoints():
    """Passages have one to eight questions, answered by five checkpoints, each better, and what each happens to know.

    The mean of the last, the difference of two, and the slope. Without clusters the mean's interval is too narrow, as
    if of different items the difference's is too wide. Five checkpoints leave the slope three degrees of freedom.
    """
    random = np.random.default_rng(2)
    sizes = random.integers(1, 9, 6000)
    passage_of = np.repeat(np.arange(6000), sizes)
    easiness = random.normal(0, 1.5, 6000)[passage_of] + random.normal(0, 1, len(passage_of))
    rights = (easiness + np.linspace(-0.8, 0.6, 5)[:, None] + random.normal(0, 0.7, (5, len(passage_of)))) > 0
    ends = np.cumsum(sizes)
    batches = [100, 200, 400, 800, 1000]
    means = rights.mean(axis=1)
    truths = {'mean': means[4], 'difference': means[3] - means[1], 'slope': np.polyfit(batches, means, 1)[0]}
    unclustered = unpaired = 0

    def draw() -> Mapping[str, Measure]:
        nonlocal unclustered, unpaired
        drawn = random.choice(6000, 90, replace=False).tolist()
        places = np.concatenate([np.arange(ends[place] - sizes[place], ends[place]) for place in drawn])
        clusters = passage_of[places].astype(np.uint64)
        scores = [mean_over_clusters(mine[places].astype(float).tolist(), clusters, bounds=SHARE) for mine in rights]
        credits = rights[4][places].astype(float).tolist()
        low, high = interval(mean_over_clusters(credits, np.arange(len(credits), dtype=np.uint64)))
        unclustered += low <= truths['mean'] <= high
        found = difference(scores[1], scores[3], 0).difference
        off = abs(found.value - truths['difference'])
        unpaired += off <= NORMAL_QUANTILE * math.hypot(scores[1].standard_error, scores[3].standard_error)
        return {'mean': scores[4], 'difference': found, 'slope': trend(batches, scores).slope}

    found = coverages(draw, truths)
    assert found.pop('slope') >= 0.93
    assert all(0.93 <= share <= 0.97 for share in found.values()), found
    assert unclustered / DRAWS < 0.90 and unpaired / DRAWS > 0.98


@pytest.mark.parametrize('num_clusters', [2, 4, 10, 20, 50])
@pytest.mark.parametrize('unevenness', [0.3, 1.0])
def test_coverage_of_few_uneven_clusters(num_clusters: int, unevenness: float):
    """Sizes are log-normal; items of a cluster are correlated by a fifth. With 1.96 errors, 4 clusters cover 79 %."""
    random = np.random.default_rng(num_clusters)
    normal = 0

    def draw() -> Mapping[str, Measure]:
        nonlocal normal
        sizes = np.maximum(1, random.lognormal(2, unevenness, num_clusters).astype(int))
        clusters = np.repeat(np.arange(num_clusters, dtype=np.uint64), sizes)
        values = np.repeat(random.normal(scale=0.5, size=num_clusters), sizes) + random.normal(size=len(clusters))
        found = mean_over_clusters(values.tolist(), clusters)
        normal += abs(found.value) <= NORMAL_QUANTILE * found.standard_error
        return {'mean': found}

    (share,) = coverages(draw, {'mean': 0.0}).values()
    assert 0.93 <= share <= 0.975
    assert num_clusters > 4 or normal / DRAWS < 0.88


@pytest.mark.parametrize('num_items', [50, 200, 2000])
def test_coverage_of_shares_near_the_ends(num_items: int):
    """On the average over chances, as the possible numbers of right items are few; 1.96 errors cover 60 % at 1 %."""
    rights, numbers = np.arange(num_items + 1), np.arange(num_items, dtype=np.uint64)
    intervals = [
        interval(mean_over_clusters([1.0] * right + [0.0] * (num_items - right), numbers, bounds=SHARE))
        for right in rights.tolist()
    ]
    ways = [math.lgamma(num_items + 1) - math.lgamma(n + 1) - math.lgamma(num_items - n + 1) for n in rights]
    for low, high in ((0.01, 0.04), (0.04, 0.2), (0.3, 0.7), (0.96, 0.99)):
        found = []
        for chance in np.linspace(low, high, 15):
            logs = rights * math.log(chance) + (num_items - rights) * math.log(1 - chance) + ways
            found.append(np.exp(logs) @ [low_end <= chance <= high_end for low_end, high_end in intervals])
        assert 0.93 <= np.mean(found) <= 0.975, (low, high)


@pytest.mark.parametrize(('num_lonely', 'num_categories'), [(57, 57), (5, 57), (1, 10)])
def test_coverage_with_categories_of_one_cluster(num_lonely: int, num_categories: int):
    """The error of a category with a single item is borrowed, which is conservative where categories differ."""
    random = np.random.default_rng(num_lonely)
    chances = np.clip(random.normal(0.4, 0.1, num_categories), 0.05, 0.95)
    places = np.repeat(range(num_categories), [1 if place < num_lonely else 10 for place in range(num_categories)])
    rows = [[item(row, score, category=f'{place:02}') for score in (0.0, 1.0)] for row, place in enumerate(places)]

    def draw() -> Mapping[str, Measure]:
        drawn = [row[right] for row, right in zip(rows, random.binomial(1, chances[places]).tolist(), strict=True)]
        return {'macro': task_score('a', [accuracy('Accuracy')], drawn).accuracy}

    (share,) = coverages(draw, {'macro': chances.mean()}, 800).values()
    assert 0.93 <= share <= 0.995


def test_stars_of_equal_models_are_rare():
    """Six tasks of few clusters with Holm's correction: a star by chance in 5 % of cases, with 1.96 errors in 20 %."""
    random = np.random.default_rng(13)
    stars, normal, draws = 0, 0, 800
    for _ in range(draws):
        p_values, tails = [], []
        for num_clusters in (3, 4, 5, 8, 12, 60):
            sizes = np.maximum(1, random.lognormal(1.5, 0.7, num_clusters).astype(int))
            clusters = np.repeat(np.arange(num_clusters, dtype=np.uint64), sizes)
            ease = random.normal(size=num_clusters)
            models = [
                mean_over_clusters(
                    np.repeat(ease + random.normal(scale=0.5, size=num_clusters), sizes).tolist(), clusters
                )
                for _ in range(2)
            ]
            found = difference(*models, len(clusters))
            p_values.append(found.p_value)
            tails.append(math.erfc(abs(found.difference.value / found.difference.standard_error) / math.sqrt(2)))
        stars += min(holm(p_values)) < 0.05
        normal += min(holm(tails)) < 0.05
    assert stars / draws <= 0.06
    assert normal / draws > 0.2


@pytest.mark.parametrize('noise', [0.0, 1.0, 2.0])
@pytest.mark.parametrize('num_checkpoints', [4, 10])
def test_flat_series_seldom_look_like_a_trend(num_checkpoints: int, noise: float):
    """Checkpoints move all items together by `noise` standard errors; with errors over items alone 42 % are trends."""
    random = np.random.default_rng(12)
    trends, draws, numbers = 0, 500, np.arange(200, dtype=np.uint64)
    for _ in range(draws):
        difficulty = random.normal(size=200)
        scores = [
            mean_over_clusters(
                (difficulty + random.normal(scale=0.5, size=200) + noise / 200**0.5 * random.normal()).tolist(), numbers
            )
            for _ in range(num_checkpoints)
        ]
        trends += p_value(trend(range(0, 100 * num_checkpoints, 100), scores).slope) < 0.05
    assert trends / draws <= 0.06


def test_the_calibration_bias_is_the_error_of_a_calibrated_model():
    """A model that is right as often as it says has a calibration error, of chance, of the recorded bias."""
    random = np.random.default_rng(14)
    confidences = random.uniform(0.5, 1, 200)
    found, expected = [], []
    for _ in range(300):
        rights = random.random(200) < confidences
        results = [
            item(row, 0.0, gold=int(not right), logprobs=(math.log(sure), math.log(1 - sure)))
            for row, (right, sure) in enumerate(zip(rights.tolist(), confidences.tolist(), strict=True))
        ]
        error, bias = (compute_metric(METRICS[name], results) for name in ('CalibrationError', 'CalibrationBias'))
        assert error.standard_error is bias.standard_error is None
        found.append(error.value)
        expected.append(bias.value)
    assert np.mean(found) == pytest.approx(np.mean(expected), rel=0.05)
    assert np.mean(found) > 0.04
