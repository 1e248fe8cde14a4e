"""Trainings to watch, and watchers, as jobs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import tiny
from composer.core import Callback

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.cli import main as gauntlet


class Slow(Callback):
    """Slow down each batch of training."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)


def options_of(folder: Path) -> list[str]:
    """Return the settings for the tasks that `tiny.write_tasks` has written to a folder as options of the command."""
    return [word for name, value in tiny.settings_of(folder).items() for word in (f'--{name.replace("_", "-")}', value)]


def train(folder: Path, batches: int, *, seconds: float = 0.0, **settings: Any) -> None:
    """Train with a checkpoint every other batch, evaluated by the callback."""
    settings |= {**tiny.settings_of(folder), 'interval': 'checkpoint', 'save_folder': str(folder / 'training')}
    gauntlet = EvalGauntlet(**settings)
    places = {'save_folder': str(folder / 'checkpoints'), 'save_interval': '2ba'}
    trainer = tiny.trainer([gauntlet, Slow(seconds)], max_duration=f'{batches}ba', **places)
    trainer.fit()
    trainer.close()


def train_slowly(folder: Path, seconds: float) -> None:
    """Train for eight batches that take so many seconds each."""
    train(folder, 8, seconds=seconds, tokens_per_batch=120)


def watch(*words: str) -> None:
    """Run `gauntlet watch`."""
    sys.argv = ['gauntlet', 'watch', *words]
    gauntlet()
