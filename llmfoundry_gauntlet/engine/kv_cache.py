"""The KV cache of continuous batching: one slot per sequence in buffers that are written in place.

The caches of transformers 4.53 do not fit: DynamicCache copies all keys and values at every step and requires that
sequences begin and end together; StaticCache attends over the longest possible length. Here a step writes one column,
sequences enter and leave between steps, and every GROWTH columns the buffers are reallocated to the width in use.
Attention runs over whole buffers with unused columns masked: a slice would not be contiguous, and transformers' sdpa
would copy it at every step.

Recurrent layers and convolutions have a state per slot instead, which each forward replaces.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from llmfoundry_gauntlet.engine.attention import AttentionRule, KeyBias, to_device, torch_attention
from llmfoundry_gauntlet.engine.tree_attention import dense, for_each_head
from llmfoundry_gauntlet.types import Ids

GROWTH = 32  # columns

CONVOLUTION, RECURRENCE = 'convolution', 'recurrence'
StateName = tuple[str, int, int]  # kind, layer, and the number of the state in its layer


@cache
def chunks_skip_padding() -> bool:
    """Return whether transformers counts chunks from the first unmasked token of a row, and not from its first one."""
    try:
        from transformers.masking_utils import chunked_overlay
    except ImportError:  # below 4.53
        return False
    return 'left_padding' in inspect.signature(chunked_overlay).parameters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptPrompt:
    """The first tokens of several prompts, with the L keys and values by layer and the states that they left."""

    ids: Ids
    layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]  # [heads, L, width] each
    states: Sequence[torch.Tensor]


class KVCache(Cache):
    """Key and value buffers [slots, heads, columns, width] per layer. All sequences end in the same column.

    The first `num_used` slots are in use. `mask` [slots, columns] marks the columns that a slot attends to. `column` is
    the next one to write; a prompt of `longest_context` tokens always fits before it.
    """

    is_compileable = False

    def __init__(self, num_slots: int, *, longest_context: int, device: torch.device) -> None:
        # transformers' own constructor is not called: its arguments differ between versions, and so does what it sets.
        self.longest_context = longest_context
        self.mask = torch.zeros(num_slots, longest_context + GROWTH, dtype=torch.bool, device=device)
        self.column = longest_context
        self.num_used = 0
        self.starts: list[int] = []  # the first column of each slot in use
        self.moved = 0  # columns by which all sequences were shifted left so far
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[StateName, torch.Tensor] = {}  # [slots, ...]
        self._slots = slice(0, 0)  # slots and columns that the current forward writes
        self._columns = slice(0, 0)
        self._seen = slice(0, 0)  # the columns in its attention
        self.is_prompt = False

    @property
    def bytes_per_token(self) -> int:
        """Return the size of a token's keys and values in all layers, once a forward has shown it."""
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.itemsize for buffer in self._all_buffers())

    # The interface of transformers' Cache, from 4.53 to 5.24 (docs/compatibility.md).

    @property
    def layers(self) -> LayersByIndex:
        """Return no layers, which those of transformers' caches are, but the states of one by its index."""
        return LayersByIndex(self)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values, [slots, heads, new columns, width]; return those that the slots attend to."""
        keys, values = self._buffers(layer_idx, key_states, value_states)
        keys[self._slots, :, self._columns] = key_states
        values[self._slots, :, self._columns] = value_states
        if self.is_prompt:
            return key_states, value_states
        return keys[self._slots, :, self._seen], values[self._slots, :, self._seen]

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Return the number of columns before those that the forward writes."""
        return 0 if self.is_prompt else self._columns.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the column of the first query; called from transformers 5 on."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query: torch.Tensor | int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns in attention, and the first of them.

        `query` is the number of tokens in the forward, or their positions (transformers below 5).
        """
        num_new = query if isinstance(query, int) else len(query)
        return (num_new if self.is_prompt else self._seen.stop), 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return -1, which stands for buffers that grow without limit."""
        return -1

    def __len__(self) -> int:
        return len(self._layers)

    # The same of recurrent layers and convolutions, from transformers 5 on.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the forward continues states: a step does, and prompts after a kept one."""
        return not self.is_prompt

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return that earlier states are not kept."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs of a convolution, [slots, channels, kernel]."""
        return self._state((CONVOLUTION, layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state of a recurrent layer, [slots, ...]."""
        return self._state((RECURRENCE, layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Keep the last inputs of a convolution; return them after those that it had before, [slots, channels, T]."""
        name = CONVOLUTION, layer_idx, state_idx
        before = self._states.get(name)
        width = before.shape[-1] if before is not None else conv_kernel_size or conv_states.shape[-1]
        if self.is_prompt:
            inputs = torch.nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            assert before is not None  # prompts came first
            inputs = torch.cat([before[self._slots], conv_states], dim=-1)
        self._write_state(name, inputs[..., -width:])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Keep the state of a recurrent layer and return it."""
        self._write_state((RECURRENCE, layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def states_of_layer(self, kind: str, layer: int) -> list[torch.Tensor]:
        """Return the states of one kind of a layer, [slots, ...] each, in their order."""
        names = sorted(name for name in self._states if name[:2] == (kind, layer))
        return [self._states[name][self._slots] for name in names]

    def _state(self, name: StateName) -> torch.Tensor | None:
        state = self._states.get(name)
        return None if state is None or self.is_prompt else state[self._slots]

    def _write_state(self, name: StateName, state: torch.Tensor) -> None:
        if name not in self._states:
            self._states[name] = state.new_zeros(len(self.mask), *state.shape[1:])
        self._states[name][self._slots] = state

    # Called by the engine between forwards.

    def take_stream(self, states: Mapping[int, tuple[torch.Tensor, torch.Tensor]], places: torch.Tensor) -> None:
        """Write prompts that ran as a token stream into the slots taken last.

        `states` has keys and values [1, heads, tokens, width] by layer, `places` [prompts, width] the positions of each
        prompt's tokens, right-aligned; columns before a prompt get those of any token.
        """
        for layer, (keys, values) in states.items():
            key_buffer, value_buffer = self._buffers(layer, keys, values)
            # Of [heads, prompts, columns, width] the prompts come first.
            key_buffer[self._slots, :, self._columns] = keys[0][:, places].transpose(0, 1)
            value_buffer[self._slots, :, self._columns] = values[0][:, places].transpose(0, 1)

    def enter(self, lengths: Sequence[int], seen: torch.Tensor) -> None:
        """Take slots for the prompts of the next forward; `seen` [prompts, width] is their right-aligned mask."""
        width = seen.shape[1]
        self.is_prompt = True
        self._slots = slice(self.num_used, self.num_used + len(lengths))
        self._columns = self._seen = slice(self.column - width, self.column)
        self.mask[self._slots] = False
        self.mask[self._slots, self._columns] = seen
        self.starts += [self.column - length for length in lengths]
        self.num_used += len(lengths)

    def keep_prompt(self, ids: Ids) -> KeptPrompt:
        """Return what a prompt left in the slot taken last, and free the slot."""
        slot = self.num_used - 1
        columns = slice(self.column - len(ids), self.column)
        layers = {
            layer: (keys[slot, :, columns].clone(), values[slot, :, columns].clone())
            for layer, (keys, values) in self._layers.items()
        }
        kept = KeptPrompt(ids=ids, layers=layers, states=[state.clone() for state in self.states_of(slot)])
        self.leave([slot])
        return kept

    def enter_after(self, kept: KeptPrompt, count: int, width: int) -> None:
        """Take slots for prompts that begin with a kept one; the next forward runs the `width` tokens that follow."""
        end = self.column - width
        first = end - len(kept.ids)
        self.is_prompt = False
        self._slots = slice(self.num_used, self.num_used + count)
        self._columns = slice(end, self.column)
        # None beyond the new ones: recurrent layers take the last columns of the mask for those of their tokens.
        self._seen = slice(0, self.column)
        self.mask[self._slots] = False
        self.mask[self._slots, first : self.column] = True
        for layer, (keys, values) in kept.layers.items():
            key_buffer, value_buffer = self._layers[layer]
            key_buffer[self._slots, :, first:end] = keys
            value_buffer[self._slots, :, first:end] = values
        for buffer, state in zip(self._states.values(), kept.states, strict=True):
            buffer[self._slots] = state
        self.starts += [first] * count
        self.num_used += count

    def step(self) -> None:
        """Take the column that the next forward writes."""
        if self.column == self.mask.shape[1]:
            self._grow()
        self.is_prompt = False
        self._slots = slice(0, self.num_used)
        self._columns = slice(self.column, self.column + 1)
        self._seen = slice(0, self.mask.shape[1])
        self.mask[self._slots, self.column] = True
        self.column += 1

    def seen(self) -> torch.Tensor:
        """Return the mask of the forward, [slots, columns]; for prompts only their own columns."""
        return self.mask[self._slots, self._seen]

    def first_columns(self) -> list[int]:
        """Return where each slot's tokens begin among the columns of `seen`, masked tokens included."""
        first = self._columns.start if self.is_prompt else 0
        return [start - first for start in self.starts[self._slots]]

    def states_of(self, slot: int) -> list[torch.Tensor]:
        """Return the states of recurrent layers and convolutions of a slot, which later forwards replace."""
        return [state[slot] for state in self._states.values()]

    def copy_prompt(self, source: int, end: int, length: int, target: int, states: Sequence[torch.Tensor]) -> None:
        """Copy the prompt that ended before column `end` of slot `source` to slot `target`, replacing its content.

        `end` counts columns as before any shift. `target` is a slot in use, or the first free one. `states` are those
        after the prompt.
        """
        for buffer, state in zip(self._states.values(), states, strict=True):
            buffer[target] = state
        end -= self.moved
        prompt = slice(end - length, end)
        # It ends where all sequences end now.
        start = self.column - length
        columns = slice(start, self.column)
        for buffer in self._all_buffers():
            buffer[target, :, columns] = buffer[source, :, prompt].clone()  # the columns may overlap in one slot
        mask = self.mask[source, prompt].clone()
        self.mask[target] = False
        self.mask[target, columns] = mask
        if target == self.num_used:
            self.num_used += 1
            self.starts.append(start)
        else:
            self.starts[target] = start

    def leave(self, slots: Sequence[int]) -> list[int]:
        """Free slots and move the last ones into the gaps. Return the previous slot of each remaining one, in order."""
        leaving = set(slots)
        kept = [slot for slot in range(self.num_used) if slot not in leaving]
        num_kept = len(kept)
        # As few slots as possible move: those beyond the new end, each into a gap before it.
        gaps = [slot for slot in range(num_kept) if slot in leaving]
        moving = [slot for slot in kept if slot >= num_kept]
        if moving:
            targets = to_device(np.array(gaps), self.mask.device)
            sources = to_device(np.array(moving), self.mask.device)
            for buffer in (self.mask, *self._all_buffers(), *self._states.values()):
                buffer[targets] = buffer[sources]
        previous = list(range(num_kept))
        for gap, source in zip(gaps, moving, strict=True):
            previous[gap] = source
        self.starts = [self.starts[source] for source in previous]
        self.num_used = num_kept
        return previous

    def clear(self, slot: int) -> None:
        """Zero a slot: a non-finite value would spread even where it is masked, as 0 * nan is nan."""
        for buffer in (*self._all_buffers(), *self._states.values()):
            buffer[slot] = 0

    def _grow(self) -> None:
        """Reallocate buffers with GROWTH more columns, dropping leading columns that no slot uses.

        A prompt of `longest_context` tokens must still fit before the next column.
        """
        first_used = min(self.starts, default=self.column)
        dropped = min(first_used, self.column - self.longest_context)
        kept = slice(dropped, self.column)
        num_kept = self.column - dropped
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = self._grown(keys, kept), self._grown(values, kept)
        mask = self.mask.new_zeros(len(self.mask), num_kept + GROWTH)
        mask[:, :num_kept] = self.mask[:, kept]
        self.mask = mask
        self.starts = [start - dropped for start in self.starts]
        self.column = num_kept
        self.moved += dropped

    def _grown(self, buffer: torch.Tensor, kept: slice) -> torch.Tensor:
        """Return a buffer with the kept columns of the slots in use, and GROWTH more."""
        slots, heads, _, width = buffer.shape
        num_kept = kept.stop - kept.start
        grown = buffer.new_zeros(slots, heads, num_kept + GROWTH, width)
        grown[: self.num_used, :, :num_kept] = buffer[: self.num_used, :, kept]
        return grown

    def _buffers(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers of a layer; its first keys and values show the number of heads, widths and dtype."""
        if layer not in self._layers:
            self._layers[layer] = self._new_buffer(keys), self._new_buffer(values)
        return self._layers[layer]

    def _new_buffer(self, states: torch.Tensor) -> torch.Tensor:
        slots, columns = self.mask.shape
        _, heads, _, width = states.shape
        return states.new_zeros(slots, heads, columns, width)

    def _all_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the key and value buffers of all layers."""
        for keys, values in self._layers.values():
            yield keys
            yield values


@dataclass(frozen=True, slots=True)
class LayersByIndex:
    """The `layers` of a cache: there are none, but models of transformers 5.17 read the states of one by its index."""

    cache: KVCache

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, layer: int) -> LayerOfStates:
        return LayerOfStates(self.cache, layer)


@dataclass(frozen=True, slots=True)
class LayerOfStates:
    """The states of a recurrent layer or convolution, in the order of their numbers. Models change them in place."""

    cache: KVCache
    layer: int
    record_past: bool = False  # earlier states are not kept

    @property
    def conv_states(self) -> list[torch.Tensor]:
        """Return the last inputs of the layer's convolutions, [slots, channels, kernel] each."""
        return self.cache.states_of_layer(CONVOLUTION, self.layer)

    @property
    def recurrent_states(self) -> list[torch.Tensor]:
        """Return the layer's recurrent states, [slots, ...] each."""
        return self.cache.states_of_layer(RECURRENCE, self.layer)


class CachedAttention:
    """The `Attention` of one forward over the cache, of prompts with `width` columns or of a decoding step.

    `key_bias` is the model's ALiBi; with `counts_masked` its positions include masked tokens. In a step the first
    `num_shared` tokens of all slots are the same.
    """

    def __init__(
        self, cache: KVCache, width: int, key_bias: KeyBias | None, *, counts_masked: bool, num_shared: int = 0
    ) -> None:
        self.cache = cache
        self.key_bias = key_bias
        self.num_shared = num_shared
        self.next_layer = 0
        seen = cache.seen()[:, None]  # [slots, 1, columns]
        self.columns = torch.arange(seen.shape[-1], device=seen.device)
        # The columns of the queries: of prompts all, of a step the one that it writes.
        self.ends = self.columns[-width:] if cache.is_prompt else self.columns[cache.column - 1 : cache.column]
        self.seen = seen & (self.columns <= self.ends[:, None])  # [slots, queries, columns]
        # A token that sees nothing, such as padding, attends to itself: an empty softmax is nan.
        is_itself = self.columns == self.ends[:, None]
        self.seen |= is_itself & ~self.seen.any(dim=-1, keepdim=True)
        counted = torch.ones_like(seen) if counts_masked else seen
        self.positions = (counted[:, 0].cumsum(1) - 1).clamp(min=0)  # [slots, columns]
        self.is_seen = seen[:, 0]  # [slots, columns]
        self.bias: torch.Tensor | None = None  # [slots, heads, 1, columns]
        self.mask_of_chunk: tuple[int, torch.Tensor] | None = None

    @cached_property
    def query_positions(self) -> torch.Tensor:
        """Return the place of each query in its row, masked tokens included, int [slots, queries]."""
        firsts = to_device(np.array(self.cache.first_columns()), self.columns.device)
        return self.ends - firsts[:, None]

    @property
    def longest(self) -> int:
        """Return the number of columns, which no row exceeds."""
        return len(self.columns)

    def same_chunk(self, chunk: int) -> torch.Tensor:
        """Return which columns are in the chunk of each query, [slots, queries, columns]; layers share it."""
        if self.mask_of_chunk is None or self.mask_of_chunk[0] != chunk:
            firsts = self.ends[0] - self.query_positions[:, 0]
            if chunks_skip_padding():
                firsts = self.is_seen.int().argmax(dim=1)
            of_columns = torch.div(self.columns - firsts[:, None], chunk, rounding_mode='floor')
            of_queries = torch.div(self.ends - firsts[:, None], chunk, rounding_mode='floor')
            self.mask_of_chunk = chunk, of_columns[:, None] == of_queries[:, :, None]
        return self.mask_of_chunk[1]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """Write the next layer's keys and values to the cache; return its attention output."""
        keys, values = self.cache.update(key, value, self.next_layer)
        self.next_layer += 1
        scale = rule.scale(query)
        mask = self.seen[:, None]  # of all heads
        if rule.window is not None:
            # Counted in columns, masked ones included, as by transformers' own masks.
            mask = mask & (self.ends[:, None] - self.columns < rule.window)
        if rule.chunk is not None:
            mask = mask & self.same_chunk(rule.chunk)[:, None]
        if self.key_bias is not None and self.bias is None:
            by_position = self.key_bias(len(self.columns), query)  # [heads, positions]
            self.bias = by_position[:, self.positions].transpose(0, 1)[:, :, None]
        is_plain = not rule.softcap and rule.sinks is None and self.bias is None
        if is_plain and query.shape[2] == 1:
            # The heads that share keys and values are queries of one head: a copy for each would take most of a step.
            slots, heads, _, width = query.shape
            of_groups = query.reshape(slots, keys.shape[1], -1, width)
            sees_all = rule.window is None and rule.chunk is None
            # In half precision its scores would be rounded, which those of torch's attention are not.
            if self.num_shared and sees_all and query.dtype == torch.float32:
                output = self.attend_after_shared(of_groups, keys, values, scale)
            else:
                output = torch_attention(of_groups, keys, values, attn_mask=mask, scale=scale)
            output = output.reshape(slots, heads, 1, -1)
        elif is_plain:
            keys, values = for_each_head(query, keys, values)
            output = torch_attention(query, keys, values, attn_mask=mask, scale=scale)
        else:
            keys, values = for_each_head(query, keys, values)
            output = dense(query, keys, values, mask, rule, self.bias)
        return output.transpose(1, 2)

    @cached_property
    def after_shared(self) -> tuple[int, torch.Tensor]:
        """Return the first column that a slot has after what all share, and which columns from there slots attend to.

        The mask is [slots, 1, 1, columns].
        """
        ends = np.array(self.cache.starts) + self.num_shared
        first = int(ends.min())
        is_after = self.columns[first:] >= to_device(ends, self.columns.device)[:, None]
        return first, (self.seen[..., first:] & is_after[:, None])[:, None]

    def attend_after_shared(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the attention of queries [slots, heads, group, width] where all slots have the same first tokens.

        Their keys and values are read once, from the first slot, for the queries of all, as in Hydragen (arXiv
        2402.05099); those after them are read slot by slot.
        """
        slots, heads, group, width = queries.shape
        start, length = self.cache.starts[0], self.num_shared
        shared_keys, shared_values = (states[0, :, start : start + length] for states in (keys, values))
        first, mask = self.after_shared
        own_keys, own_values = keys[:, :, first:], values[:, :, first:]

        together = queries.transpose(0, 1).reshape(heads, slots * group, width)
        of_shared = (together @ shared_keys.transpose(1, 2)).view(heads, slots, group, length).transpose(0, 1)
        of_own = (queries @ own_keys.transpose(2, 3)).masked_fill(~mask, -math.inf)
        weights = (torch.cat([of_shared, of_own], dim=-1) * scale).softmax(dim=-1)

        together = weights[..., :length].transpose(0, 1).reshape(heads, slots * group, length)
        from_shared = (together @ shared_values).view(heads, slots, group, -1).transpose(0, 1)
        return from_shared + weights[..., length:] @ own_values
