"""Jobs that tests start and kill, in forks of a process that has imported everything."""

from __future__ import annotations

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
from llmfoundry_gauntlet.cli import main as gauntlet

FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload([__name__])


class Slow(Callback):
    """Makes a batch of training take longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)


def train(folder: str, batches: str, seconds: str) -> None:
    """Train with a checkpoint every other batch, evaluated by the callback."""
    callback = EvalGauntlet(
        tasks=f'{folder}/tasks.yaml',
        gauntlet=f'{folder}/gauntlet.yaml',
        data_root=folder,
        tokens_per_batch=120,
        interval='checkpoint',
        save_folder=f'{folder}/training',
    )
    trainer = tiny.trainer(
        [callback, Slow(float(seconds))],
        max_duration=f'{batches}ba',
        save_folder=f'{folder}/checkpoints',
        save_interval='2ba',
    )
    trainer.fit()
    trainer.close()


def run(kind: str, log: str, arguments: list[str]) -> None:
    """Run a job, with what it prints in `log`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if kind == 'train':
        train(*arguments)
    else:
        sys.argv = ['gauntlet', 'watch', *arguments]
        gauntlet()


def start(kind: str, log: Path, *arguments: Any) -> Any:
    """Start `train` or `watch`; return the process, killed at the end of the tests."""
    process = FORKS.Process(target=run, args=(kind, str(log), [str(word) for word in arguments]), daemon=True)
    process.start()
    return process
