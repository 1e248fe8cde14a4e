"""`gauntlet watch`: evaluate each checkpoint of a folder once, as it comes; several watchers share the work."""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer.core import Engine, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from llmfoundry_gauntlet.composer.callback import EvalGauntlet, on_first_rank
from llmfoundry_gauntlet.composer.checkpoint_folders import Checkpoint, find_checkpoints
from llmfoundry_gauntlet.composer.claims import Claims
from llmfoundry_gauntlet.composer.evaluate import DIST_TIMEOUT, check_device, check_precision, default_device, evaluate
from llmfoundry_gauntlet.composer.journal import Resuming
from llmfoundry_gauntlet.composer.loggers import build_loggers, logger_settings
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.data.stores import Store
from llmfoundry_gauntlet.errors import ModelError, RecordError, StoreError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data, with_programs
from llmfoundry_gauntlet.results.files import RESULTS, read_results
from llmfoundry_gauntlet.types import TrainingPoint

log = logging.getLogger(__name__)

MEET_SECONDS = 10.0  # between meetings of waiting ranks, which end together when told to
CLAIMS = '.gauntlet'  # the folder of claims, beside the checkpoints
CLAIM_FORMAT = 3
# States of a checkpoint: `damaged` until it changes, `failed` until its store is in reach again.
WAITING, RUNNING, DONE, DAMAGED, FAILED = 'waiting', 'running', 'done', 'damaged', 'failed'
BAD = (DAMAGED, FAILED)
RECORDED, RESOLVED = ('semantics', 'fewshot', 'subset_items', 'time_budget'), ('precision', 'max_seq_len', 'truncation')


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """The settings of a watch and of the evaluation of its checkpoints.

    `settings` are those of `evaluate`; `loggers` are Composer's by name, with their arguments. `once` ends when all
    checkpoints there at the start are evaluated, here or by another watcher; `stop_seconds` when nothing new has come
    for this long. A checkpoint counts as written when it has not changed for `settle_seconds`. A claim expires after
    `expires_seconds` unless it is renewed.
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
    claims: str | None = None  # None: beside the checkpoints
    once: bool = False
    poll_seconds: float = 30.0
    settle_seconds: float = 5.0
    expires_seconds: float = 600.0
    stop_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A claimed checkpoint, to be evaluated into `out`.

    `sizes` are the questions of each task that an earlier evaluation found to fit into the time budget.
    """

    checkpoint: Checkpoint
    uri: str
    out: Path
    sizes: Mapping[str, int] | None


