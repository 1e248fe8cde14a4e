"""Test the translation of llm-foundry's keys into ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.config.llm_foundry import Mapped, map_evaluation, map_plugin
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.errors import ConfigError

TASKS = [{'label': 'copa', 'num_fewshot': [0]}]
MODEL = {
    'model_name': 'org/one',
    'model': {'name': 'hf_causal_lm', 'pretrained_model_name_or_path': 'org/one-125m'},
    'tokenizer': {'name': 'org/words'},
}


def evaluation(values: dict[str, Any], *, num_ranks: int = 1) -> Mapped:
    return map_evaluation({'models': [MODEL], 'out': 'o', **values}, source='e.yaml', num_ranks=num_ranks)


def problems_of(call: Any, *arguments: Any, **keywords: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **keywords)
    return caught.value.problems


def with_model(**changes: Any) -> dict[str, Any]:
    return {'models': [{**MODEL, 'model': {**MODEL['model'], **changes}}], 'out': 'o'}


def test_files_in_our_keys_are_unchanged():
    values = {'model': 'm.pt', 'tokenizer': 'words', 'out': 'o', 'tasks': 't.yaml', 'subset_items': 5}
    assert map_evaluation(values, source='e.yaml', num_ranks=1) == Mapped(values=values)


@pytest.mark.parametrize(
    ('interval', 'expected'), [(2, ['2ep', 'last']), ('7ba', ['7ba', 'last']), ('0.5dur', ['0.5dur', 'last'])]
)
def test_intervals_of_llm_foundry_become_ours(interval: Any, expected: list[str]):
    mapped = map_plugin({'tasks': TASKS}, {'eval_interval': interval})
    assert mapped.values['interval'] == expected


@pytest.mark.parametrize(
    'interval', [True, False, 1.5, -1, '', [], ['1ep'], {}, {'every': 1}, 'sometimes', '0ba', '1.5ep', '1iter', '2dur']
)
def test_an_invalid_interval_is_an_error_that_names_eval_interval(interval: Any):
    (problem,) = problems_of(map_plugin, {'tasks': TASKS}, {'eval_interval': interval})
    assert problem.startswith('callbacks.eval_gauntlet_fast: eval_interval: is ') and 'allowed: ' in problem


@pytest.mark.parametrize(
    ('keys', 'expected'),
    [
        ({'icl_subset_num_batches': 2, 'device_eval_batch_size': 3}, 18),
        ({'eval_subset_num_batches': 2, 'device_eval_batch_size': 3}, 18),
        ({'icl_subset_num_batches': 2, 'eval_subset_num_batches': 5, 'device_eval_batch_size': 3}, 18),
        ({'icl_subset_num_batches': -1, 'device_eval_batch_size': 3}, None),
    ],
)
def test_a_subset_has_as_many_rows_as_llm_foundry_takes_on_all_ranks(keys: dict[str, int], expected: int | None):
    mapped = evaluation({'icl_tasks': TASKS, **keys}, num_ranks=3)
    assert mapped.values.get('subset_items') == expected


@pytest.mark.parametrize('rows', [None, 0, 0.5, 'auto'])
def test_a_subset_without_a_batch_size_is_an_error(rows: Any):
    values = {'icl_tasks': TASKS, 'icl_subset_num_batches': 2, 'device_eval_batch_size': rows}
    (problem,) = problems_of(evaluation, values)
    assert problem.startswith('e.yaml: icl_subset_num_batches: is 2 with ')


def test_the_plugin_takes_length_and_interval_from_the_training_file():
    file = {'max_seq_len': 2048, 'eval_interval': 2, 'eval_first': True, 'icl_tasks': None}
    assert map_plugin({'tasks': TASKS, 'save_folder': None}, file).values == {
        'tasks': TASKS,
        'save_folder': None,
        'max_seq_len': 2048,
        'interval': ['first', '2ep', 'last'],
    }
    own = {'tasks': TASKS, 'max_seq_len': 64, 'interval': ['last']}
    assert map_plugin(own, file) == Mapped(values=own)
    assert map_plugin({}, {'max_seq_len': 2048, 'icl_seq_len': 512}).values == {'max_seq_len': 512}


def test_the_plugin_needs_an_interval_if_llm_foundry_never_evaluates():
    (problem,) = problems_of(map_plugin, {'tasks': TASKS}, {'eval_interval': 0})
    assert problem.startswith('callbacks.eval_gauntlet_fast: interval: ') and 'eval_interval' in problem
    assert map_plugin({'tasks': TASKS, 'interval': 'last'}, {'eval_interval': 0}).values['interval'] == 'last'


@pytest.mark.parametrize('key', ['icl_tasks', 'icl_tasks_str'])  # the latter where it is a path
def test_the_plugin_refuses_tasks_that_llm_foundry_evaluates_itself(key: str):
    (problem,) = problems_of(map_plugin, {'tasks': TASKS}, {key: 'x'})
    assert problem.startswith("callbacks.eval_gauntlet_fast: icl_tasks is llm-foundry's own evaluation")


@pytest.mark.parametrize('num_ranks', [1, 2])
def test_hf_eval_yaml_of_llm_foundry_is_translated(upstream_yamls: Path, num_ranks: int):
    path = upstream_yamls / 'hf_eval.yaml'
    mapped = map_evaluation(read_yaml(path), source=str(path), num_ranks=num_ranks)
    shards = {'sharding_strategy': 'FULL_SHARD', 'mixed_precision': 'FULL'}
    assert mapped.values == {
        'precision': 'fp32',
        'max_seq_len': 1024,
        'tasks': str(upstream_yamls / 'tasks_v0.3.yaml'),
        'gauntlet': str(upstream_yamls / 'eval_gauntlet_v0.3.yaml'),
        'out': 'runs/hf_eval',
        **({'fsdp_config': {**shards, 'forward_prefetch': True, 'limit_all_gathers': True}} if num_ranks > 1 else {}),
    }
    assert ('fsdp_config: no effect: there is one rank' in mapped.lines) == (num_ranks == 1)
    (model,) = mapped.models
    assert (model.name, model.folder) == ('EleutherAI/gpt-neo-125m', 'EleutherAI/gpt-neo-125m')
    assert model.arguments == {'model': 'EleutherAI/gpt-neo-125m', 'tokenizer': 'EleutherAI/gpt-neo-125m'}


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('mpt_eval.yaml', ['models[0].model.name: mpt_causal_lm is llm-foundry', 'convert_composer_to_hf.py']),
        ('test_eval.yaml', ['models[0].model.name: mpt_causal_lm is llm-foundry', 'as hf_causal_lm']),
        ('hf_8bit_eval.yaml', ['models[0].model.load_in_8bit: is True: weights are not quantised']),
        ('openai_eval.yaml', ['models[0].model.name: openai_chat is an API', 'models[1]', 'gauntlet run --outputs']),
    ],
)
def test_unsupported_models_are_errors_that_say_what_to_do(upstream_yamls: Path, name: str, said: list[str]):
    path = upstream_yamls / name
    text = '\n'.join(problems_of(map_evaluation, read_yaml(path), source=str(path), num_ranks=1))
    for part in (name, *said):
        assert part in text


def test_a_checkpoint_uses_the_named_configuration():
    model = {**MODEL['model'], 'config_overrides': {'rope_theta': 5.0}, 'init_device': 'mixed', 'use_auth_token': True}
    entry = {**MODEL, 'model_name': '../org/one', 'model': model, 'load_path': 's3://b/ep1.pt'}
    values = {'models': [entry], 'out': 'o'}
    mapped = map_evaluation(values, source='e.yaml', num_ranks=1)
    (listed,) = mapped.models
    assert listed.arguments == {
        'model': 's3://b/ep1.pt',
        'model_config': 'org/one-125m',
        'tokenizer': 'org/words',
        'config_overrides': {'rope_theta': 5.0},
    }
    assert mapped.lines[-1] == 'models[0]: ../org/one -> model: s3://b/ep1.pt, out: o/org/one'  # always below out
    assert [line.partition(':')[0] for line in mapped.lines[:-1]] == [
        'models[0].model.init_device',
        'models[0].model.use_auth_token',
    ]


def test_a_single_model_may_be_given_at_the_top():
    values = {'model': MODEL['model'], 'tokenizer': MODEL['tokenizer'], 'load_path': None, 'seed': 1, 'run_name': 'r'}
    mapped = map_evaluation(values, source='e.yaml', num_ranks=1)
    (listed,) = mapped.models
    assert listed.name == listed.folder == 'hf_causal_lm' and listed.arguments['model'] == 'org/one-125m'
    assert mapped.values == {'run_name': 'r', 'out': 'runs/r'}
    assert mapped.lines[0].startswith('seed: no effect')


@pytest.mark.parametrize(
    ('values', 'problem'),
    [
        (with_model(pretrained=False), 'models[0].model.pretrained: is false: the weights would be random'),
        (with_model(name='hf_casual_lm'), "no kind of model 'hf_casual_lm', did you mean 'hf_causal_lm'?"),
        (with_model(pretrained_model_name_or_path=None), 'pretrained_model_name_or_path: is empty; allowed: text'),
        ({'models': []}, 'models: is an empty list; allowed: a list of models'),
        ({'models': 3}, 'models: is 3; allowed: a list of models'),
        ({'models': [None]}, 'models[0]: is empty; allowed: a mapping'),
        ({'models': [{**MODEL, 'model_name': ''}]}, "models[0]: model_name: is ''; allowed: text"),
        ({'models': [{**MODEL, 'tokenizer': {}}]}, "models[0].tokenizer: the key 'name' is missing"),
        ({'models': [{**MODEL, 'modle': 1}]}, "models[0].modle: unknown key 'modle', did you mean 'model'?"),
        ({'models': [{'model_name': 'x'}]}, "models[0]: the key 'tokenizer' is missing"),
        ({'models': [MODEL], 'model': 'm.pt'}, "models: is given together with 'model'"),
        ({'models': [MODEL, {**MODEL, 'model_name': 'org'}]}, "the output folders of 'org/one' and 'org' overlap"),
        ({'model': 'm.pt', 'load_path': 'x'}, 'load_path: belongs to models'),
        ({'models': [MODEL], 'icl_seq_len': 9, 'max_seq_len': 8}, "max_seq_len: is 8, but llm-foundry's keys make"),
        ({'models': [MODEL], 'icl_tasks': TASKS, 'tasks': 't.yaml'}, "tasks: is t.yaml, but llm-foundry's keys make"),
        ({'models': [MODEL], 'icl_tasks': 'eval/no.yaml'}, "icl_tasks: there is no file 'eval/no.yaml'"),
        (
            {'models': [{**MODEL, 'tokenizer': {'name': 'x', 'kwargs': {'add_bos_token': False}}}]},
            'models[0].tokenizer.kwargs.add_bos_token: may change tokens',
        ),
        ({'models': [{**MODEL, 'tokenizer': {'name': 'tiktoken'}}]}, 'tokenizer.name: tiktoken is llm-foundry'),
    ],
)
def test_errors_in_an_evaluation_file_name_the_key(values: dict[str, Any], problem: str):
    found = problems_of(map_evaluation, values, source='e.yaml', num_ranks=1)
    assert all(text.startswith('e.yaml: ') for text in found)
    assert problem in '\n'.join(found)
