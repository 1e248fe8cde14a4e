"""`gauntlet watch`: evaluate each checkpoint in a folder once, when it appears.

A checkpoint is done once its records include results.json. During its evaluation a claim, a lock object with an expiry
time, keeps other watchers away.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from llmfoundry_gauntlet.config.run import DIST_TIMEOUT, run_settings
from llmfoundry_gauntlet.config.settings import CHAT
from llmfoundry_gauntlet.data.stores import Store
from llmfoundry_gauntlet.errors import COMMAND_LINE, Collected, ModelError, RecordError, StoreError, plural
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_inputs, with_programs
from llmfoundry_gauntlet.results.files import RESULTS, read_results
from llmfoundry_gauntlet.results.interrupts import exit_on_signals
from llmfoundry_gauntlet.runtime import distributed
from llmfoundry_gauntlet.runtime.averages import average_name, averages_of
from llmfoundry_gauntlet.runtime.checkpoint_folders import Checkpoint, find_checkpoints
from llmfoundry_gauntlet.runtime.claims import Claim, Claims
from llmfoundry_gauntlet.runtime.distributed import on_first_rank
from llmfoundry_gauntlet.runtime.evaluate import evaluate_opened, hardware_of, opened
from llmfoundry_gauntlet.runtime.journal import Resuming
from llmfoundry_gauntlet.runtime.loggers import decode_loggers, logger_settings
from llmfoundry_gauntlet.types import TrainingPoint

log = logging.getLogger(__name__)

COMPARED = (  # settings that must match existing records
    # which items, with which shots
    'subset_items',
    'time_budget',
    'precision_target',
    'fewshot',
    # their prompts
    'max_seq_len',
    'truncation',
    'apply_chat_template',
    *CHAT,
    # how they are scored
    'semantics',
    'reasoning_markers',
)
WAITING, RUNNING, DONE, DAMAGED = 'waiting', 'running', 'done', 'damaged'


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """The settings of a watch and of the evaluation of its checkpoints.

    `settings` and `model` are keyword arguments of `evaluate`, those of `model` fields of RunSettings; `loggers` maps
    names of Composer's loggers to their arguments. With `stop_seconds` the watch ends when all checkpoints are done or
    damaged and none has appeared for this long; with 0 at least one must exist at the start. A checkpoint is considered
    complete when it has not changed for `settle_seconds`. A claim expires after `expires_seconds` unless it is renewed.
    With `average` the mean of the weights of so many checkpoints is evaluated beside each that has enough before it.
    `base` is the model of PEFT adapters in the folder.
    """

    folder: str
    out: Path
    settings: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    loggers: Mapping[str, Any] = field(default_factory=dict)
    run_name: str | None = None
    average: int | None = None
    base: str | None = None
    claims: str | None = None  # None: next to the checkpoints
    poll_seconds: float = 30.0
    settle_seconds: float = 5.0
    expires_seconds: float = 600.0
    stop_seconds: float | None = None


def watch_checkpoints(options: WatchSettings) -> list[tuple[str, str, str]]:
    """Evaluate checkpoints until the watch ends; return name, state and detail of each. Raise GauntletError.

    Settings, tasks, data, loggers and folders are checked before anything is claimed. A checkpoint that cannot be
    evaluated is reported and skipped. SIGTERM and SIGINT release the claim and raise SystemExit. All ranks call
    this; rank 0 lists and decides.
    """
    device, data = check_watch_options(options)
    distributed.initialize(device, DIST_TIMEOUT)
    watcher = Watcher(options, data)  # used by rank 0 only
    on_first_rank(watcher.start)
    with exit_on_signals(going_on) as signals:
        while (step := on_first_rank(watcher.next_step)) is not None:
            if isinstance(step, Checkpoint):
                evaluate_checkpoint(step, watcher)
            else:
                time.sleep(step)
            if signals:  # an exception from a handler is lost if it interrupts an object's finalizer
                sys.exit(128 + signals[0])
    return watcher.table()


def going_on() -> str:
    """Return what is kept when the watch is interrupted, and how to go on."""
    return 'finished items are kept, and the claim is released\nto go on: the same command again'


def check_watch_options(options: WatchSettings) -> tuple[torch.device, EvaluationData]:
    """Return the device, and tasks and data. Raise GauntletError with every problem found."""
    collected = Collected()
    device, data = torch.device('cpu'), None
    with collected:
        device = hardware_of(run_settings({**options.model, 'model': options.folder}, COMMAND_LINE)).device
    with collected:
        decode_loggers(options.loggers)
    with collected:
        data = load_inputs({**options.settings, 'save_folder': str(options.out)}, COMMAND_LINE)
    collected.raise_all()
    assert data is not None
    return device, with_programs(data)


class Watcher:
    """The checkpoints of a folder and their states. All methods raise GauntletError."""

    def __init__(self, options: WatchSettings, data: EvaluationData) -> None:
        self.options = options
        self.identity = watch_identity(data, options.model.get('precision'))
        self.content = json.dumps(self.identity, sort_keys=True, default=repr).encode()
        self.store = Store(options.folder)
        folder_of_claims = options.claims or f'{self.store.uri}/.gauntlet'
        own_folder = f'{folder_of_claims}/{hashlib.sha256(self.content).hexdigest()[:16]}'
        self.claims = Claims(Store(own_folder), expires_seconds=options.expires_seconds)
        self.checkpoints: list[Checkpoint] = []  # newest first
        self.states: dict[Checkpoint, tuple[str, str]] = {}  # state and detail (owner, folder of records, or reason)
        self.not_before: dict[Checkpoint, float] = {}
        self.last_activity = time.monotonic()  # when a checkpoint last appeared or changed its state

    def start(self) -> None:
        """List the checkpoints for the first time and check that claims can be written."""
        self._list()
        if self.options.stop_seconds == 0 and not self.checkpoints:
            raise ModelError(
                f'{self.store.uri}: there are no checkpoints at or below it; allowed: *.pt, folders of *.distcp, '
                'Hugging Face folders, and those of PEFT adapters'
            )
        try:
            self.claims.store.write('settings.json', self.content)  # for users to read
        except StoreError as error:
            raise StoreError(f'{error}; give another folder or URI for claims with --claims') from error
        log.info(
            'watching %s: %s; records in %s, claims in %s',
            self.store.uri,
            plural(len(self.checkpoints), 'checkpoint'),
            self.options.out,
            self.claims.store.uri,
        )
        self._tell_if_too_few()

    def _tell_if_too_few(self) -> None:
        """Log that there are no averages yet, if there are fewer checkpoints than one takes."""
        size = self.options.average
        if size is not None and not any(checkpoint.members for checkpoint in self.checkpoints):
            num_with_batch = sum(checkpoint.batch is not None for checkpoint in self.checkpoints)
            log.info(
                '%s: none so far: it takes %d checkpoints of one training with their batches in their names, and there '
                'are %d; the first ones have no average',
                average_name(size),
                size,
                num_with_batch,
            )

    def next_step(self) -> Checkpoint | float | None:
        """Return a checkpoint to claim, the seconds until the next poll, or `None` if the watch is over."""
        options = self.options
        try:
            self._list()
        except StoreError as error:
            log.warning('%s; retrying in %.0f s', error, options.poll_seconds)
            return options.poll_seconds
        now = time.monotonic()
        states = [self.states[checkpoint][0] for checkpoint in self.checkpoints]
        # The first evaluation chooses the items that fit into a time budget, for all watchers.
        is_measuring = self.identity['time_budget'] is not None and RUNNING in states and DONE not in states
        for checkpoint, state in zip(self.checkpoints, states, strict=True):
            if state == WAITING and now >= self.not_before[checkpoint] and not is_measuring:
                return checkpoint
        idle_seconds = now - self.last_activity
        is_idle = WAITING not in states and RUNNING not in states
        if is_idle and options.stop_seconds is not None and idle_seconds >= options.stop_seconds:
            log.info('no new checkpoint for %.0f s; stopping', idle_seconds)
            self._tell_if_too_few()
            return None
        # A checkpoint that is being written is looked at as soon as it has not changed for long enough.
        settling_seconds = [settled - now for settled in self.not_before.values() if settled > now]
        return min([options.poll_seconds, *settling_seconds])

    def _list(self) -> None:
        """List the checkpoints and update their states."""
        checkpoints = find_checkpoints(self.store.files())
        below = [checkpoint for checkpoint in checkpoints if checkpoint.name != '.']
        if checkpoints and not below:
            raise ModelError(
                f'{self.store.uri}: is a checkpoint itself; give the folder above it, or evaluate it with gauntlet '
                'run --model'
            )
        # The folder itself may have the final model, beside the checkpoints of its training.
        averages = [] if self.options.average is None else averages_of(below, self.options.average)
        self.checkpoints = sorted([*below, *averages], key=lambda checkpoint: checkpoint.batch or -1, reverse=True)
        self.claims.refresh()
        for checkpoint in self.checkpoints:
            if checkpoint not in self.states:  # new or overwritten
                self.states[checkpoint] = WAITING, ''
                self.last_activity = time.monotonic()
                self.not_before[checkpoint] = self.last_activity + self.options.settle_seconds
            state, _ = self.states[checkpoint]
            if state not in (DONE, DAMAGED):
                self._update(checkpoint)

    def _update(self, checkpoint: Checkpoint) -> None:
        """Find out whether a checkpoint is evaluated, by anyone, or waits."""
        claim = self.claims.last(checkpoint)
        folder = self.folder(checkpoint)
        if claim is not None and claim.is_valid:
            self.report(checkpoint, RUNNING, f'by {claim.owner}, claim expires at {clock(claim)} unless renewed')
        elif (folder / RESULTS).is_file() and not self.claims.is_overwritten(checkpoint):
            check_recorded(folder, self.identity)
            self.report(checkpoint, DONE, str(folder))
        else:
            self.states[checkpoint] = WAITING, '' if claim is None else taken_over(claim)

    def folder(self, checkpoint: Checkpoint) -> Path:
        """Return the folder for the records of a checkpoint: `ba{batch}`, or its name if that contains no batch."""
        path = PurePosixPath(checkpoint.name)
        name = path.name if checkpoint.batch is None else f'ba{checkpoint.batch}'
        return self.options.out / path.parent / name

    def claim(self, checkpoint: Checkpoint, stack: ExitStack) -> tuple[Path, Any] | None:
        """Claim a checkpoint until the stack is closed; return `None` if another watcher was faster.

        The result is the folder for its records and the number of questions per task within the time budget, if known.
        """
        folder = self.folder(checkpoint)
        if self.claims.is_overwritten(checkpoint):
            (folder / RESULTS).unlink(missing_ok=True)
        if not stack.enter_context(self.claims.held(checkpoint)):
            return None
        _, taken_from = self.states[checkpoint]
        self.report(checkpoint, RUNNING, f'by {self.claims.owner}{taken_from}')
        return folder, self._recorded_sizes()

    def _recorded_sizes(self) -> Any:
        """Return the number of questions per task in the records of the newest checkpoint that is done, if any."""
        done = [checkpoint for checkpoint in self.checkpoints if self.states[checkpoint][0] == DONE]
        return read_results(self.folder(done[0]))['timing'].get('time_budget') if done else None

    def report(self, checkpoint: Checkpoint, state: str, detail: str) -> None:
        """Set the state of a checkpoint, and log it if it has changed."""
        earlier_state, _ = self.states[checkpoint]
        if earlier_state != state:
            level = logging.WARNING if state == DAMAGED else logging.INFO
            log.log(level, '%s: %s %s', checkpoint.name, state, detail)
            self.last_activity = time.monotonic()
        self.states[checkpoint] = state, detail

    def table(self) -> list[tuple[str, str, str]]:
        """Return name, state and detail of each checkpoint, oldest first."""
        return [(checkpoint.name, *self.states[checkpoint]) for checkpoint in reversed(self.checkpoints)]


def clock(claim: Claim) -> str:
    """Return the time of day at which a claim expires."""
    return time.strftime('%H:%M:%S', time.localtime(claim.expires))


def taken_over(claim: Claim) -> str:
    """Return from whom a checkpoint is taken over, as the end of a line of the log; '' after a claim's release."""
    if not claim.expires:
        return ''
    reason = 'which has ended' if claim.is_abandoned else 'whose claim has expired'
    return f': taken over from {claim.owner}, {reason}'


