"""Time budgets: rounds, the items that fit, and the same items afterwards."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import tiny
from character_tokenizer import CharacterTokenizer

from llmfoundry_gauntlet import EvalGauntlet, evaluate
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation, prepare_evaluation
from llmfoundry_gauntlet.results.files import find_results
from llmfoundry_gauntlet.runtime.time_budget import Measured, TimeBudget, deviation
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import ItemKey

NUM_ROWS = {'short': 3000, 'long': 3000, 'few': 12}
COSTS = {'short': 0.01, 'long': 0.04, 'few': 0.02}  # seconds an item


@pytest.fixture(scope='module')
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return three tasks: of short rows, of long ones in two categories and passages of three, and of few rows."""
    folder = tmp_path_factory.mktemp('data')
    tasks = []
    for label, count in NUM_ROWS.items():
        more = ' and so' * (8 if label == 'long' else 1)
        rows = [
            {'context': f'{row}{more}', 'continuation': str(row), 'category': 'ab'[row % 2], 'page': row // 6}
            for row in range(count)
        ]
        tiny.write_rows(folder / f'{label}.jsonl', rows)
        task = {'label': label, 'dataset_uri': f'{label}.jsonl', 'num_fewshot': [0]}
        task['icl_task_type'] = 'language_modeling'
        tasks.append({**task, 'has_categories': True, 'cluster_key': 'page'} if label == 'long' else task)
    benchmarks = [{'name': label, 'num_fewshot': 0} for label in NUM_ROWS]
    gauntlet = {'categories': [{'name': 'all', 'benchmarks': benchmarks}]}
    return {'tasks': tasks, 'gauntlet': gauntlet, 'data_root': str(folder), 'save_folder': None}


@pytest.fixture(scope='module')
def prepared(settings: dict[str, Any]) -> PreparedEvaluation:
    return prepare_evaluation(load_data(decode_settings(settings)), Encoder(CharacterTokenizer()), max_seq_len=128)


def rounds(budget: TimeBudget, *, slow_start: float = 1.0, overhead: float = 1.0) -> list[set[ItemKey]]:
    """Run the rounds of a machine on which items take COSTS, in the first rounds `slow_start` times that."""
    found, spent, factor = [], 0.0, slow_start
    while keys := budget.next_round(spent):
        measured = {key: Measured() for key in budget.order}
        for key in keys:
            one = measured[key.task]
            one.num_items += 1
            one.num_right += key.row % 2
            one.busy_seconds += COSTS[key.task.partition('/')[0]] * factor
        wall = overhead * sum(one.busy_seconds for one in measured.values())
        budget.learn(measured, wall)
        spent += wall
        factor = 1.0
        found.append(keys)
    budget.settle()
    return found


@pytest.mark.parametrize('slow_start', [1.0, 3.0])
@pytest.mark.parametrize('overhead', [1.0, 1.3])
@pytest.mark.parametrize('seconds', [6.0, 15.0])
def test_the_subset_takes_the_given_time(prepared, seconds: float, overhead: float, slow_start: float):
    budget = TimeBudget(prepared, seconds)
    run = rounds(budget, slow_start=slow_start, overhead=overhead)
    chosen = budget.chosen()
    assert 0.93 * seconds <= overhead * sum(COSTS[key.task.partition('/')[0]] for key in chosen.items) <= seconds
    assert not any(one & other for place, one in enumerate(run) for other in run[:place])  # nothing is run twice
    assert chosen.items.keys() <= set().union(*run)


def test_all_items_are_taken_if_they_fit(prepared):
    budget = TimeBudget(prepared, 1000.0)
    rounds(budget)
    assert budget.chosen().items.keys() == prepared.items.keys()
    assert not budget.chosen().data.subsets


def test_expensive_items_are_fewer_and_of_many_passages(prepared):
    budget = TimeBudget(prepared, 10.0)
    rounds(budget)
    chosen = budget.chosen()
    counts = {task: sum(key.task == task for key in chosen.items) for task in chosen.tasks}
    assert counts['few/0-shot'] == 12  # a category more precise than the others is worth the most
    assert counts['short/0-shot'] > 1.5 * counts['long/0-shot'] > 0
    long = chosen.data.asked('long/0-shot')
    pages = [(example.category, example.cluster) for example in long]
    assert len(set(pages)) == len(pages) == counts['long/0-shot'] < 1000  # of which each has three items
    assert {example.category for example in long} == {'a', 'b'}
    assert len(chosen.data.examples['long/0-shot']) == NUM_ROWS['long']  # shots are drawn from all


def test_more_time_keeps_the_items_of_less(prepared):
    chosen = []
    for seconds in (5.0, 12.0):
        budget = TimeBudget(prepared, seconds)
        rounds(budget)
        chosen.append(budget.chosen().items.keys())
    assert chosen[0] < chosen[1]


def test_too_little_time_is_an_error_with_the_time_needed(prepared):
    budget = TimeBudget(prepared, 0.1)
    with pytest.raises(ConfigError, match=r'time_budget: is 0.1s, .* takes about 0\.\d+s'):
        rounds(budget)


@pytest.mark.parametrize(
    ('value', 'problem'), [('120', "is '120'"), ('0s', "is '0s'"), ('-3s', "is '-3s'"), (120, 'is 120; allowed: text')]
)
def test_a_budget_must_be_a_duration(settings, value, problem):
    with pytest.raises(ConfigError, match=f'time_budget: {problem}'):
        decode_settings({**settings, 'time_budget': value})
    assert decode_settings({**settings, 'time_budget': '1.5m'}).budget_seconds == 90


@pytest.mark.parametrize(('num_items', 'expected'), [(0, 0.5), (8, math.sqrt(0.25 * 0.75)), (10**6, 0.0)])
def test_few_measurements_do_not_imply_low_variance(num_items: int, expected: float):
    assert deviation(Measured(num_items=num_items, num_right=0)) == pytest.approx(expected, abs=0.01)


def test_recorded_sizes_restore_the_items(prepared):
    earlier, later = TimeBudget(prepared, 5.0), TimeBudget(prepared, 50.0)
    rounds(earlier)
    later.sizes = dict(earlier.sizes)
    assert later.chosen().items.keys() == earlier.chosen().items.keys()


@pytest.mark.slow
def test_all_evaluations_use_the_same_items(settings, tmp_path):
    settings = {**settings, 'time_budget': '1s', 'interval': ['first', '2ba'], 'max_seq_len': 128}
    gauntlet = EvalGauntlet(**{**settings, 'save_folder': str(tmp_path / 'records')})
    tiny.train([gauntlet], max_duration='4ba')
    records = [record for _, record in find_results(tmp_path / 'records')]
    sizes = [record['timing']['time_budget'] for record in records]
    assert sizes[0] == sizes[1] == sizes[2] == gauntlet.gauntlet.loop.budget.sizes
    assert 0 < sizes[0]['long/0-shot'] < 3000 and sizes[0]['few/0-shot'] == 12
    samples = [
        [json.loads(line)['row'] for line in (path / 'samples' / 'long_0-shot.jsonl').read_text().splitlines()]
        for path in sorted((tmp_path / 'records').iterdir())
    ]
    assert samples[0] == samples[1] == samples[2] and len(samples[0]) == sizes[0]['long/0-shot']
    assert records[1]['composites']['version'] == records[2]['composites']['version']
    assert [record['tasks']['long/0-shot']['subset_items'] for record in records] == [len(samples[0])] * 3


@pytest.mark.slow
def test_items_within_a_budget_score_as_without(settings, tmp_path):
    model = tiny.save(tiny.model(), tmp_path / 'model')
    settings = {key: value for key, value in settings.items() if key != 'save_folder'}
    part = evaluate(model, **settings, device='cpu', max_seq_len=128, time_budget='1s')
    most = max(map(len, part.results.values()))
    full = evaluate(model, **settings, device='cpu', max_seq_len=128, subset_items=most)
    for key, results in part.results.items():
        whole = {result.key: (result.score, result.prompt_sha256) for result in full.results[key]}
        assert all((result.score, result.prompt_sha256) == whole[result.key] for result in results)
    assert 12 + 6 < sum(map(len, part.results.values())) < sum(map(len, full.results.values()))
