"""Simulation: 95 % intervals cover the true value in 95 % of cases.

Each draw takes new items, or new clusters of items. Populations are so large compared with a draw that repeated items
do not matter.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from clustered_items import item

from llmfoundry_gauntlet.metrics.comparison import Difference, difference, holm, p_value, trend
from llmfoundry_gauntlet.metrics.metrics import accuracy, choice_metrics, compute_metric, task_score
from llmfoundry_gauntlet.metrics.statistics import NORMAL_QUANTILE, SHARE, interval, mean_over_clusters
from llmfoundry_gauntlet.types import ItemResult, Measure

Interval = tuple[float, float]
METRICS = {metric.name: metric for metric in choice_metrics()}


def coverages(draw: Callable[[], Mapping[str, Interval]], truths: Mapping[str, float], draws: int) -> dict[str, float]:
    """Return in which share of the draws each interval holds its true value."""
    times_covered = dict.fromkeys(truths, 0)
    for _ in range(draws):
        for name, (low, high) in draw().items():
            times_covered[name] += low <= truths[name] <= high
    return {name: times / draws for name, times in times_covered.items()}


def normal_interval(value: float, standard_error: float) -> Interval:
    """Return the interval of 1.96 standard errors, which is too narrow with few items."""
    half_width = NORMAL_QUANTILE * standard_error
    return value - half_width, value + half_width


def numbered(num_items: int) -> np.ndarray:
    """Return clusters of one item each."""
    return np.arange(num_items, dtype=np.uint64)


class Passages:
    """Passages of one to eight questions, answered by five checkpoints, each better, and what each happens to know."""

    NUM_PASSAGES = 6000
    BATCHES = (100, 200, 400, 800, 1000)

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.sizes = random.integers(1, 9, self.NUM_PASSAGES)
        self.passage_of_question = np.repeat(np.arange(self.NUM_PASSAGES), self.sizes)
        num_questions = len(self.passage_of_question)

        easiness_of_passage = random.normal(0, 1.5, self.NUM_PASSAGES)
        easiness = easiness_of_passage[self.passage_of_question] + random.normal(0, 1, num_questions)
        ability = np.linspace(-0.8, 0.6, 5)[:, None]
        luck = random.normal(0, 0.7, (5, num_questions))
        self.rights = (easiness + ability + luck) > 0  # [num_checkpoints, num_questions]

    def draw(self) -> np.ndarray:
        """Return the questions of 90 passages."""
        passages = self.random.choice(self.NUM_PASSAGES, 90, replace=False).tolist()
        ends = np.cumsum(self.sizes)
        return np.concatenate([np.arange(ends[passage] - self.sizes[passage], ends[passage]) for passage in passages])

    def scores(self, questions: np.ndarray) -> list[Measure]:
        """Return the score of each checkpoint."""
        clusters = self.passage_of_question[questions].astype(np.uint64)
        return [
            mean_over_clusters(rights[questions].astype(float).tolist(), clusters, bounds=SHARE)
            for rights in self.rights
        ]


def test_coverage_over_passages_and_checkpoints():
    """Of the mean of the last checkpoint, the difference of two, and the slope.

    Without clusters the mean's interval is too narrow; as if of different items the difference's is too wide.
    """
    passages = Passages(np.random.default_rng(2))
    means = passages.rights.mean(axis=1)
    truths = {
        'mean': means[4],
        'mean without clusters': means[4],
        'difference': means[3] - means[1],
        'unpaired difference': means[3] - means[1],
        'slope': np.polyfit(passages.BATCHES, means, 1)[0],
    }

    def draw() -> Mapping[str, Interval]:
        questions = passages.draw()
        scores = passages.scores(questions)
        credits_of_last = passages.rights[4][questions].astype(float).tolist()
        paired = difference(scores[1], scores[3], 0).difference
        unpaired_error = math.hypot(scores[1].standard_error, scores[3].standard_error)
        return {
            'mean': interval(scores[4]),
            'mean without clusters': interval(mean_over_clusters(credits_of_last, numbered(len(questions)))),
            'difference': interval(paired),
            'unpaired difference': normal_interval(paired.value, unpaired_error),
            'slope': interval(trend(passages.BATCHES, scores).slope),
        }

    coverage = coverages(draw, truths, draws=2000)

    assert 0.93 <= coverage['mean'] <= 0.97
    assert 0.93 <= coverage['difference'] <= 0.97
    assert coverage['slope'] >= 0.93  # five checkpoints leave it three degrees of freedom
    assert coverage['mean without clusters'] < 0.90
    assert coverage['unpaired difference'] > 0.98


@pytest.mark.parametrize('num_clusters', [2, 4, 10, 20, 50])
@pytest.mark.parametrize('unevenness', [0.3, 1.0])
def test_coverage_of_few_uneven_clusters(num_clusters: int, unevenness: float):
    """Sizes are log-normal; items of a cluster are correlated by a fifth. With 1.96 errors, 4 clusters cover 79 %."""
    random = np.random.default_rng(num_clusters)

    def draw() -> Mapping[str, Interval]:
        sizes = np.maximum(1, random.lognormal(2, unevenness, num_clusters).astype(int))
        clusters = np.repeat(numbered(num_clusters), sizes)
        values_of_clusters = np.repeat(random.normal(scale=0.5, size=num_clusters), sizes)
        values = values_of_clusters + random.normal(size=len(clusters))
        mean = mean_over_clusters(values.tolist(), clusters)
        return {'mean': interval(mean), 'mean with 1.96 errors': normal_interval(mean.value, mean.standard_error)}

    coverage = coverages(draw, {'mean': 0.0, 'mean with 1.96 errors': 0.0}, draws=2000)

    assert 0.93 <= coverage['mean'] <= 0.975
    assert num_clusters > 4 or coverage['mean with 1.96 errors'] < 0.88


@pytest.mark.parametrize(
    ('low', 'high'),
    [
        (0.01, 0.04),  # 1.96 errors cover 60 % at 1 %
        (0.04, 0.2),
        (0.3, 0.7),
        (0.96, 0.99),
    ],
)
@pytest.mark.parametrize('num_items', [50, 200, 2000])
def test_coverage_of_shares(num_items: int, low: float, high: float):
    """On the average over chances of an item between `low` and `high`, as few numbers of right items are possible."""
    num_right = np.arange(num_items + 1)
    intervals = [
        interval(mean_over_clusters([1.0] * right + [0.0] * (num_items - right), numbered(num_items), bounds=SHARE))
        for right in num_right.tolist()
    ]
    log_ways = [math.lgamma(num_items + 1) - math.lgamma(n + 1) - math.lgamma(num_items - n + 1) for n in num_right]

    coverage = []
    for chance in np.linspace(low, high, 15):
        log_chances = num_right * math.log(chance) + (num_items - num_right) * math.log(1 - chance) + log_ways
        covers = [low_end <= chance <= high_end for low_end, high_end in intervals]
        coverage.append(np.exp(log_chances) @ covers)

    assert 0.93 <= np.mean(coverage) <= 0.975


@pytest.mark.parametrize(('num_lonely', 'num_categories'), [(57, 57), (5, 57), (1, 10)])
def test_coverage_with_categories_of_one_cluster(num_lonely: int, num_categories: int):
    """The error of a category with a single item is borrowed, which is conservative where categories differ."""
    random = np.random.default_rng(num_lonely)
    chances = np.clip(random.normal(0.4, 0.1, num_categories), 0.05, 0.95)
    sizes = [1] * num_lonely + [10] * (num_categories - num_lonely)
    category_of_row = np.repeat(range(num_categories), sizes)
    # Both results of each row, made once because a draw chooses among them.
    wrong_and_right = [
        [item(row, score, category=f'{category:02}') for score in (0.0, 1.0)]
        for row, category in enumerate(category_of_row)
    ]

    def draw() -> Mapping[str, Interval]:
        rights = random.binomial(1, chances[category_of_row]).tolist()
        results = [pair[right] for pair, right in zip(wrong_and_right, rights, strict=True)]
        return {'macro': interval(task_score('a', [accuracy('Accuracy')], results).accuracy)}

    coverage = coverages(draw, {'macro': chances.mean()}, draws=800)

    assert 0.93 <= coverage['macro'] <= 0.995


def difference_of_equal_models(random: np.random.Generator, num_clusters: int) -> Difference:
    """Return that of two models which find the same clusters easy, on clusters of uneven sizes."""
    sizes = np.maximum(1, random.lognormal(1.5, 0.7, num_clusters).astype(int))
    clusters = np.repeat(numbered(num_clusters), sizes)
    easiness = random.normal(size=num_clusters)
    scores = [
        mean_over_clusters(np.repeat(easiness + random.normal(scale=0.5, size=num_clusters), sizes).tolist(), clusters)
        for _ in range(2)
    ]
    return difference(*scores, len(clusters))


def normal_p_value(measure: Measure) -> float:
    return math.erfc(abs(measure.value / measure.standard_error) / math.sqrt(2))


def test_stars_of_equal_models_are_rare():
    """Six tasks of few clusters with Holm's correction: a star by chance in 5 % of cases, with 1.96 errors in 20 %."""
    random = np.random.default_rng(13)
    draws = 800

    stars = 0
    stars_with_normal_errors = 0
    for _ in range(draws):
        differences = [difference_of_equal_models(random, num_clusters) for num_clusters in (3, 4, 5, 8, 12, 60)]
        stars += min(holm([compared.p_value for compared in differences])) < 0.05
        normal_p_values = [normal_p_value(compared.difference) for compared in differences]
        stars_with_normal_errors += min(holm(normal_p_values)) < 0.05

    assert stars / draws <= 0.06
    assert stars_with_normal_errors / draws > 0.2


