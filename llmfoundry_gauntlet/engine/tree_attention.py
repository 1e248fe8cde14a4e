"""Attention inside the trees of a token stream, as an attention function of transformers.

A call of attention takes neighbouring tokens of a tree as queries, and as keys their ancestors and themselves, with a
mask unless these are a chain. How many tokens a call takes is a balance: what is computed under a mask for nothing
against the cost of a call. Nothing is computed across trees but small ones. All tokens of the stream see a cached
prefix. Sliding windows count by depth in the tree. Caps on attention scores are always applied, as a model's eager
attention does.

On a GPU in half precision each tree's first path from the root, which is a chain, goes with all others through one call
of flash-attn's kernel for sequences of many lengths, where that library is installed. Otherwise each has a call of
torch's own, which is a flash kernel there as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from llmfoundry_gauntlet.engine.trees import Stream

NAME = 'gauntlet_trees'  # what a model's configuration calls it while a stream runs
MAX_QUERIES = 512  # under one mask
PIECE = 64  # tokens between places where a path may be cut
CALL = {'cpu': 6000, 'cuda': 250_000}  # the cost of a call, in pairs of a query and a key
CUTS_CHAINS = {'cpu': True, 'cuda': False}  # where flash kernels leave out what a chain does not see
COPY = 6  # the same of a key, which is copied
BLOCK = {'cpu': 1, 'cuda': 512}  # neighbouring trees up to this many tokens share a call: a GPU is bound by launches

MAX_FLASH_WIDTH = 256  # of a head

KeyValue = tuple[torch.Tensor, torch.Tensor]
Change = tuple[Any, str, Any]  # an object, the name of an attribute, and its temporary value


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Queries `start` to `stop`, and the keys that they see at most: tokens of the stream, the cached prefix before it.

    Keys are a tensor of their places if they are not neighbours. A chain sees itself causally and needs no mask.
    """

    start: int
    stop: int
    keys: slice | torch.Tensor
    chain: bool

    def of(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the entries of the keys from a tensor with an entry for each token."""
        if isinstance(self.keys, slice):
            return part.narrow(dim, self.keys.start, self.keys.stop - self.keys.start)
        return part.index_select(dim, self.keys)


@dataclass(slots=True, eq=False)
class TreeLayout:
    """A stream on the model's device. Of a cached prefix, `prefix` holds keys and values by layer.

    With `is_cached` the keys and values of the stream itself are put into `prefix`.
    """

    spans: list[Span]
    depths: torch.Tensor  # [P + T] int32, of the cached prefix and the stream
    ends: torch.Tensor  # [P + T] int32: where a token's subtree ends
    longest: int  # sequence
    num_cached: int = 0
    prefix: dict[int, KeyValue] = field(default_factory=dict)
    is_cached: bool = False
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)
    packed: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def mask(self, index: int, window: int | None) -> torch.Tensor:
        """Return which keys the queries of a span see, the cached prefix first. Boolean, [queries, keys]."""
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
        """Return the positions of all chains' tokens, the bounds of each, and the length of the longest."""
        if self.packed is None:
            chains = [span for span in self.spans if span.chain]
            sizes = torch.tensor([0, *(span.stop - span.start for span in chains)], dtype=torch.int32)
            places = torch.cat([torch.arange(span.start, span.stop) for span in chains])
            device = self.ends.device
            bounds = sizes.cumsum(0, dtype=torch.int32)
            self.packed = places.to(device), bounds.to(device), int(sizes.max())
        return self.packed


_layout: ContextVar[TreeLayout | None] = ContextVar('_layout', default=None)


def spans_of(stream: Stream, device: torch.device) -> list[Span]:
    """Return the calls that the attention of a stream takes."""
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
    """Return where to split a tree for calls of attention: where another call costs less than a longer one."""
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
    """Return what tokens `start` to `stop` of a tree that begins at `first` see of the cached prefix and stream."""
    num_cached = int(stream.depths[0])
    above = first + (stream.ends[first:start] > start).nonzero()[0]
    if len(above) == start - first and (num_cached == 0 or first == 0):  # they are neighbours
        return slice(first, num_cached + stop)
    places = [np.arange(num_cached), num_cached + above, np.arange(num_cached + start, num_cached + stop)]
    return torch.from_numpy(np.concatenate(places)).to(device)


def num_in_chain(stream: Stream, start: int, stop: int) -> int:
    """Return the tokens of a tree before its first path from the root ends."""
    depths = stream.depths[start:stop]
    breaks = (depths[1:] != depths[:-1] + 1).nonzero()[0]
    return int(breaks[0]) + 1 if len(breaks) else stop - start


def tree_layout(
    stream: Stream, device: torch.device, prefix: dict[int, KeyValue] | None = None, *, is_cached: bool = False
) -> TreeLayout:
    """Return a stream's layout on a device, after a cached prefix if there is one, or for one to be cached."""
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
    )


@contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """Give attributes other values until the context ends; an attribute that an instance did not have is removed."""
    before = [(owner, name, getattr(owner, name), is_own(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value, own in before:
            if own:
                setattr(owner, name, value)
            else:
                owner.__dict__.pop(name, None)


def is_own(owner: Any, name: str) -> bool:
    """Return whether an attribute belongs to the instance: stored in it, or set through a descriptor."""
    return name in vars(owner) or any(hasattr(vars(base).get(name), '__set__') for base in type(owner).__mro__)


@contextmanager
def tree_attention(config: Any, layout: TreeLayout) -> Iterator[None]:
    """Have a model of this configuration attend by the layout until the context ends."""
    configs = {id(part): part for part in (config, config.get_text_config())}.values()
    token = _layout.set(layout)
    try:
        with changed([(part, '_attn_implementation', NAME) for part in configs]):
            yield
    finally:
        _layout.reset(token)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of one layer, [1, T, heads, width]; query, key and value are [1, heads, T, width].

    Key and value may have fewer heads, each shared by a group of the query's.

    `attention_mask`, dropout and whatever else a model hands over are not used; the probe finds models for which
    that is wrong.
    """
    layout = _layout.get()
    if layout is None:
        raise RuntimeError(f'{NAME} attention is called outside of a token stream')
    if layout.is_cached:
        layout.prefix[module.layer_idx] = (key.clone(), value.clone())
    groups = query.shape[1] // key.shape[1]
    cached = layout.prefix[module.layer_idx] if layout.num_cached else None
    window = sliding_window if sliding_window is not None and sliding_window < layout.longest else None
    plain = window is None and cached is None and not softcap  # a chain needs no mask
    output = torch.empty_like(query.transpose(1, 2))
    packed = plain and can_pack(query) and any(span.chain for span in layout.spans)
    if packed:
        attend_chains(query, key, value, output, layout, scaling)
    if cached is not None:
        key, value = torch.cat([cached[0], key], dim=2), torch.cat([cached[1], value], dim=2)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    for index, span in enumerate(layout.spans):
        if packed and span.chain:
            continue
        keys, values = span.of(key, 2), span.of(value, 2)
        queries = query[:, :, span.start : span.stop]
        if plain and span.chain:
            found = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
        elif softcap:
            found = capped(queries, keys, values, layout.mask(index, window), scaling, softcap)
        else:
            mask = layout.mask(index, window)
            found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
        output[:, span.start : span.stop] = found.transpose(1, 2)
    return output, None


def can_pack(query: torch.Tensor) -> bool:
    """Return whether flash-attn's kernel takes these tensors."""
    fits = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= MAX_FLASH_WIDTH
    return fits and is_flash_attn_2_available()


def attend_chains(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layout: TreeLayout,
    scaling: float | None,
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
        softmax_scale=scaling,
        causal=True,
    )
    output[0, places] = found.to(output.dtype)


def capped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Return attention whose scores go through `softcap * tanh(scores / softcap)`, as in Gemma 2 (arXiv 2408.00118)."""
    outputs = []
    scale = queries.shape[-1] ** -0.5 if scaling is None else scaling
    for start in range(0, queries.shape[2], MAX_QUERIES):
        part = slice(start, start + MAX_QUERIES)
        scores = softcap * torch.tanh(queries[:, :, part] @ keys.transpose(2, 3) * scale / softcap)
        scores = scores.masked_fill(~mask[part], float('-inf')).softmax(dim=-1, dtype=torch.float32)
        outputs.append(scores.to(values.dtype) @ values)
    return torch.cat(outputs, dim=2)


AttentionInterface.register(NAME, attend)
