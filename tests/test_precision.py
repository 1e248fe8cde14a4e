"""Precision targets: the subset, its error, and the settings and commands that take one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command_line import run_cli

from llmfoundry_gauntlet.cli.watch import training_settings
from llmfoundry_gauntlet.config.settings import PrecisionTarget, decode_settings
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data
from llmfoundry_gauntlet.evaluation.subsets import precision_plan, variance_factors

SIZES = {'guess': 400, 'topics': 300, 'write': 1000, 'tiny': 20, 'extra': 500}
BASELINES = {'guess': 0.5, 'topics': 0.25, 'write': 0.0, 'tiny': 0.5}
CASES = ('chance', 'halfway')  # of a model: near chance, or halfway to 1
ONE = {'name': 'one', 'benchmarks': [{'name': 'guess', 'num_fewshot': 0}]}
WITHOUT_A_TASK = {'categories': [ONE], 'averages': {'empty': ['three'], 'first': ['one']}}
TOPICS = 'aaaab'  # of which the smaller decides half of the score


@pytest.fixture(scope='module')
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return five tasks in two averages; 'extra' is in none."""
    folder = tmp_path_factory.mktemp('precision')
    tasks = []
    for label, size in SIZES.items():
        row: dict[str, Any] = {'choices': ['a', 'b'], 'gold': 0}
        task = {'label': label, 'dataset_uri': f'{label}.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}
        if label == 'write':
            row, task['icl_task_type'] = {'answer': 'so ' * 20}, 'generation_task_with_answers'
        if label == 'topics':
            task['has_categories'] = True
        rows = [{'query': f'{label} {n}?', 'context': f'{n}?', 'category': TOPICS[n % 5], **row} for n in range(size)]
        (folder / f'{label}.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
        tasks.append(task)

    def category(name: str, *labels: str) -> dict[str, Any]:
        benchmarks = [{'name': one, 'num_fewshot': 0, 'random_baseline': BASELINES[one]} for one in labels]
        return {'name': name, 'benchmarks': benchmarks}

    categories = [category('one', 'guess', 'topics'), category('two', 'write', 'tiny')]
    averages = {'first': ['one'], 'gauntlet_average': ['one', 'two']}
    return {'tasks': tasks, 'gauntlet': {'categories': categories, 'averages': averages}, 'data_root': str(folder)}


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
    assert found[0.0].detectable == pytest.approx((1.95996 + 0.84162) * math.sqrt(2) * whole, rel=1e-5)
    errors = [one.standard_error for one in found.values()]
    items = [one.num_items for one in found.values()]
    assert errors[:4] == sorted(errors[:4]) and items[:4] == sorted(items[:4], reverse=True)


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
        ({'precision': '5%', 'gauntlet': WITHOUT_A_TASK}, "no task of the average 'empty'"),
    ],
)
def test_wrong_targets_are_errors_that_say_what_is_allowed(settings, changes, problem: str):
    with pytest.raises(ConfigError) as caught:
        load(settings, **changes)
    assert problem in str(caught.value)


def test_the_command_exports_the_subset(settings, tmp_path: Path):
    for name in ('tasks', 'gauntlet'):
        key = {'tasks': 'icl_tasks', 'gauntlet': 'eval_gauntlet'}[name]
        (tmp_path / f'{name}.yaml').write_text(json.dumps({key: settings[name]}))
    words = ['--tasks', tmp_path / 'tasks.yaml', '--gauntlet', tmp_path / 'gauntlet.yaml']
    words += ['--data-root', settings['data_root'], '--precision-target', '20%']
    assert run_cli('export', *words, '--out', tmp_path / 'requests.jsonl') == 0
    asked = [json.loads(line) for line in (tmp_path / 'requests.jsonl').read_text().splitlines()]
    expected = counts(load(settings, precision_target='20%'))
    assert {label: sum(one['task'] == label for one in asked) for label in SIZES} == expected
