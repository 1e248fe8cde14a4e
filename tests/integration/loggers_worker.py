"""Train the tiny model with evaluations, checkpoints and every logger; optionally get killed at batch 4."""

from __future__ import annotations

import atexit
import json
import os
import signal
from pathlib import Path
from typing import Any

import tiny
from composer import Callback, Engine, Logger, State, Trainer
from composer.loggers import FileLogger, InMemoryLogger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger

from llmfoundry_gauntlet import EvalGauntlet

RUN_NAME = 'tiny'
CATEGORIES = ('plain', 'high school', 'a:b', 'Säure & Öl', '..', 'x' * 300)


class Killer(Callback):
    """Kill the process at batch 4: after some steps of the evaluation, or after it and before the checkpoint."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.steps = 0

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Count the steps of the evaluation at batch 4."""
        self.steps += state.timestamp.batch.value == 4
        if self.moment == 'in_evaluation' and self.steps == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Run after the gauntlet's."""
        if self.moment == 'after_evaluation' and state.timestamp.batch.value == 4:
            os.kill(os.getpid(), signal.SIGKILL)


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


def mlflow_logger(folder: Path, uri: str, *, resume: bool = False) -> MLFlowLogger:
    """Return a logger that writes to a server, into the experiment named after the folder."""
    return MLFlowLogger(experiment_name=folder.name, tracking_uri=uri, resume=resume, log_system_metrics=False)


def trainer(folder: Path, destinations: list[LoggerDestination], callbacks: list[Any], **arguments: Any) -> Trainer:
    """Return a training of six batches, evaluated before the first and after every second, saved after each."""
    gauntlet = EvalGauntlet(
        **write_tasks(folder), interval=['first', '2ba'], tokens_per_batch=60, save_folder=str(folder / 'records')
    )
    return tiny.trainer(
        [*callbacks, gauntlet],
        loggers=destinations,
        run_name=RUN_NAME,
        save_folder=str(folder / 'checkpoints'),
        save_interval='1ba',
        **arguments,
    )


def close(made: Trainer) -> None:
    """Close it for good: Composer would do so again at exit, when a test's server is gone."""
    made.close()
    atexit.unregister(Engine._close)


def main(folder: Path, mlflow_uri: str, moment: str) -> None:
    """Train; `moment` is whole, in_evaluation or after_evaluation."""
    os.chdir(folder)
    is_resumed = (folder / 'checkpoints').is_dir()  # else Composer would ask W&B, which is offline, for a checkpoint
    destinations = [*local_loggers(folder, resume=True), mlflow_logger(folder, mlflow_uri, resume=True)]
    made = trainer(folder, destinations, [], autoresume=is_resumed)
    made.state.callbacks.append(Killer(moment))  # after the gauntlet
    made.fit()
    close(made)
