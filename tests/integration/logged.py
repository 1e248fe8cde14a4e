"""Trainings with every logger, an MLflow server, and readers of what was logged: {key: [(step, value)]}."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import composer_training
import pytest
import tiny
from composer import Trainer
from composer.loggers import FileLogger, InMemoryLogger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.results.files import find_results

Values = dict[str, list[tuple[int, float]]]

RUN_NAME = 'tiny'
CATEGORIES = ('plain', 'high school', 'a:b', 'Säure & Öl', '..', 'x' * 300)
MAJORITY = ('MajorityClass', 'MajorityClassStandardError')  # these are only in records
LONG = [f'metrics/odd/0-shot/{"x" * 300}/{name}' for name in MAJORITY]  # keys end in 12 digits of their digest
OF_RECORDS = re.compile(rf'({"|".join([*MAJORITY, *(sha256(key.encode()).hexdigest()[:12] for key in LONG)])})$')
METRIC_LINE = re.compile(r'\[metric\]\[batch=(\d+)\]: (.*): (\S+) ')


def write_tasks(folder: Path) -> dict[str, Any]:
    """Write the tiny tasks, and one whose category names are not accepted by every logger; all metrics are logged."""
    settings = tiny.write_tasks(folder)
    rows = [
        {'query': f'Which {i}?', 'choices': ['one', 'two'], 'gold': i % 2, 'category': category}
        for i, category in enumerate(CATEGORIES * 2)
    ]
    tiny.write_rows(folder / 'odd.jsonl', rows)
    tasks = json.loads((folder / 'tasks.yaml').read_text())
    odd = {'label': 'odd', 'dataset_uri': 'odd.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}
    tasks['icl_tasks'].append({**odd, 'has_categories': True})
    (folder / 'tasks.yaml').write_text(json.dumps(tasks))
    return {**settings, 'log': ['accuracy', 'errors', 'composites', 'score', 'metrics']}


def local_loggers(folder: Path, *, resume: bool = False) -> list[LoggerDestination]:
    """Return one logger of each kind that writes below `folder` or into memory."""
    wandb = {'mode': 'offline', 'dir': str(folder), 'id': folder.name, 'resume': 'allow' if resume else None}
    return [
        FileLogger(filename=f'{folder}/log_{{rank}}.txt', capture_stdout=False, capture_stderr=False),
        InMemoryLogger(),
        TensorboardLogger(log_dir=str(folder / 'tensorboard')),
        WandBLogger(project='gauntlet', init_kwargs=wandb),
    ]


def mlflow_logger(folder: Path, uri: str, **arguments: Any) -> MLFlowLogger:
    """Return a logger that writes to a server, into the experiment named after the folder."""
    return MLFlowLogger(experiment_name=folder.name, tracking_uri=uri, log_system_metrics=False, **arguments)


def trainer(folder: Path, destinations: list[LoggerDestination], callbacks: list[Any], **arguments: Any) -> Trainer:
    """Return a training of six batches, evaluated before the first and after every second, saved after each."""
    gauntlet = EvalGauntlet(
        **write_tasks(folder), interval=['first', '2ba'], tokens_per_batch=60, save_folder=str(folder / 'records')
    )
    return composer_training.trainer(
        [*callbacks, gauntlet],
        loggers=destinations,
        run_name=RUN_NAME,
        save_folder=str(folder / 'checkpoints'),
        save_interval='1ba',
        **arguments,
    )


def job(folder: Path, mlflow_uri: str, moment: str) -> None:
    """Train on this rank; `moment` is whole, in_evaluation or after_evaluation."""
    os.chdir(folder)
    is_resumed = (folder / 'checkpoints').is_dir()  # else Composer would ask W&B, which is offline, for a checkpoint
    destinations = [*local_loggers(folder, resume=True), mlflow_logger(folder, mlflow_uri, resume=True)]
    made = trainer(folder, destinations, [], autoresume=is_resumed)
    if moment != 'whole':  # killed after some steps of the evaluation, or after it and before the checkpoint
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        killer = composer_training.AtEvaluation(4, kill, step=6 if moment == 'in_evaluation' else None)
        made.state.callbacks.append(killer)  # after the gauntlet
    fit(made)


def fit(made: Trainer) -> None:
    """Train and close."""
    with contextlib.closing(made):
        made.fit()


class MLflowServer:
    """`mlflow server` over a file of SQLite; it can be killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(('127.0.0.1', 0))
            self.port = probe.getsockname()[1]
        self.uri = f'http://127.0.0.1:{self.port}'
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        words = ['server', '--host', '127.0.0.1', '--port', str(self.port), '--workers', '1']
        words += ['--backend-store-uri', f'sqlite:///{self.folder}/mlflow.db', '--artifacts-destination', 'artifacts']
        with (self.folder / 'server.log').open('ab') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'mlflow', *words],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        give_up = time.monotonic() + 300
        while time.monotonic() < give_up:
            try:
                urllib.request.urlopen(f'{self.uri}/health', timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError((self.folder / 'server.log').read_text())

    def kill(self) -> None:
        """Kill it and its workers."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def values(self, experiment: str) -> Values:
        """Return all values of an experiment, which must be those of one run."""
        from mlflow import MlflowClient

        client = MlflowClient(self.uri)
        (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
        histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
        return {key: [(point.step, point.value) for point in points] for key, points in histories.items()}


def recorded(folder: Path) -> Values:
    """Return the values that the results.json files of a training hold for loggers, with their batches."""
    values: Values = {}
    for _, record in find_results(folder / 'records'):
        batch = record['training']['batch']
        for key, value in {**record['metrics'], 'gauntlet/batch': batch}.items():
            if not OF_RECORDS.search(key):
                values.setdefault(key, []).append((batch, value))
    return values


def check_logged(values: Values, expected: Values, **tolerance: float) -> None:
    """Check the values of the expected keys, in any order of steps; exactly without a tolerance."""
    assert expected.keys() <= values.keys()
    for key, points in expected.items():
        wanted = [(step, pytest.approx(value, **tolerance) if tolerance else value) for step, value in points]
        assert sorted(values[key]) == wanted, key


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield every record of W&B's offline files below a folder, oldest file first.

    W&B's own process may write the last records of a run after `finish` has returned, so wait for them.
    """
    paths = sorted(folder.glob('wandb/offline-run-*/*.wandb'))
    give_up = time.monotonic() + 60
    while not (latest := wandb_records_of(paths[-1])) or latest[-1].WhichOneof('record_type') != 'exit':
        assert time.monotonic() < give_up, f'{paths[-1]}: W&B has not ended the run'
        time.sleep(0.1)
    for path in paths[:-1]:
        yield from wandb_records_of(path)
    yield from latest


def wandb_records_of(path: Path) -> list[Any]:
    """Return the records of one of W&B's files; those written so far if it is being written."""
    from wandb.proto import wandb_internal_pb2

    return [wandb_internal_pb2.Record.FromString(data) for data in wandb_messages(path.read_bytes())]


def wandb_messages(content: bytes) -> Iterator[bytes]:
    """Yield the complete messages of one of W&B's files.

    It is a log as LevelDB's: after 7 bytes, in blocks of 32 KiB, each part of a message has its checksum (4 bytes),
    length (2) and kind (1). W&B 0.18 has a reader, 0.31 none.
    """
    block, head = 32768, 7
    whole, last = 1, 4  # kinds; 2 and 3 are the first part of a message and one in its middle
    place, message = head, b''
    while place + head <= len(content):
        if block - place % block < head:  # padding: no part fits
            place += block - place % block
            continue
        _, length, kind = struct.unpack('<IHB', content[place : place + head])
        part = content[place + head : place + head + length]
        if kind == 0 or len(part) < length:  # not yet written
            return
        message += part
        place += head + length
        if kind in (whole, last):
            yield message
            message = b''


def wandb_rows(folder: Path) -> list[dict[str, float]]:
    """Return W&B's rows; `_step` is its own step."""
    return [
        {item.key or '.'.join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(folder)
        if record.WhichOneof('record_type') == 'history'
    ]


def wandb_values(folder: Path) -> Values:
    """Return our keys over the step metric `gauntlet/batch`."""
    values: Values = {}
    for row in wandb_rows(folder):
        if 'gauntlet/batch' in row:
            for key, value in row.items():
                values.setdefault(key, []).append((row['gauntlet/batch'], value))
    return values


def tensorboard_events(folder: Path) -> Any:
    """Return TensorBoard's reader of the training."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / 'tensorboard' / RUN_NAME)).Reload()


def tensorboard_values(folder: Path) -> Values:
    """Return all scalars in the order in which they were written.

    The reader has them by the names of files, of which Composer's logger writes several in a second: 10 before 9.
    """
    found = tensorboard_events(folder)
    events = {key: sorted(found.Scalars(key), key=lambda event: event.wall_time) for key in found.Tags()['scalars']}
    return {key: [(event.step, event.value) for event in events[key]] for key in events}


def tensorboard_charts(folder: Path) -> dict[str, str]:
    """Return the charts of Custom Scalars, by 'section: title', each with its pattern of keys."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    (event,) = tensorboard_events(folder).Tensors('custom_scalars__config__')
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    return {f'{part.title}: {chart.title}': chart.multiline.tag[0] for part in layout.category for chart in part.chart}


def file_values(*paths: Path) -> Values:
    """Return the metrics of Composer's file logger."""
    values: Values = {}
    for path in paths:
        for step, key, value in METRIC_LINE.findall(path.read_text()):
            values.setdefault(key, []).append((int(step), float(value)))
    return values


def memory_values(logger: InMemoryLogger) -> Values:
    """Return the values of Composer's in-memory logger."""
    return {key: [(time.batch.value, value) for time, value in points] for key, points in logger.data.items()}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of the metric stream."""
    modules = ('llmfoundry_gauntlet.runtime.logged_values', 'llmfoundry_gauntlet.runtime.loggers')
    return [record.getMessage() for record in caplog.records if record.name in modules]
