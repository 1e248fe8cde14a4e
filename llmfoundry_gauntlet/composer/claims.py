"""Claims on checkpoints, which the watchers of a folder share: lock files with an owner and an expiry.

The claims on one version of a checkpoint are numbered, and the last one counts. A file is created exclusively, then
written by its owner alone. So one of several watchers gets a checkpoint, one takes over an expired claim by creating
the next, and the former owner notices that when it renews its own.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from urllib.parse import quote

from llmfoundry_gauntlet.composer.checkpoint_folders import Checkpoint
from llmfoundry_gauntlet.data.stores import Store
from llmfoundry_gauntlet.errors import StoreError

log = logging.getLogger(__name__)

RENEWALS = 5  # in the time in which a claim expires


@dataclass(frozen=True, slots=True)
class Claim:
    """The content of a claim's file."""

    owner: str  # host:process
    expires: float | None  # seconds since the epoch, 0 once released; None once the checkpoint is evaluated
    sizes: Mapping[str, int] | None = None  # questions of each task that fit into the time budget, once evaluated

    @property
    def is_done(self) -> bool:
        """Return whether the checkpoint is evaluated."""
        return self.expires is None

    @property
    def is_running(self) -> bool:
        """Return whether a watcher is at work, as far as its claim says."""
        return self.expires is not None and time.time() < self.expires


class Claims:
    """The claims in a folder as of the last `refresh`, and this watcher's own. Everything raises StoreError."""

    def __init__(self, store: Store, *, expires_seconds: float) -> None:
        self.store = store
        self.expires_seconds = expires_seconds
        self.owner = f'{platform.node()}:{os.getpid()}'
        self.by_file: dict[str, Claim] = {}
        self._versions: dict[str, str] = {}  # of the files that were read
        self._own = self._next = ''  # files: this watcher's claim, and that of a watcher that takes over

    def check_writable(self) -> None:
        """Raise StoreError if claims cannot be written."""
        probe = f'.{uuid.uuid4().hex}'
        try:
            self.store.create(probe, b'')
            self.store.delete(probe)
        except StoreError as error:
            raise StoreError(
                f'{error}; claims are written there, so that no checkpoint is evaluated twice; give another folder or '
                'URI for them with --claims'
            ) from error

    def refresh(self) -> None:
        """Read the claims that changed. One that cannot be read counts as just created, as it may be."""
        for file in self.store.files():
            if not file.name.endswith('.json') or self._versions.get(file.name) == file.version:
                continue
            try:
                claim = Claim(**json.loads(self.store.read(file.name)))
            except (ValueError, TypeError) as error:
                claim = Claim('unknown', self.expiry())
                log.warning('%s/%s: is not a claim (%s); it expires', self.store.uri, file.name, error)
            self._versions[file.name], self.by_file[file.name] = file.version, claim

    def on(self, checkpoint: Checkpoint) -> list[Claim]:
        """Return the claims on this version of a checkpoint, of which the last one counts."""
        found: list[Claim] = []
        while (claim := self.by_file.get(file_of(checkpoint, len(found)))) is not None:
            found.append(claim)
        return found

    def is_known(self, checkpoint: Checkpoint) -> bool:
        """Return whether there is a claim on any version of a checkpoint."""
        return any(name.startswith(f'{quote(checkpoint.name, safe="")}@') for name in self.by_file)

    def is_any_running(self) -> bool:
        """Return whether any watcher is at work."""
        return any(claim.is_running for claim in self.by_file.values())

    def sizes(self) -> Mapping[str, int] | None:
        """Return the questions of each task that fit into the time budget, as an earlier evaluation found."""
        return next((claim.sizes for claim in self.by_file.values() if claim.sizes is not None), None)

    def take(self, checkpoint: Checkpoint) -> bool:
        """Create this watcher's claim; return `False` if another was faster. Only if no other claim counts."""
        number = len(self.on(checkpoint))
        self._own, self._next = file_of(checkpoint, number), file_of(checkpoint, number + 1)
        return self.store.create(self._own, content_of(Claim(self.owner, self.expiry())))

    def expiry(self) -> float:
        """Return when a claim expires that is made now."""
        return time.time() + self.expires_seconds

    @property
    def is_lost(self) -> bool:
        """Return whether another watcher has taken over this watcher's claim."""
        return self._next in self.by_file

    def check_held(self) -> None:
        """Raise StoreError if this watcher's claim `is_lost`."""
        if self.is_lost:
            raise StoreError(f'{self.store.uri}/{self._next}: {self.by_file[self._next].owner} has taken over')

    def write(self, expires: float | None, sizes: Mapping[str, int] | None = None) -> None:
        """Change this watcher's claim."""
        self.refresh()
        self.check_held()
        self.store.write(self._own, content_of(Claim(self.owner, expires, sizes)))

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew this watcher's claim from a thread."""
        end = threading.Event()
        thread = threading.Thread(target=self._renew, args=(end,), name='claim', daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _renew(self, end: threading.Event) -> None:
        while not end.wait(self.expires_seconds / RENEWALS):
            try:
                self.write(self.expiry())
            except StoreError as error:
                log.warning('%s; the claim is not renewed', error)


def file_of(checkpoint: Checkpoint, number: int) -> str:
    """Return the name of a claim's file."""
    return f'{quote(checkpoint.name, safe="")}@{checkpoint.version}.{number}.json'


def content_of(claim: Claim) -> bytes:
    """Return the content of a claim's file."""
    return (json.dumps(asdict(claim)) + '\n').encode()
