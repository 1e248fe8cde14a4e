"""Lay out the tokens of a batch as a stream of trees or as padded rows. Imports no torch.

A tree holds each distinct prefix of its sequences once, in depth-first order, the deepest branch first. A token's
ancestors, the tokens before it in its sequences, are the earlier tokens of the stream whose subtree has not ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from llmfoundry_gauntlet.types import Bools, Floats, Ids, Ints, ItemKey, ScoreOutput, ScoreRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tree:
    """Requests that run as one tree; `num_tokens` is its number of distinct prefixes beyond a cached prefix."""

    requests: tuple[ScoreRequest, ...]
    num_tokens: int

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
    """Return token ids as bytes, four per token, in an encoding that sorts token by token."""
    return ids.astype('>i4').tobytes()


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
    places = []
    for request in requests:
        sequences = whole_rows(request) if padded_to else input_rows(request)
        for row, context, continuation in zip(sequences, request.contexts, request.continuations, strict=True):
            index = index_of.setdefault(row.tobytes(), len(rows))
            if index == len(rows):
                rows.append(row)
            places.append((index, len(context) - 1, len(continuation)))
    lengths = np.array([len(row) for row in rows])
    width = max(lengths.max(), padded_to)
    fillers = [row[-1] if padding is None else padding for row in rows]
    tokens = np.repeat(np.array(fillers, np.int32)[:, None], width, axis=1)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    reads = np.concatenate([np.arange(start, start + count) + index * width for index, start, count in places])
    return PaddedRows(tokens=tokens, lengths=lengths, reads=reads, targets=targets_of(requests))


def lay_out_stream(trees: Sequence[Tree], num_cached: int = 0) -> Stream:
    """Return the trees as a stream, without the first `num_cached` tokens of every sequence, a cached prefix."""
    builder = _StreamBuilder(num_cached)
    for tree in trees:
        builder.add(tree.requests)
    return builder.stream()


def count_prefixes(requests: Iterable[ScoreRequest]) -> int:
    """Return the number of distinct prefixes of all sequences: the fewest tokens needed to run the requests."""
    return num_distinct_prefixes(sorted({sortable(row) for request in requests for row in input_rows(request)}))


def num_distinct_prefixes(rows: Sequence[bytes]) -> int:
    """Return the number of nodes in the trie of sorted rows with four bytes per token."""
    return sum(len(row) // 4 for row in rows) - sum(_shared_lengths(rows))


def num_shared(first: bytes, second: bytes) -> int:
    """Return the length in tokens of the common prefix of two rows with four bytes per token."""
    length = min(len(first), len(second))
    if first[:32] != second[:32]:  # most neighbours: cheaper than a whole comparison
        length = min(length, 32)
    if first[:length] == second[:length]:
        return length // 4
    differ = np.frombuffer(first, np.int32, length // 4) != np.frombuffer(second, np.int32, length // 4)
    return int(differ.argmax())


def _shared_lengths(rows: Sequence[bytes]) -> list[int]:
    """Return the number of tokens that each row shares with the previous one, 0 for the first."""
    return [0, *(num_shared(before, row) for before, row in pairwise(rows))][: len(rows)]


class _StreamBuilder:
    """Append trees to growing arrays."""

    def __init__(self, num_cached: int) -> None:
        self.num_cached = num_cached
        self.length = 0
        self.tokens: list[Ids] = []
        self.segments: list[list[int]] = []  # [length, first depth, end of subtree]
        self.tree_starts: list[int] = []
        self.reads: list[Ints] = []
        self.targets: list[Ids] = []

    def add(self, requests: Sequence[ScoreRequest]) -> None:
        """Append the tree of these requests; sequences with different first tokens become separate trees."""
        places = []  # (sequence as bytes, first position read, number of reads)
        for request in requests:
            for context, continuation in zip(request.contexts, request.continuations, strict=True):
                ids = input_row(context, continuation)[self.num_cached :]
                places.append((sortable(ids), len(context) - 1 - self.num_cached, len(continuation)))
        rows = sorted({row for row, _, _ in places})
        paths = self._emit(rows)
        for row, start, count in places:
            self.reads.append(_positions(paths[row], start, start + count))
        self.targets.append(targets_of(requests))

    def _emit(self, rows: list[bytes]) -> dict[bytes, list[tuple[int, int, int]]]:
        """Append sorted distinct rows; return the path of each as (first depth, place in the stream, length)."""
        paths: dict[bytes, list[tuple[int, int, int]]] = {}
        shared = _shared_lengths(rows)
        # Each entry: rows low..high agree in `depth` tokens, already appended as `path`; or a segment to close.
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
            self.segments.append([agree - depth, depth + self.num_cached, 0])
            self.length += agree - depth
            if len(rows[low]) // 4 == agree:  # this row ends here; the others continue
                paths[rows[low]] = path
                low += 1
            if low < high:
                runs = self._runs(shared, low, high, agree, rows)
                todo.extend((first, last, agree, path) for first, last in reversed(runs))
        return paths

    @staticmethod
    def _runs(shared: list[int], low: int, high: int, depth: int, rows: list[bytes]) -> list[tuple[int, int]]:
        """Return rows low..high by their token after `depth`, the run with the longest row first."""
        bounds = [low, *(index for index in range(low + 1, high) if shared[index] <= depth), high]
        return sorted(pairwise(bounds), key=lambda run: -max(map(len, rows[run[0] : run[1]])))

    def stream(self) -> Stream:
        """Return the stream of all appended trees."""
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


def _positions(path: Sequence[tuple[int, int, int]], start: int, stop: int) -> Ints:
    """Return the positions in the stream of a path's tokens at depths start..stop."""
    found = []
    for depth, place, length in path:
        first, last = max(start, depth), min(stop, depth + length)
        if first < last:
            found.append(np.arange(place + first - depth, place + last - depth))
    return found[0] if len(found) == 1 else np.concatenate(found)
