"""The callback in a real Trainer, in one process, also after faults: training continues with what can be kept."""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composer_training
import forks
import pytest
import tiny
import torch
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from tiny import record

from llmfoundry_gauntlet import ConfigError, EvalGauntlet, ModelError, RecordError, build_icl_evaluators, evaluate
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.metrics.keys import with_errors
from llmfoundry_gauntlet.results.files import find_results, write_records
from llmfoundry_gauntlet.scoring.code.sandbox import find_sandbox
from llmfoundry_gauntlet.types import TaskScore


def batches(records: Path) -> list[int]:
    return [record['training']['batch'] for _, record in find_results(records)]


@pytest.fixture
def make(tiny_settings: dict[str, str], tmp_path: Path) -> Callable[..., EvalGauntlet]:
    """Return a function that makes the callback; its records are written to the test's `records`."""
    return lambda **more: EvalGauntlet(**{**tiny_settings, 'save_folder': str(tmp_path / 'records'), **more})


@pytest.mark.parametrize(
    ('interval', 'expected'),
    [
        (['first', 'checkpoint', 'last'], [0, 4, 8, 10]),
        ('first', [0]),
        ('last', [10]),
        ('checkpoint', [4, 8, 10]),  # Composer also saves at the end
        ('3ba', [3, 6, 9]),
        (['first', '3ba', 'checkpoint'], [0, 3, 4, 6, 8, 9, 10]),
        ('1ep', [8]),  # 16 rows in batches of 2
        ('0.5dur', [5, 10]),
    ],
)
def test_evaluations_run_at_their_interval_and_never_twice(tmp_path, tiny_settings, make, interval, expected):
    tasks = read_yaml(tiny_settings['tasks'])['icl_tasks'][-1:]  # the smallest
    callback, saved = make(tasks=tasks, gauntlet=None, interval=interval), str(tmp_path / 'checkpoints')
    trainer = composer_training.trainer([callback], max_duration='10ba', save_folder=saved, save_interval='4ba')
    forward = trainer.state.model.eval_forward
    trainer.fit()
    assert batches(tmp_path / 'records') == expected
    assert trainer.state.model.eval_forward == forward
    trainer.close()


def test_training_with_evaluations_is_bitwise_training_without(tmp_path, make):
    """Weights, optimizer and random states. Mutation: the evaluator's loader is a torch DataLoader."""
    gauntlet = make(interval=['first', '2ba', 'last'])

    evaluated = composer_training.train([gauntlet], max_duration='5ba')
    digests = composer_training.digests(evaluated)

    assert batches(tmp_path / 'records') == [0, 2, 4, 5]
    assert digests == composer_training.digests(composer_training.train([], max_duration='5ba'))


def test_two_callbacks_evaluate_different_tasks_at_different_intervals(tmp_path, tiny_settings, make):
    (sums,) = [task for task in read_yaml(tiny_settings['tasks'])['icl_tasks'] if task['label'] == 'sums']
    often = make(tasks=[sums], gauntlet=None, interval='1ba', save_folder=str(tmp_path / 'often'))
    rarely = make(interval=['first', '2ba'])

    composer_training.train([often, rarely], max_duration='3ba')

    assert batches(tmp_path / 'often') == [1, 2, 3]
    assert batches(tmp_path / 'records') == [0, 2]
    for _, results in find_results(tmp_path / 'often'):
        assert list(results['tasks']) == ['sums/0-shot', 'sums/2-shot']
    # At the same batch both have the same scores.
    tasks_of_one = record(tmp_path / 'often/ba2')['tasks']
    tasks_of_other = record(tmp_path / 'records/ba2')['tasks']
    assert tasks_of_other.items() >= tasks_of_one.items()


def test_an_evaluation_before_training_is_not_repeated_at_its_start(tmp_path, make):
    callback = make(interval='first')
    trainer = composer_training.trainer([callback], max_duration='1ba')
    trainer.eval()
    before = callback.evaluation
    trainer.fit()
    trainer.close()
    assert callback.evaluation is before
    assert batches(tmp_path / 'records') == [0]


@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
def test_a_model_of_nan_has_no_scores_except_with_reference_semantics(tmp_path, tiny_settings, semantics):
    """Fix 1: with upstream's rule it is right if the gold is choice 0."""
    network = tiny.model()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(torch.nan)
    model, out = tiny.save(network, tmp_path / 'nan'), tmp_path / 'out'
    evaluation = evaluate(model, device='cpu', semantics=semantics, out=out, **tiny_settings)
    accuracies = {task: next(iter(score.metrics.values())).value for task, score in evaluation.scores.items()}
    if semantics == 'reference':
        assert accuracies['colours/0-shot'] == 2 / 5 and accuracies['pronouns/2-shot'] == 1 / 2
        assert evaluation.composites.categories['all'].value is not None
    else:
        assert set(accuracies.values()) == {None}
        assert evaluation.composites.categories['all'].value is None
        metrics = record(out)['metrics']
        assert metrics['gauntlet/unscored_items'] == metrics['gauntlet/items'] == 28
        assert not any(key.startswith(('metrics/', 'icl/')) for key in metrics)


