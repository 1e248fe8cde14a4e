"""Every key of the metric stream reaches the loggers that need no server, at its training step."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import logged_values
import loggers_worker
import pytest
import tiny
import wandb
from composer import Callback, Logger, State
from composer.loggers import FileLogger, InMemoryLogger, TensorboardLogger, WandBLogger
from logged_values import approximately, memory_values, recorded, sorted_values, warnings_of

from llmfoundry_gauntlet import EvalGauntlet, evaluate
from llmfoundry_gauntlet.results.files import find_results

# TensorBoard's own thread, whose folder a test removes; the error may show in the next test
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')

STEPS = [0, 2, 3, 4, 6]  # of which 3 is logged last, after the training
ACCURACY = 'metrics/colours/0-shot/InContextLearningMultipleChoiceAccuracy'


def evaluate_late(folder: Path, batch: int, out: Path, **arguments: Any) -> None:
    """Evaluate a checkpoint of the training, into the runs of its loggers."""
    loggers = [
        FileLogger(filename=str(folder / f'late_{batch}.txt'), capture_stdout=False, capture_stderr=False),
        TensorboardLogger(log_dir=str(folder / 'tensorboard')),
    ]
    if wandb.run is not None:  # which is finished by the first of them
        loggers.append(WandBLogger(init_kwargs={'dir': str(folder)}))
    evaluate(
        folder / 'checkpoints' / f'ep0-ba{batch}-rank0.pt',
        out=out,
        loggers=loggers,
        run_name=loggers_worker.RUN_NAME,
        device='cpu',
        tokens_per_batch=60,
        **loggers_worker.write_tasks(folder),
    )


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, InMemoryLogger]:
    """Train with all loggers, then evaluate the checkpoints of batches 3 and 4 into the same runs."""
    folder = tmp_path_factory.mktemp('all_loggers')
    destinations = loggers_worker.local_loggers(folder)
    trainer = loggers_worker.trainer(folder, destinations, [])
    trainer.fit()
    evaluate_late(folder, 3, folder / 'records' / 'ba3')
    evaluate_late(folder, 4, folder / 'again')
    loggers_worker.close(trainer)
    return folder, destinations[1]


def test_records_hold_every_evaluation_under_keys_of_each_category(trained):
    expected = recorded(trained[0])
    assert len(expected) > 100
    assert all([step for step, _ in points] == STEPS for points in expected.values())
    accuracies = [key for key in expected if key.startswith('metrics/odd/') and key.endswith('Accuracy')]
    names = [key.removeprefix('metrics/odd/0-shot').rpartition('/')[0] for key in accuracies]
    assert set(names) == {'', '/Säure _ Öl', '/__', '/a_b', '/high school', '/plain'}
    assert max(map(len, expected)) == 250  # of the category of 300 letters


def test_wandb_has_every_value_by_training_batch_including_late_ones(trained):
    expected = recorded(trained[0])
    rows = [row for row in logged_values.wandb_rows(trained[0]) if 'gauntlet/batch' in row]
    assert [row['gauntlet/batch'] for row in rows] == [0, 2, 4, 6, 3]
    assert [row['_step'] for row in rows] == [0, 2, 4, 6, 7]
    for key, points in expected.items():
        assert sorted((row['gauntlet/batch'], row[key]) for row in rows) == approximately({key: points})[key]


def test_wandb_plots_our_keys_alone_over_the_training_batch(trained):
    records = [
        record for record in logged_values.wandb_records(trained[0]) if record.WhichOneof('record_type') == 'metric'
    ]
    globs = {record.metric.glob_name for record in records} - {''}
    assert globs >= {'gauntlet/*', 'icl/metrics/eval_gauntlet/*', 'metrics/colours/0-shot/*', 'metrics/odd/0-shot/*'}
    over_batch = {record.metric.name for record in records if record.metric.step_metric == 'gauntlet/batch'} - {''}
    assert over_batch == set(recorded(trained[0])) - {'gauntlet/batch'}
    others = {key for row in logged_values.wandb_rows(trained[0]) for key in row} - set(recorded(trained[0]))
    assert others > {'loss/train/total', 'time/token'}
    others |= {'metrics/train/LanguageCrossEntropy', 'metrics/eval/LanguageCrossEntropy'}  # as Composer has them
    assert not any(key.startswith(glob[:-1]) for key in others for glob in globs)


def test_tensorboard_has_every_value_once_including_late_ones(trained):
    expected = recorded(trained[0])
    found = logged_values.tensorboard_values(trained[0] / 'tensorboard' / loggers_worker.RUN_NAME)
    assert [step for step, _ in found[ACCURACY]] == [0, 2, 4, 6, 3]
    assert sorted_values(found, expected) == approximately(expected, rel=1e-6)


def test_tensorboard_charts_have_existing_keys(trained):
    charts = logged_values.tensorboard_charts(trained[0] / 'tensorboard' / loggers_worker.RUN_NAME)
    keys = recorded(trained[0])
    found = {name: {key for key in keys if re.fullmatch(pattern, key)} for name, pattern in charts.items()}
    assert list(found) == ['gauntlet: composites', 'gauntlet: accuracy of tasks', 'gauntlet: seconds']
    assert found['gauntlet: composites'] == {f'icl/metrics/eval_gauntlet/{name}' for name in ('all', 'default_average')}
    assert len(found['gauntlet: accuracy of tasks']) == 7
    assert found['gauntlet: seconds'] == {'gauntlet/seconds'}


def test_files_and_memory_have_every_value(trained):
    expected = recorded(trained[0])
    found = logged_values.file_values(trained[0] / 'log_0.txt')
    for key, points in logged_values.file_values(trained[0] / 'late_3.txt').items():
        found.setdefault(key, []).extend(points)
    assert sorted_values(found, expected) == approximately(expected, abs=5.1e-5)
    expected = {key: [point for point in points if point[0] != 3] for key, points in expected.items()}
    assert sorted_values(memory_values(trained[1]), expected) == expected


def test_by_default_loggers_get_accuracies_errors_and_composites(tmp_path):
    memory = InMemoryLogger()
    gauntlet = EvalGauntlet(**tiny.write_tasks(tmp_path), interval='last', save_folder=str(tmp_path / 'records'))
    trainer = tiny.trainer([gauntlet], loggers=[memory], max_duration='1ba')
    trainer.fit()
    trainer.close()
    ours = {key for key in memory.data if re.match(r'metrics/.*-shot/|icl/|gauntlet/', key)}
    kept = re.compile(r'.*/(InContextLearning\w+|StandardError|standard_error)|(icl|gauntlet)/.*')
    expected = {key for key in recorded(tmp_path) if kept.fullmatch(key)}
    assert ours == expected and len(expected) < len(recorded(tmp_path)) - 10
    ((_, record),) = find_results(tmp_path / 'records')
    assert record['training']['loss'] == memory.data['loss/train/total'][-1][1] > 0


class Breaker(Callback):
    """Call a function just before the last evaluation is logged."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do

    def eval_end(self, state: State, logger: Logger) -> None:
        """Run before the gauntlet's and the loggers' own."""
        if state.timestamp.batch.value == 6:
            self.do()


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
    destinations = loggers_worker.local_loggers(tmp_path)
    trainer = loggers_worker.trainer(tmp_path, destinations, [Breaker(lambda: damage(tmp_path))])
    with pytest.raises(error):
        trainer.fit()
    loggers_worker.close(trainer)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(logger) and 'batch 6' in warning
    expected = recorded(tmp_path)
    assert [step for step, _ in expected[ACCURACY]] == [0, 2, 4, 6]
    assert sorted_values(memory_values(destinations[1]), expected) == expected
    wandb_steps = [step for step, _ in logged_values.wandb_values(tmp_path)[ACCURACY]]
    assert wandb_steps == ([0, 2, 4] if damage is finish_wandb else [0, 2, 4, 6])


def test_a_training_behind_its_wandb_run_is_a_warning(tmp_path, caplog):
    trainer = loggers_worker.trainer(tmp_path, loggers_worker.local_loggers(tmp_path), [])
    wandb.log({'elsewhere': 1.0}, step=5)
    trainer.fit()
    loggers_worker.close(trainer)
    warnings = warnings_of(caplog)
    for warning, batch in zip(warnings, (0, 2, 4), strict=True):
        assert warning.startswith('WandBLogger') and f'batch {batch}' in warning
    assert 'step 5' in warnings[0]
    assert [row['gauntlet/batch'] for row in logged_values.wandb_rows(tmp_path) if 'gauntlet/batch' in row] == [6]
