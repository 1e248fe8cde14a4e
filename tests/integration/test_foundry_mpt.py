"""llm-foundry's own MPT, in the environment of `make reference`: its layouts, and its scores in both evaluations."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

PYTHON = ROOT / '.venv-reference/bin/python'
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
UNSUPPORTED = {'temperature': 'attn_temperature_tuning'}


def run(worker: str, folder: Path, *arguments: Path) -> dict[str, dict[str, Any]]:
    """Return what a worker writes."""
    if not PYTHON.exists():
        pytest.skip('there is no .venv-reference; `make reference` makes it')
    out = folder / 'found.json'
    paths = os.pathsep.join(map(str, (ROOT / 'tests', ROOT / 'scripts', ROOT)))
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': paths, 'HF_DATASETS_CACHE': str(folder)}
    words = [PYTHON, ROOT / 'tests/integration' / worker, *arguments, out]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope='module')
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run('foundry_mpt_worker.py', tmp_path_factory.mktemp('mpt'))


def test_every_setting_runs_in_the_stream_or_is_named(cases):
    """Mutations: the window of a token without its own; biases of the query's heads in the order of the keys'."""
    assert len(cases) == 14
    for name, found in cases.items():
        if name in UNSUPPORTED:
            assert found['layouts'] == ['padded_rows', 'no_cache']
            assert f'{UNSUPPORTED[name]} is not supported' in found['reason']
        else:
            assert found['layouts'] == ['stream', 'prompt_stream'], (name, found['reason'])


def test_scores_and_generations_are_those_of_bare_forwards(cases):
    for name, found in cases.items():
        assert found['error'] < 1e-4, name
        assert found['wrong'] == [], name


def test_items_and_metrics_equal_those_of_llm_foundrys_evaluation(real_data: Path, tmp_path: Path):
    """An MPT with RoPE and one with ALiBi, evaluated by both: five scored and two generation tasks, six rows each.

    Losses within 1e-4, predictions and texts equal, metrics within 1e-6.
    """
    found = run('foundry_parity_worker.py', tmp_path, real_data)
    assert len(found) == 2
    for model in found.values():
        assert model['layouts'] == ['stream', 'prompt_stream']
        assert len(model['cases']) == 7
        for case in model['cases']:
            assert case['items'] == 6 and case['wrong'] == [], case
            assert case['loss'] < 1e-4 and case['metrics'] < 1e-6, case
