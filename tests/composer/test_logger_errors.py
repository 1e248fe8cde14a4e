"""Loggers that fail while an evaluation is logged."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import wandb
from composer.loggers import (
    InMemoryLogger,
    LoggerDestination,
)
from mlflow.exceptions import MlflowException

from llmfoundry_gauntlet.composer.loggers import log_evaluation
from llmfoundry_gauntlet.runtime.logged_values import scalars_in


class OwnError(Exception):
    """An error of the logger's own package."""


class Failing(LoggerDestination):
    """A user's logger."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        raise self.error or OwnError()

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        raise self.error or OwnError()


def log_with(error: BaseException) -> dict[str, Any]:
    """Return what a second logger holds after the first one failed."""
    memory = InMemoryLogger()
    state: Any = SimpleNamespace(max_duration=None, timestamp=SimpleNamespace(batch=7))
    memory.state = state
    logger: Any = SimpleNamespace(destinations=[Failing(error), memory])
    log_evaluation(state, logger, {'metrics/a': 0.5}, 7)
    return memory.data


@pytest.mark.parametrize(
    'error', [OwnError(), wandb.Error('no run'), MlflowException(''), OSError(), AttributeError(), AssertionError()]
)
def test_a_failing_logger_is_a_warning_and_others_get_everything(caplog: pytest.LogCaptureFixture, error: Exception):
    assert [value for _, value in log_with(error)['metrics/a']] == [0.5]
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f'Failing failed to log the metrics of batch 7: {type(error).__name__}' in record.getMessage()


def test_the_error_of_a_logger_does_not_keep_it_alive(caplog: pytest.LogCaptureFixture):
    """Otherwise a finished W&B run would be closed at a later collection, with the run that is open then."""
    failing = Failing(OwnError())
    logger: Any = SimpleNamespace(destinations=[failing])
    state: Any = SimpleNamespace(max_duration=None)
    log_evaluation(state, logger, {'metrics/a': 0.5}, 7)
    caplog.clear()  # which keeps the error, too
    kept = weakref.ref(failing)
    failing.error = None
    gc.disable()
    try:
        del failing, logger
        assert kept() is None
    finally:
        gc.enable()


def test_an_interrupt_is_not_a_logger_error():
    with pytest.raises(KeyboardInterrupt):
        log_with(KeyboardInterrupt())


def test_the_command_line_logs_to_the_loggers_that_it_names(
    gauntlet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # where TensorBoard's logger writes
    settings = tiny.write_tasks(tmp_path)
    model = tiny.save(tiny.model(), tmp_path / 'model')
    words = ('run', '--model', model, '--tasks', settings['tasks'], '--data-root', '.', '--out', 'out')
    assert gauntlet(*words, '--device', 'cpu', '--loggers', 'tensorboard')[0] == 0
    (folder,) = (tmp_path / 'tensorboard_logs').iterdir()
    key = 'metrics/sums/0-shot/InContextLearningLMAccuracy'
    metrics = json.loads((tmp_path / 'out/results.json').read_text())['metrics']
    assert scalars_in(folder)[key, 0] == pytest.approx(metrics[key])
