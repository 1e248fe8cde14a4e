"""Kernels, waits and idle time of a piece of work, from torch's profiler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu_check.counts import COPIES, waits_of
from gpu_check.options import Options

MOST_SHOWN = 10  # kernels, those that take the most time
LONGEST_NAME = 70
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The seconds and the numbers of the kernels of some work, by their names; copies are among the seconds alone.

    On a CPU operators take the place of kernels.
    """

    seconds: Counter[str]
    numbers: Counter[str]

    @property
    def longest(self) -> str:
        """Return the kernels that take the most time, with their shares of it and their numbers."""
        whole = self.seconds.total()
        shown = []
        for name, seconds in self.seconds.most_common(MOST_SHOWN):
            shown.append(f'{seconds / whole:.1%} {name[:LONGEST_NAME]} ({self.numbers[name]})')
        return '; '.join(shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One run of some work: its wall seconds without the profiler, its kernels, and its waits outside of models."""

    wall_seconds: float
    kernels: Kernels
    num_waits: int

    @property
    def num_kernels(self) -> int:
        """Return the number of kernels, without copies."""
        return sum(number for name, number in self.kernels.numbers.items() if not name.startswith(COPIES))

    @property
    def idle_share(self) -> float:
        """Return the share of the wall time in which the device runs nothing."""
        return max(0.0, 1 - self.kernels.seconds.total() / self.wall_seconds)


def seconds_of(run: Callable[[], Any], options: Options) -> float:
    """Return the wall seconds of one run, until the device is done."""
    synchronize(options)
    started = time.perf_counter()
    run()
    synchronize(options)
    return time.perf_counter() - started


def synchronize(options: Options) -> None:
    """Wait for the device."""
    if not options.is_cpu:
        torch.cuda.synchronize()


def profiled(run: Callable[[], Any], options: Options) -> Profile:
    """Run some work once for what is prepared, a few times for its seconds, and once more for each count."""
    run()
    wall_seconds = median(seconds_of(run, options) for _ in range(ROUNDS))
    activities = [ProfilerActivity.CPU]
    num_waits = 0
    if not options.is_cpu:
        activities.append(ProfilerActivity.CUDA)
        num_waits = waits_of(run).total()
    with profile(activities=activities) as recorded:
        run()
        synchronize(options)
    return Profile(
        wall_seconds=wall_seconds,
        kernels=kernels_of(recorded.events(), is_cpu=options.is_cpu),
        num_waits=num_waits,
    )


def kernels_of(events: Iterable[Any], *, is_cpu: bool) -> Kernels:
    """Return the kernels among the profiler's events."""
    seconds: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for event in events:
        if is_cpu:
            is_counted = event.name.startswith('aten::')
            microseconds = event.self_cpu_time_total
        else:
            is_counted = event.device_type == DeviceType.CUDA and not event.is_user_annotation
            microseconds = event.self_device_time_total
        if is_counted:
            seconds[event.name] += microseconds / 1e6
            numbers[event.name] += 1
    return Kernels(seconds=seconds, numbers=numbers)