def watch(wanted: WatchSettings) -> list[tuple[str, str, str]]:
    """Evaluate checkpoints until it is time to stop; return name, state and detail of each. Raise GauntletError.

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
    watcher = Watcher(wanted, data)  # used by the first rank
    on_first_rank(watcher.start)
    with stop_signals() as check_stop:
        try:
            while (step := on_first_rank(watcher.next_step)) is not None:
                if isinstance(step, Due):
                    with watcher.claims.renewed() if dist.get_global_rank() == 0 else nullcontext():
                        outcome = evaluate_due(step, watcher, device, check_stop)
                    on_first_rank(partial(watcher.conclude, step, *outcome))
                    free_memory()
                else:
                    time.sleep(min(step, MEET_SECONDS))
                check_stop()
        finally:
            watcher.release()
    return watcher.table()


class Watcher:
    """A folder, its checkpoints and the claims on them. Everything raises GauntletError."""

    def __init__(self, wanted: WatchSettings, data: EvaluationData) -> None:
        self.wanted = wanted
        self.questions = questions_of(data, wanted.precision)
        self.store = Store(wanted.folder)
        text = json.dumps([CLAIM_FORMAT, self.questions], sort_keys=True, default=repr)
        digest = hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]
        place = wanted.claims or f'{self.store.uri}/{CLAIMS}'
        self.claims = Claims(Store(f'{place}/{digest}'), expires_seconds=wanted.expires_seconds)
        self.due: Due | None = None  # being evaluated here
        self.checkpoints: list[Checkpoint] = []
        self.names: frozenset[str] = frozenset()  # of those there at the start
        self.states: dict[str, tuple[str, str]] = {}  # by checkpoint, with the watcher, and the records or the reason
        self.not_before: dict[Checkpoint, float] = {}
        self.news = time.monotonic()  # when a checkpoint last came or was evaluated
        self.next_look = 0.0

    def start(self) -> None:
        """Look for the first time."""
        self._list()
        if self.wanted.once and not self.checkpoints:
            raise ModelError(
                f'{self.store.uri}: there are no checkpoints at or below it; allowed: *.pt, folders of *.distcp, and '
                'Hugging Face folders'
            )
        self.names = frozenset(checkpoint.name for checkpoint in self.checkpoints)
        self.claims.check_writable()
        places = (self.store.uri, len(self.checkpoints), self.wanted.out, self.claims.store.uri)
        log.info('watching %s: %d checkpoints; records in %s, claims in %s', *places)

    def _list(self) -> None:
        """Find the checkpoints, the newest first."""
        found = find_checkpoints(self.store.files())
        if any(checkpoint.name == '.' for checkpoint in found):
            raise ModelError(
                f'{self.store.uri}: is a checkpoint itself; give the folder above it, or evaluate it with gauntlet '
                'run --model'
            )
        self.checkpoints = sorted(found, key=lambda checkpoint: checkpoint.batch or -1, reverse=True)

    def next_step(self) -> Due | float | None:
        """Return a claimed checkpoint, the seconds until the next look, or `None` at the end of the watch."""
        now = time.monotonic()
        if now < self.next_look:
            return self.next_look - now
        try:
            self._list()
            self.claims.refresh()
            wanted = [c for c in self.checkpoints if not self.wanted.once or c.name in self.names]
            for checkpoint in wanted:
                if self._is_due(checkpoint) and (due := self._take(checkpoint)):
                    return due
        except StoreError as error:
            log.warning('%s; retrying in %.0f s', error, self.wanted.poll_seconds)
            self.next_look = now + self.wanted.poll_seconds
            return self.wanted.poll_seconds
        is_open = any(self.states[c.name][0] in (WAITING, RUNNING) for c in wanted)
        if self.wanted.once and not is_open:
            return None
        if not is_open and self.wanted.stop_seconds is not None and now - self.news > self.wanted.stop_seconds:
            log.info('nothing new has come for %.0f s', now - self.news)
            return None
        self.next_look = min([now + self.wanted.poll_seconds, *(at for at in self.not_before.values() if at > now)])
        return self.next_look - now

    def _is_due(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint may be claimed; keep its state."""
        now = time.monotonic()
        if checkpoint not in self.not_before:  # a version that is new
            self.not_before[checkpoint] = now + self.wanted.settle_seconds
            self.news = now
            self.states[checkpoint.name] = (WAITING, '')
        for claim in self.claims.on(checkpoint)[-1:]:
            if claim.is_done or claim.is_running:
                self._report(checkpoint, DONE if claim.is_done else RUNNING, f'by {claim.owner}')
                return False
        is_limited = self.questions['time_budget'] is not None
        if is_limited and self.claims.sizes() is None and self.claims.is_any_running():
            return False  # another watcher finds out, for all, what fits into the time budget
        return now >= self.not_before[checkpoint]

    def _report(self, checkpoint: Checkpoint, state: str, detail: str) -> None:
        """Keep and log the state of a checkpoint, if it is new."""
        before, known = self.states[checkpoint.name]
        if before != state or not known.startswith(detail):
            log.log(logging.WARNING if state in BAD else logging.INFO, '%s: %s %s', checkpoint.name, state, detail)
            self.states[checkpoint.name] = (state, detail)

    def _take(self, checkpoint: Checkpoint) -> Due | None:
        """Claim a checkpoint; `None` if another watcher was faster, or if its records are there already."""
        out = self._folder(checkpoint)
        is_done = not self.claims.is_known(checkpoint) and (out / RESULTS).is_file()
        if is_done:
            check_recorded(out, self.questions)
        if not self.claims.take(checkpoint):
            return None
        self.due = due = Due(
            checkpoint=checkpoint, uri=f'{self.store.uri}/{checkpoint.name}', out=out, sizes=self.claims.sizes()
        )
        if is_done:
            self.conclude(due, DONE)
            return None
        expired = [claim for claim in self.claims.on(checkpoint)[-1:] if claim.expires]
        text = f': taken over from {expired[0].owner}' if expired else ''
        self._report(checkpoint, RUNNING, f'by {self.claims.owner}{text}')
        return due

    def _folder(self, checkpoint: Checkpoint) -> Path:
        """Return where the records of a checkpoint go.

        `out/ba{batch}`, or a folder with the checkpoint's name if another one is there or there is no batch.
        """
        own, batch = checkpoint.name.replace('/', '-'), checkpoint.batch
        if batch is None:
            return self.wanted.out / own
        folder = self.wanted.out / f'ba{batch}'
        is_taken = next(other for other in self.checkpoints if other.batch == batch) != checkpoint
        if not is_taken and (folder / RESULTS).is_file():
            recorded = str((read_results(folder)['training'] or {}).get('checkpoint'))
            is_taken = not f'/{recorded}/'.endswith(f'/{checkpoint.name}/')
        return self.wanted.out / f'ba{batch}-{own}' if is_taken else folder

    def conclude(self, due: Due, state: str, reason: str = '') -> None:
        """Record the outcome of an evaluation, done, damaged or failed, for the other watchers as well."""
        checkpoint = due.checkpoint
        self.news = time.monotonic()
        if state == DONE:
            self._finish(due, expires=None, sizes=read_results(due.out)['timing'].get('time_budget'))
            self._report(checkpoint, DONE, f'by {self.claims.owner}: {due.out}')
            return
        self._finish(due, expires=0.0)
        with suppress(StoreError):
            self._list()
        if self.claims.is_lost:
            return
        if checkpoint not in self.checkpoints:
            log.info('%s: was deleted or overwritten during its evaluation', checkpoint.name)
        else:
            is_final = state == DAMAGED or self.wanted.once
            self.not_before[checkpoint] = math.inf if is_final else self.news + self.wanted.expires_seconds
            self._report(checkpoint, state, f'by {self.claims.owner}: {reason}')

    def _finish(self, due: Due, *, expires: float | None, sizes: Mapping[str, int] | None = None) -> None:
        """Write the last state of this watcher's claim."""
        self.due = None
        try:
            self.claims.write(expires, sizes)
        except StoreError as error:  # the claim expires, then the records show whether it is done
            log.warning('%s: the claim is not changed: %s', due.checkpoint.name, error)

    def release(self) -> None:
        """Leave the checkpoint that is being evaluated, if any, to others, with its journal."""
        if self.due is not None:
            log.info('%s: released; what is finished is kept', self.due.checkpoint.name)
            self._finish(self.due, expires=0.0)

    def table(self) -> list[tuple[str, str, str]]:
        """Return name, state and detail of each checkpoint, by batch."""
        names = [checkpoint.name for checkpoint in reversed(self.checkpoints)]
        return [(name, *self.states[name]) for name in names if name in self.states]


