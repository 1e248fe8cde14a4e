"""Python's garbage collector, out of the way where a great many values are made and all of them are kept."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Within it nothing looks for garbage in cycles, of which there is none; a third of the time goes there else."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
