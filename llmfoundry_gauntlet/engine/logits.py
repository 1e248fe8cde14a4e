"""Log-probabilities from a model's output layer, made where they are read alone and a chunk at a time.

Within `reading` the layer that makes a model's logits is given the hidden states of the positions that are read,
CHUNK of them at once, and each chunk of logits is reduced before the next is made: no tensor of [batch, length,
vocabulary] exists. What a model does with its logits after that layer, a scale or a cap, is found out by the probe
(`tail_of`) and applied to each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llmfoundry_gauntlet.types import Bools, Floats, Ids, Ints

CHUNK = 512  # positions at a time, fewer where the vocabulary is large
CHUNK_ELEMENTS = 512 * 32768  # logits at a time
BLOCK = {'cpu': 32, 'cuda': 128}  # positions reduced at a time: on a CPU their logits stay in its cache

Tail = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Values of the scored tokens, in their order. N = scored tokens."""

    logprobs: Floats  # [N], natural logarithms
    is_argmax: Bools  # [N]
    num_top: Ints  # [N]: entries that share the highest logit, 0 where the token is not among them


class LogitReader:
    """Reduces logits at positions to values of the tokens that follow. `reads` may repeat positions."""

    def __init__(self, reads: Ints, targets: Ids, device: torch.device) -> None:
        places, inverse = np.unique(reads, return_inverse=True)
        self.order = np.argsort(inverse, kind='stable')  # tokens of one position follow each other
        self.places = torch.from_numpy(places).to(device)
        self.of_place = inverse[self.order]
        self.targets = torch.from_numpy(targets[self.order].astype(np.int64)).to(device)
        self.done = 0  # positions
        self.parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def take(self, logits: torch.Tensor) -> None:
        """Reduces the logits of the next positions, shape [positions, V]; float32 ones are overwritten."""
        for block in logits.split(BLOCK.get(logits.device.type, BLOCK['cpu'])):
            first, last = np.searchsorted(self.of_place, [self.done, self.done + len(block)])
            rows = torch.from_numpy(self.of_place[first:last] - self.done).to(block.device)
            self.parts.append(reduce_logits(block.float(), rows, self.targets[first:last]))
            self.done += len(block)

    def take_all(self, logits: torch.Tensor) -> None:
        """Reduces the positions that are read out of all logits, shape [all positions, V]."""
        for places in self.places.split(CHUNK):
            self.take(logits[places])

    def scores(self) -> TokenScores:
        """The values of all scored tokens. Raises RuntimeError unless every position was taken."""
        if self.done != len(self.places):
            raise RuntimeError(f'logits of {self.done} positions were made, {len(self.places)} are read')
        logprobs, is_argmax, num_top = (torch.cat(parts).cpu().numpy() for parts in zip(*self.parts, strict=True))
        back = np.empty_like(self.order)
        back[self.order] = np.arange(len(self.order))
        return TokenScores(logprobs[back].astype(np.float64), is_argmax[back], num_top[back])


def reduce_logits(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability, argmax flag and number of entries at the top of targets in rows of logits, all [tokens].

    The logits are float32, [positions, V], and are overwritten.
    """
    top, argmax = logits.max(dim=1)
    below_top = logits[rows, targets] - top[rows]
    is_top = below_top == 0
    num_top = torch.zeros_like(rows)
    num_top[is_top] = (logits[rows[is_top]] == top[rows[is_top], None]).sum(dim=1)
    logsumexp = logits.sub_(top[:, None]).exp_().sum(dim=1).log_()  # beyond the top: adding it would round twice
    return below_top - logsumexp[rows], argmax[rows] == targets, num_top


def output_layer(model: Any) -> torch.nn.Linear | None:
    """The layer whose output the model's logits are, below any FSDP wrapper; None where there is none of its own."""
    layer: Any = getattr(model, 'get_output_embeddings', lambda: None)()
    while hasattr(layer, '_fsdp_wrapped_module'):
        layer = layer._fsdp_wrapped_module
    return layer if isinstance(layer, torch.nn.Linear) else None


@contextmanager
def reading(layer: torch.nn.Linear, reader: LogitReader, tail: Tail) -> Iterator[None]:
    """Within it the output layer hands its logits to the reader and returns next to nothing."""
    module: torch.nn.Module = layer  # whose forward may be replaced
    own_forward = layer.__dict__.get('forward')
    forward = layer.forward

    def read(hidden: torch.Tensor) -> torch.Tensor:
        picked = hidden.reshape(-1, hidden.shape[-1])[reader.places]
        size = max(1, min(CHUNK, CHUNK_ELEMENTS // layer.out_features))
        for start in range(0, len(picked), size):
            reader.take(tail(forward(picked[start : start + size])))
        return hidden.new_zeros(1, 1, 1)

    module.forward = read
    try:
        yield
    finally:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward


def tail_of(config: Any, raw: torch.Tensor, final: torch.Tensor) -> Tail | None:
    """Return the function from the output layer's `raw` logits to the model's `final` ones; None if unknown."""
    for tail in (*tails(config), same):  # a cap first: small logits do not show it
        if raw.shape == final.shape and torch.allclose(tail(raw).float(), final.float(), rtol=1e-5, atol=1e-6):
            return tail
    return None


def rounding_of(logits: torch.Tensor) -> float:
    """The relative rounding of the precision that logits were computed in, 0 for float32."""
    if logits.dtype != torch.float32:
        return torch.finfo(logits.dtype).eps
    if logits.device.type == 'cuda' and torch.backends.cuda.matmul.allow_tf32:
        return torch.finfo(torch.float16).eps  # TF32 has as many digits
    return 0.0


def same(logits: torch.Tensor) -> torch.Tensor:
    """The logits as the output layer makes them."""
    return logits


def tails(config: Any) -> Iterator[Tail]:
    """Scales and caps by the names that transformers has for them."""
    config = config.get_text_config() if hasattr(config, 'get_text_config') else config
    if scale := getattr(config, 'logit_scale', None):  # Cohere
        yield lambda logits: logits * scale
    if divisor := getattr(config, 'logits_scaling', None):  # Granite
        yield lambda logits: logits / divisor
    if cap := getattr(config, 'final_logit_softcapping', None):  # Gemma
        yield lambda logits: torch.tanh(logits / cap) * cap
