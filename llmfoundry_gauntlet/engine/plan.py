"""What is computed with what: requests into batches, batches onto ranks. Pure, and free of torch.

The batches are a function of the whole set of requests and `tokens_per_batch` alone. Equal sequences of one batch
run once: a continuation's last token is never an input, so single-token choices cost nothing beyond their context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmfoundry_gauntlet.values import ScoreRequest

# A batch is closed early, once it holds this share of its tokens, where rows become shorter than this share of its
# longest: padding costs more than a further forward.
LEAST_SHARE = 1 / 16
SHORTEST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Read:
    """Where a continuation is scored: the logits at `start`, `start` + 1, ... of a row predict its tokens."""

    row: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Requests that are run together. `reads[i][j]` belongs to continuation j of request i."""

    requests: tuple[ScoreRequest, ...]
    rows: tuple[np.ndarray, ...]
    reads: tuple[tuple[Read, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(len(row) for row in self.rows)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens once every row is as long as the longest."""
        return len(self.rows) * max(len(row) for row in self.rows)


def plan(requests: Sequence[ScoreRequest], *, tokens_per_batch: int) -> list[Batch]:
    """Batches of rows of like length and at most `tokens_per_batch` padded tokens, longest first.

    All choices of a request are in one batch, so one item alone may be larger. Requests that cannot be scored are left
    out.
    """
    if tokens_per_batch < 1:
        raise ValueError(f'tokens_per_batch is {tokens_per_batch}; allowed: 1 or more')
    costs = [
        (request, longest_row(request), num_distinct_rows(request))
        for request in requests
        if request.unscorable is None
    ]
    costs.sort(key=lambda cost: (-cost[1], cost[0].key.task, cost[0].key))
    batches: list[Batch] = []
    group: list[ScoreRequest] = []
    width = num_rows = 0
    for request, length, rows in costs:
        full = (num_rows + rows) * width > tokens_per_batch
        wasteful = length < SHORTEST_SHARE * width and num_rows * width > LEAST_SHARE * tokens_per_batch
        if group and (full or wasteful):
            batches.append(make_batch(group))
            group, num_rows = [], 0
        if not group:
            width = length
        group.append(request)
        num_rows += rows
    if group:
        batches.append(make_batch(group))
    return batches


def make_batch(requests: Sequence[ScoreRequest]) -> Batch:
    """The batch of these requests, equal rows merged."""
    rows: list[np.ndarray] = []
    index_of: dict[bytes, int] = {}
    reads = []
    for request in requests:
        places = []
        for context, continuation in zip(request.contexts, request.continuations, strict=True):
            row = input_row(context, continuation)
            index = index_of.setdefault(row.tobytes(), len(rows))
            if index == len(rows):
                rows.append(row)
            places.append(Read(row=index, start=len(context) - 1))
        reads.append(tuple(places))
    return Batch(requests=tuple(requests), rows=tuple(rows), reads=tuple(reads))


def input_row(context: np.ndarray, continuation: np.ndarray) -> np.ndarray:
    """What the model is given: context and continuation without the last token, which nothing follows."""
    return np.concatenate([context, continuation[:-1]])


def longest_row(request: ScoreRequest) -> int:
    """Tokens of the request's longest input row."""
    return max(len(a) + len(b) - 1 for a, b in zip(request.contexts, request.continuations, strict=True))


def num_distinct_rows(request: ScoreRequest) -> int:
    """Input rows of the request, equal ones counted once."""
    pairs = zip(request.contexts, request.continuations, strict=True)
    return len({(context.tobytes(), continuation[:-1].tobytes()) for context, continuation in pairs})


def assign(batches: Sequence[Batch], *, num_ranks: int) -> list[list[Batch]]:
    """The batches of each rank, spread by padded tokens, the same number for every rank.

    Ranks that would have fewer repeat the smallest batch, so that all take part in every collective; what it gives
    a second time is the same by key.
    """
    if num_ranks < 1:
        raise ValueError(f'num_ranks is {num_ranks}; allowed: 1 or more')
    ranks: list[list[Batch]] = [[] for _ in range(num_ranks)]
    if not batches:
        return ranks
    loads = [0] * num_ranks
    for batch in sorted(batches, key=lambda batch: -batch.num_padded_tokens):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        ranks[rank].append(batch)
        loads[rank] += batch.num_padded_tokens
    filler = min(batches, key=lambda batch: batch.num_padded_tokens)
    longest = max(map(len, ranks))
    return [rank + [filler] * (longest - len(rank)) for rank in ranks]
