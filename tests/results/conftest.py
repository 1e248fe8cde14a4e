"""Fixtures for tests of recorded runs: complete runs of four models, and runs of a part of their tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import (
    BATCHES,
    LOSS_BATCHES,
    LOSSES,
    ROWS,
    SEEDS,
    answers_of,
    copy_run,
    edited,
    record_run,
    write_data,
)


@pytest.fixture(scope='session')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of data files."""
    folder = tmp_path_factory.mktemp('data')
    write_data(folder)
    return folder


@pytest.fixture(scope='session')
def runs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Path]:
    """Return complete runs of four models."""
    folder = tmp_path_factory.mktemp('runs')
    return {
        name: record_run(folder / name, data, answers=answers_of(seed), gauntlet={}) for name, seed in SEEDS.items()
    }


@pytest.fixture(scope='session')
def training(tmp_path_factory: pytest.TempPathFactory, runs: dict[str, Path]) -> Path:
    """Return a training run with four unevenly spaced checkpoints."""
    folder = tmp_path_factory.mktemp('trained') / 'training'
    for name, batch in BATCHES.items():
        with edited(copy_run(runs[name], folder / f'ba{batch}', batch=batch)) as record:
            record['training'] |= {'loss': LOSSES.get(batch), 'loss_batches': LOSS_BATCHES.get(batch)}
    return folder


@pytest.fixture(scope='session')
def unscored(tmp_path_factory: pytest.TempPathFactory, data: Path, runs: dict[str, Path]) -> tuple[Path, Path]:
    """Return runs of two models, the second with unscored items."""
    out = tmp_path_factory.mktemp('unscored') / 'unscored'
    answers = [answer for answer in answers_of(2, ROWS) if answer['task'] != 'choices' or answer['row'] not in (2, 3)]
    return runs['a'], record_run(out, data, ROWS, '--allow-missing', answers=answers, gauntlet={})


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """Return a run that the test may change."""
    return copy_run(runs['a'], tmp_path / 'run')


@pytest.fixture
def make_run(tmp_path: Path, data: Path):
    """Return a function that scores answers to some of the tasks with changed settings."""
    return lambda name, *words, **changes: record_run(tmp_path / name, data, *words, **changes)


@pytest.fixture
def compared(gauntlet):
    """Return the output of `gauntlet compare --format json`."""

    def call(*words: Any) -> Any:
        status, out, err = gauntlet('compare', *words, '--format', 'json')
        assert status == 0, err
        return json.loads(out)

    return call
