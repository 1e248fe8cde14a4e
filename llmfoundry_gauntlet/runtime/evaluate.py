"""Evaluate a model without training: load it, run the items, log and write the scores."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Unpack

import torch

from llmfoundry_gauntlet.config.run import SETTINGS, ModelSettings, RunOptions, RunSettings, decode_run
from llmfoundry_gauntlet.errors import Collected, ConfigError, named
from llmfoundry_gauntlet.evaluation.inputs import load_inputs
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.metrics.keys import BATCH
from llmfoundry_gauntlet.results.files import check_out
from llmfoundry_gauntlet.runtime import distributed
from llmfoundry_gauntlet.runtime.averages import average_name
from llmfoundry_gauntlet.runtime.distributed import barrier, global_rank, local_rank, raised_on_all_ranks
from llmfoundry_gauntlet.runtime.gauntlet import Gauntlet, summary
from llmfoundry_gauntlet.runtime.journal import Resuming
from llmfoundry_gauntlet.runtime.loggers import (
    MetricLogger,
    build_loggers,
    close_loggers,
    decode_loggers,
    log_evaluation,
)
from llmfoundry_gauntlet.runtime.models import ModelSource, check_vocabulary, open_model
from llmfoundry_gauntlet.runtime.precision import FP32, precision_context
from llmfoundry_gauntlet.runtime.records import environment
from llmfoundry_gauntlet.runtime.runner import longest_prompt
from llmfoundry_gauntlet.runtime.sharding import ShardingSettings, decode_sharding, shard
from llmfoundry_gauntlet.runtime.trained_model import evaluated_model
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import TrainingPoint

log = logging.getLogger(__name__)


def evaluate(model: str | Path, **settings: Unpack[RunOptions]) -> Evaluation:
    """Evaluate a Composer checkpoint, or a Hugging Face folder or name; write results.json and samples to `out`.

    The settings are the fields of RunSettings, and those of EvaluationSettings except `interval` and `save_folder`.
    Under `torchrun` or the `composer` launcher all ranks must call this. Raise GauntletError.
    """
    with opened(model, **settings) as subject:
        return evaluate_opened(subject, subject.source.training)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device of this rank, the precision (one of PRECISIONS), and the sharding; None for a whole model per rank."""

    device: torch.device
    precision: str
    sharding: ShardingSettings | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedModel:
    """A model on its device, and what evaluates it: items that are tokenized for it, and loggers."""

    source: ModelSource
    network: Any
    gauntlet: Gauntlet
    loggers: Sequence[MetricLogger]
    hardware: Hardware


@contextmanager
def opened(model: str | Path, **settings: Unpack[RunOptions]) -> Iterator[OpenedModel]:
    """Yield a model that is ready to be evaluated; its loggers are closed when the context ends.

    The settings are those of `evaluate` and are validated here.
    """
    arguments = check_arguments({'model': model, **settings})
    run = arguments.run
    hardware = arguments.hardware
    gauntlet = arguments.gauntlet
    gauntlet.resuming = Resuming(wanted=run.resume, required=True, repair=run.repair_journal)
    distributed.initialize(hardware.device, run.dist_timeout)

    model_settings = {setting.name: getattr(run, setting.name) for setting in fields(ModelSettings)}
    with open_model(**model_settings) as source:
        # These three raise ModelError before any weights are loaded, which may take long.
        Encoder(source.tokenizer)
        check_vocabulary(source.tokenizer, source.config)
        longest_prompt(gauntlet.data, source.config)
        network = load(source, hardware)

    gauntlet.prepare_items(evaluated_model(network, source.tokenizer))
    loggers = build_loggers(run.loggers, run_name=run.run_name)
    try:
        yield OpenedModel(source=source, network=network, gauntlet=gauntlet, loggers=loggers, hardware=hardware)
    finally:
        close_loggers(loggers)


