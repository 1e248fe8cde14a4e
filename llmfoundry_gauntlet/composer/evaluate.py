"""Evaluate a model without training: a Trainer that only evaluates, with the same callback.

The keys of the YAML file of `gauntlet eval` are those of `evaluate`, or llm-foundry's, which may list several `models`:
each is written to its own folder below `out`, and a model that fails does not stop the others.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import Timestamp
from composer.loggers import LoggerDestination
from composer.utils import FSDPConfig, dist

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.composer.loggers import build_loggers, join_run
from llmfoundry_gauntlet.composer.trainer_model import composer_model, mark_blocks_for_fsdp
from llmfoundry_gauntlet.config.llm_foundry import EVALUATION_KEYS, ListedModel, Mapped, map_evaluation
from llmfoundry_gauntlet.config.run import DIST_TIMEOUT, SETTINGS, ModelSettings, RunSettings, decode_run
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml import describe, read_yaml, suggestion
from llmfoundry_gauntlet.errors import Collected, ConfigError, GauntletError, UnwrittenError, print_problems
from llmfoundry_gauntlet.evaluation.inputs import check_named_files
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.files import check_out
from llmfoundry_gauntlet.results.interrupts import Interrupted, exit_on_signals, with_remedy
from llmfoundry_gauntlet.results.report.printing import print_runs, print_scores, print_unwritten
from llmfoundry_gauntlet.results.runs import find_evaluations
from llmfoundry_gauntlet.runtime.distributed import barrier, global_rank, local_rank, raised_on_all_ranks, world_size
from llmfoundry_gauntlet.runtime.journal import Resuming
from llmfoundry_gauntlet.runtime.models import ModelSource, check_vocabulary, open_model
from llmfoundry_gauntlet.runtime.runner import longest_prompt
from llmfoundry_gauntlet.tasks.encode import Encoder


def evaluate(model: str | Path, **settings: Any) -> Evaluation:
    """Evaluate a Composer checkpoint, or a Hugging Face folder or name; write results.json and samples to `out`.

    The settings are the fields of RunSettings, and those of EvaluationSettings except `interval` and `save_folder`.
    Under the `composer` launcher all ranks must call this. Raise GauntletError.
    """
    with opened(model, **settings) as (trainer, callback):
        trainer.eval()
    barrier()
    if callback.evaluation is None:
        raise RuntimeError('the evaluation ended without a result')
    return callback.evaluation


@contextmanager
def opened(model: str | Path, **settings: Any) -> Iterator[tuple[Trainer, EvalGauntlet]]:
    """Yield a Trainer with the model, and its callback, ready to evaluate; closed when the context ends.

    The settings are those of `evaluate` and are validated here.
    """
    arguments = check_arguments({'model': model, **settings})
    run, callback, loggers = arguments.run, arguments.callback, arguments.loggers
    device, precision = arguments.device, arguments.precision
    callback.resuming = Resuming(wanted=run.resume, required=True, repair=run.repair_journal)
    dist.initialize_dist(device, timeout=run.dist_timeout)
    with open_model(**{item.name: getattr(run, item.name) for item in fields(ModelSettings)}) as source:
        Encoder(source.tokenizer)  # this and the next two checks raise ModelError before any weights are loaded
        check_vocabulary(source.tokenizer, source.config)
        longest_prompt(callback.data, source.config)
        callback.source = source
        trainer = make_trainer(
            source,
            callbacks=[callback],
            loggers=[join_run(destination) for destination in loggers],
            run_name=run.run_name,
            device=device,
            precision=precision,
            parallelism_config=None
            if run.fsdp_config is None
            else {'fsdp': {**run.fsdp_config, 'sync_module_states': True}},
        )
    try:
        yield trainer, callback
    finally:
        trainer.engine.close()  # not `trainer.close`, in which ranks wait for each other even after an error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arguments:
    """The arguments of `evaluate`, all of them valid, and the callback with tasks and data."""

    run: RunSettings
    device: str
    precision: str
    loggers: Sequence[LoggerDestination]
    callback: EvalGauntlet


def check_arguments(values: Mapping[str, Any]) -> Arguments:
    """Check the arguments of `evaluate`, and load tasks and data. Raise GauntletError with every problem found."""
    collected = Collected()
    run, problems = decode_run(values, 'evaluate')
    if problems:
        collected.add(ConfigError(problems))
    hardware: tuple[str, str] | None = None
    loggers: Sequence[LoggerDestination] = ()
    callback: EvalGauntlet | None = None
    if run is not None:
        with collected:
            hardware = hardware_of(run)
        with collected:
            loggers = build_loggers(run.loggers) if isinstance(run.loggers, Mapping) else run.loggers
        with collected:
            if run.out is not None:
                check_out(Path(run.out), overwrite=run.overwrite, resume=run.resume)
    with collected:
        settings = {name: value for name, value in values.items() if name in SETTINGS}
        callback = EvalGauntlet(**settings, save_folder=None if run is None or problems else run.out)
    collected.raise_all()
    assert run is not None and hardware is not None and callback is not None
    device, precision = hardware
    return Arguments(run=run, device=device, precision=precision, loggers=loggers, callback=callback)


def hardware_of(run: RunSettings) -> tuple[str, str]:
    """Return the device and precision, by default those of the machine. Raise ConfigError with every problem found."""
    device = run.device or default_device()
    half = 'amp_fp16' if run.dtype == 'float16' else 'amp_bf16'
    precision = run.precision or ('fp32' if device == 'cpu' else half)
    collected = Collected()
    with collected:
        check_device(device)
    with collected:
        check_precision(precision, device)
    with collected:
        check_fsdp(run.fsdp_config, device)
    collected.raise_all()
    return device, precision


def make_trainer(
    source: ModelSource, *, device: str, parallelism_config: dict[str, Any] | None, **arguments: Any
) -> Trainer:
    """Return a Trainer set to the checkpoint's timestamp, so that metrics are logged at its step."""
    if parallelism_config is not None:
        network = load_to_shard(source)
    else:
        network = source.load(torch.device('cuda', local_rank()) if device == 'gpu' else torch.device('cpu'))
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='No optimizer was specified')
        trainer = Trainer(
            model=composer_model(network, source.tokenizer),
            device=device,
            parallelism_config=parallelism_config,
            progress_bar=False,
            **arguments,
        )
    if source.training is not None:
        trainer.state.timestamp = Timestamp(
            batch=source.training.batch,
            epoch=source.training.epoch or 0,
            token=source.training.token or 0,
        )
    return trainer


