"""Contenders whose batches do not fit into the memory run smaller ones."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from gpu_check.options import Options

Result = TypeVar('Result')


def in_batches_that_fit(run: Callable[[int], Result], size: int, options: Options) -> tuple[Result, int]:
    """Return the result of `run`, and the size of its batches: half of `size` for each time that memory runs out."""
    while True:
        try:
            return run(size), size
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        # The exception, whose frames held tensors, has been freed here.
        size //= 2
        free_memory(options)


def free_memory(options: Options) -> None:
    """Return memory that nobody holds any more to the device."""
    gc.collect()
    if not options.is_cpu:
        torch.cuda.empty_cache()
