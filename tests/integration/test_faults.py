"""Faults in the middle of a training: it continues, and keeps what can be kept."""

from __future__ import annotations

import gc
import logging
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

import forks
import pytest
import tiny
import torch
from composer import Callback
from composer.loggers import InMemoryLogger

from llmfoundry_gauntlet import EvalGauntlet, RecordError
from llmfoundry_gauntlet.composer import callback
from llmfoundry_gauntlet.results.files import find_results, write_records

KEY = 'icl/metrics/eval_gauntlet/all'


def train(
    folder: Path, settings: dict[str, str], trouble: list[Callback], *, saves: bool = False
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the weights after six batches with three evaluations, and the batches whose metrics were logged."""
    logger = InMemoryLogger()
    gauntlet = EvalGauntlet(**settings, interval='2ba', save_folder=str(folder / 'records'))
    trainer = tiny.train(
        [*trouble, gauntlet],
        max_duration='6ba',
        loggers=[logger],
        save_folder=str(folder / 'checkpoints') if saves else None,
        save_interval='2ba',
    )
    logged = [timestamp.batch.value for timestamp, _ in logger.data[KEY]]
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}, logged


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
def test_training_continues_if_records_cannot_be_written(tmp_path, tiny_settings, caplog, kind):
    expected, logged = train(tmp_path / 'whole', tiny_settings, [])
    assert logged == [2, 4, 6]
    caplog.clear()
    with caplog.at_level(logging.WARNING, 'llmfoundry_gauntlet'):
        begin, end = kind(tmp_path / 'records')

        def end_once_reported() -> None:
            give_up = time.monotonic() + 60
            while 'there are no records' not in caplog.text and time.monotonic() < give_up:
                time.sleep(0.01)  # records are written while training continues
            end()

        trouble = tiny.AtBatches({2: begin, 4: end_once_reported})
        weights, logged = train(tmp_path, tiny_settings, [trouble], saves=kind is folder_gone)
    assert logged == [2, 4, 6]
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    batches = [record['training']['batch'] for _, record in find_results(tmp_path / 'records')]
    assert batches == [4, 6]
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    warnings = [message for message in messages if str(tmp_path / 'records') in message]
    assert all('gauntlet ba2' in message and str(tmp_path / 'records/ba2') in message for message in warnings)
    assert len([message for message in warnings if 'there are no records' in message]) == 1


def test_training_continues_while_records_are_written(tmp_path, tiny_settings, monkeypatch):
    is_trained = threading.Event()

    def write_later(*arguments: Any, **further: Any) -> None:
        assert is_trained.wait(20)
        write_records(*arguments, **further)

    monkeypatch.setattr(callback, 'write_records', write_later)
    train(tmp_path, tiny_settings, [tiny.AtBatches({3: is_trained.set})], saves=True)
    found = {record['training']['batch']: record for _, record in find_results(tmp_path / 'records')}
    assert list(found) == [2, 4, 6]
    assert Path(found[2]['training']['checkpoint']).name == 'ep0-ba2-rank0.pt'
    assert not list((tmp_path / 'records').rglob('journal'))


def test_a_journal_is_kept_until_its_own_records_are_written(tmp_path, tiny_settings, monkeypatch):
    """The first `fit` notes its checkpoint after its records are written. Mutation: always note it in the thread."""
    gauntlet = EvalGauntlet(**tiny_settings, interval='checkpoint', save_folder=str(tmp_path / 'records'))
    trainer = tiny.trainer([gauntlet], max_duration='2ba', save_folder=str(tmp_path / 'saved'), save_interval='2ba')
    trainer.fit()
    (first,) = [record for _, record in find_results(tmp_path / 'records')]
    assert Path(first['training']['checkpoint']).name == 'ep0-ba2-rank0.pt'

    def fail(*_: Any, **__: Any) -> None:
        raise RecordError('the disk is full')

    monkeypatch.setattr(callback, 'write_records', fail)
    trainer.fit(duration='2ba')
    trainer.close()
    assert [path.parent.name for path in (tmp_path / 'records').rglob('journal')] == ['ba4']


def test_an_unwritable_folder_is_an_error_before_training(tmp_path, tiny_settings):
    (tmp_path / 'taken').write_text('a file')
    gauntlet = EvalGauntlet(**tiny_settings, save_folder=str(tmp_path / 'taken/records'))
    with pytest.raises(RecordError, match=r'taken/records: .*Not a directory'):
        tiny.trainer([gauntlet], max_duration='1ba')


class Failing(Callback):
    """Raise an error in the middle of an evaluation."""

    def eval_batch_end(self, *_: object) -> None:
        raise ZeroDivisionError


def fail(folder: str) -> None:
    """Fail in an evaluation, with a Trainer that is closed at exit, when Python has torn down the modules.

    Another Trainer was garbage-collected before, which in Composer 0.32.1 removes the exit hooks of all.
    """
    logging.basicConfig(level=logging.WARNING)
    first = tiny.trainer([], max_duration='1ba')
    gauntlet = EvalGauntlet(**tiny.write_tasks(Path(folder)), interval='2ba', save_folder=f'{folder}/records')
    tiny.kept = tiny.trainer([gauntlet, Failing()], max_duration='2ba')  # is there until the end
    del first
    gc.collect()
    tiny.kept.fit()


@pytest.mark.slow
def test_a_failed_evaluation_is_closed_at_exit_without_another_error(tmp_path):
    program = [sys.executable, '-c', f'import test_faults; test_faults.fail({str(tmp_path)!r})']
    environment = {**os.environ, 'PYTHONPATH': forks.PATHS}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith('ZeroDivisionError\n') and 'EvalGauntlet.close' not in ended.stderr
