"""Attention inside the trees of a token stream, as an attention function of transformers.

A tree's first path from the root is a chain: plain causal attention. The tokens after it see their ancestors, by a
mask. Nothing is computed across trees. A kept prefix is seen by all tokens of the stream. Sliding windows count by
depth in the tree. Caps on attention scores are applied where a model's own attention applies them: transformers'
sdpa leaves them out.

On a GPU in half precision all chains go through one call of flash-attn's kernel for sequences of many lengths, where
that library is installed. Otherwise each has a call of torch's own, which is a flash kernel there as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from llmfoundry_gauntlet.engine.layout import Stream

NAME = 'gauntlet_trees'  # what a model's configuration calls it while a stream runs
MAX_QUERIES = 512  # under one mask
BLOCK = {'cpu': 1, 'cuda': 512}  # neighbouring trees up to this many tokens share a call: a GPU is bound by launches

MAX_FLASH_WIDTH = 256  # of a head

KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """Queries `start` to `stop` over the keys from `first` on. A chain sees itself causally and needs no mask."""

    first: int
    start: int
    stop: int
    chain: bool


@dataclass(slots=True, eq=False)
class TreeLayout:
    """A stream on the model's device. Of a kept prefix, `prefix` holds keys and values by layer.

    Where `keep` is not 0 the stream's first `keep` tokens are a prefix to be kept: theirs are put into `prefix`.
    """

    spans: list[Span]
    depths: torch.Tensor  # [T] int32
    ends: torch.Tensor  # [T] int32
    longest: int  # sequence
    num_kept: int = 0
    prefix: dict[int, KeyValue] = field(default_factory=dict)
    keep: int = 0
    caps: bool = True  # whether the model's own attention caps its scores
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)
    packed: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def mask(self, index: int, window: int | None) -> torch.Tensor:
        """Which keys the queries of a span see, the kept prefix first. Boolean, [queries, keys]."""
        found = self.masks.get((index, window))
        if found is None:
            found = self.masks[index, window] = self._mask(self.spans[index], window)
        return found

    def _mask(self, span: Span, window: int | None) -> torch.Tensor:
        queries = torch.arange(span.start, span.stop, device=self.ends.device)[:, None]
        keys = torch.arange(span.first, span.stop, device=self.ends.device)[None]
        seen = (keys <= queries) & (self.ends[span.first : span.stop][None] > queries)
        depths = self.depths[span.first : span.stop]
        if self.num_kept:
            seen = torch.cat([seen.new_ones(len(queries), self.num_kept), seen], dim=1)
            depths = torch.cat([torch.arange(self.num_kept, device=depths.device, dtype=depths.dtype), depths])
        if window is not None:
            seen &= self.depths[span.start : span.stop][:, None] - depths[None] < window
        return seen

    def chains(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Where all chains' tokens stand, the bounds of each among them, and the length of the longest."""
        if self.packed is None:
            chains = [span for span in self.spans if span.chain]
            sizes = torch.tensor([0, *(span.stop - span.start for span in chains)], dtype=torch.int32)
            places = torch.cat([torch.arange(span.start, span.stop) for span in chains])
            device = self.ends.device
            bounds = sizes.cumsum(0, dtype=torch.int32)
            self.packed = places.to(device), bounds.to(device), int(sizes.max())
        return self.packed


_layout: ContextVar[TreeLayout | None] = ContextVar('_layout', default=None)


def spans_of(stream: Stream, block: int) -> list[Span]:
    """The calls that the attention of a stream takes: chains, the rest of each tree, small trees together."""
    spans: list[Span] = []
    bounds = stream.tree_starts.tolist()
    first = 0
    while first < len(bounds) - 1:
        last = first + 1
        while last < len(bounds) - 1 and bounds[last + 1] - bounds[first] <= block:
            last += 1
        start, stop = bounds[first], bounds[last]
        chain = 0 if last > first + 1 else num_in_chain(stream, start, stop)
        if chain:
            spans.append(Span(start, start, start + chain, True))
        cuts = [*range(start + chain, stop, MAX_QUERIES), stop]
        spans.extend(Span(start, low, high, False) for low, high in pairwise(cuts))
        first = last
    return spans


