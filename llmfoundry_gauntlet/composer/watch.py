"""`gauntlet watch`: evaluates each checkpoint of a folder once, as it comes; several watchers share the work."""

from __future__ import annotations

import atexit
import gc
import logging
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import torch
from composer.core import Engine, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from llmfoundry_gauntlet.composer.callback import EvalGauntlet, on_first_rank
from llmfoundry_gauntlet.composer.checkpoint_folders import HUGGING_FACE
from llmfoundry_gauntlet.composer.claims import DAMAGED, DONE, Renewal
from llmfoundry_gauntlet.composer.evaluate import (
    DIST_TIMEOUT,
    check_device,
    check_precision,
    default_device,
    evaluate,
)
from llmfoundry_gauntlet.composer.loggers import build_loggers
from llmfoundry_gauntlet.composer.watcher import BAD, FAILED, Due, Pause, Status, Watcher, WatchSettings
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import ModelError, StoreError
from llmfoundry_gauntlet.inputs import load_data, with_programs
from llmfoundry_gauntlet.records.journal import OtherEvaluationError
from llmfoundry_gauntlet.values import TrainingPoint

log = logging.getLogger(__name__)

MEET_SECONDS = 10.0  # between meetings of waiting ranks, so that no collective times out


class StopRequest:
    """Handles SIGTERM and SIGINT: a single rank exits at once, several exit together when they meet.

    The signal is noted as well, as what a handler raises may be swallowed, such as in the finalizer of an object.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.status = 128 + number
        if dist.get_world_size() == 1:
            sys.exit(self.status)

    def check(self) -> None:
        """Raise SystemExit on all ranks, which call this together, if the first was told to stop."""
        status = on_first_rank(lambda: self.status)
        if status is not None:
            sys.exit(status)


class ClaimLostError(Exception):
    """Another watcher has taken over, as this claim expired."""


class Overseer(LoggerDestination):
    """Hooks of the watch into an evaluation; Composer calls it as it does loggers.

    All ranks stop together when the claim is lost. The name of a Hugging Face folder says at which training batch
    metrics are logged. With a time budget all checkpoints are asked the same questions.
    """

    def __init__(self, renewal: Renewal | None, due: Due, stop: StopRequest) -> None:
        self.renewal = renewal  # on the first rank
        self.due = due
        self.stop = stop

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Set the training step, and which questions fit into the time budget."""
        checkpoint = self.due.checkpoint
        for callback in state.callbacks:
            if not isinstance(callback, EvalGauntlet):
                continue
            if self.due.sizes is not None:
                callback.load_state_dict({'sizes': [dict(self.due.sizes)]})
            if checkpoint.kind == HUGGING_FACE and checkpoint.batch is not None and callback.source is not None:
                state.timestamp = state.timestamp.copy(batch=checkpoint.batch)
                point = TrainingPoint(batch=checkpoint.batch, epoch=None, token=None, checkpoint=self.due.uri)
                callback.source = replace(callback.source, training=point)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Raise ClaimLostError or SystemExit on all ranks."""
        self.stop.check()
        if on_first_rank(lambda: self.renewal is not None and self.renewal.is_lost):
            raise ClaimLostError


def watch(wanted: WatchSettings) -> list[Status]:
    """Evaluate checkpoints until it is time to stop; return the status of each. Raise GauntletError.

    Wrong settings, tasks, data, loggers or folders are an error before anything is claimed. A checkpoint that cannot be
    evaluated is reported and skipped. Works on all ranks of the `composer` launcher; the first looks and decides.
    """
    device = wanted.device or default_device()
    check_device(device)
    if wanted.precision is not None:
        check_precision(wanted.precision, device)
    build_loggers(wanted.loggers)
    data = with_programs(load_data(decode_settings({**wanted.settings, 'save_folder': str(wanted.out)}, 'watch')))
    dist.initialize_dist(device, timeout=DIST_TIMEOUT)
    watchers: list[Watcher] = []  # one, on the first rank
    on_first_rank(lambda: watchers.append(Watcher(wanted, data)))
    watcher = watchers[0] if watchers else None
    with StopRequest() as stop:
        try:
            while (step := on_first_rank(lambda: watchers[0].next_step())) is not None:
                if isinstance(step, Pause):
                    pause(step.seconds, stop)
                else:
                    run(step, wanted, watcher, device, stop)
                    free_memory()
                stop.check()
        finally:
            if watcher is not None:
                watcher.release()
    return [] if watcher is None else watcher.table()


def pause(seconds: float, stop: StopRequest) -> None:
    """Wait on all ranks, which meet in between."""
    end = time.monotonic() + seconds
    while (remaining := on_first_rank(lambda: end - time.monotonic())) > 0:
        stop.check()
        time.sleep(min(remaining, MEET_SECONDS))


def run(due: Due, wanted: WatchSettings, watcher: Watcher | None, device: str, stop: StopRequest) -> None:
    """Evaluate a checkpoint on all ranks and report the outcome. Raise GauntletError for mistakes of the user."""
    if watcher is None or watcher.renewal is None:
        outcome(due, wanted, Overseer(None, due, stop), device)
        return
    with watcher.renewal as renewal:
        found = outcome(due, wanted, Overseer(renewal, due, stop), device)
    if found is None:
        watcher.lose(due)
    else:
        watcher.conclude(due, *found)


def outcome(due: Due, wanted: WatchSettings, overseer: Overseer, device: str) -> tuple[str, str] | None:
    """Evaluate, and return the state of the checkpoint and why it is not done; `None` if its claim was lost."""
    arguments: dict[str, Any] = {
        'tokenizer': wanted.tokenizer,
        'model_config': wanted.model_config,
        'device': device,
        'precision': wanted.precision,
        'run_name': wanted.run_name,
        **wanted.settings,
    }

    def attempt(mode: str) -> tuple[str, str]:
        loggers = build_loggers(logger_settings(wanted.loggers, wanted.run_name, due.checkpoint.name))
        evaluate(due.uri, out=due.out, loggers=[*loggers, overseer], **{**arguments, mode: True})
        return DONE, ''

    try:
        try:
            return attempt('resume')
        except OtherEvaluationError as error:
            if not due.may_replace:
                raise
            log.info('%s; it is replaced', error)
            return attempt('overwrite')
    except ClaimLostError:
        return None
    except StoreError as error:
        return FAILED, str(error)
    except ModelError as error:
        return DAMAGED, '; '.join(error.problems)


def logger_settings(loggers: Mapping[str, Any], run_name: str | None, checkpoint: str) -> dict[str, Any]:
    """Return the loggers' arguments for one of several evaluations that belong together.

    Each evaluation has its own loggers, which resume the same run of W&B (not the training's, as two processes cannot
    write to one) and of MLflow, and write separate files. Settings of the user take precedence.
    """
    settings = {name: dict(arguments or {}) for name, arguments in loggers.items()}
    if run_name is not None and 'wandb' in settings:
        kept = {'id': re.sub(r'[^\w.-]', '-', f'{run_name}-watch'), 'resume': 'allow'}
        settings['wandb']['init_kwargs'] = {**kept, **(settings['wandb'].get('init_kwargs') or {})}
    if run_name is not None and 'mlflow' in settings:
        settings['mlflow'].setdefault('resume', True)
    if 'file' in settings:
        path = PurePosixPath(settings['file'].get('filename', '{run_name}/logs-rank{rank}.txt'))
        name = f'{checkpoint.replace("/", "-")}-{path.name}'
        settings['file'] = {**settings['file'], 'filename': str(path.with_name(name)), 'overwrite': True}
    return settings


def free_memory() -> None:
    """Free the last evaluation, which Composer 0.32.1 keeps in order to close every Trainer at exit."""
    atexit.unregister(Engine._close)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_bad(statuses: list[Status]) -> bool:
    """Return whether a checkpoint could not be evaluated."""
    return any(status.state in BAD for status in statuses)
