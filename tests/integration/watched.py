"""Trainings to watch, and jobs that tests start and kill: forks of a process with everything imported."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
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


def train_slowly(folder: str, seconds: str) -> None:
    """Train for eight batches that take so many seconds each."""
    train(Path(folder), 8, seconds=float(seconds), tokens_per_batch=120)


def watch(*words: str) -> None:
    """Run `gauntlet watch`."""
    sys.argv = ['gauntlet', 'watch', *words]
    gauntlet()


def run(job: Callable[..., None], log: str, environment: dict[str, str], words: list[str]) -> None:
    """Run a job with its output appended to `log`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(environment)
    tempfile.tempdir = None  # which the environment may have changed
    job(*words)


def start(job: Callable[..., None], log: Path, *words: Any, **environment: str) -> Any:
    """Start a job in this environment; return the process, killed at the end of the tests."""
    arguments = (job, str(log), {**os.environ, **environment}, [str(word) for word in words])
    process = FORKS.Process(target=run, args=arguments, daemon=True)
    process.start()
    return process


def start_ranks(job: Callable[..., None], logs: list[Path], *words: Any, **environment: str) -> list[Any]:
    """Start a job on as many ranks as there are logs, in the environment that the `composer` launcher gives them."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    count = str(len(logs))
    shared = {'WORLD_SIZE': count, 'LOCAL_WORLD_SIZE': count, 'NODE_RANK': '0', **environment}
    shared |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
    return [start(job, log, *words, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank, log in enumerate(logs)]


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / 'results.json').read_text())
    return content
