"""`gauntlet show --format lm-eval`: the results format of lm-evaluation-harness 0.4."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from compared_runs import CHOICES, LINES, RIDDLES, ROWS, copy_run, record_of


@pytest.fixture
def exported(gauntlet):
    """Return the object that `gauntlet show --format lm-eval` writes."""

    def call(folder: Path) -> Any:
        status, out, err = gauntlet('show', folder, '--format', 'lm-eval')
        assert (status, err) == (0, '')
        return json.loads(out)

    return call


def test_tasks_have_lm_evals_metrics(exported, runs: dict[str, Path]):
    found, record = exported(runs['a']), record_of(runs['a'])
    names = {'choices', 'topics', 'lines', 'riddles'}
    for key in ('results', 'configs', 'versions', 'n-shot', 'n-samples', 'higher_is_better', 'group_subtasks'):
        assert found[key].keys() == names
    metrics = {
        CHOICES: {'acc': 'InContextLearningMultipleChoiceAccuracy', 'acc_norm': 'CharacterNormalizedMatch'},
        LINES: {'acc': 'InContextLearningLMAccuracy'},
        RIDDLES: {'exact_match': 'InContextLearningGenerationExactMatchAccuracy'},
    }
    for key, of_task in metrics.items():
        expected: dict[str, Any] = {'alias': key.partition('/')[0]}
        for name, ours in of_task.items():
            measure = record['tasks'][key]['metrics'][ours]
            expected |= {f'{name},none': measure['value'], f'{name}_stderr,none': measure['standard_error']}
        assert found['results'][expected['alias']] == expected
    assert found['n-shot'] == dict.fromkeys(names, 0)
    assert found['n-samples']['choices'] == {'original': 12, 'effective': 12}
    output_types = {name: config['output_type'] for name, config in found['configs'].items()}
    assert output_types == {
        'choices': 'multiple_choice',
        'topics': 'multiple_choice',
        'lines': 'loglikelihood',
        'riddles': 'generate_until',
    }
    assert found['configs']['choices']['dataset_path'] == 'choices.jsonl'


def test_the_object_has_the_model_and_the_date(exported, runs: dict[str, Path], tmp_path: Path):
    folder = copy_run(runs['a'], tmp_path / 'run')
    record = record_of(folder)
    record['model'] = {'name': 'meta/llama', 'class': 'LlamaForCausalLM', 'num_parameters': 7}
    record['timing'].update(started='2026-01-02T03:04:05+00:00', seconds=1.5)
    (folder / 'results.json').write_text(json.dumps(record))
    found = exported(folder)
    assert found['config']['model_args'] == 'pretrained=meta/llama' and found['config']['model_num_parameters'] == 7
    assert (found['model_name'], found['model_name_sanitized']) == ('meta/llama', 'meta__llama')
    assert datetime.fromtimestamp(found['date'], UTC) == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert found['total_evaluation_time_seconds'] == '1.5'


def test_shots_of_one_task_have_different_names_and_absent_errors_are_na(
    exported, runs: dict[str, Path], tmp_path: Path
):
    folder = copy_run(runs['a'], tmp_path / 'run')
    record = record_of(folder)
    tasks = record['tasks']
    tasks['lines/5-shot'] = {**tasks[LINES], 'metrics': {'InContextLearningLMAccuracy': {'value': 0.25}}}
    tasks['programs/0-shot'] = {**tasks[LINES], 'metrics': {'PassAt10': {'value': 0.5, 'standard_error': 0.1}}}
    tasks['absent/0-shot'] = {'reason': 'no sandbox'}
    tasks[RIDDLES].update(num_unscored=2, file_clusters={'': {'1': 30, '5': 2}})
    (folder / 'results.json').write_text(json.dumps(record))
    found = exported(folder)
    assert found['results'].keys() == {'choices', 'topics', 'lines_0-shot', 'lines_5-shot', 'riddles', 'programs'}
    assert found['results']['lines_5-shot'] == {'alias': 'lines_5-shot', 'acc,none': 0.25, 'acc_stderr,none': 'N/A'}
    assert (found['n-shot']['lines_0-shot'], found['n-shot']['lines_5-shot']) == (0, 5)
    assert found['results']['programs']['pass@10,none'] == 0.5
    assert found['n-samples']['riddles'] == {'original': 40, 'effective': len(ROWS[RIDDLES]) - 2}


def test_the_last_evaluation_of_one_run_is_written(exported, gauntlet, training: Path, runs: dict[str, Path]):
    accuracy = record_of(training / 'ba1000')['tasks'][LINES]['metrics']['InContextLearningLMAccuracy']['value']
    assert exported(training)['results']['lines']['acc,none'] == accuracy
    status, _, err = gauntlet('show', runs['a'], runs['b'], '--format', 'lm-eval')
    assert status == 2 and '--format lm-eval' in err and 'found 2 (a, b)' in ' '.join(err.split())
