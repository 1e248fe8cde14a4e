"""Compute log-probabilities and next tokens from logits that exist only at the positions that are read.

Within `reading` the model's output layer receives the hidden states of those positions only, CHUNK at a time, and each
chunk of logits is reduced before the next is computed: no [batch, length, vocabulary] tensor exists. A scale or cap
that the model applies to its logits afterwards is determined by the probe (`tail_of`) and applied to each chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from llmfoundry_gauntlet.engine.attention import changed, to_device
from llmfoundry_gauntlet.tasks.base import draw_seed
from llmfoundry_gauntlet.types import Bools, Floats, GenerateRequest, Ids, Ints, Sampling

CHUNK = 512  # positions at a time, fewer where the vocabulary is large
CHUNK_ELEMENTS = 512 * 32768  # logits at a time
BLOCK = {'cpu': 32, 'cuda': CHUNK}  # positions reduced at a time; on a CPU their logits fit into its cache

# Shapes: P = positions whose logits are read, N = scored tokens (of a position, one or more), V = vocabulary.

Tail = Callable[[torch.Tensor], torch.Tensor]


class LogitReader:
    """Reduce logits at the positions `reads`, which may repeat, to values of the `targets` that follow them.

    Logits come in the order of positions, each once; so the targets are sorted by position, and `scores` restores their
    order.
    """

    def __init__(self, reads: Ints, targets: Ids, device: torch.device) -> None:
        places, place_of_read = np.unique(reads, return_inverse=True)
        self.order = np.argsort(place_of_read, kind='stable')
        self.places = to_device(places, device)  # [P]
        self.place_of_target = place_of_read[self.order]  # [N], on the host, to find a block's targets without waiting
        self.rows = to_device(self.place_of_target, device)
        self.targets = to_device(targets[self.order].astype(np.int64), device)
        self.num_taken = 0  # positions
        self.parts: list[torch.Tensor] = []  # [3, targets] each

    @torch.no_grad()
    def take(self, logits: torch.Tensor, tail: Tail | None = None) -> None:
        """Reduce the logits of the next positions, shape [positions, V], after `tail`; float32 ones are overwritten."""
        for block in logits.split(BLOCK.get(logits.device.type, BLOCK['cpu'])):
            end = self.num_taken + len(block)
            first, last = np.searchsorted(self.place_of_target, [self.num_taken, end])
            rows = self.rows[first:last] - self.num_taken
            final = block if tail is None else tail(block)
            # In float32, as half precision has too few digits for a sum over the vocabulary.
            self.parts.append(reduce_logits(final.float(), rows, self.targets[first:last]))
            self.num_taken = end

    def take_all(self, logits: torch.Tensor) -> None:
        """Reduce the read positions of the logits of all positions, shape [all positions, V]."""
        for places in self.places.split(CHUNK):
            self.take(logits[places])

    def scores(self) -> tuple[Floats, Bools, Ints]:
        """Return the values of all scored tokens as in ScoreOutput. Raise RuntimeError unless every position was taken.

        They are log-probabilities, argmax flags, and numbers of entries that share the highest logit, shape [N] each.
        """
        if self.num_taken != len(self.places):
            raise RuntimeError(f'logits of {self.num_taken} positions were made, {len(self.places)} are read')
        values = torch.cat(self.parts, dim=1).cpu().numpy()  # one copy from the device for all
        in_order = np.empty_like(values)
        in_order[:, self.order] = values
        logprobs, is_argmax, num_top = in_order
        return logprobs.astype(np.float64), is_argmax > 0, num_top.astype(np.int64)


def logits_of(outputs: Any) -> torch.Tensor:
    """Return the logits in a model's outputs; they come first in a tuple (`return_dict: false`, `torchscript`)."""
    logits: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs.logits
    return logits


