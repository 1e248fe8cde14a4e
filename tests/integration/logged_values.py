"""A real MLflow server, and readers of what loggers have written, by their own libraries: {key: [(step, value)]}."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from composer.loggers import InMemoryLogger

from llmfoundry_gauntlet.results.files import find_results

Values = dict[str, list[tuple[int, float]]]

MAJORITY = ('MajorityClass', 'MajorityClassStandardError')  # these are only in records
LONG = [f'metrics/odd/0-shot/{"x" * 300}/{name}' for name in MAJORITY]  # keys end in 12 digits of their digest
OF_RECORDS = re.compile(rf'({"|".join([*MAJORITY, *(sha256(key.encode()).hexdigest()[:12] for key in LONG)])})$')
METRIC_LINE = re.compile(r'\[metric\]\[batch=(\d+)\]: (.*): (\S+) ')


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


@pytest.fixture(scope='module')
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    server = MLflowServer(tmp_path_factory.mktemp('mlflow'))
    server.start()
    yield server
    server.kill()


def recorded(folder: Path) -> Values:
    """Return the values that the results.json files of a training hold for loggers, with their batches."""
    values: Values = {}
    for _, record in find_results(folder / 'records'):
        batch = record['training']['batch']
        for key, value in {**record['metrics'], 'gauntlet/batch': batch}.items():
            if not OF_RECORDS.search(key):
                values.setdefault(key, []).append((batch, value))
    return values


def sorted_values(values: Values, expected: Values) -> Values:
    """Return the values of the expected keys, sorted by step."""
    return {key: sorted(values[key]) for key in expected if key in values}


def mlflow_values(server: MLflowServer, experiment: str) -> list[Values]:
    """Return all values of an experiment, one entry per run."""
    from mlflow import MlflowClient

    client = MlflowClient(server.uri)
    found = []
    for run in client.search_runs([client.get_experiment_by_name(experiment).experiment_id]):
        histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
        found.append({key: [(point.step, point.value) for point in points] for key, points in histories.items()})
    return found


def wandb_records(folder: Path) -> Iterator:
    """Yield every record of W&B's offline files below a folder, oldest file first."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    for path in sorted(folder.glob('wandb/offline-run-*/*.wandb')):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record
        store.close()


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


def tensorboard_values(folder: Path) -> Values:
    """Return all scalars of a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {key: [(event.step, event.value) for event in found.Scalars(key)] for key in found.Tags()['scalars']}


def tensorboard_charts(folder: Path) -> dict[str, str]:
    """Return the charts of Custom Scalars, by 'section: title', each with its pattern of keys."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    found = EventAccumulator(str(folder))
    found.Reload()
    (event,) = found.Tensors('custom_scalars__config__')
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    return {f'{part.title}: {chart.title}': chart.multiline.tag[0] for part in layout.category for chart in part.chart}


def file_values(path: Path) -> Values:
    """Return the metrics of Composer's file logger."""
    values: Values = {}
    for step, key, value in METRIC_LINE.findall(path.read_text()):
        values.setdefault(key, []).append((int(step), float(value)))
    return values


def memory_values(logger: InMemoryLogger) -> Values:
    """Return the values of Composer's in-memory logger."""
    return {key: [(time.batch.value, value) for time, value in points] for key, points in logger.data.items()}


def approximately(values: Values, **tolerance: float) -> dict[str, Any]:
    """Return values that compare equal within a tolerance."""
    return {
        key: [(step, pytest.approx(value, **tolerance)) for step, value in points] for key, points in values.items()
    }


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of the metric stream."""
    return [record.getMessage() for record in caplog.records if record.name == 'llmfoundry_gauntlet.composer.loggers']
