"""Build Composer's loggers from YAML, and log metrics in an order and form that each of them accepts."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from composer.core import State
from composer.loggers import FileLogger, Logger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger
from composer.utils import MissingConditionalImportError
from packaging.requirements import Requirement

from llmfoundry_gauntlet.config.yaml import describe, suggestion
from llmfoundry_gauntlet.errors import Caught, Collected, ConfigError, plural
from llmfoundry_gauntlet.metrics.keys import BATCH, COMPOSITE_PREFIX, SCORE_PREFIX, SECONDS
from llmfoundry_gauntlet.runtime.distributed import global_rank

Builders = Mapping[str, Callable[..., Any]]

LOGGERS: dict[str, type[LoggerDestination]] = {
    'file': FileLogger,
    'mlflow': MLFlowLogger,
    'tensorboard': TensorboardLogger,
    'wandb': WandBLogger,
}
log = logging.getLogger(__name__)

LIBRARIES = (  # used by Composer's loggers, directly or to contact servers
    *('composer', 'wandb', 'mlflow', 'mlflow_skinny', 'tensorboard', 'comet_ml', 'neptune', 'slack_sdk', 'databricks'),
    *('requests', 'urllib3', 'httpx', 'grpc', 'google', 'sqlalchemy', 'alembic', 'botocore'),
)
MLFLOW_WAIT_SECONDS = 20.0  # longest wait for the server's answer before training continues
OURS = BATCH.partition('/')[0]

# Charts of TensorBoard's Custom Scalars; metric keys are regular expressions.
TENSORBOARD_CHARTS: dict[str, dict[str, list[Any]]] = {
    'gauntlet': {
        'composites': ['Multiline', [rf'^{COMPOSITE_PREFIX}/(?!.*/standard_error$).*$']],
        'accuracy of tasks': ['Multiline', [r'^metrics/[^/]+/\d+-shot/InContextLearning[^/]*$']],
        'seconds': ['Multiline', [rf'^{SECONDS}$']],
    },
    'score': {
        'accuracy': ['Multiline', [rf'^{SCORE_PREFIX}/[^/]+/[^/]+/accuracy$']],
        'consistency rate': ['Multiline', [rf'^{SCORE_PREFIX}/[^/]+/[^/]+/consistency_rate$']],
    },
}


def build_loggers(chosen: Mapping[str, Any] | None) -> list[LoggerDestination]:
    """Return a Composer logger for each name, with its arguments: `{'mlflow': {'experiment_name': 'llama'}}`.

    Raise ConfigError for unknown names and arguments, and if a logger's library is not installed.
    """
    loggers = build_each('loggers', LOGGERS, chosen)
    warn_of_libraries(loggers)
    return loggers


def warn_of_libraries(loggers: Sequence[LoggerDestination]) -> None:
    """Warn once per process about each logger whose library version is not supported."""
    for name in LOGGERS:
        if any(isinstance(logger, LOGGERS[name]) for logger in loggers):
            warn_of_library(name)


@functools.cache
def warn_of_library(extra: str) -> None:
    """Warn if installed versions do not meet the requirements of this extra of Composer or of this package."""
    lines = [line for package in ('mosaicml', 'llmfoundry-gauntlet') for line in metadata.requires(package) or ()]
    wrong = []
    for wanted in map(Requirement, lines):
        if wanted.marker is not None and f'extra == "{extra}"' in str(wanted.marker):
            version = metadata.version(wanted.name)
            if not wanted.specifier.contains(version, prereleases=True):
                wrong.append(f'{wanted.name} {version} is installed, {wanted.name}{wanted.specifier} is needed')
    if wrong:
        log.warning(
            "loggers.%s: may fail with Composer %s: %s; pip install 'llmfoundry-gauntlet[%s]'",
            extra,
            metadata.version('mosaicml'),
            ', '.join(wrong),
            extra,
        )


def logger_settings(loggers: Mapping[str, Any], run_name: str | None, checkpoint: str) -> dict[str, Any]:
    """Return the loggers' arguments for the evaluation of one checkpoint of a run.

    Each evaluation has its own loggers. They resume the same W&B run (not the training's, because two processes cannot
    write to one run) and the same MLflow run, and write separate files. The user's settings take precedence.
    """
    settings = {name: dict(arguments or {}) for name, arguments in loggers.items()}
    if run_name is not None and 'wandb' in settings:
        kept = {'id': re.sub(r'[^\w.-]', '-', f'{run_name}-watch'), 'resume': 'allow'}
        settings['wandb']['init_kwargs'] = {**kept, **(settings['wandb'].get('init_kwargs') or {})}
    if run_name is not None and 'mlflow' in settings:
        settings['mlflow'].setdefault('resume', True)
    if 'file' in settings:
        path = PurePosixPath(settings['file'].get('filename', '{run_name}/logs-rank{rank}.txt'))
        name = f'{checkpoint.replace("/", "-")}-{path.name}'
        settings['file'] = {**settings['file'], 'filename': str(path.with_name(name)), 'overwrite': True}
    return settings


def build_each(part: str, known: Builders, chosen: Mapping[str, Any] | None) -> list[Any]:
    """Build an object for each entry of a section such as `loggers`, in the order of the file; None: no arguments.

    Raise one GauntletError with every unknown name and argument, and every value that an object refuses.
    """
    if chosen is not None and not isinstance(chosen, Mapping):
        raise ConfigError(f'{part}: is {describe(chosen)}; allowed: a mapping with {", ".join(known)}')
    entries = {name: {} if arguments is None else arguments for name, arguments in (chosen or {}).items()}
    collected = Collected()
    built = []
    for name, arguments in entries.items():
        problems = check(part, known, name, arguments)
        if problems:
            collected.add(ConfigError(problems))
            continue
        with collected:
            built.append(build(part, known, name, arguments))
    collected.raise_all()
    return built


def check(part: str, known: Builders, name: str, arguments: Any) -> list[str]:
    """Return the problems of one entry."""
    if name not in known:
        return [f"{part}: unknown key '{name}'{suggestion(str(name), known)}"]
    if not isinstance(arguments, Mapping):
        return [f'{part}.{name}: is {describe(arguments)}; allowed: a mapping']
    parameters = inspect.signature(known[name]).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []  # the constructor checks its own keys
    problems = [
        f"{part}.{name}: unknown key '{key}'{suggestion(str(key), parameters)}"
        for key in arguments
        if key not in parameters
    ]
    missing = [key for key, value in parameters.items() if value.default is value.empty and key not in arguments]
    return problems + [f"{part}.{name}: the key '{key}' is missing" for key in missing]


def build(part: str, known: Builders, name: str, arguments: Mapping[str, Any]) -> Any:
    """Build one object. Raise ConfigError if its library is not installed."""
    try:
        return known[name](**arguments)
    except MissingConditionalImportError as error:
        raise ConfigError(
            f"{part}.{name}: its library is not installed; pip install 'llmfoundry-gauntlet[{name}]'"
        ) from error


@dataclass(slots=True, eq=False)
class Rows:
    """The state of one logger: the values it holds, and those still to log.

    `held` maps key and step to the logged value. `waiting` are evaluations that MLflow's server has not confirmed:
    step, Unix time in milliseconds, and values.
    """

    held: dict[tuple[str, int], float] = field(default_factory=dict)
    is_open: bool = False
    waiting: deque[tuple[int, int, dict[str, float]]] = field(default_factory=deque)
    writer: threading.Thread | None = None
    error: BaseException | None = None


_ROWS: WeakKeyDictionary[LoggerDestination, Rows] = WeakKeyDictionary()


def logger_errors(destination: LoggerDestination) -> Caught:
    """Return a context manager that catches the exceptions of a logger and its libraries."""
    own = [kind.__module__.partition('.')[0] for kind in type(destination).__mro__]
    return Caught(packages=[*LIBRARIES, *(name for name in own if name != 'builtins')])


def join_run(destination: LoggerDestination) -> LoggerDestination:
    """Patch a logger to keep the hyperparameters of the run that it joins, and return it.

    Composer logs every Trainer's seed and number of ranks as hyperparameters, and W&B and MLflow refuse to change
    existing ones. Without this patch no evaluation could be logged to the run of a finished training.
    """
    log_hyperparameters = destination.log_hyperparameters

    def log_where_allowed(hyperparameters: dict[str, Any]) -> None:
        with logger_errors(destination) as caught:
            log_hyperparameters(hyperparameters)
        if caught.error is not None:  # an evaluation does not need them
            log.info('%s keeps its hyperparameters: %s', type(destination).__name__, caught.error)

    vars(destination)['log_hyperparameters'] = log_where_allowed
    return destination


def log_evaluation(state: State, logger: Logger, metrics: Mapping[str, float], batch: int) -> None:
    """Log the metrics to every logger at training step `batch`, on every rank; logger errors become warnings."""
    values = {**metrics, BATCH: batch}
    for destination in logger.destinations:
        rows = _ROWS.setdefault(destination, Rows())
        with logger_errors(destination) as caught:
            if isinstance(destination, WandBLogger):
                log_to_wandb(destination, rows, values, batch, is_late=state.max_duration is None)
            elif isinstance(destination, MLFlowLogger):
                log_to_mlflow(destination, rows, values, batch)
            elif isinstance(destination, TensorboardLogger):
                log_to_tensorboard(destination, rows, values, batch)
            else:
                destination.log_metrics(values, batch)
        if caught.error is not None:
            log.warning(
                '%s failed to log the metrics of batch %d: %s: %s. Training and the other loggers continue',
                type(destination).__name__,
                batch,
                type(caught.error).__name__,
                caught.error,
            )


def log_to_wandb(destination: WandBLogger, rows: Rows, values: dict[str, float], batch: int, *, is_late: bool) -> None:
    """Add the values to W&B's current row, with the training batch as the x-axis of their charts.

    W&B drops rows whose step is lower than its current one. A late evaluation, one without training, gets a new row
    after the last one. In training a lower step raises RuntimeError: the training was resumed from a step before the
    one that its W&B run had reached.
    """
    if not destination._enabled:  # private in mosaicml 0.32.1 (docs/compatibility.md)
        return
    import wandb

    run = wandb.run
    if run is None:
        raise RuntimeError('there is no W&B run, or it is finished')
    if not rows.is_open:
        run.define_metric(BATCH, hidden=True)
        for pattern in wandb_patterns(values):
            run.define_metric(pattern, step_metric=BATCH)
        rows.is_open = True
    if batch < run.step and not is_late:
        raise RuntimeError(f'the W&B run had reached step {run.step} before the training was resumed')
    run.log(dict(values), step=max(batch, run.step + 1) if is_late else batch)


def wandb_patterns(keys: Iterable[str]) -> list[str]:
    """Return patterns for `define_metric` that cover these keys; W&B allows a star only at the end.

    Not `metrics/*`, because Composer's own evaluators and training metrics have such keys too.
    """
    tasks = (re.match(r'metrics/.+?/\d+-shot/', key) for key in keys)
    found = [match.group() for match in tasks if match is not None]
    return [f'{prefix}*' for prefix in dict.fromkeys([f'{OURS}/', f'{COMPOSITE_PREFIX}/', f'{SCORE_PREFIX}/', *found])]


def log_to_tensorboard(destination: TensorboardLogger, rows: Rows, values: dict[str, float], batch: int) -> None:
    """Write the values to disk at once, and before the first ones the layout of Custom Scalars.

    After a resume, values that the folder already holds are not written again.
    """
    if destination.rank_zero_only and global_rank() != 0:
        return
    writer = destination.writer
    if writer is None:
        raise RuntimeError('its writer has been closed')
    if not rows.is_open:
        writer.flush()
        rows.held = scalars_in(Path(writer.log_dir))
        if not rows.held:
            writer.add_custom_scalars(tensorboard_layout(values))
        rows.is_open = True
    rounded = {key: float(np.float32(value)) for key, value in values.items()}
    for key in missing(rows.held, rounded, batch, 'TensorboardLogger'):
        writer.add_scalar(key, values[key], global_step=batch)
        rows.held[key, batch] = rounded[key]
    writer.flush()


def tensorboard_layout(keys: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the charts with at least one of the keys, by section."""
    logged = list(keys)
    found = {
        section: {title: chart for title, chart in charts.items() if any(re.match(chart[1][0], key) for key in logged)}
        for section, charts in TENSORBOARD_CHARTS.items()
    }
    return {section: charts for section, charts in found.items() if charts}


