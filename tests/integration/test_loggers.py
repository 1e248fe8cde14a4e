"""Every key of the metric stream reaches every logger at its training step, even after a kill or without a server."""

from __future__ import annotations

import atexit
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import composer_training
import forks
import logged
import mlflow
import pytest
import tiny
import torch
import wandb
from composer import Engine
from composer.loggers import InMemoryLogger
from logged import MLflowServer, check_logged, recorded, warnings_of

from llmfoundry_gauntlet import EvalGauntlet, evaluate
from llmfoundry_gauntlet.results.files import find_results

# TensorBoard's own thread, whose folder a test removes; the error may show in the next test
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')

STEPS = [0, 2, 3, 4, 6]  # of which 3 is logged last, after the training
OF_TRAINING = [0, 2, 4, 6]
LATE = 3
ACCURACY = 'metrics/colours/0-shot/InContextLearningMultipleChoiceAccuracy'


@pytest.fixture(scope='module')
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    server = MLflowServer(tmp_path_factory.mktemp('mlflow'))
    server.start()
    yield server
    atexit.unregister(Engine._close)  # Composer would close loggers again at exit, when the server is gone
    server.kill()


def evaluate_late(folder: Path, batch: int, out: Path, server: MLflowServer) -> None:
    """Evaluate a checkpoint of the training, into the runs of its loggers."""
    loggers = {
        'file': {'filename': str(folder / f'late_{batch}.txt')},
        'tensorboard': {'log_dir': str(folder / 'tensorboard')},
        'mlflow': {'experiment_name': folder.name, 'tracking_uri': server.uri, 'resume': True},
    }
    if batch == LATE:  # the other one is a repetition, for which W&B would have a further row
        loggers['wandb'] = {'init_kwargs': {'dir': str(folder)}}
    evaluate(
        folder / 'checkpoints' / f'ep0-ba{batch}-rank0.pt',
        out=out,
        loggers=loggers,
        run_name=logged.RUN_NAME,
        device='cpu',
        tokens_per_batch=60,
        **logged.write_tasks(folder),
    )


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory, server: MLflowServer) -> tuple[Path, InMemoryLogger]:
    """Train with all loggers, then evaluate the checkpoints of batches 3 and 4 into the same runs."""
    folder = tmp_path_factory.mktemp('all_loggers')
    destinations = [*logged.local_loggers(folder), logged.mlflow_logger(folder, server.uri)]
    with closing(logged.trainer(folder, destinations, [])) as trainer:
        trainer.fit()
        mlflow.end_run()  # so that it can be resumed
        evaluate_late(folder, LATE, folder / 'records' / 'ba3', server)
        evaluate_late(folder, 4, folder / 'again', server)
    return folder, destinations[1]


def test_records_hold_every_evaluation_under_keys_of_each_category(trained):
    points_by_key = recorded(trained[0])

    assert len(points_by_key) > 100
    assert all([step for step, _ in points] == STEPS for points in points_by_key.values())
    accuracies = [key for key in points_by_key if key.startswith('metrics/odd/') and key.endswith('Accuracy')]
    categories = {key.removeprefix('metrics/odd/0-shot').rpartition('/')[0] for key in accuracies}
    assert categories == {'', '/Säure _ Öl', '/__', '/a_b', '/high school', '/plain'}
    assert max(map(len, points_by_key)) == 250  # of the category of 300 letters


def test_wandb_has_every_value_by_training_batch_including_late_ones(trained):
    folder, _ = trained

    rows = [row for row in logged.wandb_rows(folder) if 'gauntlet/batch' in row]
    assert [row['gauntlet/batch'] for row in rows] == [0, 2, 4, 6, 3]
    assert [row['_step'] for row in rows] == [0, 2, 4, 6, 7]
    check_logged(logged.wandb_values(folder), recorded(folder), rel=1e-6)


def wandb_metrics(folder: Path) -> list[Any]:
    """Return how W&B plots each key, or each group of keys."""
    return [record.metric for record in logged.wandb_records(folder) if record.WhichOneof('record_type') == 'metric']


def test_wandb_plots_our_keys_over_the_training_batch(trained):
    folder, _ = trained

    plotted_over_batch = {metric.name for metric in wandb_metrics(folder) if metric.step_metric == 'gauntlet/batch'}

    assert plotted_over_batch - {''} == set(recorded(folder)) - {'gauntlet/batch'}


def test_wandb_plots_no_other_keys_over_the_training_batch(trained):
    folder, _ = trained
    others = {key for row in logged.wandb_rows(folder) for key in row} - set(recorded(folder))
    assert others > {'loss/train/total', 'time/token'}
    # As Composer has them.
    others |= {'metrics/train/LanguageCrossEntropy', 'metrics/eval/LanguageCrossEntropy'}

    globs = {metric.glob_name for metric in wandb_metrics(folder)} - {''}

    assert globs >= {'gauntlet/*', 'icl/metrics/eval_gauntlet/*', 'metrics/colours/0-shot/*', 'metrics/odd/0-shot/*'}
    assert not any(key.startswith(glob[:-1]) for key in others for glob in globs)