def reduce_logits(logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each target's log-probability, argmax flag and number of tied top entries, float32 [3, tokens].

    `rows` are the targets' rows in the logits, float32 [positions, V], which are overwritten.
    """
    top, argmax = logits.max(dim=1)
    below_top = logits[rows, targets] - top[rows]
    is_top = below_top == 0

    # Ties are counted only for targets that are at the top. On a GPU that would make the host wait for their indices,
    # so there they are counted for all.
    if logits.is_cuda:
        num_top = (logits == top[:, None]).sum(dim=1)[rows] * is_top
    else:
        num_top = torch.zeros_like(rows)
        top_rows = rows[is_top]
        num_top[is_top] = (logits[top_rows] == top[top_rows, None]).sum(dim=1)

    # Relative to the top, which is never added again: that would round a second time.
    logsumexp = logits.sub_(top[:, None]).exp_().sum(dim=1).log_()
    return torch.stack([below_top - logsumexp[rows], argmax[rows] == targets, num_top])


def output_layer(model: Any) -> torch.nn.Linear | torch.nn.Embedding | None:
    """Return the model's output layer, unwrapped from FSDP; None if unknown.

    It is a linear layer or, with tied weights in llm-foundry, the embedding called with a second argument.
    """
    if not hasattr(model, 'get_output_embeddings'):
        return None
    layer: Any = model.get_output_embeddings()
    while hasattr(layer, '_fsdp_wrapped_module'):
        layer = layer._fsdp_wrapped_module
    if isinstance(layer, torch.nn.Linear):
        return layer
    if isinstance(layer, torch.nn.Embedding) and 'unembed' in inspect.signature(layer.forward).parameters:
        return layer
    return None


def makes_logits(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> bool:
    """Return whether a call of the output layer computes logits and not embeddings."""
    return isinstance(layer, torch.nn.Linear) or len(arguments) > 1


@contextmanager
def reading(layer: torch.nn.Linear | torch.nn.Embedding, reader: LogitReader, tail: Tail) -> Iterator[None]:
    """Make the output layer pass its logits to the reader and return a dummy tensor, until the context ends."""
    forward = layer.forward
    # Not the shape of the weights, of which a sharded layer has a part.
    vocabulary = layer.out_features if isinstance(layer, torch.nn.Linear) else layer.num_embeddings
    chunk = max(1, min(CHUNK, CHUNK_ELEMENTS // vocabulary))

    def read(hidden: torch.Tensor, *more: Any) -> torch.Tensor:
        if not makes_logits(layer, (hidden, *more)):
            return forward(hidden)
        states = hidden.reshape(-1, hidden.shape[-1])[reader.places]
        # No name keeps a chunk of logits while the next one is made.
        for start in range(0, len(states), chunk):
            reader.take(forward(states[start : start + chunk], *more), tail)
        return hidden.new_zeros(1, 1, 1)

    with changed([(layer, 'forward', read)]):
        yield


@contextmanager
def picking(
    layer: torch.nn.Module | None, pick: Callable[[torch.Tensor], torch.Tensor], *, copies: bool = False
) -> Iterator[list[torch.Tensor]]:
    """Make the output layer compute only the logits of the hidden states that `pick` selects; yield a list of them.

    With `copies` they are cloned, as llm-foundry's MPT scales its logits in place.
    """
    made: list[torch.Tensor] = []
    if layer is None:
        yield made
        return

    def before(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (pick(inputs[0]), *inputs[1:]) if makes_logits(layer, inputs) else inputs

    def after(_: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        if makes_logits(layer, inputs):
            made.append(output.clone() if copies else output)

    hooks = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()


def tail_of(config: Any, raw: torch.Tensor, final: torch.Tensor) -> Tail | None:
    """Return the function that maps the output layer's `raw` logits to the model's `final` ones; None if unknown."""
    if raw.shape != final.shape:
        return None
    # `unchanged` last, as a cap hardly changes small logits.
    for tail in (*tails(config), unchanged):
        if torch.allclose(tail(raw).float(), final.float(), rtol=1e-5, atol=1e-6):
            return tail
    return None


def rounding_of(logits: torch.Tensor) -> float:
    """Return the relative rounding error of the precision that logits were computed in, 0 for float32."""
    if logits.dtype != torch.float32:
        return torch.finfo(logits.dtype).eps
    if logits.device.type == 'cuda' and torch.backends.cuda.matmul.allow_tf32:
        return torch.finfo(torch.float16).eps  # TF32 has the same mantissa
    return 0.0


def unchanged(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits unchanged."""
    return logits


def tails(config: Any) -> Iterator[Tail]:
    """Yield the transformation of logits that a configuration names: a scale, then a cap."""
    config = config.get_text_config() if hasattr(config, 'get_text_config') else config
    scale = getattr(config, 'logit_scale', None) or 1.0  # Cohere, llm-foundry
    if scale == 'inv_sqrt_d_model':
        scale = config.d_model**-0.5
    scale /= getattr(config, 'logits_scaling', None) or 1.0  # Granite
    cap = getattr(config, 'final_logit_softcapping', None)  # Gemma, llm-foundry
    if cap:
        yield lambda logits: ((logits if scale == 1 else logits * scale) / cap).tanh_().mul_(cap)
    elif scale != 1:
        yield lambda logits: logits * scale


def uniform_draws(request: GenerateRequest) -> Iterator[float]:
    """Yield uniform draws in [0, 1), one for each sampled token of a generation."""
    rng = np.random.Generator(np.random.Philox(key=draw_seed(request.sampling, request.key)))
    while True:
        yield rng.random()


def next_tokens(logits: torch.Tensor, samplings: Sequence[Sampling], draws: Sequence[float | None]) -> list[int]:
    """Return the next token of each row of logits, float32 [rows, V]: sampled with its uniform draw, greedy if None."""
    chosen = logits.argmax(dim=-1)
    # Rows with the same settings are drawn together; their seeds are already in the draws.
    rows_of: dict[tuple[float, float, int], list[int]] = {}
    drawn = {row: draw for row, draw in enumerate(draws) if draw is not None}
    for row in drawn:
        settings = (samplings[row].temperature, samplings[row].top_p, samplings[row].top_k)
        rows_of.setdefault(settings, []).append(row)
    for rows in rows_of.values():
        places = to_device(np.array(rows), logits.device)
        chosen[places] = draw_tokens(logits[places], samplings[rows[0]], [drawn[row] for row in rows])
    tokens: list[int] = chosen.tolist()
    return tokens


def draw_tokens(logits: torch.Tensor, sampling: Sampling, draws: Sequence[float]) -> torch.Tensor:
    """Return a sampled token for each row, shape [rows]: temperature, top-k, top-p as in transformers' processors.

    Sampling inverts the cumulative distribution in float64, so that rounding in the model hardly ever changes a token.
    """
    # The candidates: [rows, V] in the order of tokens, or sorted, the most probable first.
    tokens = None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, tokens = logits.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1:
        logits, tokens = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = (logits.double() / sampling.temperature).softmax(dim=-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)

    # Scaled to the sum of what is left, so that probabilities need no second normalization.
    cumulative = probabilities.cumsum(dim=-1)
    shares = to_device(np.array(draws, dtype=np.float64), logits.device)[:, None]
    places = torch.searchsorted(cumulative, shares * cumulative[:, -1:], right=True)

    # Rounding may put a draw at the very end: never beyond the last candidate that has a probability.
    num_possible = (probabilities > 0).long().cumsum(dim=-1)
    last_possible = num_possible.argmax(dim=-1, keepdim=True)
    places = torch.minimum(places, last_possible)
    return (places if tokens is None else tokens.gather(1, places)).squeeze(1)
