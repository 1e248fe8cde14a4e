"""Find the trainer that runs a callback: those of Composer and Hugging Face give it their state, not themselves."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

Caller = TypeVar('Caller')


def caller(kind: type[Caller], is_wanted: Callable[[Caller], Any]) -> Caller:
    """Return the object of a class, one of whose methods has called this, perhaps through others.

    Raise RuntimeError if no such method is on the stack.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        owner = frame.f_locals.get('self')
        if isinstance(owner, kind) and is_wanted(owner):
            return owner
    raise RuntimeError(f'no {kind.__name__} with this state is running')
