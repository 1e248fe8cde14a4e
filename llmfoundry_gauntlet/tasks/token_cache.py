"""Packed items on disk, so that a machine tokenises a task only once, for all ranks and later jobs.

There is one file per task, named by a digest of everything that its content depends on. It is written under another
name and renamed, so readers find it complete or not at all; the system releases the lock of a writer that dies. An
error here costs time and changes no result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from llmfoundry_gauntlet.data.atomic import UNFINISHED, write_atomically
from llmfoundry_gauntlet.tasks.packed import PackedItems, from_bytes, to_bytes

log = logging.getLogger(__name__)

TOKENS = 'tokens'  # subfolder of the cache directory
SUFFIX, LOCK = '.tokens', '.lock'
LIMIT_BYTES = 8 * 2**30
LEFTOVER_SECONDS = 24 * 3600  # older locks and unfinished files are deleted


class TokenCache:
    """The packed items in a folder; does nothing without a folder, or if it cannot be used."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.is_writable = folder is not None

    def load(self, name: str) -> PackedItems | None:
        """Return what any process stored under this name; None if there is nothing or it is damaged.

        The file is mapped into memory: processes that load it share its pages.
        """
        if self.folder is None:
            return None
        path = self.folder / f'{name}{SUFFIX}'
        try:
            content = np.memmap(path, dtype=np.uint8, mode='c')
            packed = from_bytes(content.view(np.ndarray))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._give_up(error)
            return None
        except ValueError:  # it is empty
            packed = None
        if packed is None:
            log.warning('%s: is damaged and is recomputed', path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # for `trim`
        return packed

    def store(self, name: str, packed: PackedItems) -> None:
        """Write a file atomically; after an error this process stores nothing more."""
        if self.folder is None or not self.is_writable:
            return
        try:
            write_atomically(self.folder / f'{name}{SUFFIX}', to_bytes(packed))
        except OSError as error:
            self._give_up(error)

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Yield True if this process should compute the entry of this name, False while another one does.

        Without file locks every process computes its own.
        """
        with contextlib.ExitStack() as stack:
            if self.folder is not None and self.is_writable:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(self.folder / f'{name}{LOCK}', timeout=0))
                except Timeout:
                    yield False
                    return
                except (OSError, NotImplementedError) as error:
                    log.debug('%s: no lock: %s', self.folder, error)
            yield True

    def _give_up(self, error: Exception) -> None:
        if self.is_writable:
            log.warning('%s: cannot be used, so token ids are not cached: %s', self.folder, error)
        self.is_writable = False

    def trim(self, limit_bytes: int = LIMIT_BYTES) -> None:
        """Delete the least recently used files beyond the limit, and what dead processes left."""
        if not self.is_writable:
            return
        with contextlib.suppress(OSError):
            entries = [(entry.stat().st_mtime, entry.stat().st_size, entry) for entry in os.scandir(self.folder)]
            old = time.time() - LEFTOVER_SECONDS
            left_over = [entry for used, _, entry in entries if used < old and entry.name.endswith((LOCK, UNFINISHED))]
            files = sorted((used, size, entry.path) for used, size, entry in entries if entry.name.endswith(SUFFIX))
            total = sum(size for _, size, _ in files)
            excess = []
            for _, size, path in files:
                if total <= limit_bytes:
                    break
                total -= size
                excess.append(path)
            for unwanted in (*(entry.path for entry in left_over), *excess):
                with contextlib.suppress(OSError):
                    os.unlink(unwanted)


NO_CACHE = TokenCache(None)
