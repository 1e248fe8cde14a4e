"""Train a causal language model on text with Composer and the callback EvalGauntlet; an example to copy.

    python scripts/make_demo_data.py
    composer -n 2 scripts/train.py yamls/train/demo.yaml [key=value ...]

The keys of the file are those of `SECTIONS` and `OWN_KEYS`, and any other argument of Composer's Trainer. Mistakes in
the file end the job with status 2 and a line each; errors of the training keep their traceback.
"""

import argparse
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from composer import Trainer, algorithms, callbacks, loggers
from composer.core import State, Time, TimeUnit
from composer.models import HuggingFaceModel
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    LinearWithWarmupScheduler,
)
from composer.utils import FSDPConfig, dist, reproducibility
from datasets import Dataset, Features, Sequence, Value, disable_progress_bars, load_dataset
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DatasetsError
from filelock import FileLock
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from llmfoundry_gauntlet import ConfigError, EvalGauntlet, GauntletError
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.errors import Collected, print_problems, suggestion
from llmfoundry_gauntlet.results.report.printing import print_runs

Named = Mapping[str, Callable[..., Any]]


class WarmupStableDecayScheduler(ComposerScheduler):
    """Linear warmup, then constant, then linear decay to `alpha_f` over the last `decay_share` of the training."""

    def __init__(self, *, t_warmup: str, alpha_f: float = 0.0, decay_share: float = 0.4) -> None:
        self.warmup = ConstantWithWarmupScheduler(t_warmup=t_warmup)
        self.alpha_f = alpha_f
        self.decay_share = decay_share

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the multiplier of the learning rate at this point of the training."""
        elapsed = state.get_elapsed_duration()
        share_left = 1.0 if elapsed is None else 1.0 - elapsed.value
        decay = min(1.0, share_left / self.decay_share)
        return self.warmup(state, ssr) * (self.alpha_f + (1.0 - self.alpha_f) * decay)


# Classes that a section of the file may name; below each name are its arguments. Add what you need.
SECTIONS: dict[str, Named] = {
    'optimizer': {
        'adamw': torch.optim.AdamW,
        'decoupled_adamw': DecoupledAdamW,
    },
    'scheduler': {
        'constant_with_warmup': ConstantWithWarmupScheduler,
        'cosine_with_warmup': CosineAnnealingWithWarmupScheduler,
        'linear_decay_with_warmup': LinearWithWarmupScheduler,
        'warmup_stable_decay': WarmupStableDecayScheduler,
    },
    'algorithms': {
        'gradient_clipping': algorithms.GradientClipping,
    },
    'callbacks': {
        'eval_gauntlet': EvalGauntlet,
        'lr_monitor': callbacks.LRMonitor,
        'memory_monitor': callbacks.MemoryMonitor,
        'nan_monitor': callbacks.NaNMonitor,
        'optimizer_monitor': callbacks.OptimizerMonitor,
        'runtime_estimator': callbacks.RuntimeEstimator,
        'speed_monitor': callbacks.SpeedMonitor,
    },
    'loggers': {
        'file': loggers.FileLogger,
        'mlflow': loggers.MLFlowLogger,
        'tensorboard': loggers.TensorboardLogger,
        'wandb': loggers.WandBLogger,
    },
}
OWN_KEYS = (
    'tokenizer',  # a folder, or a name on the Hugging Face hub
    'model',  # weights to start from, as for the tokenizer; or the values of a new model's configuration
    'train_data',  # arguments of `datasets.load_dataset`; its rows have a column `text`
    'max_seq_len',  # tokens of a row
    'global_train_batch_size',  # rows of all ranks
    'cpu_threads',  # of each rank; null: as the launcher sets them
    'progress_bar',
    'fsdp_config',  # arguments of Composer's FSDPConfig; null: the model is not sharded
)
REQUIRED = ('tokenizer', 'model', 'train_data', 'optimizer', 'max_duration', 'max_seq_len', 'global_train_batch_size')
COUNTS = ('max_seq_len', 'global_train_batch_size', 'cpu_threads')
TIMES = ('max_duration', 'save_interval', 'console_log_interval')
# Arguments of the Trainer that the file gives as they are; the others are made here.
MADE_HERE = {'model', 'train_dataloader', 'optimizers', 'schedulers', 'parallelism_config', 'progress_bar', *SECTIONS}
TRAINER_KEYS = tuple(name for name in inspect.signature(Trainer).parameters if name not in MADE_HERE)
DEFAULTS = {
    'seed': 17,
    'dist_timeout': 900.0,  # seconds; longer than the gauntlet's stall_seconds, which reports a hanging rank
}


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise ConfigError with every problem of the keys at the top."""
    problems = unknown_keys('', config, [*OWN_KEYS, *SECTIONS, *TRAINER_KEYS])
    given = {key: value for key, value in config.items() if value is not None}
    problems += [f"the key '{key}' is missing" for key in REQUIRED if key not in given]
    for key in COUNTS:
        if key in given and (type(given[key]) is not int or given[key] < 1):
            problems.append(f'{key}: is {given[key]!r}; allowed: a whole number above 0')
    for key in TIMES:
        if key in given and not is_time(key, given[key]):
            problems.append(f'{key}: is {given[key]!r}; allowed: a number above 0 and its unit: 40ba, 2ep, 1000000tok')
    for section in ('optimizer', 'scheduler'):
        if isinstance(given.get(section), Mapping) and len(given[section]) != 1:
            problems.append(f'{section}: names {len(given[section])}; allowed: one of {", ".join(SECTIONS[section])}')
    if problems:
        raise ConfigError(problems)


