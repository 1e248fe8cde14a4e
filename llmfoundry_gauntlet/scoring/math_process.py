"""The client of the process that compares with sympy.

The process is started on first use, as a program of its own rather than a fork, so that a training job with threads and
CUDA can have one; `math_worker` describes its limits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Literal, TypedDict

from llmfoundry_gauntlet.errors import GauntletError

MIB = 2**20
START_SECONDS = 120  # on a machine that is busy; a second or two otherwise
STOP_SECONDS = 2
PASSED_ON = ('PATH', 'LD_LIBRARY_PATH', 'PYTHONHOME')
WORKER = 'llmfoundry_gauntlet.scoring.math_worker'

Question = Literal['algebra', 'reference']
Request = tuple[Question, str, str]


class Line(TypedDict, total=False):
    """A message of the process: first that it is ready or what is wrong, then the result of a request."""

    ready: bool
    error: str
    number: int
    equal: bool


class ComparisonError(GauntletError):
    """Raised if mathematical answers cannot be compared on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a comparison. CPU seconds decide, so that a busy machine changes no result; wall seconds end it.

    `reference_seconds` is for the reference's comparison, a step of which may take `step_seconds`.
    """

    seconds: int = 5
    reference_seconds: int = 20
    step_seconds: float = 5.0
    wall_seconds: float = 60.0
    memory_bytes: int = 1024 * MIB
    processes: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))


class Process:
    """A worker process, started on first use and once more if it was lost. Use it from one thread at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes], int], Process] | None = None
        self._unread = b''
        self._owner = 0

    def ask(self, requests: Sequence[Request]) -> list[bool]:
        """Return whether each request's two texts are equal. Raises ComparisonError where no process can be had."""
        for is_last_try in (False, True):
            try:
                return self._ask(requests)
            except OSError as error:
                self.close()
                if is_last_try:
                    raise ComparisonError(
                        f'comparing MATH answers: the process that does it was lost: {error}'
                    ) from error
        raise AssertionError

    def _ask(self, requests: Sequence[Request]) -> list[bool]:
        process = self._start()
        requested, _ = pipes_of(process)
        lines = [
            json.dumps({'number': number, 'question': question, 'first': first, 'second': second}) + '\n'
            for number, (question, first, second) in enumerate(requests)
        ]
        outcomes: dict[int, bool] = {}
        limit = self._limits.wall_seconds * 2 + STOP_SECONDS
        try:
            for begin in range(0, len(lines), 100):  # no more than the pipes hold
                requested.write(''.join(lines[begin : begin + 100]).encode())
                requested.flush()
                for _ in lines[begin : begin + 100]:
                    answer = self._receive(process, limit)
                    outcomes[answer['number']] = answer['equal']
        finally:
            if len(outcomes) < len(lines):  # interrupted: a later request would get the answers to these
                self.close()
        return [outcomes[number] for number in range(len(lines))]

    def _start(self) -> subprocess.Popen[bytes]:
        """Return the process, started if it is not running, or if it belongs to the process that forked this one."""
        if self._running is not None and self._owner == os.getpid() and self._running.poll() is None:
            return self._running
        self.close()
        environment = {
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            'PYTHONPATH': os.pathsep.join(map(os.path.abspath, sys.path)),
            'PYTHONHASHSEED': '0',
            'OMP_NUM_THREADS': '1',
            'OPENBLAS_NUM_THREADS': '1',
        }
        process = self._running = subprocess.Popen(
            [sys.executable, '-P', '-m', WORKER, json.dumps(asdict(self._limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd='/',
            start_new_session=True,
        )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, stop, process, self._owner)
        hello = self._receive(process, START_SECONDS)
        if 'ready' not in hello:
            self.close()
            raise ComparisonError(f'comparing MATH answers needs math-verify and sympy: {hello["error"]}')
        return process

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> Line:
        """Return the next line. Raise OSError if none comes in time, or can come."""
        output = pipes_of(process)[1].fileno()
        deadline = time.monotonic() + seconds
        while b'\n' not in self._unread:
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f'no answer in {seconds:.0f} s')
            received = os.read(output, 65536)
            if not received:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                raise BrokenPipeError(f'it ended with status {process.returncode}')
            self._unread += received
        line, self._unread = self._unread.split(b'\n', 1)
        said: Line = json.loads(line)
        return said

    def close(self) -> None:
        """End the process and everything that it runs."""
        if self._finalizer is not None:
            self._finalizer()
        self._running, self._finalizer, self._unread = None, None, b''


def pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Return where a process of ours reads, and where it writes."""
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def stop(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process of ours with everything it started; a fork leaves its parent's alone."""
    if os.getpid() != owner:
        return
    for stream in pipes_of(process):
        with contextlib.suppress(OSError):  # a line was left that nobody can read
            stream.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