def load_to_shard(source: ModelSource) -> Any:
    """Load the weights on rank 0 alone, in host memory; FSDP sends each block to the other ranks as it shards it.

    Raise ModelError on all ranks.
    """
    with raised_on_all_ranks():
        network = source.load(torch.device('cpu' if global_rank() == 0 else 'meta'))
    mark_blocks_for_fsdp(network)
    network.param_init_fn = lambda _: None  # Composer requires one for the meta device
    return network


def default_device() -> str:
    """Return 'gpu' if there is one, else 'cpu'."""
    return 'gpu' if torch.cuda.is_available() else 'cpu'


def check_device(device: str) -> None:
    """Raise ConfigError for a device that is not there."""
    if device == 'gpu' and not torch.cuda.is_available():
        raise ConfigError('device is gpu, but torch finds no usable GPU; give cpu')


def check_fsdp(fsdp_config: Mapping[str, Any] | None, device: str) -> None:
    """Raise ConfigError for keys unknown to Composer, and on a CPU, where Composer does not support FSDP."""
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


def check_precision(precision: str, device: str) -> None:
    """Raise ConfigError for a precision that Composer does not support on this device."""
    if device == 'cpu' and precision != 'fp32':
        raise ConfigError(f'precision is {precision!r}, but Composer has only fp32 on a CPU; give fp32')