def test_tensorboard_has_every_value_once_including_late_ones(trained):
    folder, _ = trained

    values = logged.tensorboard_values(folder)

    assert [step for step, _ in values[ACCURACY]] == [0, 2, 4, 6, 3]
    check_logged(values, recorded(folder), rel=1e-6)


def test_tensorboard_has_charts_of_existing_keys(trained):
    folder, _ = trained
    keys = recorded(folder)

    patterns = logged.tensorboard_charts(folder)

    charts = {name: {key for key in keys if re.fullmatch(pattern, key)} for name, pattern in patterns.items()}
    gold_bits = 'gauntlet: gold bits per byte (lower is better)'
    assert list(charts) == ['gauntlet: composites', gold_bits, 'gauntlet: accuracy of tasks', 'gauntlet: seconds']
    composites = {f'icl/metrics/eval_gauntlet/{name}' for name in ('all', 'default_average')}
    assert charts['gauntlet: composites'] == composites
    assert charts[gold_bits] == {f'{key}/gold_bits_per_byte' for key in composites}
    assert len(charts['gauntlet: accuracy of tasks']) == 7
    assert charts['gauntlet: seconds'] == {'gauntlet/seconds'}


def test_mlflow_has_every_value_once_including_late_ones(trained, server):
    folder, _ = trained

    values = server.values(folder.name)

    check_logged(values, recorded(folder))
    assert len({value for _, value in values[ACCURACY]}) == 1  # which Composer's logger would write once
    assert max(map(len, values)) == 250
    assert [step for step, _ in values['loss/train/total']] == list(range(6))


def test_files_and_memory_have_every_value(trained):
    folder, memory = trained
    points_by_key = recorded(folder)

    check_logged(logged.file_values(folder / 'log_0.txt', folder / 'late_3.txt'), points_by_key, abs=5.1e-5)

    # The memory has only what the training logged, which the late evaluation is not part of.
    of_training = {key: [(step, value) for step, value in points if step != 3] for key, points in points_by_key.items()}
    check_logged(logged.memory_values(memory), of_training)


def test_by_default_loggers_get_accuracies_errors_and_composites(tmp_path):
    memory = InMemoryLogger()
    gauntlet = EvalGauntlet(**tiny.write_tasks(tmp_path), interval='last', save_folder=str(tmp_path / 'records'))
    composer_training.train([gauntlet], loggers=[memory], max_duration='1ba')
    ours = {key for key in memory.data if re.match(r'metrics/.*-shot/|icl/|gauntlet/', key)}
    kept = re.compile(r'.*/(InContextLearning\w+|StandardError|standard_error)|(icl|gauntlet)/.*')
    expected = {key for key in recorded(tmp_path) if kept.fullmatch(key)}
    assert ours == expected and len(expected) < len(recorded(tmp_path)) - 10
    ((_, record),) = find_results(tmp_path / 'records')
    assert record['training']['loss'] == memory.data['loss/train/total'][-1][1] > 0
    assert record['training']['loss_batches'] == 1


def finish_wandb(folder: Path) -> None:
    wandb.finish()


def replace_tensorboard_folder(folder: Path) -> None:
    shutil.rmtree(folder / 'tensorboard')
    (folder / 'tensorboard').write_text('')


@pytest.mark.parametrize(
    ('damage', 'logger', 'error'),
    [
        (finish_wandb, 'WandBLogger', wandb.Error),  # Composer's own error after the last batch
        (replace_tensorboard_folder, 'TensorboardLogger', NotADirectoryError),  # at the end of the evaluation
    ],
)
def test_a_broken_logger_is_a_warning_and_the_others_lose_no_value(tmp_path, caplog, damage, logger, error):
    destinations = logged.local_loggers(tmp_path)
    trainer = logged.trainer(tmp_path, destinations, [composer_training.AtEvaluation(6, lambda: damage(tmp_path))])
    with pytest.raises(error):
        logged.fit(trainer)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(logger) and 'batch 6' in warning
    expected = recorded(tmp_path)
    assert [step for step, _ in expected[ACCURACY]] == OF_TRAINING
    check_logged(logged.memory_values(destinations[1]), expected)
    wandb_steps = [step for step, _ in logged.wandb_values(tmp_path)[ACCURACY]]
    assert wandb_steps == ([0, 2, 4] if damage is finish_wandb else OF_TRAINING)


def test_a_training_behind_its_wandb_run_is_a_warning(tmp_path, caplog):
    trainer = logged.trainer(tmp_path, logged.local_loggers(tmp_path), [])
    wandb.log({'elsewhere': 1.0}, step=5)
    logged.fit(trainer)
    warnings = warnings_of(caplog)
    for warning, batch in zip(warnings, (0, 2, 4), strict=True):
        assert warning.startswith('WandBLogger') and f'batch {batch}' in warning
    assert 'step 5' in warnings[0]
    assert [row['gauntlet/batch'] for row in logged.wandb_rows(tmp_path) if 'gauntlet/batch' in row] == [6]


