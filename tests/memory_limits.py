"""Memory: the peak of some work on a CPU, and models that run out of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object], path: Path) -> int:
    """Return the peak memory that `run` allocates on the CPU, by the profiler's record, which is written to a file."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    recorded.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())['traceEvents'] if event['name'] == '[memory]']
    in_order = sorted(events, key=lambda event: event['ts'])
    allocated = np.cumsum([event['args']['Bytes'] for event in in_order])
    return int(allocated.max())


def limit_tokens(model: Any, most: int) -> list[int]:
    """Make a model run out of memory above some number of tokens; return the sizes it was given."""
    sizes: list[int] = []

    def fail(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes.append(kwargs['input_ids'].numel())
        if sizes[-1] > most:
            raise torch.OutOfMemoryError(f'{sizes[-1]} tokens')

    model.register_forward_pre_hook(fail, with_kwargs=True)
    return sizes


def limit_rows(model: Any, most: int, after: int = 0) -> list[int]:
    """Make a model run out of memory with more rows after some forwards; return the numbers of rows it was given."""
    sizes: list[int] = []

    def fail(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes.append(len(kwargs['input_ids']))
        if sizes[-1] > most and len(sizes) > after:
            raise torch.OutOfMemoryError(f'{sizes[-1]} rows')

    model.register_forward_pre_hook(fail, with_kwargs=True)
    return sizes
