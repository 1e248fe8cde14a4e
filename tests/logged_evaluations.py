"""An evaluation with three metrics, logged without a trainer in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.runtime.loggers import build_loggers, close_loggers, log_evaluation

KEY = 'metrics/copa/0-shot/InContextLearningMultipleChoiceAccuracy'
COMPOSITE = 'icl/metrics/eval_gauntlet/default_average'
METRICS = {KEY: 0.5, COMPOSITE: 0.25, 'gauntlet/items': 100}
OF_NAMES = ('RUN_NAME', 'COMPOSER_RUN_NAME', 'MLFLOW_EXPERIMENT_NAME', 'MLFLOW_EXPERIMENT_ID', 'MLFLOW_RUN_ID')


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the test's folder, without the variables that name runs."""
    monkeypatch.chdir(tmp_path)
    for name in OF_NAMES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def log_once(chosen: dict[str, Any], metrics: dict[str, float], batch: int, run_name: str | None = 'tiny') -> None:
    """Log one evaluation, as a process that evaluates one checkpoint."""
    loggers = build_loggers(chosen, run_name=run_name)
    log_evaluation(loggers, metrics, batch)
    close_loggers(loggers)
