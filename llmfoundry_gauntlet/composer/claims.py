"""Who evaluates what: claims on checkpoints, in files that all watchers of a folder see.

A claim is a file `{digest}/{checkpoint}.{generation}.json`; the digest is of what is asked, so that watchers with other
tasks have claims of their own. Of several watchers that want a checkpoint at once, one creates the next generation. The
newest generation counts, and its owner alone writes to it: again and again while the evaluation runs, so that others
see that it does. No clocks are compared: whoever sees a claim unchanged for long, by the own clock, may take over.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from llmfoundry_gauntlet.composer.stores import Folder, StoredFile, StoreError
from llmfoundry_gauntlet.errors import ModelError

log = logging.getLogger(__name__)

RUNNING, DONE, DAMAGED, RELEASED = 'running', 'done', 'damaged', 'released'
BEATS = 5  # a claim is written so many times in the time after which it expires


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is said of a checkpoint, and by whom. `version` is the checkpoint's; `time` is for people to read."""

    checkpoint: str
    version: str
    state: str = RUNNING
    reason: str | None = None  # of damage
    out: str | None = None  # folder of the records
    sizes: Mapping[str, int] | None = None  # the questions of each task that fit into the time budget, once done
    host: str = ''
    pid: int = 0
    owner: str = ''  # a watcher's own mark
    time: str = ''
    beat: int = 0  # how many times it was written
    generation: int = 0

    @property
    def by(self) -> str:
        """The watcher, for people."""
        return f'{self.host}:{self.pid}'


class ClaimBoard:
    """All claims on the checkpoints of a folder, as this watcher sees them since its last `look`."""

    def __init__(self, folder: Folder, *, digest: str, expires_seconds: float) -> None:
        self.folder = folder
        self.digest = digest
        self.expires_seconds = expires_seconds
        self.owner = uuid.uuid4().hex
        self._claims: dict[str, Claim] = {}  # the newest of each checkpoint, by the name of its files
        self._seen: dict[str, tuple[str, float]] = {}  # file → its version, and when that was first seen

    def check_writable(self) -> None:
        """Raises ModelError where claims cannot be written."""
        probe = f'{self.digest}/.{self.owner}'
        try:
            self.folder.create(probe, b'')
            self.folder.delete(probe)
        except StoreError as error:
            raise ModelError(
                f'{error}; claims are written there, so that no checkpoint is evaluated twice; give a folder or '
                's3://bucket/prefix for them that can be written, with --claims'
            ) from error

    def look(self) -> None:
        """Reads the claims that changed. Raises StoreError."""
        newest: dict[str, tuple[int, StoredFile]] = {}
        for file in self.folder.files(f'{self.digest}/'):
            key, generation = split_name(file.name.removeprefix(f'{self.digest}/'))
            if generation > newest.get(key, (0, file))[0]:
                newest[key] = (generation, file)
        now = time.monotonic()
        claims = {}
        for key, (generation, file) in newest.items():
            version, _ = self._seen.get(file.name, ('', 0.0))
            if version != file.version or key not in self._claims:
                self._seen[file.name] = (file.version, now)
                claims[key] = self._read(file.name, generation)
            else:
                claims[key] = self._claims[key]
        self._claims = claims

    def _read(self, name: str, generation: int) -> Claim:
        known = {item.name for item in fields(Claim)}
        try:
            content = json.loads(self.folder.read(name))
            values = {key: value for key, value in content.items() if key in known}
            return replace(Claim(**values), generation=generation)
        except (ValueError, TypeError, AttributeError) as error:  # of another version, or by somebody's hand
            log.warning('%s/%s: is no claim (%r); it stands until it expires', self.folder.uri, name, error)
            return Claim(checkpoint='', version='', host='unknown', generation=generation)

    def standing(self, checkpoint: str, version: str) -> Claim | None:
        """The claim that keeps others from a checkpoint of this version, None where anybody may take it."""
        claim = self._claims.get(key_of(checkpoint))
        if claim is None or claim.state == RELEASED:
            return None
        if claim.version != version and claim.checkpoint:
            return None  # it is of what was overwritten
        if claim.state == RUNNING and claim.owner != self.owner and self._has_expired(key_of(checkpoint), claim):
            return None
        return claim

    def _has_expired(self, key: str, claim: Claim) -> bool:
        """Whether a claim has stayed as it is for so long that its owner must be dead."""
        _, since = self._seen[self._name(key, claim.generation)]
        return time.monotonic() - since > self.expires_seconds

    def latest(self, checkpoint: str) -> Claim | None:
        """The newest claim of a checkpoint, whether it counts or not."""
        return self._claims.get(key_of(checkpoint))

    def sizes(self) -> Mapping[str, int] | None:
        """The questions of each task that fit into the time budget, as the first evaluation has found."""
        return next((claim.sizes for claim in self._claims.values() if claim.sizes is not None), None)

    def is_anything_running(self) -> bool:
        """Whether a watcher is at work whose claim has not expired."""
        running = [(key, claim) for key, claim in self._claims.items() if claim.state == RUNNING]
        return any(not self._has_expired(key, claim) for key, claim in running)

    def take(self, checkpoint: str, version: str, *, out: str | None = None) -> Claim | None:
        """This watcher's claim, None where another one was faster. Only where nothing is `standing`."""
        earlier = self.latest(checkpoint)
        generation = 1 if earlier is None else earlier.generation + 1
        claim = Claim(checkpoint=checkpoint, version=version, out=out, owner=self.owner, generation=generation)
        claim = replace(claim, host=platform.node(), pid=os.getpid())
        return claim if self.folder.create(self._name_of(claim), content_of(claim)) else None

    def write(self, claim: Claim, **changes: Any) -> Claim:
        """Writes this watcher's own claim again; as it is now."""
        claim = replace(claim, beat=claim.beat + 1, **changes)
        self.folder.write(self._name_of(claim), content_of(claim))
        return claim

    def is_newest(self, claim: Claim) -> bool:
        """Whether nobody has taken over. Raises StoreError."""
        key = key_of(claim.checkpoint)
        files = self.folder.files(f'{self.digest}/{key}.')
        return max(split_name(file.name)[1] for file in files) == claim.generation if files else False

    def _name_of(self, claim: Claim) -> str:
        return self._name(key_of(claim.checkpoint), claim.generation)

    def _name(self, key: str, generation: int) -> str:
        return f'{self.digest}/{key}.{generation}.json'


