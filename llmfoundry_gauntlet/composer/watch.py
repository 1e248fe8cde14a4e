"""`gauntlet watch`: evaluate each checkpoint of a folder once, when it appears.

Several watchers can share the work: a claim is a lock object with an expiry.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from composer.core import Engine, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from llmfoundry_gauntlet.composer.callback import EvalGauntlet, on_first_rank
from llmfoundry_gauntlet.composer.checkpoint_folders import Checkpoint, find_checkpoints
from llmfoundry_gauntlet.composer.evaluate import DIST_TIMEOUT, check_device, check_precision, default_device, evaluate
from llmfoundry_gauntlet.composer.journal import Resuming
from llmfoundry_gauntlet.composer.loggers import build_loggers, logger_settings
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.data.stores import Store, StoredFile
from llmfoundry_gauntlet.errors import ModelError, RecordError, StoreError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data, with_programs
from llmfoundry_gauntlet.results.files import RESULTS, read_results
from llmfoundry_gauntlet.types import TrainingPoint

log = logging.getLogger(__name__)

RENEWALS = 5  # per expiry time
SYNC_SECONDS = 10.0  # between checks for a stop signal, in which all ranks take part, while waiting
CLAIMS = '.gauntlet'  # the folder of claims, next to the checkpoints
CLAIM_FORMAT = 3
SETTINGS = 'settings.json'  # what all claims in a folder have in common, for people to read
# States of a checkpoint. A damaged one is skipped until it changes; a failed one (store unreachable) is retried.
WAITING, RUNNING, DONE, DAMAGED, FAILED = 'waiting', 'running', 'done', 'damaged', 'failed'
BAD = (DAMAGED, FAILED)
RECORDED, RESOLVED = ('semantics', 'fewshot', 'subset_items', 'time_budget'), ('precision', 'max_seq_len', 'truncation')


@dataclass(frozen=True, slots=True)
class Claim:
    """The content of a claim file."""

    owner: str  # host:process
    expires: float | None  # Unix time, 0 once released; None once the checkpoint is evaluated
    sizes: Mapping[str, int] | None = None  # questions per task within the time budget, once evaluated

    @property
    def is_done(self) -> bool:
        """Return whether the checkpoint is evaluated."""
        return self.expires is None

    @property
    def is_running(self) -> bool:
        """Return whether the claim has neither expired nor been released or completed."""
        return self.expires is not None and time.time() < self.expires


class Claims:
    """The claims in a folder as of the last `refresh`, and this watcher's own. All methods raise StoreError."""

    def __init__(self, store: Store, *, expires_seconds: float) -> None:
        self.store = store
        self.expires_seconds = expires_seconds
        self.owner = f'{platform.node()}:{os.getpid()}'
        self.by_name: dict[str, Claim] = {}
        self._by_file: dict[StoredFile, Claim] = {}  # not read again
        self._own = self._next = ''  # names of this watcher's claim file and of its successor

    def refresh(self) -> None:
        """Read the claims that have changed. An unreadable one counts as new: it may be only half written."""
        files = [file for file in self.store.files() if '@' in file.name]
        self._by_file = {file: self._by_file.get(file) or self._read(file.name) for file in files}
        self.by_name = {file.name: claim for file, claim in self._by_file.items()}

    def _read(self, name: str) -> Claim:
        try:
            return Claim(**json.loads(self.store.read(name)))
        except (ValueError, TypeError) as error:
            log.warning('%s/%s: is not a claim (%s); it counts until it expires', self.store.uri, name, error)
            return Claim('unknown', self.expiry())

    def on(self, checkpoint: Checkpoint) -> list[Claim]:
        """Return the claims on this version of a checkpoint; the last one is valid."""
        found: list[Claim] = []
        while (claim := self.by_name.get(file_of(checkpoint, len(found)))) is not None:
            found.append(claim)
        return found

    def is_known(self, checkpoint: Checkpoint) -> bool:
        """Return whether there is a claim on any version of a checkpoint."""
        return any(name.startswith(f'{quote(checkpoint.name, safe="")}@') for name in self.by_name)

    def sizes(self) -> Mapping[str, int] | None:
        """Return the numbers of questions per task within the time budget, or `None` before the first evaluation."""
        return next((claim.sizes for claim in self.by_name.values() if claim.sizes is not None), None)

    def take(self, checkpoint: Checkpoint) -> bool:
        """Create this watcher's claim; return `False` if another watcher was faster. Any earlier claim must be over."""
        number = len(self.on(checkpoint))
        self._own, self._next = file_of(checkpoint, number), file_of(checkpoint, number + 1)
        return self.store.create(self._own, self._content(self.expiry()))

    def write(self, expires: float | None, sizes: Mapping[str, int] | None = None) -> None:
        """Rewrite this watcher's claim. Raise StoreError if it `is_lost`."""
        self.refresh()
        if self.is_lost:
            raise StoreError(f'{self.store.uri}/{self._next}: {self.by_name[self._next].owner} has taken over')
        self.store.write(self._own, self._content(expires, sizes))

    @property
    def is_lost(self) -> bool:
        """Return whether another watcher has taken over this watcher's claim."""
        return self._next in self.by_name

    def expiry(self) -> float:
        """Return the expiry of a claim created or renewed now."""
        return time.time() + self.expires_seconds

    def _content(self, expires: float | None, sizes: Mapping[str, int] | None = None) -> bytes:
        return (json.dumps(asdict(Claim(self.owner, expires, sizes))) + '\n').encode()

    def close(self, expires: float | None, sizes: Mapping[str, int] | None = None) -> None:
        """Write the final state of this watcher's claim; log an error, after which the claim expires."""
        try:
            self.write(expires, sizes)
        except StoreError as error:
            log.warning('%s; claim not updated', error)

    @contextmanager
    def renewed(self, name: str) -> Iterator[None]:
        """Renew this watcher's claim on a checkpoint in a thread; release it if an exception ends the context."""
        end, is_finished = threading.Event(), False

        def renew() -> None:
            while not end.wait(self.expires_seconds / RENEWALS):
                try:
                    self.write(self.expiry())
                except StoreError as error:
                    log.warning('%s; claim not renewed', error)

        thread = threading.Thread(target=renew, name='claim', daemon=True)
        thread.start()
        try:
            yield
            is_finished = True
        finally:
            end.set()
            thread.join()
            if not is_finished:
                self.close(0.0)
                log.info('%s: released; finished items are kept', name)


