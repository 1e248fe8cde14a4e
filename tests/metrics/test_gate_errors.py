"""Simulation: how often `gauntlet gate` passes and blocks equal models, and models that are worse.

Items are those of the 57 tasks in their clusters, whose sizes are counted in the published files (seven files that may
not be copied have the published number of rows, in clusters of their own; bbq is of a file with the same 17,628 rows in
359 clusters). An item is right if a latent variable is below the threshold of its task, which puts the accuracy of a
model that is a third of the way from chance to 1. Two models share .7 of the variance of the latent variable, and
clusters have .28 of it, .08 of them of the model itself: 0/1 scores of two models then correlate by about a half.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from paths import FIXTURES, ROOT
from scipy.stats import norm

from llmfoundry_gauntlet.config.gate import ALPHA, MARGINS
from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.comparison import difference
from llmfoundry_gauntlet.metrics.composites import compute_composites
from llmfoundry_gauntlet.metrics.gate import GateRow, evidence, judged, verdict_of
from llmfoundry_gauntlet.metrics.statistics import SHARE, mean_over_categories, mean_over_clusters
from llmfoundry_gauntlet.types import Measure

pytestmark = pytest.mark.long

REQUIRED = 'gauntlet_average'
# Tasks whose clusters are the same problems, by the number of the first one.
SAME_CLUSTERS = {
    'human_eval': {
        'human_eval/0-shot': 0,
        'human_eval_cpp/0-shot': 0,
        'human_eval_js/0-shot': 0,
        'human_eval_25/0-shot': 0,
        'human_eval_50/0-shot': 0,
        'human_eval_75/0-shot': 0,
        'human_eval_return_simple/0-shot': 0,
        'human_eval_return_complex/0-shot': 37,
    },
    'winogender': {'winogender_mc_female/3-shot': 0, 'winogender_mc_male/3-shot': 0},
    'simple_arithmetic': {'simple_arithmetic_nospaces/10-shot': 0, 'simple_arithmetic_withspaces/10-shot': 0},
}
CLUSTER, OWN_OF_CLUSTER, ITEM, OWN = 0.20, 0.08, 0.50, 0.22  # parts of the variance of the latent variable
PROGRESS = 0.35  # of the models, from chance to 1
PROGRESS_WITHOUT_CHANCE = 0.3


@cache
def gauntlet() -> GauntletSpec:
    suite = load_suite(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml', ROOT / 'yamls/gauntlets/eval_gauntlet_v0.1.yaml')
    assert suite.gauntlet is not None
    return suite.gauntlet


@dataclass(frozen=True)
class Items:
    """The items of a task: the number of the cluster of each, in the whole Gauntlet, and its category."""

    clusters: np.ndarray
    categories: np.ndarray
    names: tuple[str, ...]  # of categories, '' for none
    accuracy: float


@cache
def all_items() -> dict[str, Items]:
    """Return the items of every task."""
    chances = {benchmark.key: benchmark.random_baseline for of in gauntlet().categories for benchmark in of.benchmarks}
    first_of_group: dict[str, int] = {}
    num_clusters = 0
    items = {}
    for task, sizes_by_category in json.loads((FIXTURES / 'cluster_sizes.json').read_text()).items():
        sizes, categories = [], []
        for index, text in enumerate(sizes_by_category.values()):
            for part in text.split():
                size, count = map(int, part.split('x'))
                sizes += [size] * count
                categories += [index] * (size * count)
        group = next((name for name, tasks in SAME_CLUSTERS.items() if task in tasks), None)
        if group is None:
            first = num_clusters
        else:
            first = first_of_group.setdefault(group, num_clusters) + SAME_CLUSTERS[group][task]
        num_clusters = max(num_clusters, first + max(1000 if group else 0, len(sizes)))
        chance = chances[task]
        accuracy = chance + PROGRESS * (1 - chance) if chance else PROGRESS_WITHOUT_CHANCE
        items[task] = Items(
            clusters=(first + np.repeat(np.arange(len(sizes)), sizes)).astype(np.uint64),
            categories=np.array(categories),
            names=tuple(sizes_by_category),
            accuracy=accuracy,
        )
    return items


def subset(items: Items, limit: int | None, random: np.random.Generator) -> Items:
    """Return at most so many items, of each category in proportion, one of every cluster before a second of any."""
    if limit is None or len(items.clusters) <= limit:
        return items
    order = random.permutation(len(items.clusters))
    seen: Counter[int] = Counter()
    turns = np.zeros(len(order), int)
    for place in order:
        cluster = int(items.clusters[place])
        turns[place] = seen[cluster]
        seen[cluster] += 1
    chosen = []
    for index in range(len(items.names)):
        of_category = order[items.categories[order] == index]
        of_category = of_category[np.argsort(turns[of_category], kind='stable')]
        chosen.append(of_category[: max(1, round(limit * len(of_category) / len(order)))])
    places = np.concatenate(chosen)
    return Items(items.clusters[places], items.categories[places], items.names, items.accuracy)


def task_measure(task: str, items: Items, scores: np.ndarray) -> Measure:
    """Return the accuracy with its error, as `task_score` does."""
    measures, first_clusters = {}, {}
    for index, name in enumerate(items.names):
        of_category = items.categories == index
        clusters = items.clusters[of_category]
        stratum = f'{task}/{name}' if name else task
        values = scores[of_category].astype(float).tolist()
        measures[name] = mean_over_clusters(values, clusters, stratum=stratum, task=task, bounds=SHARE)
        first_clusters[name] = int(clusters[0])
    if len(measures) == 1:
        return measures[items.names[0]]
    return mean_over_categories(measures, first_clusters, stratum=task, bounds=SHARE)


def scores_of_pair(random: np.random.Generator, limit: int | None, worse_by: float) -> list[dict[str, Measure]]:
    """Return the scores of two models, the second worse by this much in every task: tasks and composites."""
    drawn = {task: subset(items, limit, random) for task, items in all_items().items()}
    num_clusters = 1 + max(int(items.clusters.max()) for items in drawn.values())
    of_clusters = random.normal(size=num_clusters)
    own_of_clusters = random.normal(size=(2, num_clusters))
    accuracies: list[dict[str, Measure]] = [{}, {}]
    for task, items in drawn.items():
        num_items, clusters = len(items.clusters), items.clusters.astype(int)
        shared = np.sqrt(CLUSTER) * of_clusters[clusters] + np.sqrt(ITEM) * random.normal(size=num_items)
        for model, accuracy in enumerate((items.accuracy, items.accuracy - worse_by)):
            own = np.sqrt(OWN_OF_CLUSTER) * own_of_clusters[model, clusters]
            own = own + np.sqrt(OWN) * random.normal(size=num_items)
            accuracies[model][task] = task_measure(task, items, shared + own < norm.ppf(accuracy))
    sizes = {task: len(items.clusters) for task, items in drawn.items()}
    scores = []
    for of_model in accuracies:
        composites = compute_composites(gauntlet(), of_model, sizes, reference=False)
        scores.append({'tasks': of_model, 'categories': composites.categories, 'averages': composites.averages})
    return scores


def verdict(scores: list[Mapping[str, Mapping[str, Measure]]]) -> str:
    """Return the verdict with the margins of the command."""
    first, second = scores
    rows = []
    for family, of_first in first.items():
        for name, score in of_first.items():
            compared = difference(score, second[family][name], 0)
            margin = MARGINS[family]
            shown = evidence(compared.difference, margin, alpha=ALPHA, is_task=family == 'tasks')
            rows.append(
                GateRow(
                    name=name,
                    family=family,
                    compared=compared,
                    margin=margin,
                    is_required=name == REQUIRED,
                    evidence=shown,
                )
            )
    return verdict_of(judged(rows, ALPHA))


def shares_of_verdicts(draws: int, *, limit: int | None, worse_by: float, seed: int) -> dict[str, float]:
    """Return how often each verdict comes up."""
    random = np.random.default_rng(seed)
    verdicts = Counter(verdict(scores_of_pair(random, limit, worse_by)) for _ in range(draws))
    return {name: verdicts[name] / draws for name in ('ok', 'worse', 'unclear')}


def test_equal_models_pass_and_are_hardly_ever_blocked():
    """On whole files .957 of 300 pairs pass, and .023 are blocked.

    Mutation: alpha for each family instead of alpha / number of families, which blocks one in nine.
    """
    shares = shares_of_verdicts(150, limit=None, worse_by=0.0, seed=1)

    assert shares['ok'] >= 0.90
    assert shares['worse'] <= 0.05


def test_equal_models_are_hardly_ever_blocked_on_a_subset_where_more_are_unclear():
    """Of 1,500 pairs .887 pass, .089 are unclear and .024 are blocked: 200 items a task are few for a margin of .03."""
    shares = shares_of_verdicts(400, limit=200, worse_by=0.0, seed=1)

    assert shares['ok'] >= 0.85  # .887 less the error of so many pairs, .016, twice
    assert shares['worse'] <= 0.05


def test_a_model_that_is_worse_by_two_percent_everywhere_is_blocked():
    """On whole files: in 200 items of each task this is seen in about half of the cases."""
    assert shares_of_verdicts(20, limit=None, worse_by=0.02, seed=2)['worse'] == 1.0


def test_a_model_that_is_worse_by_five_percent_everywhere_is_blocked_on_a_subset():
    assert shares_of_verdicts(50, limit=200, worse_by=0.05, seed=3)['worse'] == 1.0
