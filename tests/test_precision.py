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
from llmfoundry_gauntlet.evaluation.estimate import TargetEstimate
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
    taken = counts(load(settings, precision_target=f'{100 * share:g}% of {average}'))

    ratios = [error_of(taken, weights, case) / error_of(SIZES, weights, case) for case in CASES]
    assert 1 + share - 0.01 < max(ratios) < 1 + share + 0.01
    assert share == 0.02 or taken['extra'] < SIZES['extra']  # in no average: as if it weighed as the mean task


def test_costly_tasks_and_those_that_matter_little_lose_most(settings):
    taken = counts(load(settings, precision_target='5%'))

    shares = {label: taken[label] / size for label, size in SIZES.items()}
    assert shares['tiny'] == 1  # which determines the error
    assert shares['write'] < 0.5 * shares['guess']


def test_the_average_is_gauntlet_average_by_default(settings):
    by_default, of_gauntlet_average, of_first = (
        counts(load(settings, precision_target=target)) for target in ('5%', '5% of gauntlet_average', '5% of first')
    )

    assert by_default == of_gauntlet_average != of_first


def test_without_a_gauntlet_average_the_first_average_is_meant(settings):
    gauntlet = {**settings['gauntlet'], 'averages': {'first': ['one'], 'second': ['two']}}

    taken = counts(load(settings, precision_target='5%', gauntlet=gauntlet))

    assert taken == counts(load(settings, precision_target='5% of first'))


def digests(data: EvaluationData) -> dict[str, set[str]]:
    """Return the rows of each task that are asked, by their content."""
    return {key: {example.digest for example in data.asked(key)} for key in data.examples}


def test_subsets_are_nested(settings):
    few, more = (digests(load(settings, precision_target=target)) for target in ('20%', '5%'))

    assert all(few[key] <= more[key] for key in few)


def test_subsets_are_the_same_for_any_order_of_rows(settings, tmp_path: Path):
    for path in Path(settings['data_root']).glob('*.jsonl'):
        lines = path.read_text().splitlines()
        (tmp_path / path.name).write_text(''.join(f'{line}\n' for line in reversed(lines)))

    turned = load(settings, precision_target='5%', data_root=str(tmp_path))

    assert digests(turned) == digests(load(settings, precision_target='5%'))


def test_the_variance_of_the_first_questions_by_hand():
    # Of a there are 1, 2 and 2, of b none, none and 1: (1/2 + 1/1) / 4. With a third of a it is (1/3 + 1) / 4.
    factors = variance_factors(['a', 'a', 'b', 'a'])

    assert factors == pytest.approx([math.inf, math.inf, math.inf, 1.5 / 4, (1 / 3 + 1) / 4])


def test_the_variance_of_the_first_questions_without_categories():
    assert variance_factors([None] * 3) == pytest.approx([math.inf, 1, 1 / 2, 1 / 3])


SHARES = [0.02, 0.05, 0.1, 0.2]


@pytest.fixture(scope='module')
def estimates(settings) -> dict[float, TargetEstimate]:
    """Return the estimates by share, where each question takes half a second."""
    data = load(settings)
    plan = precision_plan(data.suite.tasks, data.examples, data.suite.gauntlet)
    return {estimate.share: estimate for estimate in plan.estimates(dict.fromkeys(data.examples, 0.5))}


def test_what_all_items_take_and_give(estimates):
    weights = dict.fromkeys(BASELINES, 0.25)
    error = max(error_of(SIZES, weights, case) for case in CASES)

    of_all = estimates[0.0]

    assert of_all.standard_error == pytest.approx(error)
    assert of_all.num_items == sum(SIZES.values())
    assert of_all.seconds == sum(SIZES.values()) / 2
    assert of_all.detectable == pytest.approx((1.95996 + 0.84162) * math.sqrt(2) * error, rel=1e-5)


def test_a_lower_precision_takes_fewer_items(estimates):
    assert [*estimates] == [*SHARES, 0.0]
    errors = [estimates[share].standard_error for share in SHARES]
    items = [estimates[share].num_items for share in SHARES]
    assert errors == sorted(errors)
    assert items == sorted(items, reverse=True)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('5%', PrecisionTarget(share=0.05, average=None)),
        ('2.5 %', PrecisionTarget(share=0.025, average=None)),
        ('10% of core_average', PrecisionTarget(share=0.1, average='core_average')),
    ],
)
@pytest.mark.parametrize('key', ['precision', 'precision_target'])
def test_targets_are_shares_with_or_without_an_average(settings, key: str, text: str, expected):
    assert decode_settings({**settings, key: text}).precision == expected


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
        ({'precision': '5%', 'gauntlet': None}, 'give gauntlet, which defines it'),
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
