"""Fixtures for tests of `gauntlet compare` and the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import run_cli
from recorded_runs import (
    AGIEVAL,
    BATCHES,
    ROWS,
    SEEDS,
    answers_of,
    copy_run,
    gauntlet_yaml,
    score_yaml,
    tasks_yaml,
    write_data,
    write_lines,
)


@pytest.fixture
def compared(gauntlet):
    """Return the output of `gauntlet compare --format json`."""

    def call(*words: Any) -> Any:
        status, out, err = gauntlet('compare', *words, '--format', 'json')
        assert status == 0, err
        return json.loads(out)

    return call


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
    words = ['--tasks', tasks_yaml(folder), '--gauntlet', gauntlet_yaml(folder), '--score', score_yaml(folder)]
    found = {}
    for name, seed in SEEDS.items():
        found[name] = folder / name
        answers = write_lines(folder / 'answers.jsonl', answers_of(seed))
        assert run_cli('run', '--outputs', answers, *words, '--data-root', data, '--out', found[name]) == 0
    return found


@pytest.fixture
def make_run(tmp_path: Path, data: Path):
    """Return a function that scores answers to some of the tasks with changed settings."""

    def make(
        name: str,
        keys: Iterable[str],
        *words: Any,
        answers: Iterable[dict[str, Any]] | None = None,
        gauntlet: Mapping[str, Any] | None = None,
        tasks: Mapping[str, Any] | None = None,
    ) -> Path:
        keys = list(keys)
        words = ['--tasks', tasks_yaml(tmp_path, [key for key in keys if key != AGIEVAL], **(tasks or {})), *words]
        if gauntlet is not None:
            words += ['--gauntlet', gauntlet_yaml(tmp_path, **gauntlet)]
        path = write_lines(tmp_path / 'answers.jsonl', answers_of(0, keys) if answers is None else answers)
        out = tmp_path / name
        assert run_cli('run', '--outputs', path, '--data-root', data, *words, '--out', out) == 0
        return out

    return make


@pytest.fixture
def unscored(make_run, runs: dict[str, Path]) -> tuple[Path, Path]:
    """Return runs of two models, the second with unscored items."""
    answers = [answer for answer in answers_of(2, ROWS) if answer['task'] != 'choices' or answer['row'] not in (2, 3)]
    return runs['a'], make_run('unscored', ROWS, '--allow-missing', answers=answers, gauntlet={})


@pytest.fixture
def training(runs: dict[str, Path], tmp_path: Path) -> Path:
    """Return a training run with four unevenly spaced checkpoints."""
    folder = tmp_path / 'training'
    for name, batch in BATCHES.items():
        copy_run(runs[name], folder / f'ba{batch}', batch=batch)
    return folder
