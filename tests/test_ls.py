"""Test `gauntlet` without arguments, and `gauntlet ls`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import loaded_by
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.data.published import read_manifest

TASKS = ROOT / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml'
GAUNTLET = ROOT / 'yamls' / 'gauntlets' / 'eval_gauntlet_v0.1.yaml'


def test_gauntlet_without_arguments_shows_how_to_get_started(gauntlet):
    status, out, _ = gauntlet()
    assert status == 0
    commands = [line.split()[:2] for line in out.splitlines() if line.startswith('  gauntlet ')]
    assert [words[1] for words in commands] == ['ls', 'explain', 'data', 'run', 'report']
    for _, word in commands:
        assert gauntlet(word, '--help')[0] == 0


def test_shell_completion_works():
    environment = {**os.environ, '_GAUNTLET_COMPLETE': 'complete_bash', 'COMP_WORDS': 'gauntlet va', 'COMP_CWORD': '1'}
    done = subprocess.run([Path(sys.executable).with_name('gauntlet')], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ['validate']


def test_all_tasks_are_listed_by_category(gauntlet):
    status, out, _ = gauntlet('ls', '--data-root', ROOT / 'eval_data', '--json')
    assert status == 0
    listed = json.loads(out)
    categories = yaml.safe_load(GAUNTLET.read_text())['eval_gauntlet']['categories']
    assert [(one['category'], one['task'], one['num_shots'], one['chance']) for one in listed] == [
        (category['name'], benchmark['name'], benchmark['num_fewshot'], benchmark['random_baseline'])
        for category in categories
        for benchmark in category['benchmarks']
    ]
    for one in listed:
        lines = (ROOT / 'eval_data' / one['dataset_uri']).read_text('utf-8').split('\n')
        assert one['rows'] == sum(1 for line in lines if line.strip())
        assert one['data'] == 'sample'


def test_names_filter_the_list(gauntlet):
    status, out, _ = gauntlet('ls', 'safety', 'copa', '--data-root', ROOT / 'eval_data')
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert ['copa', '0', 'multiple_choice', '0.50', '16', 'sample'] in lines
    assert out.splitlines()[-1].startswith('5 tasks')
    status, _, err = gauntlet('ls', 'saftey')
    assert status == 2
    assert "saftey: no such task or category, did you mean 'safety'?" in err


def test_missing_and_unknown_data_files_are_reported(gauntlet, tmp_path: Path):
    data = tmp_path / 'data' / 'commonsense_reasoning'
    data.mkdir(parents=True)
    (data / 'copa.jsonl').write_text('{}\n\n{}\n')
    _, out, _ = gauntlet('ls', 'copa', 'piqa', '--data-root', tmp_path / 'data', '--json')
    assert [(one['rows'], one['data']) for one in json.loads(out)] == [(2, 'unofficial'), (None, 'not there')]


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason='the published files are not here')
def test_published_files_are_recognised_by_content(gauntlet):
    _, out, _ = gauntlet('ls', '--data-root', SHARED_DATA / 'local_data', '--json')
    rows = {file.task: file.num_rows for file in read_manifest()}
    right = [one for one in json.loads(out) if one['data'] == 'published']
    assert len(right) > 40
    assert all(one['rows'] == rows[one['task']] for one in right)


def test_custom_tasks_and_score_need_no_gauntlet(gauntlet, tmp_path: Path):
    task = {'label': 'mine', 'dataset_uri': 'x.jsonl', 'num_fewshot': [0, 5], 'icl_task_type': 'language_modeling'}
    elsewhere = {**task, 'label': 'hub', 'dataset_uri': 'hf://org/name', 'num_fewshot': [0]}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task, elsewhere]}))
    (tmp_path / 'x.jsonl').write_text('{}\n')
    _, out, _ = gauntlet('ls', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--json')
    shown = [(one['category'], one['task'], one['num_shots'], one['rows'], one['data']) for one in json.loads(out)]
    _, out, _ = gauntlet('ls', '--score', ROOT / 'yamls/score/base_models.yaml', '--data-root', 'eval_data', '--json')
    assert [(one['task'], one['rows'], one['data']) for one in json.loads(out)] == [
        ('score_mmlu_pro', 42, 'sample'),
        ('score_agieval', 84, 'sample'),
    ]
    assert shown == [
        ('in no category', 'mine', 0, 1, 'own'),
        ('in no category', 'mine', 5, 1, 'own'),
        ('in no category', 'hub', 0, None, 'elsewhere'),
    ]


@pytest.mark.parametrize(
    ('words', 'more'),
    [(('ls',), ['numpy']), (('validate', '--tasks', TASKS, '--no-data'), ['numpy']), (('explain', 'copa'), [])],
)
def test_commands_without_a_model_import_no_heavy_packages(words: tuple[Any, ...], more: list[str]):
    heavy = ('torch', 'composer', 'transformers', 'datasets', 'pyarrow', 'sympy', 'requests', 'fsspec', 'omegaconf')
    assert loaded_by(*words, names=(*heavy, *more)) == []
