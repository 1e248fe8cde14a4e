"""Rotary embeddings whose frequencies depend on a length: longrope and dynamic NTK. Imports no torch.

transformers 4.51 to 4.53 use the longest row of a forward, and dynamic NTK keeps the longest seen so far. So that no
score depends on other items, each forward is told which length to use (docs/compatibility.md: `inv_freq`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llmfoundry_gauntlet.types import GenerateRequest, ScoreRequest

AnyRequest = TypeVar('AnyRequest', ScoreRequest, GenerateRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryLengths:
    """The dependence of a model's rotary frequencies on a length.

    Up to `base` tokens all rows have the same frequencies. Beyond, each length has its own if the model
    `scales_by_length` (dynamic NTK), else all share a second set (longrope). `padded_to` is, by task, the length to
    which llm-foundry pads scored rows.
    """

    base: int
    scales_by_length: bool
    padded_to: Mapping[str, int] = field(default_factory=dict)

    def of(self, request: ScoreRequest | GenerateRequest) -> int:
        """Return the length that sets the frequencies of a request, equal for requests with equal frequencies.

        It is that of the longest row: a context with its whole continuation, or a prompt with its longest generation.
        """
        if isinstance(request, GenerateRequest):
            length = request.length
        else:
            rows = zip(request.contexts, request.continuations, strict=True)
            longest = max(len(context) + len(continuation) for context, continuation in rows)
            length = max(longest, self.padded_to.get(request.key.task, 0))
        if length <= self.base:
            return self.base
        return length if self.scales_by_length else self.base + 1

    def groups(self, requests: Iterable[AnyRequest]) -> list[tuple[int, list[AnyRequest]]]:
        """Group requests with equal frequencies, each group with its length, the longest first."""
        by_length: dict[int, list[AnyRequest]] = {}
        for request in requests:
            by_length.setdefault(self.of(request), []).append(request)
        return [(length, by_length[length]) for length in sorted(by_length, reverse=True)]


@contextmanager
def rotary_length(model: Any, length: int) -> Iterator[None]:
    """Make rotary embeddings act as in a forward whose longest row has this length, until the context ends."""
    embeddings = [module for module in model.modules() if is_rotary_embedding(module)]
    # Whole copies, as a forward may set any attribute or buffer.
    before = [(dict(module.__dict__), dict(module._buffers)) for module in embeddings]
    try:
        for module in embeddings:
            reset_length(module)
            module.__dict__['forward'] = at_length(module.forward, length)
        yield
    finally:
        for module, (attributes, buffers) in zip(embeddings, before, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def is_rotary_embedding(module: Any) -> bool:
    """Return whether a module is a rotary embedding of transformers, which takes position ids."""
    return hasattr(module, 'inv_freq') and 'position_ids' in inspect.signature(module.forward).parameters


def reset_length(module: Any) -> None:
    """Reset dynamic NTK to its original length, which it does by itself only for shorter rows."""
    original = getattr(module, 'original_max_seq_len', None)
    if original is not None and module.max_seq_len_cached > original:
        module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
        module.max_seq_len_cached = original


def at_length(forward: Callable[[Any, Any], tuple[Any, Any]], length: int) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a rotary embedding's forward with one more position, the last of a row of this length."""

    def longer(x: Any, position_ids: Any) -> tuple[Any, Any]:
        *rows, num_positions = position_ids.shape
        extended = position_ids.new_full((*rows, num_positions + 1), length - 1)
        extended[..., :-1] = position_ids
        cos, sin = forward(x, extended)
        # Without the values of the added position, of which only the length was wanted.
        return cos[..., :-1, :], sin[..., :-1, :]

    return longer
