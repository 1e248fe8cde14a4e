"""Lay out the tokens of a batch: trees in a stream or in rows, or padded rows. Imports no torch.

A tree holds each distinct prefix of its sequences once, depth first, the deepest branch first. A token's ancestors,
the tokens before it in its sequences, are those before it in the stream whose subtree has not ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from llmfoundry_gauntlet.types import Ids, Ints, ScoreRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tree:
    """Requests that are run as one tree. `num_tokens` counts its distinct prefixes, without a kept prefix."""

    requests: tuple[ScoreRequest, ...]
    num_tokens: int

    @property
    def longest_context(self) -> int:
        """Tokens."""
        return max(len(context) for request in self.requests for context in request.contexts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """Trees one after the other. T = tokens, N = scored tokens in the order of requests and continuations."""

    tokens: Ids  # [T]
    depths: npt.NDArray[np.int32]  # [T]: the token's position in its sequences
    ends: npt.NDArray[np.int32]  # [T]: where the token's subtree ends
    tree_starts: Ints  # [trees + 1]
    reads: Ints  # [N]: the token after which each scored token stands
    targets: Ids  # [N]: the scored tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Sequences side by side. R = rows, L = longest row; reads are positions in [R * L]."""

    tokens: Ids  # [R, L], a short row ends with its own last token again and again
    lengths: Ints  # [R]
    reads: Ints  # [N]
    targets: Ids  # [N]


def input_row(context: Ids, continuation: Ids) -> Ids:
    """Return what the model is given: context and continuation without the last token, which nothing follows."""
    return np.concatenate([context, continuation[:-1]])


def targets_of(requests: Sequence[ScoreRequest]) -> Ids:
    """All scored tokens, in order."""
    return np.concatenate([ids for request in requests for ids in request.continuations])


def lay_out_rows(requests: Sequence[ScoreRequest]) -> Rows:
    """One row for each distinct sequence."""
    rows: list[Ids] = []
    index_of: dict[bytes, int] = {}
    places = []
    for request in requests:
        for context, continuation in zip(request.contexts, request.continuations, strict=True):
            row = input_row(context, continuation)
            index = index_of.setdefault(row.tobytes(), len(rows))
            if index == len(rows):
                rows.append(row)
            places.append((index, len(context) - 1, len(continuation)))
    lengths = np.array([len(row) for row in rows])
    width = lengths.max()
    tokens = np.stack([np.pad(row, (0, width - len(row)), mode='edge') for row in rows])
    reads = np.concatenate([np.arange(start, start + count) + index * width for index, start, count in places])
    return Rows(tokens=tokens, lengths=lengths, reads=reads, targets=targets_of(requests))


def lay_out_stream(trees: Sequence[Tree], num_kept: int = 0) -> Stream:
    """The trees as a stream. The first `num_kept` tokens of every sequence, a kept prefix, are left out."""
    builder = _StreamBuilder(num_kept)
    for tree in trees:
        builder.add(tree.requests)
    return builder.stream()


def lay_out_tokens(ids: Ids) -> Stream:
    """A single sequence as a stream, nothing read from it but its last position."""
    count = len(ids)
    return Stream(
        tokens=ids,
        depths=np.arange(count, dtype=np.int32),
        ends=np.full(count, count, dtype=np.int32),
        tree_starts=np.array([0, count]),
        reads=np.array([count - 1]),
        targets=ids[-1:],
    )


def count_prefixes(requests: Sequence[ScoreRequest]) -> int:
    """Distinct prefixes of all sequences: the fewest tokens that the requests can be run with."""
    rows = sorted(
        {
            input_row(context, continuation).astype('>i4').tobytes()
            for request in requests
            for context, continuation in zip(request.contexts, request.continuations, strict=True)
        }
    )
    return num_distinct_prefixes(rows)


