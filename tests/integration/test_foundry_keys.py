"""`gauntlet train` and `gauntlet eval` on llm-foundry's keys, with real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from command_line import run_cli
from paths import FIXTURES

from llmfoundry_gauntlet import evaluate

ROTARY, ALIBI = (str(FIXTURES / 'models' / name) for name in ('rotary_bos', 'alibi_pad_eos'))
pytestmark = pytest.mark.filterwarnings('ignore:.*optimizer.*:UserWarning')


def write(path: Path, values: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


def model(model_name: str, path: str, /, **changes: Any) -> dict[str, Any]:
    return {
        'model_name': model_name,
        'model': {'name': 'hf_causal_lm', 'pretrained_model_name_or_path': path, 'init_device': 'mixed', **changes},
        'tokenizer': {'name': path, 'kwargs': {'model_max_length': 128}},
    }


def evaluation_file(folder: Path, models: list[dict[str, Any]]) -> str:
    """Write an evaluation file with llm-foundry's keys and the tiny tasks."""
    settings = tiny.write_tasks(folder)
    tasks, gauntlet = (json.loads(Path(settings[key]).read_text()) for key in ('tasks', 'gauntlet'))
    shared = {
        'variables': {'max_seq_len': 128},
        'max_seq_len': '${variables.max_seq_len}',
        'seed': 1,
        'precision': 'fp32',
        'device_eval_batch_size': 4,
        'dist_timeout': 100,
        'fsdp_config': {'sharding_strategy': 'FULL_SHARD'},
        'run_name': 'both',
        'loggers': {'file': {'filename': str(folder / 'logs' / '{run_name}.txt')}},
        'data_root': str(folder),  # the only key of ours
    }
    return write(folder / 'eval.yaml', {**shared, **tasks, **gauntlet, 'models': models})


def samples(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / 'samples').iterdir()}


def test_several_models_in_one_file_score_as_each_does_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    models = [model('org/rotary', ROTARY), model('alibi', ALIBI)]
    path = evaluation_file(tmp_path, models)
    assert run_cli('eval', path, f'out={tmp_path}/out', 'device=cpu') == 0
    settings = {**tiny.write_tasks(tmp_path), 'max_seq_len': 128, 'device': 'cpu'}
    for name, source in (('org/rotary', ROTARY), ('alibi', ALIBI)):
        evaluate(source, out=tmp_path / 'alone' / name, **settings)
        assert samples(tmp_path / 'out' / name) == samples(tmp_path / 'alone' / name)
    assert samples(tmp_path / 'out/alibi') != samples(tmp_path / 'out/org/rotary')
    printed = capsys.readouterr().out
    for text in ('icl_tasks: a list of 3 -> tasks', 'fsdp_config: no effect: there is one rank', 'seed: no effect'):
        assert text in printed
    lines = [line for line in printed.splitlines() if str(tmp_path) not in line]
    (header,) = [line for line in lines if 'rotary' in line and 'alibi' in line]
    assert header.index('rotary') < header.index('alibi')
    assert f'gauntlet compare {tmp_path}/out/org/rotary {tmp_path}/out/alibi' in printed
    logs = {path.name: path.read_text() for path in (tmp_path / 'logs').iterdir()}
    assert sorted(logs) == ['both-alibi.txt', 'both-org-rotary.txt']
    for log in logs.values():
        assert 'metrics/sums/0-shot/InContextLearningLMAccuracy: ' in log


def test_a_failing_model_is_reported_and_the_others_still_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = evaluation_file(tmp_path, [model('gone', str(tmp_path / 'gone')), model('alibi', ALIBI)])
    assert run_cli('eval', path, f'out={tmp_path}/out', 'device=cpu') == 1
    assert (tmp_path / 'out/alibi/results.json').is_file() and not (tmp_path / 'out/gone').exists()
    printed = capsys.readouterr()
    assert 'gone was not evaluated:\nerror: ' in printed.err and 'alibi' in printed.out
    broken = evaluation_file(tmp_path, [model('gone', str(tmp_path / 'gone'))])
    assert run_cli('eval', broken, f'out={tmp_path}/none', 'device=cpu') == 2


def test_config_overrides_reach_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Another rope_theta changes the log-probabilities."""
    models = [model('plain', ROTARY), model('other', ROTARY, config_overrides={'rope_theta': 30.0})]
    path = evaluation_file(tmp_path, models)
    assert run_cli('eval', path, f'out={tmp_path}/out', 'device=cpu') == 0
    assert samples(tmp_path / 'out/plain') != samples(tmp_path / 'out/other')
    path = evaluation_file(tmp_path, [model('wrong', ROTARY, config_overrides={'rope_teta': 30.0})])
    assert run_cli('eval', path, f'out={tmp_path}/wrong', 'device=cpu') == 2
    assert "config_overrides: unknown key 'rope_teta', did you mean 'rope_theta'?" in capsys.readouterr().err


def training_file(folder: Path, **values: Any) -> str:
    """Write a training file of four batches of a tiny Llama, with these llm-foundry keys."""
    tiny.tokenizer().save_pretrained(folder / 'tokenizer')
    rows = [{'text': f'{i} and {i} are {2 * i}. '} for i in range(60)]
    tiny.write_rows(folder / 'train.jsonl', rows)
    sizes = {'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'intermediate_size': 32}
    shared = {
        'tokenizer': {'name': str(folder / 'tokenizer')},
        'model': {'config': {'model_type': 'llama', **sizes}},
        'train_data': {'path': [str(folder / 'train.jsonl')]},
        'optimizer': {'lr': 1e-3},
        'scheduler': {'t_warmup': '1ba'},
        'max_duration': '4ba',
        'max_seq_len': 96,
        'global_train_batch_size': 2,
        'device': 'cpu',
        'run_name': 'tiny',
        'log_to_console': False,
    }
    return write(folder / 'train.yaml', {**shared, **values})


def test_training_follows_llm_foundrys_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = tiny.write_tasks(tmp_path)
    keys = {
        'icl_tasks': settings['tasks'],
        'eval_gauntlet': settings['gauntlet'],
        'icl_seq_len': 64,
        'icl_subset_num_batches': 1,
        'device_eval_batch_size': 2,
        'eval_interval': '3ba',
        'eval_first': True,
        'callbacks': {'eval_gauntlet': {'data_root': str(tmp_path), 'save_folder': str(tmp_path / 'gauntlet')}},
    }
    assert run_cli('train', training_file(tmp_path, **keys)) == 0
    folders = sorted(path.name for path in (tmp_path / 'gauntlet').iterdir())
    assert folders == ['ba0', 'ba3', 'ba4']
    record = json.loads((tmp_path / 'gauntlet/ba3/results.json').read_text())
    assert record['config']['max_seq_len'] == 64
    assert {entry['num_items'] for entry in record['tasks'].values()} == {2}
    assert 'value' in record['composites']['categories']['all']
    printed = capsys.readouterr().out
    assert 'icl_seq_len: 64 -> max_seq_len: 64\n' in printed
    assert 'eval_interval: 3ba, with eval_first -> interval: [first, 3ba, last]\n' in printed


def test_an_error_of_a_training_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError('out of memory')

    monkeypatch.setattr('composer.Trainer.fit', fail)
    with pytest.raises(RuntimeError, match='out of memory'):
        run_cli('train', training_file(tmp_path))
