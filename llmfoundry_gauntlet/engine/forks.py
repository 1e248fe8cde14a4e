"""Lay out requests so that what rows share runs once, in the model's own attention and cache, before the rows.

This context of several rows is that of a question with its choices, or what several questions share. The cache that it
leaves, keys and values or the states of a recurrent layer, is copied for each row. Contexts of one forward are padded
on the left, where every layer ignores what the mask hides; a state does not ignore padding that comes after it. Rows
are padded on the right, where nothing follows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from llmfoundry_gauntlet.engine.logits import LogitReader
from llmfoundry_gauntlet.engine.plan import padded_lengths
from llmfoundry_gauntlet.engine.trees import Tree, input_row, targets_of
from llmfoundry_gauntlet.types import Bools, Floats, Ids, Ints, ScoreRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGroup:
    """Rows of similar length that continue contexts. R = rows; reads are flat positions in [R, longest row]."""

    rows: Ids  # [R, longest row], padded on the right with their last token
    lengths: Ints  # [R]
    context_of_row: Ints  # [R]
    reads: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForkedRows:
    """Contexts and the rows that continue them. C = contexts; N = scored tokens in the order of requests.

    Reads of contexts are flat positions in [C, context length]; `order` has the places of the scored tokens that
    contexts read, then of those that each group of rows reads.
    """

    contexts: Ids  # [C, longest context], padded on the left with their first token
    context_lengths: Ints  # [C]
    context_reads: Ints
    groups: tuple[RowGroup, ...]
    order: Ints  # [N]
    targets: Ids  # [N]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedRows:
    """Rows to run after what a cache holds. R = rows, L = longest row, E = earlier columns of the cache."""

    tokens: Ids  # [R, L]
    mask: Bools  # [R, E + L]: which tokens are no padding
    positions: Ints  # [R, L]: the place of each token in its text; of padding that of the nearest token

    def continued(self, rows: Ints, tokens: Ids, lengths: Ints) -> CachedRows:
        """Return rows, padded on the right, that continue these; `rows` are the rows that they continue."""
        columns = np.arange(tokens.shape[1])
        earlier = self.mask[rows]
        return CachedRows(
            tokens=tokens,
            mask=np.concatenate([earlier, columns < lengths[:, None]], axis=1),
            positions=earlier.sum(axis=1)[:, None] + np.minimum(columns, lengths[:, None] - 1),
        )


def rows_after(num_cached: int, tokens: Ids, lengths: Ints, *, pads_left: bool = False) -> CachedRows:
    """Return rows that follow a prefix of `num_cached` tokens, which all share."""
    columns = np.arange(tokens.shape[1])
    first = (tokens.shape[1] - lengths)[:, None] if pads_left else np.zeros((len(tokens), 1), np.int64)
    own = (columns >= first) & (columns < first + lengths[:, None])
    return CachedRows(
        tokens=tokens,
        mask=np.concatenate([np.ones((len(tokens), num_cached), bool), own], axis=1),
        positions=num_cached + np.clip(columns - first, 0, lengths[:, None] - 1),
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


class _DistinctRows:
    """Rows of token ids, each of which is kept once under a key."""

    def __init__(self) -> None:
        self.rows: list[Ids] = []
        self.index_of: dict[object, int] = {}

    def add(self, key: object, row: Ids) -> int:
        """Return the index of a row, which is appended if its key is new."""
        index = self.index_of.setdefault(key, len(self.rows))
        if index == len(self.rows):
            self.rows.append(row)
        return index

    @property
    def lengths(self) -> Ints:
        """Return the length of each row."""
        return np.array([len(row) for row in self.rows], np.int64)


def lay_out_forks(trees: Sequence[Tree], num_cached: int = 0) -> ForkedRows:
    """Return each distinct context once, the first `fork` tokens of a tree, and the distinct rows that continue it.

    The first `num_cached` tokens of every row are a cached prefix and left out.
    """
    contexts, rows = _DistinctRows(), _DistinctRows()
    context_of_row: list[int] = []
    read_contexts: list[int] = []  # the context of each read of its last token
    read_rows: list[tuple[int, int, int]] = []  # of each continuation: its row, the first read, the number of reads
    places_of_contexts: list[int] = []
    places_of_rows: list[Ints] = []
    place = 0
    for tree in trees:
        for request in tree.requests:
            for context, continuation in zip(request.contexts, request.continuations, strict=True):
                row = input_row(context, continuation)[num_cached:]
                shared, rest = row[: tree.fork], row[tree.fork :]
                context_index = contexts.add(shared.tobytes(), shared)

                # The logits of a token are those of the position before it.
                first = len(context) - 1 - num_cached - tree.fork
                end = place + len(continuation)
                if first < 0:
                    read_contexts.append(context_index)
                    places_of_contexts.append(place)
                    first, place = 0, place + 1
                if len(rest):
                    row_index = rows.add((context_index, rest.tobytes()), rest)
                    if row_index == len(context_of_row):
                        context_of_row.append(context_index)
                    read_rows.append((row_index, first, end - place))
                    places_of_rows.append(np.arange(place, end))
                place = end

    padded_contexts = padded_rows(contexts.rows, on_the_left=True)
    width = padded_contexts.shape[1]
    groups, order = [], [np.array(places_of_contexts, np.int64)]
    for indices in groups_of_rows(rows.lengths):
        place_in_group = {index: place for place, index in enumerate(indices)}
        padded = padded_rows([rows.rows[index] for index in indices], on_the_left=False)
        reads = []
        for (index, first, count), places in zip(read_rows, places_of_rows, strict=True):
            if index in place_in_group:
                reads.append(place_in_group[index] * padded.shape[1] + np.arange(first, first + count))
                order.append(places)
        groups.append(
            RowGroup(
                rows=padded,
                lengths=rows.lengths[indices],
                context_of_row=np.array([context_of_row[index] for index in indices]),
                reads=np.concatenate(reads),
            )
        )
    return ForkedRows(
        contexts=padded_contexts,
        context_lengths=contexts.lengths,
        context_reads=np.array(read_contexts, np.int64) * width + width - 1,
        groups=tuple(groups),
        order=np.concatenate(order),
        targets=targets_of([request for tree in trees for request in tree.requests]),
    )


def groups_of_rows(lengths: Ints) -> list[list[int]]:
    """Return the rows that run together, as planned."""
    groups: dict[int, list[int]] = {}
    for index, padded in enumerate(padded_lengths(lengths.tolist())):
        groups.setdefault(padded, []).append(index)
    return list(groups.values())


def padded_rows(rows: Sequence[Ids], *, on_the_left: bool) -> Ids:
    """Return rows, [rows, longest], padded with their first or their last token."""
    width = max(map(len, rows))
    padded = np.empty((len(rows), width), np.int32)
    for values, row in zip(padded, rows, strict=True):
        own = slice(width - len(row), width) if on_the_left else slice(0, len(row))
        values[:] = row[0] if on_the_left else row[-1]
        values[own] = row
    return padded


def copied(model_cache: Any, num_rows: int) -> Any:
    """Return a cache with this many copies of the only row of another one, which stays as it is."""
    return copied_rows(model_cache, torch.zeros(num_rows, dtype=torch.long))


def copied_rows(model_cache: Any, rows: torch.Tensor) -> Any:
    """Return a cache with copies of rows of another one, which stays as it is."""
    new = copy.deepcopy(model_cache)
    new.reorder_cache(rows)
    return new


def bytes_in(states: Any) -> int:
    """Return the size of all tensors in a cache, or in a part of one."""
    if isinstance(states, torch.Tensor):
        return states.nbytes
    if isinstance(states, dict):
        return sum(map(bytes_in, states.values()))
    if isinstance(states, (list, tuple)):
        return sum(map(bytes_in, states))
    is_part = type(states).__module__.startswith('transformers.') and not isinstance(states, PretrainedConfig)
    return bytes_in(vars(states)) if is_part else 0
