"""A training whose checkpoints are watched: what the tests of `gauntlet watch` share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from llmfoundry_gauntlet import EvalGauntlet

Watch = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks, and a training of four batches with a checkpoint every other one, all evaluated by the callback."""
    folder = tmp_path_factory.mktemp('trained')
    callback = EvalGauntlet(**tiny.write_tasks(folder), interval='checkpoint', save_folder=str(folder / 'training'))
    places = {'save_folder': str(folder / 'checkpoints'), 'save_interval': '2ba'}
    trainer = tiny.trainer([callback], max_duration='4ba', **places)
    trainer.fit()
    trainer.close()
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """The test's own copy of the checkpoints."""
    shutil.copytree(trained / 'checkpoints', tmp_path / 'checkpoints', symlinks=True)
    return tmp_path


@pytest.fixture
def watch(trained: Path, folder: Path, gauntlet: Callable[..., tuple[int, str, str]]) -> Watch:
    """Runs `gauntlet watch --once` on the test's checkpoints; status, standard output and error."""

    def call(*more: Any, uri: Any = folder / 'checkpoints', out: str = 'watched') -> tuple[int, str, str]:
        tasks = ['--tasks', trained / 'tasks.yaml', '--gauntlet', trained / 'gauntlet.yaml', '--data-root', trained]
        return gauntlet('watch', uri, *tasks, '--out', folder / out, '--once', '--settle', '0s', '--poll', '1s', *more)

    return call


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / 'results.json').read_text())
    return content


def states(folder: Path) -> dict[str, str]:
    """Return the state of each checkpoint's claim."""
    claims = [json.loads(path.read_text()) for path in sorted((folder / 'checkpoints/.gauntlet').glob('*/*.json'))]
    return {claim['checkpoint']: claim['state'] for claim in claims}
