"""Jobs of one or several ranks: forks of a process that has imported everything, where importing takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny  # noqa: F401
import transformers.models.gpt2.modeling_gpt2  # noqa: F401
from paths import HAS_COMPOSER, ROOT

import llmfoundry_gauntlet.runtime.watch  # noqa: F401
from llmfoundry_gauntlet.cli import main as gauntlet

if HAS_COMPOSER:
    import composer.trainer  # noqa: F401  imported once, for all forks

PATIENCE = 300  # seconds, generous for a busy machine
PATHS = os.pathsep.join(map(str, (ROOT / 'tests/integration', ROOT / 'tests', ROOT)))
FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload([__name__])

Ranks = Sequence[Any]  # their processes


def start(job: Callable[..., None], log: Path, *arguments: Any, **environment: str) -> Any:
    """Start `job(*arguments)` in a fork in this environment, its output appended to `log`; killed after the tests."""
    process = FORKS.Process(
        target=run_fork, args=(job, str(log), arguments, {**os.environ, **environment}), daemon=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('PYTHONPATH', PATHS)  # of the process that is forked, which the first job starts
        process.start()
    return process


def start_ranks(job: Callable[..., None], logs: Sequence[Path], *arguments: Any, **environment: str) -> Ranks:
    """Start a job on as many ranks as there are logs, in the environment that the `composer` launcher gives them.

    Unlike the launcher it does not end the other ranks if one fails.
    """
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    count = str(len(logs))
    shared = {'WORLD_SIZE': count, 'LOCAL_WORLD_SIZE': count, 'NODE_RANK': '0', **environment}
    shared |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
    return [
        start(job, log, *arguments, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank, log in enumerate(logs)
    ]


def run_fork(job: Callable[..., None], log: str, arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    """Run a job in its fork."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(environment)
    tempfile.tempdir = None  # which the environment may have changed
    job(*arguments)


def tail_of(log: Path) -> str:
    """Return the end of a job's output."""
    return log.read_text()[-3000:] if log.exists() else ''


def statuses(ranks: Ranks, log: Path, seconds: float = PATIENCE) -> list[int]:
    """Wait for a job and return the exit statuses of its ranks, negative if they were killed by a signal."""
    end = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
        assert process.exitcode is not None, tail_of(log)
    return [process.exitcode for process in ranks]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def run(job: Callable[..., None], log: Path, *arguments: Any, num_ranks: int = 1, **environment: str) -> None:
    """Run a job that must succeed."""
    ranks = start_ranks(job, [log] * num_ranks, *arguments, **environment)
    assert statuses(ranks, log) == [0] * num_ranks, tail_of(log)


def command(*words: str) -> None:
    """Run `gauntlet` with these words, as a job."""
    sys.argv = ['gauntlet', *words]
    gauntlet()
