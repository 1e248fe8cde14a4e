"""Trainings to watch, and jobs that tests start and kill: forks of a process with everything imported."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import composer.trainer  # noqa: F401  imported once, for all forks
import tiny
import transformers.models.gpt2.modeling_gpt2  # noqa: F401
from composer.core import Callback

import llmfoundry_gauntlet.composer.watch  # noqa: F401
from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.cli.app import main as gauntlet

FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload([__name__])


class Slow(Callback):
    """Slow down each batch of training."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)


def settings_of(folder: Path) -> dict[str, str]:
    """Return the settings for the tasks that `tiny.write_tasks` has written to a folder."""
    return {'tasks': f'{folder}/tasks.yaml', 'gauntlet': f'{folder}/gauntlet.yaml', 'data_root': str(folder)}


def options_of(folder: Path) -> list[str]:
    """Return the same as options of the command."""
    return [word for name, value in settings_of(folder).items() for word in (f'--{name.replace("_", "-")}', value)]


def train(folder: Path, batches: int, *, seconds: float = 0.0, **settings: Any) -> None:
    """Train with a checkpoint every other batch, evaluated by the callback."""
    settings |= {**settings_of(folder), 'interval': 'checkpoint', 'save_folder': str(folder / 'training')}
    gauntlet = EvalGauntlet(**settings)
    places = {'save_folder': str(folder / 'checkpoints'), 'save_interval': '2ba'}
    trainer = tiny.trainer([gauntlet, Slow(seconds)], max_duration=f'{batches}ba', **places)
    trainer.fit()
    trainer.close()


def run(kind: str, log: str, arguments: list[str]) -> None:
    """Run a job with its output appended to `log`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if kind == 'train':
        folder, seconds = arguments
        train(Path(folder), 8, seconds=float(seconds), tokens_per_batch=120)
    else:
        sys.argv = ['gauntlet', 'watch', *arguments]
        gauntlet()


def start(kind: str, log: Path, *arguments: Any) -> Any:
    """Start `train` or `watch`; return the process, killed at the end of the tests."""
    process = FORKS.Process(target=run, args=(kind, str(log), [str(word) for word in arguments]), daemon=True)
    process.start()
    return process


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / 'results.json').read_text())
    return content
