"""llm-foundry's own MPT in the token stream, with cached generation, in the environment of `make reference`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

PYTHON = ROOT / '.venv-reference/bin/python'
WORKER = ROOT / 'tests/integration/foundry_mpt_worker.py'
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
UNSUPPORTED = {'temperature': 'attn_temperature_tuning'}


@pytest.fixture(scope='module')
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if not PYTHON.exists():
        pytest.skip('there is no .venv-reference; `make reference` makes it')
    out: Path = tmp_path_factory.mktemp('mpt') / 'found.json'
    paths = os.pathsep.join(map(str, (ROOT / 'tests', ROOT)))
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': paths}
    done = subprocess.run([PYTHON, WORKER, out], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


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
