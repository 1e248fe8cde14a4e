"""A transformers model's eager attention, in place of the implementation that the model was loaded with.

transformers 4.51 to 4.53 select the implementation in three ways: by configuration at every call, by flags that
attention modules take from the configuration when they are constructed, and by the class of these modules. All are
replaced together, as each family's masks are made for one implementation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

EAGER = 'eager'
FLAGS = ('_use_sdpa', '_use_flash_attention_2')

Change = tuple[Any, str, Any]  # an object, the name of an attribute, and its temporary value


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


def eager_changes(model: torch.nn.Module) -> list[Change]:
    """Return what makes a model use eager attention; empty if it does already, or if it cannot be switched."""
    configs: dict[int, Any] = {}
    by_class: list[Change] = []
    flags: list[Change] = []
    for module in model.modules():
        if hasattr(own := vars(module).get('config'), '_attn_implementation'):
            configs[id(own)] = own
        if (eager := eager_class(module)) is not None:
            by_class.append((module, '__class__', eager))
        flags += [(module, name, False) for name in FLAGS if vars(module).get(name) is True]
        if vars(module).get('_attn_implementation', EAGER) != EAGER:
            flags.append((module, '_attn_implementation', EAGER))
    by_config = [
        (config, '_attn_implementation', EAGER) for config in configs.values() if config._attn_implementation != EAGER
    ]
    can_switch = bool(by_class or flags) or getattr(model, '_supports_attention_backend', False)
    return [*by_config, *flags, *by_class] if by_config and can_switch else []


def eager_class(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """Return the eager class of an attention module of another class, by the table in its module of transformers."""
    for name, table in vars(sys.modules[type(module).__module__]).items():
        if name.endswith('ATTENTION_CLASSES') and EAGER in table:
            found: type[torch.nn.Module] = table[EAGER]
            return found if type(module) in table.values() and type(module) is not found else None
    return None