def file_of(checkpoint: Checkpoint, number: int) -> str:
    """Return the name of a claim file."""
    return f'{quote(checkpoint.name, safe="")}@{checkpoint.version}.{number}.json'


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """The settings of a watch and of the evaluation of its checkpoints.

    `settings` are the keyword arguments of `evaluate`; `loggers` are Composer's by name, with their arguments. With
    `once` the watch ends when all checkpoints found at the start are evaluated, here or by another watcher; with
    `stop_seconds`, after this long without a new checkpoint. A checkpoint is complete when it has not changed for
    `settle_seconds`. A claim expires after `expires_seconds` unless it is renewed.
    """

    folder: str
    out: Path
    settings: Mapping[str, Any]
    tokenizer: str | None = None
    model_config: str | None = None
    device: str | None = None
    precision: str | None = None
    loggers: Mapping[str, Any] = field(default_factory=dict)
    run_name: str | None = None
    claims: str | None = None  # None: next to the checkpoints
    once: bool = False
    poll_seconds: float = 30.0
    settle_seconds: float = 5.0
    expires_seconds: float = 600.0
    stop_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """A claimed checkpoint to evaluate, with records in `out`."""

    checkpoint: Checkpoint
    out: Path


def watch(options: WatchSettings) -> list[tuple[str, str, str]]:
    """Evaluate checkpoints until the watch ends; return name, state and detail of each. Raise GauntletError.

    Settings, tasks, data, loggers and folders are checked before anything is claimed. A checkpoint that cannot be
    evaluated is reported and skipped. All ranks of the `composer` launcher call this; rank 0 lists and decides.
    """
    device = options.device or default_device()
    check_device(device)
    if options.precision is not None:
        check_precision(options.precision, device)
    build_loggers(options.loggers)
    data = with_programs(load_data(decode_settings({**options.settings, 'save_folder': str(options.out)}, 'watch')))
    dist.initialize_dist(device, timeout=DIST_TIMEOUT)
    watcher = Watcher(options, data)  # used by rank 0 only
    on_first_rank(watcher.start)
    with stop_signals() as check_stop:
        while (step := on_first_rank(watcher.next_step)) is not None:
            if isinstance(step, Due):
                evaluate_due(step, watcher, device, check_stop)
            else:
                parts = math.ceil(step / SYNC_SECONDS)  # the same on all ranks
                for _ in range(parts):
                    time.sleep(step / parts)
                    check_stop()
            check_stop()
    return watcher.table()


