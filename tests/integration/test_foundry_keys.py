"""`gauntlet eval` on llm-foundry's keys, with real models."""

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