@contextmanager
def stop_signals() -> Iterator[Callable[[], None]]:
    """Handle SIGTERM and SIGINT: a single rank exits at once, several exit together when they meet.

    Yield a function for all ranks to call together, which raises SystemExit if the first was told to stop. A single
    rank notes the signal too, as what a handler raises may be swallowed, such as in the finalizer of an object.
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


class Overseer(LoggerDestination):
    """Hooks of the watch into an evaluation; Composer calls it as it does loggers.

    If a checkpoint does not hold its training batch, its name says at which one metrics are logged. With a time budget
    all checkpoints are asked the same questions.
    """

    def __init__(self, watcher: Watcher, due: Due, check_stop: Callable[[], None]) -> None:
        self.watcher = watcher
        self.due = due
        self.check_stop = check_stop

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Set the training step, which questions fit into the time budget, and that other records are replaced."""
        batch = self.due.checkpoint.batch
        for callback in state.callbacks:
            if not isinstance(callback, EvalGauntlet) or callback.source is None:
                continue
            callback.resuming = Resuming(wanted=True)
            if self.due.sizes is not None:
                callback.load_state_dict({'sizes': [dict(self.due.sizes)]})
            if callback.source.training is None and batch is not None:
                state.timestamp = state.timestamp.copy(batch=batch)
                point = TrainingPoint(batch=batch, epoch=None, token=None, checkpoint=self.due.uri)
                callback.source = replace(callback.source, training=point)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Raise SystemExit, or StoreError if another watcher has taken over, on all ranks together."""
        self.check_stop()
        on_first_rank(self.watcher.claims.check_held)


def evaluate_due(due: Due, watcher: Watcher, device: str, check_stop: Callable[[], None]) -> tuple[str, str]:
    """Evaluate a claimed checkpoint; return its state and why it is not done. Raise GauntletError for settings."""
    wanted = watcher.wanted
    loggers = build_loggers(logger_settings(wanted.loggers, wanted.run_name, due.checkpoint.name))
    try:
        evaluate(
            due.uri,
            out=due.out,
            tokenizer=wanted.tokenizer,
            model_config=wanted.model_config,
            device=device,
            precision=wanted.precision,
            run_name=wanted.run_name,
            loggers=[*loggers, Overseer(watcher, due, check_stop)],
            resume=True,
            **wanted.settings,
        )
    except StoreError as error:
        return FAILED, str(error)
    except ModelError as error:
        return DAMAGED, '; '.join(error.problems)
    return DONE, ''


def free_memory() -> None:
    """Free the last evaluation, which Composer 0.32.1 keeps in order to close every Trainer at exit."""
    atexit.unregister(Engine._close)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def questions_of(data: EvaluationData, precision: str | None) -> dict[str, Any]:
    """Return what makes two evaluations of a checkpoint the same."""
    settings = data.settings
    return {
        'rows': {task.key: data.digests.get(task.key) for task in data.suite.tasks},
        'tasks': [task.keys for task in data.suite.tasks],
        'gauntlet': data.suite.gauntlet and asdict(data.suite.gauntlet),
        **{name: getattr(settings, name) for name in RECORDED},
        **{'precision': precision, 'max_seq_len': settings.max_seq_len, 'truncation': settings.cut},
    }


def check_recorded(folder: Path, questions: Mapping[str, Any]) -> None:
    """Raise RecordError if a folder holds records of other tasks, rows or settings."""
    record = read_results(folder)
    score = {entry['task']: entry for entry in (record['score'] or {}).values()}
    rows = {key: entry.get('data_sha256') for key, entry in {**record['tasks'], **score}.items()}
    differing = [] if rows == questions['rows'] else ['tasks or rows']
    identity = record.get('identity') or {}
    then = {name: record['config'].get(name) for name in RECORDED}
    then |= {name: identity[name] for name in RESOLVED if name in identity and questions[name]}
    differing += [f'{name} {found} (now {questions[name]})' for name, found in then.items() if found != questions[name]]
    if differing:
        raise RecordError(f'{folder / RESULTS}: differs in {", ".join(differing)}; give another --out')
