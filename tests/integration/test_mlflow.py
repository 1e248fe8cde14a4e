"""Every key of the metric stream arrives in a real MLflow server, also in one that is gone for a while."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import logged_values
import loggers_worker
import pytest
import torch
from composer import Callback, Logger, State, Trainer
from composer.loggers import InMemoryLogger, MLFlowLogger
from logged_values import MLflowServer, mlflow_values, recorded, sorted_values

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.composer import metric_stream
from llmfoundry_gauntlet.composer.metric_stream import join_run

pytestmark = pytest.mark.slow  # the server takes ten seconds to start
mlflow_server = logged_values.mlflow_server

ACCURACY = 'metrics/colours/0-shot/InContextLearningMultipleChoiceAccuracy'


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith('metric_stream')]


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


def test_every_value_arrives_once_equal_and_late_ones_too(tmp_path, caplog, mlflow_server):
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


def test_what_the_user_renames_and_leaves_out_is_renamed_and_left_out(tmp_path, mlflow_server):
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


def test_other_values_of_a_step_are_written_with_a_warning(tmp_path, caplog, mlflow_server):
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
    assert warnings[0].startswith('MLFlowLogger holds other values of batch 0 already, as of ')


class AtBatches(Callback):
    """Does something when a batch starts."""

    def __init__(self, **do: Callable[[], object]) -> None:
        self.do = do

    def batch_start(self, state: State, logger: Logger) -> None:
        """Batches count from 0."""
        self.do.get(f'batch_{state.timestamp.batch.value}', lambda: None)()


def trainer_without_server(
    folder: Path, server: MLflowServer, wait: Callable[[float], object] = lambda seconds: None
) -> tuple[Trainer, InMemoryLogger]:
    """A training whose server is gone at the evaluation of batch 2, and back at those of batches 4 and 6.

    `wait` is told how long the server is to be waited for from then on.
    """
    memory = InMemoryLogger()
    loggers = [loggers_worker.mlflow_logger(folder, server.uri), memory]
    go, come = (lambda: (server.kill(), wait(0.5))), (lambda: (server.start(), wait(200.0)))
    return loggers_worker.trainer(folder, loggers, [AtBatches(batch_1=go, batch_3=come)]), memory


def check_nothing_is_lost(folder: Path, server: MLflowServer, memory: InMemoryLogger) -> None:
    expected = recorded(folder)
    assert [step for step, _ in expected[ACCURACY]] == [0, 2, 4, 6]
    in_memory = {key: [(time.batch.value, value) for time, value in points] for key, points in memory.data.items()}
    assert sorted_values(in_memory, expected) == expected
    (found,) = mlflow_values(server, folder.name)
    assert sorted_values(found, expected) == expected


def test_a_server_that_is_gone_gets_its_values_with_the_next_evaluation(tmp_path, caplog, mlflow_server, monkeypatch):
    monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '1')
    monkeypatch.setattr(metric_stream, 'MLFLOW_WAIT_SECONDS', 200.0)
    trainer, memory = trainer_without_server(tmp_path, mlflow_server)
    trainer.fit()
    loggers_worker.close(trainer)
    (warning,) = warnings_of(caplog)
    assert warning.startswith('MLFlowLogger failed to log the metrics of batch 2: MlflowException: ')
    assert mlflow_server.uri in warning
    check_nothing_is_lost(tmp_path, mlflow_server, memory)


def test_a_server_that_does_not_answer_is_not_waited_for(tmp_path, caplog, mlflow_server, monkeypatch):
    monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '7')  # four minutes
    monkeypatch.setattr(metric_stream, 'MLFLOW_WAIT_SECONDS', 200.0)
    trainer, memory = trainer_without_server(
        tmp_path, mlflow_server, lambda seconds: monkeypatch.setattr(metric_stream, 'MLFLOW_WAIT_SECONDS', seconds)
    )
    trainer.fit()
    loggers_worker.close(trainer)
    (warning,) = warnings_of(caplog)
    assert warning.startswith('MLFlowLogger failed to log the metrics of batch 2: TimeoutError: ')
    assert f'{mlflow_server.uri} does not answer; 1 evaluations' in warning
    check_nothing_is_lost(tmp_path, mlflow_server, memory)