def evaluate_checkpoint(checkpoint: Checkpoint, watcher: Watcher) -> None:
    """Claim and evaluate a checkpoint. Raise GauntletErrors except those of the checkpoint or its store.

    If a checkpoint does not contain its training batch, metrics are logged at the batch in its name.
    """
    options = watcher.options
    with ExitStack() as stack:
        try:
            claimed = on_first_rank(partial(watcher.claim, checkpoint, stack))
            if claimed is None:
                return
            folder, sizes = claimed
            model = model_of(checkpoint, watcher)
            subject = stack.enter_context(
                opened(
                    **model,
                    out=folder,
                    run_name=options.run_name,
                    loggers=logger_settings(options.loggers, options.run_name, checkpoint.name),
                    resume=True,
                    **options.model,
                    **options.settings,
                )
            )
            subject.gauntlet.resuming = Resuming()  # a journal that cannot be resumed is replaced
            if sizes is not None:
                subject.gauntlet.use_subset(sizes)
            training = subject.source.training
            if training is None and checkpoint.batch is not None:
                name = model.get('adapter', model['model'])
                training = TrainingPoint(batch=checkpoint.batch, epoch=None, token=None, checkpoint=name)
            evaluate_opened(subject, training)
        except StoreError as error:
            log.warning('%s: %s; retrying in %.0f s', checkpoint.name, error, options.poll_seconds)
            watcher.not_before[checkpoint] = time.monotonic() + options.poll_seconds
        except ModelError as error:
            on_first_rank(partial(watcher.report, checkpoint, DAMAGED, '; '.join(error.problems)))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def model_of(checkpoint: Checkpoint, watcher: Watcher) -> dict[str, Any]:
    """Return the settings of `evaluate` that name a checkpoint. Raise ModelError for an adapter without its base."""
    names = [f'{watcher.store.uri}/{member.name}' for member in checkpoint.members or (checkpoint,)]
    if checkpoint.members:
        return {'model': names[0], 'averaged_with': names[1:]}
    if not checkpoint.is_adapter:
        return {'model': names[0]}
    if watcher.options.base is None:
        raise ModelError(f'{names[0]}: is a PEFT adapter; give its base with --model')
    return {'model': watcher.options.base, 'adapter': names[0]}


