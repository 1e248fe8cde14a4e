"""Build Composer's loggers from YAML, and log metrics in an order and form that each of them accepts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from composer.core import State
from composer.loggers import FileLogger, Logger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger
from composer.utils import MissingConditionalImportError

from llmfoundry_gauntlet.errors import Collected, ConfigError, describe, suggestion
from llmfoundry_gauntlet.metrics.keys import BATCH
from llmfoundry_gauntlet.runtime.distributed import global_rank
from llmfoundry_gauntlet.runtime.logged_values import (
    MlflowSender,
    TensorboardScalars,
    WandbRows,
    late_row,
    logger_errors,
    warn_of_failure,
    warn_of_library,
)

Builders = Mapping[str, Callable[..., Any]]
Written = WandbRows | TensorboardScalars | MlflowSender

LOGGERS: dict[str, type[LoggerDestination]] = {
    'file': FileLogger,
    'mlflow': MLFlowLogger,
    'tensorboard': TensorboardLogger,
    'wandb': WandBLogger,
}
log = logging.getLogger(__name__)

# What has been written by each logger, which must not refer to the logger itself.
_WRITTEN: WeakKeyDictionary[LoggerDestination, Written] = WeakKeyDictionary()


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


def log_evaluation(state: State, logger: Logger, metrics: Mapping[str, float], batch: int) -> None:
    """Log the metrics to every logger at training step `batch`, on every rank; logger errors become warnings."""
    values = {**metrics, BATCH: batch}
    for destination in logger.destinations:
        with logger_errors(destination) as caught:
            if isinstance(destination, WandBLogger):
                log_to_wandb(destination, values, batch, is_late=state.max_duration is None)
            elif isinstance(destination, MLFlowLogger):
                log_to_mlflow(destination, values, batch)
            elif isinstance(destination, TensorboardLogger):
                log_to_tensorboard(destination, values, batch)
            else:
                destination.log_metrics(values, batch)
        if caught.error is not None:
            warn_of_failure(destination, batch, caught.error)


def log_to_wandb(destination: WandBLogger, values: dict[str, float], batch: int, *, is_late: bool) -> None:
    """Add the values to W&B's current row; those of a late evaluation, one without training, to a new row.

    In training a step below the current one raises RuntimeError: the training was resumed from a step before the one
    that its W&B run had reached.
    """
    if not destination._enabled:  # private in mosaicml 0.32.1 (docs/compatibility.md)
        return
    import wandb

    run = wandb.run
    if run is None:
        raise RuntimeError('there is no W&B run, or it is finished')
    if batch < run.step and not is_late:
        raise RuntimeError(f'the W&B run had reached step {run.step} before the training was resumed')
    rows = _WRITTEN.setdefault(destination, WandbRows())
    assert isinstance(rows, WandbRows)
    rows.log(run, values, late_row(run, batch) if is_late else batch)


def log_to_tensorboard(destination: TensorboardLogger, values: dict[str, float], batch: int) -> None:
    """Write the values that the logger's folder does not hold yet."""
    if destination.rank_zero_only and global_rank() != 0:
        return
    if destination.writer is None:
        raise RuntimeError('its writer has been closed')
    scalars = _WRITTEN.setdefault(destination, TensorboardScalars())
    assert isinstance(scalars, TensorboardScalars)
    scalars.log(destination.writer, values, batch)


def log_to_mlflow(destination: MLFlowLogger, values: dict[str, float], batch: int) -> None:
    """Send the values to the logger's run.

    `destination.log_metrics` would skip a value equal to the previous one and buffer the others for some seconds.
    """
    if not destination._enabled:  # private in mosaicml 0.32.1 (docs/compatibility.md)
        return
    sender = _WRITTEN.get(destination)
    if sender is None:
        run_id = str(destination._run_id)  # private in mosaicml 0.32.1 (docs/compatibility.md)
        sender = MlflowSender(
            tracking_uri=destination.tracking_uri,
            open_run=lambda client: run_id,
            name='MLFlowLogger',
            rename=destination.rename_metrics,
            ignore=destination.ignore_metrics,
        )
        _WRITTEN[destination] = sender
    assert isinstance(sender, MlflowSender)
    sender.send(values, batch)
