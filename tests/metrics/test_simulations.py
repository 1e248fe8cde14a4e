"""Simulations of what stars and intervals promise, with tasks of the sizes and clusters of the published files.

An item is right if what it, its cluster and the model bring together is below a threshold. Two models have 70 % of that
in common, and a cluster has 28 %, so that items of a cluster, and equal models, are right or wrong together.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import scipy

from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.data.published import PATH
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.comparison import LEVEL, Difference, difference, holm_in_families, p_value, trend
from llmfoundry_gauntlet.metrics.composites import compute_composites
from llmfoundry_gauntlet.metrics.prompt_effects import effects_on_agreement, over_prompts, prompt_effects
from llmfoundry_gauntlet.metrics.statistics import SHARE, interval, mean_over_categories, mean_over_clusters
from llmfoundry_gauntlet.types import Measure

pytestmark = pytest.mark.long

# Clusters and the largest cluster of the published files (docs/statistics.md); in others each row is a cluster.
CLUSTERED = {
    'squad': (2_067, 30),
    'coqa': (499, 40),
    'boolq': (2_938, 9),
    'agi_eval_lsat_rc': (41, 8),
    'agi_eval_sat_en': (44, 7),
    'agi_eval_lsat_ar': (40, 7),
    'logi_qa': (548, 5),
    'bigbench_strange_stories': (48, 7),
    'bigbench_conlang_translation': (8, 23),
    'bigbench_logical_deduction': (300, 7),
    'winograd': (137, 6),
    'math_qa': (2_483, 7),
}
SHARED_PROBLEMS, SHARED_PERSONS = 10**9, 2 * 10**9  # first clusters of HumanEval's and of winogender's files
MMLU_CATEGORIES = 57
BBQ_CATEGORIES, BBQ_CLUSTERS = 11, 359


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The items of a task that are asked, by category: the number of each one's cluster."""

    clusters: Mapping[str, np.ndarray]
    chance: float

    @property
    def num_items(self) -> int:
        return sum(map(len, self.clusters.values()))


def sizes_of_clusters(num_rows: int, num_clusters: int, largest: int) -> np.ndarray:
    """Return uneven sizes of clusters, always the same."""
    random = np.random.default_rng(num_rows)
    shares = random.lognormal(sigma=0.7, size=num_clusters)
    sizes = np.clip(np.round(shares / shares.sum() * num_rows), 1, largest).astype(int)
    while sizes.sum() != num_rows:
        step = 1 if sizes.sum() < num_rows else -1
        can_change = (sizes < largest) if step > 0 else (sizes > 1)
        sizes[random.choice(np.flatnonzero(can_change))] += step
    return sizes


def asked_in_turns(sizes: np.ndarray, limit: int) -> np.ndarray:
    """Return the clusters of the first items: one of each cluster before a second of any."""
    turns = [np.flatnonzero(sizes > turn) for turn in range(sizes.max())]
    return np.concatenate(turns)[:limit]


@functools.cache
def gauntlet() -> GauntletSpec:
    return load_suite('yamls/tasks/gauntlet_v0.1.yaml', 'yamls/gauntlets/eval_gauntlet_v0.1.yaml').gauntlet


def rows_of_tasks() -> dict[str, int]:
    """Return the number of rows of each task's published file."""
    with PATH.open(encoding='utf-8', newline='') as file:
        return {row['task']: int(row['rows']) for row in csv.DictReader(file, delimiter='\t')}