def num_in_chain(stream: Stream, start: int, stop: int) -> int:
    """Tokens of a tree before its first path from the root ends."""
    depths = stream.depths[start:stop]
    breaks = (depths[1:] != depths[:-1] + 1).nonzero()[0]
    return int(breaks[0]) + 1 if len(breaks) else stop - start


def tree_layout(
    stream: Stream, device: torch.device, prefix: dict[int, KeyValue] | None = None, *, keep: int = 0
) -> TreeLayout:
    """A stream's layout on a device, after a kept prefix if there is one, or for one to be kept."""
    return TreeLayout(
        spans=spans_of(stream, BLOCK.get(device.type, 1)),
        depths=torch.from_numpy(stream.depths).to(device),
        ends=torch.from_numpy(stream.ends).to(device),
        longest=int(stream.depths.max()) + 1,
        num_kept=int(stream.depths[0]),
        prefix={} if prefix is None else prefix,
        keep=keep,
    )


@contextmanager
def tree_attention(config: Any, layout: TreeLayout) -> Iterator[None]:
    """Within it a model of this configuration attends by the layout; afterwards everything is as it was."""
    configs = {id(part): part for part in (config, config.get_text_config())}.values()
    before = [part._attn_implementation for part in configs]
    token = _layout.set(layout)
    try:
        for part in configs:
            layout.caps = part._attn_implementation != 'sdpa'
            part._attn_implementation = NAME
        yield
    finally:
        for part, name in zip(configs, before, strict=True):
            part._attn_implementation = name
        _layout.reset(token)


def attend(
    module: torch.nn.Module,
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
    """Attention of one layer: [1, T, heads, width] from a query [1, heads, T, width], key and value likewise.

    Key and value may have fewer heads, each shared by a group of the query's.

    `attention_mask`, dropout and whatever else a model hands over are not used; the probe finds models for which
    that is wrong.
    """
    layout = _layout.get()
    if layout is None:
        raise RuntimeError(f'{NAME} attention is called outside of a token stream')
    if layout.keep:
        layout.prefix[module.layer_idx] = (key[:, :, : layout.keep].clone(), value[:, :, : layout.keep].clone())
    groups = query.shape[1] // key.shape[1]
    kept = layout.prefix[module.layer_idx] if layout.num_kept else None
    softcap = softcap if layout.caps else None
    window = sliding_window if sliding_window is not None and sliding_window < layout.longest else None
    plain = window is None and kept is None and not softcap  # a chain needs no mask
    output = torch.empty_like(query.transpose(1, 2))
    packed = plain and can_pack(query) and any(span.chain for span in layout.spans)
    if packed:
        attend_chains(query, key, value, output, layout, scaling)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        kept = kept and (kept[0].repeat_interleave(groups, dim=1), kept[1].repeat_interleave(groups, dim=1))
    for index, span in enumerate(layout.spans):
        if packed and span.chain:
            continue
        keys, values = key[:, :, span.first : span.stop], value[:, :, span.first : span.stop]
        if kept is not None:
            keys, values = torch.cat([kept[0], keys], dim=2), torch.cat([kept[1], values], dim=2)
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
    """Whether flash-attn's kernel takes these tensors."""
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
    """Writes the causal attention of all chains into the output, in one call."""
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
    """Attention whose scores go through `softcap * tanh(scores / softcap)`, as Gemma 2 has it (arXiv 2408.00118)."""
    outputs = []
    scale = queries.shape[-1] ** -0.5 if scaling is None else scaling
    for start in range(0, queries.shape[2], MAX_QUERIES):
        part = slice(start, start + MAX_QUERIES)
        scores = softcap * torch.tanh(queries[:, :, part] @ keys.transpose(2, 3) * scale / softcap)
        scores = scores.masked_fill(~mask[part], float('-inf')).softmax(dim=-1, dtype=torch.float32)
        outputs.append(scores.to(values.dtype) @ values)
    return torch.cat(outputs, dim=2)


AttentionInterface.register(NAME, attend)
