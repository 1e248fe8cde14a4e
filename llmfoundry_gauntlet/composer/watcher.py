"""What the first rank of a watch sees and decides: which checkpoint to evaluate next, and the status of each."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.composer.checkpoint_folders import (
    HUGGING_FACE,
    SINGLE,
    Checkpoint,
    find_checkpoints,
)
from llmfoundry_gauntlet.composer.claims import DAMAGED, DONE, RELEASED, RUNNING, Claims, Renewal
from llmfoundry_gauntlet.composer.watch_records import (
    budget_sizes,
    digest_of_questions,
    folder_of,
    is_recorded,
)
from llmfoundry_gauntlet.data.stores import Store
from llmfoundry_gauntlet.errors import ModelError, StoreError
from llmfoundry_gauntlet.inputs import EvaluationData

log = logging.getLogger(__name__)

CLAIMS = '.gauntlet'  # the folder of claims, beside the checkpoints
# States of a checkpoint beside those of its claim; `failed` is for a store that is out of reach.
ARRIVING, DUE, FAILED = 'arriving', 'due', 'failed'
BAD = (DAMAGED, FAILED)
OPEN = (ARRIVING, RUNNING, DUE)
LEVELS = {ARRIVING: logging.DEBUG, DUE: logging.DEBUG, **dict.fromkeys(BAD, logging.WARNING)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What is watched, and how its checkpoints are evaluated.

    `settings` are those of `evaluate`; `loggers` are Composer's by name, with their arguments. `newest_first`: the last
    of several checkpoints in training order comes first. `once` ends when all checkpoints there at the start are
    evaluated, here or by another watcher; `stop_seconds` when nothing new has come for this long, `None` never. A
    checkpoint counts as written when it has not changed for `settle_seconds`. A claim expires after `expires_seconds`
    unless it is renewed.
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
    newest_first: bool = True
    once: bool = False
    poll_seconds: float = 30.0
    settle_seconds: float = 5.0
    expires_seconds: float = 600.0
    stop_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """There is nothing to do for this long."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A claimed checkpoint, to be evaluated into `out`.

    `may_replace`: an unfinished evaluation in `out` is an earlier watcher's. `sizes` are the numbers of questions of
    each task that an earlier evaluation found to fit into the time budget.
    """

    checkpoint: Checkpoint
    uri: str
    out: Path
    may_replace: bool
    sizes: Mapping[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a checkpoint, who evaluates it, and the folder of its records or the reason."""

    checkpoint: str
    state: str
    owner: str
    detail: str


@dataclass(slots=True)
class Sighting:
    """A version of a checkpoint, when it was first seen, and when to try again after a failure of the store."""

    version: str
    since: float
    retry: float = 0.0


