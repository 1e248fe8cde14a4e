"""Arguments of `evaluate` with the wrong type, from Python and from a YAML file of `gauntlet eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from paths import FIXTURES

from llmfoundry_gauntlet import ConfigError, evaluate
from llmfoundry_gauntlet.composer.evaluate import read_config
from llmfoundry_gauntlet.composer.loggers import build_loggers

MODEL = str(FIXTURES / 'models' / 'rotary_bos')
WRONG = [
    ('model', ['a', 'b'], 'is a list; allowed: text'),
    ('model', None, 'is empty; allowed: text'),
    ('model', '', "is ''; allowed: text"),
    ('out', 3, 'is 3; allowed: text'),
    ('out', ' ', "is ' '; allowed: text"),
    ('tokenizer', {'name': 'x'}, 'is a mapping; allowed: text'),
    ('device', True, 'is True; allowed: text'),
    ('precision', ['fp32'], 'is a list; allowed: text'),
    ('overwrite', 'yes', "is 'yes'; allowed: true or false"),
    ('resume', 1, 'is 1; allowed: true or false'),
]


@pytest.mark.parametrize(('name', 'value', 'found'), WRONG)
def test_an_argument_of_the_wrong_type_is_named(name: str, value: Any, found: str):
    arguments = {'model': MODEL, 'tasks': 't.yaml', name: value}
    with pytest.raises(ConfigError) as raised:
        evaluate(arguments.pop('model'), **arguments)
    assert raised.value.problems == (f'evaluate: {name}: {found}',)


@pytest.mark.parametrize(('name', 'value', 'found'), [*WRONG, ('dist_timeout', 'long', "is 'long'; allowed: a number")])
def test_a_yaml_argument_of_the_wrong_type_is_named(tmp_path: Path, name: str, value: Any, found: str):
    path = tmp_path / 'eval.yaml'
    path.write_text(json.dumps({'model': MODEL, 'out': 'o', 'tasks': 't.yaml', name: value}))
    with pytest.raises(ConfigError) as raised:
        read_config(str(path), [])
    if value is not None:
        assert raised.value.problems == (f'{path}:1: {name}: {found}',)
    else:  # in a file an empty key is as good as none
        assert raised.value.problems == (f"{path}: the key '{name}' is missing",)


def test_all_wrong_arguments_are_listed_at_once():
    with pytest.raises(ConfigError) as raised:
        evaluate(3, out=4, tasks='t.yaml', interval='1ep', save_folder='x')  # type: ignore[arg-type]
    names = [problem.split(': ')[1] for problem in raised.value.problems]
    assert names == ['model', 'out', 'interval', 'save_folder']


@pytest.mark.parametrize(
    ('tasks', 'place'),
    [({'label': 'copa'}, 'tasks: is a mapping'), (3, 'tasks: is 3'), ([['t.yaml']], 'tasks[0]: is a')],
)
def test_wrong_tasks_are_an_error_before_the_model_is_loaded(tasks: Any, place: str):
    with pytest.raises(ConfigError) as raised:
        evaluate('/nowhere', tasks=tasks, device='cpu')
    assert place in str(raised.value)


@pytest.mark.parametrize('chosen', ['mlflow', ['mlflow'], 3, True])
def test_loggers_must_be_a_mapping(chosen: Any):
    with pytest.raises(ConfigError, match=r'loggers: is .*; allowed: a mapping with file, mlflow'):
        build_loggers(chosen)


@pytest.mark.parametrize('config', ['FULL_SHARD', ['x'], 3])
def test_fsdp_config_must_be_a_mapping(config: Any):
    with pytest.raises(ConfigError, match=r'fsdp_config: is .*; allowed: a mapping'):
        evaluate(MODEL, tasks='t.yaml', device='cpu', fsdp_config=config)
