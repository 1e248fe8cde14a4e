"""Values that the loggers of an evaluation alone write to TensorBoard, W&B and MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import composer.loggers
import logged
import logged_evaluations
import pytest
import wandb
from logged import MLflowServer, warnings_of
from logged_evaluations import KEY, METRICS, log_once
from mlflow import MlflowClient

from llmfoundry_gauntlet.runtime import logged_values
from llmfoundry_gauntlet.runtime.loggers import (
    build_loggers,
    close_loggers,
    log_evaluation,
)

folder = logged_evaluations.folder


# ----------------------------------------------------------------------------------------------------------------------
# TensorBoard


def test_tensorboard_has_each_value_once_after_a_repetition(folder: Path, caplog: pytest.LogCaptureFixture):
    for batch, accuracy in [(2, 0.5), (4, 0.75), (4, 0.75), (2, 0.5), (4, 0.25)]:
        log_once({'tensorboard': {'log_dir': 'tensorboard'}}, {**METRICS, KEY: accuracy}, batch)

    values = logged.tensorboard_values(folder)
    assert values[KEY] == [(2, 0.5), (4, 0.75), (4, 0.25)]
    assert values['gauntlet/batch'] == [(2, 2.0), (4, 4.0)]
    (warning,) = warnings_of(caplog)
    assert 'batch 4' in warning
    assert KEY in warning
    assert list(logged.tensorboard_charts(folder)) == ['gauntlet: composites', 'gauntlet: accuracy of tasks']


def test_tensorboard_writes_to_its_default_folder(folder: Path):
    log_once({'tensorboard': None}, METRICS, 2)
    assert list((folder / 'tensorboard_logs/tiny').glob('events.out.tfevents.*'))


# ----------------------------------------------------------------------------------------------------------------------
# W&B


def offline(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Return the arguments of a run that is written below a folder."""
    return {**arguments, 'init_kwargs': {'mode': 'offline', 'dir': str(folder), **arguments.get('init_kwargs', {})}}


def test_wandb_gets_a_new_row_for_each_evaluation_with_the_batch_as_axis(folder: Path):
    loggers = build_loggers({'wandb': offline(folder)}, run_name='tiny')
    for batch in (0, 4, 2):
        log_evaluation(loggers, METRICS, batch)
    close_loggers(loggers)
    assert wandb.run is None
    rows = logged.wandb_rows(folder)
    assert [(row['_step'], row['gauntlet/batch']) for row in rows] == [(1, 0), (4, 4), (5, 2)]
    assert all(row[KEY] == 0.5 for row in rows)
    records = [record for record in logged.wandb_records(folder) if record.WhichOneof('record_type') == 'metric']
    over_batch = {record.metric.glob_name for record in records if record.metric.step_metric == 'gauntlet/batch'}
    wanted = {'gauntlet/*', 'icl/metrics/eval_gauntlet/*', 'icl/metrics/score/*', 'metrics/copa/0-shot/*'}
    assert over_batch - {''} == wanted


def wandb_run(folder: Path) -> Any:
    """Return W&B's description of the run."""
    (run,) = {
        record.run.SerializeToString(): record.run
        for record in logged.wandb_records(folder)
        if record.WhichOneof('record_type') == 'run'
    }.values()
    return run


def test_wandb_gets_the_arguments_of_the_run_and_those_of_init_kwargs(folder: Path):
    arguments = {'project': 'p', 'entity': 'e', 'group': 'g', 'tags': ['a', 'b']}
    others = {'project': 'other', 'id': 'own-id', 'notes': 'n'}

    log_once({'wandb': offline(folder, **arguments, init_kwargs=others)}, METRICS, 2)

    run = wandb_run(folder)
    assert run.project == 'p'  # rather than the one of init_kwargs
    assert run.entity == 'e'
    assert run.run_group == 'g'
    assert run.run_id == 'own-id'
    assert run.notes == 'n'
    assert run.display_name == 'tiny'
    assert list(run.tags) == ['a', 'b']
    assert [update.key for update in run.config.update if not update.key.startswith('_wandb')] == []


