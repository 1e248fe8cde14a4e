"""Arguments of `evaluate` with the wrong type, from Python and from a YAML file of `gauntlet eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from paths import FIXTURES

from llmfoundry_gauntlet import ConfigError, evaluate
from llmfoundry_gauntlet.runtime.evaluate_file import read_config

MODEL = str(FIXTURES / 'models' / 'rotary_bos')
TASKS = 'yamls/tasks/gauntlet_v0.1.yaml'
WRONG: list[dict[str, tuple[Any, str]]] = [  # values by name, and what is said of them
    {
        'model': (['a', 'b'], 'is a list; allowed: text'),
        'out': (3, 'is 3; allowed: text'),
        'tokenizer': ({'name': 'x'}, 'is a mapping; allowed: text'),
        'device': (True, 'is True; allowed: text'),
        'precision': (['fp32'], 'is a list; allowed: text'),
        'dist_timeout': ('long', "is 'long'; allowed: a number"),
        'overwrite': ('yes', "is 'yes'; allowed: true or false"),
        'resume': (1, 'is 1; allowed: true or false'),
        'interval': ('1ep', 'only applies in training; an evaluation alone runs once and writes to out'),
    },
    {'out': ('runs/' + 'x' * 300, 'has a name of 300 bytes; allowed: 255 bytes for the name of a file or folder')},
    {'run_name': ('x' * 300, 'has a name of 300 bytes; allowed: 255 bytes for the name of a file or folder')},
    {'model': ('', "is ''; allowed: text"), 'out': (' ', "is ' '; allowed: text")},
]


def values_with(wrong: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return values of arguments, some of them wrong."""
    wrong_values = {name: value for name, (value, _) in wrong.items()}
    return {'model': 'm', 'out': 'o', 'tasks': TASKS, **wrong_values}


@pytest.mark.parametrize('wrong', WRONG)
def test_all_arguments_of_the_wrong_type_are_named_at_once(wrong: dict[str, tuple[Any, str]]):
    with pytest.raises(ConfigError) as raised:
        evaluate(**values_with(wrong))

    assert {*raised.value.problems} == {f'evaluate: {name}: {problem}' for name, (_, problem) in wrong.items()}


@pytest.mark.parametrize('wrong', WRONG)
def test_all_keys_of_a_file_with_the_wrong_type_are_named_at_once(tmp_path: Path, wrong: dict[str, tuple[Any, str]]):
    path = tmp_path / 'eval.yaml'
    path.write_text(json.dumps(values_with(wrong)))

    with pytest.raises(ConfigError) as raised:
        read_config(str(path), [])

    assert {*raised.value.problems} == {f'{path}:1: {name}: {problem}' for name, (_, problem) in wrong.items()}


@pytest.mark.parametrize(
    ('changes', 'key'),
    [
        ({'models': [{'model_name': 'x' * 300}]}, 'out'),
        ({'models': [{'model_name': 'one'}, {'model_name': 'x' * 200}], 'run_name': 'y' * 100}, 'run_name'),
    ],
)
def test_names_of_models_that_are_too_long_for_files_are_errors_of_the_file(
    tmp_path: Path, changes: dict[str, Any], key: str
):
    """Rather than of the model alone, after others were evaluated."""
    one = {'model': {'name': 'hf_causal_lm', 'pretrained_model_name_or_path': 'm'}, 'tokenizer': {'name': 'm'}}
    values = {'out': 'o', 'icl_tasks': [], **changes}
    values['models'] = [{**one, **model} for model in values['models']]
    (tmp_path / 'eval.yaml').write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=rf'{key}: has a name of 30\d bytes'):
        read_config(str(tmp_path / 'eval.yaml'), [])


def test_no_model_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match='evaluate: model: is empty; allowed: text'):
        evaluate(None, tasks='t.yaml')  # type: ignore[arg-type]
    (tmp_path / 'eval.yaml').write_text(json.dumps({'model': None, 'out': 'o', 'tasks': 't.yaml'}))
    with pytest.raises(ConfigError, match="the key 'model' is missing"):  # in a file an empty key is as good as none
        read_config(str(tmp_path / 'eval.yaml'), [])


def test_a_key_near_one_of_llm_foundry_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / 'eval.yaml').write_text(json.dumps({'model': 'm', 'out': 'o', 'icl_task': 1}))
    with pytest.raises(ConfigError, match="unknown key 'icl_task', did you mean 'icl_tasks'"):
        read_config(str(tmp_path / 'eval.yaml'), [])


def test_wrong_tasks_are_an_error_before_the_model_is_loaded():
    with pytest.raises(ConfigError, match='tasks: is 3'):
        evaluate('/nowhere', tasks=3, device='cpu')


@pytest.mark.parametrize(
    ('config', 'found'),
    [
        ('FULL_SHARD', r'is .*; allowed: a mapping'),
        (['x'], r'is .*; allowed: a mapping'),
        (3, r'is .*; allowed: a mapping'),
        (
            {'sharding_strateg': 'FULL_SHARD'},
            "sharding_strateg: unknown key 'sharding_strateg', did you mean 'sharding_strategy'",
        ),
        ({'sharding_strategy': 'FULL'}, "sharding_strategy: is 'FULL'; allowed: FULL_SHARD"),
    ],
)
def test_fsdp_config_is_a_mapping_of_known_keys(config: Any, found: str):
    with pytest.raises(ConfigError, match=f'fsdp_config: {found}'):
        evaluate(MODEL, tasks='t.yaml', device='cpu', fsdp_config=config)
