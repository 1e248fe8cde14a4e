"""Log the metrics of evaluations to W&B, MLflow, TensorBoard or a file, by their own clients and without a trainer.

The arguments are those of Composer's loggers, so that the `loggers` of a training YAML serve its evaluations too. Those
that are about training alone have no effect. Hyperparameters are not logged: they are the training's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TextIO

from llmfoundry_gauntlet.config.run import LOGGERS
from llmfoundry_gauntlet.config.settings import paths_as_text
from llmfoundry_gauntlet.config.yaml import decode_partly, raise_invalid_values
from llmfoundry_gauntlet.errors import ConfigError, Problems, describe, suggestion
from llmfoundry_gauntlet.metrics.keys import BATCH
from llmfoundry_gauntlet.runtime.distributed import global_rank, local_rank, world_size
from llmfoundry_gauntlet.runtime.logged_values import (
    PACKAGE,
    MlflowSender,
    TensorboardScalars,
    WandbRows,
    late_row,
    logger_errors,
    warn_of_failure,
    warn_of_library,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

FILENAME = '{run_name}/logs-rank{rank}.txt'
MLFLOW_EXPERIMENT = 'my-mlflow-experiment'  # Composer's default
NEVER_SECONDS = 365 * 24 * 3600  # TensorBoard's writer flushes when it is told to


class MetricLogger(Protocol):
    """A place for the metrics of evaluations. It opens nothing before the first `log`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values at a training step; they include that step as `gauntlet/batch`."""

    def close(self) -> None:
        """End what `log` has opened, if anything."""


# ----------------------------------------------------------------------------------------------------------------------
# Settings: the arguments of Composer's loggers


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """The file to write; `{run_name}`, `{rank}` and others of Composer's placeholders are replaced in its name."""

    filename: str = FILENAME

    without_effect: ClassVar[tuple[str, ...]] = (
        'remote_file_name',
        'capture_stdout',
        'capture_stderr',
        'buffer_size',
        'log_traces',
        'flush_interval',
        'overwrite',  # Composer 0.32.1 replaces an existing file whatever it is
    )

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        try:
            self.path('run')
        except ValueError as error:
            yield f'filename: is {self.filename!r}, which is not a format: {error}'

    def path(self, run_name: str) -> Path:
        """Return the path of the file; placeholders that are not known stay as they are."""
        values = {
            'run_name': run_name,
            'rank': global_rank(),
            'local_rank': local_rank(),
            'world_size': world_size(),
            'local_world_size': int(os.environ.get('LOCAL_WORLD_SIZE', '1')),
            'node_rank': int(os.environ.get('NODE_RANK', '0')),
        }
        return Path(self.filename.format_map(Placeholders(values)))


class Placeholders(dict[str, Any]):
    """The values of placeholders; one that is not known is its own value."""

    def __missing__(self, name: str) -> str:
        return '{' + name + '}'


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardSettings:
    """The folder of all runs, by default `tensorboard_logs`; each run has a folder of its name below it."""

    log_dir: str | None = None

    without_effect: ClassVar[tuple[str, ...]] = ('flush_interval', 'rank_zero_only')


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSettings:
    """The arguments of `wandb.init`: the first five, which take precedence, and any in `init_kwargs`."""

    project: str | None = None
    group: str | None = None
    name: str | None = None
    entity: str | None = None
    tags: tuple[str, ...] | None = None
    init_kwargs: dict[str, Any] | None = None

    without_effect: ClassVar[tuple[str, ...]] = ('log_artifacts', 'rank_zero_only')

    def arguments(self, run_name: str) -> dict[str, Any]:
        """Return the arguments of `wandb.init` for a run of this name, unless they name it."""
        arguments = dict(self.init_kwargs or {})
        for key in ('project', 'group', 'name', 'entity', 'tags'):
            value = getattr(self, key)
            if value is not None:
                arguments[key] = value
        if arguments.get('name') is None:
            arguments['name'] = run_name
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSettings:
    """The server, experiment and run of MLflow.

    * `tracking_uri`: by default Databricks if there is a DATABRICKS_TOKEN, else MLflow's own default.
    * `experiment_name`: by default MLFLOW_EXPERIMENT_NAME; MLFLOW_EXPERIMENT_ID takes precedence.
    * `run_name`: the name that MLflow shows, by default that of the training run; MLFLOW_RUN_ID is an existing run.
    * `resume`: join the newest run whose tag `run_name` is the name of the training run, if there is one.
    * `tags`, `run_group`: tags of the run.
    * `rename_metrics`, `ignore_metrics`: new names by key, and patterns of keys that are not logged.
    """

    experiment_name: str | None = None
    run_name: str | None = None
    tags: dict[str, Any] | None = None
    tracking_uri: str | None = None
    rename_metrics: dict[str, str] | None = None
    ignore_metrics: tuple[str, ...] | None = None
    run_group: str | None = None
    resume: bool = False

    without_effect: ClassVar[tuple[str, ...]] = (
        'rank_zero_only',
        'flush_interval',
        'model_registry_prefix',
        'model_registry_uri',
        'synchronous',
        'log_system_metrics',
        'ignore_hyperparameters',
        'logging_buffer_seconds',
        'log_duplicated_metric_every_n_steps',
    )


