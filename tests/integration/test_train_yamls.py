"""The training files of real size, reduced to a CPU; and their training text."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import forks
import numpy as np
import pytest
import tiny
import torch
from command_line import run_cli
from composer.utils import dist
from paths import ROOT
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from llmfoundry_gauntlet import ConfigError
from llmfoundry_gauntlet.composer.text_data import TokenRows, TrainDataConfig, load_tokens
from llmfoundry_gauntlet.composer.train import build_trainer, check_fsdp, read_training_config

sys.path.insert(0, str(ROOT / 'scripts'))

import make_demo_data

YAMLS = {'llama_125m': 123_587_328, 'llama_1b_fsdp': 1_114_982_400}  # and their parameters
SMALL = [
    'model.config.num_hidden_layers=2',
    'model.config.hidden_size=32',
    'model.config.intermediate_size=64',
    'model.config.num_attention_heads=2',
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
    return [
        *SMALL,
        f'tokenizer.name={data}/tokenizer',
        f'train_data.path=[{data}/train.jsonl]',
        f'train_data.cache={folder}/tokens',
        *(f'callbacks.eval_gauntlet.{key}={value}' for key, value in settings.items()),
        'callbacks.eval_gauntlet.subset_items=2',
        f'callbacks.eval_gauntlet.save_folder={folder}/gauntlet',
    ]


def written(folder: Path) -> dict[str, int]:
    """Return the evaluations of a training, and when their results were written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob('*/results.json')}


@pytest.mark.parametrize('name', YAMLS)
def test_files_have_the_parameters_and_tokens_they_state(name: str):
    path = ROOT / 'yamls/train' / f'{name}.yaml'
    config, lines = read_training_config(str(path), [])
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{'max_position_embeddings': config.max_seq_len, **config.model.config})
        )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == YAMLS[name] and f'{num_parameters:,} parameters' in path.read_text()
    batches = int(config.max_duration.removesuffix('ba'))
    tokens = batches * config.global_train_batch_size * config.max_seq_len
    assert 0 <= tokens / num_parameters - 20 < 0.01
    check_fsdp(config.fsdp_config, 'gpu')  # has keys that Composer knows
    assert config.precision == 'amp_bf16' and config.autoresume and not lines


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:The memory monitor only works on CUDA devices:UserWarning')
def test_llama_125m_trains_evaluates_and_resumes(tmp_path: Path, demo_data: Path):
    words = [
        str(ROOT / 'yamls/train/llama_125m.yaml'),
        *overrides(demo_data, tmp_path),
        'fsdp_config=null',
        f'save_folder={tmp_path}/checkpoints',
        'save_interval=2ba',
    ]
    assert run_cli('train', *words, 'max_duration=2ba') == 0
    first = written(tmp_path / 'gauntlet')
    assert sorted(first) == ['ba0', 'ba2']
    assert run_cli('train', *words, 'max_duration=4ba') == 0
    again = written(tmp_path / 'gauntlet')
    assert sorted(again) == ['ba0', 'ba2', 'ba4'] and again.items() >= first.items()
    record = json.loads((tmp_path / 'gauntlet/ba4/results.json').read_text())
    assert run_cli('train', *words, 'max_duration=4ba') == 0  # nothing is left to do
    assert written(tmp_path / 'gauntlet') == again
    assert record['training']['batch'] == 4 and record['training']['token'] == 4 * 4 * 128
    assert record['metrics']['gauntlet/unscored_items'] == 0


def train_sharded(out: Path, overrides: list[str]) -> None:
    """Train from the file on this CPU rank, and write what was sharded and checkpointed."""
    os.chdir(ROOT)
    tiny.shard_on_cpu()
    config, _ = read_training_config('yamls/train/llama_1b_fsdp.yaml', overrides, num_ranks=2)
    trainer = build_trainer(config)
    modules = [*trainer.state.model.modules()]
    units = [one.module for one in modules if isinstance(one, FullyShardedDataParallel)]
    checkpointed = [one._checkpoint_wrapped_module for one in modules if isinstance(one, CheckpointWrapper)]
    trainer.fit()
    trainer.close()
    found = {
        'units': sorted(type(one).__name__ for one in units),
        'checkpointed': sorted(type(one).__name__ for one in checkpointed),
        'batches': trainer.state.timestamp.batch.value,
        'loss': float(trainer.state.loss),
    }
    if dist.get_global_rank() == 0:
        out.write_text(json.dumps(found))