def read_config(path: str, overrides: list[str]) -> Mapped:
    """Read a YAML file, apply `key=value` overrides and validate it. Raise GauntletError with every problem found."""
    values = read_yaml(path, overrides)
    collected = Collected()
    mapped = Mapped(values=values)
    with collected:
        mapped = map_evaluation(values, source=path, num_ranks=world_size())
        for arguments in [arguments_of(mapped, model) for model in mapped.models] or [mapped.values]:
            with collected:
                check_keys(arguments, path)
    if collected.errors:
        with collected:  # what the files hold is checked later, unless this ends here
            check_named_files(mapped.values)
    collected.raise_all()
    return mapped


def check_keys(arguments: Mapping[str, Any], path: str) -> None:
    """Check the keys and values of a YAML file for one model. Raise ConfigError with every problem found."""
    collected = Collected()
    run, problems = decode_run(arguments, path, required=('out',), further=EVALUATION_KEYS)
    if problems:
        collected.add(ConfigError(problems))
    if run is not None:
        with collected:
            hardware_of(run)
    with collected:
        decode_settings({key: value for key, value in arguments.items() if key in SETTINGS}, path)
    collected.raise_all()


def arguments_of(config: Mapped, model: ListedModel) -> dict[str, Any]:
    """Return the arguments of `evaluate` for one of the models of a file; each has a folder and a run of its own."""
    arguments = {**config.values, **model.arguments}
    if isinstance(arguments.get('out'), str):
        arguments['out'] = str(Path(arguments['out']) / model.folder)
    if isinstance(arguments.get('run_name'), str) and len(config.models) > 1:
        arguments['run_name'] = f'{arguments["run_name"]}-{model.folder.replace("/", "-")}'
    return arguments


def evaluate_listed(config: Mapped) -> int:
    """Evaluate each model in turn into its own folder; return the exit status."""
    done: list[ListedModel] = []
    for model in config.models:
        say(f'evaluating {model.name}')
        try:
            evaluate_or_explain(arguments_of(config, model), done)
            done.append(model)
        except GauntletError as error:
            print(f'{model.name} was not evaluated:', file=sys.stderr)
            print_problems(error)
    if done and global_rank() == 0:
        print_models(Path(config.values['out']), done)
    if len(done) == len(config.models):
        return 0
    return 1 if done else 2


def evaluate_or_explain(arguments: Mapping[str, Any], done: Sequence[ListedModel] = ()) -> None:
    """Evaluate a model; if a signal interrupts that, say what is kept and what is done. Raise GauntletError."""
    option = 'resume=true in place of overwrite' if arguments.get('overwrite') else 'resume=true'
    kept = Interrupted(folder=Path(arguments['out']), option=None if arguments.get('resume') else option)

    def explain() -> str:
        return '\n'.join([kept(), *(f'done already: {model.name}' for model in done)])

    with exit_on_signals(explain):
        try:
            evaluate(**arguments)
        except UnwrittenError as error:
            if global_rank() == 0:
                print_unwritten(error)
            raise with_remedy(error, kept) from error


def print_models(out: Path, models: Sequence[ListedModel]) -> None:
    """Print the scores of all models side by side, and for several the command that compares them with errors."""
    print_scores([find_evaluations([out / model.folder])[-1] for model in models])
    folders = ' '.join(str(out / model.folder) for model in models)
    if len(models) > 1:
        print(f'with errors: gauntlet compare {folders}')


def say(line: str) -> None:
    """Print a line on rank 0."""
    if global_rank() == 0:
        print(line, flush=True)


def evaluate_file(path: str, overrides: list[str]) -> int:
    """Evaluate from a YAML file and return the exit status. Raise GauntletError."""
    config = read_config(path, overrides)
    for line in config.lines:
        say(line)
    timeout = config.values.get('dist_timeout', DIST_TIMEOUT)
    dist.initialize_dist(config.values.get('device') or default_device(), timeout=timeout)
    if config.models:
        return evaluate_listed(config)
    evaluate_or_explain(config.values)
    if global_rank() == 0:
        print_runs(Path(config.values['out']))
    return 0
