"""Evaluation without training: a Trainer that only evaluates, with the same callback."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import Precision
from composer.loggers import LoggerDestination
from composer.utils import FSDPConfig, dist

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.composer.journal import Resuming
from llmfoundry_gauntlet.composer.loggers import join_run
from llmfoundry_gauntlet.composer.loop import longest_prompt
from llmfoundry_gauntlet.composer.models import (
    ModelSource,
    check_vocabulary,
    composer_model,
    mark_blocks_for_fsdp,
    open_model,
)
from llmfoundry_gauntlet.config.settings import plain
from llmfoundry_gauntlet.config.yaml import Problems, decode_value, describe, suggestion
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.files import check_out
from llmfoundry_gauntlet.tasks.encode import Encoder

DEVICES = ('cpu', 'gpu')
ARGUMENT_TYPES: dict[str, Any] = {  # of `evaluate`
    'model': str,
    **dict.fromkeys(('out', 'tokenizer', 'model_config', 'device', 'precision', 'run_name'), str | None),
    **dict.fromkeys(('overwrite', 'resume', 'repair_journal'), bool),
}
TRAINING_KEYS = ('interval', 'save_folder')  # settings without effect outside of training
DIST_TIMEOUT = 900.0  # seconds, for a new process group: longer than the watchdog's


def evaluate(
    model: str | Path,
    *,
    out: str | Path | None = None,
    tokenizer: str | None = None,
    model_config: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    fsdp_config: Mapping[str, Any] | None = None,
    loggers: Sequence[LoggerDestination] = (),
    run_name: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    repair_journal: bool = False,
    **settings: Any,
) -> Evaluation:
    """Evaluate a Composer checkpoint, or a Hugging Face folder or name; write results.json and samples to `out`.

    `settings` are the fields of EvaluationSettings except `interval` and `save_folder`. `device` is 'cpu' or 'gpu', by
    default a GPU if there is one; `precision` one of Composer's, by default fp32 on a CPU and amp_bf16 on a GPU.
    `fsdp_config` has the keys of Composer's FSDPConfig and shards the model over GPUs. `loggers` get the metrics at the
    training step of a checkpoint, as the run `run_name`.
    `resume` continues an interrupted evaluation, on any number of ranks; records of another model or other settings in
    `out` are an error. `repair_journal` drops damaged lines of its journal.
    Works on all ranks of the `composer` launcher. Raise GauntletError.
    """
    arguments: dict[str, Any] = {
        'tokenizer': tokenizer,
        'model_config': model_config,
        'device': device,
        'precision': precision,
        'fsdp_config': fsdp_config,
        'loggers': loggers,
        'run_name': run_name,
        'overwrite': overwrite,
        'resume': resume,
        'repair_journal': repair_journal,
    }
    with opened(model, out=out, **arguments, **settings) as (trainer, callback):
        trainer.eval()
    dist.barrier()
    if callback.evaluation is None:
        raise RuntimeError('the evaluation ended without a result')
    return callback.evaluation


@contextmanager
def opened(
    model: str | Path,
    *,
    out: str | Path | None = None,
    tokenizer: str | None = None,
    model_config: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    fsdp_config: Mapping[str, Any] | None = None,
    loggers: Sequence[LoggerDestination] = (),
    run_name: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    repair_journal: bool = False,
    **settings: Any,
) -> Iterator[tuple[Trainer, EvalGauntlet]]:
    """Return a Trainer with the model and its callback, ready to evaluate; closed when the context ends.

    The arguments are those of `evaluate` and are checked here.
    """
    given: dict[str, Any] = {'model': model, 'out': out, 'tokenizer': tokenizer, 'model_config': model_config}
    given |= {'device': device, 'precision': precision, 'run_name': run_name, 'overwrite': overwrite}
    problems = Problems('evaluate')
    check_arguments({**given, 'resume': resume, 'repair_journal': repair_journal, **settings}, problems)
    if problems.found:
        raise ConfigError(problems.found)
    device = device or default_device()
    precision = precision or ('fp32' if device == 'cpu' else 'amp_bf16')
    check_device(device)
    check_precision(precision, device)
    check_fsdp(fsdp_config, device)
    if repair_journal and not resume:
        raise ConfigError('repair_journal has no effect without resume')
    if out is None and resume:
        raise ConfigError('resume needs out, the folder of the interrupted evaluation')
    if out is not None:
        check_out(Path(out), overwrite=overwrite, resume=resume)
    callback = EvalGauntlet(**settings, save_folder=None if out is None else str(out))
    callback.resuming = Resuming(wanted=resume, required=True, repair=repair_journal)
    dist.initialize_dist(device, timeout=DIST_TIMEOUT)
    with open_model(str(model), tokenizer=tokenizer, model_config=model_config) as source:
        check_fit(callback, source)
        callback.source = source
        trainer = make_trainer(
            source,
            callbacks=[callback],
            loggers=[join_run(destination) for destination in loggers],
            run_name=run_name,
            device=device,
            precision=precision,
            parallelism_config=None if fsdp_config is None else {'fsdp': dict(fsdp_config)},
        )
    try:
        yield trainer, callback
    finally:
        trainer.engine.close()  # not `trainer.close`, in which ranks wait for each other, also after an error


def make_trainer(
    source: ModelSource, *, device: str, parallelism_config: dict[str, Any] | None, **arguments: Any
) -> Trainer:
    """Return a Trainer at the checkpoint's timestamp, so that loggers get its step."""
    is_whole_on_gpu = device == 'gpu' and parallelism_config is None  # a model to be sharded is loaded to the host
    network = source.load(torch.device('cuda', dist.get_local_rank()) if is_whole_on_gpu else torch.device('cpu'))
    if parallelism_config is not None:
        mark_blocks_for_fsdp(network)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='No optimizer was specified')
        trainer = Trainer(
            model=composer_model(network, source.tokenizer),
            device=device,
            parallelism_config=parallelism_config,
            progress_bar=False,
            **arguments,
        )
    if source.timestamp is not None:
        trainer.state.timestamp = source.timestamp
    return trainer


