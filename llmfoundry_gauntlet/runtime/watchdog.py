"""End a job whose evaluation makes no progress, with the stacks of all ranks, instead of letting it hang."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from llmfoundry_gauntlet.runtime.distributed import count, global_rank, repeated, world_size

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # at most
GRACE_SECONDS = 20.0  # for all ranks to log their stacks
BACKSTOP_SECONDS = 60.0  # after this much longer faulthandler ends a process whose threads cannot run
STATUS = 3  # exit status
STDERR = 2  # file descriptor, as sys.stderr may be replaced


@contextlib.contextmanager
def watchdog(seconds: float, progress: Callable[[], object], doing: Callable[[], str]) -> Iterator[None]:
    """Watch one evaluation on this rank until the context ends.

    If `progress()` does not change on any rank for `seconds`, each rank logs what it is `doing` and the stack of every
    thread, and exits. If a thread never releases the GIL, `faulthandler` prints the stacks and exits; its only timer is
    in use. Time during which the process is suspended does not count.
    """
    pause = min(POLL_SECONDS, seconds / 5)
    own_progress, progress_of_ranks = progress(), 0
    idle_seconds = 0.0

    def check() -> None:
        nonlocal own_progress, progress_of_ranks, idle_seconds
        exit_after(seconds + BACKSTOP_SECONDS)
        earlier = own_progress, progress_of_ranks
        own_progress = progress()
        progress_of_ranks = count('progress', int(own_progress != earlier[0]))
        has_moved = (own_progress, progress_of_ranks) != earlier
        idle_seconds = 0.0 if has_moved else idle_seconds + pause
        if idle_seconds >= seconds:
            end_stalled(seconds, doing)

    exit_after(seconds + BACKSTOP_SECONDS)
    try:
        with repeated(check, pause, 'gauntlet-watchdog'):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def end_stalled(seconds: float, doing: Callable[[], str]) -> None:
    """Log where this rank hangs, wait until all ranks have done so, and exit."""
    exit_after(BACKSTOP_SECONDS)  # the thread that hangs may hold a lock that logging needs
    log.error(
        'gauntlet: rank %d: no progress for %g s (stall_seconds); at %s\n%s',
        global_rank(),
        seconds,
        doing(),
        stacks(),
    )
    end = time.monotonic() + GRACE_SECONDS
    num_stalled = count('stalled', 1)
    while 0 < num_stalled < world_size() and time.monotonic() < end:
        time.sleep(0.1)
        num_stalled = count('stalled', 0)
    if num_stalled and global_rank() == 0:  # its process serves the store
        time.sleep(1)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(STATUS)


def exit_after(seconds: float) -> None:
    """Make `faulthandler` print all stacks and exit after this time, unless it is called again or cancelled before."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def check_timeout(stall_seconds: float) -> None:
    """Warn if collectives time out before the watchdog does."""
    timeout = None
    if world_size() > 1:
        with contextlib.suppress(AttributeError, RuntimeError):  # no warning if it is gone
            # Private in torch 2.7: `_timeout` in docs/compatibility.md.
            group = torch.distributed.group.WORLD
            device = torch.device('cuda' if torch.distributed.get_backend() == 'nccl' else 'cpu')
            timeout = group._get_backend(device).options._timeout.total_seconds()  # type: ignore[union-attr]
    if timeout is not None and timeout <= stall_seconds:
        log.warning(
            'stall_seconds is %g, but collectives time out after %g s and end the job first, without saying where it '
            'hung; give Trainer(dist_timeout=...) more than that, or a smaller stall_seconds',
            stall_seconds,
            timeout,
        )


def stacks() -> str:
    """Return the stacks of all other threads of this process, the main thread's first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    parts = [
        f'thread {thread.name}:\n{"".join(traceback.format_stack(frames[thread.ident]))}'
        for thread in threads
        if thread.ident in frames and thread is not threading.current_thread()
    ]
    return '\n'.join(parts)
