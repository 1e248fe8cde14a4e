"""The KV cache of continuous batching: keys and values of sequences side by side, in buffers written in place.

Not a cache class of transformers 4.53: its DynamicCache copies all keys and values at every step and has all sequences
begin and end together; its StaticCache attends over as many columns as there can ever be. Here a step writes one
column, sequences leave and enter between steps, and every GROWTH columns the buffers are reallocated, as wide as the
sequences in use. Attention is given whole buffers, whose unused columns are masked: a part of their columns would not
be contiguous, and transformers' sdpa would copy it at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from llmfoundry_gauntlet.engine.attention import KeyBias, torch_attention
from llmfoundry_gauntlet.engine.tree_attention import dense

GROWTH = 32  # columns


class KVCache(Cache):
    """Buffers [slots, heads, columns, width] a layer. Sequences end in the same column, whatever their length.

    The first `num_used` slots are in use. `mask` [slots, columns] says which columns a slot sees. `column` is the next
    to be written. A prompt of `longest_context` tokens fits before it at any time.
    """

    is_compileable = False

    def __init__(self, num_slots: int, *, longest_context: int, device: torch.device) -> None:
        Cache.__init__(self)  # not super(): untyped_calls_exclude of mypy overlooks that
        self.longest_context = longest_context
        self.mask = torch.zeros(num_slots, longest_context + GROWTH, dtype=torch.bool, device=device)
        self.column = longest_context
        self.num_used = 0
        self.starts: list[int] = []  # the first column of each slot in use
        self.moved = 0  # columns that all sequences were moved to the left so far
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots = slice(0, 0)  # what a forward writes: slots, and columns
        self._columns = slice(0, 0)
        self.is_prompt = False

    # What transformers' models ask of a cache.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, cache_kwargs: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a forward's keys and values, [slots, heads, new columns, width]; return all that its slots see."""
        keys, values = self._buffers(layer_idx, key_states, value_states)
        keys[self._slots, :, self._columns] = key_states
        values[self._slots, :, self._columns] = value_states
        if self.is_prompt:
            return key_states, value_states
        return keys[self._slots], values[self._slots]

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Return the columns before those that the forward writes."""
        return 0 if self.is_prompt else self._columns.start

    def get_mask_sizes(self, cache_position: torch.Tensor, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns that attention sees, and the first of them."""
        return (len(cache_position) if self.is_prompt else self.mask.shape[1]), 0

    def get_max_cache_shape(self) -> int | None:
        """Return None: buffers grow without limit."""
        return None

    def __len__(self) -> int:
        return len(self._layers)

    # What the engine does between forwards.

    def take_stream(
        self, found: Mapping[int, tuple[torch.Tensor, torch.Tensor]], places: Sequence[torch.Tensor]
    ) -> None:
        """Write the prompts that have just entered from a token stream.

        `found` has keys and values [1, heads, tokens, width] by layer, `places` the positions of each prompt's tokens.
        """
        for layer, states in found.items():
            for buffer, tokens in zip(self._buffers(layer, *states), states, strict=True):
                for slot, place in zip(range(self._slots.start, self._slots.stop), places, strict=True):
                    buffer[slot, :, self.column - len(place) : self.column] = tokens[0][:, place]

    def enter(self, lengths: Sequence[int], seen: torch.Tensor) -> None:
        """Take slots for prompts that the next forward runs: `seen` [prompts, width] has them right-aligned."""
        width = seen.shape[1]
        self.is_prompt = True
        self._slots = slice(self.num_used, self.num_used + len(lengths))
        self._columns = slice(self.column - width, self.column)
        self.mask[self._slots] = False
        self.mask[self._slots, self._columns] = seen
        self.starts += [self.column - length for length in lengths]
        self.num_used += len(lengths)

    def step(self) -> None:
        """Take one more column, which the next forward writes."""
        if self.column == self.mask.shape[1]:
            self._grow()
        self.is_prompt = False
        self._slots = slice(0, self.num_used)
        self._columns = slice(self.column, self.column + 1)
        self.mask[self._slots, self.column] = True
        self.column += 1

    def seen(self) -> torch.Tensor:
        """Return the mask of the forward, [slots, columns]: of prompts their own columns alone."""
        return self.mask[self._slots, self._columns] if self.is_prompt else self.mask[self._slots]

    def copy_prompt(self, source: int, end: int, length: int, target: int) -> None:
        """Have `target` hold only the prompt that ended before column `end` of `source`.

        `end` counts from before sequences were moved. `target` is any slot in use, or the first that is not.
        """
        end -= self.moved
        start = self.column - length
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[target, :, start : self.column] = buffer[source, :, end - length : end].clone()
        mask = self.mask[source, end - length : end].clone()
        self.mask[target] = False
        self.mask[target, start : self.column] = mask
        if target == self.num_used:
            self.num_used += 1
            self.starts.append(start)
        else:
            self.starts[target] = start

    def leave(self, slots: Sequence[int]) -> list[int]:
        """Free slots; the last ones move into the gaps. Return the previous slots of the rest, in their new order."""
        kept = [slot for slot in range(self.num_used) if slot not in set(slots)]
        stay = [slot for slot in kept if slot < len(kept)]
        moving = [slot for slot in kept if slot >= len(kept)]
        free = sorted(set(range(len(kept))) - set(stay))
        if moving:
            for buffers in self._layers.values():
                for buffer in buffers:
                    buffer[free] = buffer[moving]
            self.mask[free] = self.mask[moving]
        order = list(range(len(kept)))
        for target, source in zip(free, moving, strict=True):
            order[target] = source
        self.starts = [self.starts[source] for source in order]
        self.num_used = len(kept)
        return order

    def clear(self, slot: int) -> None:
        """Zero a slot: a value that is not finite would spoil slots that do not even see it."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[slot] = 0

    def _grow(self) -> None:
        """Reallocate buffers with GROWTH more columns, without the first columns if no slot uses them any more."""
        by = min(self._first, self.column - self.longest_context)
        used = self.column - by
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = self._grown(keys, by, used), self._grown(values, by, used)
        mask = self.mask.new_zeros(len(self.mask), used + GROWTH)
        mask[:, :used] = self.mask[:, by : self.column]
        self.mask = mask
        self.starts = [start - by for start in self.starts]
        self.column -= by
        self.moved += by

    def _grown(self, buffer: torch.Tensor, by: int, used: int) -> torch.Tensor:
        slots, heads, _, width = buffer.shape
        grown = buffer.new_zeros(slots, heads, used + GROWTH, width)
        grown[: self.num_used, :, :used] = buffer[: self.num_used, :, by : self.column]
        return grown

    def _buffers(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._layers:
            self._layers[layer] = self._new_buffer(keys), self._new_buffer(values)
        return self._layers[layer]

    def _new_buffer(self, states: torch.Tensor) -> torch.Tensor:
        slots, columns = self.mask.shape
        return states.new_zeros(slots, states.shape[1], columns, states.shape[3])

    @property
    def _first(self) -> int:
        return min(self.starts, default=self.column)


class CachedAttention:
    """The attention of one forward over the cache: of prompts of `width` columns, or of a step (see `Attention`).

    `key_bias` is the model's ALiBi, whose positions count masked tokens as well where `counts_masked`.
    """

    def __init__(self, cache: KVCache, width: int, key_bias: KeyBias | None, *, counts_masked: bool) -> None:
        self.cache = cache
        self.key_bias = key_bias
        self.next_layer = 0
        seen = cache.seen()[:, None]  # [slots, 1, columns]
        self.columns = torch.arange(seen.shape[-1], device=seen.device)
        self.ends = self.columns[-width:] if cache.is_prompt else self.columns[cache.column - 1 : cache.column]
        self.seen = seen & (self.columns <= self.ends[:, None])  # [slots, queries, columns]
        self.seen |= self.columns == self.ends[:, None]  # padding sees itself: softmax of nothing is nan
        counted = torch.ones_like(seen) if counts_masked else seen
        self.positions = (counted[:, 0].cumsum(1) - 1).clamp(min=0)
        self.bias: torch.Tensor | None = None  # [slots, heads, 1, columns]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Return the attention of the next layer, with its keys and values written to the cache."""
        keys, values = self.cache.update(key, value, self.next_layer)
        self.next_layer += 1
        if (groups := query.shape[1] // keys.shape[1]) > 1:
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        mask = self.seen[:, None]
        if window is not None:
            mask = mask & (self.ends[:, None] - self.columns < window)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.key_bias is not None and self.bias is None:
            table = self.key_bias(len(self.columns), query)
            self.bias = table[:, self.positions].transpose(0, 1)[:, :, None]
        if softcap or self.bias is not None:
            return dense(query, keys, values, mask, scale, softcap, self.bias).transpose(1, 2)
        return torch_attention(query, keys, values, attn_mask=mask, scale=scale).transpose(1, 2)