# ----------------------------------------------------------------------------------------------------------------------
# The loggers


@dataclass(slots=True, eq=False)
class FileLogger:
    """Write a line for each value into a text file, which replaces an existing one."""

    settings: FileSettings
    run_name: str
    file: TextIO | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the values in the format of Composer's file logger."""
        if self.file is None:
            path = self.settings.path(self.run_name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open('w')
        for key, value in metrics.items():
            shown = f'{value:.4f}' if isinstance(value, float) else str(value)
            # The space before the line's end is Composer's.
            self.file.write(f'[metric][batch={step}]: {key}: {shown} \n')
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None


@dataclass(slots=True, eq=False)
class TensorboardLogger:
    """Write events into the folder of the run, next to those of its training."""

    settings: TensorboardSettings
    run_name: str
    scalars: TensorboardScalars = field(default_factory=TensorboardScalars)
    writer: SummaryWriter | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the values that the folder does not hold yet."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(self.settings.log_dir or 'tensorboard_logs') / self.run_name
            self.writer = SummaryWriter(log_dir=str(folder), flush_secs=NEVER_SECONDS)
        self.scalars.log(self.writer, metrics, step)

    def close(self) -> None:
        """Close the file of events."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


@dataclass(slots=True, eq=False)
class WandbLogger:
    """Add rows to a W&B run: the one that is open in this process, if any, else a run of the logger's own."""

    settings: WandbSettings
    run_name: str
    rows: WandbRows = field(default_factory=WandbRows)
    run: Any = None
    is_joined: bool = False  # opened by others, who log to it too and finish it

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the values to a new row at the end, or to the row of this step in a run that has not passed it.

        `gauntlet/batch` is the x-axis, wherever the row is.
        """
        if self.run is None:
            self.open_run()

        # A training loop may go on adding to its current row, which a row after it would end.
        is_current = self.is_joined and step >= self.run.step
        row = step if is_current else late_row(self.run, step)
        self.rows.log(self.run, metrics, row)

    def open_run(self) -> None:
        """Join the run that is open in this process, or begin one."""
        import wandb

        self.is_joined = wandb.run is not None
        if self.is_joined:
            self.run = wandb.run
        else:
            arguments = self.settings.arguments(self.run_name)
            self.run = wandb.init(**arguments)

    def close(self) -> None:
        """Finish a run of the logger's own; it has failed if an exception is being handled."""
        run, self.run = self.run, None
        if run is not None and not self.is_joined:
            run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)


