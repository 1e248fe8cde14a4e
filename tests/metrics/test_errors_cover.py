"""Simulation: 95 % intervals cover the true value in 95 % of cases, for every estimate.

Each draw takes new items, or new clusters of items. Populations are so large compared with a draw that repeated items
do not matter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    Metric,
    accuracy,
    choice_metrics,
    item_metric,
    measure,
    passes_at,
    pmi,
    task_score,
)
from llmfoundry_gauntlet.metrics.statistics import NORMAL_QUANTILE, interval, mean_over_clusters
from llmfoundry_gauntlet.types import ItemResult, Measure

DRAWS = 2000
ACCURACY = accuracy('Accuracy')
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
            bounds = interval(found)
            assert bounds is not None, name
            covered[name] += bounds[0] <= truths[name] <= bounds[1]
    return {name: count / draws for name, count in covered.items()}


def assert_cover(found: Mapping[str, float]) -> None:
    assert {name: share for name, share in found.items() if not 0.93 <= share <= 0.97} == {}


def quadrature(measures: Sequence[Measure], weights: Sequence[float]) -> float:
    """Return the error of a weighted sum of independent parts."""
    errors = [one.standard_error for one in measures]
    return math.sqrt(math.fsum((error * weight) ** 2 for error, weight in zip(errors, weights, strict=True)))


def test_coverage_of_means_over_independent_items():
    random = np.random.default_rng(1)
    outcomes = [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 1.0)]  # wrong, a tie, right, strictly right
    chances = [0.35, 0.1, 0.25, 0.3]
    rows = [
        [item('a', row, credit, metrics={'StrictMatch': strict}) for credit, strict in outcomes] for row in range(150)
    ]

    def draw() -> Mapping[str, Measure]:
        results = taken(rows, random.choice(4, 150, p=chances))
        return task_score('a', [ACCURACY, item_metric('StrictMatch')], results).metrics

    assert_cover(coverages(draw, {'Accuracy': 0.6, 'StrictMatch': 0.3}))


@dataclass(frozen=True)
class Passages:
    """A population of passages with one to eight questions each, answered by several models.

    `rights` says whether each model is right [models, questions]; `results` are the items by model and passage.
    """

    rights: Array
    results: list[list[list[ItemResult]]]


@pytest.fixture(scope='module')
def passages() -> Passages:
    random = np.random.default_rng(2)
    sizes = random.integers(1, 9, 6000)
    passage_of = np.repeat(np.arange(6000), sizes)
    easiness = random.normal(0, 1.5, 6000)[passage_of] + random.normal(0, 1, len(passage_of))
    # five checkpoints of a model, each better, and what each happens to know
    rights = (easiness + np.linspace(-0.8, 0.6, 5)[:, None] + random.normal(0, 0.7, (5, len(passage_of)))) > 0
    ends = np.cumsum(sizes)
    results = []
    for model in range(5):
        items = [
            item('a', row, float(right), passage)
            for row, (right, passage) in enumerate(zip(rights[model].tolist(), passage_of.tolist(), strict=True))
        ]
        results.append([items[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)])
    return Passages(rights, results)


def answered(passages: Passages, model: int, drawn: Array) -> Measure:
    by_passage = passages.results[model]
    return measure(ACCURACY, list(chain.from_iterable(by_passage[place] for place in drawn.tolist())))


def test_coverage_of_means_over_clusters(passages: Passages):
    random = np.random.default_rng(3)
    truth = passages.rights[4].mean()
    by_passage = passages.results[4]
    unclustered = 0

    def draw() -> Mapping[str, Measure]:
        nonlocal unclustered
        drawn = random.choice(6000, 100, replace=False).tolist()
        results = list(chain.from_iterable(by_passage[place] for place in drawn))
        credits = [result.score for result in results]
        low, high = interval(mean_over_clusters(credits, np.arange(len(credits), dtype=np.uint64)))
        unclustered += low <= truth <= high
        return {'clustered': measure(ACCURACY, results)}

    assert_cover(coverages(draw, {'clustered': truth}))
    assert unclustered / DRAWS < 0.90


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
    numbers = np.arange(num_items, dtype=np.uint64)
    intervals = [
        interval(mean_over_clusters([1.0] * right + [0.0] * (num_items - right), numbers, is_share=True))
        for right in range(num_items + 1)
    ]
    for low, high in ((0.01, 0.04), (0.04, 0.2), (0.3, 0.7), (0.96, 0.99)):
        found = []
        for chance in np.linspace(low, high, 15):
            rights = np.arange(num_items + 1)
            logs = rights * math.log(chance) + (num_items - rights) * math.log(1 - chance)
            logs += [math.lgamma(num_items + 1) - math.lgamma(n + 1) - math.lgamma(num_items - n + 1) for n in rights]
            covers = [low_end <= chance <= high_end for low_end, high_end in intervals]
            found.append(np.exp(logs) @ covers)
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
            ease = np.repeat(random.normal(size=num_clusters), sizes)
            models = [
                mean_over_clusters(
                    (ease + np.repeat(random.normal(scale=0.5, size=num_clusters), sizes)).tolist(), clusters
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


def test_coverage_of_paired_differences(passages: Passages):
    random = np.random.default_rng(4)
    truth = passages.rights[3].mean() - passages.rights[1].mean()
    unpaired = 0

    def draw() -> Mapping[str, Measure]:
        nonlocal unpaired
        drawn = random.choice(6000, 80, replace=False)
        first, second = answered(passages, 1, drawn), answered(passages, 3, drawn)
        found = difference(first, second, 0).difference
        unpaired += abs(found.value - truth) <= NORMAL_QUANTILE * quadrature([first, second], [1, 1])
        return {'difference': found}

    assert_cover(coverages(draw, {'difference': truth}))
    assert unpaired / DRAWS > 0.98  # as if of different items: too wide


def test_coverage_of_slopes_over_checkpoints(passages: Passages):
    random = np.random.default_rng(5)
    batches = [100, 200, 400, 800, 1000]
    truth = np.polyfit(batches, passages.rights.mean(axis=1), 1)[0]

    def draw() -> Mapping[str, Measure]:
        drawn = random.choice(6000, 80, replace=False)
        scores = [answered(passages, model, drawn) for model in range(5)]
        slope = trend(batches, scores).slope
        assert math.isclose(slope.value, np.polyfit(batches, [score.value for score in scores], 1)[0], rel_tol=1e-9)
        return {'slope': slope}

    # more, as five checkpoints leave three degrees of freedom
    assert coverages(draw, {'slope': truth})['slope'] >= 0.93


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


def test_coverage_of_means_over_unequal_categories():
    random = np.random.default_rng(6)
    parts = {'history': (40, 0.55), 'law': (75, 0.3), 'physics': (180, 0.8)}
    rows = {name: both(name, size, category=name) for name, (size, _) in parts.items()}

    def draw() -> Mapping[str, Measure]:
        drawn = [taken(rows[name], random.binomial(1, chance, size)) for name, (size, chance) in parts.items()]
        return {'macro': task_score('a', [ACCURACY], list(chain.from_iterable(drawn))).accuracy}

    assert_cover(coverages(draw, {'macro': (0.55 + 0.3 + 0.8) / 3}))


def test_coverage_of_rescaled_categories():
    random = np.random.default_rng(7)
    sizes = {'a/0-shot': 60, 'b/0-shot': 120, 'c/0-shot': 300}
    chances = {'a/0-shot': 0.45, 'b/0-shot': 0.7, 'c/0-shot': 0.6}
    rows = {task: both(task, size) for task, size in sizes.items()}
    benchmarks = [
        {'name': name, 'num_fewshot': 0, 'random_baseline': baseline}
        for name, baseline in (('a', 0.25), ('b', 0.5), ('c', 0.0))
    ]
    gauntlets = {
        weighting: load_suite(
            None, {'weighting': weighting, 'categories': [{'name': 'one', 'benchmarks': benchmarks}]}
        ).gauntlet
        for weighting in ('EQUAL', 'LOG_SAMPLE_SZ')
    }

    def draw() -> Mapping[str, Measure]:
        accuracies = {
            task: task_score(task, [ACCURACY], taken(rows[task], random.binomial(1, chances[task], size))).accuracy
            for task, size in sizes.items()
        }
        return {
            weighting: compute_composites(gauntlet, accuracies, sizes, reference=False).categories['one']
            for weighting, gauntlet in gauntlets.items()
        }

    rescaled = np.array([0.2 / 0.75, 0.2 / 0.5, 0.6])
    logarithms = np.log2([60, 120, 300])
    truths = {'EQUAL': rescaled.mean(), 'LOG_SAMPLE_SZ': rescaled @ logarithms / logarithms.sum()}
    assert_cover(coverages(draw, truths))


def test_coverage_of_averages_with_shared_passages():
    random = np.random.default_rng(8)
    passages_of = {'b/0-shot': np.repeat(np.arange(80), 2), 'c/0-shot': np.repeat(np.arange(80), 3)}
    rows = {task: both(task, len(places), places.tolist()) for task, places in passages_of.items()}
    rows['a/0-shot'] = both('a/0-shot', 100)
    sizes = {task: len(entries) for task, entries in rows.items()}
    categories = [
        {'name': name, 'benchmarks': [{'name': task, 'num_fewshot': 0, 'random_baseline': 0.25} for task in tasks]}
        for name, tasks in (('one', 'ab'), ('other', 'ac'))
    ]
    gauntlet = load_suite(None, {'categories': categories}).gauntlet
    truth = ((0.6 - 0.25) / 0.75 * 2 + (0.5 - 0.25) / 0.75 * 2) / 4
    apart = 0

    def draw() -> Mapping[str, Measure]:
        nonlocal apart
        easiness = random.beta(1, 1, 80)  # a half in the mean
        rights = {task: random.binomial(1, easiness[places]) for task, places in passages_of.items()}
        rights['a/0-shot'] = random.binomial(1, 0.6, 100)
        accuracies = {task: task_score(task, [ACCURACY], taken(rows[task], rights[task])).accuracy for task in rows}
        found = compute_composites(gauntlet, accuracies, sizes, reference=False)
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


@dataclass(frozen=True)
class Choices:
    """A population of items with four choices, of an overconfident model.

    Log-probabilities, with and without the prompt, and lengths of choices are [items, 4].
    """

    logprobs: Array
    logprobs_alone: Array
    golds: Array
    characters: Array
    byte_counts: Array
    tokens: Array
    results: list[ItemResult]

    @property
    def shares(self) -> Array:
        return np.exp(self.logprobs) / np.exp(self.logprobs).sum(axis=1, keepdims=True)

    @property
    def is_gold(self) -> Array:
        return self.golds[:, None] == np.arange(4)


@pytest.fixture(scope='module')
def choices() -> Choices:
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
    byte_counts = characters + random.binomial(characters, 0.1)
    tokens = np.maximum(1, characters // random.integers(3, 6, (number, 4)))
    logprobs_alone = logprobs - random.gamma(2, 2, (number, 4))
    results = [
        item(
            'a',
            row,
            0.0,
            row,
            gold=int(golds[row]),
            logprobs=tuple(logprobs[row].tolist()),
            logprobs_alone=tuple(logprobs_alone[row].tolist()),
            num_characters=tuple(characters[row].tolist()),
            num_bytes=tuple(byte_counts[row].tolist()),
            num_tokens=tuple(tokens[row].tolist()),
        )
        for row in range(number)
    ]
    return Choices(logprobs, logprobs_alone, golds, characters, byte_counts, tokens, results)


def bits_per_byte(choices: Choices) -> Array:
    return (-choices.logprobs / np.log(2) / choices.byte_counts)[choices.is_gold]


def share_of_best(found: Choices, values: Array) -> float:
    """Return how often the gold choice has the highest value."""
    return (values.argmax(axis=1) == found.golds).mean()


TRUTHS: dict[str, Callable[[Choices], float]] = {
    'GoldBitsPerByte': lambda found: bits_per_byte(found).mean(),
    'GoldProbability': lambda found: found.shares[found.is_gold].mean(),
    'CharacterNormalizedMatch': lambda found: share_of_best(found, found.logprobs / found.characters),
    'ByteNormalizedMatch': lambda found: share_of_best(found, found.logprobs / found.byte_counts),
    'TokenNormalizedMatch': lambda found: share_of_best(found, found.logprobs / found.tokens),
    'PMINormalizedMatch': lambda found: share_of_best(found, found.logprobs - found.logprobs_alone),
    'BrierScore': lambda found: ((found.shares - found.is_gold) ** 2).sum(axis=1).mean(),
    'MajorityClass': lambda found: (found.golds == 0).mean(),
}
METRICS: dict[str, Metric] = {metric.name: metric for metric in (*choice_metrics(), pmi())}


@pytest.mark.parametrize('name', TRUTHS)
def test_coverage_of_likelihood_metrics(choices: Choices, name: str):
    random = np.random.default_rng(11)

    def draw() -> Mapping[str, Measure]:
        drawn = random.choice(len(choices.results), 150, replace=False).tolist()
        return {name: measure(METRICS[name], [choices.results[place] for place in drawn])}

    assert_cover(coverages(draw, {name: float(TRUTHS[name](choices))}))


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


def test_bits_per_byte_are_skewed_in_this_population(choices: Choices):
    values = bits_per_byte(choices)
    assert ((values - values.mean()) ** 3).mean() / values.std() ** 3 > 1.5
