"""The training files of real size, trained by scripts/train.py on CPUs with small models."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import composer_training
import forks
import pytest
import tiny
import torch
from composer.utils import FSDPConfig, dist
from paths import ROOT
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from llmfoundry_gauntlet.config.yaml import read_yaml

sys.path.insert(0, str(ROOT / 'scripts'))

import make_demo_data
import train

YAMLS = {'llama_125m': 123_587_328, 'llama_1b_fsdp': 1_114_982_400}  # and their parameters
SMALL = [
    'model.num_hidden_layers=2',
    'model.hidden_size=32',
    'model.intermediate_size=64',
    'model.num_attention_heads=2',
    'max_seq_len=128',
    'global_train_batch_size=4',
    'device_train_microbatch_size=2',
    'precision=fp32',
    'device=cpu',
    'log_to_console=false',
    'callbacks.eval_gauntlet.interval=[first,2ba,last]',
    'callbacks.eval_gauntlet.score=null',
    'callbacks.eval_gauntlet.time_budget=null',
]


@pytest.fixture(scope='module')
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('data')
    make_demo_data.make_demo_data(out=folder, eval_data=ROOT / 'eval_data')
    return folder


def overrides(data: Path, folder: Path) -> list[str]:
    """Return overrides for demo data, a tiny model, and tiny tasks instead of the whole Gauntlet."""
    settings = tiny.write_tasks(folder)
    (folder / 'riddles.yaml').write_text(json.dumps({'icl_tasks': tiny.write_riddles(folder)}))
    settings['tasks'] = f'[{settings["tasks"]},{folder}/riddles.yaml]'
    of_callback = [f'callbacks.eval_gauntlet.{key}={value}' for key, value in settings.items()]
    return [
        *SMALL,
        f'tokenizer={data}/tokenizer',
        f'train_data.data_files=[{data}/train.jsonl]',
        f'train_data.cache_dir={folder}/cache',
        *of_callback,
        'callbacks.eval_gauntlet.subset_items=2',
        f'callbacks.eval_gauntlet.save_folder={folder}/gauntlet',
    ]


def written(folder: Path) -> dict[str, int]:
    """Return the evaluations of a training, and when their results were written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob('*/results.json')}


@pytest.mark.parametrize('name', YAMLS)
def test_files_have_the_parameters_and_tokens_they_state(name: str):
    path = ROOT / 'yamls/train' / f'{name}.yaml'
    config = read_yaml(path)
    max_seq_len = config['max_seq_len']

    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{'max_position_embeddings': max_seq_len, **config['model']})
        )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_batches = int(config['max_duration'].removesuffix('ba'))
    num_tokens = num_batches * config['global_train_batch_size'] * max_seq_len

    assert num_parameters == YAMLS[name]
    assert f'{num_parameters:,} parameters' in path.read_text()
    assert 0 <= num_tokens / num_parameters - 20 < 0.01


@pytest.mark.parametrize('name', [*YAMLS, 'demo'])
def test_files_have_keys_that_the_script_and_composer_know(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    config = read_yaml(f'yamls/train/{name}.yaml')

    parts = train.build_parts(config)
    train.build('optimizer', config, params=[torch.nn.Parameter(torch.zeros(1))])
    train.call('fsdp_config', FSDPConfig, config.get('fsdp_config'))

    assert [type(part).__name__ for part in parts['callbacks']][-1] == 'EvalGauntlet'


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:The memory monitor only works on CUDA devices:UserWarning')
@pytest.mark.filterwarnings('ignore:The number of tokens in the tokenizer is less than:UserWarning')
def test_llama_125m_trains_evaluates_and_resumes(tmp_path: Path, demo_data: Path):
    words = [
        str(ROOT / 'yamls/train/llama_125m.yaml'),
        *overrides(demo_data, tmp_path),
        'fsdp_config=null',
        f'save_folder={tmp_path}/checkpoints',
        'save_interval=2ba',
    ]

    assert train.main([*words, 'max_duration=2ba']) == 0
    evaluations_of_2 = written(tmp_path / 'gauntlet')
    assert train.main([*words, 'max_duration=4ba']) == 0
    evaluations_of_4 = written(tmp_path / 'gauntlet')
    assert train.main([*words, 'max_duration=4ba']) == 0  # nothing is left to do

    assert sorted(evaluations_of_2) == ['ba0', 'ba2']
    assert sorted(evaluations_of_4) == ['ba0', 'ba2', 'ba4']
    assert evaluations_of_4.items() >= evaluations_of_2.items()
    assert written(tmp_path / 'gauntlet') == evaluations_of_4
    record = json.loads((tmp_path / 'gauntlet/ba4/results.json').read_text())
    assert record['training']['batch'] == 4
    assert record['training']['token'] == 4 * 4 * 128
    assert record['metrics']['gauntlet/unscored_items'] == 0


def train_sharded(out: Path, overrides: list[str]) -> None:
    """Train from the file on this CPU rank, and write what was sharded and checkpointed."""
    os.chdir(ROOT)
    composer_training.shard_on_cpu()
    trainer = train.build_trainer(read_yaml('yamls/train/llama_1b_fsdp.yaml', overrides))
    modules = [*trainer.state.model.modules()]
    units = [module.module for module in modules if isinstance(module, FullyShardedDataParallel)]
    checkpointed = [module._checkpoint_wrapped_module for module in modules if isinstance(module, CheckpointWrapper)]
    trainer.fit()
    trainer.close()
    training = {
        'units': sorted(type(unit).__name__ for unit in units),
        'checkpointed': sorted(type(block).__name__ for block in checkpointed),
        'batches': trainer.state.timestamp.batch.value,
        'loss': float(trainer.state.loss),
    }
    if dist.get_global_rank() == 0:
        out.write_text(json.dumps(training))


@pytest.mark.slow
def test_llama_1b_trains_sharded_with_its_blocks_checkpointed(tmp_path: Path, demo_data: Path):
    """Run two CPU ranks, which Composer does not support by itself.

    Mutation: with `use_cache` a recomputed block finds duplicate keys, and torch raises a CheckpointError.
    """
    words = [*overrides(demo_data, tmp_path), 'save_folder=null', 'autoresume=false', 'max_duration=3ba']

    forks.run(train_sharded, tmp_path / 'log.txt', tmp_path / 'training.json', words, num_ranks=2)

    training = json.loads((tmp_path / 'training.json').read_text())
    assert training['units'] == ['LlamaDecoderLayer', 'LlamaDecoderLayer', 'LlamaForCausalLM']
    assert training['checkpointed'] == ['LlamaDecoderLayer', 'LlamaDecoderLayer']
    assert training['batches'] == 3
    assert 0 < training['loss'] < 20
    records = [json.loads((tmp_path / f'gauntlet/ba{batch}/results.json').read_text()) for batch in (0, 2, 3)]
    assert all(record['metrics']['gauntlet/unscored_items'] == 0 for record in records)
    assert all(record['environment']['num_ranks'] == 2 for record in records)