def is_time(key: str, value: Any) -> bool:
    """Return whether a value is a time of Composer's above 0; without a unit, Composer would take it as epochs."""
    try:
        time = Time.from_timestring(value) if isinstance(value, str) else None
    except (TypeError, ValueError):
        return False
    is_share_of_itself = time is not None and key == 'max_duration' and time.unit == TimeUnit.DURATION
    return time is not None and time.value > 0 and not is_share_of_itself


def unknown_keys(where: str, given: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """Return a problem for each key that is not allowed."""
    known = list(allowed)
    return [f"{where}unknown key '{key}'{suggestion(str(key), known)}" for key in given if key not in known]


def call(where: str, function: Callable[..., Any], chosen: Mapping[str, Any] | None = None, **given: Any) -> Any:
    """Return what a function returns for arguments from the file. Raise ConfigError naming their place there."""
    if not isinstance(chosen, (Mapping, NoneType)):
        raise ConfigError(f'{where}: is {chosen!r}; allowed: a mapping')
    arguments = chosen or {}
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    problems = [] if takes_any else unknown_keys(f'{where}: ', arguments, parameters.keys() - given.keys())
    if problems:
        raise ConfigError(problems)
    try:
        return function(**given, **arguments)
    except DatasetsError as error:  # its cause has the reason
        raise ConfigError(f'{where}: {error}: {error.__cause__}') from error
    except (ImportError, LookupError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f'{where}: {error}') from error


def build(section: str, config: Mapping[str, Any], **given: Any) -> list[Any]:
    """Return an object for each name in a section of the file. Raise ConfigError."""
    known = SECTIONS[section]
    chosen = config.get(section) or {}
    if not isinstance(chosen, Mapping):
        raise ConfigError(f'{section}: is {chosen!r}; allowed: a mapping with {", ".join(known)}')
    problems = unknown_keys(f'{section}: ', chosen, known)
    if problems:
        raise ConfigError(problems)
    return [call(f'{section}.{name}', known[name], arguments, **given) for name, arguments in chosen.items()]


class Packer:
    """Turns documents into rows of equal length: all of their tokens one after another, each document with an eos."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, row_length: int) -> None:
        self.tokenizer = tokenizer
        self.row_length = row_length
        self.remainder: list[int] = []  # tokens of earlier documents that do not fill a row

    def __call__(self, documents: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[list[int]]]:
        """Return the next rows. Raise ConfigError for a document that is no text."""
        texts = documents['text']
        for index, text in zip(indices, texts, strict=True):
            if not isinstance(text, str):
                raise ConfigError(f'train_data: row {index} has the text {text!r}; allowed: text')

        eos = self.tokenizer.eos_token_id
        tokens = list(self.remainder)
        for document_tokens in self.tokenizer(texts, verbose=False)['input_ids']:
            tokens += document_tokens
            if eos is not None:
                tokens.append(eos)

        num_rows = len(tokens) // self.row_length
        starts = [row * self.row_length for row in range(num_rows)]
        self.remainder = tokens[num_rows * self.row_length :]
        return {'input_ids': [tokens[start : start + self.row_length] for start in starts]}


def load_rows(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return the training text as rows of token ids. Raise ConfigError.

    The first rank to get the lock makes them, the others find them in the cache of `datasets`, as a later job does.
    """
    cache = Path(HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / 'scripts_train.lock'):  # not a barrier, which would time out on a large text
        documents = call('train_data', partial(load_dataset, split='train'), config['train_data'])
        if not isinstance(documents, Dataset) or 'text' not in documents.column_names:
            raise ConfigError("train_data: has no column 'text'; give the path and split of a dataset that has one")
        rows = documents.map(
            Packer(tokenizer, config['max_seq_len']),
            batched=True,
            with_indices=True,
            remove_columns=documents.column_names,
            features=Features({'input_ids': Sequence(Value('int32'))}),
        )
    return rows.with_format('torch')


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of rows; the model shifts the labels."""
    input_ids = torch.stack([row['input_ids'] for row in rows])
    return {'input_ids': input_ids, 'attention_mask': torch.ones_like(input_ids), 'labels': input_ids.clone()}


def build_dataloader(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> DataLoader[Any]:
    """Return this rank's rows, in an order that depends only on the seed and the epoch. Raise ConfigError."""
    batch_size = config['global_train_batch_size']
    num_ranks = dist.get_world_size()
    if batch_size % num_ranks:
        raise ConfigError(f'global_train_batch_size: {batch_size} is no multiple of the {num_ranks} ranks')
    rows = load_rows(config, tokenizer)
    if len(rows) < batch_size:
        raise ConfigError(f'train_data: {len(rows)} rows of {config["max_seq_len"]} tokens do not fill one batch')
    sampler = dist.get_sampler(rows, shuffle=True, drop_last=True, seed=config['seed'])
    return DataLoader(rows, batch_size // num_ranks, sampler=sampler, collate_fn=collate, drop_last=True)


def build_model(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> HuggingFaceModel:
    """Return the model, its weights drawn from torch's default generator unless they are loaded. Raise ConfigError."""
    if isinstance(config['model'], str):
        network = call('model', AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path=config['model'])
    else:
        defaults = {
            'vocab_size': len(tokenizer),
            'max_position_embeddings': config['max_seq_len'],
            'bos_token_id': tokenizer.bos_token_id,
            'eos_token_id': tokenizer.eos_token_id,
            'pad_token_id': tokenizer.pad_token_id,
        }
        values = call('model', partial(AutoConfig.for_model, **defaults), config['model'])
        network = AutoModelForCausalLM.from_config(values)
    model: HuggingFaceModel = call('model', HuggingFaceModel, model=network, tokenizer=tokenizer, shift_labels=True)
    return model


def check_sharding(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys of `fsdp_config` that Composer ignores, and on a CPU, where it cannot shard."""
    chosen = config.get('fsdp_config')
    if not isinstance(chosen, Mapping):
        return  # `call` says what is wrong
    problems = unknown_keys('fsdp_config: ', chosen, [field.name for field in fields(FSDPConfig) if field.init])
    if config.get('device') == 'cpu' or not torch.cuda.is_available():
        problems.append('fsdp_config: Composer shards models over GPUs only; leave it out')
    if problems:
        raise ConfigError(problems)


def mark_blocks(network: Any) -> None:
    """Mark each transformer block as a unit that Composer shards and, if asked to, checkpoints."""
    # Private names of transformers 4.53 and mosaicml 0.32.1: `_no_split_modules`, `_fsdp_wrap` and
    # `_activation_checkpointing` in docs/compatibility.md.
    for module in network.modules():
        if type(module).__name__ in (network._no_split_modules or ()):
            module._fsdp_wrap = True
            module._activation_checkpointing = True


def build_parts(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what can be built without the model, by section. Raise GauntletError with the problems of all sections."""
    collected = Collected()
    parts: dict[str, list[Any]] = {}
    with collected:
        check_keys(config)
    for section in SECTIONS:
        if section != 'optimizer':  # which needs the weights
            with collected:
                parts[section] = build(section, config)
    collected.raise_all()
    return parts


def build_trainer(config: Mapping[str, Any]) -> Trainer:
    """Return the Trainer; the weights of a new model depend only on the seed. Raise GauntletError."""
    # Before the model, so that mistakes in tasks and data end the job at once.
    parts = build_parts(config)
    config = DEFAULTS | {key: value for key, value in config.items() if value is not None}
    if 'cpu_threads' in config:
        torch.set_num_threads(config['cpu_threads'])
    tokenizer = call('tokenizer', AutoTokenizer.from_pretrained, pretrained_model_name_or_path=config['tokenizer'])
    dataloader = build_dataloader(config, tokenizer)

    reproducibility.seed_all(config['seed'])
    model = build_model(config, tokenizer)
    parallelism = None
    if 'fsdp_config' in config:
        fsdp = call('fsdp_config', FSDPConfig, config['fsdp_config'])
        parallelism = {'fsdp': fsdp}
        mark_blocks(model.model)
        if fsdp.activation_checkpointing:
            model.model.config.use_cache = False  # a recomputed block would append its keys to the cache twice
    (optimizer,) = build('optimizer', config, params=model.parameters())
    progress_bar = config.get('progress_bar', True) and sys.stderr.isatty()  # a log file would have thousands of lines
    trainer: Trainer = call(
        'Trainer',
        Trainer,
        {key: config[key] for key in TRAINER_KEYS if key in config},
        model=model,
        train_dataloader=dataloader,
        optimizers=optimizer,
        schedulers=parts['scheduler'],
        algorithms=parts['algorithms'],
        callbacks=parts['callbacks'],
        loggers=parts['loggers'],
        progress_bar=progress_bar,
        parallelism_config=parallelism,
    )
    return trainer


def print_evaluations(trainer: Trainer) -> None:
    """Print the scores of all evaluations, and the folders of records and checkpoints."""
    for callback in trainer.state.callbacks:
        if isinstance(callback, EvalGauntlet) and callback.gauntlet.folder is not None:
            print_runs(callback.gauntlet.folder)
        if isinstance(callback, callbacks.CheckpointSaver):
            print(f'checkpoints: {callback.folder}')


def train(config: Mapping[str, Any]) -> None:
    """Train and print the scores. Raise GauntletError for the user's mistakes."""
    check_sharding(config)
    trainer = build_trainer(config)
    state = trainer.state
    if state.max_duration is not None and state.timestamp >= state.max_duration:  # `fit` would raise an error
        print(f'nothing is left to train: the checkpoint is of batch {state.timestamp.batch.value}')
    else:
        trainer.fit()
    trainer.close()
    if dist.get_global_rank() == 0:
        print_evaluations(trainer)


def main(words: list[str]) -> int:
    """Train from the file and overrides of a command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('file', help='a YAML file, such as yamls/train/demo.yaml')
    parser.add_argument('overrides', nargs='*', metavar='key=value', help='such as max_duration=100ba')
    arguments = parser.parse_args(words)
    logging.basicConfig(format='%(message)s')
    if not sys.stderr.isatty():
        disable_progress_bars()
    if dist.get_global_rank() == 0:
        logging.getLogger('llmfoundry_gauntlet').setLevel(logging.INFO)
    try:
        train(read_yaml(arguments.file, arguments.overrides))
    except GauntletError as error:
        print_problems(error)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
