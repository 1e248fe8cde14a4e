"""Packed items on disk, so that a machine tokenises a task only once, for all ranks and later jobs.

There is one file per task, named by a digest of everything that its content depends on. It is written under another
name and renamed, so readers find it complete or not at all; the system releases the lock of a writer that dies. An
error here costs time and changes no result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from llmfoundry_gauntlet.data.atomic import UNFINISHED, write_atomically
from llmfoundry_gauntlet.tasks.encode import EncodedItem
from llmfoundry_gauntlet.types import Bools, Ids, Ints

FORMAT_VERSION = 4
MAGIC = b'gauntlet'
START = len(MAGIC) + 4  # bytes of the magic word and the checksum of what follows
ALIGNMENT = 64  # bytes
log = logging.getLogger(__name__)

TOKENS = 'tokens'  # subfolder of the cache directory
SUFFIX, LOCK = '.tokens', '.lock'
LIMIT_BYTES = 8 * 2**30
LEFTOVER_SECONDS = 24 * 3600  # older locks and unfinished files are deleted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedItems:
    """Encoded items in flat arrays.

    N = items, C = choices of all items, P = pieces: an item's different contexts, then its continuations.
    """

    tokens: Ids  # [tokens], piece after piece
    piece_ends: Ints  # [P], where a piece ends in `tokens`
    num_contexts: npt.NDArray[np.int32]  # [N], different ones of an item
    num_choices: npt.NDArray[np.int32]  # [N]
    context_of: npt.NDArray[np.int32]  # [C], which of its item's contexts a choice follows
    truncated: Bools  # [N]
    unscorable: npt.NDArray[np.int32]  # [N], which of `reasons`, or -1
    prompt_sha256: npt.NDArray[np.uint8]  # [N, 32]
    max_new_tokens: npt.NDArray[np.int32]  # [N], 0 unless the model generates
    reasons: tuple[str, ...]


ARRAYS = tuple(field.name for field in fields(PackedItems) if field.name != 'reasons')


def pack(items: Sequence[EncodedItem]) -> PackedItems:
    """Return the items as arrays, in their order."""
    pieces: list[Ids] = []
    num_contexts: list[int] = []
    num_choices: list[int] = []
    context_of: list[int] = []
    reasons: dict[str | None, int] = {None: -1}
    for item in items:
        contexts: dict[int, int] = {}  # equal contexts are the same array
        for context in item.contexts:
            if id(context) not in contexts:
                contexts[id(context)] = len(contexts)
                pieces.append(context)
        context_of.extend(contexts[id(context)] for context, _ in zip(item.contexts, item.continuations, strict=False))
        num_contexts.append(len(contexts))
        num_choices.append(len(item.continuations))
        pieces.extend(item.continuations)
        if item.unscorable not in reasons:
            reasons[item.unscorable] = len(reasons) - 1
    hashes = bytes.fromhex(''.join(item.prompt_sha256 for item in items))
    return PackedItems(
        tokens=np.concatenate(pieces) if pieces else np.zeros(0, np.int32),
        piece_ends=np.cumsum([len(piece) for piece in pieces], dtype=np.int64),
        num_contexts=np.array(num_contexts, np.int32),
        num_choices=np.array(num_choices, np.int32),
        context_of=np.array(context_of, np.int32),
        truncated=np.array([item.truncated for item in items], np.bool_),
        unscorable=np.array([reasons[item.unscorable] for item in items], np.int32),
        prompt_sha256=np.frombuffer(hashes, np.uint8).reshape(len(items), 32),
        max_new_tokens=np.array([item.max_new_tokens for item in items], np.int32),
        reasons=tuple(reason for reason in reasons if reason is not None),
    )


def unpack(packed: PackedItems) -> Iterator[EncodedItem]:
    """Yield the items; their token ids are views of the packed ones."""
    ends = packed.piece_ends.tolist()
    pieces = iter([packed.tokens[start:end] for start, end in pairwise([0, *ends])])
    places = pairwise(accumulate(packed.num_choices.tolist(), initial=0))
    context_of = packed.context_of.tolist()
    hashes = packed.prompt_sha256.tobytes().hex()
    reasons = (*packed.reasons, None)  # -1 is the last
    columns = (packed.num_contexts, packed.truncated, packed.unscorable, packed.max_new_tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for index, ((start, end), (num_contexts, truncated, reason, max_new_tokens)) in enumerate(
        zip(places, rows, strict=True)
    ):
        contexts = [next(pieces) for _ in range(num_contexts)]
        yield EncodedItem(
            contexts=tuple([contexts[place] for place in context_of[start:end]]) or tuple(contexts),
            continuations=tuple([next(pieces) for _ in range(end - start)]),
            prompt_sha256=hashes[64 * index : 64 * index + 64],
            truncated=truncated,
            unscorable=reasons[reason],
            max_new_tokens=max_new_tokens,
        )


def to_bytes(packed: PackedItems) -> list[memoryview]:
    """Return the parts of a file: a magic word, a checksum, the length of the header, the header, the arrays."""
    arrays = {name: np.ascontiguousarray(getattr(packed, name)) for name in ARRAYS}
    layout = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    header = json.dumps({'arrays': layout, 'reasons': packed.reasons}).encode()
    parts: list[bytes | memoryview] = [len(header).to_bytes(4, 'little'), header]
    size = START + sum(map(len, parts))
    for array in arrays.values():
        padding = -size % ALIGNMENT
        parts += [bytes(padding), array.data.cast('B') if array.size else b'']
        size += padding + array.nbytes
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return [memoryview(part) for part in (MAGIC, checksum.to_bytes(4, 'little'), *parts)]


def from_bytes(content: npt.NDArray[np.uint8]) -> PackedItems | None:
    """Return the arrays in a file's content (uint8), as views of it; None if it is damaged or something else."""
    start = content[:START].tobytes()
    if len(content) < START + 4 or not start.startswith(MAGIC):
        return None
    if zlib.crc32(content[START:].data) != int.from_bytes(start[len(MAGIC) :], 'little'):
        return None
    place = START + 4
    end = place + int.from_bytes(content[START:place].tobytes(), 'little')
    header = json.loads(content[place:end].tobytes())
    arrays = {}
    for name, (dtype, shape) in header['arrays'].items():
        place = end + -end % ALIGNMENT
        end = place + int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = content[place:end].view(dtype).reshape(shape)
    return PackedItems(**arrays, reasons=tuple(header['reasons']))


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