@pytest.mark.parametrize('arguments', [{'name': 'mine'}, {'init_kwargs': {'name': 'mine'}}])
def test_a_wandb_run_may_have_another_name(folder: Path, arguments: dict[str, Any]):
    log_once({'wandb': offline(folder, **arguments)}, METRICS, 2)
    assert wandb_run(folder).display_name == 'mine'


def test_a_run_that_is_open_in_a_training_loop_gets_the_values_and_stays_open(folder: Path):
    run = wandb.init(mode='offline', dir=str(folder))
    loggers = build_loggers({'wandb': {'project': 'another'}}, run_name='tiny')
    run.log({'loss': 3.0}, step=4)
    log_evaluation(loggers, METRICS, 4)
    run.log({'other loss': 2.0}, step=4)
    log_evaluation(loggers, METRICS, 2)  # a checkpoint before the current row
    close_loggers(loggers)
    assert wandb.run is run
    run.finish()
    rows = [
        {key: row.get(key) for key in ('_step', 'gauntlet/batch', 'loss', 'other loss')}
        for row in logged.wandb_rows(folder)
    ]
    assert [list(row.values()) for row in rows] == [[4, 4, 3.0, 2.0], [5, 2, None, None]]


def test_wandb_that_is_disabled_takes_everything_and_writes_nothing(folder: Path, caplog: pytest.LogCaptureFixture):
    log_once({'wandb': {'init_kwargs': {'mode': 'disabled'}}}, METRICS, 2)
    assert warnings_of(caplog) == []
    assert not (folder / 'wandb').exists()


def test_a_wandb_run_that_others_have_finished_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture):
    loggers = build_loggers({'wandb': offline(folder), 'file': {'filename': 'log.txt'}}, run_name='tiny')
    log_evaluation(loggers, METRICS, 2)
    wandb.finish()
    log_evaluation(loggers, METRICS, 4)
    close_loggers(loggers)
    (warning,) = warnings_of(caplog)
    assert warning.startswith('WandbLogger') and 'batch 4' in warning
    assert logged.file_values(folder / 'log.txt')[KEY] == [(2, 0.5), (4, 0.5)]


def test_a_wandb_run_of_an_evaluation_that_failed_has_failed(folder: Path):
    loggers = build_loggers({'wandb': offline(folder)}, run_name='tiny')
    try:
        log_evaluation(loggers, METRICS, 2)
        raise OSError
    except OSError:
        close_loggers(loggers)
    (status,) = [record.exit.exit_code for record in logged.wandb_records(folder) if record.HasField('exit')]
    assert status == 1


# ----------------------------------------------------------------------------------------------------------------------
# MLflow, in a local folder


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')  # which MLflow 3 wants for a folder
    return f'file://{folder}/mlruns'


def only_run(store: str, experiment: str) -> Any:
    """Return the only run of an experiment."""
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def mlflow_values(store: str, run: Any) -> logged.Values:
    client = MlflowClient(store)
    histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return {key: [(point.step, point.value) for point in points] for key, points in histories.items()}


def test_mlflow_has_every_value_in_a_run_with_its_names_and_tags(store: str):
    arguments = {
        'experiment_name': 'llama',
        'tracking_uri': store,
        'run_name': 'shown',
        'run_group': 'g',
        'tags': {'a': 1},
        'rename_metrics': {KEY: 'copa'},
        'ignore_metrics': ['icl/*'],
    }
    log_once({'mlflow': arguments}, METRICS, 4)
    run = only_run(store, 'llama')
    assert mlflow_values(store, run) == {
        'copa': [(4, 0.5)],
        'gauntlet/items': [(4, 100.0)],
        'gauntlet/batch': [(4, 4.0)],
    }
    assert (run.info.run_name, run.info.status) == ('shown', 'FINISHED')
    assert {key: run.data.tags[key] for key in ('run_name', 'run_group', 'a')} == {
        'run_name': 'tiny',
        'run_group': 'g',
        'a': '1',
    }
    assert run.data.params == {}


def composers_run(store: str, **arguments: Any) -> Any:
    """Return Composer's logger in a training run, with its run of MLflow."""
    logger = composer.loggers.MLFlowLogger('llama', tracking_uri=store, log_system_metrics=False, **arguments)
    logger.init(SimpleNamespace(run_name='tiny'), None)
    return logger


