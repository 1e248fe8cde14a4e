"""Every key of the metric stream reaches a real MLflow server, even one that is unavailable for a while."""

from __future__ import annotations

from pathlib import Path

import logged_values
import loggers_worker
import pytest
import tiny
import torch
from composer.loggers import InMemoryLogger, MLFlowLogger
from logged_values import MLflowServer, memory_values, mlflow_values, recorded, sorted_values, warnings_of

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.composer.loggers import join_run

pytestmark = pytest.mark.slow  # the server takes ten seconds to start
mlflow_server = logged_values.mlflow_server

ACCURACY = 'metrics/colours/0-shot/InContextLearningMultipleChoiceAccuracy'


def evaluate_late(folder: Path, batch: int, out: Path, server: MLflowServer) -> None:
    evaluate(
        folder / 'checkpoints' / f'ep0-ba{batch}-rank0.pt',
        out=out,
        loggers=[loggers_worker.mlflow_logger(folder, server.uri, resume=True)],
        run_name=loggers_worker.RUN_NAME,
        device='cpu',
        tokens_per_batch=60,
        **loggers_worker.write_tasks(folder),
    )


def test_mlflow_has_every_value_once_including_late_ones(tmp_path, caplog, mlflow_server):
    trainer = loggers_worker.trainer(tmp_path, [loggers_worker.mlflow_logger(tmp_path, mlflow_server.uri)], [])
    trainer.fit()
    loggers_worker.close(trainer)
    evaluate_late(tmp_path, 3, tmp_path / 'records' / 'ba3', mlflow_server)
    evaluate_late(tmp_path, 4, tmp_path / 'again', mlflow_server)
    expected = recorded(tmp_path)
    (found,) = mlflow_values(mlflow_server, tmp_path.name)
    assert sorted_values(found, expected) == expected
    assert [step for step, _ in sorted(found[ACCURACY])] == [0, 2, 3, 4, 6]
    assert len({value for _, value in found[ACCURACY]}) == 1  # which Composer's logger would write once
    assert max(map(len, found)) == 250
    assert [step for step, _ in found['loss/train/total']] == list(range(6))
    assert warnings_of(caplog) == []


def test_renamed_and_ignored_metrics_are_renamed_and_ignored(tmp_path, mlflow_server):
    logger = MLFlowLogger(
        experiment_name=tmp_path.name,
        tracking_uri=mlflow_server.uri,
        log_system_metrics=False,
        rename_metrics={ACCURACY: 'colours'},
        ignore_metrics=['metrics/odd/*'],
    )
    trainer = loggers_worker.trainer(tmp_path, [logger], [], max_duration='2ba')
    trainer.fit()
    loggers_worker.close(trainer)
    (found,) = mlflow_values(mlflow_server, tmp_path.name)
    assert [step for step, _ in found['colours']] == [0, 2]
    assert ACCURACY not in found
    assert not any(key.startswith('metrics/odd/') for key in found)


def test_other_values_at_a_logged_step_are_a_warning(tmp_path, caplog, mlflow_server):
    for seed in (0, 1):
        logger = join_run(loggers_worker.mlflow_logger(tmp_path, mlflow_server.uri, resume=True))
        trainer = loggers_worker.trainer(tmp_path, [logger], [], max_duration='2ba', save_overwrite=True)
        with torch.no_grad():
            for parameter in trainer.state.model.parameters():
                parameter.mul_(1.0 + 0.1 * seed)
        trainer.fit()
        loggers_worker.close(trainer)
    (found,) = mlflow_values(mlflow_server, tmp_path.name)
    bits = found['metrics/sums/0-shot/GoldBitsPerByte']
    assert [step for step, _ in sorted(bits)] == [0, 0, 2, 2]
    assert len({value for _, value in bits}) == 4
    assert [step for step, _ in found['gauntlet/seconds']] == [0, 2]
    warnings = warnings_of(caplog)
    assert len(warnings) == 2
    assert warnings[0].startswith('MLFlowLogger') and 'batch 0' in warnings[0]


@pytest.mark.parametrize(
    ('retries', 'seconds', 'error'),
    [('1', 200.0, 'MlflowException'), ('7', 0.5, 'TimeoutError')],  # refused; or retried for four minutes
)
def test_values_for_an_unavailable_server_are_logged_with_the_next_evaluation(
    tmp_path, caplog, mlflow_server, monkeypatch, retries: str, seconds: float, error: str
):
    """The server is gone at the evaluation of batch 2, and back at those of batches 4 and 6."""
    monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', retries)

    def wait(seconds: float) -> None:
        monkeypatch.setattr('llmfoundry_gauntlet.composer.loggers.MLFLOW_WAIT_SECONDS', seconds)

    wait(200.0)
    memory = InMemoryLogger()
    loggers = [loggers_worker.mlflow_logger(tmp_path, mlflow_server.uri), memory]
    go, come = (lambda: (mlflow_server.kill(), wait(seconds))), (lambda: (mlflow_server.start(), wait(200.0)))
    trainer = loggers_worker.trainer(tmp_path, loggers, [tiny.AtBatches({2: go, 4: come})])
    trainer.fit()
    loggers_worker.close(trainer)
    (warning,) = warnings_of(caplog)
    assert all(fact in warning for fact in ('MLFlowLogger', 'batch 2', error, mlflow_server.uri))
    expected = recorded(tmp_path)
    assert [step for step, _ in expected[ACCURACY]] == [0, 2, 4, 6]
    assert sorted_values(memory_values(memory), expected) == expected
    (found,) = mlflow_values(mlflow_server, tmp_path.name)
    assert sorted_values(found, expected) == expected