def test_evaluators_of_single_tasks_have_the_metrics_of_the_callback(tmp_path, tiny_settings):
    """Also those of categories."""
    network = tiny.model()
    rows = [{'context': f'{i}', 'continuation': f'{i}', 'category': 'ab'[i % 2]} for i in range(6)]
    tiny.write_rows(tmp_path / 'parts.jsonl', rows)
    parts = {
        'label': 'parts',
        'dataset_uri': 'parts.jsonl',
        'num_fewshot': [1],
        'icl_task_type': 'language_modeling',
        'has_categories': True,
    }
    tasks = [*read_yaml(tiny_settings['tasks'])['icl_tasks'], *tiny.write_riddles(tmp_path, num_rows=20), parts]
    data_root = tiny_settings['data_root']
    expected = evaluate(tiny.save(network, tmp_path / 'model'), tasks=tasks, device='cpu', data_root=data_root)

    model = HuggingFaceModel(network, tokenizer=tiny.tokenizer())
    log = ['accuracy', 'errors', 'metrics']
    evaluators = build_icl_evaluators(tasks, model, log=log, data_root=data_root)
    trainer = Trainer(model=model, eval_dataloader=evaluators, device='cpu', progress_bar=False)
    trainer.eval()
    trainer.close()

    metrics = trainer.state.eval_metrics
    assert set(metrics) == set(expected.scores)
    assert {name.partition('/')[0] for name in metrics['parts/1-shot'] if '/' in name} == {'a', 'b'}
    for task, score in expected.scores.items():
        values = logged_values(score)
        assert set(metrics[task]) == set(values)
        for name, value in values.items():
            computed = metrics[task][name].compute().item()
            # The batches differ from those of all tasks, so float32 sums of tens of nats round differently.
            assert math.isnan(computed) if value is None else computed == pytest.approx(value, rel=1e-5)


def logged_values(score: TaskScore) -> dict[str, float | None]:
    """Return the values of a task and, as `category/name`, of its categories, but those that are only in records."""
    values = dict(with_errors(score.metrics))
    for category, part in score.categories.items():
        for name, value in with_errors(part.metrics):
            values[f'{category}/{name}'] = value
    return {name: value for name, value in values.items() if 'MajorityClass' not in name}


@pytest.mark.parametrize('tuples', [{'return_dict': False}, {'torchscript': True}])
def test_models_that_return_tuples_have_the_scores_of_those_that_do_not(tmp_path, tiny_settings, tuples):
    tasks = [*read_yaml(tiny_settings['tasks'])['icl_tasks'], *tiny.write_riddles(tmp_path, num_rows=8)]
    items = []
    for changes in ({}, tuples):
        gauntlet = EvalGauntlet(tasks=tasks, data_root=tiny_settings['data_root'], interval='2ba', save_folder=None)
        network = tiny.model()
        network.config.update(changes)
        assert isinstance(network(torch.tensor([[1, 2]])), tuple) == bool(changes)
        composer_training.train(
            [gauntlet], max_duration='2ba', whole=HuggingFaceModel(network, tokenizer=tiny.tokenizer())
        )
        items.append(gauntlet.evaluation.results)
    assert items[0] == items[1]


def failing_at_2() -> Callback:
    return composer_training.AtEvaluation(2, lambda: 1 / 0, step=1)


def test_a_failed_evaluation_leaves_the_model_unchanged(make):
    trainer = composer_training.trainer([make(interval='2ba'), failing_at_2()], max_duration='4ba')
    forward = trainer.state.model.eval_forward
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer.close()
    assert trainer.state.model.eval_forward == forward


def test_a_model_without_tokenizer_is_an_error(make):
    with pytest.raises(ModelError, match='tokenizer'):
        Trainer(model=HuggingFaceModel(tiny.model()), callbacks=[make()], device='cpu')


def test_more_tokens_than_the_model_has_positions_are_an_error(make):
    with pytest.raises(ModelError, match=r'max_seq_len is 129.*\(gpt2\).*128'):
        composer_training.trainer([make(max_seq_len=129)])


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path, make):
    (tmp_path / 'taken').write_text('a file')
    with pytest.raises(RecordError, match=r'taken/records: .*Not a directory'):
        composer_training.trainer([make(save_folder=str(tmp_path / 'taken/records'))])


def test_a_run_name_that_is_too_long_for_a_folder_is_an_error_before_training(tiny_settings, tmp_path):
    gauntlet = EvalGauntlet(**tiny_settings, save_folder=str(tmp_path / '{run_name}'))
    with pytest.raises(ConfigError, match=r'save_folder: has a name of 300 bytes; allowed: 255 .* shorten run_name'):
        composer_training.trainer([gauntlet], run_name='x' * 300)