def check_arguments(values: Mapping[str, Any], problems: Problems) -> None:
    """Add arguments of `evaluate` to `problems` that have the wrong type, are empty, or only apply in training."""
    for name in values:
        value = plain(values[name])
        if name in TRAINING_KEYS:
            problems.add(name, 'only applies in training; an evaluation alone runs once and writes to out')
        elif isinstance(value, str) and not value.strip():
            problems.add(name, f'is {describe(value)}; allowed: text')
        elif name in ARGUMENT_TYPES:
            decode_value(ARGUMENT_TYPES[name], value, name, problems)


def default_device() -> str:
    """Return 'gpu' if there is one, else 'cpu'."""
    return 'gpu' if torch.cuda.is_available() else 'cpu'


def check_device(device: str) -> None:
    """Raise ConfigError for an unknown or missing device."""
    check_choice('device', device, DEVICES)
    if device == 'gpu' and not torch.cuda.is_available():
        raise ConfigError('device is gpu, but torch finds no usable GPU; give cpu')


def check_fsdp(fsdp_config: Mapping[str, Any] | None, device: str) -> None:
    """Raise ConfigError for keys unknown to Composer, and on a CPU, where Composer cannot shard."""
    if fsdp_config is None:
        return
    if not isinstance(fsdp_config, Mapping):
        raise ConfigError(f'fsdp_config: is {describe(fsdp_config)}; allowed: a mapping')
    allowed = [item.name for item in fields(FSDPConfig) if item.init]
    unknown = [key for key in fsdp_config if key not in allowed]
    if unknown:
        raise ConfigError([f"fsdp_config: unknown key '{key}'{suggestion(str(key), allowed)}" for key in unknown])
    if device == 'cpu':
        raise ConfigError('fsdp_config: Composer shards models over GPUs only; leave it out, or give device gpu')


def check_fit(callback: EvalGauntlet, source: ModelSource) -> None:
    """Raise ModelError if the tokenizer or a length does not match the model, before any weights are loaded."""
    Encoder(source.tokenizer)
    check_vocabulary(source.tokenizer, source.config)
    longest_prompt(callback.data, source.config)


def check_precision(precision: str, device: str) -> None:
    """Raise ConfigError for a precision that Composer does not have on this device."""
    check_choice('precision', precision, [value.value for value in Precision])
    if device == 'cpu' and precision != 'fp32':
        raise ConfigError(f'precision is {precision!r}, but Composer has only fp32 on a CPU; give fp32')


def check_choice(name: str, value: str, allowed: list[str] | tuple[str, ...]) -> None:
    """Raise ConfigError unless the value is allowed."""
    if value not in allowed:
        raise ConfigError(f'{name} is {value!r}{suggestion(value, allowed)}')
