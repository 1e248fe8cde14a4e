"""Keys and values of rows that are written side by side, in buffers that are written in place.

Own code and not a cache class of transformers 4.53: its DynamicCache copies all keys and values at every step and has
all rows end and begin together; its StaticCache attends over the whole buffer whatever is in it. Here a step writes one
column, rows leave and enter between steps, and attention sees the columns that some row uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

SPARE = 8  # a longest row's share of further columns, so that rows are seldom moved
LEAST_SPARE = 16

KeyValues = list[tuple[torch.Tensor, torch.Tensor]]


class RowCache(Cache):
    """Buffers [slots, heads, columns, width] a layer. Rows end in the same column, whatever their length.

    The rows in use are the first `num_rows` slots. `mask` [slots, columns] says which columns a row sees. `column` is
    the next to be written, `first` the first that any row in use has.
    """

    is_compileable = False

    def __init__(self, num_slots: int, *, longest_context: int, longest_row: int, device: torch.device) -> None:
        super().__init__()
        self.longest_context = longest_context
        num_columns = longest_row + max(LEAST_SPARE, longest_row // SPARE)
        self.mask = torch.zeros(num_slots, num_columns, dtype=torch.bool, device=device)
        self.column = longest_context
        self.num_rows = 0
        self.starts: list[int] = []  # of the rows in use, the first column of each
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.moved = 0  # columns that all rows were moved to the left so far
        self._rows = slice(0, 0)  # what a forward writes: slots, and columns
        self._columns = slice(0, 0)
        self._is_prompt = False

    @property
    def first(self) -> int:
        """The first column in use."""
        return min(self.starts, default=self.column)

    # What transformers' models ask of a cache.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, cache_kwargs: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a forward's keys and values, [rows, heads, new columns, width]; returns all that its rows see."""
        keys, values = self._buffers(layer_idx, key_states, value_states)
        keys[self._rows, :, self._columns] = key_states
        values[self._rows, :, self._columns] = value_states
        if self._is_prompt:
            return key_states, value_states
        seen = slice(self.first, self._columns.stop)
        return keys[self._rows, :, seen], values[self._rows, :, seen]

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Columns that were there before the forward."""
        return 0 if self._is_prompt else self._columns.start - self.first

    def get_max_cache_shape(self) -> int | None:
        """No limit: rows are moved where columns end."""
        return None

    def __len__(self) -> int:
        return len(self._layers)

    # What the engine does between forwards.

    def enter(self, lengths: Sequence[int], seen: torch.Tensor) -> None:
        """Takes rows whose prompts the next forward runs: `seen` [rows, width] has them at the end of their columns."""
        width = seen.shape[1]
        self._is_prompt = True
        self._rows = slice(self.num_rows, self.num_rows + len(lengths))
        self._columns = slice(self.column - width, self.column)
        self.mask[self._rows] = False
        self.mask[self._rows, self._columns] = seen
        self.starts += [self.column - length for length in lengths]
        self.num_rows += len(lengths)

    def step(self, num_further: int = 0) -> None:
        """Takes one more column, which the next forward writes; `num_further` rows more see that column alone."""
        if self.column == self.mask.shape[1]:
            self._move_left()
        self._is_prompt = False
        self._rows = slice(0, self.num_rows + num_further)
        self._columns = slice(self.column, self.column + 1)
        self.mask[self.num_rows : self._rows.stop] = False
        self.mask[self._rows, self.column] = True
        self.column += 1

    def seen(self) -> torch.Tensor:
        """The mask of the forward of a step, [rows, columns in use]."""
        return self.mask[self._rows, self.first : self.column]

    def copy_prompt(self, source: int, end: int, length: int, target: int) -> None:
        """Makes `target` a row that has only the prompt which ended before column `end` of `source`.

        `end` counts from before the rows were moved. `target` is `source`, or the first slot that is not in use.
        """
        end -= self.moved
        start = self.column - length
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[target, :, start : self.column] = buffer[source, :, end - length : end].clone()
        mask = self.mask[source, end - length : end].clone()
        self.mask[target] = False
        self.mask[target, start : self.column] = mask
        if target == self.num_rows:
            self.num_rows += 1
            self.starts.append(start)
        else:
            self.starts[target] = start

    def leave(self, slots: Sequence[int]) -> list[int]:
        """Lets rows go. Returns the slots that the rest had, in their new order: the last rows take the free places."""
        kept = [slot for slot in range(self.num_rows) if slot not in set(slots)]
        stay = [slot for slot in kept if slot < len(kept)]
        moving = [slot for slot in kept if slot >= len(kept)]
        free = sorted(set(range(len(kept))) - set(stay))
        if moving:
            for buffers in self._layers.values():
                for buffer in buffers:
                    buffer[free, :, self.first : self.column] = buffer[moving, :, self.first : self.column]
            self.mask[free] = self.mask[moving]
        order = list(range(len(kept)))
        for target, source in zip(free, moving, strict=True):
            order[target] = source
        self.starts = [self.starts[source] for source in order]
        self.num_rows = len(kept)
        return order

    def clear(self, slot: int) -> None:
        """Forgets what a slot holds: a value that is not finite would spoil rows that do not even see it."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[slot] = 0

    def _move_left(self) -> None:
        """Moves all rows as far as it goes; the longest prompt must still fit before the next column."""
        by = min(self.first, self.column - self.longest_context)
        rows = slice(0, self.num_rows)
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[rows, :, self.first - by : self.column - by] = buffer[rows, :, self.first : self.column].clone()
        self.mask[rows] = torch.roll(self.mask[rows], -by, dims=1)
        self.mask[rows, self.column - by :] = False
        self.starts = [start - by for start in self.starts]
        self.column -= by
        self.moved += by

    def _buffers(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._layers:
            slots, columns = self.mask.shape
            self._layers[layer] = tuple(
                states.new_zeros(slots, states.shape[1], columns, states.shape[3]) for states in (keys, values)
            )
        return self._layers[layer]

    # For models that take and give keys and values as tuples.

    def as_tuples(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """What the rows of the next step see before it."""
        seen = slice(self.first, self._columns.start)
        return tuple(
            (keys[self._rows, :, seen], values[self._rows, :, seen])
            for _, (keys, values) in sorted(self._layers.items())
        )

    def take_tuples(self, given: KeyValues) -> None:
        """Writes what a forward gave: all keys and values, of which the last columns are new."""
        num_new = self._columns.stop - self._columns.start
        for layer, (keys, values) in enumerate(given):
            self.update(keys[:, :, -num_new:], values[:, :, -num_new:], layer)
