"""A pool of threads that run programs while the model generates more."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar('Result')
_num_programs_run = 0
_lock = threading.Lock()


@functools.cache
def workers() -> ThreadPoolExecutor:
    """Return threads that each run one program, as many as there are processors for this rank.

    They live as long as the process: a sandbox dies with the thread that started it.
    """
    num_ranks = int(os.environ.get('LOCAL_WORLD_SIZE', '1'))
    count = max(1, len(os.sched_getaffinity(0)) // max(1, num_ranks))
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix='program')


def submit(run: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Run a program on one of the workers."""
    future = workers().submit(run, *arguments)
    future.add_done_callback(_count)
    return future


def _count(_: Future[Any]) -> None:
    global _num_programs_run
    with _lock:
        _num_programs_run += 1


def num_programs_run() -> int:
    """Return the number of programs that were run in this process."""
    return _num_programs_run
