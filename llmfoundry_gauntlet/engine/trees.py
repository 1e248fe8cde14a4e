"""Lay out the tokens of a batch as a stream of trees or as padded rows. Imports no torch.

A tree holds each distinct prefix of its sequences once, in depth-first order, the deepest branch first. A token's
ancestors, the tokens before it in its sequences, are the earlier tokens of the stream whose subtree has not ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmfoundry_gauntlet.types import Bools, Floats, Ids, Ints, ItemKey, ScoreOutput, ScoreRequest

BIG_ENDIAN = '>i4'  # token ids whose bytes sort as the ids do
ID_BYTES = 4
PEEKED_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tree:
    """Requests that run as one tree; `num_tokens` is its number of distinct prefixes beyond a cached prefix.

    In the layout FORKED the first `fork` tokens, which all its rows share beyond a cached prefix, run once before the
    rows; 0 if whole rows run. `num_tokens` then includes padding.
    """

    requests: tuple[ScoreRequest, ...]
    num_tokens: int
    fork: int = 0

    @property
    def longest_context(self) -> int:
        """Return the length of the longest context."""
        return max(len(context) for request in self.requests for context in request.contexts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """Consecutive trees. T = tokens, N = scored tokens in the order of requests and continuations."""

    tokens: Ids  # [T]
    depths: npt.NDArray[np.int32]  # [T]: the token's position in its sequences
    ends: npt.NDArray[np.int32]  # [T]: where the token's subtree ends
    tree_starts: Ints  # [trees + 1]
    reads: Ints  # [N]: the token before each scored token
    targets: Ids  # [N]: the scored tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedRows:
    """Padded sequences. R = rows, L = longest row; reads are flat positions in [R * L]."""

    tokens: Ids  # [R, L], short rows padded with their own last token, or with a given one
    lengths: Ints  # [R]
    reads: Ints  # [N]
    targets: Ids  # [N]


def split_outputs(
    requests: Sequence[ScoreRequest], logprobs: Floats, is_argmax: Bools, num_top: Ints
) -> list[ScoreOutput]:
    """Return an output per request from the values of all scored tokens in order, shape [N] each."""
    outputs = []
    start = 0
    for request in requests:
        spans = []
        for continuation in request.continuations:
            spans.append(slice(start, start + len(continuation)))
            start += len(continuation)
        outputs.append(
            ScoreOutput(
                key=request.key,
                logprobs=tuple(logprobs[span] for span in spans),
                is_argmax=tuple(is_argmax[span] for span in spans),
                num_top=tuple(num_top[span] for span in spans),
            )
        )
    return outputs


def sortable(ids: Ids) -> bytes:
    """Return token ids as bytes, ID_BYTES per token, in an encoding that sorts token by token."""
    return ids.astype(BIG_ENDIAN).tobytes()


def input_row(context: Ids, continuation: Ids) -> Ids:
    """Return the model's input: context and continuation without its last token, after which nothing is read."""
    return np.concatenate([context, continuation[:-1]])


def input_rows(request: ScoreRequest) -> list[Ids]:
    """Return the model's input for each continuation."""
    return [input_row(*parts) for parts in zip(request.contexts, request.continuations, strict=True)]


def whole_rows(request: ScoreRequest) -> list[Ids]:
    """Return context and continuation with its last token, for each continuation."""
    return [np.concatenate(parts) for parts in zip(request.contexts, request.continuations, strict=True)]


def context_request(context: Ids, row: int = 0) -> ScoreRequest:
    """Return a request that runs a context and reads only its last position; the scored token is arbitrary."""
    return ScoreRequest(key=ItemKey('context', row), contexts=(context,), continuations=(context[-1:],))


def targets_of(requests: Sequence[ScoreRequest]) -> Ids:
    """Return all scored tokens, in order."""
    return np.concatenate([ids for request in requests for ids in request.continuations])


