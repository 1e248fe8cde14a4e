"""Where programs are judged: a few at a time, while the model writes others."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor


@functools.cache
def workers() -> ThreadPoolExecutor:
    """Threads that each see to one program, as many as there are processors for this rank.

    They live as long as the process: a sandbox dies with the thread that started it.
    """
    num_ranks = int(os.environ.get('LOCAL_WORLD_SIZE', '1'))
    count = max(1, len(os.sched_getaffinity(0)) // max(1, num_ranks))
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix='program')