def evaluate_opened(subject: OpenedModel, training: TrainingPoint | None) -> Evaluation:
    """Evaluate a model, log its metrics and write the records, on all ranks; `training` is its point of training."""
    gauntlet, hardware = subject.gauntlet, subject.hardware
    batch = 0 if training is None else training.batch
    title = f'gauntlet ba{batch}' if batch else 'gauntlet'
    others = subject.source.settings.averaged_with
    if others:
        title = f'{title} {average_name(len(others) + 1)}'
    folder = gauntlet.records.folder_of(None)
    model = evaluated_model(subject.network, subject.source.tokenizer)
    with precision_context(hardware.precision, hardware.device):
        evaluation = gauntlet.run(model, folder=folder, title=title, precision=hardware.precision)
    logged = evaluation.logged
    if others:
        # With the batch, by which a file of events is known as one of ours.
        logged = {f'{average_name(len(others) + 1)}/{key}': value for key, value in {**logged, BATCH: batch}.items()}
    log_evaluation(subject.loggers, logged, batch)
    log.info('%s: %s', title, summary(evaluation))
    if folder is not None:
        write = gauntlet.writer(
            evaluation,
            folder,
            {**subject.source.record, **gauntlet.description(model.model)},
            environment(hardware.device, hardware.precision),
            training,
        )
        gauntlet.records.write(None, folder, write)
    barrier()
    return evaluation


def load(source: ModelSource, hardware: Hardware) -> Any:
    """Load a model on the device of this rank, or sharded over all ranks. Raise ModelError."""
    if hardware.sharding is None or not hardware.sharding.is_sharded:
        return source.load(hardware.device)
    # The weights are read by rank 0 alone, into host memory.
    origin = torch.device('cpu' if global_rank() == 0 else 'meta')
    with raised_on_all_ranks():
        network = source.load(origin)
    shard(network, hardware.device, hardware.sharding, hardware.precision)
    return network


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arguments:
    """The arguments of `evaluate`, all of them valid, with tasks and data."""

    run: RunSettings
    hardware: Hardware
    gauntlet: Gauntlet


def check_arguments(values: Mapping[str, Any]) -> Arguments:
    """Check the arguments of `evaluate`, and load tasks and data. Raise GauntletError with every problem found."""
    collected = Collected()
    run, problems = decode_run(values, 'evaluate')
    if problems:
        collected.add(ConfigError(problems))
    hardware: Hardware | None = None
    gauntlet: Gauntlet | None = None
    if run is not None:
        with collected:
            hardware = hardware_of(run)
        with collected:
            decode_loggers(run.loggers)
        with collected:
            if run.out is not None:
                check_out(Path(run.out), overwrite=run.overwrite, resume=run.resume)
    with collected:
        settings = {name: value for name, value in values.items() if name in SETTINGS}
        settings['save_folder'] = None if run is None or problems else run.out
        data = load_inputs(settings, 'evaluate')
        gauntlet = Gauntlet.from_data(data, run_name=None if run is None else run.run_name)
    collected.raise_all()
    assert run is not None and hardware is not None and gauntlet is not None
    return Arguments(run=run, hardware=hardware, gauntlet=gauntlet)


def hardware_of(run: RunSettings) -> Hardware:
    """Return where to run, by default as the machine allows. Raise ConfigError with every problem found."""
    name = run.device or default_device()
    half = 'amp_fp16' if run.dtype == 'float16' else 'amp_bf16'
    precision = run.precision or (FP32 if name == 'cpu' else half)
    collected = Collected()
    with collected:
        check_device(name)
    with collected:
        check_precision(precision, name)
    sharding = None
    with collected:
        sharding = decode_sharding(run.fsdp_config)
    collected.raise_all()
    device = torch.device('cuda', local_rank()) if name == 'gpu' else torch.device('cpu')
    return Hardware(device=device, precision=precision, sharding=sharding)


def default_device() -> str:
    """Return 'gpu' if there is one, else 'cpu'."""
    return 'gpu' if torch.cuda.is_available() else 'cpu'


def check_device(device: str) -> None:
    """Raise ConfigError for a device that is not there."""
    if device == 'gpu' and not torch.cuda.is_available():
        raise ConfigError(f'{named("device")} is gpu, but torch finds no usable GPU; give cpu')


def check_precision(precision: str, device: str) -> None:
    """Raise ConfigError for a precision that is not supported on this device."""
    if device == 'cpu' and precision != FP32:
        raise ConfigError(f'{named("precision")} is {precision!r}, but on a CPU there is only fp32; give fp32')
