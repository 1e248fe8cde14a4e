"""End a job whose evaluation makes no progress, instead of letting it hang."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from composer.utils import dist
from torch.distributed import DistError

from llmfoundry_gauntlet.scoring.code.execution import num_programs_run

if TYPE_CHECKING:
    from llmfoundry_gauntlet.composer.loop import EvaluationLoader

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # at most
GRACE_SECONDS = 20.0  # for all ranks to log their stacks
BACKSTOP_SECONDS = 60.0  # later, faulthandler ends a process whose threads cannot run
STATUS = 3  # exit status
STDERR = 2  # file descriptor, as sys.stderr may be replaced
SHOWN_ITEMS = 3


class Watchdog:
    """Watch one evaluation on this rank, from `start` to `stop`.

    If `progress()` stays the same for `seconds`, this rank logs what it is `doing` and the stack of every thread, asks
    the other ranks to do so, and exits. If a thread never releases the GIL, `faulthandler` does so, whose only timer is
    used meanwhile. Time during which the process is suspended does not count.
    """

    def __init__(self, seconds: float, progress: Callable[[], object], doing: Callable[[], str]) -> None:
        self.seconds = seconds
        self.progress = progress
        self.doing = doing
        self.poll_seconds = min(POLL_SECONDS, seconds / 5)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name='gauntlet-watchdog', daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join(timeout=GRACE_SECONDS)
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        others = shared_store()
        last, idle = self.progress(), 0.0
        while not self._stopped.wait(self.poll_seconds):
            self._arm()
            now = self.progress()
            idle = idle + self.poll_seconds if now == last else 0.0
            last = now
            if idle >= self.seconds:
                self._end(f'no progress for {self.seconds:g} s', others)
            elif others is not None and is_told(others):
                self._end('another rank makes no progress', others)

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self.seconds + BACKSTOP_SECONDS, exit=True, file=STDERR)

    def _end(self, why: str, others: Any) -> None:
        """Log where this rank is, wait until all ranks have done so, and exit."""
        faulthandler.cancel_dump_traceback_later()
        self._arm_for_logging()
        log.error(
            'gauntlet: rank %d: %s (stall_seconds); at %s\n%s',
            dist.get_global_rank(),
            why,
            self.doing(),
            stacks(),
        )
        if others is not None:
            with contextlib.suppress(DistError, RuntimeError):
                others.set(told_key(), 'yes')
                deadline = time.monotonic() + GRACE_SECONDS
                count = others.add(f'{told_key()}_seen', 1)
                while count < dist.get_world_size() and time.monotonic() < deadline:
                    time.sleep(0.1)
                    count = others.add(f'{told_key()}_seen', 0)
                if dist.get_global_rank() == 0:  # its process serves the store
                    time.sleep(1)
        logging.shutdown()
        sys.stderr.flush()
        os._exit(STATUS)

    def _arm_for_logging(self) -> None:
        """Exit even if the thread that hangs holds a lock that logging needs."""
        faulthandler.dump_traceback_later(BACKSTOP_SECONDS, exit=True, file=STDERR)


def check_timeout(stall_seconds: float) -> None:
    """Warn if the timeout of the collectives is shorter than the watchdog's."""
    timeout = None
    if dist.get_world_size() > 1:
        with contextlib.suppress(AttributeError, RuntimeError):  # private in torch 2.7: no warning if it is gone
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


@functools.cache
def shared_store() -> Any:
    """Return a new connection to the store of all ranks; None for a single rank, or if there is no such store.

    The connection of torch itself may be in use by the thread that hangs.
    """
    host, port = os.environ.get('MASTER_ADDR'), os.environ.get('MASTER_PORT')
    if dist.get_world_size() == 1 or not host or not port:
        return None
    try:
        timeout = datetime.timedelta(seconds=GRACE_SECONDS)
        return torch.distributed.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    except (DistError, RuntimeError, ValueError) as error:
        log.warning('stall_seconds: a rank that hangs cannot notify the others: %s', error)
        return None


def told_key() -> str:
    """Return the key under which a rank says that it hangs; torchrun may restart a job with the same store."""
    return f'gauntlet_stalled_{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}'


def is_told(store: Any) -> bool:
    """Return whether a rank has said that it hangs; False if the store is gone."""
    try:
        return bool(store.check([told_key()]))
    except (DistError, RuntimeError):
        return False


def stacks() -> str:
    """Return the stack of every thread of this process, the main thread's first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    parts = [
        f'thread {thread.name}:\n{"".join(traceback.format_stack(frames[thread.ident]))}'
        for thread in threads
        if thread.ident in frames and thread is not threading.current_thread()
    ]
    return '\n'.join(parts)


def progress_of(loader: EvaluationLoader) -> tuple[int, ...]:
    """Return counters that change with any progress: steps, forwards, generated tokens, programs."""
    model, generator = loader.language_model, loader.generator
    return (
        loader.num_steps,
        0 if model is None else model.num_forwards,
        0 if generator is None else generator.usage.steps,
        num_programs_run(),
    )


def doing(loader: EvaluationLoader) -> str:
    """Return a rank's current step and its items."""
    requests = loader.requests
    if not requests:
        return f'step {loader.num_steps}, without items of its own: the plan, programs, or between two steps'
    shown = [
        f'{key.task} row {key.row}{f" of {key.file}" if key.file else ""}{f" {key.variant}" if key.variant else ""}'
        for key in (request.key for request in requests[:SHOWN_ITEMS])
    ]
    tasks = list(dict.fromkeys(request.key.task for request in requests))
    further = f' and {len(requests) - len(shown)} more' if len(requests) > len(shown) else ''
    return f'step {loader.num_steps}, {len(requests)} items of {", ".join(tasks)}: {"; ".join(shown)}{further}'
