"""Extract the answers to MATH problems from generations and compare them.

Our equality is symmetric and accepts different notations of a value: forms are compared first (`math_forms`), and
expressions with math-verify in worker processes with limits. The reference's rules are available as well
(`math_reference`). Only the workers load sympy. They start on first use, as new programs and not as forks, so they are
safe in a training job with threads and CUDA. They belong to a `Comparer`, which whoever owns an evaluation opens and
closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Literal, Self

from llmfoundry_gauntlet.errors import GauntletError
from llmfoundry_gauntlet.scoring.math_boxes import answer_of, boxed, gold_of
from llmfoundry_gauntlet.scoring.math_forms import answers_equal
from llmfoundry_gauntlet.scoring.math_reference import reference_answer_of, reference_equal_with, reference_gold_of

MIB = 2**20
START_SECONDS = 120  # on a busy machine; usually a second or two
STOP_SECONDS = 2
PASSED_ON = ('PATH', 'LD_LIBRARY_PATH', 'PYTHONHOME')
WORKER = 'llmfoundry_gauntlet.scoring.math_worker'
EQUAL, BROKE_LIMIT = 'equal', 'broke a limit'  # answers of a worker
MAX_BROKEN = 2  # comparisons over a limit, counted for the longer text, after which it equals no other

ComparisonKind = Literal['algebra', 'reference']
ComparisonRequest = tuple[ComparisonKind, str, str]
__all__ = [
    'Comparer',
    'ComparisonError',
    'ComparisonLimits',
    'answer_of',
    'boxed',
    'gold_of',
    'reference_answer_of',
    'reference_gold_of',
]

MAX_CACHED = 200_000
MAX_CHARACTERS, MAX_NESTING = 10_000, 60  # of texts that the reference's rules compare in this process


class ComparisonError(GauntletError):
    """Raised if mathematical answers cannot be compared on this machine."""


def num_processes() -> int:
    """Return the number of workers that this rank may start: its share of the processors, at most four."""
    return max(1, min(4, (os.cpu_count() or 1) // int(os.environ.get('LOCAL_WORLD_SIZE', '1'))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonLimits:
    """The limits of a comparison.

    CPU seconds are the effective limit, so that a busy machine does not change results; wall seconds are a backstop.
    `reference_seconds` is for the reference's comparison, a step of which may take `step_seconds`.
    """

    seconds: int = 5
    reference_seconds: int = 20
    step_seconds: float = 5.0
    wall_seconds: int = 60
    memory_bytes: int = 1024 * MIB
    processes: int = field(default_factory=num_processes)


class Worker:
    """A process that compares answers for one thread at a time. Raise ComparisonError if it cannot be started."""

    def __init__(self, limits: ComparisonLimits) -> None:
        environment = {
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            'PYTHONPATH': os.pathsep.join(map(os.path.abspath, sys.path)),
            'PYTHONHASHSEED': '0',
            'OMP_NUM_THREADS': '1',
            'OPENBLAS_NUM_THREADS': '1',
        }
        self.process = subprocess.Popen(
            [sys.executable, '-P', '-m', WORKER, json.dumps(asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd='/',
            start_new_session=True,
        )
        self._seconds = 2 * limits.wall_seconds + STOP_SECONDS
        self.stop = weakref.finalize(self, stop, self.process, os.getpid())
        try:
            ready = self._receive(START_SECONDS)
        except OSError as error:
            self.stop()
            raise ComparisonError(f'comparing MATH answers: the process that does it was lost: {error}') from error
        if 'error' in ready:
            self.stop()
            raise ComparisonError(f'comparing MATH answers needs math-verify and sympy: {ready["error"]}')

    def ask(self, request: ComparisonRequest) -> str:
        """Return the answer to a request. Raise OSError if the process was lost."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b'\n')
        self.process.stdin.flush()
        return self._receive(self._seconds)['answer']

    def _receive(self, seconds: float) -> dict[str, str]:
        """Return the next line. Raise OSError on a timeout, or if the process has ended."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f'no answer in {seconds:.0f} s')
        line = self.process.stdout.readline()
        if not line.endswith(b'\n'):
            raise BrokenPipeError(f'it ended with status {self.process.wait()}')
        found: dict[str, str] = json.loads(line)
        return found


def stop(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill a worker and everything it runs, unless it belongs to the process that forked this one."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # closing flushes a line that nobody can read any more
                stream.close()


class NeedsSympy(Exception):
    """Raised if the reference's comparison of two texts needs sympy, and so a worker."""