@pytest.mark.slow
def test_llama_1b_trains_sharded_with_its_blocks_checkpointed(tmp_path: Path, demo_data: Path):
    """Run two CPU ranks, which Composer does not support by itself.

    Mutation: with `use_cache` a recomputed block finds duplicate keys, and torch raises a CheckpointError.
    """
    words = [*overrides(demo_data, tmp_path), 'save_folder=null', 'autoresume=false', 'max_duration=3ba']
    forks.run(train_sharded, tmp_path / 'log.txt', tmp_path / 'found.json', words, num_ranks=2)
    found = json.loads((tmp_path / 'found.json').read_text())
    assert found['units'] == ['LlamaDecoderLayer', 'LlamaDecoderLayer', 'LlamaForCausalLM']
    assert found['checkpointed'] == ['LlamaDecoderLayer', 'LlamaDecoderLayer']
    assert found['batches'] == 3 and 0 < found['loss'] < 20
    records = [json.loads((tmp_path / f'gauntlet/ba{batch}/results.json').read_text()) for batch in (0, 2, 3)]
    assert all(record['metrics']['gauntlet/unscored_items'] == 0 for record in records)
    assert all(record['environment']['num_ranks'] == 2 for record in records)


def documents(folder: Path) -> tuple[TrainDataConfig, list[str]]:
    """Write two JSON Lines files, with documents of different lengths and an empty one, and a text file."""
    texts = ['one two', '', 'a line\nand one\u2028more', 'x' * 30, 'last.']
    for name, part in (('a', texts[:3]), ('b', texts[3:4])):
        tiny.write_rows(folder / f'{name}.jsonl', [{'text': text} for text in part])
    (folder / 'c.txt').write_text(texts[4])
    paths = tuple(str(folder / name) for name in ('a.jsonl', 'b.jsonl', 'c.txt'))
    return TrainDataConfig(path=paths, cache=str(folder / 'cache')), texts


@pytest.mark.parametrize('at_once', [1, 2, 1000])
def test_rows_are_those_of_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int):
    monkeypatch.setattr('llmfoundry_gauntlet.composer.text_data.DOCUMENTS_AT_ONCE', at_once)
    config, texts = documents(tmp_path)
    tokens, ends = load_tokens(config, tokenizer := tiny.tokenizer())
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint32
    wanted = [[*tokenizer(text)['input_ids'], tokenizer.eos_token_id] for text in texts]
    stream = [token for document in wanted for token in document]
    packed = TokenRows(tokens=tokens, ends=ends, length=8, packed=True)
    assert len(packed) == len(stream) // 8 and len(stream) % 8
    assert [packed[i].tolist() for i in range(len(packed))] == [stream[8 * i : 8 * i + 8] for i in range(len(packed))]
    single = TokenRows(tokens=tokens, ends=ends, length=8, packed=False)
    assert [single[i].tolist() for i in range(len(single))] == [document[:8] for document in wanted]
    assert single[0].dtype == np.int64


def test_text_is_tokenized_again_only_if_it_or_the_tokenizer_changed(tmp_path: Path):
    config, _ = documents(tmp_path)
    cache = Path(config.cache)

    load_tokens(config, tiny.tokenizer())
    (cache / next(iter(folders_of(cache)))).with_suffix('.unfinished').mkdir()  # left by a killed run
    before = folders_of(cache)
    load_tokens(config, tiny.tokenizer())
    assert folders_of(cache) == before
    changed = tiny.tokenizer()
    changed.add_tokens(['one'])
    load_tokens(config, changed)
    (tmp_path / 'c.txt').write_text('another')
    tokens, _ = load_tokens(config, tiny.tokenizer())
    assert len(folders_of(cache)) == len(before) + 2
    assert tiny.tokenizer().decode(tokens[-8:-1].tolist()) == 'another'


def folders_of(cache: Path) -> dict[str, int]:
    """Return the finished folders of a cache, and when their tokens were written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in cache.glob('*/tokens.uint32')}


@pytest.mark.parametrize(
    ('line', 'problem'),
    [('{"text": "x"', 'JSON'), ('{"txet": "x"}', 'text'), ('{"text": 3}', 'text'), ('["x"]', 'text')],
)
def test_a_wrong_line_is_an_error_and_caches_nothing(tmp_path: Path, line: str, problem: str):
    path = tmp_path / 'bad.jsonl'
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf'bad\.jsonl:2: .*{problem}'):
            load_tokens(TrainDataConfig(path=(str(path),)), tiny.tokenizer())
    with pytest.raises(ConfigError, match=r'gone\.jsonl'):
        load_tokens(TrainDataConfig(path=(str(tmp_path / 'gone.jsonl'),)), tiny.tokenizer())
