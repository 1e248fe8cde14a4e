"""The dashboard scripts define charts of logged keys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts'))

from dashboards import Panel, mlflow_link, panels_of

RECORD = {
    'tasks': {
        'a/0-shot': {'metrics': {'Accuracy': {}, 'GoldBitsPerByte': {}}},
        'b/5-shot': {'metrics': {'Accuracy': {}}},
        'c/0-shot': {'metrics': {'Accuracy': {}}},
        'unscored/0-shot': {'metrics': {'Accuracy': {}}},
    },
    'composites': {
        'categories': {'world': {}, 'my:own': {}, 'absent': {}},
        'averages': {'default_average': {}},
        'gauntlet': {
            'categories': [
                {'name': 'world', 'benchmarks': [{'name': 'a', 'num_fewshot': 0}, {'name': 'b', 'num_fewshot': 5}]},
                {'name': 'absent', 'benchmarks': [{'name': 'unscored', 'num_fewshot': 0}]},
            ]
        },
    },
    'metrics': {
        'metrics/a/0-shot/Accuracy': 0.5,
        'metrics/a/0-shot/StandardError': 0.1,
        'metrics/a/0-shot/GoldBitsPerByte': 2.0,
        'metrics/b/5-shot/Accuracy': 0.5,
        'metrics/c/0-shot/Accuracy': 0.5,
        'icl/metrics/eval_gauntlet/world': 0.5,
        'icl/metrics/eval_gauntlet/world/standard_error': 0.1,
        'icl/metrics/eval_gauntlet/my_own': 0.5,
        'icl/metrics/eval_gauntlet/default_average': 0.5,
        'icl/metrics/eval_gauntlet/default_average/gold_bits_per_byte': 1.5,
        'icl/metrics/eval_gauntlet/default_average/gold_bits_per_byte/standard_error': 0.1,
        'icl/metrics/score/mmlu_pro/prompt/accuracy': 0.5,
        'icl/metrics/score/mmlu_pro/prompt/accuracy/standard_error': 0.1,
        'icl/metrics/score/mmlu_pro/prompt/consistency_rate': 0.5,
        'icl/metrics/score/mmlu_pro/option_order/accuracy': 0.5,
        'icl/metrics/score/mmlu_pro/option_order/option_order_A/accuracy': 0.5,
        'gauntlet/seconds': 3.0,
    },
}


def test_charts_group_the_keys_that_have_values():
    score = 'icl/metrics/score/mmlu_pro'
    assert panels_of(RECORD) == [
        Panel('Composites', 'averages', ('icl/metrics/eval_gauntlet/default_average',)),
        Panel('Composites', 'categories', ('icl/metrics/eval_gauntlet/world', 'icl/metrics/eval_gauntlet/my_own')),
        Panel(
            'Composites',
            'gold_bits_per_byte of averages (lower is better)',
            ('icl/metrics/eval_gauntlet/default_average/gold_bits_per_byte',),
        ),
        Panel('Tasks', 'world', ('metrics/a/0-shot/Accuracy', 'metrics/b/5-shot/Accuracy')),
        Panel('Tasks', 'other tasks', ('metrics/c/0-shot/Accuracy',)),
        Panel('SCORE', 'mmlu_pro: accuracy', (f'{score}/prompt/accuracy', f'{score}/option_order/accuracy')),
        Panel('SCORE', 'mmlu_pro: consistency rate', (f'{score}/prompt/consistency_rate',)),
        Panel('Cost', 'seconds of an evaluation', ('gauntlet/seconds',)),
    ]


def test_an_evaluation_without_a_gauntlet_has_its_tasks():
    panels = panels_of({**RECORD, 'composites': None})
    assert panels[0].title == 'other tasks'
    assert len(panels[0].keys) == 3


def test_a_link_holds_runs_keys_and_the_step_as_axis():
    url = mlflow_link('http://host:5000/', '7', ['r1', 'r2'], Panel('Tasks', 'world', ('metrics/a b/0-shot/X', 'y')))
    page, _, query = url.partition('?')
    assert page == 'http://host:5000/#/metric'
    settings = parse_qs(query)
    assert json.loads(settings['runs'][0]) == ['r1', 'r2']
    assert json.loads(settings['experiments'][0]) == ['7']
    assert json.loads(settings['plot_metric_keys'][0]) == ['metrics/a b/0-shot/X', 'y']
    assert settings['x_axis'] == ['step']


@pytest.mark.parametrize(
    ('command', 'options'),
    [
        ('wandb', ['--entity', 'e', '--project', 'p', '--dry-run']),
        ('mlflow', ['--uri', 'http://127.0.0.1:9', '--experiment', 'e']),
    ],
)
def test_a_folder_without_records_is_an_error_that_names_it(tmp_path: Path, command: str, options: list[str]):
    words = [sys.executable, ROOT / 'scripts' / 'dashboards.py', command, tmp_path, *options]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f'error: {tmp_path}: ') and 'Traceback' not in done.stderr
