"""A precision target on the published files, with simulated outcomes of models near chance and in mid-training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from clustered_items import item
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data, with_subsets
from llmfoundry_gauntlet.evaluation.precision import precision_plan
from llmfoundry_gauntlet.metrics.comparison import spread_of_file
from llmfoundry_gauntlet.metrics.composites import compute_composites
from llmfoundry_gauntlet.metrics.metrics import accuracy, task_score
from llmfoundry_gauntlet.types import Example, ItemResult, Measure

ROOT_OF_DATA = SHARED_DATA / 'local_data'
DRAWS = 4

pytestmark = pytest.mark.skipif(not ROOT_OF_DATA.is_dir(), reason='the published files are not here')


@pytest.fixture(scope='module')
def data() -> EvaluationData:
    """Return the tasks of the Gauntlet whose published files are here, each with its rows, and their gauntlet."""
    tasks = read_yaml(ROOT / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml')['icl_tasks']
    tasks = [task for task in tasks if (ROOT_OF_DATA / task['dataset_uri']).is_file()]
    block = read_yaml(ROOT / 'yamls' / 'gauntlets' / 'eval_gauntlet_v0.1.yaml')['eval_gauntlet']
    labels = {task['label'] for task in tasks}
    for category in block['categories']:
        category['benchmarks'] = [one for one in category['benchmarks'] if one['name'] in labels]
    settings = {'tasks': tasks, 'gauntlet': block, 'data_root': str(ROOT_OF_DATA), 'save_folder': None}
    return load_data(decode_settings(settings))


Items = dict[str, list[tuple[ItemResult, ItemResult]]]  # wrong and right


@pytest.fixture(scope='module')
def items(data: EvaluationData) -> Items:
    def both(key: str, one: Example) -> tuple[ItemResult, ItemResult]:
        wrong = item(one.row, 0.0, one.cluster, task=key, category=one.category)
        return wrong, replace(wrong, score=1.0)

    return {key: [both(key, one) for one in examples] for key, examples in data.examples.items()}


def average(data: EvaluationData, results: Mapping[str, Sequence[ItemResult]]) -> Measure:
    scores = {
        key: task_score(key, [accuracy('Accuracy')], found, file_sizes=data.file_sizes_of(data.tasks[key]))
        for key, found in results.items()
    }
    accuracies = {key: score.accuracy for key, score in scores.items()}
    sizes = {key: score.num_items for key, score in scores.items()}
    return compute_composites(data.suite.gauntlet, accuracies, sizes, reference=False).averages['gauntlet_average']


def test_the_error_of_the_average_is_5_percent_above_that_of_all_items(data: EvaluationData, items: Items):
    """And the average over the subset is as far from that over the whole files as its error says."""
    plan = precision_plan(data.suite.tasks, data.examples, data.suite.gauntlet)
    part = with_subsets(data, plan.subsets(0.05))
    assert sum(map(len, part.subsets.values())) < sum(plan.whole.values()) / 5
    random = np.random.default_rng(1)
    baselines = {one.key: one.random_baseline for of in data.suite.gauntlet.categories for one in of.benchmarks}
    ratios, strays = {}, []
    for case in ('near chance', 'mid-training'):
        found = []
        for _ in range(DRAWS):
            whole, taken = {}, {}
            for key, pairs in items.items():
                chance = baselines[key] if case == 'near chance' else (1 + baselines[key]) / 2
                rights = random.random(len(pairs)) < chance
                whole[key] = [pair[right] for pair, right in zip(pairs, rights.tolist(), strict=True)]
                rows = {example.row for example in part.asked(key)}
                taken[key] = [one for one in whole[key] if one.key.row in rows]
            of_all, of_part = average(data, whole), average(part, taken)
            found.append(of_part.standard_error / of_all.standard_error)
            strays.append((of_part.value - of_all.value) / spread_of_file(of_part.spread).standard_error)
        ratios[case] = float(np.mean(found))
    assert max(ratios.values()) == pytest.approx(1.05, abs=0.01)
    assert math.sqrt(np.mean(np.square(strays))) == pytest.approx(1, abs=0.6)