def test_renamed_and_ignored_metrics_of_mlflow_are_renamed_and_ignored(tmp_path, server):
    changes = {'rename_metrics': {ACCURACY: 'colours'}, 'ignore_metrics': ['metrics/odd/*']}
    logger = logged.mlflow_logger(tmp_path, server.uri, **changes)
    logged.fit(logged.trainer(tmp_path, [logger], [], max_duration='2ba'))
    found = server.values(tmp_path.name)
    assert [step for step, _ in found['colours']] == [0, 2]
    assert ACCURACY not in found
    assert not any(key.startswith('metrics/odd/') for key in found)


def test_other_values_at_a_step_that_mlflow_has_are_a_warning(tmp_path, caplog, server):
    for seed in (0, 1):
        logger = logged.mlflow_logger(tmp_path, server.uri, resume=True)
        trainer = logged.trainer(tmp_path, [logger], [], max_duration='2ba', save_overwrite=True)
        with torch.no_grad():
            for parameter in trainer.state.model.parameters():
                parameter.mul_(1.0 + 0.1 * seed)
        logged.fit(trainer)
    found = server.values(tmp_path.name)
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
    tmp_path, caplog, server, monkeypatch, retries: str, seconds: float, error: str
):
    """The server is gone at the evaluation of batch 2, and back at those of batches 4 and 6."""
    monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', retries)

    def wait(seconds: float) -> None:
        monkeypatch.setattr('llmfoundry_gauntlet.runtime.logged_values.MLFLOW_WAIT_SECONDS', seconds)

    wait(200.0)
    memory = InMemoryLogger()
    loggers = [logged.mlflow_logger(tmp_path, server.uri), memory]
    go, come = (lambda: (server.kill(), wait(seconds))), (lambda: (server.start(), wait(200.0)))
    logged.fit(logged.trainer(tmp_path, loggers, [composer_training.AtBatches({2: go, 4: come})]))
    (warning,) = warnings_of(caplog)
    assert all(fact in warning for fact in ('MLFlowLogger', 'batch 2', error, server.uri))
    expected = recorded(tmp_path)
    assert [step for step, _ in expected[ACCURACY]] == OF_TRAINING
    check_logged(logged.memory_values(memory), expected)
    check_logged(server.values(tmp_path.name), expected)


def train(num_ranks: int, folder: Path, server: MLflowServer, moment: str) -> list[int]:
    """Train on some ranks; return their exit statuses."""
    log, environment = folder / 'log.txt', {'WANDB_MODE': 'offline', 'WANDB_SERVICE': ''}  # not that of this process
    ranks = forks.start_ranks(logged.job, [log] * num_ranks, folder, server.uri, moment, **environment)
    return forks.statuses(ranks, log)


def everywhere(folder: Path, server: MLflowServer) -> dict[str, Any]:
    """Return the values of the loggers that record steps."""
    values = {'tensorboard': logged.tensorboard_values(folder), 'wandb': logged.wandb_values(folder)}
    return {'mlflow': server.values(folder.name), **values}


@pytest.mark.parametrize('moment', ['in_evaluation', 'after_evaluation'])
def test_a_killed_and_resumed_training_logs_each_evaluation_once(tmp_path, server, moment):
    log = tmp_path / 'log.txt'
    assert train(1, tmp_path, server, moment) == [-9]
    assert 'Traceback' not in log.read_text(), forks.tail_of(log)
    assert [step for step, _ in recorded(tmp_path)['gauntlet/batch']] in (
        [[0, 2]] if moment == 'in_evaluation' else [[0, 2], [0, 2, 4]]  # the last may have been written or not
    )
    assert train(1, tmp_path, server, 'whole') == [0], forks.tail_of(log)
    expected = {key: points for key, points in recorded(tmp_path).items() if not key.startswith('gauntlet/seconds')}
    assert [step for step, _ in expected['gauntlet/batch']] == OF_TRAINING
    found = everywhere(tmp_path, server)
    for name in ('mlflow', 'tensorboard'):
        check_logged(found[name], expected, rel=1e-6)
        assert [step for step, _ in sorted(found[name]['gauntlet/seconds'])] == OF_TRAINING, name
    # Offline W&B loses what it has in memory when it is killed; what it has it has once.
    steps = [step for step, _ in found['wandb']['gauntlet/batch']]
    assert steps in ([0, 4, 6], OF_TRAINING)
    kept = {key: [point for point in points if point[0] in steps] for key, points in expected.items()}
    check_logged(found['wandb'], kept, rel=1e-6)


def test_only_rank_0_logs(tmp_path, server):
    assert train(2, tmp_path, server, 'whole') == [0, 0], forks.tail_of(tmp_path / 'log.txt')
    expected = recorded(tmp_path)
    assert [step for step, _ in expected['gauntlet/batch']] == OF_TRAINING
    for values in everywhere(tmp_path, server).values():
        check_logged(values, expected, rel=1e-6)