def tasks_of_the_gauntlet(limit: int) -> dict[str, Asked]:
    """Return what a limit asks of each of the 57 tasks; tasks on the same problems have the same clusters."""
    rows = rows_of_tasks()
    tasks = {}
    benchmarks = [benchmark for category in gauntlet().categories for benchmark in category.benchmarks]
    for place, benchmark in enumerate(benchmarks):
        name = benchmark.name
        first_cluster = place * 1_000_000
        if name.startswith('human_eval'):
            first_cluster = SHARED_PROBLEMS
        elif name.startswith('winogender'):
            first_cluster = SHARED_PERSONS
        if name == 'mmlu':
            asked = in_categories(MMLU_CATEGORIES, limit, clusters_of_category=rows[name] // MMLU_CATEGORIES, size=1)
        elif name == 'bbq':
            asked = in_categories(BBQ_CATEGORIES, limit, clusters_of_category=BBQ_CLUSTERS // BBQ_CATEGORIES, size=49)
        elif name in CLUSTERED:
            asked = {'': asked_in_turns(sizes_of_clusters(rows[name], *CLUSTERED[name]), limit)}
        else:
            asked = {'': np.arange(min(limit, rows[name]))}
        clusters = {category: of.astype(np.uint64) + np.uint64(first_cluster) for category, of in asked.items()}
        tasks[benchmark.key] = Asked(clusters=clusters, chance=benchmark.random_baseline)
    return tasks


def in_categories(num_categories: int, limit: int, *, clusters_of_category: int, size: int) -> dict[str, np.ndarray]:
    """Return the clusters of a task's items, as many of each category as of any other, or one more."""
    asked = {}
    for category in range(num_categories):
        num_items = max(1, limit // num_categories + (category < limit % num_categories))
        of_category = asked_in_turns(np.full(clusters_of_category, size), num_items)
        asked[f'{category:02}'] = of_category + category * clusters_of_category
    return asked


# Equal models.


class Models:
    """Models that are equally able, on tasks of which items and clusters are drawn anew each time."""

    def __init__(self, tasks: Mapping[str, Asked], num_models: int, seed: int) -> None:
        self.tasks, self.num_models = tasks, num_models
        self.random = np.random.default_rng(seed)
        everything = np.concatenate([of for task in tasks.values() for of in task.clusters.values()])
        self.num_clusters = len(np.unique(everything))
        self.places = dict(zip(np.unique(everything).tolist(), range(self.num_clusters), strict=True))
        self.places_of_tasks = {
            key: {name: np.array([self.places[number] for number in of.tolist()]) for name, of in task.clusters.items()}
            for key, task in tasks.items()
        }

    def draw(self, shares_right: Mapping[str, float]) -> list[dict[str, Measure]]:
        """Return the accuracy of each task by each model, of which these shares are right in the long run."""
        normal = self.random.normal
        shared = normal(size=self.num_clusters) * math.sqrt(0.20)
        own = normal(size=(self.num_models, self.num_clusters)) * math.sqrt(0.08)
        of_models: list[dict[str, Measure]] = [{} for _ in range(self.num_models)]
        for key, task in self.tasks.items():
            threshold = scipy.special.ndtri(shares_right[key])
            rights_by_category = {}
            for category, places in self.places_of_tasks[key].items():
                of_items = normal(size=len(places)) * math.sqrt(0.50)
                of_models_and_items = normal(size=(self.num_models, len(places))) * math.sqrt(0.22)
                total = (shared + own)[:, places] + of_items + of_models_and_items
                rights_by_category[category] = (total < threshold).astype(float)
            for number, of_model in enumerate(of_models):
                of_model[key] = accuracy_of(key, task, {name: of[number] for name, of in rights_by_category.items()})
        return of_models


def accuracy_of(key: str, task: Asked, rights: Mapping[str, np.ndarray]) -> Measure:
    """Return the accuracy of a task, the mean over its categories if it has any."""
    measures = {
        category: mean_over_clusters(
            of.tolist(), task.clusters[category], stratum=f'{key}/{category}', task=key, bounds=SHARE
        )
        for category, of in rights.items()
    }
    if len(measures) == 1:
        return measures['']
    first_clusters = {category: int(of[0]) for category, of in task.clusters.items()}
    return mean_over_categories(measures, first_clusters, stratum=key, bounds=SHARE)


def early(tasks: Mapping[str, Asked]) -> dict[str, float]:
    """Return the shares of right answers of a model at chance."""
    return {key: max(task.chance, 0.01) for key, task in tasks.items()}


def midway(tasks: Mapping[str, Asked]) -> dict[str, float]:
    """Return those of a model a third of the way to all right."""
    return {key: task.chance + 0.35 * (1 - task.chance) if task.chance else 0.3 for key, task in tasks.items()}


Ability = Callable[[Mapping[str, Asked]], dict[str, float]]


def composites_of(accuracies: Mapping[str, Measure], tasks: Mapping[str, Asked]) -> dict[str, Measure]:
    num_items = {key: task.num_items for key, task in tasks.items()}
    return compute_composites(gauntlet(), accuracies, num_items, reference=False).by_name


def differences_of(first: Mapping[str, Measure], second: Mapping[str, Measure]) -> list[Difference]:
    return [difference(first[name], second[name], 0) for name in first]


@pytest.mark.parametrize(
    ('limit', 'ability', 'draws'),
    [(50, early, 300), (50, midway, 300), (100, midway, 300), (200, midway, 300), (500, midway, 200)],
)
def test_equal_models_seldom_get_a_star_anywhere(limit: int, ability: Ability, draws: int):
    """In 5 % of tables or fewer, of 57 tasks and 9 composites, however few of the items are asked.

    Mutations: families are not counted; the error is that of the distance from the whole files.
    """
    tasks = tasks_of_the_gauntlet(limit)
    models = Models(tasks, 2, seed=limit)

    with_star, with_star_by_family, with_star_in_either = 0, dict.fromkeys(('tasks', 'composites'), 0), 0
    for _ in range(draws):
        first, second = models.draw(ability(tasks))
        p_values = {
            'tasks': [compared.p_value for compared in differences_of(first, second)],
            'composites': [
                compared.p_value
                for compared in differences_of(composites_of(first, tasks), composites_of(second, tasks))
            ],
        }
        smallest = {name: min(values) for name, values in holm_in_families(p_values).items()}
        with_star += min(smallest.values()) < LEVEL
        # As if each family were the only one.
        for name, value in smallest.items():
            with_star_by_family[name] += value / 2 < LEVEL
        with_star_in_either += min(smallest.values()) / 2 < LEVEL

    shares = {name: round(number / draws, 3) for name, number in with_star_by_family.items()}
    print(f'limit {limit}, {ability.__name__}: {with_star / draws:.3f} of tables have a star; without the number of')
    print(f'families {with_star_in_either / draws:.3f}, {shares}')
    assert with_star / draws <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)


# Intervals.


def check_coverage(share: float, draws: int, lowest: float, highest: float = 1.0) -> None:
    """Check the share of intervals that cover, with three standard errors of it for chance."""
    chance = 3 * math.sqrt(0.05 * 0.95 / draws)
    assert lowest - chance <= share <= min(1.0, highest + chance)


@pytest.mark.parametrize(('limit', 'ability', 'draws'), [(50, early, 300), (50, midway, 300), (200, midway, 300)])
def test_intervals_of_composites_cover(limit: int, ability: Ability, draws: int):
    """95 % of them, on the average over composites; those at the lowest possible scores cover more."""
    tasks = tasks_of_the_gauntlet(limit)
    models = Models(tasks, 1, seed=limit)
    shares = ability(tasks)
    truths = composites_of({key: Measure(value=share) for key, share in shares.items()}, tasks)

    times_covered = dict.fromkeys(truths, 0)
    for _ in range(draws):
        (accuracies,) = models.draw(shares)
        for name, measure in composites_of(accuracies, tasks).items():
            low, high = interval(measure)
            times_covered[name] += low <= truths[name].value <= high

    coverage = {name: times / draws for name, times in times_covered.items()}
    print(f'limit {limit}, {ability.__name__}:', {name: round(share, 3) for name, share in coverage.items()})
    assert 0.93 <= np.mean(list(coverage.values())) <= 0.985
    for share in coverage.values():
        check_coverage(share, draws, 0.93)


SHARES = (0.005, 0.02, 0.25, 0.5, 0.95, 0.995)


@pytest.mark.parametrize('limit', [20, 50, 100, 200, 500])
@pytest.mark.parametrize('task', ['mmlu/10-shot', 'bbq/3-shot'])
def test_intervals_of_categories_of_few_items_cover_near_0_and_1(task: str, limit: int):
    """Not always, either: the sides of many small samples, added up, cover 100 % and are useless.

    Mutation: `mean_over_categories` adds up the sides of its categories.
    """
    draws = 300
    tasks = {task: tasks_of_the_gauntlet(limit)[task]}
    models = Models(tasks, 1, seed=limit)

    coverage, widths = {}, {}
    for share in SHARES:
        ends = []
        for _ in range(draws):
            (accuracies,) = models.draw({task: share})
            ends.append(interval(accuracies[task]))
        lows, highs = np.array(ends).T
        coverage[share] = float(np.mean((lows <= share) & (share <= highs)))
        widths[share] = round(float(np.mean(highs - lows)), 3)

    print(f'{task}, {limit} items: cover', {share: round(of, 3) for share, of in coverage.items()}, 'width', widths)
    for share in coverage.values():
        check_coverage(share, draws, 0.92)
    assert np.mean(list(coverage.values())) <= 0.985


# Trends.


@pytest.mark.parametrize(
    ('correlation', 'most'),
    [(0.0, 0.05), (0.5, 0.08), (0.7, 0.13), (0.9, 0.27)],
)
@pytest.mark.parametrize('num_checkpoints', [5, 10, 20, 40])
def test_flat_scores_look_like_a_trend_as_often_as_the_docs_say(num_checkpoints: int, correlation: float, most: float):
    """Checkpoints move all 100 items together, by one or two errors of a score, and resemble their neighbors."""
    random = np.random.default_rng(num_checkpoints)
    num_items, draws = 100, 1000
    clusters = np.arange(num_items, dtype=np.uint64)

    shares = []
    for noise in (1.0, 2.0):
        num_trends = 0
        for _ in range(draws):
            steps = random.normal(size=num_checkpoints)
            common = [steps[0]]
            for step in steps[1:]:
                common.append(correlation * common[-1] + math.sqrt(1 - correlation**2) * step)
            items = random.normal(size=num_items)
            scores = [
                mean_over_clusters(
                    (items + random.normal(size=num_items) + noise / math.sqrt(num_items) * moved).tolist(), clusters
                )
                for moved in common
            ]
            batches = range(0, 100 * num_checkpoints, 100)
            num_trends += p_value(trend(batches, scores).slope) < LEVEL
        shares.append(num_trends / draws)

    print(f'{num_checkpoints} checkpoints, correlation {correlation}: {shares} of flat scores')
    assert max(shares) <= most + 3 * math.sqrt(most * (1 - most) / draws)


# SCORE.

PROMPTS = [f'prompt:{number}' for number in range(10)]


@pytest.mark.parametrize('deviation', [0.0, 0.01, 0.03, 0.05])
@pytest.mark.parametrize(('num_questions', 'draws'), [(200, 500), (1_000, 300), (12_000, 250)])
def test_the_accuracy_with_any_prompts_is_covered(num_questions: int, draws: int, deviation: float):
    """Of ten prompts whose accuracies deviate; the error over questions alone misses it with many questions."""
    random = np.random.default_rng(num_questions)
    clusters = np.arange(num_questions, dtype=np.uint64) * np.uint64(7919)
    threshold = scipy.special.ndtri(0.4)
    # An accuracy of 0.4 changes by 0.386 where the threshold changes by 1.
    in_thresholds = deviation / 0.386
    truth = scipy.special.ndtr(threshold / math.sqrt(1 + in_thresholds**2))

    times_covered = np.zeros(2)
    for _ in range(draws):
        of_questions = math.sqrt(0.7) * random.normal(size=(num_questions, 1))
        total = of_questions + math.sqrt(0.3) * random.normal(size=(num_questions, 10))
        rights = (total < threshold + in_thresholds * random.normal(size=10)).astype(float)
        accuracy = mean_over_clusters(rights.mean(axis=1).tolist(), clusters, bounds=SHARE)
        effects = prompt_effects(rights, clusters, [''] * num_questions, PROMPTS)
        for place, measure in enumerate((accuracy, over_prompts(accuracy, effects))):
            low, high = interval(measure)
            times_covered[place] += low <= truth <= high

    of_questions_alone, crossed = times_covered / draws
    print(f'{num_questions} questions, deviation {deviation}: {of_questions_alone:.3f} and {crossed:.3f}')
    check_coverage(crossed, draws, 0.93, 0.97)
    if deviation * math.sqrt(num_questions) > 3:
        assert of_questions_alone < 0.7


@pytest.mark.parametrize('deviation', [0.02, 0.08])
@pytest.mark.parametrize(('num_questions', 'draws'), [(200, 300), (1_000, 150)])
def test_the_consistency_with_any_prompts_is_covered(num_questions: int, draws: int, deviation: float):
    """A prompt makes the model guess one of four answers now and then, some more often than others."""
    random = np.random.default_rng(num_questions)
    clusters = np.arange(num_questions, dtype=np.uint64) * np.uint64(7919)
    guesses = 0.3
    size = guesses * (1 - guesses) / deviation**2 - 1
    truth = (1 - guesses) ** 2 + 2 * guesses * (1 - guesses) / 4 + guesses**2 / 4

    times_covered = np.zeros(2)
    for _ in range(draws):
        is_guess = random.random((num_questions, 10)) < random.beta(guesses * size, (1 - guesses) * size, 10)
        answers = np.where(is_guess, random.integers(0, 4, (num_questions, 10)), 0)
        agreeing = ((answers[:, :, None] == answers[:, None, :]).sum(axis=2) - 1) / 9
        rate = mean_over_clusters(agreeing.mean(axis=1).tolist(), clusters, bounds=SHARE)
        effects = effects_on_agreement(agreeing, clusters, PROMPTS)
        for place, measure in enumerate((rate, over_prompts(rate, effects))):
            low, high = interval(measure)
            times_covered[place] += low <= truth <= high

    of_questions_alone, crossed = times_covered / draws
    print(f'{num_questions} questions, deviation {deviation}: {of_questions_alone:.3f} and {crossed:.3f}')
    check_coverage(crossed, draws, 0.92, 0.98)
    assert of_questions_alone < crossed
