"""Attention within the trees of a token stream.

Attention never crosses trees. All tokens of the stream attend to a cached prefix. Sliding windows and chunks are
measured by depth in the tree. Caps on attention scores are always applied, as in a model's eager attention. Attention
sinks take their share of a token's weight after its attention, by the log-sum-exp of its scores.

On a GPU the stream is cut into paths without branches. Each path is a sequence of a variable-length kernel: its keys
are its ancestors and itself, so that causal attention aligned with the last key needs no mask.

On a CPU, and with caps, an attention call takes adjacent tokens of a tree as queries, and their ancestors and
themselves as keys, with a mask unless they form a chain. The number of tokens per call balances work wasted under masks
against the overhead of calls; small trees may share a call under a mask.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from torch.nn.attention.bias import CausalVariant

from llmfoundry_gauntlet.engine.attention import AttentionRule, KeyBias, to_device, torch_attention
from llmfoundry_gauntlet.engine.trees import Stream
from llmfoundry_gauntlet.types import Ints

# Flash attention for packed sequences; before torch 2.15 it takes no groups of heads, or does not exist.
try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # type: ignore[import-not-found]
except ImportError:
    HAS_PUBLIC_FLASH = False
else:
    HAS_PUBLIC_FLASH = 'enable_gqa' in inspect.signature(varlen_attn).parameters

# Calls under masks.
MAX_QUERIES = 512  # per mask
PIECE = 64  # tokens between possible cuts of a path
CALL = {'cpu': 6000, 'cuda': 250_000}  # the overhead of a call, in query-key pairs
COPY = 6  # the cost of copying a key, in query-key pairs
BLOCK = {'cpu': 1, 'cuda': 512}  # adjacent trees of up to this many tokens share a call: launches dominate on a GPU

# Calls of variable-length kernels.
MAX_KEYS = 65536  # gathered for a call
MAX_FLASH_WIDTH = 256  # of a head
WIDTHS = 8  # kernels take heads whose width is a multiple of this

# Extra columns of queries and keys for ALiBi.
BIAS_PARTS = 3  # that add up to a bias, as half precision has too few digits for it
BIAS_COLUMNS = 8  # with the parts, so that the width of heads stays a multiple of WIDTHS

# Shapes: P = tokens of the cached prefix, T = tokens of the stream. Query, key and value are [1, heads, T, width].

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

    def of(self, states: torch.Tensor, dim: int) -> torch.Tensor:
        """Select the entries of the keys from a tensor with an entry per token in this dimension."""
        if isinstance(self.keys, slice):
            return states.narrow(dim, self.keys.start, self.keys.stop - self.keys.start)
        return states.index_select(dim, self.keys)


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
    masks: dict[tuple[int, int | None, int | None], torch.Tensor] = field(default_factory=dict)
    calls_by_chunk: dict[int | None, list[PackedCall]] = field(default_factory=dict)
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
    def query_positions(self) -> torch.Tensor:
        """Return the positions of the stream's tokens in their sequences, int32 [1, T]."""
        return self.depths[None, self.num_cached :]

    def packed_calls(self, chunk: int | None) -> list[PackedCall]:
        """Return the calls of the variable-length kernel; layers share them."""
        if chunk not in self.calls_by_chunk:
            self.calls_by_chunk[chunk] = packed_calls(self.stream, self.device, chunk)
        return self.calls_by_chunk[chunk]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """Return the attention output of the next layer for a stream, which is one row (see `Attention`)."""
        layer = self.next_layer
        self.next_layer += 1
        width = value.shape[-1]
        rule = replace(
            rule,
            scaling=rule.scale(query),
            window=self._if_shorter(rule.window),
            chunk=self._if_shorter(rule.chunk),
        )

        if self.is_cached:
            self.prefix[layer] = (key.clone(), value.clone())
        if self.num_cached:
            prefix_key, prefix_value = self.prefix[layer]
            key = torch.cat([prefix_key, key], dim=2)
            value = torch.cat([prefix_value, value], dim=2)

        bias = None if self.key_bias is None else self._bias(self.key_bias, query)
        if rule.softcap:
            # No kernel has a cap.
            key, value = for_each_head(query, key, value)
            return self._attend_capped(query, key, value, rule, bias)
        query, key, value = of_one_width(query, key, value)
        if bias is not None:
            key, value = for_each_head(query, key, value)
            query, key, value = self._biased(bias, query, key, value, rule.scale(query))
        if query.is_cuda:
            output = attend_packed(query, key, value, self.packed_calls(rule.chunk), rule)
        else:
            key, value = for_each_head(query, key, value)
            output = self._attend_by_spans(query, key, value, rule)
        return output[..., :width]  # without the columns that a bias, or a wider key, added

    def _if_shorter(self, limit: int | None) -> int | None:
        """Return a window or a chunk if it is shorter than some sequence, so that it matters."""
        return limit if limit is not None and limit < self.longest else None

    def _attend_by_spans(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Return the attention output, shape [1, T, heads, width], by torch's function for each span."""
        scale = rule.scale(query)
        chains_are_causal = rule.window is None and rule.chunk is None and not self.num_cached
        output = torch.empty_like(query.transpose(1, 2))
        for index, span in enumerate(self.spans):
            queries, keys, values = query[:, :, span.start : span.stop], span.of(key, 2), span.of(value, 2)
            is_causal = chains_are_causal and span.chain  # faster than with a mask
            mask = None if is_causal else self.mask(index, rule.window, rule.chunk)
            if rule.sinks is None:
                of_span = torch_attention(queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale)
            else:
                of_span, logsumexp = attend_with_logsumexp(queries, keys, values, mask, scale)
                of_span = with_sinks(of_span, logsumexp, rule.sinks[:, None])
            output[:, span.start : span.stop] = of_span.transpose(1, 2)
        return output

    def _attend_capped(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention output, shape [1, T, heads, width], by matrices of capped scores for each span."""
        _, num_heads, length, _ = query.shape
        output = query.new_empty(1, length, num_heads, value.shape[-1])
        for index, span in enumerate(self.spans):
            queries, keys, values = query[:, :, span.start : span.stop], span.of(key, 2), span.of(value, 2)
            biases = None if bias is None else span.of(bias, 1)[:, None]
            mask = self.mask(index, rule.window, rule.chunk)
            of_span = dense(queries, keys, values, mask, rule, biases)
            output[:, span.start : span.stop] = of_span.transpose(1, 2)
        return output

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
        constants = query.new_zeros(BIAS_COLUMNS)
        constants[:BIAS_PARTS] = constant
        if self.columns is None:
            self.columns = self._columns(bias / (scale * constant), query)
        return (
            torch.cat([query, constants.expand(*query.shape[:3], -1)], dim=3),
            torch.cat([key, self.columns], dim=3),
            torch.cat([value, value.new_zeros(*value.shape[:3], BIAS_COLUMNS)], dim=3),
        )

    def _columns(self, bias: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Return columns in the query's precision whose first BIAS_PARTS add up to a bias, [1, heads, P + T, columns].

        Each holds what those before it left by rounding.
        """
        columns = query.new_zeros(1, *bias.shape, BIAS_COLUMNS)
        remainder = bias
        for column in range(BIAS_PARTS):
            columns[0, :, :, column] = remainder
            remainder = remainder - columns[0, :, :, column]
        return columns

    def mask(self, index: int, window: int | None, chunk: int | None) -> torch.Tensor:
        """Return the mask of a span, boolean [queries, keys], the cached prefix first; layers share it."""
        mask = self.masks.get((index, window, chunk))
        if mask is None:
            mask = self.masks[index, window, chunk] = self._mask(self.spans[index], window, chunk)
        return mask

    def _mask(self, span: Span, window: int | None, chunk: int | None) -> torch.Tensor:
        places = torch.arange(len(self.ends), device=self.ends.device)
        queries = slice(self.num_cached + span.start, self.num_cached + span.stop)
        query_places = places[queries, None]
        # A token sees the earlier ones whose subtree has not ended: its ancestors, and itself.
        is_before = span.of(places, 0) <= query_places
        is_ancestor = span.of(self.ends, 0) > query_places
        seen = is_before & is_ancestor
        if window is not None:
            seen &= self.depths[queries, None] - span.of(self.depths, 0) < window
        if chunk is not None:
            seen &= self.depths[queries, None] // chunk == span.of(self.depths, 0) // chunk
        return seen


def spans_of(stream: Stream, device: torch.device) -> list[Span]:
    """Return the attention calls of a stream."""
    kind = device.type if device.type in CALL else 'cpu'
    tree_starts = stream.tree_starts.tolist()
    spans: list[Span] = []
    first = 0
    while first < len(tree_starts) - 1:
        # As many small trees as may share a call, at least one.
        last = first + 1
        while last < len(tree_starts) - 1 and tree_starts[last + 1] - tree_starts[first] <= BLOCK[kind]:
            last += 1
        start, stop = tree_starts[first], tree_starts[last]
        if last > first + 1:
            cuts, chain_stop = [start, stop], start  # no chain: a mask keeps the trees apart
        else:
            cuts, chain_stop = cuts_of(stream, start, stop, CALL[kind]), start + num_in_chain(stream, start, stop)
        for low, high in pairwise(cuts):
            is_chain = low == start and high <= chain_stop
            spans.append(Span(low, high, visible_keys(stream, start, low, high, device), is_chain))
        first = last
    return spans


def cuts_of(stream: Stream, start: int, stop: int, call: int) -> list[int]:
    """Return where to split a tree into attention calls: where another call costs less than a longer one.

    `call` is the overhead of a call; costs are in query-key pairs.
    """
    depths = stream.depths[start:stop]
    cuts = [start]
    begin = 0  # of the current call; like `low` and `high` it counts from the tree's start
    for low, high in pieces_of(depths)[1:]:
        num_queries, num_added, depth = low - begin, high - low, int(depths[low])
        # In the same call each added query meets all keys of the call, and all earlier queries the added keys.
        longer = num_added * (int(depths[begin]) + 2 * num_queries + num_added)
        # In a call of its own it meets its ancestors, which are copied if they are not contiguous.
        another = num_added * (depth + num_added) + call + COPY * depth
        if longer > another or high - begin > MAX_QUERIES:
            cuts.append(start + low)
            begin = low
    return [*cuts, stop]


def pieces_of(depths: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Return the paths without branches of a tree as bounds, in pieces of at most PIECE tokens."""
    breaks = [0, *breaks_of(depths).tolist(), len(depths)]
    return [
        (low, min(low + PIECE, path_stop))
        for path_start, path_stop in pairwise(breaks)
        for low in range(path_start, path_stop, PIECE)
    ]


def breaks_of(depths: npt.NDArray[np.int32]) -> Ints:
    """Return the tokens that do not follow the token before them in a sequence, but begin a branch or a tree."""
    follows = depths[1:] == depths[:-1] + 1
    return np.flatnonzero(~follows) + 1


def visible_keys(stream: Stream, first: int, start: int, stop: int, device: torch.device) -> slice | torch.Tensor:
    """Return the keys of tokens `start` to `stop` in a tree from `first`: cached prefix, ancestors and themselves."""
    keys = path_to(stream, first, start, stop)
    low, high = int(keys[0]), int(keys[-1]) + 1
    is_contiguous = len(keys) == high - low
    return slice(low, high) if is_contiguous else to_device(keys, device)


def path_to(stream: Stream, first: int, start: int, stop: int) -> Ints:
    """Return the cached prefix, the ancestors of token `start` in a tree from `first`, and tokens `start` to `stop`."""
    num_cached = int(stream.depths[0])
    above = first + np.flatnonzero(stream.ends[first:start] > start)
    own = np.arange(start, stop)
    return np.concatenate([np.arange(num_cached), num_cached + above, num_cached + own])


class _Path(NamedTuple):
    """Tokens `start` to `stop` of a stream, without a branch, and their keys, numbered from the cached prefix on."""

    start: int
    stop: int
    keys: Ints


def packed_calls(stream: Stream, device: torch.device, chunk: int | None = None) -> list[PackedCall]:
    """Return calls that hold the stream's paths without branches, each with at most MAX_KEYS keys if possible.

    With `chunk`, paths end where a chunk does, and their keys are those of their own chunk.
    """
    starts = np.union1d([0], breaks_of(stream.depths))
    if chunk is not None:
        starts = np.union1d(starts, np.flatnonzero(stream.depths % chunk == 0))
    stops = np.append(starts[1:], len(stream.tokens))
    num_cached = int(stream.depths[0])
    depth_of_key = np.concatenate([np.arange(num_cached), stream.depths])
    tree_of_path = np.searchsorted(stream.tree_starts, starts, side='right') - 1
    firsts = stream.tree_starts[tree_of_path]
    groups: list[list[_Path]] = []
    num_keys = 0  # of the last group
    for first, start, stop in zip(firsts.tolist(), starts.tolist(), stops.tolist(), strict=True):
        keys = path_to(stream, first, start, stop)
        if chunk is not None:
            keys = keys[depth_of_key[keys] // chunk == stream.depths[start] // chunk]
        path = _Path(start, stop, keys)
        if not groups or num_keys + len(path.keys) > MAX_KEYS:
            groups.append([])
            num_keys = 0
        groups[-1].append(path)
        num_keys += len(path.keys)
    return [packed_call(group, len(stream.tokens), device) for group in groups]


def packed_call(paths: Sequence[_Path], length: int, device: torch.device) -> PackedCall:
    """Return the call of paths in a stream of this length."""
    num_queries = [path.stop - path.start for path in paths]
    num_keys = [len(path.keys) for path in paths]
    # If the paths are all of the stream, without ancestors or a cached prefix, the keys are the stream's as they are.
    is_whole = sum(num_keys) == length and num_queries == num_keys and paths[0].keys[0] == 0
    return PackedCall(
        start=paths[0].start,
        stop=paths[-1].stop,
        keys=None if is_whole else to_device(np.concatenate([path.keys for path in paths]), device),
        bounds=to_device(np.cumsum([0, *num_queries], dtype=np.int32), device),
        key_bounds=to_device(np.cumsum([0, *num_keys], dtype=np.int32), device),
        longest=max(num_queries),
        longest_key=max(num_keys),
    )


def num_in_chain(stream: Stream, start: int, stop: int) -> int:
    """Return the length of a tree's first path from the root."""
    breaks = breaks_of(stream.depths[start:stop])
    return int(breaks[0]) if len(breaks) else stop - start


def for_each_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value [rows, heads, T, width] with as many heads as the query; each is repeated for its group."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def of_one_width(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value with heads of one width: the narrower get columns of zeros.

    Kernels want it. Latent attention (arXiv 2405.04434) has narrower values, differential attention wider ones.
    """
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:
        value = functional.pad(value, (0, missing))
    elif missing < 0:
        query, key = functional.pad(query, (0, -missing)), functional.pad(key, (0, -missing))
    return query, key, value


def attend_with_logsumexp(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of one span on a CPU, and the log-sum-exp of its scores, float32 [1, heads, T].

    Causal if there is no mask. This is the operator that torch's function calls, which hides the second:
    `_scaled_dot_product_flash_attention_for_cpu` in docs/compatibility.md.
    """
    added = None
    if mask is not None:
        added = queries.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
    output: torch.Tensor
    logsumexp: torch.Tensor
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries,
        keys,
        values,
        0.0,  # dropout
        mask is None,
        attn_mask=added,
        scale=scale,
    )
    return output, logsumexp


def with_sinks(output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return an attention output [..., width] after a sink took its share of the weights.

    `logsumexp` [...] is of the scores without the sink, and `sinks`, which may be broadcast, are its scores.
    """
    share = (logsumexp - sinks.float()).sigmoid()  # of the keys: 1 / (1 + exp(sink) / sum(exp(scores)))
    scaled: torch.Tensor = (output * share[..., None]).to(output.dtype)
    return scaled


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: Sequence[PackedCall], rule: AttentionRule
) -> torch.Tensor:
    """Return the attention of packed sequences, shape [1, T, heads, width]; heads may be padded to a multiple of 8."""
    scale = rule.scale(query)
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))  # [tokens, heads, width]
    padding = -query.shape[-1] % WIDTHS
    if padding:
        queries, keys, values = (functional.pad(states, (0, padding)) for states in (queries, keys, values))
    outputs = [attend_call(queries, keys, values, call, replace(rule, scaling=scale)) for call in calls]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[None]


def attend_call(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: PackedCall, rule: AttentionRule
) -> torch.Tensor:
    """Return the attention of the sequences of one call, given the queries, keys and values of all.

    A function of its own, so that the gathered keys are freed before those of the next call are gathered.
    """
    if call.keys is not None:
        keys, values = keys[call.keys], values[call.keys]
    output, logsumexp = call_kernel(queries[call.start : call.stop], keys, values, call, rule)
    return output if rule.sinks is None else with_sinks(output, logsumexp, rule.sinks)


def call_kernel(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: PackedCall, rule: AttentionRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a variable-length kernel of torch: flash attention in half precision, memory-efficient attention otherwise.

    Return the output and, if there are sinks, the log-sum-exp of each token's scores, float32 [tokens, heads].

    Both align causal masks with the last key. Below torch 2.15 flash attention is a private operator, as
    memory-efficient attention is in all versions: `_flash_attention_forward` in docs/compatibility.md.
    """
    lengths = (call.bounds, call.key_bounds, call.longest, call.longest_key)
    scale, window, has_sinks = rule.scale(queries), rule.window, rule.sinks is not None
    output: torch.Tensor
    logsumexp: torch.Tensor
    if queries.dtype in (torch.float16, torch.bfloat16) and queries.shape[-1] <= MAX_FLASH_WIDTH:
        keys_to_the_left = None if window is None else window - 1
        if HAS_PUBLIC_FLASH:
            left = -1 if keys_to_the_left is None else keys_to_the_left
            output, logsumexp = varlen_attn(
                queries,
                keys,
                values,
                *lengths,
                return_aux=AuxRequest(lse=True),
                scale=scale,
                window_size=(left, 0),
                enable_gqa=True,
            )
        else:
            output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
                queries,
                keys,
                values,
                *lengths,
                0.0,  # dropout
                True,  # causal
                False,  # no debug mask
                scale=scale,
                window_size_left=keys_to_the_left,
            )
        return output, logsumexp.T  # of [heads, tokens]
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:  # memory-efficient attention has no groups of heads
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    output, logsumexp, *_ = torch.ops.aten._efficient_attention_forward(
        queries[None],
        keys[None],
        values[None],
        None,  # bias
        *lengths,
        0.0,  # dropout
        int(CausalVariant.LOWER_RIGHT),
        has_sinks,
        scale=scale,
        window_size=window,
    )
    return output[0], unpadded(logsumexp, call.bounds, len(queries)) if has_sinks else logsumexp


def unpadded(values: torch.Tensor, bounds: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return [tokens, heads] of values [sequences, heads, longest] whose sequences have these cumulative lengths."""
    tokens = torch.arange(num_tokens, device=values.device)
    sequence = torch.searchsorted(bounds[1:], tokens, right=True)
    return values[sequence, :, tokens - bounds[sequence]]


def dense(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    rule: AttentionRule,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention from an explicit matrix of scores, with an optional bias added in float32.

    The mask says all about windows. With a cap, scores first become `softcap * tanh(scores / softcap)`.
    """
    scale, softcap = rule.scale(queries), rule.softcap
    num_keys = keys.shape[2]
    outputs = []
    for start in range(0, queries.shape[2], MAX_QUERIES):
        chunk = slice(start, start + MAX_QUERIES)  # so that no matrix of scores is large
        scores = queries[:, :, chunk] @ keys.transpose(2, 3) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~mask[..., chunk, :], float('-inf'))
        if rule.sinks is not None:
            of_sinks = rule.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, of_sinks], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32)[..., :num_keys]
        outputs.append(weights.to(values.dtype) @ values)
    return torch.cat(outputs, dim=2)