@dataclass(slots=True, eq=False)
class MlflowLogger:
    """Send values to a run of MLflow, a new one or one that is there already."""

    settings: MlflowSettings
    run_name: str
    sender: MlflowSender | None = None
    is_new: bool = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the values and wait a limited time for the server's answer; if it fails they are sent next time."""
        if self.sender is None:
            self.sender = MlflowSender(
                tracking_uri=mlflow_tracking_uri(self.settings),
                open_run=self.open_run,
                name=type(self).__name__,
                rename=self.settings.rename_metrics or {},
                ignore=self.settings.ignore_metrics or (),
            )
        self.sender.send(metrics, step)

    def open_run(self, client: MlflowClient) -> str:
        """Return the id of the run, and set its tags."""
        tags = mlflow_tags(self.settings, self.run_name)
        experiment = mlflow_experiment(client, self.settings)
        existing_id = existing_mlflow_run(client, experiment, tags['run_name'], resume=self.settings.resume)
        if existing_id is None:
            name = self.settings.run_name or self.run_name
            created = client.create_run(experiment, tags=tags, run_name=name)
            self.is_new = True
            return str(created.info.run_id)

        from mlflow.entities import RunTag

        tags_of_run = [RunTag(key, value) for key, value in tags.items()]  # type: ignore[no-untyped-call]
        client.log_batch(existing_id, tags=tags_of_run)
        return existing_id

    def close(self) -> None:
        """Send what the server did not confirm, and end a run of the logger's own.

        The status of a run that was there already stays: its training may go on elsewhere.
        """
        sender, self.sender = self.sender, None
        if sender is not None:
            status = 'FINISHED' if sys.exc_info()[0] is None else 'FAILED'
            sender.finish(functools.partial(self.end_run, status))

    def end_run(self, status: str, client: MlflowClient, run_id: str) -> None:
        """Set the status of a run of the logger's own."""
        if self.is_new:
            client.set_terminated(run_id, status)


def mlflow_tracking_uri(settings: MlflowSettings) -> str:
    """Return the address of the server or of the local store."""
    import mlflow

    if settings.tracking_uri is not None:
        return settings.tracking_uri
    return 'databricks' if 'DATABRICKS_TOKEN' in os.environ else mlflow.get_tracking_uri()


def mlflow_tags(settings: MlflowSettings, run_name: str) -> dict[str, str]:
    """Return the tags of the run; `run_name` is the one by which Composer's logger, too, finds a run."""
    tags = {key: str(value) for key, value in (settings.tags or {}).items()}
    tags['run_name'] = os.environ.get('RUN_NAME', run_name)
    if settings.run_group:
        tags['run_group'] = settings.run_group
    return tags


def mlflow_experiment(client: MlflowClient, settings: MlflowSettings) -> str:
    """Return the id of the experiment, which is made if it is not there."""
    given_id = os.environ.get('MLFLOW_EXPERIMENT_ID')
    if given_id is not None:
        return given_id

    name = settings.experiment_name or os.environ.get('MLFLOW_EXPERIMENT_NAME', MLFLOW_EXPERIMENT)
    # On Databricks the name of an experiment is a path in the workspace.
    if 'DATABRICKS_TOKEN' in os.environ and not name.startswith(('/Users/', '/Shared/')):
        from databricks.sdk import WorkspaceClient

        user = WorkspaceClient().current_user.me().user_name or ''
        name = os.path.join('/Users', user, name.strip('/'))

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return str(client.create_experiment(name))
    return str(experiment.experiment_id)


def existing_mlflow_run(client: MlflowClient, experiment: str, run_name: str, *, resume: bool) -> str | None:
    """Return the id of the run to join: MLFLOW_RUN_ID, or with `resume` the newest of the training run."""
    given_id = os.environ.get('MLFLOW_RUN_ID')
    if given_id is not None or not resume:
        return given_id
    # The server returns the newest run first.
    of_training_run = f'tags.run_name = "{run_name}"'
    runs = client.search_runs([experiment], filter_string=of_training_run, max_results=1)
    return str(runs[0].info.run_id) if runs else None


