"""scripts/train.py: its data, and the mistakes in its file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from composer.loggers import FileLogger, MLFlowLogger, TensorboardLogger, WandBLogger
from paths import ROOT

from llmfoundry_gauntlet import ConfigError, GauntletError
from llmfoundry_gauntlet.config.yaml import read_yaml

sys.path.insert(0, str(ROOT / 'scripts'))

import train

pytestmark = pytest.mark.filterwarnings('ignore:.*optimizer.*:UserWarning')
DEMO = str(ROOT / 'yamls/train/demo.yaml')
TEXTS = ['one two', '', 'a line\nand one\u2028more', 'x' * 30, 'last.']


def training_file(folder: Path, **changes: Any) -> str:
    """Write a training file of four batches of a tiny Llama, and its data and tokenizer."""
    tiny.tokenizer().save_pretrained(folder / 'tokenizer')
    tiny.write_rows(folder / 'train.jsonl', [{'text': f'{i} and {i} are {2 * i}. '} for i in range(60)])
    values = {
        'tokenizer': str(folder / 'tokenizer'),
        'model': {
            'model_type': 'llama',
            'hidden_size': 16,
            'num_hidden_layers': 1,
            'num_attention_heads': 2,
            'intermediate_size': 32,
        },
        'train_data': data(folder / 'train.jsonl'),
        'optimizer': {'adamw': {'lr': 1e-3}},
        'scheduler': {'constant_with_warmup': {'t_warmup': '1ba'}},
        'max_duration': '4ba',
        'max_seq_len': 96,
        'global_train_batch_size': 2,
        'device': 'cpu',
        'run_name': 'tiny',
    }
    path = folder / 'train.yaml'
    path.write_text(yaml.safe_dump({**values, **changes}))
    return str(path)


def data(*paths: Path) -> dict[str, Any]:
    """Return the arguments of `load_dataset` for JSON lines; what is cached is beside the first file."""
    return {'path': 'json', 'data_files': [str(path) for path in paths], 'cache_dir': str(paths[0].parent / 'cache')}


def facts_are_in(problems: Sequence[str], *facts: tuple[str, ...]) -> bool:
    """Return whether there is one problem for each tuple of facts, and no other."""
    assert len(problems) == len(facts), problems
    return all(any(all(fact in problem for fact in wanted) for problem in problems) for wanted in facts)


def load(folder: Path, *paths: Path, row_length: int = 8) -> list[list[int]]:
    """Return the rows of token ids of the files."""
    config = {'train_data': data(*paths), 'max_seq_len': row_length}
    return [row['input_ids'].tolist() for row in train.load_rows(config, tiny.tokenizer())]


# Data.


def stream_of(texts: list[str]) -> list[int]:
    """Return the tokens of texts one after another, each text with an eos."""
    tokenizer = tiny.tokenizer()
    return [token for text in texts for token in [*tokenizer(text)['input_ids'], tokenizer.eos_token_id]]


def rows_of(stream: list[int], length: int) -> list[list[int]]:
    return [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]


@pytest.mark.parametrize('at_once', [1, 2, 1000])
def test_rows_are_those_of_the_whole_text_however_many_documents_come_at_once(at_once: int):
    packer = train.Packer(tiny.tokenizer(), row_length=8)

    rows = []
    for start in range(0, len(TEXTS), at_once):
        texts = TEXTS[start : start + at_once]
        rows += packer({'text': texts}, list(range(len(texts))))['input_ids']

    assert len(stream_of(TEXTS)) % 8  # the tokens after the last full row are dropped
    assert rows == rows_of(stream_of(TEXTS), 8)


def test_rows_of_several_files_are_those_of_one_text(tmp_path: Path):
    first = tiny.write_rows(tmp_path / 'a.jsonl', [{'text': text, 'source': 'web'} for text in TEXTS[:3]])
    second = tiny.write_rows(tmp_path / 'b.jsonl', [{'text': text, 'source': 'books'} for text in TEXTS[3:]])

    assert load(tmp_path, first, second) == rows_of(stream_of(TEXTS), 8)


def test_text_is_tokenized_again_only_if_it_or_the_row_length_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    num_calls = 0
    pack = train.Packer.__call__

    def counted(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return pack(*arguments)

    monkeypatch.setattr(train.Packer, '__call__', counted)
    path = tiny.write_rows(tmp_path / 'a.jsonl', [{'text': text} for text in TEXTS])

    assert load(tmp_path, path) == load(tmp_path, path)
    assert num_calls == 1
    load(tmp_path, path, row_length=9)
    assert num_calls == 2
    tiny.write_rows(path, [{'text': 'another text'}])
    assert load(tmp_path, path) == rows_of(stream_of(['another text']), 8)
    assert num_calls == 3


@pytest.mark.parametrize(
    ('line', 'facts'),
    [
        ('{"text": "x"', ('JSON',)),
        ('{"txet": "x"}', ('row 1', 'None')),
        ('{"text": null}', ('row 1', 'None')),
        ('["x"]', ('JSON',)),
    ],
)
def test_a_wrong_line_is_an_error_each_time(tmp_path: Path, line: str, facts: tuple[str, ...]):
    path = tmp_path / 'bad.jsonl'
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    for _ in range(2):
        with pytest.raises(ConfigError) as raised:
            load(tmp_path, path)
        assert facts_are_in(raised.value.problems, ('train_data', *facts))


def test_files_that_are_missing_or_have_no_text_are_errors(tmp_path: Path):
    with pytest.raises(ConfigError, match=r'train_data: .*gone\.jsonl'):
        load(tmp_path, tmp_path / 'gone.jsonl')
    path = tiny.write_rows(tmp_path / 'a.jsonl', [{'content': 'one two'}])
    with pytest.raises(ConfigError, match=r"train_data: has no column 'text'"):
        load(tmp_path, path)


# Training.


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.state.model.model.state_dict().items()}


def trained(path: str) -> dict[str, torch.Tensor]:
    trainer = train.build_trainer(read_yaml(path))
    trainer.fit()
    trainer.close()
    return weights_of(trainer)


@pytest.mark.slow
def test_a_training_is_the_same_each_time(tmp_path: Path):
    path = training_file(tmp_path)
    first, second = trained(path), trained(path)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    other = trained(training_file(tmp_path, seed=18))
    assert not torch.equal(first['lm_head.weight'], other['lm_head.weight'])


def test_a_training_can_start_from_weights(tmp_path: Path):
    path = training_file(tmp_path)
    start = train.build_trainer(read_yaml(path))
    start.state.model.model.save_pretrained(tmp_path / 'start')

    again = train.build_trainer(read_yaml(training_file(tmp_path, model=str(tmp_path / 'start'), seed=18)))

    assert all(torch.equal(value, weights_of(again)[name]) for name, value in weights_of(start).items())
    start.close()
    again.close()


def test_an_error_of_a_training_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError('out of memory')

    monkeypatch.setattr('composer.Trainer.fit', fail)
    with pytest.raises(RuntimeError, match='out of memory'):
        train.main([training_file(tmp_path)])


# The user's mistakes.


def test_all_keys_and_sections_are_checked_at_once(tmp_path: Path):
    path = training_file(
        tmp_path,
        max_duration=40,
        global_train_batch_size='eight',
        max_seq_length=64,
        optimizer={'adamw': {'lr': 1e-3}, 'sgd': {}},
        scheduler={'cosine_with_warmups': {'t_warmup': '1ba'}},
        loggers={'tensorbord': {}},
        callbacks={'eval_gauntlet': {'tasks': f'{tmp_path}/tasks.yaml', 'interval': '1iter'}},
        tokenizer=None,
    )
    with pytest.raises(GauntletError) as raised:
        train.build_trainer(read_yaml(path))
    assert facts_are_in(
        raised.value.problems,
        ("'tokenizer' is missing",),
        ('max_duration', 'is 40'),
        ('global_train_batch_size', "'eight'"),
        ("unknown key 'max_seq_length'", 'max_seq_len'),
        ('optimizer', 'names 2'),
        ("scheduler: unknown key 'cosine_with_warmups'", 'cosine_with_warmup'),
        ("loggers: unknown key 'tensorbord'", 'tensorboard'),
        ('interval', "'1iter'"),
        ('tasks.yaml', 'no such file'),
    )


@pytest.mark.parametrize(
    ('changes', 'facts'),
    [
        ({'model': {'hidden_size': 96}}, ('model', 'model_type')),
        ({'model': {'model_type': 'lama'}}, ('model', 'lama')),
        ({'model': 'nowhere/at/all'}, ('model', 'nowhere/at/all')),
        ({'tokenizer': 'nowhere/at/all'}, ('tokenizer', 'nowhere/at/all')),
        ({'optimizer': {'adamw': {'lrr': 1e-3}}}, ("optimizer.adamw: unknown key 'lrr'", "did you mean 'lr'")),
        ({'optimizer': {'adamw': {'lr': -1.0}}}, ('optimizer.adamw', '-1.0')),
        ({'optimizer': {'adamw': {'betas': [0.9]}}}, ('optimizer.adamw',)),
        ({'optimizer': 'adamw'}, ("optimizer: is 'adamw'", 'mapping')),
        ({'scheduler': {'constant_with_warmup': {}}}, ('scheduler.constant_with_warmup', 't_warmup')),
        ({'callbacks': {'lr_monitor': 3}}, ('callbacks.lr_monitor: is 3', 'mapping')),
        ({'callbacks': {'eval_gauntlet': {'taks': []}}}, ("'taks'", 'tasks')),
        ({'precision': 'fp12'}, ('fp12',)),
        ({'device': 'abacus'}, ('abacus',)),
        ({'fsdp_config': {}}, ('fsdp_config', 'GPUs only')),
        ({'fsdp_config': 'FULL_SHARD'}, ("fsdp_config: is 'FULL_SHARD'", 'mapping')),
        ({'max_seq_len': 100_000}, ('train_data', '0 rows')),
        ({'global_train_batch_size': 10_000}, ('train_data', 'rows', 'one batch')),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], facts: tuple[str, ...]
):
    status = train.main([training_file(tmp_path, **changes)])

    *_, line = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith('error: ') and all(fact in line for fact in facts)


def test_unknown_keys_of_sharding_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    with pytest.raises(ConfigError) as raised:
        train.check_sharding({'fsdp_config': {'sharding': 'FULL_SHARD'}})
    assert facts_are_in(raised.value.problems, ("fsdp_config: unknown key 'sharding'", 'sharding_strategy'))


def test_a_file_that_is_missing_or_no_yaml_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / 'bad.yaml').write_text('a: [')
    for name in ('none.yaml', 'bad.yaml', 'x' * 5000):
        assert train.main([str(tmp_path / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f'error: {tmp_path}'[:50])


@pytest.mark.parametrize(
    ('override', 'facts'),
    [
        ('max_duration=40', ('max_duration: is 40', '40ba')),
        ('max_duration=forty', ("is 'forty'", '40ba')),
        ('max_duration=0.5dur', ("is '0.5dur'", '40ba')),  # a share of itself
        ('max_duration=0ba', ("is '0ba'", 'above 0')),
        ('max_duration=1.5ba', ("is '1.5ba'", '40ba')),
        ('save_interval=500', ('save_interval: is 500', '40ba')),
        ('console_log_interval=10', ('console_log_interval: is 10', '40ba')),
    ],
)
def test_a_time_without_its_unit_is_an_error_that_shows_one(override: str, facts: tuple[str, ...]):
    with pytest.raises(ConfigError) as raised:
        train.check_keys(read_yaml(DEMO, [override]))
    assert facts_are_in(raised.value.problems, facts)


def test_each_logger_is_built_by_name_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # where MLflow keeps its own files
    chosen = {
        'tensorboard': None,
        'file': {'filename': 'log.txt'},
        'wandb': {'project': 'p'},
        'mlflow': {'tracking_uri': str(tmp_path / 'mlflow')},
    }
    tensorboard, file, wandb_logger, mlflow = train.build('loggers', {'loggers': chosen})
    assert isinstance(tensorboard, TensorboardLogger)
    assert isinstance(file, FileLogger) and file.filename_format == 'log.txt'
    assert isinstance(wandb_logger, WandBLogger) and wandb_logger._init_kwargs['project'] == 'p'
    assert isinstance(mlflow, MLFlowLogger)
    assert train.build('loggers', {}) == []


@pytest.mark.parametrize('chosen', ['mlflow', ['mlflow'], 3, True])
def test_loggers_that_are_no_mapping_are_an_error(chosen: Any):
    with pytest.raises(ConfigError, match=r'loggers: is .*; allowed: a mapping with file, mlflow'):
        train.build('loggers', {'loggers': chosen})


@pytest.mark.parametrize(
    ('name', 'library'), [('wandb', 'wandb'), ('mlflow', 'mlflow'), ('tensorboard', 'torch.utils.tensorboard')]
)
def test_a_logger_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str, library: str):
    monkeypatch.setitem(sys.modules, library, None)  # as Python has it where an import fails
    with pytest.raises(ConfigError, match=rf'loggers.{name}: .*pip install'):
        train.build('loggers', {'loggers': {name: {}}})
