"""Every error of YAML files, settings and options is reported in the first round, however many there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.errors import ConfigError, GauntletError
from llmfoundry_gauntlet.evaluation.inputs import load_inputs
from llmfoundry_gauntlet.evaluation.suite import load_suite

CAPITALS = {'label': 'capitals', 'dataset_uri': 'capitals.jsonl', 'num_fewshot': 0, 'icl_task_type': 'multiple_choice'}


def facts_are_in(error: GauntletError, *facts: tuple[str, ...]) -> bool:
    """Return whether there is one problem for each tuple of facts, and no other."""
    assert len(error.problems) == len(facts), error.problems
    return all(any(all(fact in problem for fact in one) for problem in error.problems) for one in facts)


def test_values_are_checked_although_others_have_the_wrong_type_or_are_missing():
    task = {
        'label': 'a b',  # no name of a file
        'num_fewshot': [-1],
        'icl_task_type': 'generation_task_with_answers',
        'batch_size': 'ten',  # the wrong type
        'max_seq_len': 0,
        'generation_kwargs': {'max_new_tokens': 0, 'top_k': -1},
        'early_stopping_criteria': ['', 3],
    }  # without a dataset_uri
    with pytest.raises(ConfigError) as raised:
        load_suite([task])
    assert facts_are_in(
        raised.value,
        ("'dataset_uri' is missing",),
        ('batch_size', "'ten'"),
        ('early_stopping_criteria[1]', 'is 3'),
        ('label', "'a b'"),
        ('num_fewshot', '-1'),
        ('max_seq_len', 'is 0'),
        ('generation_kwargs.max_new_tokens', 'is 0'),
        ('generation_kwargs.top_k', 'is -1'),
        ('generation_kwargs.top_k', 'do_sample'),
        ('early_stopping_criteria[0]', 'empty'),
    )


def test_no_error_is_about_the_stand_in_of_a_wrong_value():
    """`chat_template_kwargs` needs `apply_chat_template`, which is given here, although as text."""
    settings = {'tasks': [CAPITALS], 'apply_chat_template': 'yes', 'chat_template_kwargs': {'enable_thinking': False}}
    with pytest.raises(ConfigError) as raised:
        load_inputs({**settings, 'data_root': '/nowhere'})
    assert facts_are_in(raised.value, ('apply_chat_template', "'yes'"), ('capitals.jsonl',))


def test_benchmarks_without_a_task_are_reported_beside_wrong_values_of_the_gauntlet():
    benchmarks = [
        {'name': 'capitals', 'num_fewshot': 0, 'random_baseline': 1.5},
        {'name': 'rivers', 'num_fewshot': 2},
    ]
    gauntlet = {'weighting': 'EVEN', 'categories': [{'name': 'geography', 'benchmarks': benchmarks}]}
    with pytest.raises(ConfigError) as raised:
        load_suite([CAPITALS], gauntlet)
    assert facts_are_in(
        raised.value, ('random_baseline', '1.5'), ('weighting', "'EVEN'"), ('rivers/2-shot', 'no task has that label')
    )


def test_settings_and_the_files_that_they_name_are_checked_together(tmp_path: Path):
    (tmp_path / 'tasks.yaml').write_text('icl_tasks: [{label: capitals, icl_task_type: multiple_choise}]')
    settings: dict[str, Any] = {
        'tasks': str(tmp_path / 'tasks.yaml'),
        'gauntlet': str(tmp_path / 'nowhere.yaml'),
        'score': [{'dataset': 'mmlu_pro', 'perturbations': ['option_orders'], 'answers': 'likely', 'seeds': []}],
        'interval': ['first', '500 batches'],
        'time_budget': '2min',
        'semantics': 'correct',
        'log': ['acc', 'errors'],
        'subset_items': 0,
    }
    with pytest.raises(ConfigError) as raised:
        load_inputs(settings)
    assert facts_are_in(
        raised.value,
        ('interval', '500 batches'),
        ('time_budget', '2min'),
        ('semantics', "'correct'"),
        ('log', "'acc'"),
        ('subset_items', 'is 0'),
        ('multiple_choise', "did you mean 'multiple_choice'"),
        ("'dataset_uri' is missing",),
        ("'num_fewshot' is missing",),
        ('nowhere.yaml', 'no such file'),
        ('perturbations', 'option_orders'),
        ('answers', "'likely'"),
        ('seeds', '[]'),
    )


def test_data_of_valid_tasks_is_read_although_others_are_invalid(tmp_path: Path, gauntlet):
    (tmp_path / 'tasks.yaml').write_text(
        'icl_tasks:\n'
        '- {label: capitals, dataset_uri: capitals.jsonl, num_fewshot: [0], icl_task_type: multiple_choice}\n'
        '- {label: rivers, dataset_uri: rivers.jsonl, num_fewshot: [0, 0], icl_task_type: multiple_choice}\n'
    )
    (tmp_path / 'capitals.jsonl').write_text('{"query": "The capital of France is", "choices": ["Paris"], "gold": 0}\n')
    status, out, err = gauntlet('validate', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path)
    of_tasks, of_data = err.splitlines()
    assert (status, out) == (1, '')
    assert 'tasks.yaml:3 (rivers)' in of_tasks and 'duplicates' in of_tasks
    assert 'capitals.jsonl:1' in of_data and 'choices' in of_data


def test_options_model_and_files_of_run_are_checked_together(tmp_path: Path, gauntlet):
    words = ['run', '--model', tmp_path / 'model', '--tasks', tmp_path / 'tasks.yaml', '--out', tmp_path / 'out']
    words += ['--num-fewshot', '-1', '--subset-items', '0', '--device', 'tpu', '--repair-journal']
    status, out, err = gauntlet(*words)
    assert (status, out) == (2, '')
    lines = err.splitlines()
    beginnings = [f'error: {name}: ' for name in ('--num-fewshot', '--subset-items', '--device')]
    beginnings += [
        'error: --repair-journal: ',
        f'error: --model: {tmp_path}/model: ',
        f'error: {tmp_path}/tasks.yaml: ',
    ]
    assert len(lines) == len(beginnings), lines
    assert all(any(line.startswith(beginning) for line in lines) for beginning in beginnings)


def test_a_misspelt_category_of_an_average_gets_its_suggestion():
    benchmarks = [{'name': 'capitals', 'num_fewshot': 0}]
    gauntlet = {
        'categories': [{'name': 'geography', 'benchmarks': benchmarks}],
        'averages': {'mine': ['geografy']},
    }
    (warning,) = load_suite([CAPITALS], gauntlet).warnings
    assert 'averages.mine' in warning and "did you mean 'geography'" in warning
