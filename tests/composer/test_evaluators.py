"""The signature of build_icl_evaluators."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet import ConfigError, build_icl_evaluators
from llmfoundry_gauntlet.composer import evaluators
from llmfoundry_gauntlet.config.settings import EvaluationSettings

# Settings of several tasks together, of the time of an evaluation, of its records, and of its alerts.
NOT_OF_SINGLE_TASKS = {
    'gauntlet',
    'score',
    'interval',
    'time_budget',
    'precision_target',
    'stall_seconds',
    'save_folder',
    'log_prompts',
    'alert_on',
}


def test_its_parameters_are_the_settings_of_single_tasks_with_the_same_types_and_defaults():
    """Fails if a parameter is left out, has another default, or a new setting is in neither list."""
    parameters = dict(inspect.signature(build_icl_evaluators).parameters)
    hints = typing.get_type_hints(evaluators.build_icl_evaluators)
    hints_of_settings = typing.get_type_hints(EvaluationSettings)
    del parameters['model']
    assert parameters.pop('tasks').default is inspect.Parameter.empty
    names = {field.name for field in fields(EvaluationSettings)}
    assert parameters.keys() == names - NOT_OF_SINGLE_TASKS - {'tasks'}
    wider = {  # what is decoded: lists, and paths as well as text
        tuple[str, ...]: Sequence[str],
        tuple[str, ...] | None: Sequence[str] | None,
        'data_root': str | Path,
        'chat_template_kwargs': Mapping[str, Any] | None,
    }
    for field in fields(EvaluationSettings):
        if field.name in parameters:
            hint = hints_of_settings[field.name]
            assert parameters[field.name].default == field.default, field.name
            assert hints[field.name] == wider.get(field.name, wider.get(hint, hint)), field.name
    assert hints['tasks'] | None == hints_of_settings['tasks']


def test_every_parameter_reaches_the_settings():
    """With a wrong value each is an error that names it, all at once. Fails if one is not passed on."""
    wrong = {
        'data_root': ' ',
        'only': (),
        'num_fewshot': -1,
        'missing': 'x',
        'subset_items': 0,
        'max_seq_len': 1,
        'tokens_per_batch': 0,
        'semantics': 'x',
        'truncation': 'x',
        'fewshot': 'x',
        'apply_chat_template': 'x',
        'chat_template_kwargs': {'tokenize': True},
        'system_prompt': ' ',
        'fewshot_as_turns': 'x',
        'reasoning_markers': ['x'],
        'sandbox': 'x',
        'log': ['x'],
    }
    assert wrong.keys() | {'tasks', 'model'} == inspect.signature(build_icl_evaluators).parameters.keys()
    with pytest.raises(ConfigError) as raised:
        build_icl_evaluators('tasks.yaml', None, **wrong)
    for name in wrong:
        assert any(f'{name}: ' in problem for problem in raised.value.problems), name


def test_a_setting_of_the_callback_is_no_argument():
    with pytest.raises(TypeError, match='time_budget'):
        build_icl_evaluators('tasks.yaml', None, time_budget='10m')
