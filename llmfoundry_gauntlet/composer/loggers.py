"""Log metrics to Composer's loggers, in an order and form that each of them accepts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from composer.core import State
from composer.loggers import FileLogger, Logger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger

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

Written = WandbRows | TensorboardScalars | MlflowSender

LOGGERS: dict[str, type[LoggerDestination]] = {
    'file': FileLogger,
    'mlflow': MLFlowLogger,
    'tensorboard': TensorboardLogger,
    'wandb': WandBLogger,
}
log = logging.getLogger(__name__)

# Values that each logger has written; they must not refer to the logger itself.
_WRITTEN: WeakKeyDictionary[LoggerDestination, Written] = WeakKeyDictionary()


def warn_of_libraries(loggers: Sequence[LoggerDestination]) -> None:
    """Warn once per process about each logger whose library version is not supported."""
    for name in LOGGERS:
        if any(isinstance(logger, LOGGERS[name]) for logger in loggers):
            warn_of_library(name)


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