def lay_out_rows(requests: Sequence[ScoreRequest], *, padded_to: int = 0, padding: int | None = None) -> PaddedRows:
    """Return one row for each distinct sequence.

    With `padded_to` a row has the continuation's last token too, and is padded to this length with the token `padding`.
    """
    rows: list[Ids] = []
    index_of: dict[bytes, int] = {}
    spans = []  # of each continuation: its row, the first position read, the number of reads
    for request in requests:
        sequences = whole_rows(request) if padded_to else input_rows(request)
        for row, context, continuation in zip(sequences, request.contexts, request.continuations, strict=True):
            index = index_of.setdefault(row.tobytes(), len(rows))
            if index == len(rows):
                rows.append(row)
            # The logits of a token are those of the position before it.
            spans.append((index, len(context) - 1, len(continuation)))

    lengths = np.array([len(row) for row in rows])
    width = max(lengths.max(), padded_to)
    tokens = np.empty((len(rows), width), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
        padded[len(row) :] = row[-1] if padding is None else padding

    reads = [index * width + np.arange(first, first + count) for index, first, count in spans]
    return PaddedRows(tokens=tokens, lengths=lengths, reads=np.concatenate(reads), targets=targets_of(requests))


def lay_out_stream(trees: Sequence[Tree], num_cached: int = 0) -> Stream:
    """Return the trees as a stream, without the first `num_cached` tokens of every sequence, a cached prefix."""
    builder = _StreamBuilder(num_cached)
    for tree in trees:
        builder.add(tree.requests)
    return builder.stream()


def count_prefixes(requests: Iterable[ScoreRequest]) -> int:
    """Return the number of distinct prefixes of all sequences: the fewest tokens needed to run the requests."""
    rows = {sortable(row) for request in requests for row in input_rows(request)}
    return num_distinct_prefixes(sorted(rows))


def num_distinct_prefixes(rows: Sequence[bytes]) -> int:
    """Return the number of nodes in the trie of sorted rows, as `sortable` encodes them."""
    num_tokens = sum(len(row) for row in rows) // ID_BYTES
    return num_tokens - sum(_shared_lengths(rows))


def num_shared(first: bytes, second: bytes) -> int:
    """Return the length in tokens of the common prefix of two rows, as `sortable` encodes them."""
    length = min(len(first), len(second))
    # Most neighbours differ early: a look at the first tokens is cheaper than a comparison of the whole rows.
    if first[:PEEKED_BYTES] != second[:PEEKED_BYTES]:
        length = min(length, PEEKED_BYTES)
    if first[:length] == second[:length]:
        return length // ID_BYTES
    num_tokens = length // ID_BYTES
    differ = np.frombuffer(first, np.int32, num_tokens) != np.frombuffer(second, np.int32, num_tokens)
    return int(differ.argmax())


def _shared_lengths(rows: Sequence[bytes]) -> list[int]:
    """Return the number of tokens that each row shares with the previous one, 0 for the first."""
    if not rows:
        return []
    return [0, *(num_shared(before, row) for before, row in pairwise(rows))]


class _Piece(NamedTuple):
    """A part of a sequence that is contiguous in the stream: `length` tokens at `start`, `depth` tokens deep."""

    depth: int
    start: int
    length: int


class _Branch(NamedTuple):
    """Rows `low` to `high`, which agree in their first `depth` tokens; these were appended as `path`."""

    low: int
    high: int
    depth: int
    path: tuple[_Piece, ...]


@dataclass(slots=True, eq=False)
class _Segment:
    """Tokens of the stream without a branch between them. `end` is where the subtree ends, once it was appended."""

    length: int
    first_depth: int
    end: int = 0


class _StreamBuilder:
    """Append trees to growing arrays."""

    def __init__(self, num_cached: int) -> None:
        self.num_cached = num_cached
        self.length = 0
        self.tokens: list[Ids] = []
        self.segments: list[_Segment] = []
        self.tree_starts: list[int] = []
        self.reads: list[Ints] = []
        self.targets: list[Ids] = []

    def add(self, requests: Sequence[ScoreRequest]) -> None:
        """Append the tree of these requests; sequences with different first tokens become separate trees."""
        spans = []  # of each continuation: its row, the first position read, the number of reads
        for request in requests:
            for context, continuation in zip(request.contexts, request.continuations, strict=True):
                row = sortable(input_row(context, continuation)[self.num_cached :])
                # The logits of a token are those of the position before it.
                spans.append((row, len(context) - 1 - self.num_cached, len(continuation)))
        distinct_rows = {row for row, _, _ in spans}
        paths = self._append(sorted(distinct_rows))
        for row, first, count in spans:
            self.reads.append(_positions(paths[row], first, first + count))
        self.targets.append(targets_of(requests))

    def _append(self, rows: list[bytes]) -> dict[bytes, tuple[_Piece, ...]]:
        """Append sorted distinct rows in depth-first order; return the path of each through the stream."""
        paths: dict[bytes, tuple[_Piece, ...]] = {}
        shared = _shared_lengths(rows)
        # A stack, as the depth of a tree may exceed the limit of recursion. A segment lies below the branches that
        # follow it, so that it is popped once its whole subtree has been appended.
        roots = _runs(rows, shared, 0, len(rows), 0)
        todo: list[_Branch | _Segment] = [_Branch(low, high, 0, ()) for low, high in reversed(roots)]
        while todo:
            entry = todo.pop()
            if isinstance(entry, _Segment):
                entry.end = self.length
                continue
            low, high, depth, path = entry
            if depth == 0:
                self.tree_starts.append(self.length)

            # The tokens that all these rows have after `depth`, up to where the first row ends or two differ.
            agree = min(shared[low + 1 : high], default=len(rows[low]) // ID_BYTES)
            path = (*path, _Piece(depth, self.length, agree - depth))
            segment = _Segment(length=agree - depth, first_depth=depth + self.num_cached)
            self.tokens.append(np.frombuffer(rows[low], BIG_ENDIAN)[depth:agree])
            self.segments.append(segment)
            self.length += segment.length
            todo.append(segment)

            # A row that ends here sorts before those that continue, so only the first may.
            if len(rows[low]) // ID_BYTES == agree:
                paths[rows[low]] = path
                low += 1
            if low < high:
                runs = _runs(rows, shared, low, high, agree)
                todo.extend(_Branch(first, last, agree, path) for first, last in reversed(runs))
        return paths

    def stream(self) -> Stream:
        """Return the stream of all appended trees."""
        lengths = np.array([segment.length for segment in self.segments])
        first_depths = np.array([segment.first_depth for segment in self.segments])
        ends = np.array([segment.end for segment in self.segments])
        starts = np.cumsum(lengths) - lengths
        place_in_segment = np.arange(self.length) - np.repeat(starts, lengths)
        return Stream(
            tokens=np.concatenate(self.tokens).astype(np.int32),
            depths=(np.repeat(first_depths, lengths) + place_in_segment).astype(np.int32),
            ends=np.repeat(ends, lengths).astype(np.int32),
            tree_starts=np.array([*self.tree_starts, self.length]),
            reads=np.concatenate(self.reads),
            targets=np.concatenate(self.targets),
        )


def _runs(rows: Sequence[bytes], shared: Sequence[int], low: int, high: int, depth: int) -> list[tuple[int, int]]:
    """Return the runs of rows low..high with the same token after `depth`, the run with the longest row first."""
    begins = [index for index in range(low + 1, high) if shared[index] <= depth]
    runs = list(pairwise([low, *begins, high]))
    # The deepest branch first makes the first path of a tree its longest, which attention runs without a mask.
    runs.sort(key=lambda run: -max(map(len, rows[run[0] : run[1]])))
    return runs


def _positions(path: Sequence[_Piece], start: int, stop: int) -> Ints:
    """Return the positions in the stream of a path's tokens at depths start..stop."""
    positions = []
    for piece in path:
        first = max(start, piece.depth)
        last = min(stop, piece.depth + piece.length)
        if first < last:
            offset = piece.start - piece.depth
            positions.append(np.arange(first + offset, last + offset))
    return positions[0] if len(positions) == 1 else np.concatenate(positions)
