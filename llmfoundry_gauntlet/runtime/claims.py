"""Claims on checkpoints: lock files with an expiry time that keep other watchers away.

A claim also names the process that holds it. A watcher on the same machine takes over at once from a process that has
ended, for instance by SIGKILL; all others wait until the claim expires.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from llmfoundry_gauntlet.data.stores import Store
from llmfoundry_gauntlet.errors import StoreError
from llmfoundry_gauntlet.runtime.checkpoint_folders import Checkpoint
from llmfoundry_gauntlet.runtime.distributed import repeated

log = logging.getLogger(__name__)

RENEWALS = 5  # per expiry time
LONGEST_NAME = 220  # bytes: with `@`, a version, a number and a suffix, a file name has at most 255
SHOWN_OF_LONG_NAME = 150
ENDED = ('Z', 'X')  # states of a process in /proc that has ended and that its parent has not noticed yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The identity of a process among those of all machines, whatever names they have.

    Containers on one machine may have the same host name and process ids, but each has a namespace of process ids;
    machines with the same host name have different boot ids. `started` is in clock ticks since the machine started,
    which unlike the time of day is never adjusted.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    @property
    def has_ended(self) -> bool:
        """Return whether the process has certainly ended; False for one that cannot be seen from here."""
        own = this_process()
        if own is None or (self.host, self.boot, self.namespace) != (own.host, own.boot, own.namespace):
            return False
        try:
            os.kill(self.pid, 0)  # signal 0 only asks whether there is a process
        except ProcessLookupError:
            return True
        except OSError:  # there is one, of another user
            pass
        try:
            state, started = state_and_start(self.pid)
        except OSError:  # /proc may hide the processes of other users
            return False
        return state in ENDED or started != self.started


def this_process() -> Process | None:
    """Return what identifies this process; None without Linux's /proc."""
    try:
        return Process(
            host=platform.node(),
            boot=Path('/proc/sys/kernel/random/boot_id').read_text().strip(),
            namespace=os.readlink('/proc/self/ns/pid'),
            pid=os.getpid(),
            started=state_and_start(os.getpid())[1],
        )
    except OSError:
        return None


def state_and_start(pid: int) -> tuple[str, int]:
    """Return the state of a process, a letter, and its start in clock ticks (proc(5)). Raise OSError."""
    content = Path(f'/proc/{pid}/stat').read_text(errors='replace')
    # The second field, a name in parentheses, may be any text, so fields are counted from the third on.
    _, _, rest = content.rpartition(')')
    fields = rest.split()
    state, start = fields[0], fields[19]
    return state, int(start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a watcher on a checkpoint.

    `owner` is host:pid, `expires` a Unix time, 0 once it is released. `process` is None on systems without
    /proc.
    """

    owner: str
    expires: float
    process: Process | None = None

    @property
    def is_abandoned(self) -> bool:
        """Return whether its process ended without releasing it."""
        return self.expires > 0 and self.process is not None and self.process.has_ended

    @property
    def is_valid(self) -> bool:
        """Return whether it keeps other watchers away."""
        return time.time() < self.expires and not self.is_abandoned

    def encoded(self) -> bytes:
        """Return the content of its file."""
        return json.dumps(asdict(self)).encode()


def decoded(content: bytes) -> Claim:
    """Return the claim in a file. Raise ValueError, TypeError or LookupError if there is none."""
    values = json.loads(content)
    process = None
    if values['process'] is not None:
        with suppress(TypeError):  # that of a later version, with other keys, goes by its expiry time
            process = Process(**values['process'])
    return Claim(owner=str(values['owner']), expires=float(values['expires']), process=process)


class Claims:
    """The claims on checkpoints in a folder. All methods raise StoreError.

    Claims on a version of a checkpoint are numbered, and the last one is valid. Only one watcher can create the next.
    """

    def __init__(self, store: Store, *, expires_seconds: float) -> None:
        self.store = store
        self.expires_seconds = expires_seconds
        self.owner = f'{platform.node()}:{os.getpid()}'
        self.names: list[str] = []  # as of the last `refresh`

    def refresh(self) -> None:
        """List the claims."""
        self.names = [file.name for file in self.store.files()]

    def is_overwritten(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint has claims, but only on earlier versions."""
        is_known = any(name.startswith(f'{name_of(checkpoint)}@') for name in self.names)
        return is_known and f'{stem_of(checkpoint)}.0.json' not in self.names

    def last(self, checkpoint: Checkpoint) -> Claim | None:
        """Return the last claim on a checkpoint, None without one; one that cannot be read has expired."""
        num_claims = self._count(checkpoint)
        if num_claims == 0:
            return None
        name = f'{stem_of(checkpoint)}.{num_claims - 1}.json'
        for wait_seconds in (1.0, 0.0):  # it may be partially written
            try:
                return decoded(self.store.read(name))
            except (ValueError, TypeError, LookupError, AttributeError):
                time.sleep(wait_seconds)
        log.warning('%s/%s: is not a claim; it counts as expired', self.store.uri, name)
        return Claim(owner='unknown', expires=0.0)

    @contextmanager
    def held(self, checkpoint: Checkpoint) -> Iterator[bool]:
        """Create a claim, renew it in a thread and release it at the end; yield `False` if another watcher was faster.

        The previous claim must be released, expired or abandoned. A claim that can no longer be renewed expires.
        """
        name = f'{stem_of(checkpoint)}.{self._count(checkpoint)}.json'
        process = this_process()

        def content(seconds: float) -> bytes:
            expires = time.time() + seconds if seconds else 0.0
            return Claim(owner=self.owner, expires=expires, process=process).encoded()

        def write(seconds: float) -> None:
            try:
                self.store.write(name, content(seconds))
            except StoreError as error:
                log.warning('%s; claim not updated', error)

        seconds = self.expires_seconds
        if not self.store.create(name, content(seconds)):
            yield False
            return
        try:
            with repeated(partial(write, seconds), seconds / RENEWALS, 'claim'):
                yield True
        finally:
            write(0.0)

    def _count(self, checkpoint: Checkpoint) -> int:
        return sum(name.startswith(f'{stem_of(checkpoint)}.') for name in self.names)


def stem_of(checkpoint: Checkpoint) -> str:
    """Return the name of a checkpoint's claim files without number and suffix."""
    return f'{name_of(checkpoint)}@{checkpoint.version}'


def name_of(checkpoint: Checkpoint) -> str:
    """Return the name of a checkpoint as a part of a file name: a long one as its beginning and a digest.

    Quoting takes three bytes for each byte of a letter that is not ASCII.
    """
    name = quote(checkpoint.claimed_name, safe='')
    if len(name) <= LONGEST_NAME:
        return name
    return f'{name[:SHOWN_OF_LONG_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}'