def scalars_in(folder: Path) -> dict[tuple[str, int], float]:
    """Return the values in a folder's TensorBoard files that have any of ours, by key and step."""
    from tensorboard.backend.event_processing import event_file_loader  # type: ignore[import-untyped]

    held = {}
    for path in sorted(folder.glob('*.tfevents.*')):
        if BATCH.encode() not in path.read_bytes():
            continue  # no evaluation in it, as in most files of a long training
        for event in event_file_loader.LegacyEventFileLoader(str(path)).Load():
            held.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
    return held


def log_to_mlflow(destination: MLFlowLogger, rows: Rows, values: dict[str, float], batch: int) -> None:
    """Send the values to MLflow's server and wait a limited time for its answer.

    `destination.log_metrics` would skip a value equal to the previous one and buffer the others for some seconds.
    Values that the server did not confirm are resent with the next evaluation.
    """
    if not destination._enabled:  # private in mosaicml 0.32.1 (docs/compatibility.md)
        return
    wanted = {
        destination.rename(key): value
        for key, value in values.items()
        if not any(fnmatch.fnmatch(key, pattern) for pattern in destination.ignore_metrics)
    }
    if rows.writer is not None:
        rows.writer.join(MLFLOW_WAIT_SECONDS)  # it may still be sending earlier evaluations
    rows.waiting.append((batch, time.time_ns() // 1_000_000, wanted))
    if rows.writer is None or not rows.writer.is_alive():
        rows.error = None
        rows.writer = threading.Thread(target=write_waiting, args=(destination, rows), daemon=True)
        rows.writer.start()
        rows.writer.join(MLFLOW_WAIT_SECONDS)
    if rows.writer.is_alive():
        raise TimeoutError(
            f'{destination.tracking_uri} does not answer; waiting: {plural(len(rows.waiting), "evaluation")}'
        )
    if rows.error is not None:
        raise rows.error
    if rows.waiting:
        raise RuntimeError(f'the thread that writes to {destination.tracking_uri} failed')


def write_waiting(destination: MLFlowLogger, rows: Rows) -> None:
    """Send all waiting values to MLflow's server; stop at the first error and store it in `rows`."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    with logger_errors(destination) as caught:
        client = MlflowClient(destination.tracking_uri)
        run = str(destination._run_id)  # private in mosaicml 0.32.1 (docs/compatibility.md)
        while rows.waiting:
            batch, time_ms, values = rows.waiting[0]
            batch_key = destination.rename(BATCH)
            held: dict[tuple[str, int], float] = {}
            if any(point.step == batch for point in client.get_metric_history(run, batch_key)):
                for key in values:
                    held.update({(key, point.step): point.value for point in client.get_metric_history(run, key)})
            new = missing(held, values, batch, 'MLFlowLogger')
            points = [Metric(key, values[key], time_ms, batch) for key in new]  # type: ignore[no-untyped-call]
            client.log_batch(run, points, synchronous=True)
            rows.waiting.popleft()
    rows.error = caught.error


def missing(held: Mapping[tuple[str, int], float], values: Mapping[str, float], batch: int, logger: str) -> list[str]:
    """Return the keys whose value a logger does not hold yet at a step.

    A resumed training repeats the evaluations after its checkpoint. Metrics that differ from those already logged by
    more than rounding are logged too, with a warning; times and counts are not logged again.
    """
    new = [key for key in values if (key, batch) not in held]
    again = [key for key in values if (key, batch) in held and not key.startswith(f'{OURS}/')]
    changed = [key for key in again if not math.isclose(held[key, batch], values[key], rel_tol=1e-4, abs_tol=1e-6)]
    if changed:
        log.warning(
            '%s holds other values of batch %d already, as of %s: %g, now %g; now it holds both',
            logger,
            batch,
            changed[0],
            held[changed[0], batch],
            values[changed[0]],
        )
    return new + changed
