"""Precision targets: the subset, its error, and the settings and commands that take one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered_items import item
from command_line import run_cli
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.cli.watch import training_settings
from llmfoundry_gauntlet.config.settings import PrecisionTarget, decode_settings
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data, with_subsets
from llmfoundry_gauntlet.evaluation.precision import precision_plan, variance_factors
from llmfoundry_gauntlet.metrics.comparison import spread_of_file
from llmfoundry_gauntlet.metrics.composites import compute_composites
from llmfoundry_gauntlet.metrics.metrics import accuracy, task_score
from llmfoundry_gauntlet.types import Example, ItemResult, Measure

ROOT_OF_DATA = SHARED_DATA / 'local_data'
DRAWS = 4

SIZES = {'guess': 400, 'topics': 300, 'write': 1000, 'tiny': 20, 'extra': 500}
BASELINES = {'guess': 0.5, 'topics': 0.25, 'write': 0.0, 'tiny': 0.5}
CASES = ('chance', 'halfway')  # of a model: near chance, or halfway to 1
TOPICS = 'aaaab'  # of which the smaller decides half of the score


@pytest.fixture(scope='module')
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return five tasks in two averages; 'extra' is in none."""
    folder = tmp_path_factory.mktemp('precision')
    tasks = []
    for label, size in SIZES.items():
        rows: list[dict[str, Any]] = [
            {'query': f'{label} {row}?', 'choices': ['a', 'b'], 'gold': 0} for row in range(size)
        ]
        if label == 'write':
            rows = [{'context': f'What is {row}?', 'answer': 'so ' * 20} for row in range(size)]
        for row, one in enumerate(rows):
            one.update({'category': TOPICS[row % 5]} if label == 'topics' else {})
        (folder / f'{label}.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
        kind = 'generation_task_with_answers' if label == 'write' else 'multiple_choice'
        task = {'label': label, 'dataset_uri': f'{label}.jsonl', 'num_fewshot': [0], 'icl_task_type': kind}
        tasks.append({**task, 'has_categories': True} if label == 'topics' else task)
    categories = [
        {
            'name': name,
            'benchmarks': [{'name': label, 'num_fewshot': 0, 'random_baseline': BASELINES[label]} for label in labels],
        }
        for name, labels in (('one', ['guess', 'topics']), ('two', ['write', 'tiny']))
    ]
    averages = {'first': ['one'], 'gauntlet_average': ['one', 'two']}
    return {
        'tasks': tasks,
        'gauntlet': {'categories': categories, 'averages': averages},
        'data_root': str(folder),
        'save_folder': None,
    }


def load(settings: dict[str, Any], **changes: Any) -> EvaluationData:
    return load_data(decode_settings({**settings, **changes}))


def counts(data: EvaluationData) -> dict[str, int]:
    return {key.partition('/')[0]: len(data.asked(key)) for key in data.examples}


def error_of(taken: dict[str, int], labels: dict[str, float], case: str) -> float:
    """Return the standard error of an average of independent items with these weights, before rescaling."""
    total = 0.0
    for label, weight in labels.items():
        chance = BASELINES[label]
        right = chance if case == 'chance' else (1 + chance) / 2
        number = 1 / taken[label]
        if label == 'topics':  # in proportion, so that a fifth are of the second topic
            number = (1 / (taken[label] * 0.8) + 1 / (taken[label] * 0.2)) / 4
        total += (weight / (1 - chance)) ** 2 * right * (1 - right) * number
    return math.sqrt(total)


@pytest.mark.parametrize('share', [0.02, 0.05, 0.2])
@pytest.mark.parametrize(
    ('average', 'weights'),
    [('gauntlet_average', dict.fromkeys(BASELINES, 0.25)), ('first', {'guess': 0.5, 'topics': 0.5})],
)
def test_the_error_of_the_average_is_as_much_above_that_of_all_items(settings, share, average, weights):
    found = counts(load(settings, precision_target=f'{100 * share:g}% of {average}'))
    ratios = [error_of(found, weights, case) / error_of(SIZES, weights, case) for case in CASES]
    assert 1 + share - 0.01 < max(ratios) < 1 + share + 0.01
    assert share == 0.02 or found['extra'] < SIZES['extra']  # in no average: as if it weighed as the mean task


def test_costly_tasks_and_those_that_matter_little_lose_most(settings):
    found = counts(load(settings, precision_target='5%'))
    assert found['tiny'] == SIZES['tiny']  # which determines the error
    shares = {label: found[label] / size for label, size in SIZES.items()}
    assert shares['write'] < 0.5 * shares['guess']


def test_the_average_is_gauntlet_average_by_default_and_else_the_first(settings):
    named = [counts(load(settings, precision_target=f'5%{name}')) for name in ('', ' of gauntlet_average', ' of first')]
    assert named[0] == named[1] != named[2]
    gauntlet = {**settings['gauntlet'], 'averages': {'first': ['one'], 'second': ['two']}}
    assert counts(load(settings, precision_target='5%', gauntlet=gauntlet)) == named[2]


def test_subsets_are_nested_and_the_same_for_any_order_of_rows(settings, tmp_path: Path):
    few, more = (load(settings, precision_target=target) for target in ('20%', '5%'))
    for key in few.examples:
        assert {one.digest for one in few.asked(key)} <= {one.digest for one in more.asked(key)}
    for path in Path(settings['data_root']).glob('*.jsonl'):
        (tmp_path / path.name).write_text(''.join(f'{line}\n' for line in path.read_text().splitlines()[::-1]))
    turned = load(settings, precision_target='5%', data_root=str(tmp_path))
    for key in more.examples:
        assert {one.digest for one in turned.asked(key)} == {one.digest for one in more.asked(key)}


def test_the_variance_of_the_first_questions_by_hand():
    # a: 1, then 2, then 2, of b: none, none, 1; so (1/2 + 1/1) / 4, and with a third of a (1/3 + 1) / 4
    assert variance_factors([*'aaba']) == pytest.approx([*[math.inf] * 3, 1.5 / 4, (1 / 3 + 1) / 4])
    assert variance_factors([None] * 3) == pytest.approx([math.inf, 1, 1 / 2, 1 / 3])


def test_what_a_target_takes_and_gives(settings):
    data = load(settings)
    plan = precision_plan(data.suite.tasks, data.examples, data.suite.gauntlet)
    found = {one.share: one for one in plan.estimates(dict.fromkeys(data.examples, 0.5))}
    assert [*found] == [0.02, 0.05, 0.1, 0.2, 0.0]
    weights = dict.fromkeys(BASELINES, 0.25)
    whole = max(error_of(SIZES, weights, case) for case in CASES)
    assert found[0.0].standard_error == pytest.approx(whole)
    assert (found[0.0].num_items, found[0.0].seconds) == (sum(SIZES.values()), sum(SIZES.values()) / 2)
    assert found[0.0].standard_error_of_file == 0
    assert found[0.0].detectable == pytest.approx((1.95996 + 0.84162) * math.sqrt(2) * whole, rel=1e-5)
    errors = [one.standard_error for one in found.values()]
    items = [one.num_items for one in found.values()]
    assert errors[:4] == sorted(errors[:4]) and items[:4] == sorted(items[:4], reverse=True)
    taken = counts(load(settings, precision_target='5%'))
    left = [error_of(taken, weights, case) ** 2 - error_of(SIZES, weights, case) ** 2 for case in CASES]
    assert found[0.05].standard_error_of_file == pytest.approx(math.sqrt(max(left)), rel=0.02)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [('5%', (0.05, None)), ('2.5 %', (0.025, None)), ('10% of core_average', (0.1, 'core_average'))],
)
def test_targets_are_shares_with_or_without_an_average(settings, text: str, expected):
    for key in ('precision', 'precision_target'):
        found = decode_settings({**settings, key: text})
        assert found.precision == PrecisionTarget(share=expected[0], average=expected[1])


