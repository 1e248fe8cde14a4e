"""Train the tiny model with evaluations and checkpoints; with 'kill' it dies in the evaluation at batch 4."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import tiny
from composer import Callback, Logger, State

from llmfoundry_gauntlet import EvalGauntlet


class Killer(Callback):
    """Kill the process after some steps of the evaluation at batch 4."""

    def __init__(self) -> None:
        self.steps = 0

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Count steps."""
        if state.timestamp.batch.value == 4:
            self.steps += 1
            if self.steps == 6:
                os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, mode: str) -> None:
    gauntlet = EvalGauntlet(
        **tiny.write_tasks(folder),
        interval=['2ba'],
        tokens_per_batch=60,
        save_folder=str(folder / 'records'),
    )
    trainer = tiny.trainer(
        [gauntlet, *([Killer()] if mode == 'kill' else [])],
        max_duration='4ba',
        save_folder=str(folder / 'checkpoints'),
        save_interval='2ba',
        autoresume=True,
        run_name='resumed',
    )
    trainer.fit()
    trainer.close()
