"""Kernels that are launched on a GPU, and the times that the host waits for it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SYNCHRONIZES = 'called a synchronizing CUDA operation'  # in the warning of torch's debug mode
COPIES = ('Memcpy', 'Memset')  # begin the names of what runs on a GPU and is no kernel
OF_MODELS = '/transformers/'


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The number of kernels by their names, and of this package's waits by the line of code that was running."""

    kernels: Counter[str]
    waits: Counter[str]


def counted(run: Callable[[], object]) -> Counts:
    """Return what a function launches on the GPU, and where it waits for it. It runs twice, after a first time.

    What is compiled, or cached, at the first time does not count.
    """
    run()
    torch.cuda.synchronize()
    return Counts(kernels=kernels_of(run), waits=waits_of(run))


def kernels_of(run: Callable[[], object]) -> Counter[str]:
    """Return the number of kernels by their names."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    names = []
    for event in profiler.events():
        is_kernel = event.device_type == DeviceType.CUDA and not event.is_user_annotation
        if is_kernel and not event.name.startswith(COPIES):
            names.append(event.name)
    return Counter(names)


def waits_of(run: Callable[[], object]) -> Counter[str]:
    """Return the number of waits by line, as torch's debug mode for synchronization sees them.

    Those inside of transformers' models do not count.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        torch.cuda.set_sync_debug_mode('warn')
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    lines = []
    for warning in caught:
        if SYNCHRONIZES in str(warning.message) and OF_MODELS not in warning.filename:
            lines.append(f'{Path(warning.filename).name}:{warning.lineno}')
    return Counter(lines)