def test_a_watch_takes_the_target_of_a_training_yaml(settings, tmp_path: Path):
    """Its other `precision` is that of the model."""
    block = {**settings, 'precision': '5%', 'save_folder': 'records'}
    (tmp_path / 'train.yaml').write_text(json.dumps({'precision': 'fp32', 'callbacks': {'eval_gauntlet': block}}))
    found = training_settings(tmp_path / 'train.yaml')
    assert (found['precision'], found['settings']['precision_target']) == ('fp32', '5%')
    assert 'precision' not in found['settings']


@pytest.mark.parametrize(
    ('changes', 'problem'),
    [
        ({'precision': '5'}, "precision_target: is '5'; allowed: a share above 0 such as '5%'"),
        ({'precision': '0%'}, "is '0%'"),
        ({'precision': '-5%'}, "is '-5%'"),
        ({'precision': 5}, 'is 5; allowed: text'),
        ({'precision': '5%', 'precision_target': '5%'}, 'precision: is another name of precision_target'),
        ({'precision': '5%', 'subset_items': 100}, 'chooses the subset by itself; leave out subset_items'),
        ({'precision': '5%', 'time_budget': '9s'}, 'chooses the subset by itself; leave out time_budget'),
        ({'precision': '5% of core'}, "no average 'core'; allowed: first, gauntlet_average"),
        ({'precision': '5%', 'gauntlet': None}, 'give a gauntlet'),
    ],
)
def test_wrong_targets_are_errors_that_say_what_is_allowed(settings, changes, problem: str):
    with pytest.raises(ConfigError) as caught:
        load(settings, **changes)
    assert problem in str(caught.value)