def watch_identity(data: EvaluationData, precision: str | None) -> dict[str, Any]:
    """Return the tasks, rows and settings that determine the scores of a checkpoint."""
    settings = data.settings
    return {
        'rows': {task.key: data.digests.get(task.key) for task in data.suite.tasks},
        'task_keys': [task.keys for task in data.suite.tasks],
        'composites': data.suite.gauntlet and asdict(data.suite.gauntlet),
        **{name: getattr(settings, name) for name in COMPARED},
        'precision': precision,
    }


def check_recorded(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise RecordError if a folder has records of other tasks, rows or settings."""
    record = read_results(folder)
    by_task = dict(record['tasks'])
    for entry in (record['score'] or {}).values():
        by_task[entry['task']] = entry
    recorded = {'rows': {task: entry.get('data_sha256') for task, entry in by_task.items()}}
    for name in COMPARED:
        # Without a max_seq_len it is the model's, which the identity of a watch does not know.
        if name != 'max_seq_len' or identity[name]:
            recorded[name] = record['config'].get(name)
    differing = []
    for name, value in recorded.items():
        if value != identity[name]:
            differing.append(name if name == 'rows' else f'{name} {value} (now {identity[name]})')
    if differing:
        raise RecordError(f'{folder / RESULTS}: differs in {", ".join(differing)}; give another --out')
