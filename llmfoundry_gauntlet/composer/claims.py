"""Claims on checkpoints, shared by the watchers of a folder: lock files with an owner and an expiry.

The claims on one version of a checkpoint are numbered and the last one is valid. Each file is created exclusively and
later written only by its owner, so exactly one of several watchers gets a checkpoint. An expired claim is taken over by
creating the next one, which the former owner notices when it renews its own.
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

RENEWALS = 5  # per expiry time


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
        self.by_file: dict[str, Claim] = {}
        self._versions: dict[str, str] = {}  # of the files read so far
        self._own = self._next = ''  # names of this watcher's claim file and of its successor

    def check_writable(self) -> None:
        """Raise StoreError if claims cannot be written."""
        probe = f'.{uuid.uuid4().hex}'
        try:
            self.store.create(probe, b'')
            self.store.delete(probe)
        except StoreError as error:
            raise StoreError(
                f'{error}; watchers write claims there so that no checkpoint is evaluated twice; give another folder '
                'or URI with --claims'
            ) from error

    def refresh(self) -> None:
        """Read the claims that have changed. An unreadable one counts as new: it may be only half written."""
        for file in self.store.files():
            if not file.name.endswith('.json') or self._versions.get(file.name) == file.version:
                continue
            try:
                claim = Claim(**json.loads(self.store.read(file.name)))
            except (ValueError, TypeError) as error:
                claim = Claim('unknown', self.expiry())
                log.warning('%s/%s: is not a claim (%s); it counts until it expires', self.store.uri, file.name, error)
            self._versions[file.name], self.by_file[file.name] = file.version, claim

    def on(self, checkpoint: Checkpoint) -> list[Claim]:
        """Return the claims on this version of a checkpoint; the last one is valid."""
        found: list[Claim] = []
        while (claim := self.by_file.get(file_of(checkpoint, len(found)))) is not None:
            found.append(claim)
        return found

    def is_known(self, checkpoint: Checkpoint) -> bool:
        """Return whether there is a claim on any version of a checkpoint."""
        return any(name.startswith(f'{quote(checkpoint.name, safe="")}@') for name in self.by_file)

    def is_any_running(self) -> bool:
        """Return whether any claim is running."""
        return any(claim.is_running for claim in self.by_file.values())

    def sizes(self) -> Mapping[str, int] | None:
        """Return the numbers of questions per task within the time budget, or `None` before the first evaluation."""
        return next((claim.sizes for claim in self.by_file.values() if claim.sizes is not None), None)

    def take(self, checkpoint: Checkpoint) -> bool:
        """Create this watcher's claim; return `False` if another watcher was faster. Any earlier claim must be over."""
        number = len(self.on(checkpoint))
        self._own, self._next = file_of(checkpoint, number), file_of(checkpoint, number + 1)
        return self.store.create(self._own, content_of(Claim(self.owner, self.expiry())))

    def expiry(self) -> float:
        """Return the expiry of a claim created or renewed now."""
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
        """Rewrite this watcher's claim. Raise StoreError if it `is_lost`."""
        self.refresh()
        self.check_held()
        self.store.write(self._own, content_of(Claim(self.owner, expires, sizes)))

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew this watcher's claim in a thread until the context is left."""
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
                log.warning('%s; claim not renewed', error)


def file_of(checkpoint: Checkpoint, number: int) -> str:
    """Return the name of a claim file."""
    return f'{quote(checkpoint.name, safe="")}@{checkpoint.version}.{number}.json'


def content_of(claim: Claim) -> bytes:
    """Return the JSON of a claim."""
    return (json.dumps(asdict(claim)) + '\n').encode()
