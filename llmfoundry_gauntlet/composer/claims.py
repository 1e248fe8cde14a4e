"""Claims on checkpoints, which watchers of a folder share: one lock file per checkpoint with an owner and an expiry.

A claim is created exclusively, and changed only by whoever knows its present content. So of several watchers one gets
a checkpoint, one takes over an expired claim, and an owner whose claim was taken over notices when it renews it.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import quote

from llmfoundry_gauntlet.data.stores import Store
from llmfoundry_gauntlet.errors import StoreError

log = logging.getLogger(__name__)

RUNNING, DONE, DAMAGED, RELEASED = 'running', 'done', 'damaged', 'released'
RENEWALS = 5  # in the time in which a claim expires


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The state of one version of a checkpoint, and which watcher it is from."""

    checkpoint: str
    version: str  # of the checkpoint
    owner: str  # host:process
    expires: float  # seconds since the epoch; counts while running
    state: str = RUNNING
    detail: str = ''  # the folder of the records, or what is damaged
    sizes: Mapping[str, int] | None = None  # questions of each task that fit into the time budget, once done

    @property
    def is_running(self) -> bool:
        """Whether a watcher is at work, as far as its claim says."""
        return self.state == RUNNING and time.time() < self.expires


class Claims:
    """The claims in a folder, as of the last `refresh`. Everything raises StoreError."""

    def __init__(self, store: Store, *, expires_seconds: float) -> None:
        self.store = store
        self.expires_seconds = expires_seconds
        self.owner = f'{platform.node()}:{os.getpid()}'
        self._stored: dict[str, tuple[str, bytes]] = {}  # file → its version and content
        self._claims: dict[str, Claim] = {}  # by file

    def check_writable(self) -> None:
        """Raise StoreError if claims cannot be written."""
        probe = f'.{uuid.uuid4().hex}'
        try:
            self.store.create(probe, b'1')
            self.store.replace(probe, b'1', b'2')
            self.store.delete(probe)
        except StoreError as error:
            raise StoreError(
                f'{error}; claims are written there, so that no checkpoint is evaluated twice; give another folder or '
                'URI for them with --claims'
            ) from error

    def refresh(self) -> None:
        """Read the claims that changed."""
        for file in self.store.files():
            if file.name.endswith('.json') and self._stored.get(file.name, ('', b''))[0] != file.version:
                content = self.store.read(file.name)
                self._stored[file.name] = (file.version, content)
                try:
                    self._claims[file.name] = Claim(**json.loads(content))
                except (ValueError, TypeError) as error:  # edited, or a watcher was killed while creating it
                    self._claims.pop(file.name, None)
                    log.warning('%s/%s: is not a claim (%s); it is replaced', self.store.uri, file.name, error)

    def latest(self, checkpoint: str) -> Claim | None:
        """Return the claim on a checkpoint, whether it counts or not."""
        return self._claims.get(file_of(checkpoint))

    def standing(self, checkpoint: str, version: str) -> Claim | None:
        """Return the claim that keeps watchers from this version of a checkpoint, `None` if it may be taken."""
        claim = self.latest(checkpoint)
        if claim is None or claim.version != version:
            return None  # or the checkpoint was overwritten since
        return claim if claim.is_running or claim.state in (DONE, DAMAGED) else None

    def running(self) -> bool:
        """Return whether any watcher is at work."""
        return any(claim.is_running for claim in self._claims.values())

    def sizes(self) -> Mapping[str, int] | None:
        """Return the questions of each task that fit into the time budget, as an earlier evaluation found."""
        return next((claim.sizes for claim in self._claims.values() if claim.sizes is not None), None)

    def take(self, checkpoint: str, version: str) -> Claim | None:
        """Return this watcher's new claim, `None` if another was faster. Only if none is `standing`."""
        claim = Claim(checkpoint=checkpoint, version=version, owner=self.owner, expires=self._expiry())
        name = file_of(checkpoint)
        if name not in self._stored:
            return claim if self.store.create(name, content_of(claim)) else None
        return claim if self.store.replace(name, self._stored[name][1], content_of(claim)) else None

    def update(self, claim: Claim, **changes: Any) -> Claim | None:
        """Renew this watcher's claim, and change it; `None` if another watcher has taken over."""
        renewed = replace(claim, expires=self._expiry(), **changes)
        is_ours = self.store.replace(file_of(claim.checkpoint), content_of(claim), content_of(renewed))
        return renewed if is_ours else None

    def _expiry(self) -> float:
        return time.time() + self.expires_seconds


def file_of(checkpoint: str) -> str:
    """Return the name of a claim's file; no two checkpoints share one."""
    return f'{quote(checkpoint, safe="")}.json'


def content_of(claim: Claim) -> bytes:
    """Return the content of a claim's file."""
    return (json.dumps(asdict(claim), indent=1) + '\n').encode()


class Renewal:
    """Renews a claim from a thread of its own while an evaluation runs."""

    def __init__(self, claims: Claims, claim: Claim) -> None:
        self.claims = claims
        self.claim = claim
        self.is_lost = False  # another watcher has taken over
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name='claim', daemon=True)

    def __enter__(self) -> Renewal:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.is_lost and not self._end.wait(self.claims.expires_seconds / RENEWALS):
            try:
                renewed = self.claims.update(self.claim)
            except StoreError as error:
                log.warning('%s; the claim on %s is not renewed', error, self.claim.checkpoint)
                continue
            self.is_lost = renewed is None
            self.claim = renewed or self.claim