def num_distinct_prefixes(rows: Sequence[bytes]) -> int:
    """Nodes of the trie of sorted rows of four bytes a token."""
    return sum(len(row) // 4 for row in rows) - sum(_shared(rows))


def num_shared(first: bytes, second: bytes) -> int:
    """Tokens that two rows of four bytes a token begin with alike."""
    length = min(len(first), len(second))
    if first[:32] != second[:32]:  # most neighbours: cheaper than a whole comparison
        length = min(length, 32)
    if first[:length] == second[:length]:
        return length // 4
    differ = np.frombuffer(first, np.int32, length // 4) != np.frombuffer(second, np.int32, length // 4)
    return int(differ.argmax())


def _shared(rows: Sequence[bytes]) -> list[int]:
    """Tokens that each row begins with like the row before, 0 for the first."""
    return [0, *(num_shared(before, row) for before, row in pairwise(rows))][: len(rows)]


class _StreamBuilder:
    """Appends trees to growing arrays."""

    def __init__(self, num_kept: int) -> None:
        self.num_kept = num_kept
        self.length = 0
        self.tokens: list[Ids] = []
        self.segments: list[list[int]] = []  # [length, first depth, end of subtree]
        self.tree_starts: list[int] = []
        self.reads: list[Ints] = []
        self.targets: list[Ids] = []

    def add(self, requests: Sequence[ScoreRequest]) -> None:
        """Appends the tree of these requests; sequences that begin differently become trees of their own."""
        places = []  # (spelled sequence, first position read, number of reads)
        for request in requests:
            for context, continuation in zip(request.contexts, request.continuations, strict=True):
                ids = input_row(context, continuation)[self.num_kept :]
                places.append((ids.astype('>i4').tobytes(), len(context) - 1 - self.num_kept, len(continuation)))
        rows = sorted({row for row, _, _ in places})
        paths = self._emit(rows)
        for row, start, count in places:
            self.reads.append(positions(paths[row], start, start + count))
        self.targets.append(targets_of(requests))

    def _emit(self, rows: list[bytes]) -> dict[bytes, list[tuple[int, int, int]]]:
        """Appends sorted distinct rows; returns the path of each as (first depth, place in the stream, length)."""
        paths: dict[bytes, list[tuple[int, int, int]]] = {}
        shared = _shared(rows)
        # Each entry: rows low..high agree in `depth` tokens, which are there already as `path`; or a segment to close.
        todo: list[tuple[int, int, int, list[tuple[int, int, int]]] | int] = [
            (low, high, 0, []) for low, high in reversed(self._runs(shared, 0, len(rows), 0, rows))
        ]
        while todo:
            entry = todo.pop()
            if isinstance(entry, int):
                self.segments[entry][2] = self.length
                continue
            low, high, depth, path = entry
            agree = min(shared[low + 1 : high], default=len(rows[low]) // 4)
            if depth == 0:
                self.tree_starts.append(self.length)
            path = [*path, (depth, self.length, agree - depth)]
            self.tokens.append(np.frombuffer(rows[low], '>i4')[depth:agree])
            todo.append(len(self.segments))
            self.segments.append([agree - depth, depth + self.num_kept, 0])
            self.length += agree - depth
            if len(rows[low]) // 4 == agree:  # this row ends here; any other goes on
                paths[rows[low]] = path
                low += 1
            if low < high:
                runs = self._runs(shared, low, high, agree, rows)
                todo.extend((first, last, agree, path) for first, last in reversed(runs))
        return paths

    @staticmethod
    def _runs(shared: list[int], low: int, high: int, depth: int, rows: list[bytes]) -> list[tuple[int, int]]:
        """Rows low..high by their token after `depth`, those with the longest row first."""
        cuts = [low, *(index for index in range(low + 1, high) if shared[index] <= depth), high]
        runs = list(pairwise(cuts))
        return sorted(runs, key=lambda run: -max(map(len, rows[run[0] : run[1]])))

    def stream(self) -> Stream:
        """Return what was appended."""
        lengths, firsts, ends = np.array(self.segments, dtype=np.int64).T
        starts = np.cumsum(lengths) - lengths
        within = np.arange(self.length) - np.repeat(starts, lengths)
        return Stream(
            tokens=np.concatenate(self.tokens).astype(np.int32),
            depths=(np.repeat(firsts, lengths) + within).astype(np.int32),
            ends=np.repeat(ends, lengths).astype(np.int32),
            tree_starts=np.array([*self.tree_starts, self.length]),
            reads=np.concatenate(self.reads),
            targets=np.concatenate(self.targets),
        )


def positions(path: Sequence[tuple[int, int, int]], start: int, stop: int) -> Ints:
    """Return where the tokens of depths start..stop of a path stand in the stream."""
    found = []
    for depth, place, length in path:
        first, last = max(start, depth), min(stop, depth + length)
        if first < last:
            found.append(np.arange(place + first - depth, place + last - depth))
    return found[0] if len(found) == 1 else np.concatenate(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeRows:
    """Trees of a stream in rows. R = rows, L = longest row; `places` maps the stream's tokens to [R * L]."""

    places: Ints  # [T]
    num_rows: int
    width: int


def lay_out_tree_rows(stream: Stream) -> TreeRows:
    """The stream's trees in rows as long as the largest, each tree in the first row with room for it."""
    sizes = np.diff(stream.tree_starts)
    width = int(sizes.max())
    room: list[int] = []
    places = np.empty(len(stream.tokens), dtype=np.int64)
    for tree in np.argsort(-sizes, kind='stable'):
        size, start = sizes[tree], stream.tree_starts[tree]
        row = next((index for index, left in enumerate(room) if left >= size), len(room))
        if row == len(room):
            room.append(width)
        first = row * width + width - room[row]
        places[start : start + size] = np.arange(first, first + size)
        room[row] -= size
    return TreeRows(places=places, num_rows=len(room), width=width)
