"""Watch the progress of an evaluation: report it, and end a job without any instead of letting it hang.

The report is a bar on a terminal, else a log line every 30 seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from composer.utils import dist
from torch.distributed import DistError
from tqdm import tqdm

log = logging.getLogger(__name__)

LINE_SECONDS = 30.0
BAR_SECONDS = 0.5
NUM_TASK = 40  # characters shown of a task's name

# Of the watchdog.
POLL_SECONDS = 2.0  # at most
MEETING_SECONDS = 0.05
GRACE_SECONDS = 20.0  # for all ranks to log their stacks
BACKSTOP_SECONDS = 60.0  # after this much longer faulthandler ends a process whose threads cannot run
STATUS = 3  # exit status
STDERR = 2  # file descriptor, as sys.stderr may be replaced
MEETINGS = itertools.count(1)


@dataclass(slots=True)
class Work:
    """The work of an evaluation and this rank's progress; all 0 before the plan is made.

    `num_items` counts the items of all ranks, `num_own` and `num_done` this rank's, `num_steps` its steps as far as
    known. Costs are this rank's, in tokens. Ranks run steps of similar cost at the same time, so this rank's progress
    represents that of all.
    """

    num_steps: int = 0
    num_items: int = 0
    num_own: int = 0
    num_done: int = 0
    cost: float = 0.0
    cost_done: float = 0.0
    task: str = ''  # of the current step

    def add(self, num_items: int, num_own: int, cost: float) -> None:
        """Add planned work."""
        self.num_items += num_items
        self.num_own += num_own
        self.cost += cost

    @property
    def share(self) -> float:
        """Return the fraction of work done, 0 to 1."""
        return min(1.0, self.cost_done / self.cost) if self.cost else 0.0

    @property
    def num_finished(self) -> int:
        """Return the estimated number of finished items on all ranks."""
        return round(self.num_items * self.num_done / self.num_own) if self.num_own else 0


@contextlib.contextmanager
def repeated(work: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Call a function at this interval in seconds, in a thread of this name, until the context ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def progress_report(
    title: str, work: Callable[[], Work], *, stream: TextIO | None = None, line_seconds: float = LINE_SECONDS
) -> Iterator[None]:
    """Report the progress of an evaluation, the current state of which `work` returns, until the context ends.

    On a terminal draw a bar and remove it at the end; elsewhere log a line every `line_seconds`.
    """
    started, stream = time.monotonic(), stream or sys.stderr
    if not is_terminal(stream):

        def write_line() -> None:
            described = describe(work(), time.monotonic() - started)
            log.info('%s: %.0f%%, %s', title, 100 * work().share, described)

        with repeated(write_line, line_seconds, 'gauntlet-progress'):
            yield
        return
    layout = '{desc} {percentage:3.0f}%|{bar}|{postfix}'
    with tqdm(total=100, desc=title, bar_format=layout, leave=False, file=stream) as bar:

        def draw() -> None:
            bar.n = 100 * work().share
            bar.set_postfix_str(describe(work(), time.monotonic() - started))

        with repeated(draw, BAR_SECONDS, 'gauntlet-progress'):
            yield


def is_terminal(stream: TextIO) -> bool:
    """Return whether a bar can be drawn; on a terminal without a size, as in some containers, tqdm draws nothing."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def describe(work: Work, seconds: float) -> str:
    """Describe the progress of work begun `seconds` ago and the estimated time left."""
    if not work.cost:
        return 'probing the model'
    parts = [f'{work.num_finished} of {work.num_items} items']
    if work.cost_done and seconds:
        parts.append(f'{work.num_finished / seconds:.3g} items/s')
    if work.cost_done and work.share < 1:
        parts.append(f'{tqdm.format_interval(seconds * (1 - work.share) / work.share)} left')
    if work.task:
        parts.append(work.task if len(work.task) <= NUM_TASK else f'{work.task[: NUM_TASK - 3]}...')
    return ', '.join(parts)


@contextlib.contextmanager
def watchdog(seconds: float, progress: Callable[[], object], doing: Callable[[], str]) -> Iterator[None]:
    """Watch one evaluation on this rank until the context ends.

    If `progress()` does not change on any rank for `seconds`, each rank logs what it is `doing` and the stack of every
    thread, and exits. If a thread never releases the GIL, `faulthandler` prints the stacks and exits; its only timer is
    in use. Time during which the process is suspended does not count.
    """
    pause = min(POLL_SECONDS, seconds / 5)
    seen, idle = (progress(), 0), 0.0

    def check() -> None:
        nonlocal seen, idle
        exit_after(seconds + BACKSTOP_SECONDS)
        before, mine = seen, progress()
        seen = mine, count('progress', int(mine != before[0]))
        idle = idle + pause if seen == before else 0.0
        if idle >= seconds:
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
        dist.get_global_rank(),
        seconds,
        doing(),
        stacks(),
    )
    end = time.monotonic() + GRACE_SECONDS
    seen = count('stalled', 1)
    while 0 < seen < dist.get_world_size() and time.monotonic() < end:
        time.sleep(0.1)
        seen = count('stalled', 0)
    if seen and dist.get_global_rank() == 0:  # its process serves the store
        time.sleep(1)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(STATUS)


def exit_after(seconds: float) -> None:
    """Make `faulthandler` print all stacks and exit after this time, unless it is called again or cancelled before."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def meet() -> None:
    """Wait for all ranks, however long it takes; a barrier alone would end the job at the timeout of collectives."""
    wanted = dist.get_world_size() * next(MEETINGS)
    here = count('meetings', 1)
    while 0 < here < wanted:
        time.sleep(MEETING_SECONDS)
        here = count('meetings', 0)
    dist.barrier()


def count(name: str, more: int) -> int:
    """Add to a counter shared by all ranks and return it; 0 with a single rank or without a shared store."""
    store = shared_store()
    with contextlib.suppress(DistError, RuntimeError):  # raised once rank 0 has exited
        if store is not None:  # torchrun may restart a job with the same store
            return int(store.add(f'gauntlet_{name}_{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}', more))
    return 0


@functools.cache
def shared_store() -> Any:
    """Return a new connection to the TCPStore of all ranks; None with a single rank or without such a store.

    The thread that hangs may be using torch's own connection.
    """
    host, port = os.environ.get('MASTER_ADDR'), os.environ.get('MASTER_PORT')
    if dist.get_world_size() == 1 or not host or not port:
        return None
    try:
        timeout = datetime.timedelta(seconds=GRACE_SECONDS)
        return torch.distributed.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    except (DistError, RuntimeError, ValueError) as error:
        log.warning('stall_seconds: each rank watches itself alone, as there is no store of all ranks: %s', error)
        return None


def check_timeout(stall_seconds: float) -> None:
    """Warn if collectives time out before the watchdog does."""
    timeout = None
    if dist.get_world_size() > 1:
        with contextlib.suppress(AttributeError, RuntimeError):  # private API of torch 2.7; no warning if it is gone
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