def needs_sympy(*_: str) -> bool:
    """Raise NeedsSympy."""
    raise NeedsSympy


class Comparer:
    """Compare answers in a few threads, each with a worker, and cache results. Close it after use, or use it in `with`.

    Two answers whose comparison exceeds a limit are not equal. Numbers, words, and identical texts need no worker; a
    thread starts its worker at the first comparison that does.
    """

    def __init__(self, limits: ComparisonLimits | None = None) -> None:
        self._limits = limits or ComparisonLimits()
        self._threads = self._new_threads()
        self._workers: dict[int, Worker] = {}  # by thread: a worker ends with the thread that started it
        self._known: dict[ComparisonRequest, bool] = {}
        self._broken: Counter[str] = Counter()  # how often a text broke a limit

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _new_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._limits.processes, thread_name_prefix='mathematics')

    def close(self) -> None:
        """Stop all workers and their comparisons; a later comparison starts new workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._threads = self._new_threads()
        while self._workers:
            self._workers.popitem()[1].stop()

    def equal(self, a: str | None, b: str | None, *, reference: bool = False) -> bool:
        """Return whether two answers are equal, in either order; None, a missing answer, equals nothing.

        With `reference`, return the reference's `math_equal(a, b)`, which is not symmetric: None equals nothing as `a`,
        but is compared as the word None as `b`.
        """
        return self.equal_many([(a, b)], reference=reference)[0]

    def equal_many(self, pairs: Iterable[tuple[str | None, str | None]], *, reference: bool = False) -> list[bool]:
        """Return whether the two answers of each pair are equal; faster than one by one."""
        return list(self._threads.map(self._equal_reference if reference else self._equal, pairs))

    def _equal(self, pair: tuple[str | None, str | None]) -> bool:
        a, b = pair
        return a is not None and b is not None and answers_equal(self._algebra, *sorted((a, b)))

    def _algebra(self, first: str, second: str) -> bool:
        first, second = sorted((first, second))
        return self._ask(('algebra', first, second))

    def _equal_reference(self, pair: tuple[str | None, str | None]) -> bool:
        a, b = pair
        if a is None or b is None:
            return reference_equal_with(lambda *_: False, a, b)
        if max(len(a), len(b)) <= MAX_CHARACTERS and max(map(a.count, '([')) <= MAX_NESTING:
            with contextlib.suppress(NeedsSympy):
                return reference_equal_with(needs_sympy, a, b)
        return self._ask(('reference', a, b))

    def _ask(self, request: ComparisonRequest) -> bool:
        """Return whether the two texts of a request are equal, from this thread's worker unless known."""
        known = self._known.get(request)
        if known is not None:
            return known
        _, *texts = request
        if max(self._broken[text] for text in texts) >= MAX_BROKEN:
            return False
        answer = self._ask_worker(request)
        if answer == BROKE_LIMIT:
            self._broken[max(texts, key=len)] += 1
        if len(self._known) > MAX_CACHED:
            self._known.clear()
        self._known[request] = answer == EQUAL
        return answer == EQUAL

    def _ask_worker(self, request: ComparisonRequest) -> str:
        """Return the answer of this thread's worker, which is restarted once if lost. Raise ComparisonError."""
        thread = threading.get_ident()
        for is_last_try in (False, True):
            worker = self._workers.get(thread)
            if worker is None:
                worker = self._workers[thread] = Worker(self._limits)
            try:
                return worker.ask(request)
            except (OSError, ValueError) as error:  # a ValueError if another thread has closed the worker's pipes
                worker.stop()
                is_closed = self._workers.pop(thread, None) is None
                if is_last_try or is_closed:
                    raise ComparisonError(
                        f'comparing MATH answers: the process that does it was lost: {error}'
                    ) from error
        raise AssertionError