def key_of(checkpoint: str) -> str:
    """A checkpoint's name as one part of a path; no two have the same."""
    return quote(checkpoint, safe='')


def split_name(name: str) -> tuple[str, int]:
    """The checkpoint's part and the generation of a claim's file; 0 where it is no claim."""
    key, _, rest = name.removesuffix('.json').rpartition('.')
    return (key, int(rest)) if rest.isdecimal() and name.endswith('.json') else (name, 0)


def content_of(claim: Claim) -> bytes:
    """A claim's file, with the time at which it is written."""
    stamped = replace(claim, time=datetime.now(UTC).isoformat(timespec='seconds'))
    return (json.dumps(asdict(stamped), indent=1) + '\n').encode()


class Heartbeat:
    """Keeps a claim alive while an evaluation runs, from a thread of its own. `is_lost`: somebody has taken over."""

    def __init__(self, board: ClaimBoard, claim: Claim) -> None:
        self.board = board
        self.claim = claim
        self.is_lost = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name='claim', daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self.board.expires_seconds / BEATS):
            attempt(self._beat)

    def _beat(self) -> None:
        self.is_lost = not self.board.is_newest(self.claim)
        if not self.is_lost:
            self.claim = self.board.write(self.claim)

    def finish(self, **changes: Any) -> None:
        """The last word on the claim, once the thread has ended. Raises StoreError."""
        self.board.write(self.claim, **changes)


def attempt(action: Callable[[], object]) -> None:
    """Does something that is tried again later where the store is out of reach."""
    try:
        action()
    except StoreError as error:
        log.warning('%s; this is tried again', error)
