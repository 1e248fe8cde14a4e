"""llm-foundry itself, in the environment of `make reference`: its MPT, its training with our callback, its scores."""

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
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason='there is no .venv-reference; `make reference` makes it'),
]
MODEL = str(FIXTURES / 'models/rotary_bos')
UNSUPPORTED = {'temperature': 'attn_temperature_tuning'}


def run(folder: Path, *words: Any) -> None:
    """Run a script in a folder, in llm-foundry's environment."""
    paths = os.pathsep.join(map(str, (ROOT / 'tests', ROOT / 'scripts', ROOT)))
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': paths, 'HF_DATASETS_CACHE': f'{folder}/cache'}
    done = subprocess.run([PYTHON, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def output_of(command: str, folder: Path, *arguments: Path) -> dict[str, Any]:
    """Return what a command of the worker writes."""
    out = folder / 'output.json'
    run(folder, ROOT / 'tests/integration/foundry_worker.py', command, out, *arguments)
    return json.loads(out.read_text())


def test_every_setting_of_mpt_runs_in_the_stream_with_the_scores_of_bare_forwards_or_is_named(tmp_path: Path):
    """Mutations: the window of a token without its own; biases of the query's heads in the order of the keys'."""
    measures_of_setting = output_of('mpt', tmp_path)

    assert len(measures_of_setting) == 14
    for name, measures in measures_of_setting.items():
        assert measures['error'] < 1e-4, name
        assert measures['wrong'] == [], name
        if name in UNSUPPORTED:
            assert measures['layouts'] == ['padded_rows', 'no_cache']
            assert f'{UNSUPPORTED[name]} is not supported' in measures['reason']
        else:
            assert measures['layouts'] == ['stream', 'prompt_stream'], (name, measures['reason'])


def test_items_and_metrics_equal_those_of_llm_foundrys_evaluation(real_data: Path, tmp_path: Path):
    """An MPT with RoPE and one with ALiBi, evaluated by both: five scored and two generation tasks, six rows each.

    Losses within 1e-4, predictions and texts equal, metrics within 1e-6.
    """
    differences_of_model = output_of('parity', tmp_path, real_data)

    assert len(differences_of_model) == 2
    for differences in differences_of_model.values():
        tasks = differences['tasks'].values()
        assert differences['layouts'] == ['stream', 'prompt_stream']
        assert len(tasks) == 7
        assert sum(task['loss'] > 0 for task in tasks) == 5  # those that are scored
        for task in tasks:
            assert task['items'] == 6, task
            assert task['wrong'] == [], task
            assert task['loss'] < 1e-4, task
            assert task['metrics'] < 1e-6, task


def training_file(folder: Path, **callback: Any) -> Path:
    """Write a training of four batches of a small Llama, in the format of llm-foundry's training files."""
    rows = [{'prompt': f'{number} and {number} are', 'response': f' {2 * number}'} for number in range(40)]
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


def samples(folder: Path) -> list[dict[str, Any]]:
    """Return the samples of all tasks in order."""
    return [json.loads(line) for path in sorted(folder.glob('samples/*')) for line in path.read_text().splitlines()]


def test_llm_foundry_trains_with_our_callback_and_logs_our_scores(tmp_path: Path):
    """The samples of the last evaluation are those of a separate evaluation of the trained weights."""
    settings = tiny.write_tasks(tmp_path)

    training = output_of('train', tmp_path, training_file(tmp_path, **settings))

    assert training['class'] == 'ComposerHFCausalLM'
    assert training['max_seq_len'] == 128
    assert training['interval'] == ['first', '3ba', 'last']
    assert sorted(path.name for path in (tmp_path / 'plugin').iterdir()) == ['ba0', 'ba3', 'ba4']

    alone = evaluate(tmp_path / 'model', out=tmp_path / 'alone', max_seq_len=128, device='cpu', **settings)
    folders = (tmp_path / 'plugin/ba4', tmp_path / 'alone', tmp_path / 'plugin/ba0')
    for trained, again, untrained in zip(*map(samples, folders), strict=True):
        assert {**trained, 'logprobs': None} == {**again, 'logprobs': None}
        assert trained['logprobs'] == pytest.approx(again['logprobs'], abs=1e-5)
        assert trained['logprobs'] != pytest.approx(untrained['logprobs'], abs=1e-5)
    for key, value in training['metrics'].items():
        if not key.startswith('gauntlet/seconds') and key != 'gauntlet/batch':
            assert value == pytest.approx(alone.metrics[key], abs=1e-5), key


@pytest.mark.long
@pytest.mark.parametrize('model', ['rotary_bos', 'alibi_pad_eos'])
def test_recording_again_gives_the_same_fixture(model: str, real_data: Path, tmp_path: Path):
    run(tmp_path, ROOT / 'scripts/record_reference.py', '--models', model, '--out', tmp_path)
    recorded = json.loads((FIXTURES / 'reference' / f'{model}.json').read_text())
    again = json.loads((tmp_path / f'{model}.json').read_text())

    assert again['model_sha256'] == recorded['model_sha256']
    for old, new in zip(recorded['cases'], again['cases'], strict=True):
        assert (new['name'], new['rows'], new['task']) == (old['name'], old['rows'], old['task'])
        assert new['prompts'] == old['prompts']
        for item, repeated in zip(old['items'], new['items'], strict=True):
            assert repeated['prediction'] == item['prediction']
            assert repeated['losses'] == pytest.approx(item['losses'], abs=1e-4)  # other processors round differently
        assert new['metrics'] == pytest.approx(old['metrics'], abs=1e-6)