class Watcher:
    """The checkpoints of a folder, their states, and the claims on them. All methods raise GauntletError."""

    def __init__(self, options: WatchSettings, data: EvaluationData) -> None:
        self.options = options
        self.identity = watch_identity(data, options.precision)
        self.store = Store(options.folder)
        self.settings = json.dumps([CLAIM_FORMAT, self.identity], sort_keys=True, default=repr).encode()
        place = options.claims or f'{self.store.uri}/{CLAIMS}'
        digest = hashlib.sha256(self.settings).hexdigest()[:16]
        self.claims = Claims(Store(f'{place}/{digest}'), expires_seconds=options.expires_seconds)
        self.checkpoints: list[Checkpoint] = []
        self.initial_names: frozenset[str] = frozenset()  # found at the start
        self.states: dict[str, tuple[str, str]] = {}  # state and detail (owner; records or reason) by name
        self.not_before: dict[Checkpoint, float] = {}
        self.last_activity = time.monotonic()  # when a checkpoint last appeared or was evaluated

    def start(self) -> None:
        """List the checkpoints for the first time and check that claims can be written."""
        self._list()
        if self.options.once and not self.checkpoints:
            raise ModelError(
                f'{self.store.uri}: there are no checkpoints at or below it; allowed: *.pt, folders of *.distcp, and '
                'Hugging Face folders'
            )
        self.initial_names = frozenset(checkpoint.name for checkpoint in self.checkpoints)
        try:
            self.claims.store.write(SETTINGS, self.settings)
        except StoreError as error:
            raise StoreError(
                f'{error}; watchers write claims there so that no checkpoint is evaluated twice; give another folder '
                'or URI with --claims'
            ) from error
        places = (self.store.uri, len(self.checkpoints), self.options.out, self.claims.store.uri)
        log.info('watching %s: %d checkpoints; records in %s, claims in %s', *places)

    def _list(self) -> None:
        """List the checkpoints, newest first."""
        found = find_checkpoints(self.store.files())
        if any(checkpoint.name == '.' for checkpoint in found):
            raise ModelError(
                f'{self.store.uri}: is a checkpoint itself; give the folder above it, or evaluate it with gauntlet '
                'run --model'
            )
        self.checkpoints = sorted(found, key=lambda checkpoint: checkpoint.batch or -1, reverse=True)

    def next_step(self) -> Due | float | None:
        """Return a claimed checkpoint, the seconds until the next poll, or `None` if the watch is over."""
        now = time.monotonic()
        try:
            self._list()
            self.claims.refresh()
            candidates = [c for c in self.checkpoints if not self.options.once or c.name in self.initial_names]
            for checkpoint in candidates:
                if self._is_due(checkpoint) and (due := self._take(checkpoint)):
                    return due
        except StoreError as error:
            log.warning('%s; retrying in %.0f s', error, self.options.poll_seconds)
            return self.options.poll_seconds
        is_open = any(self.states[c.name][0] in (WAITING, RUNNING) for c in candidates)
        if self.options.once and not is_open:
            return None
        idle_seconds, stop_seconds = now - self.last_activity, self.options.stop_seconds
        if not is_open and stop_seconds is not None and idle_seconds > stop_seconds:
            log.info('no new checkpoint for %.0f s; stopping', idle_seconds)
            return None
        return min([self.options.poll_seconds, *(at - now for at in self.not_before.values() if at > now)])

    def _is_due(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint can be claimed now; update its state."""
        now = time.monotonic()
        if checkpoint not in self.not_before:  # new or overwritten
            self.not_before[checkpoint] = now + self.options.settle_seconds
            self.last_activity = now
            self.states[checkpoint.name] = (WAITING, '')
        for claim in self.claims.on(checkpoint)[-1:]:
            if claim.is_done or claim.is_running:
                self._report(checkpoint, DONE if claim.is_done else RUNNING, f'by {claim.owner}')
                return False
        is_limited = self.identity['time_budget'] is not None
        if is_limited and self.claims.sizes() is None and any(c.is_running for c in self.claims.by_name.values()):
            return False  # another watcher is measuring what fits into the time budget, for all of them
        return now >= self.not_before[checkpoint]

    def _report(self, checkpoint: Checkpoint, state: str, detail: str) -> None:
        """Store and log the state of a checkpoint if it has changed."""
        before, known = self.states[checkpoint.name]
        if before != state or not known.startswith(detail):
            log.log(logging.WARNING if state in BAD else logging.INFO, '%s: %s %s', checkpoint.name, state, detail)
            self.states[checkpoint.name] = (state, detail)

    def _take(self, checkpoint: Checkpoint) -> Due | None:
        """Claim a checkpoint; return `None` if another watcher was faster or its records already exist."""
        out = self._folder(checkpoint)
        is_done = not self.claims.is_known(checkpoint) and (out / RESULTS).is_file()
        if is_done:
            check_recorded(out, self.identity)
        if not self.claims.take(checkpoint):
            return None
        due = Due(checkpoint, out)
        if is_done:
            self.conclude(due, DONE)
            return None
        expired = [claim for claim in self.claims.on(checkpoint)[-1:] if claim.expires]
        text = f': taken over from {expired[0].owner}' if expired else ''
        self._report(checkpoint, RUNNING, f'by {self.claims.owner}{text}')
        return due

    def _folder(self, checkpoint: Checkpoint) -> Path:
        """Return the folder for the records of a checkpoint.

        `out/ba{batch}`, or a folder with the checkpoint's name if that is another checkpoint's or there is no batch.
        """
        name, batch = checkpoint.name.replace('/', '-'), checkpoint.batch
        if batch is None:
            return self.options.out / name
        folder = self.options.out / f'ba{batch}'
        is_taken = next(other for other in self.checkpoints if other.batch == batch) != checkpoint
        if not is_taken and (folder / RESULTS).is_file():
            checkpoint_name = str((read_results(folder)['training'] or {}).get('checkpoint'))
            is_taken = not f'/{checkpoint_name}/'.endswith(f'/{checkpoint.name}/')
        return self.options.out / f'ba{batch}-{name}' if is_taken else folder

    def conclude(self, due: Due, state: str, reason: str = '') -> None:
        """Record the outcome of an evaluation (done, damaged or failed), also in the claim that other watchers read."""
        checkpoint = due.checkpoint
        self.last_activity = time.monotonic()
        if state == DONE:
            self.claims.close(None, read_results(due.out)['timing'].get('time_budget'))
            self._report(checkpoint, DONE, f'by {self.claims.owner}: {due.out}')
            return
        self.claims.close(0.0)
        with suppress(StoreError):
            self._list()
        if self.claims.is_lost:
            return
        if checkpoint not in self.checkpoints:
            log.info('%s: deleted or overwritten during its evaluation', checkpoint.name)
        else:
            is_final = state == DAMAGED or self.options.once
            self.not_before[checkpoint] = math.inf if is_final else self.last_activity + self.options.expires_seconds
            self._report(checkpoint, state, f'by {self.claims.owner}: {reason}')

    def table(self) -> list[tuple[str, str, str]]:
        """Return name, state and detail of each checkpoint, oldest first."""
        names = [checkpoint.name for checkpoint in reversed(self.checkpoints)]
        return [(name, *self.states[name]) for name in names if name in self.states]


@contextmanager
def stop_signals() -> Iterator[Callable[[], None]]:
    """Handle SIGTERM and SIGINT: a single rank exits at once, several exit together at their next check.

    Yield a check that all ranks call together; it raises SystemExit if rank 0 has received a signal. A single rank
    needs it too, because an exception raised by a handler can be swallowed, for example in an object's finalizer.
    """
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(128 + number)
        if dist.get_world_size() == 1:
            sys.exit(noted[0])

    def check() -> None:
        if status := on_first_rank(lambda: sum(noted[:1])):
            sys.exit(status)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class EvaluationHooks(LoggerDestination):
    """Adapt an evaluation to the watch, through the events that Composer sends to loggers.

    If a checkpoint does not contain its training batch, metrics are logged at the batch in its name. With a time
    budget all checkpoints are evaluated on the same questions.
    """

    def __init__(self, watcher: Watcher, batch: int | None, check_stop: Callable[[], None]) -> None:
        self.watcher = watcher
        self.batch = batch
        self.check_stop = check_stop

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Set the training step and the number of questions per task; have records of another version replaced."""
        (callback,) = (callback for callback in state.callbacks if isinstance(callback, EvalGauntlet))
        callback.resuming = Resuming(wanted=True)
        if sizes := on_first_rank(self.watcher.claims.sizes):
            callback.load_state_dict({'sizes': [dict(sizes)]})
        source = callback.source
        if source is not None and source.training is None and self.batch is not None:
            state.timestamp = state.timestamp.copy(batch=self.batch)
            point = TrainingPoint(batch=self.batch, epoch=None, token=None, checkpoint=source.name)
            callback.source = replace(source, training=point)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Raise SystemExit after a signal, or StoreError if another watcher has taken over, on all ranks."""
        self.check_stop()
        if on_first_rank(lambda: self.watcher.claims.is_lost):
            raise StoreError('another watcher has taken over')


def evaluate_due(due: Due, watcher: Watcher, device: str, check_stop: Callable[[], None]) -> None:
    """Evaluate a claimed checkpoint. Raise GauntletErrors other than of the checkpoint or its store."""
    options, name = watcher.options, due.checkpoint.name
    state, reason = DONE, ''
    with watcher.claims.renewed(name) if dist.get_global_rank() == 0 else nullcontext():
        loggers = build_loggers(logger_settings(options.loggers, options.run_name, name))
        try:
            evaluate(
                f'{watcher.store.uri}/{name}',
                out=due.out,
                tokenizer=options.tokenizer,
                model_config=options.model_config,
                device=device,
                precision=options.precision,
                run_name=options.run_name,
                loggers=[*loggers, EvaluationHooks(watcher, due.checkpoint.batch, check_stop)],
                resume=True,
                **options.settings,
            )
        except StoreError as error:
            state, reason = FAILED, str(error)
        except ModelError as error:
            state, reason = DAMAGED, '; '.join(error.problems)
    on_first_rank(partial(watcher.conclude, due, state, reason))
    atexit.unregister(Engine._close)  # Composer 0.32.1 keeps every Trainer referenced until exit
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def watch_identity(data: EvaluationData, precision: str | None) -> dict[str, Any]:
    """Return the tasks, rows and settings that determine the scores of a checkpoint."""
    settings = data.settings
    return {
        'rows': {task.key: data.digests.get(task.key) for task in data.suite.tasks},
        'tasks': [task.keys for task in data.suite.tasks],
        'gauntlet': data.suite.gauntlet and asdict(data.suite.gauntlet),
        **{name: getattr(settings, name) for name in RECORDED},
        **{'precision': precision, 'max_seq_len': settings.max_seq_len, 'truncation': settings.effective_truncation},
    }


def check_recorded(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise RecordError if a folder has records of other tasks, rows or settings."""
    record = read_results(folder)
    score = {entry['task']: entry for entry in (record['score'] or {}).values()}
    rows = {key: entry.get('data_sha256') for key, entry in {**record['tasks'], **score}.items()}
    differing = [] if rows == identity['rows'] else ['tasks or rows']
    resolved = record.get('identity') or {}
    recorded = {name: record['config'].get(name) for name in RECORDED}
    recorded |= {name: resolved[name] for name in RESOLVED if name in resolved and identity[name]}
    differing += [
        f'{name} {found} (now {identity[name]})' for name, found in recorded.items() if found != identity[name]
    ]
    if differing:
        raise RecordError(f'{folder / RESULTS}: differs in {", ".join(differing)}; give another --out')
