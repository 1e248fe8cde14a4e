"""Rotary embeddings whose frequencies depend on a length: longrope and dynamic NTK.

transformers 4.51 to 4.53 take the longest row of a forward, and dynamic NTK then keeps the longest that it has seen. So
that no score depends on what else is run, a forward is given the length that decides (`RotaryLengths`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

CosSin = tuple[torch.Tensor, torch.Tensor]


@contextmanager
def rotary_length(model: torch.nn.Module, length: int) -> Iterator[None]:
    """Have rotary embeddings act as in a forward whose longest row has this length; then leave them as they were."""
    modules = [module for module in model.modules() if is_rotary(module)]
    before = [(dict(module.__dict__), dict(module._buffers)) for module in modules]
    try:
        for module in modules:
            forget_lengths(module)
            module.__dict__['forward'] = at_length(module.forward, length)
        yield
    finally:
        for module, (attributes, buffers) in zip(modules, before, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def is_rotary(module: torch.nn.Module) -> bool:
    """Return whether a module makes rotary embeddings of positions."""
    return hasattr(module, 'inv_freq') and 'position_ids' in inspect.signature(module.forward).parameters


def forget_lengths(module: Any) -> None:
    """Undo what dynamic NTK keeps of longer rows: it resets itself at shorter rows alone."""
    original = getattr(module, 'original_max_seq_len', None)
    if original is not None and module.max_seq_len_cached > original:
        module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
        module.max_seq_len_cached = original


def at_length(forward: Callable[..., CosSin], length: int) -> Callable[..., CosSin]:
    """Return a rotary embedding's forward that sees one more position, the last of this length."""

    def longer(x: torch.Tensor, position_ids: torch.Tensor) -> CosSin:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
        cos, sin = forward(x, torch.cat([position_ids, last], dim=-1))
        return cos[..., :-1, :], sin[..., :-1, :]

    return longer