def test_tasks_that_cannot_run_are_one_warning(tmp_path, tiny_settings, make, caplog, monkeypatch):
    monkeypatch.setattr('shutil.which', lambda tool: None)
    find_sandbox.cache_clear()
    tasks = [tiny.write_programs(tmp_path), read_yaml(tiny_settings['tasks'])['icl_tasks'][0]]
    callback = make(tasks=tasks, gauntlet=None)
    assert not caplog.messages and [*callback.data.tasks] == ['programs/0-shot', 'sums/0-shot', 'sums/2-shot']
    composer_training.trainer([callback]).close()
    find_sandbox.cache_clear()
    assert [*callback.data.tasks] == ['sums/0-shot', 'sums/2-shot']
    (message,) = [text for text in caplog.messages if 'left out' in text]
    assert 'prlimit' in message and message.endswith('programs/0-shot')


KEY = 'icl/metrics/eval_gauntlet/all'


def train(
    folder: Path, gauntlet: EvalGauntlet, trouble: list[Callback], *, saves: bool = False
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the weights after six batches with three evaluations, and the batches whose metrics were logged."""
    logger = InMemoryLogger()
    save_folder = str(folder / 'checkpoints') if saves else None
    trainer = composer_training.train(
        [*trouble, gauntlet], loggers=[logger], save_folder=save_folder, save_interval='2ba'
    )
    weights = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}
    logged_batches = [timestamp.batch.value for timestamp, _ in logger.data[KEY]]
    return weights, logged_batches


def full_disk(_: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    return (
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard)),  # writing more is an OSError
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)),
    )


def folder_gone(records: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    def begin() -> None:
        shutil.rmtree(records, ignore_errors=True)
        records.write_text('a file in its place')

    return begin, records.unlink


@pytest.mark.parametrize('kind', [full_disk, folder_gone])
def test_training_continues_if_records_cannot_be_written(tmp_path, make, caplog, kind):
    expected, logged = train(tmp_path, make(interval='2ba', save_folder=None), [])
    assert logged == [2, 4, 6]
    caplog.clear()
    with caplog.at_level(logging.WARNING, 'llmfoundry_gauntlet'):
        begin, end = kind(tmp_path / 'records')

        def end_once_reported() -> None:
            give_up = time.monotonic() + 60
            while 'there are no records' not in caplog.text and time.monotonic() < give_up:
                time.sleep(0.01)  # records are written while training continues
            end()

        trouble = composer_training.AtBatches({2: begin, 4: end_once_reported})
        weights, logged = train(tmp_path, make(interval='2ba'), [trouble], saves=kind is folder_gone)
    assert logged == [2, 4, 6]
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    assert batches(tmp_path / 'records') == [4, 6]
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    warnings = [message for message in messages if str(tmp_path / 'records') in message]
    assert all('gauntlet ba2' in message and str(tmp_path / 'records/ba2') in message for message in warnings)
    assert len([message for message in warnings if 'there are no records' in message]) == 1


def test_training_continues_while_records_are_written(tmp_path, make, monkeypatch):
    is_trained = threading.Event()

    def write_later(*arguments: Any, **further: Any) -> None:
        assert is_trained.wait(20)
        write_records(*arguments, **further)

    monkeypatch.setattr('llmfoundry_gauntlet.runtime.gauntlet.write_records', write_later)
    train(tmp_path, make(interval='2ba'), [composer_training.AtBatches({3: is_trained.set})], saves=True)
    found = {record['training']['batch']: record for _, record in find_results(tmp_path / 'records')}
    assert list(found) == [2, 4, 6]
    assert Path(found[2]['training']['checkpoint']).name == 'ep0-ba2-rank0.pt'
    assert not list((tmp_path / 'records').rglob('journal'))


def test_a_journal_is_kept_if_its_records_cannot_be_written(tmp_path, make, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RecordError('the disk is full')

    monkeypatch.setattr('llmfoundry_gauntlet.runtime.gauntlet.write_records', fail)
    composer_training.train([make(interval='2ba')], max_duration='2ba')
    assert [path.parent.name for path in (tmp_path / 'records').rglob('journal')] == ['ba2']


def fail(folder: str) -> None:
    """Fail in an evaluation, with a Trainer that is closed at exit, when Python has torn down the modules.

    Another Trainer was garbage-collected before, which in Composer 0.32.1 removes the exit hooks of all.
    """
    logging.basicConfig(level=logging.WARNING)
    first = composer_training.trainer([], max_duration='1ba')
    gauntlet = EvalGauntlet(**tiny.write_tasks(Path(folder)), interval='2ba', save_folder=f'{folder}/records')
    tiny.kept = composer_training.trainer([gauntlet, failing_at_2()], max_duration='2ba')  # is there until the end
    del first
    gc.collect()
    tiny.kept.fit()


@pytest.mark.slow
def test_a_failed_evaluation_is_closed_at_exit_without_another_error(tmp_path):
    program = [sys.executable, '-c', f'import test_training; test_training.fail({str(tmp_path)!r})']
    environment = {**os.environ, 'PYTHONPATH': forks.PATHS}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith('ZeroDivisionError: division by zero\n') and 'EvalGauntlet.close' not in ended.stderr
