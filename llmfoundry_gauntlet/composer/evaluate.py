"""Evaluation alone: a Trainer that never trains, with the same callback."""

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
from llmfoundry_gauntlet.composer.evaluators import longest_prompt
from llmfoundry_gauntlet.composer.journal import Resuming
from llmfoundry_gauntlet.composer.metric_stream import join_run
from llmfoundry_gauntlet.composer.models import (
    ModelSource,
    check_vocabulary,
    composer_model,
    mark_blocks_for_fsdp,
    open_model,
)
from llmfoundry_gauntlet.config.decode import Problems, decode_value, describe, suggestion
from llmfoundry_gauntlet.config.settings import plain
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.files import check_out
from llmfoundry_gauntlet.tasks.encode import Encoder

DEVICES = ('cpu', 'gpu')
ARGUMENT_TYPES: dict[str, Any] = {  # of `evaluate`, for values from a YAML file
    'model': str,
    **dict.fromkeys(('out', 'tokenizer', 'model_config', 'device', 'precision', 'run_name'), str | None),
    **dict.fromkeys(('overwrite', 'resume', 'repair_journal'), bool),
}
TRAINING_KEYS = ('interval', 'save_folder')  # settings that have no effect where nothing is trained
DIST_TIMEOUT = 900.0  # seconds after which collectives give up, where there is no process group yet; after the watchdog


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
    """Evaluates a Composer checkpoint, or a Hugging Face folder or name; writes results.json and samples to `out`.

    `settings` are the fields of EvaluationSettings but `interval` and `save_folder`. `device` is 'cpu' or 'gpu', by
    default a GPU where there is one; `precision` one of Composer's, by default fp32 on a CPU and amp_bf16 on a GPU.
    `fsdp_config` has the keys of Composer's FSDPConfig and shards the model over GPUs. `loggers` get the metrics at the
    training step of a checkpoint, as the run `run_name`.
    `resume` goes on with an evaluation that was cut off, on any number of ranks; where one of `out` is of another model
    or other settings, that is an error. `repair_journal` drops damaged lines of its journal.
    Works on all ranks of the `composer` launcher. Raises GauntletError.
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
    """The model in a Trainer, and the evaluation as a callback of it that is ready to run; closed at the end.

    The arguments are those of `evaluate`, and all are checked.
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
        raise ConfigError('resume needs out, the folder of the evaluation that was cut off')
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
        trainer.engine.close()  # not `trainer.close`, where ranks wait for each other: one that failed must not


def make_trainer(
    source: ModelSource, *, device: str, parallelism_config: dict[str, Any] | None, **arguments: Any
) -> Trainer:
    """A Trainer that stands where the checkpoint's training stood, so that loggers get that step."""
    is_whole_on_gpu = device == 'gpu' and parallelism_config is None  # what is to be sharded is on the host first
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
    """Note arguments of `evaluate` that are of the wrong type, empty, or settings of training alone."""
    for name in values:
        value = plain(values[name])
        if name in TRAINING_KEYS:
            problems.add(name, 'belongs to training; an evaluation alone runs once, and its folder is out')
        elif isinstance(value, str) and not value.strip():
            problems.add(name, f'is {describe(value)}; allowed: text')
        elif name in ARGUMENT_TYPES:
            decode_value(ARGUMENT_TYPES[name], value, name, problems)


def default_device() -> str:
    """A GPU where there is one."""
    return 'gpu' if torch.cuda.is_available() else 'cpu'


def check_device(device: str) -> None:
    """Raises ConfigError for one that is not known, or not there."""
    check_choice('device', device, DEVICES)
    if device == 'gpu' and not torch.cuda.is_available():
        raise ConfigError('device is gpu, and torch finds no GPU that it can use here; give cpu')


def check_fsdp(fsdp_config: Mapping[str, Any] | None, device: str) -> None:
    """Raises ConfigError for keys that Composer does not have, and on a CPU, where Composer cannot shard."""
    if fsdp_config is None:
        return
    if not isinstance(fsdp_config, Mapping):
        raise ConfigError(f'fsdp_config: is {describe(fsdp_config)}; allowed: a mapping')
    allowed = [item.name for item in fields(FSDPConfig) if item.init]
    unknown = [key for key in fsdp_config if key not in allowed]
    if unknown:
        raise ConfigError([f"fsdp_config: unknown key '{key}'{suggestion(str(key), allowed)}" for key in unknown])
    if device == 'cpu':
        raise ConfigError('fsdp_config: Composer shards models over GPUs alone; leave it out, or give device gpu')


def check_fit(callback: EvalGauntlet, source: ModelSource) -> None:
    """Raises ModelError where tokenizer or length do not fit, before any weights are loaded."""
    Encoder(source.tokenizer)
    check_vocabulary(source.tokenizer, source.config)
    longest_prompt(callback.data, source.config)


def check_precision(precision: str, device: str) -> None:
    """Raises ConfigError for one that Composer does not have on this device."""
    check_choice('precision', precision, [value.value for value in Precision])
    if device == 'cpu' and precision != 'fp32':
        raise ConfigError(f'precision is {precision!r}, and the device a CPU, where Composer has fp32 alone; give fp32')


def check_choice(name: str, value: str, allowed: list[str] | tuple[str, ...]) -> None:
    """Raises ConfigError unless the value is allowed."""
    if value not in allowed:
        raise ConfigError(f'{name} is {value!r}; allowed: {", ".join(allowed)}')
