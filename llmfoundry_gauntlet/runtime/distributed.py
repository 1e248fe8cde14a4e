"""The ranks of a job, over torch.distributed; one process without a process group is a job of one rank.

Collectives must be called by all ranks. Where a launcher has started several ranks and there is no process group, they
raise RuntimeError rather than return the answer of one rank.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed
from packaging.version import Version
from torch.distributed import DistError

from llmfoundry_gauntlet.errors import GauntletError

log = logging.getLogger(__name__)

Returned = TypeVar('Returned')
Value = TypeVar('Value')

MEETING_SECONDS = 0.05
STORE_SECONDS = 20.0  # to connect to the shared store
MEETINGS = itertools.count(1)
# Before, torch waits for the threads of gloo while it locks the interpreter, for which they may wait: for ever.
SAFE_TO_DESTROY = Version('2.8')


def has_group() -> bool:
    """Return whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def global_rank() -> int:
    """Return the rank of this process, before there is a process group that of the launcher's environment."""
    return torch.distributed.get_rank() if has_group() else int(os.environ.get('RANK', '0'))


def world_size() -> int:
    """Return the number of ranks, before there is a process group that of the launcher's environment."""
    return torch.distributed.get_world_size() if has_group() else int(os.environ.get('WORLD_SIZE', '1'))


def local_rank() -> int:
    """Return the rank of this process on its node."""
    return int(os.environ.get('LOCAL_RANK', '0'))


def local_world_size() -> int:
    """Return the number of ranks on this node."""
    return int(os.environ.get('LOCAL_WORLD_SIZE', '1'))


def initialize(device: torch.device, timeout_seconds: float) -> None:
    """Create the process group of the ranks that a launcher has started, unless there is one, or a single rank."""
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    if has_group() or world_size() == 1:
        return
    torch.distributed.init_process_group(
        'nccl' if device.type == 'cuda' else 'gloo', timeout=datetime.timedelta(seconds=timeout_seconds)
    )
    destroy_group_at_exit()


def destroy_group_at_exit() -> None:
    """Destroy a process group of gloo, whoever has created it, before the interpreter ends.

    A thread of gloo that still has tensors of the last collective then may abort the process, whose work is done
    (pytorch/pytorch#190489).
    """
    if Version(torch.__version__) >= SAFE_TO_DESTROY:
        atexit.register(destroy_group)


def destroy_group() -> None:
    """Destroy the process group if it is one of gloo: with NCCL a rank that fails would wait for the others."""
    if has_group() and torch.distributed.get_backend() == 'gloo':
        torch.distributed.destroy_process_group()


def needs_group() -> bool:
    """Return whether ranks must communicate. Raise RuntimeError if they cannot."""
    if has_group():
        return True
    if world_size() == 1:
        return False
    raise RuntimeError(
        f'the environment has WORLD_SIZE={world_size()}, but there is no process group; call '
        'torch.distributed.init_process_group first, or unset RANK and WORLD_SIZE for a single process'
    )


def barrier() -> None:
    """Wait for all ranks."""
    if needs_group():
        torch.distributed.barrier()


def gather(value: Value) -> list[Value]:
    """Return the value of every rank, in their order."""
    if not needs_group():
        return [value]
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def broadcast(value: Value) -> Value:
    """Return the value of rank 0."""
    if not needs_group():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def sum_over_ranks(tensor: torch.Tensor) -> None:
    """Replace a tensor by its sum over all ranks."""
    if needs_group():
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.SUM)


@contextmanager
def raised_on_all_ranks() -> Iterator[None]:
    """Raise an error of any rank on all ranks, which must all enter the context; of several that of the first rank.

    A GauntletError or OSError has its type and message on every rank, and its traceback on its own. Another error is
    not expected: it is raised on its own rank, and ends the others with a RuntimeError that quotes it.
    """
    own: Exception | None = None
    try:
        yield
    except (GauntletError, OSError) as error:
        own = error
    except Exception as error:  # raised once the others know, which would wait for this rank
        gather(RuntimeError(f'rank {global_rank()} failed: {type(error).__name__}: {error}'))
        raise
    errors_by_rank = gather(own)
    failed_ranks = [rank for rank, error in enumerate(errors_by_rank) if error is not None]
    if not failed_ranks:
        return
    first = failed_ranks[0]
    if own is not None and first == global_rank():
        raise own
    copied = errors_by_rank[first]
    assert copied is not None
    copied.add_note(f'raised on rank {first}')
    raise copied


def on_first_rank(work: Callable[[], Returned]) -> Returned:
    """Call a function on rank 0 and return its result on all ranks; its errors are raised on all ranks."""
    result: Any = None
    with raised_on_all_ranks():
        if global_rank() == 0:
            result = work()
    returned: Returned = broadcast(result)
    return returned


def is_first_to_say(text: str) -> bool:
    """Return whether this rank is the first to say something that several ranks may say, such as the same error.

    It needs no process group, as errors come before there is one. Without torchrun, whose store is there from the
    beginning, every rank is the first.
    """
    # Set by torchrun: `TORCHELASTIC_USE_AGENT_STORE` in docs/compatibility.md.
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True':
        return True
    return count(f'said_{hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()}', 1) <= 1


def meet() -> None:
    """Wait for all ranks, however long it takes; a barrier alone would end the job at the timeout of collectives."""
    wanted = world_size() * next(MEETINGS)
    here = count('meetings', 1)
    while 0 < here < wanted:
        time.sleep(MEETING_SECONDS)
        here = count('meetings', 0)
    barrier()


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

    A thread that hangs may be using torch's own connection.
    """
    host, port = os.environ.get('MASTER_ADDR'), os.environ.get('MASTER_PORT')
    if world_size() == 1 or not host or not port:
        return None
    try:
        timeout = datetime.timedelta(seconds=STORE_SECONDS)
        return torch.distributed.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    except (DistError, RuntimeError, ValueError) as error:
        log.warning('stall_seconds: each rank watches itself alone, as there is no store of all ranks: %s', error)
        return None


@contextmanager
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
