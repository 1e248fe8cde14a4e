"""Leave a model and the random states as they were before an evaluation, also after an error."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Give each module the mode that it had, of training or evaluation, when the context ends."""
    is_training = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in is_training.items():
            module.training = mode


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode until the context ends; then each has the mode that it had."""
    with modes_kept(model):
        model.eval()
        yield


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch, on the CPU and all GPUs in use, when the context ends."""
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if has_gpu else []
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if has_gpu:
            torch.cuda.set_rng_state_all(of_gpus)


@contextmanager
def autocast_casts_dropped() -> Iterator[None]:
    """Drop the weights that autocast has cast so far, and those that it casts until the context ends.

    Autocast keeps them until its outermost context ends. Those of an evaluation have no gradient, with which training
    in the same context would go on; those of training are old once its optimizer has made a step.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
