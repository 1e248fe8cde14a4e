"""What an evaluation costs on many GPUs, from what it computes and what a GPU does in a second. Pure.

Everything that is assumed stands in `Device` and `Shape`; nothing of it was measured on GPUs. Costs are those of the
engine: a forward for a batch, one for every token that replies have at most at a time, and ranks that wait for the
slowest after each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama. `num_cached` of its heads have keys and values of their own."""

    name: str
    num_layers: int
    width: int
    inner: int
    num_heads: int
    num_cached: int
    vocabulary: int = 50_000

    @property
    def cached_width(self) -> int:
        """Values that a layer keeps of a token as keys, and as many as values."""
        return self.width // self.num_heads * self.num_cached

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of a layer."""
        return self.width * (2 * self.width + 2 * self.cached_width + 3 * self.inner)

    @property
    def parameters(self) -> int:
        """Of all layers, the embeddings and the output layer."""
        return self.num_layers * self.layer_parameters + 2 * self.vocabulary * self.width

    @property
    def cached_per_token(self) -> int:
        """Numbers that are kept of a token."""
        return 2 * self.num_layers * self.cached_width

    def config(self) -> Any:
        """As transformers describes it."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_cached,
            vocab_size=self.vocabulary,
        )


SHAPES = (
    Shape(name='125M', num_layers=12, width=768, inner=2048, num_heads=12, num_cached=12),
    Shape(name='1B', num_layers=16, width=2048, inner=8192, num_heads=32, num_cached=8),
    Shape(name='7B', num_layers=32, width=4096, inner=11008, num_heads=32, num_cached=32),
    Shape(name='70B', num_layers=80, width=8192, inner=28672, num_heads=64, num_cached=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a GPU does, by default an H100 SXM with bf16. Rates are per second, shares those of them that are reached.

    `launch_seconds` is what a layer takes whose work is next to nothing. Up to `near_ranks` ranks are linked with
    `near_link`, more with `far_link`, in bytes that one rank receives. A parameter in training takes `state_bytes`:
    weight, gradient and Adam's two moments in fp32.
    """

    flops: float = 989e12
    share_of_flops: float = 0.4
    bandwidth: float = 3.35e12
    share_of_bandwidth: float = 0.7
    memory: float = 80e9
    launch_seconds: float = 3e-4
    near_ranks: int = 8
    near_link: float = 300e9
    far_link: float = 40e9
    number_bytes: int = 2
    state_bytes: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """What each rank's forwards are made of, all [ranks, steps]: tokens, pairs in attention, positions read."""

    tokens: Floats
    pairs: Floats
    reads: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWork:
    """A pool: its distinct prompts' tokens and pairs, and by request the tokens of prompt and reply."""

    prompt_tokens: int
    prompt_pairs: float
    prompts: tuple[int, ...]
    replies: tuple[int, ...]
    num_rows: int
    tokens_per_batch: int


def forward_flops(shape: Shape, tokens: Any, pairs: Any, reads: Any) -> Any:
    """Operations of forwards: two for a token and a parameter of the layers, four for a pair and a value of a head."""
    linear = 2.0 * shape.num_layers * shape.layer_parameters * tokens
    return linear + 4.0 * shape.num_layers * shape.width * pairs + 2.0 * shape.vocabulary * shape.width * reads


def forward_seconds(shape: Shape, device: Device, tokens: Any, pairs: Any, reads: Any) -> Any:
    """Seconds of forwards: of their operations, or to read the weights, or to start the kernels, whatever is most."""
    compute = forward_flops(shape, tokens, pairs, reads) / (device.flops * device.share_of_flops)
    return np.maximum(compute, max(weights_seconds(shape, device), shape.num_layers * device.launch_seconds))


def weights_seconds(shape: Shape, device: Device) -> float:
    """Seconds to read all weights from the GPU's own memory."""
    return shape.parameters * device.number_bytes / (device.bandwidth * device.share_of_bandwidth)


def gather_seconds(shape: Shape, device: Device, num_sharing: int) -> float:
    """Seconds in which a rank gets all weights from those that share them, as under FSDP in every forward."""
    link = device.near_link if num_sharing <= device.near_ranks else device.far_link
    return shape.parameters * device.number_bytes * (num_sharing - 1) / num_sharing / link


def break_even_tokens(shape: Shape, device: Device, num_sharing: int) -> float:
    """Tokens of a forward that take as long as getting the weights for it; below it the links are what takes time."""
    per_token = forward_flops(shape, 1, 0, 0) / (device.flops * device.share_of_flops)
    return gather_seconds(shape, device, num_sharing) / per_token


def scoring_seconds(forwards: Forwards, shape: Shape, device: Device, num_sharing: int = 1) -> tuple[float, float]:
    """Seconds of all steps, of which each takes as long as its slowest rank, and the share of them that is waiting."""
    if not forwards.tokens.size:
        return 0.0, 0.0
    seconds = forward_seconds(shape, device, forwards.tokens, forwards.pairs, forwards.reads)
    seconds = np.maximum(seconds, gather_seconds(shape, device, num_sharing))
    whole = float(seconds.max(axis=0).sum())
    return whole, max(0.0, 1 - float(seconds.mean(axis=0).sum()) / whole)


def num_steps(replies: Sequence[int], num_rows: int) -> int:
    """Steps until the last reply is written, where each begins as soon as one of `num_rows` rows is free."""
    ends = [0] * num_rows
    for length in replies:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def num_entries(num_requests: int, num_rows: int, entering_share: int = 8) -> int:
    """Forwards of prompts: the first fills all rows, later ones wait until a share of them is free."""
    return 1 + math.ceil(max(0, num_requests - num_rows) / max(1, num_rows // entering_share))


def pool_seconds(pool: PoolWork, shape: Shape, device: Device, num_sharing: int = 1) -> tuple[float, int, float]:
    """Seconds of a pool, its forwards, and the rows that a step has on average.

    A step reads the weights once, and the keys and values of its rows as wide as the pool's widest. With the weights
    shared out to `num_sharing` ranks they come over the links in every forward.
    """
    steps = num_steps(pool.replies, pool.num_rows)
    rows = sum(pool.replies) / max(steps, 1)
    columns = max(map(sum, zip(pool.prompts, pool.replies, strict=True)), default=0)
    entries = max(num_entries(len(pool.prompts), pool.num_rows), math.ceil(pool.prompt_tokens / pool.tokens_per_batch))
    memory = rows * columns * shape.cached_per_token * device.number_bytes
    step = max(
        weights_seconds(shape, device) + memory / (device.bandwidth * device.share_of_bandwidth),
        float(forward_seconds(shape, device, rows, rows * columns, rows)),
    )
    entry = float(
        forward_seconds(shape, device, pool.prompt_tokens / entries, pool.prompt_pairs / entries, rows / entries)
    )
    gather = gather_seconds(shape, device, num_sharing)
    return steps * max(step, gather) + entries * max(entry, gather), steps + entries, rows


def replies_seconds(
    ranks: Sequence[Sequence[PoolWork]], shape: Shape, device: Device, num_sharing: int = 1
) -> tuple[float, float]:
    """Seconds of all pools of all ranks, which wait for each other after each, and the share that is waiting."""
    if not ranks[0]:
        return 0.0, 0.0

    def seconds_of(pool: PoolWork) -> float:
        return pool_seconds(pool, shape, device, num_sharing)[0] if pool.prompts else 0.0

    seconds = np.array([[seconds_of(pool) for pool in mine] for mine in ranks])
    whole = float(seconds.max(axis=0).sum())
    return whole, max(0.0, 1 - float(seconds.mean(axis=0).sum()) / whole)


def free_bytes(shape: Shape, device: Device, num_sharing: int = 1) -> float:
    """Memory that training leaves to an evaluation; below nothing where the model does not fit.

    Ranks that share the weights have a part of the state each, and in a forward the weights of two layers, the
    embeddings and the output layer besides.
    """
    state = shape.parameters * device.state_bytes / num_sharing
    gathered = 2 * shape.layer_parameters + 2 * shape.vocabulary * shape.width if num_sharing > 1 else 0
    return device.memory - state - gathered * device.number_bytes
