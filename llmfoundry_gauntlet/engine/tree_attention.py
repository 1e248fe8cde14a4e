"""Attention within the trees of a token stream.

Attention never crosses trees. All tokens of the stream attend to a cached prefix. Sliding windows are measured by depth
in the tree. Caps on attention scores are always applied, as in a model's eager attention.

On a GPU the stream is cut into paths without branches. Each path is a sequence of a variable-length kernel: its keys
are its ancestors and itself, so that causal attention aligned with the last key needs no mask.

On a CPU, and with caps, an attention call takes adjacent tokens of a tree as queries, and their ancestors and
themselves as keys, with a mask unless they form a chain. The number of tokens per call balances work wasted under masks
against the overhead of calls; small trees may share a call under a mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention.bias import CausalVariant

from llmfoundry_gauntlet.engine.attention import KeyBias, to_device, torch_attention
from llmfoundry_gauntlet.engine.trees import Stream
from llmfoundry_gauntlet.types import Ints

MAX_QUERIES = 512  # per mask
PIECE = 64  # tokens between possible cuts of a path
CALL = {'cpu': 6000, 'cuda': 250_000}  # the overhead of a call, in query-key pairs
COPY = 6  # the cost of copying a key, in query-key pairs
BLOCK = {'cpu': 1, 'cuda': 512}  # adjacent trees of up to this many tokens share a call: launches dominate on a GPU
MAX_KEYS = 65536  # gathered for a call of the variable-length kernel
MAX_FLASH_WIDTH = 256  # of a head
WIDTHS = 8  # kernels take heads whose width is a multiple of this
BIAS_COLUMNS = 8  # three hold a bias in parts, as half precision has too few digits for it

KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Queries `start` to `stop` of one attention call and its keys, numbered from the start of the cached prefix.

    `keys` is a tensor of indices if they are not contiguous. A chain is plainly causal and needs no mask.
    """

    start: int
    stop: int
    keys: slice | torch.Tensor
    chain: bool

    def of(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Select the entries of the keys from a tensor with an entry per token."""
        if isinstance(self.keys, slice):
            return part.narrow(dim, self.keys.start, self.keys.stop - self.keys.start)
        return part.index_select(dim, self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class PackedCall:
    """Sequences of one call of a variable-length kernel: queries `start` to `stop`, and their keys.

    `keys` are numbered from the start of the cached prefix. Bounds are cumulative lengths, int32 [sequences + 1].
    """

    start: int
    stop: int
    keys: torch.Tensor | None  # None: all keys, in their order
    bounds: torch.Tensor
    key_bounds: torch.Tensor
    longest: int
    longest_key: int


@dataclass(eq=False)
class TreeLayout:
    """A stream on the model's device. `prefix` holds the keys and values of a cached prefix by layer.

    With `is_cached` the keys and values of the stream itself are stored in `prefix`.
    """

    stream: Stream
    device: torch.device
    prefix: dict[int, KeyValue] = field(default_factory=dict)
    is_cached: bool = False
    key_bias: KeyBias | None = None
    next_layer: int = 0  # counts the attention calls of a forward
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)
    bias: torch.Tensor | None = None
    columns: torch.Tensor | None = None  # of biased keys

    @cached_property
    def num_cached(self) -> int:
        """Return the length of the cached prefix."""
        return int(self.stream.depths[0])

    @cached_property
    def longest(self) -> int:
        """Return the length of the longest sequence."""
        return int(self.stream.depths.max()) + 1

    @cached_property
    def depths(self) -> torch.Tensor:
        """Return the depths of the cached prefix and the stream, int32 [P + T]."""
        depths = np.concatenate([np.arange(self.num_cached, dtype=np.int32), self.stream.depths])
        return to_device(depths, self.device)

    @cached_property
    def ends(self) -> torch.Tensor:
        """Return where the subtrees of the cached prefix and the stream end, int32 [P + T]."""
        length = self.num_cached + len(self.stream.ends)
        ends = np.concatenate([np.full(self.num_cached, length, np.int32), self.num_cached + self.stream.ends])
        return to_device(ends, self.device)

    @cached_property
    def spans(self) -> list[Span]:
        """Return the attention calls under masks."""
        return spans_of(self.stream, self.device)

    @cached_property
    def packed_calls(self) -> list[PackedCall]:
        """Return the calls of the variable-length kernel."""
        return packed_calls(self.stream, self.device)

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
        """Return the attention output of the next layer for a stream, which is one row (see `Attention`)."""
        layer, self.next_layer = self.next_layer, self.next_layer + 1
        width, groups = value.shape[-1], query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.is_cached:
            self.prefix[layer] = (key.clone(), value.clone())
        if self.num_cached:
            key, value = (torch.cat(parts, dim=2) for parts in zip(self.prefix[layer], (key, value), strict=True))
        bias = None if self.key_bias is None else self._bias(self.key_bias, query)
        if bias is not None and not softcap:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            groups = 1
            query, key, value = self._biased(bias, query, key, value, scale)
        window = window if window is not None and window < self.longest else None
        if query.is_cuda and not softcap:
            return attend_packed(query, key, value, self.packed_calls, scale, window)[..., :width]
        plain = window is None and not self.num_cached and not softcap  # a chain needs no mask
        output = torch.empty_like(query.transpose(1, 2))
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        for index, span in enumerate(self.spans):
            keys, values = span.of(key, 2), span.of(value, 2)
            queries = query[:, :, span.start : span.stop]
            if plain and span.chain:
                found = torch_attention(queries, keys, values, is_causal=True, scale=scale)
            elif softcap:
                biases = None if bias is None else span.of(bias, 1)[:, None]
                found = dense(queries, keys, values, self.mask(index, window), scale, softcap, biases)
            else:
                found = torch_attention(queries, keys, values, attn_mask=self.mask(index, window), scale=scale)
            output[:, span.start : span.stop] = found.transpose(1, 2)
        return output[..., :width]

    def _bias(self, key_bias: KeyBias, query: torch.Tensor) -> torch.Tensor:
        """Return the ALiBi biases of all keys, float32 [heads, P + T]."""
        if self.bias is None:
            self.bias = key_bias(self.longest, query)[:, self.depths]
        return self.bias

    def _biased(
        self, bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value with extra columns that add the key's bias to each attention score.

        The query's constant is a power of two, which is exact in every precision.
        """
        constant = 2.0 ** round(-math.log2(scale))
        if self.columns is None:
            left = bias / (scale * constant)
            self.columns = query.new_zeros(1, *left.shape, BIAS_COLUMNS)
            for column in range(3):
                self.columns[0, :, :, column] = left
                left = left - self.columns[0, :, :, column]
        constants = query.new_zeros(BIAS_COLUMNS)
        constants[:3] = constant
        return (
            torch.cat([query, constants.expand(*query.shape[:3], -1)], dim=3),
            torch.cat([key, self.columns], dim=3),
            torch.cat([value, value.new_zeros(*value.shape[:3], BIAS_COLUMNS)], dim=3),
        )

    def mask(self, index: int, window: int | None) -> torch.Tensor:
        """Return the mask of a span, boolean [queries, keys], the cached prefix first."""
        found = self.masks.get((index, window))
        if found is None:
            found = self.masks[index, window] = self._mask(self.spans[index], window)
        return found

    def _mask(self, span: Span, window: int | None) -> torch.Tensor:
        places = torch.arange(len(self.ends), device=self.ends.device)
        queries = slice(self.num_cached + span.start, self.num_cached + span.stop)
        seen = (span.of(places, 0) <= places[queries, None]) & (span.of(self.ends, 0) > places[queries, None])
        if window is not None:
            seen &= self.depths[queries, None] - span.of(self.depths, 0) < window
        return seen


def spans_of(stream: Stream, device: torch.device) -> list[Span]:
    """Return the attention calls of a stream."""
    kind = device.type if device.type in CALL else 'cpu'
    spans: list[Span] = []
    bounds = stream.tree_starts.tolist()
    first = 0
    while first < len(bounds) - 1:
        last = first + 1
        while last < len(bounds) - 1 and bounds[last + 1] - bounds[first] <= BLOCK[kind]:
            last += 1
        start, stop = bounds[first], bounds[last]
        chain = start if last > first + 1 else start + num_in_chain(stream, start, stop)
        cuts = [start, stop] if last > first + 1 else cuts_of(stream, start, stop, CALL[kind])
        spans.extend(
            Span(low, high, visible_keys(stream, start, low, high, device), low == start and high <= chain)
            for low, high in pairwise(cuts)
        )
        first = last
    return spans


def cuts_of(stream: Stream, start: int, stop: int, call: int) -> list[int]:
    """Return where to split a tree into attention calls: where another call costs less than a longer one."""
    depths = stream.depths[start:stop]
    breaks = [0, *((depths[1:] != depths[:-1] + 1).nonzero()[0] + 1).tolist(), stop - start]
    pieces = [(low, min(low + PIECE, high)) for first, high in pairwise(breaks) for low in range(first, high, PIECE)]
    cuts = [start]
    begin = 0
    for low, high in pieces[1:]:
        before, added, depth = low - begin, high - low, int(depths[low])
        longer = added * (int(depths[begin]) + 2 * before + added)
        if longer > added * (depth + added) + call + COPY * depth or high - begin > MAX_QUERIES:
            cuts.append(start + low)
            begin = low
    return [*cuts, stop]


def visible_keys(stream: Stream, first: int, start: int, stop: int, device: torch.device) -> slice | torch.Tensor:
    """Return the keys of tokens `start` to `stop` in a tree from `first`: cached prefix, ancestors and themselves."""
    keys = path_to(stream, first, start, stop)
    if len(keys) == keys[-1] + 1 - keys[0]:  # contiguous
        return slice(int(keys[0]), int(keys[-1]) + 1)
    return to_device(keys, device)


def path_to(stream: Stream, first: int, start: int, stop: int) -> Ints:
    """Return the cached prefix, the ancestors of token `start` in a tree from `first`, and tokens `start` to `stop`."""
    num_cached = int(stream.depths[0])
    above = first + (stream.ends[first:start] > start).nonzero()[0]
    return np.concatenate([np.arange(num_cached), num_cached + above, np.arange(num_cached + start, num_cached + stop)])


def packed_calls(stream: Stream, device: torch.device) -> list[PackedCall]:
    """Return calls that hold the stream's paths without branches, each with at most MAX_KEYS keys if possible."""
    breaks = (stream.depths[1:] != stream.depths[:-1] + 1).nonzero()[0] + 1
    starts = np.union1d(breaks, stream.tree_starts[:-1])
    bounds = np.append(starts, len(stream.tokens))
    trees = stream.tree_starts[np.searchsorted(stream.tree_starts, starts, side='right') - 1]
    groups: list[list[tuple[int, int, Ints]]] = []
    num_keys = 0
    for first, start, stop in zip(trees.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        keys = path_to(stream, first, start, stop)
        if not groups or num_keys + len(keys) > MAX_KEYS:
            groups.append([])
            num_keys = 0
        groups[-1].append((start, stop, keys))
        num_keys += len(keys)
    return [packed_call(group, len(stream.tokens), device) for group in groups]


def packed_call(paths: Sequence[tuple[int, int, Ints]], length: int, device: torch.device) -> PackedCall:
    """Return the call of paths, each with its bounds in a stream of this length and its keys."""
    sizes = [stop - start for start, stop, _ in paths]
    key_sizes = [len(keys) for _, _, keys in paths]
    bounds, key_bounds = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (sizes, key_sizes))
    is_whole = key_bounds[-1] == length and sizes == key_sizes
    return PackedCall(
        start=paths[0][0],
        stop=paths[-1][1],
        keys=None if is_whole else to_device(np.concatenate([keys for _, _, keys in paths]), device),
        bounds=to_device(bounds, device),
        key_bounds=to_device(key_bounds, device),
        longest=max(sizes),
        longest_key=max(key_sizes),
    )


def num_in_chain(stream: Stream, start: int, stop: int) -> int:
    """Return the length of a tree's first path from the root."""
    depths = stream.depths[start:stop]
    breaks = (depths[1:] != depths[:-1] + 1).nonzero()[0]
    return int(breaks[0]) + 1 if len(breaks) else stop - start


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    calls: Sequence[PackedCall],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of packed sequences, shape [1, T, heads, width]; heads may be padded to a multiple of 8."""
    parts = [part[0].transpose(0, 1) for part in (query, key, value)]  # [tokens, heads, width]
    if rest := -query.shape[-1] % WIDTHS:
        parts = [functional.pad(part, (0, rest)) for part in parts]
    queries, keys, values = parts
    found = [
        call_kernel(
            queries[call.start : call.stop],
            keys if call.keys is None else keys[call.keys],
            values if call.keys is None else values[call.keys],
            call,
            scale,
            window,
        )
        for call in calls
    ]
    return (found[0] if len(found) == 1 else torch.cat(found))[None]


def call_kernel(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: PackedCall, scale: float, window: int | None
) -> torch.Tensor:
    """Call torch's variable-length kernel, as its attention for nested tensors does (torch 2.6 and 2.7).

    Flash attention in half precision, memory-efficient attention otherwise. Both align causal masks with the last key.
    The operators are private: `_flash_attention_forward` in docs/compatibility.md.
    """
    lengths = (call.bounds, call.key_bounds, call.longest, call.longest_key)
    found: torch.Tensor
    if queries.dtype in (torch.float16, torch.bfloat16) and queries.shape[-1] <= MAX_FLASH_WIDTH:
        left = None if window is None else window - 1
        found = torch.ops.aten._flash_attention_forward(
            queries, keys, values, *lengths, 0.0, True, False, scale=scale, window_size_left=left
        )[0]
        return found
    if (groups := queries.shape[1] // keys.shape[1]) > 1:
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    found = torch.ops.aten._efficient_attention_forward(
        queries[None],
        keys[None],
        values[None],
        None,
        *lengths,
        0.0,
        int(CausalVariant.LOWER_RIGHT),
        scale=scale,
        window_size=window,
    )[0]
    return found[0]


def dense(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention from an explicit matrix of scores, with an optional bias added in float32.

    With `softcap` the scores first become `softcap * tanh(scores / softcap)`, as in Gemma 2 (arXiv 2408.00118).
    """
    outputs = []
    for start in range(0, queries.shape[2], MAX_QUERIES):
        part = slice(start, start + MAX_QUERIES)
        scores = queries[:, :, part] @ keys.transpose(2, 3) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~mask[..., part, :], float('-inf')).softmax(dim=-1, dtype=torch.float32)
        outputs.append(scores.to(values.dtype) @ values)
    return torch.cat(outputs, dim=2)
