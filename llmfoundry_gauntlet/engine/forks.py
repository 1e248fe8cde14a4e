"""Lay out requests whose contexts run once, in the model's own attention and cache, before their choices.

The cache that a context leaves, keys and values or the states of a recurrent layer, is copied for each choice. Contexts
of one forward are padded on the left, where every layer ignores what the mask hides; a state does not ignore padding
that comes before a choice. Choices are padded on the right, where nothing follows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from llmfoundry_gauntlet.engine.logits import LogitReader
from llmfoundry_gauntlet.engine.trees import targets_of
from llmfoundry_gauntlet.types import Bools, Floats, Ids, Ints, ScoreRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForkedRows:
    """Contexts and the rows that continue them. C = contexts, R = rows; N = scored tokens in the order of requests.

    Reads are flat positions in [C, context length] and [R, row length]; `order` has the places of the scored tokens
    that contexts read, then of those that rows read.
    """

    contexts: Ids  # [C, longest context], padded on the left with their first token
    context_lengths: Ints  # [C]
    context_reads: Ints
    rows: Ids  # [R, longest row], padded on the right with their last token; R may be 0
    row_lengths: Ints  # [R]
    row_reads: Ints
    context_of_row: Ints  # [R]
    order: Ints  # [N]
    targets: Ids  # [N]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedRows:
    """Rows to run after what a cache holds. R = rows, L = longest row, E = earlier columns of the cache."""

    tokens: Ids  # [R, L]
    mask: Bools  # [R, E + L]: which tokens are no padding
    positions: Ints  # [R, L]: the place of each token in its text

    def continued(self, rows: Ints, tokens: Ids, lengths: Ints) -> CachedRows:
        """Return rows, padded on the right, that continue these; `rows` are the rows that they continue."""
        columns = np.arange(tokens.shape[1])
        earlier = self.mask[rows]
        return CachedRows(
            tokens=tokens,
            mask=np.concatenate([earlier, columns < lengths[:, None]], axis=1),
            positions=earlier.sum(axis=1)[:, None] + columns,
        )


def rows_after(num_cached: int, tokens: Ids, lengths: Ints, *, pads_left: bool = False) -> CachedRows:
    """Return rows that follow a prefix of `num_cached` tokens, which all share."""
    columns = np.arange(tokens.shape[1])
    first = (tokens.shape[1] - lengths)[:, None] if pads_left else np.zeros((len(tokens), 1), np.int64)
    own = (columns >= first) & (columns < first + lengths[:, None])
    return CachedRows(
        tokens=tokens,
        mask=np.concatenate([np.ones((len(tokens), num_cached), bool), own], axis=1),
        positions=num_cached + np.maximum(columns - first, 0),
    )


class JoinedReader:
    """The values of scored tokens that several forwards read."""

    def __init__(self, readers: Sequence[LogitReader], order: Ints) -> None:
        self.readers = readers
        self.order = order

    def scores(self) -> tuple[Floats, Bools, Ints]:
        """Return the values of all scored tokens, as a LogitReader does."""
        parts = [reader.scores() for reader in self.readers]
        logprobs, is_argmax, num_top = (np.concatenate(values) for values in zip(*parts, strict=True))
        place = np.argsort(self.order)
        return logprobs[place], is_argmax[place], num_top[place]


def without_prefix(requests: Sequence[ScoreRequest], num_cached: int) -> list[ScoreRequest]:
    """Return the requests without the first tokens of their contexts, which are cached."""
    return [
        replace(request, contexts=tuple(context[num_cached:] for context in request.contexts)) for request in requests
    ]


def lay_out_forks(requests: Sequence[ScoreRequest]) -> ForkedRows:
    """Return each distinct context once, and for each a row per distinct continuation of more than one token."""
    contexts: dict[bytes, Ids] = {}
    rows: dict[tuple[int, bytes], Ids] = {}
    index_of_context: dict[bytes, int] = {}
    index_of_row: dict[tuple[int, bytes], int] = {}
    reads_of_contexts: list[int] = []
    spans: list[tuple[int, int]] = []  # of each continuation of several tokens: its row, and the number of reads
    places_of_contexts: list[int] = []
    places_of_rows: list[Ints] = []
    place = 0
    for request in requests:
        for context, continuation in zip(request.contexts, request.continuations, strict=True):
            key = context.tobytes()
            context_index = index_of_context.setdefault(key, len(index_of_context))
            contexts.setdefault(key, context)
            # The logits of a token are those of the position before it: of the first, the end of the context.
            reads_of_contexts.append(context_index)
            places_of_contexts.append(place)
            inputs = continuation[:-1]
            if len(inputs):
                row_key = context_index, inputs.tobytes()
                row_index = index_of_row.setdefault(row_key, len(index_of_row))
                rows.setdefault(row_key, inputs)
                spans.append((row_index, len(inputs)))
                places_of_rows.append(np.arange(place + 1, place + len(continuation)))
            place += len(continuation)

    context_lengths = np.array([len(context) for context in contexts.values()])
    width = int(context_lengths.max())
    padded_contexts = np.empty((len(contexts), width), np.int32)
    for padded, context in zip(padded_contexts, contexts.values(), strict=True):
        padded[: width - len(context)] = context[0]
        padded[width - len(context) :] = context

    row_lengths = np.array([len(row) for row in rows.values()], np.int64)
    row_width = int(row_lengths.max(initial=0))
    padded_rows = np.empty((len(rows), row_width), np.int32)
    for padded, row in zip(padded_rows, rows.values(), strict=True):
        padded[: len(row)] = row
        padded[len(row) :] = row[-1]
    row_reads = [index * row_width + np.arange(count) for index, count in spans]
    return ForkedRows(
        contexts=padded_contexts,
        context_lengths=context_lengths,
        context_reads=np.array(reads_of_contexts) * width + width - 1,
        rows=padded_rows,
        row_lengths=row_lengths,
        row_reads=np.concatenate(row_reads) if row_reads else np.array([], np.int64),
        context_of_row=np.array([context_index for context_index, _ in rows], np.int64),
        order=np.concatenate([np.array(places_of_contexts), *places_of_rows]),
        targets=targets_of(requests),
    )


def copied(model_cache: Any, num_rows: int) -> Any:
    """Return a cache with this many copies of the only row of another one, which stays as it is."""
    new = copy.deepcopy(model_cache)
    new.reorder_cache(torch.zeros(num_rows, dtype=torch.long))
    return new
