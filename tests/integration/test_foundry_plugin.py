"""Our callback in llm-foundry's own training, in the environment of `make reference`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from paths import FIXTURES, ROOT

from llmfoundry_gauntlet import evaluate

PYTHON = ROOT / '.venv-reference/bin/python'
MODEL = str(FIXTURES / 'models/rotary_bos')
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def training_file(folder: Path, **callback: Any) -> Path:
    """Write a training of four batches of a small Llama, in the format of llm-foundry's training files."""
    rows = [{'prompt': f'{i} and {i} are', 'response': f' {2 * i}'} for i in range(40)]
    (folder / 'rows').mkdir()
    tiny.write_rows(folder / 'rows/rows.jsonl', rows)
    data = {
        'hf_name': 'json',
        'hf_kwargs': {'data_files': str(folder / 'rows/rows.jsonl')},
        'split': 'train',
        'max_seq_len': 128,
        'decoder_only_format': True,
        'shuffle': True,
    }
    loader = {'name': 'finetuning', 'dataset': data, 'drop_last': True, 'num_workers': 0, 'pin_memory': False}
    values = {
        'max_seq_len': 128,
        'seed': 3,
        'run_name': 'plugin',
        'precision': 'fp32',
        'max_duration': '4ba',
        'eval_interval': '3ba',
        'eval_first': True,
        'global_train_batch_size': 4,
        'device_train_microbatch_size': 2,
        'device_eval_batch_size': 4,
        'model': {'name': 'hf_causal_lm', 'pretrained_model_name_or_path': MODEL, 'init_device': 'cpu'},
        'tokenizer': {'name': MODEL, 'kwargs': {'model_max_length': 128}},
        'train_loader': {**loader, 'prefetch_factor': None, 'persistent_workers': False},
        'optimizer': {'name': 'decoupled_adamw', 'lr': 1e-3},
        'scheduler': {'name': 'constant_with_warmup', 't_warmup': '1ba'},
        'log_to_console': False,
        'callbacks': {'eval_gauntlet_fast': {'save_folder': str(folder / '{run_name}'), **callback}},
    }
    path = folder / 'train.yaml'
    path.write_text(yaml.safe_dump(values))
    return path


def run(path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    if not PYTHON.exists():
        pytest.skip('there is no .venv-reference; `make reference` makes it')
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'HF_DATASETS_CACHE': str(out / 'cache')}
    words = [PYTHON, ROOT / 'tests/integration/foundry_worker.py', path, out]
    return subprocess.run(words, cwd=out, env=environment, capture_output=True, text=True, timeout=1000)


def test_llm_foundry_trains_with_our_callback_and_logs_our_scores(tmp_path: Path):
    """The samples of the last evaluation are those of a separate evaluation of the trained weights."""
    settings = tiny.write_tasks(tmp_path)
    done = run(training_file(tmp_path, **settings), tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / 'found.json').read_text())
    assert (found['class'], found['batch'], found['max_seq_len']) == ('ComposerHFCausalLM', 4, 128)
    assert found['interval'] == ['first', '3ba', 'last']
    folders = sorted(path.name for path in (tmp_path / 'plugin').iterdir())
    assert folders == ['ba0', 'ba3', 'ba4']
    alone = evaluate(tmp_path / 'model', out=tmp_path / 'alone', max_seq_len=128, device='cpu', **settings)
    samples = sorted(path.name for path in (tmp_path / 'alone/samples').iterdir())
    assert len(samples) == 6
    for name in samples:
        lines = [
            [json.loads(line) for line in (folder / 'samples' / name).read_text().splitlines()]
            for folder in (tmp_path / 'plugin/ba4', tmp_path / 'alone', tmp_path / 'plugin/ba0')
        ]
        ours, theirs, before = ([{**row, 'logprobs': None} for row in rows] for rows in lines)
        assert ours == theirs and len(before) == len(ours)
        for trained, again, untrained in zip(*lines, strict=True):
            assert trained['logprobs'] == pytest.approx(again['logprobs'], abs=1e-5)
            assert trained['logprobs'] != pytest.approx(untrained['logprobs'], abs=1e-5)
    for key, value in found['metrics'].items():
        if not key.startswith('gauntlet/seconds') and key != 'gauntlet/batch':
            assert value == pytest.approx(alone.metrics[key], abs=1e-5), key


def test_icl_tasks_of_llm_foundry_beside_our_callback_are_an_error(tmp_path: Path):
    settings = tiny.write_tasks(tmp_path)
    path = training_file(tmp_path, **settings)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), 'icl_tasks': settings['tasks']}))
    done = run(path, tmp_path)
    assert done.returncode != 0
    assert 'callbacks.eval_gauntlet_fast: icl_tasks' in done.stderr
    assert not (tmp_path / 'plugin').exists()