@pytest.mark.parametrize('is_finished', [False, True])
def test_the_run_of_a_training_is_joined_and_keeps_its_status(store: str, is_finished: bool):
    training = composers_run(store)
    if is_finished:
        training.post_close()
    arguments = {'experiment_name': 'llama', 'tracking_uri': store, 'resume': True}
    for batch, accuracy in [(2, 0.5), (2, 0.5), (4, 0.5)]:
        log_once({'mlflow': arguments}, {**METRICS, KEY: accuracy}, batch)
    run = only_run(store, 'llama')
    assert run.info.run_id == training._run_id
    assert run.info.status == ('FINISHED' if is_finished else 'RUNNING')
    assert mlflow_values(store, run)[KEY] == [(2, 0.5), (4, 0.5)]
    if not is_finished:
        training.post_close()


def test_without_resume_each_evaluation_has_a_new_run(store: str):
    for _ in range(2):
        log_once({'mlflow': {'experiment_name': 'llama', 'tracking_uri': store}}, METRICS, 2)
    client = MlflowClient(store)
    assert len(client.search_runs([client.get_experiment_by_name('llama').experiment_id])) == 2


def test_variables_of_mlflow_name_the_experiment_and_the_run(store: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('MLFLOW_EXPERIMENT_NAME', 'of the environment')
    monkeypatch.setenv('RUN_NAME', 'of the job')  # which Composer, too, prefers for the tag
    log_once({'mlflow': {'tracking_uri': store}}, METRICS, 2)
    run = only_run(store, 'of the environment')
    assert run.data.tags['run_name'] == 'of the job'
    monkeypatch.setenv('MLFLOW_RUN_ID', run.info.run_id)
    log_once({'mlflow': {'tracking_uri': store}}, METRICS, 4)
    assert mlflow_values(store, only_run(store, 'of the environment'))[KEY] == [(2, 0.5), (4, 0.5)]


def test_the_default_experiment_is_composers(store: str):
    log_once({'mlflow': {'tracking_uri': store}}, METRICS, 2)
    assert mlflow_values(store, only_run(store, 'my-mlflow-experiment'))[KEY] == [(2, 0.5)]


def test_a_run_of_an_evaluation_that_failed_has_failed(store: str):
    loggers = build_loggers({'mlflow': {'experiment_name': 'llama', 'tracking_uri': store}}, run_name='tiny')
    try:
        log_evaluation(loggers, METRICS, 2)
        raise OSError
    except OSError:
        close_loggers(loggers)
    assert only_run(store, 'llama').info.status == 'FAILED'


# ----------------------------------------------------------------------------------------------------------------------
# MLflow, a server that is gone for a while


@pytest.fixture(scope='module')
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    server = MLflowServer(tmp_path_factory.mktemp('mlflow'))
    server.start()
    yield server
    server.kill()


@pytest.mark.parametrize(
    ('retries', 'seconds', 'error'),
    [('1', 200.0, 'MlflowException'), ('7', 0.5, 'TimeoutError')],  # refused; or retried for four minutes
)
def test_values_for_an_unavailable_server_are_logged_later(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    server: MLflowServer,
    retries: str,
    seconds: float,
    error: str,
):
    """The server is gone at the first evaluation, when the run would be opened, and back when the loggers close."""
    monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', retries)
    monkeypatch.setattr(logged_values, 'MLFLOW_WAIT_SECONDS', seconds)
    arguments = {'experiment_name': folder.name, 'tracking_uri': server.uri}
    loggers = build_loggers({'mlflow': arguments, 'file': {'filename': 'log.txt'}}, run_name='tiny')
    server.kill()
    try:
        log_evaluation(loggers, METRICS, 2)
    finally:
        server.start()
    (warning,) = warnings_of(caplog)
    assert all(fact in warning for fact in ('MlflowLogger', 'batch 2', error, server.uri))
    monkeypatch.setattr(logged_values, 'MLFLOW_WAIT_SECONDS', 200.0)
    close_loggers(loggers)
    assert server.values(folder.name)[KEY] == [(2, 0.5)]
    assert only_run(server.uri, folder.name).info.status == 'FINISHED'
    assert logged.file_values(folder / 'log.txt')[KEY] == [(2, 0.5)]