class Watcher:
    """A folder, its checkpoints and the claims on them. Everything raises GauntletError."""

    def __init__(self, wanted: WatchSettings, data: EvaluationData) -> None:
        self.wanted = wanted
        self.data = data
        self.store = Store(wanted.folder)
        place = wanted.claims or f'{self.store.uri}/{CLAIMS}'
        claims = Store(f'{place}/{digest_of_questions(data, wanted.precision)}')
        self.claims = Claims(claims, expires_seconds=wanted.expires_seconds)
        self.renewal: Renewal | None = None  # of the claim on the checkpoint that is being evaluated here
        self.checkpoints = self._list()
        if wanted.once and not self.checkpoints:
            raise ModelError(
                f'{self.store.uri}: there are no checkpoints at or below it; allowed: *.pt, folders of *.distcp, and '
                'Hugging Face folders'
            )
        self.names = frozenset(checkpoint.name for checkpoint in self.checkpoints)  # there at the start
        self.sightings: dict[str, Sighting] = {}
        self.statuses: dict[str, Status] = {}
        self.news = time.monotonic()  # when a checkpoint last came or was evaluated
        self.claims.check_writable()
        log.info(
            'watching %s: %d checkpoints; records in %s, claims in %s',
            self.store.uri,
            len(self.checkpoints),
            wanted.out,
            claims.uri,
        )

    def _list(self) -> list[Checkpoint]:
        """Return the checkpoints in the order of evaluation."""
        found = find_checkpoints(self.store.files())
        if any(checkpoint.name == '.' for checkpoint in found):
            raise ModelError(
                f'{self.store.uri}: is a checkpoint itself; give the folder above it, or evaluate it with gauntlet '
                'run --model'
            )
        found.sort(key=lambda checkpoint: checkpoint.kind == HUGGING_FACE)  # after Composer's own of the same batch
        found.sort(key=batch_or_last, reverse=self.wanted.newest_first)
        return found

    def next_step(self) -> Due | Pause | None:
        """Return what all ranks do next; `None` ends the watch."""
        try:
            self.checkpoints = self._list()
            self.claims.refresh()
            self._forget_deleted()
            for checkpoint in self.checkpoints:
                if self._is_wanted(checkpoint.name) and self._update(checkpoint) == DUE:
                    due = self._claim(checkpoint)
                    if due is not None:
                        return due
        except StoreError as error:
            log.warning('%s; retrying in %.0f s', error, self.wanted.poll_seconds)
            return Pause(seconds=self.wanted.poll_seconds)
        states = [status.state for name, status in self.statuses.items() if self._is_wanted(name)]
        if self.wanted.once and not any(state in OPEN for state in states):
            return None
        idle = time.monotonic() - self.news
        if self.wanted.stop_seconds is not None and idle > self.wanted.stop_seconds and RUNNING not in states:
            log.info('nothing new has come for %.0f s', idle)
            return None
        settle = self.wanted.settle_seconds if ARRIVING in states else float('inf')
        return Pause(seconds=min(self.wanted.poll_seconds, settle))

    def _is_wanted(self, name: str) -> bool:
        return not self.wanted.once or name in self.names

    def _forget_deleted(self) -> None:
        for name in self.statuses.keys() - {checkpoint.name for checkpoint in self.checkpoints}:
            if self.statuses[name].state != DONE:
                log.info('%s: was deleted before it was evaluated', name)
                del self.statuses[name], self.sightings[name]

    def _update(self, checkpoint: Checkpoint) -> str:
        """Find out and report the state of a checkpoint."""
        name = checkpoint.name
        sighting = self.sightings.get(name)
        if sighting is None or sighting.version != checkpoint.version:
            sighting = self.sightings[name] = Sighting(checkpoint.version, time.monotonic())
            self.news = sighting.since
        claim = self.claims.standing(name, checkpoint.version)
        if claim is not None:
            return self._report(name, claim.state, claim.detail, owner=claim.owner)
        now = time.monotonic()
        if sighting.retry and (self.wanted.once or now < sighting.retry):
            return FAILED
        settle = self.wanted.settle_seconds if self.store.is_local or checkpoint.kind != SINGLE else 0.0
        if now - sighting.since < settle:  # one object of a store appears whole
            return self._report(name, ARRIVING)
        is_limited = self.data.settings.time_budget is not None
        if is_limited and self.claims.sizes() is None and self.claims.running():
            return self._report(name, ARRIVING)  # another watcher finds out, for all, what fits into the time budget
        return self._report(name, DUE)

    def _report(self, name: str, state: str, detail: str = '', *, owner: str = '') -> str:
        """Keep the state of a checkpoint, and log it if it is new."""
        before = self.statuses.get(name)
        status = Status(checkpoint=name, state=state, owner=owner, detail=detail)
        is_known = before is not None and (before.state, before.owner) == (state, owner)
        if not is_known or (before != status and state in BAD):
            text = f'{state} by {owner}' if owner else state
            log.log(LEVELS.get(state, logging.INFO), '%s: %s%s', name, text, f': {detail}' if detail else '')
        self.statuses[name] = status
        return state

    def _claim(self, checkpoint: Checkpoint) -> Due | None:
        """Claim a checkpoint; `None` if another watcher was faster, or if its records are there already."""
        name, version = checkpoint.name, checkpoint.version
        others = self.checkpoints[: self.checkpoints.index(checkpoint)]
        out = folder_of(self.wanted.out, checkpoint, others=others)
        earlier = self.claims.latest(name)
        is_done = earlier is None and is_recorded(out, checkpoint, self.data, self.wanted.precision)
        claim = self.claims.take(name, version)
        if claim is None:
            return None
        if is_done:
            self.claims.update(claim, state=DONE, detail=str(out), sizes=budget_sizes(out))
            self._report(name, DONE, str(out), owner=claim.owner)
            return None
        is_expired = earlier is not None and (earlier.state, earlier.version) == (RUNNING, version)
        self._report(
            name, RUNNING, f'taken over from {earlier.owner}' if earlier and is_expired else '', owner=claim.owner
        )
        self.renewal = Renewal(self.claims, claim)
        return Due(
            checkpoint=checkpoint,
            uri=f'{self.store.uri}/{name}',
            out=out,
            may_replace=earlier is not None,
            sizes=self.claims.sizes(),
        )

    def conclude(self, due: Due, state: str, detail: str) -> None:
        """Record the outcome of an evaluation, for the other watchers as well."""
        self.news = time.monotonic()
        name, version = due.checkpoint.name, due.checkpoint.version
        if state == DONE:
            self._finish(state=DONE, detail=str(due.out), sizes=budget_sizes(due.out))
            self._report(name, DONE, str(due.out), owner=self.claims.owner)
            return
        now = {checkpoint.name: checkpoint.version for checkpoint in self._list_if_possible()}
        if now.get(name) != version:
            self._finish(state=RELEASED)
            del self.statuses[name], self.sightings[name]
            log.info('%s: was %s during its evaluation', name, 'overwritten' if name in now else 'deleted')
            return
        if state == FAILED:
            self.sightings[name].retry = self.news + self.wanted.poll_seconds
        self._finish(state=RELEASED if state == FAILED else state, detail=detail)
        self._report(name, state, detail, owner=self.claims.owner)

    def _list_if_possible(self) -> list[Checkpoint]:
        try:
            return self._list()
        except StoreError:
            return self.checkpoints

    def _finish(self, **changes: Any) -> None:
        """Write the last state of this watcher's claim."""
        if self.renewal is None:
            raise RuntimeError('there is no claim')
        claim, self.renewal = self.renewal.claim, None
        try:
            if self.claims.update(claim, **changes) is None:
                log.warning('%s: was taken over by another watcher', claim.checkpoint)
        except StoreError as error:  # the claim expires, then the records show whether it is done
            log.warning('%s; the claim on %s stays until it expires', error, claim.checkpoint)

    def lose(self, due: Due) -> None:
        """Give up a checkpoint that another watcher has taken over."""
        self.renewal = None
        log.warning('%s: was taken over by another watcher; its evaluation here ends', due.checkpoint.name)

    def release(self) -> None:
        """Leave the checkpoint that is being evaluated, if any, to others, with its journal."""
        if self.renewal is not None:
            log.info('%s: released; what is finished is kept', self.renewal.claim.checkpoint)
            self._finish(state=RELEASED)

    def table(self) -> list[Status]:
        """Return the status of each checkpoint, by batch."""
        order = {checkpoint.name: batch_or_last(checkpoint) for checkpoint in self.checkpoints}
        return sorted(self.statuses.values(), key=lambda status: (order.get(status.checkpoint, -1), status.checkpoint))


def batch_or_last(checkpoint: Checkpoint) -> int:
    """Return the training batch in a checkpoint's name, -1 if there is none."""
    return -1 if checkpoint.batch is None else checkpoint.batch