def test_an_average_without_a_task_is_an_error(settings):
    gauntlet = {**settings['gauntlet'], 'averages': {'empty': ['three'], 'first': ['one']}}
    with pytest.raises(ConfigError, match="no task of the average 'empty'"):
        load(settings, gauntlet=gauntlet, precision_target='5%')


def test_the_command_exports_and_records_the_subset(settings, tmp_path: Path):
    for name in ('tasks', 'gauntlet'):
        key = {'tasks': 'icl_tasks', 'gauntlet': 'eval_gauntlet'}[name]
        (tmp_path / f'{name}.yaml').write_text(json.dumps({key: settings[name]}))
    words = ['--tasks', tmp_path / 'tasks.yaml', '--gauntlet', tmp_path / 'gauntlet.yaml']
    words += ['--data-root', settings['data_root'], '--precision-target', '20%']
    assert run_cli('export', *words, '--out', tmp_path / 'requests.jsonl') == 0
    asked = [json.loads(line) for line in (tmp_path / 'requests.jsonl').read_text().splitlines()]
    expected = counts(load(settings, precision_target='20%'))
    assert {label: sum(one['task'] == label for one in asked) for label in SIZES} == expected
    names = ('task', 'num_shots', 'file', 'row', 'variant', 'sample')
    answers = [
        {name: one[name] for name in names}
        | ({'text': 'so'} if one['choices'] is None else {'logprobs': [-1.0, one['row'] % 2 - 1.5]})
        for one in asked
    ]
    (tmp_path / 'answers.jsonl').write_text(''.join(f'{json.dumps(one)}\n' for one in answers))
    assert run_cli('run', '--outputs', tmp_path / 'answers.jsonl', *words, '--out', tmp_path / 'run') == 0
    record = json.loads((tmp_path / 'run' / 'results.json').read_text())
    assert (record['config']['precision_target'], record['config']['subset_version']) == ('20%', 2)
    assert record['tasks']['write/0-shot']['subset_items'] == expected['write']
    average = record['composites']['averages']['gauntlet_average']
    assert 0 < average['standard_error_of_file'] < average['standard_error']


# The published files, with simulated outcomes of models near chance and in mid-training.


@pytest.fixture(scope='module')
def published() -> EvaluationData:
    """Return the tasks of the Gauntlet whose published files are here, each with its rows, and their gauntlet."""
    if not ROOT_OF_DATA.is_dir():
        pytest.skip('the published files are not here')
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
def items(published: EvaluationData) -> Items:
    def both(key: str, one: Example) -> tuple[ItemResult, ItemResult]:
        wrong = item(one.row, 0.0, one.cluster, task=key, category=one.category)
        return wrong, replace(wrong, score=1.0)

    return {key: [both(key, one) for one in examples] for key, examples in published.examples.items()}


def average(data: EvaluationData, results: Mapping[str, Sequence[ItemResult]]) -> Measure:
    scores = {
        key: task_score(key, [accuracy('Accuracy')], found, file_sizes=data.file_sizes_of(data.tasks[key]))
        for key, found in results.items()
    }
    accuracies = {key: score.accuracy for key, score in scores.items()}
    sizes = {key: score.num_items for key, score in scores.items()}
    return compute_composites(data.suite.gauntlet, accuracies, sizes, reference=False).averages['gauntlet_average']


@pytest.mark.long
def test_the_error_of_the_average_is_5_percent_above_that_of_all_items(published: EvaluationData, items: Items):
    """And the average over the subset is as far from that over the whole files as its error says."""
    plan = precision_plan(published.suite.tasks, published.examples, published.suite.gauntlet)
    part = with_subsets(published, plan.subsets(0.05))
    assert sum(map(len, part.subsets.values())) < sum(plan.whole.values()) / 5
    random = np.random.default_rng(1)
    baselines = {one.key: one.random_baseline for of in published.suite.gauntlet.categories for one in of.benchmarks}
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
            of_all, of_part = average(published, whole), average(part, taken)
            found.append(of_part.standard_error / of_all.standard_error)
            strays.append((of_part.value - of_all.value) / spread_of_file(of_part.spread).standard_error)
        ratios[case] = float(np.mean(found))
    assert max(ratios.values()) == pytest.approx(1.05, abs=0.01)
    assert math.sqrt(np.mean(np.square(strays))) == pytest.approx(1, abs=0.6)
