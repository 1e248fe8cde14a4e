"""Composer on newer libraries than it declares: it trains and resumes on two ranks, with the same evaluations.

`make composer-newest` makes the environment: mosaicml with `requirements/overrides.txt`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

BIN = ROOT / '.venv-composer-newest' / 'bin'

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (BIN / 'composer').exists(), reason='no .venv-composer-newest: make composer-newest'),
]


def train(folder: Path, data: Path, *more: str) -> dict[str, Any]:
    """Train the demo's model for twenty batches on two ranks; return the metrics of the last evaluation."""
    words = [
        BIN / 'composer',
        '-n',
        '2',
        'scripts/train.py',
        'yamls/train/demo.yaml',
        'max_duration=20ba',
        'save_interval=10ba',
        'progress_bar=false',
        f'tokenizer={data}/data/tokenizer',
        f'train_data.data_files=[{data}/data/train.jsonl]',
        f'train_data.cache_dir={data}/cache',
        f'save_folder={folder}/checkpoints',
        f'callbacks.eval_gauntlet.save_folder={folder}/gauntlet',
        'callbacks.eval_gauntlet.score=null',
        'callbacks.eval_gauntlet.gauntlet=null',
        'callbacks.eval_gauntlet.only=[copa,simple_arithmetic_nospaces]',
        *more,
    ]
    run(*words)
    content = json.loads((folder / 'gauntlet' / 'ba20' / 'results.json').read_text())
    return {name: value for name, value in content['metrics'].items() if 'seconds' not in name}


def run(*words: object) -> None:
    environment = {
        **os.environ,
        'OMP_NUM_THREADS': '1',
        'HF_HUB_OFFLINE': '1',
        'PATH': f'{BIN}:{os.environ["PATH"]}',
    }
    done = subprocess.run([str(word) for word in words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_training_resumed_on_two_ranks_has_the_metrics_of_training_that_went_on(tmp_path: Path):
    run(BIN / 'python', 'scripts/make_demo_data.py', '--out', tmp_path / 'data')

    uninterrupted = train(tmp_path / 'whole', tmp_path)
    checkpoint = tmp_path / 'whole' / 'checkpoints' / 'ep0-ba10-rank0.pt'
    resumed = train(tmp_path / 'resumed', tmp_path, f'load_path={checkpoint}')

    assert len(uninterrupted) > 20
    assert resumed == uninterrupted