@pytest.mark.parametrize('noise', [0.0, 1.0, 2.0])
@pytest.mark.parametrize('num_checkpoints', [4, 10])
def test_flat_series_seldom_look_like_a_trend(num_checkpoints: int, noise: float):
    """Checkpoints move all items together by `noise` standard errors; with errors over items alone 42 % are trends."""
    random = np.random.default_rng(12)
    draws = 500
    num_items = 200

    def score_of_checkpoint(difficulty: np.ndarray) -> Measure:
        own = random.normal(scale=0.5, size=num_items)
        common = noise / num_items**0.5 * random.normal()
        return mean_over_clusters((difficulty + own + common).tolist(), numbered(num_items))

    trends = 0
    for _ in range(draws):
        difficulty = random.normal(size=num_items)
        scores = [score_of_checkpoint(difficulty) for _ in range(num_checkpoints)]
        trends += p_value(trend(range(0, 100 * num_checkpoints, 100), scores).slope) < 0.05

    assert trends / draws <= 0.06


def test_the_calibration_bias_is_the_error_of_a_calibrated_model():
    """A model that is right as often as it says has a calibration error, of chance, of the recorded bias."""
    random = np.random.default_rng(14)
    confidences = random.uniform(0.5, 1, 200)

    def calibrated_results() -> list[ItemResult]:
        rights = random.random(200) < confidences
        return [
            item(row, 0.0, gold=int(not right), logprobs=(math.log(confidence), math.log(1 - confidence)))
            for row, (right, confidence) in enumerate(zip(rights.tolist(), confidences.tolist(), strict=True))
        ]

    errors, biases = [], []
    for _ in range(300):
        results = calibrated_results()
        error = compute_metric(METRICS['CalibrationError'], results)
        bias = compute_metric(METRICS['CalibrationBias'], results)
        assert error.standard_error is bias.standard_error is None
        errors.append(error.value)
        biases.append(bias.value)

    assert np.mean(errors) == pytest.approx(np.mean(biases), rel=0.05)
    assert np.mean(errors) > 0.04
