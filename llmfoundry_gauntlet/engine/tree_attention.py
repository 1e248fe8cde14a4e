"""Attention within the trees of a token stream.

An attention call takes adjacent tokens of a tree as queries, and their ancestors and themselves as keys, with a mask
unless they form a chain. The number of tokens per call balances work wasted under masks against the overhead of calls.
Attention never crosses trees, except that small trees share a call under a mask. All tokens of the stream attend to a
cached prefix. Sliding windows are measured by depth in the tree. Caps on attention scores are always applied, as in a
model's eager attention.

On a GPU in half precision, if flash-attn is installed, the chains of all trees (each tree's first path from the root)
run in one call of its variable-length kernel. Otherwise each chain is a call of torch's own flash kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from transformers.utils import is_flash_attn_2_available

from llmfoundry_gauntlet.engine.attention import KeyBias, torch_attention
from llmfoundry_gauntlet.engine.trees import Stream

MAX_QUERIES = 512  # per mask
PIECE = 64  # tokens between possible cuts of a path
CALL = {'cpu': 6000, 'cuda': 250_000}  # the overhead of a call, in query-key pairs
CUTS_CHAINS = {'cpu': True, 'cuda': False}  # on a GPU flash kernels skip the masked half of a chain
COPY = 6  # the cost of copying a key, in query-key pairs
BLOCK = {'cpu': 1, 'cuda': 512}  # adjacent trees of up to this many tokens share a call: launches dominate on a GPU

MAX_FLASH_WIDTH = 256  # of a head
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


@dataclass(slots=True, eq=False)
class TreeLayout:
    """A stream on the model's device. `prefix` holds the keys and values of a cached prefix by layer.

    With `is_cached` the keys and values of the stream itself are stored in `prefix`.
    """

    spans: list[Span]
    depths: torch.Tensor  # [P + T] int32, of the cached prefix and the stream
    ends: torch.Tensor  # [P + T] int32: where a token's subtree ends
    longest: int  # sequence
    num_cached: int = 0
    prefix: dict[int, KeyValue] = field(default_factory=dict)
    is_cached: bool = False
    key_bias: KeyBias | None = None
    next_layer: int = 0  # counts the attention calls of a forward
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)
    packed: tuple[torch.Tensor, torch.Tensor, int] | None = None
    bias: torch.Tensor | None = None
    columns: torch.Tensor | None = None  # of biased keys

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
        plain = window is None and not self.num_cached and not softcap  # a chain needs no mask
        output = torch.empty_like(query.transpose(1, 2))
        packed = plain and can_pack(query) and any(span.chain for span in self.spans)
        if packed:
            attend_chains(query, key, value, output, self, scale)
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        for index, span in enumerate(self.spans):
            if packed and span.chain:
                continue
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

    def chains(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the positions of all tokens in chains, the chains' cumulative lengths, and the longest length."""
        if self.packed is None:
            chains = [span for span in self.spans if span.chain]
            sizes = torch.tensor([0, *(span.stop - span.start for span in chains)], dtype=torch.int32)
            places = torch.cat([torch.arange(span.start, span.stop) for span in chains])
            device = self.ends.device
            bounds = sizes.cumsum(0, dtype=torch.int32)
            self.packed = places.to(device), bounds.to(device), int(sizes.max())
        return self.packed


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
        if last > first + 1:
            cuts = [start, stop]
        elif CUTS_CHAINS[kind]:
            cuts = cuts_of(stream, start, stop, CALL[kind])
        else:
            cuts = [start, *cuts_of(stream, chain, stop, CALL[kind])]
        spans.extend(
            Span(low, high, keys_of(stream, start, low, high, device), low == start and high <= chain)
            for low, high in pairwise(cuts)
        )
        first = last
    return spans


def cuts_of(stream: Stream, start: int, stop: int, call: int) -> list[int]:
    """Return where to split a tree into attention calls: where another call costs less than a longer one."""
    if start == stop:
        return [stop]
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


def keys_of(stream: Stream, first: int, start: int, stop: int, device: torch.device) -> slice | torch.Tensor:
    """Return the keys of tokens `start` to `stop` in a tree from `first`: cached prefix, ancestors and themselves."""
    num_cached = int(stream.depths[0])
    above = first + (stream.ends[first:start] > start).nonzero()[0]
    if len(above) == start - first and (num_cached == 0 or first == 0):  # contiguous
        return slice(first, num_cached + stop)
    places = [np.arange(num_cached), num_cached + above, np.arange(num_cached + start, num_cached + stop)]
    return torch.from_numpy(np.concatenate(places)).to(device)


def num_in_chain(stream: Stream, start: int, stop: int) -> int:
    """Return the length of a tree's first path from the root."""
    depths = stream.depths[start:stop]
    breaks = (depths[1:] != depths[:-1] + 1).nonzero()[0]
    return int(breaks[0]) + 1 if len(breaks) else stop - start


def tree_layout(
    stream: Stream,
    device: torch.device,
    prefix: dict[int, KeyValue] | None = None,
    *,
    is_cached: bool = False,
    key_bias: KeyBias | None = None,
) -> TreeLayout:
    """Return a stream's layout on a device, after a cached prefix or, with `is_cached`, for one to be stored."""
    num_cached = int(stream.depths[0])
    depths = np.concatenate([np.arange(num_cached, dtype=np.int32), stream.depths])
    ends = np.concatenate([np.full(num_cached, len(depths), np.int32), num_cached + stream.ends])
    return TreeLayout(
        spans=spans_of(stream, device),
        depths=torch.from_numpy(depths).to(device),
        ends=torch.from_numpy(ends).to(device),
        longest=int(stream.depths.max()) + 1,
        num_cached=num_cached,
        prefix={} if prefix is None else prefix,
        is_cached=is_cached,
        key_bias=key_bias,
    )


def can_pack(query: torch.Tensor) -> bool:
    """Return whether flash-attn is installed and supports this query."""
    fits = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= MAX_FLASH_WIDTH
    return fits and is_flash_attn_2_available()


def attend_chains(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layout: TreeLayout,
    scale: float,
) -> None:
    """Write the causal attention of all chains into the output, in one call."""
    from flash_attn import flash_attn_varlen_func

    places, bounds, longest = layout.chains()
    queries, keys, values = (part[0].transpose(0, 1)[places] for part in (query, key, value))  # [tokens, heads, width]
    found = flash_attn_varlen_func(
        queries,
        keys,
        values,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
    )
    output[0, places] = found.to(output.dtype)


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