# ----------------------------------------------------------------------------------------------------------------------
# Building and using them


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of logger: its settings, its class, and the module of its library, if it has one."""

    settings: type
    logger: type
    library: str | None = None


KINDS = {
    'file': Kind(FileSettings, FileLogger),
    'mlflow': Kind(MlflowSettings, MlflowLogger, 'mlflow'),
    'tensorboard': Kind(TensorboardSettings, TensorboardLogger, 'torch.utils.tensorboard'),
    'wandb': Kind(WandbSettings, WandbLogger, 'wandb'),
}


def build_loggers(chosen: Mapping[str, Any] | None, *, run_name: str | None) -> list[MetricLogger]:
    """Return a logger for each name, with its arguments: `{'mlflow': {'experiment_name': 'llama'}}`.

    `run_name` is the name of the training run; None: COMPOSER_RUN_NAME, RUN_NAME, or a new one. Ranks other than the
    first have no loggers. Raise ConfigError with every unknown name and every invalid argument, and for every logger
    whose library is not installed.
    """
    settings = decode_loggers(chosen)
    for name in settings:
        warn_of_library(name)
    if global_rank() != 0:
        return []
    name_of_run = run_name or new_run_name()
    return [KINDS[name].logger(arguments, name_of_run) for name, arguments in settings.items()]


def decode_loggers(chosen: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of each logger by its name, in the order of the file. Raise ConfigError."""
    if chosen is not None and not isinstance(chosen, Mapping):
        raise ConfigError(f'loggers: is {describe(chosen)}; allowed: a mapping with {", ".join(LOGGERS)}')
    problems = Problems('loggers')
    decoded = {}
    for name, arguments in (chosen or {}).items():
        if name not in KINDS:
            problems.add('', f"unknown key '{name}'{suggestion(str(name), KINDS)}")
            continue
        values = {} if arguments is None else arguments
        if isinstance(values, Mapping):
            values = {key: paths_as_text(value) for key, value in values.items()}
        decoded[name] = decode_partly(KINDS[name].settings, values, name, problems)
        add_library_problems(name, decoded[name], problems)
    problems.raise_all()
    return decoded


def add_library_problems(name: str, settings: Any, problems: Problems) -> None:
    """Add a problem if the library of a logger cannot be imported, or for arguments that it does not have."""
    module_name = KINDS[name].library
    if module_name is None:
        return
    remedy = f"pip install '{PACKAGE}[{name}]'"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        problems.add(name, f'its library is not installed ({error}); {remedy}')
        return
    if module.__file__ is None:  # a folder of that name in the working directory, as W&B leaves one
        problems.add(name, f'its library is not installed; {remedy}')
        return
    if isinstance(settings, WandbSettings):
        allowed = inspect.signature(module.init).parameters
        for key in settings.init_kwargs or {}:
            if key not in allowed:
                problems.add(f'{name}.init_kwargs', f"unknown key '{key}'{suggestion(str(key), allowed)}")


def new_run_name() -> str:
    """Return the name of the environment, as Composer does, or a new one that begins with the time."""
    given = os.environ.get('COMPOSER_RUN_NAME') or os.environ.get('RUN_NAME')
    return given or f'{int(time.time())}-gauntlet-{secrets.token_hex(3)}'


def logger_settings(loggers: Mapping[str, Any], run_name: str | None, checkpoint: str) -> dict[str, Any]:
    """Return the loggers' arguments for the evaluation of one checkpoint of a run.

    Each evaluation has its own loggers. They resume the same W&B run (not the training's, because two processes cannot
    write to one run) and the same MLflow run, and write separate files. The user's settings take precedence.
    """
    settings = {name: dict(arguments or {}) for name, arguments in loggers.items()}

    if run_name is not None and 'wandb' in settings:
        # W&B refuses some characters in the id of a run.
        run_id = re.sub(r'[^\w.-]', '-', f'{run_name}-watch')
        given = settings['wandb'].get('init_kwargs') or {}
        settings['wandb']['init_kwargs'] = {'id': run_id, 'resume': 'allow', **given}

    if run_name is not None and 'mlflow' in settings:
        settings['mlflow'].setdefault('resume', True)

    if 'file' in settings:
        path = PurePosixPath(settings['file'].get('filename', FILENAME))
        checkpoint_name = checkpoint.replace('/', '-')
        path_of_checkpoint = path.with_name(f'{checkpoint_name}-{path.name}')
        settings['file'].update(filename=str(path_of_checkpoint), overwrite=True)

    return settings


def log_evaluation(loggers: Sequence[MetricLogger], metrics: Mapping[str, float], batch: int) -> None:
    """Log the metrics to every logger at training step `batch`; the error of a logger becomes a warning."""
    values = {**metrics, BATCH: batch}
    for logger in loggers:
        with logger_errors(logger) as caught:
            logger.log(values, batch)
        if caught.error is not None:
            warn_of_failure(logger, batch, caught.error)


def close_loggers(loggers: Sequence[MetricLogger]) -> None:
    """Close every logger; the error of a logger becomes a warning."""
    for logger in loggers:
        with logger_errors(logger) as caught:
            logger.close()
        if caught.error is not None:
            log.warning('%s failed to close: %s: %s', type(logger).__name__, type(caught.error).__name__, caught.error)
