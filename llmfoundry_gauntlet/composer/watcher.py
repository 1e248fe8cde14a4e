"""What the first rank of a watch sees and decides: which checkpoint is evaluated next, and what became of each."""

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
    missing_part,
)
from llmfoundry_gauntlet.composer.claims import DAMAGED, DONE, RELEASED, RUNNING, Claim, ClaimBoard
from llmfoundry_gauntlet.composer.stores import S3, StoreError, open_folder
from llmfoundry_gauntlet.composer.watch_records import (
    budget_sizes,
    digest_of_questions,
    finish_records,
    folder_of,
    is_of_other_version,
    is_recorded,
    mark_folder,
    remove_mark,
)
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.inputs import EvaluationData

log = logging.getLogger(__name__)

CLAIMS = '.gauntlet'  # the folder of claims, beside the checkpoints
# Further states of a checkpoint, beside those of its claim.
ARRIVING, INCOMPLETE, DUE, DELETED = 'arriving', 'incomplete', 'due', 'deleted'
FAILED, AGAIN = 'failed', 'to be tried again'  # where it is the store's fault, or may be
BAD = (DAMAGED, INCOMPLETE, FAILED)
OPEN = (ARRIVING, RUNNING, DUE, AGAIN)
LEVELS = {ARRIVING: logging.DEBUG, DUE: logging.DEBUG, **dict.fromkeys((*BAD, AGAIN), logging.WARNING)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What is watched, and how its checkpoints are evaluated.

    `settings` are those of `evaluate`; `loggers` are Composer's by name, with their arguments. `newest_first`: of
    several checkpoints the last of the training comes first. `once` ends when all that is there at the beginning has
    been evaluated, here or elsewhere; `stop_seconds` when nothing new has come for so long, None never. A checkpoint
    counts as written when it has not changed for `settle_seconds`. A claim that nobody renews for `expires_seconds` is
    of a watcher that is dead.
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
    """Nothing is to be done for so long."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A checkpoint that is claimed, to be evaluated into `out`.

    `may_replace`: what is there is of what was overwritten, or was begun elsewhere. `sizes` are the number of questions
    of each task that an earlier evaluation has found to fit into the time budget.
    """

    checkpoint: Checkpoint
    uri: str
    out: Path
    may_replace: bool
    sizes: Mapping[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What has become of a checkpoint: its state, who has evaluated it, the folder of its records or the reason."""

    checkpoint: str
    state: str
    by: str
    detail: str


@dataclass(slots=True)
class Sighting:
    """A version of a checkpoint, since when it is there, and what it lacks once that was looked for.

    After so many failures it is not tried again before `retry`.
    """

    version: str
    since: float
    failures: int = 0
    retry: float = 0.0
    is_checked: bool = False
    lacking: str | None = None


class Watcher:
    """The folder, its checkpoints and claims, from one look to the next. Everything raises GauntletError."""

    def __init__(self, wanted: WatchSettings, data: EvaluationData) -> None:
        self.wanted = wanted
        self.data = data
        self.asked = digest_of_questions(data, wanted.precision)
        self.folder = open_folder(wanted.folder)
        claims = wanted.claims or f'{self.folder.uri}/{CLAIMS}'
        self.board = ClaimBoard(open_folder(claims), digest=self.asked, expires_seconds=wanted.expires_seconds)
        self.claim: Claim | None = None  # of what is being evaluated here
        self.unwritten: list[tuple[Claim, dict[str, Any]]] = []  # while the store of the claims was out of reach
        self.checkpoints = self._look()
        if wanted.once and not self.checkpoints:
            raise ModelError(
                f'{self.folder.uri}: there are no checkpoints at or below it; allowed: *.pt, folders of *.distcp, and '
                'Hugging Face folders'
            )
        self.names = frozenset(checkpoint.name for checkpoint in self.checkpoints)  # there at the beginning
        self.sightings: dict[str, Sighting] = {}
        self.rows: dict[str, Row] = {}
        self.news = time.monotonic()  # when something has last come or was evaluated
        self.board.check_writable()
        log.info(
            'watching %s: %d checkpoints; records in %s, claims in %s',
            self.folder.uri,
            len(self.checkpoints),
            wanted.out,
            self.board.folder.uri,
        )

    def _look(self) -> list[Checkpoint]:
        """The checkpoints in the order in which they are evaluated."""
        found = find_checkpoints(self.folder.files())
        if any(checkpoint.name == '.' for checkpoint in found):
            raise ModelError(
                f'{self.folder.uri}: is a checkpoint itself; give the folder above it, or evaluate it with gauntlet '
                'run --model'
            )
        found.sort(key=lambda checkpoint: checkpoint.kind == HUGGING_FACE)  # of a batch Composer's own comes first
        found.sort(key=batch_or_none, reverse=self.wanted.newest_first)
        return found

    def next_step(self) -> Due | Pause | None:
        """What all ranks do next; None ends the watch."""
        try:
            for claim, changes in list(self.unwritten):
                self.board.write(claim, **changes)
                self.unwritten.remove((claim, changes))
            self.checkpoints = self._look()
            self.board.look()
            self._note_deleted()
            for checkpoint in self.checkpoints:
                if self._is_wanted(checkpoint.name) and self._note(checkpoint) == DUE:
                    due = self._claim(checkpoint)
                    if due is not None:
                        return due
        except StoreError as error:  # after the first look, which was in order
            log.warning('%s; this is tried again', error)
            return Pause(seconds=self.wanted.poll_seconds)
        states = [row.state for name, row in self.rows.items() if self._is_wanted(name)]
        if self.wanted.once and not any(state in OPEN for state in states):
            return None
        idle = time.monotonic() - self.news
        if self.wanted.stop_seconds is not None and idle > self.wanted.stop_seconds and RUNNING not in states:
            log.info('nothing new has come for %.0f s', idle)
            return None
        soon = ARRIVING in states
        return Pause(seconds=min(self.wanted.poll_seconds, self.wanted.settle_seconds if soon else float('inf')))

    def _is_wanted(self, name: str) -> bool:
        return not self.wanted.once or name in self.names

    def _note_deleted(self) -> None:
        there = {checkpoint.name for checkpoint in self.checkpoints}
        for name, row in list(self.rows.items()):
            if name not in there:
                self.sightings.pop(name, None)
                if row.state not in (DONE, DELETED):
                    self._say(name, DELETED, 'before it was evaluated')

    def _note(self, checkpoint: Checkpoint) -> str:
        """Finds out how a checkpoint stands, and says what is new."""
        name = checkpoint.name
        sighting = self.sightings.get(name)
        if sighting is None or sighting.version != checkpoint.version:
            sighting = self.sightings[name] = Sighting(checkpoint.version, time.monotonic())
            self.news = sighting.since
        claim = self.board.standing(name, checkpoint.version)
        if claim is not None:
            detail = {DONE: claim.out, DAMAGED: claim.reason}.get(claim.state)
            return self._say(name, claim.state, detail or '', by=claim.by)
        earlier = self.rows.get(name)
        if earlier is not None and sighting.failures and (earlier.state == FAILED or time.monotonic() < sighting.retry):
            return earlier.state
        settle = 0.0 if checkpoint.kind == SINGLE and self.folder.uri.startswith(S3) else self.wanted.settle_seconds
        if time.monotonic() - sighting.since < settle:  # objects of a store appear whole
            return self._say(name, ARRIVING, '')
        if not sighting.is_checked:
            sighting.lacking = missing_part(self.folder, checkpoint)
            sighting.is_checked = True
        if sighting.lacking is not None:
            return self._say(name, INCOMPLETE, sighting.lacking)
        if self._awaits_sizes():
            return self._say(name, ARRIVING, '')
        return self._say(name, DUE, '')

    def _awaits_sizes(self) -> bool:
        """Whether another watcher is finding out, for all, what fits into the time budget."""
        is_limited = self.data.settings.time_budget is not None
        return is_limited and self.board.sizes() is None and self.board.is_anything_running()

    def _say(self, name: str, state: str, detail: str, *, by: str = '') -> str:
        """Notes the state of a checkpoint, in a line of the log where it is a new one."""
        row = self.rows.get(name)
        is_known = row is not None and (row.state, row.by) == (state, by) and (state not in BAD or row.detail == detail)
        if not is_known:
            self.rows[name] = Row(checkpoint=name, state=state, by=by, detail=detail)
            text = f'{state} by {by}' if by else state
            log.log(LEVELS.get(state, logging.INFO), '%s: %s%s', name, text, f': {detail}' if detail else '')
        return state

    def _claim(self, checkpoint: Checkpoint) -> Due | None:
        """Claims a checkpoint; None where another watcher was faster, or where its records are there already."""
        out = folder_of(self.wanted.out, checkpoint)
        is_done = is_recorded(out, checkpoint, self.asked, self.data)
        earlier = self.board.latest(checkpoint.name)
        claim = self.board.take(checkpoint.name, checkpoint.version, out=str(out))
        if claim is None:
            return None
        if is_done:
            self.board.write(claim, state=DONE, sizes=budget_sizes(out))
            self._say(checkpoint.name, DONE, f'{out}, by an earlier evaluation', by=claim.by)
            return None
        self.claim = claim
        takes_over = earlier is not None and earlier.state == RUNNING and earlier.version == checkpoint.version
        detail = f'taken over from {earlier.by}, which is silent' if earlier is not None and takes_over else ''
        self._say(checkpoint.name, RUNNING, detail, by=claim.by)
        may_replace = earlier is not None or is_of_other_version(out, checkpoint)
        mark_folder(out, checkpoint, self.asked)
        return Due(
            checkpoint=checkpoint,
            uri=self._uri(checkpoint),
            out=out,
            may_replace=may_replace,
            sizes=self.board.sizes(),
        )

    def _uri(self, checkpoint: Checkpoint) -> str:
        if self.folder.uri.startswith(S3):
            return f'{self.folder.uri}/{checkpoint.name}'
        return str(Path(self.folder.uri, checkpoint.name).resolve())

    def conclude(self, due: Due, claim: Claim, state: str, detail: str) -> None:
        """Says what has become of a checkpoint, to the other watchers as well."""
        self.news = time.monotonic()
        checkpoint = due.checkpoint
        if state == DONE:
            out = finish_records(due.out, checkpoint, due.uri)
            self._write(claim, state=DONE, out=str(out), sizes=budget_sizes(out))
            self._say(checkpoint.name, DONE, str(out), by=claim.by)
            return
        remove_mark(due.out)
        now = {found.name: found.version for found in self._again()}
        if now.get(checkpoint.name) == checkpoint.version:
            state = self._after_failure(checkpoint, state)
            self._write(claim, state=DAMAGED if state == DAMAGED else RELEASED, reason=detail)
            self._say(checkpoint.name, state, detail, by=claim.by)
            return
        self._write(claim, state=RELEASED)
        if checkpoint.name in now:
            log.info('%s: was overwritten during its evaluation; it is evaluated again', checkpoint.name)
        else:
            self._say(checkpoint.name, DELETED, 'during its evaluation')

    def _after_failure(self, checkpoint: Checkpoint, state: str) -> str:
        """A store's fault is tried again, `once` no more than once; so is damage, which a store may only seem to do."""
        sighting = self.sightings[checkpoint.name]
        sighting.failures += 1
        sighting.retry = self.news + self.wanted.poll_seconds
        is_first = sighting.failures == 1
        if state == FAILED:
            return AGAIN if is_first or not self.wanted.once else FAILED
        return AGAIN if is_first and self.folder.uri.startswith(S3) else state

    def _again(self) -> list[Checkpoint]:
        try:
            return self._look()
        except StoreError:
            return self.checkpoints

    def _write(self, claim: Claim, **changes: Any) -> None:
        """The last word on this watcher's claim, now or once the store is within reach again."""
        self.claim = None
        try:
            self.board.write(claim, **changes)
        except StoreError as error:
            log.warning('%s; this is tried again', error)
            self.unwritten.append((claim, changes))

    def lose(self, due: Due) -> None:
        """Another watcher has taken a checkpoint over that was being evaluated here."""
        self.claim = None
        log.warning('%s: was taken over by another watcher; its evaluation here ends', due.checkpoint.name)

    def release(self) -> None:
        """Leaves the checkpoint that was being evaluated to others, with its journal."""
        if self.claim is not None:
            log.info('%s: released; what is finished is kept', self.claim.checkpoint)
            self._write(self.claim, state=RELEASED)

    def table(self) -> list[Row]:
        """What has become of each checkpoint, by batch."""
        order = {checkpoint.name: batch_or_none(checkpoint) for checkpoint in self.checkpoints}
        return sorted(self.rows.values(), key=lambda row: (order.get(row.checkpoint, -1), row.checkpoint))


def batch_or_none(checkpoint: Checkpoint) -> int:
    """The training batch in a checkpoint's name, -1 where there is none."""
    return -1 if checkpoint.batch is None else checkpoint.batch
