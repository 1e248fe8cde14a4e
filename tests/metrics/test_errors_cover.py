"""Simulation: 95 % intervals cover the true value in 95 % of cases, for every estimate.

Each draw takes new items, or new clusters of items. Populations are so large compared with a draw that repeated items
do not matter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import clustered_items
import numpy as np
import numpy.typing as npt
import pytest

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.comparison import difference, holm, p_value, trend
from llmfoundry_gauntlet.metrics.composites import compute_composites
from llmfoundry_gauntlet.metrics.metrics import (
    accuracy,
    choice_metrics,
    measure,
    passes_at,
    pmi,
    task_score,
)
from llmfoundry_gauntlet.metrics.statistics import NORMAL_QUANTILE, interval, mean_over_clusters
from llmfoundry_gauntlet.types import ItemResult, Measure

DRAWS = 2000
ACCURACY = accuracy('Accuracy')
METRICS = {metric.name: metric for metric in (*choice_metrics(), pmi())}
Array = npt.NDArray[Any]


def item(task: str, row: int, credit: float, cluster: int | None = None, **changes: Any) -> ItemResult:
    return clustered_items.item(row, credit, '' if cluster is None else f'{cluster:016x}', task=task, **changes)


def both(task: str, num_rows: int, clusters: Sequence[int] | None = None, **changes: Any) -> list[list[ItemResult]]:
    """Return each row as a wrong item and as a right item."""
    return [
        [item(task, row, float(credit), None if clusters is None else clusters[row], **changes) for credit in (0, 1)]
        for row in range(num_rows)
    ]


def taken(rows: list[list[ItemResult]], rights: Array) -> list[ItemResult]:
    """Return the item of each row with the given score."""
    return [row[right] for row, right in zip(rows, rights.tolist(), strict=True)]


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


def assert_cover(found: Mapping[str, float]) -> None:
    assert {name: share for name, share in found.items() if not 0.93 <= share <= 0.97} == {}


def quadrature(measures: Sequence[Measure], weights: Sequence[float]) -> float:
    """Return the error of a weighted sum of independent parts."""
    return math.hypot(*(one.standard_error * weight for one, weight in zip(measures, weights, strict=True)))


def gauntlet(categories: Mapping[str, Mapping[str, float]], weighting: str = 'EQUAL') -> Any:
    """Return a gauntlet from the random baseline of each task of its categories."""
    parts = [
        {
            'name': name,
            'benchmarks': [
                {'name': task, 'num_fewshot': 0, 'random_baseline': chance} for task, chance in tasks.items()
            ],
        }
        for name, tasks in categories.items()
    ]
    return load_suite(None, {'weighting': weighting, 'categories': parts}).gauntlet


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
        scores = [mean_over_clusters(mine[places].astype(float).tolist(), clusters, is_share=True) for mine in rights]
        credits = rights[4][places].astype(float).tolist()
        low, high = interval(mean_over_clusters(credits, np.arange(len(credits), dtype=np.uint64)))
        unclustered += low <= truths['mean'] <= high
        found = difference(scores[1], scores[3], 0).difference
        off = abs(found.value - truths['difference'])
        unpaired += off <= NORMAL_QUANTILE * quadrature([scores[1], scores[3]], [1, 1])
        return {'mean': scores[4], 'difference': found, 'slope': trend(batches, scores).slope}

    found = coverages(draw, truths)
    assert found.pop('slope') >= 0.93
    assert_cover(found)
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
        interval(mean_over_clusters([1.0] * right + [0.0] * (num_items - right), numbers, is_share=True))
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
    rows = [
        both('a', 1 if place < num_lonely else 10, [100 * place + row for row in range(10)], category=f'{place:02}')
        for place in range(num_categories)
    ]

    def draw() -> Mapping[str, Measure]:
        drawn = [taken(one, random.binomial(1, chance, len(one))) for one, chance in zip(rows, chances, strict=True)]
        return {'macro': task_score('a', [ACCURACY], list(chain.from_iterable(drawn))).accuracy}

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


def test_coverage_of_unequal_and_rescaled_categories():
    """Three tasks are also the categories of one."""
    random = np.random.default_rng(7)
    sizes = {'a/0-shot': 60, 'b/0-shot': 120, 'c/0-shot': 300}
    chances = np.array([0.45, 0.7, 0.6])
    rows = {task: both(task, size, category=task[0]) for task, size in sizes.items()}
    baselines = {'one': {'a': 0.25, 'b': 0.5, 'c': 0.0}}
    gauntlets = {weighting: gauntlet(baselines, weighting) for weighting in ('EQUAL', 'LOG_SAMPLE_SZ')}

    def draw() -> Mapping[str, Measure]:
        drawn = {
            task: taken(rows[task], random.binomial(1, chance, size))
            for (task, size), chance in zip(sizes.items(), chances, strict=True)
        }
        accuracies = {task: task_score(task, [ACCURACY], results).accuracy for task, results in drawn.items()}
        return {
            'macro': task_score('a', [ACCURACY], list(chain.from_iterable(drawn.values()))).accuracy,
            **{
                weighting: compute_composites(one, accuracies, sizes, reference=False).categories['one']
                for weighting, one in gauntlets.items()
            },
        }

    rescaled, logarithms = np.array([0.2 / 0.75, 0.2 / 0.5, 0.6]), np.log2([60, 120, 300])
    truths = {'EQUAL': rescaled.mean(), 'LOG_SAMPLE_SZ': rescaled @ logarithms / logarithms.sum()}
    assert_cover(coverages(draw, {'macro': chances.mean(), **truths}, 1000))


def test_coverage_of_averages_with_shared_passages():
    random = np.random.default_rng(8)
    passages_of = {'b/0-shot': np.repeat(np.arange(80), 2), 'c/0-shot': np.repeat(np.arange(80), 3)}
    rows = {task: both(task, len(places), places.tolist()) for task, places in passages_of.items()}
    rows['a/0-shot'] = both('a/0-shot', 100)
    sizes = {task: len(entries) for task, entries in rows.items()}
    two = gauntlet({'one': {'a': 0.25, 'b': 0.25}, 'other': {'a': 0.25, 'c': 0.25}})
    truth = ((0.6 - 0.25) / 0.75 * 2 + (0.5 - 0.25) / 0.75 * 2) / 4
    apart = 0

    def draw() -> Mapping[str, Measure]:
        nonlocal apart
        easiness = random.beta(1, 1, 80)  # a half in the mean
        rights = {task: random.binomial(1, easiness[places]) for task, places in passages_of.items()}
        rights['a/0-shot'] = random.binomial(1, 0.6, 100)
        accuracies = {task: task_score(task, [ACCURACY], taken(rows[task], rights[task])).accuracy for task in rows}
        found = compute_composites(two, accuracies, sizes, reference=False)
        average = found.averages['default_average']
        apart += abs(average.value - truth) <= NORMAL_QUANTILE * quadrature([*found.categories.values()], [0.5, 0.5])
        return {'average': average}

    assert_cover(coverages(draw, {'average': truth}))
    assert apart / DRAWS < 0.90  # as if its categories had nothing in common


def test_coverage_of_pass_at_k():
    random = np.random.default_rng(9)
    shape = (0.4, 1.2)  # of the chances, which differ much from problem to problem
    rows = [
        [item('a', row, float(credit), row, sample=sample) for credit in (0, 1)]
        for row in range(120)
        for sample in range(10)
    ]

    def draw() -> Mapping[str, Measure]:
        chances = np.repeat(random.beta(*shape, 120), 10)
        return task_score('a', [ACCURACY, *passes_at([5])], taken(rows, random.binomial(1, chances))).metrics

    # E (1 - p)^5 of a beta distribution
    all_fail = math.prod((shape[1] + place) / (sum(shape) + place) for place in range(5))
    assert_cover(coverages(draw, {'Accuracy': 0.25, 'PassAt5': 1 - all_fail}))


@pytest.fixture(scope='module')
def choices() -> tuple[list[ItemResult], dict[str, float]]:
    """Return items with four choices, of an overconfident model, and the true value of each metric."""
    random = np.random.default_rng(10)
    number = 30_000
    confidence = random.uniform(0.4, 1, number)
    others = random.dirichlet([8, 8, 8], number) * (1 - confidence[:, None])
    shares = np.concatenate([confidence[:, None], others], axis=1)
    # right in six of ten cases in which it says it is; then columns are exchanged so that classes are unequal
    right = np.where(random.random(number) < 0.6 * confidence, 0, random.integers(1, 4, number))
    golds = random.choice(4, number, p=[0.5, 0.2, 0.2, 0.1])
    rows = np.arange(number)
    shares[rows, right], shares[rows, golds] = shares[rows, golds], shares[rows, right]
    logprobs = np.log(shares) - random.gamma(1.5, 20, number)[:, None]
    characters = random.integers(8, 50, (number, 4))
    values = {
        'logprobs': logprobs,
        'num_characters': characters,
        'num_bytes': characters + random.binomial(characters, 0.1),
        'num_tokens': np.maximum(1, characters // random.integers(3, 6, (number, 4))),
        'logprobs_alone': logprobs - random.gamma(2, 2, (number, 4)),
    }
    results = [
        item('a', row, 0.0, row, gold=gold, **{name: tuple(part[row].tolist()) for name, part in values.items()})
        for row, gold in enumerate(golds.tolist())
    ]
    bits = (-logprobs / np.log(2) / values['num_bytes'])[rows, golds]
    assert ((bits - bits.mean()) ** 3).mean() / bits.std() ** 3 > 1.5  # skewed
    ranked = {
        'CharacterNormalizedMatch': logprobs / characters,
        'ByteNormalizedMatch': logprobs / values['num_bytes'],
        'TokenNormalizedMatch': logprobs / values['num_tokens'],
        'PMINormalizedMatch': logprobs - values['logprobs_alone'],
    }
    return results, {
        'GoldBitsPerByte': bits.mean(),
        'GoldProbability': shares[rows, golds].mean(),
        'BrierScore': ((shares - (golds[:, None] == np.arange(4))) ** 2).sum(axis=1).mean(),
        'MajorityClass': (golds == 0).mean(),
        **{name: (part.argmax(axis=1) == golds).mean() for name, part in ranked.items()},
    }


def test_coverage_of_likelihood_metrics(choices: tuple[list[ItemResult], dict[str, float]]):
    random, (results, truths) = np.random.default_rng(11), choices

    def draw() -> Mapping[str, Measure]:
        drawn = [results[place] for place in random.choice(len(results), 150, replace=False)]
        return {name: measure(METRICS[name], drawn) for name in truths}

    assert METRICS.keys() - truths.keys() == {'CalibrationError', 'CalibrationBias'}
    assert_cover(coverages(draw, truths))


def test_the_calibration_bias_is_the_error_of_a_calibrated_model():
    """A model that is right as often as it says has a calibration error, of chance, of the recorded bias."""
    random = np.random.default_rng(14)
    confidences = random.uniform(0.5, 1, 200)
    found, expected = [], []
    for _ in range(300):
        rights = random.random(200) < confidences
        results = [
            item('a', row, 0.0, gold=int(not right), logprobs=(math.log(sure), math.log(1 - sure)))
            for row, (right, sure) in enumerate(zip(rights.tolist(), confidences.tolist(), strict=True))
        ]
        error, bias = (measure(METRICS[name], results) for name in ('CalibrationError', 'CalibrationBias'))
        assert error.standard_error is bias.standard_error is None
        found.append(error.value)
        expected.append(bias.value)
    assert np.mean(found) == pytest.approx(np.mean(expected), rel=0.05)
    assert np.mean(found) > 0.04
