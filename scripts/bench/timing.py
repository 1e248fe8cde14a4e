"""Measure the seconds of a run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Timing(NamedTuple):
    """Seconds of one run, and what it predicts per row.

    That is the chosen index, 1 or 0 for language_modeling, or the text of a generation.
    """

    wall_seconds: float
    cpu_seconds: float
    predictions: list[Any]


def measure(run: Callable[[], Any], device: str = 'cpu') -> tuple[float, float, Any]:
    """Wall seconds, processor seconds of this process with all its threads, and the result of one call."""
    gc.collect()
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu, result


def synchronize(device: str) -> None:
    """Waits until a GPU has done what it was given."""
    if device == 'cuda':
        import torch

        torch.cuda.synchronize()
