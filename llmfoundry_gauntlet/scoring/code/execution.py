"""Run a completion against its problem's test, in separate processes that exchange only plain values.

The test process alone determines the result. The completion's process can only answer calls, correctly or not; its
output, its exit status and its effects on itself are ignored. A completion that times out is wrong, with a reason.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from llmfoundry_gauntlet.scoring.code.cpp import build_completion, build_problem
from llmfoundry_gauntlet.scoring.code.programs import (
    COMPLETION,
    LANGUAGES,
    TESTS,
    Interpreter,
    Program,
    cpp_command,
    make_program,
    whole_text,
)
from llmfoundry_gauntlet.scoring.code.sandbox import (
    LATE,
    CannotRun,
    Outcome,
    Running,
    Sandbox,
    Undecided,
    file_in_memory,
    started,
)

Result = TypeVar('Result')
_num_programs_run = 0
_lock = threading.Lock()
NUM_TESTS = 16  # per process
NUM_WAITING = 2  # processes started ahead of their programs
IDLE_SECONDS = 10.0  # longer idle processes are not reused; they exit on their own after three times this
MAX_LINE = 65536  # bytes

_of_thread = threading.local()  # a sandbox dies with the thread that started it
SELF_TEST_SECONDS = 60.0
SECONDS = 10.0  # wall time for a completion, including starting processes and compiling it

ENDED = 'the program ended before its test did'
NOT_PLAIN = 'the result of a call is no plain value'
UNEXPECTED = 'the result of a call is not the expected one'
STATUSES = {  # 90 to 92 are those of runners/remote.hpp
    90: ENDED,
    91: NOT_PLAIN,
    92: 'the test makes no call',
    signal.SIGPIPE: ENDED,
    128 + signal.SIGPIPE: ENDED,
    signal.SIGABRT: UNEXPECTED,
    128 + signal.SIGABRT: UNEXPECTED,
}


@functools.cache
def workers() -> ThreadPoolExecutor:
    """Return a thread pool in which each thread runs one program, with one thread per processor of this rank.

    Threads live as long as the process: a sandbox dies with the thread that started it.
    """
    num_ranks = int(os.environ.get('LOCAL_WORLD_SIZE', '1'))
    num_threads = max(1, len(os.sched_getaffinity(0)) // max(1, num_ranks))
    return ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix='program')


def submit(run: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Run a program in the thread pool."""
    future = workers().submit(run, *arguments)
    future.add_done_callback(_count_program)
    return future


def _count_program(_: Future[Any]) -> None:
    global _num_programs_run
    with _lock:
        _num_programs_run += 1


def num_programs_run() -> int:
    """Return the number of programs that have run in this process."""
    return _num_programs_run


class Pipes:
    """A set of pipes whose ends can be closed individually or all at once."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def make(self) -> tuple[int, int]:
        """Open a pipe and return its read end and its write end."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def close(self, *ends: int) -> None:
        """Close these ends."""
        for end in ends:
            self._open.discard(end)
            os.close(end)

    def close_all(self) -> None:
        """Close all ends that are still open."""
        self.close(*self._open)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process started ahead for a completion; it receives its program through a pipe."""

    running: Running
    program: int
    since: float

    @property
    def is_usable(self) -> bool:
        """Return whether it is alive and will not time out soon."""
        return time.monotonic() - self.since <= IDLE_SECONDS and self.running.process.poll() is None


class TestServer:
    """A process that runs tests, and processes started ahead for their completions; all end with this object."""

    __test__ = False  # pytest must not collect it

    def __init__(self, interpreter: Interpreter, sandbox: Sandbox) -> None:
        self.num_run = 0
        self._sandbox = sandbox
        self._command = interpreter
        self._pipes = Pipes()
        self._waiting: list[Waiting] = []
        self._last_used = time.monotonic()
        with ExitStack() as after_failure:
            after_failure.callback(self._pipes.close_all)
            tests, self._tests = self._pipes.make()
            self._outcomes, outcomes = self._pipes.make()

            # A pipe for the calls of each test, and one for their results: the ends of its completion, and the others.
            self._ends: list[tuple[int, int]] = []
            theirs = [outcomes]
            for _ in range(NUM_TESTS):
                calls, calls_of_test = self._pipes.make()
                results_for_test, results = self._pipes.make()
                self._ends.append((calls, results))
                theirs += [calls_of_test, results_for_test]
            command = self._command(TESTS, *theirs, num_tests=NUM_TESTS)
            self._running = sandbox.start(command, stdin=tests, pass_fds=theirs)
            after_failure.pop_all()
        self.close = weakref.finalize(self, end_processes, self._running, self._waiting, self._pipes)
        self._pipes.close(tests, *theirs)

    @property
    def is_usable(self) -> bool:
        """Return whether it is alive and accepts another test."""
        is_idle = time.monotonic() - self._last_used > IDLE_SECONDS
        if not self.close.alive or is_idle or self._running.process.poll() is not None:
            return False
        if self._waiting:
            return self._waiting[0].is_usable
        return bool(self._ends)

    def start_completion(self, program: dict[str, Any]) -> Running:
        """Return the process of the next test's completion; the caller must stop it. Raise OSError."""
        if not self._waiting:
            self._start_waiting()
        waiting = self._waiting.pop(0)
        with suppress(BrokenPipeError):  # it has exited, which its test will report
            write_line(waiting.program, program)
        self._pipes.close(waiting.program)
        return waiting.running

    def run(self, test: dict[str, Any], deadline: float) -> bytes:
        """Return the output line of the next test, empty if its process ended first. Raise Undecided or OSError."""
        self.num_run += 1
        try:
            write_line(self._tests, test)
        except BrokenPipeError:
            return b''
        if self.num_run > 1:  # further programs are likely
            while self._ends and len(self._waiting) < NUM_WAITING:
                self._start_waiting()
        line = wait_for_line(self._outcomes, self._running, deadline)
        self._running.check_started()
        self._last_used = time.monotonic()
        return line

    def _start_waiting(self) -> None:
        """Start a process for the next completion ahead of time."""
        ends = self._ends.pop(0)
        stdin, program = self._pipes.make()
        running = self._sandbox.start(self._command(COMPLETION, *ends), stdin=stdin, pass_fds=ends)
        self._waiting.append(Waiting(running, program, time.monotonic()))
        self._pipes.close(stdin, *ends)


def write_line(descriptor: int, message: dict[str, Any]) -> None:
    """Write a message to a pipe. Raise BrokenPipeError."""
    with open(descriptor, 'wb', closefd=False) as stream:
        stream.write(json.dumps(message).encode() + b'\n')


def end_processes(tests: Running, waiting: list[Waiting], pipes: Pipes) -> None:
    """End the processes and close their pipes."""
    pipes.close_all()
    tests.stop()
    for completion in waiting:
        completion.running.stop()


def server_for(interpreter: Interpreter, sandbox: Sandbox) -> TestServer:
    """Return this thread's test process for a language."""
    servers: dict[tuple[Interpreter, Sandbox], TestServer] = _of_thread.__dict__.setdefault('servers', {})
    server = servers.get((interpreter, sandbox))
    if server is None or not server.is_usable:
        if server is not None:
            server.close()
        server = servers[interpreter, sandbox] = TestServer(interpreter, sandbox)
    return server


def wait_for_line(descriptor: int, running: Running, deadline: float) -> bytes:
    """Return a process's output up to the end of a line or of the process. Raise Undecided on a timeout."""
    output = b''
    ended = os.pidfd_open(running.process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(ended, select.POLLIN)  # a child forked by another thread may hold the pipe open
        while not output.endswith(b'\n'):
            left = deadline - time.monotonic()
            ready = dict(poll.poll(left * 1000)) if left > 0 else {}
            if not ready:
                raise Undecided(LATE)
            if ready.get(descriptor, 0) & select.POLLIN:
                output += os.read(descriptor, MAX_LINE)
            elif ended in ready:
                break
            if len(output) > MAX_LINE:
                raise Undecided('the test said too much')
            if ready.get(descriptor) == select.POLLHUP:
                poll.unregister(descriptor)
    finally:
        os.close(ended)
    return output


def check_completion(program: Program, completion: str, sandbox: Sandbox, *, seconds: float = SECONDS) -> Outcome:
    """Run a completion, joined to its prompt as it is, against its problem's test.

    Raise CannotRun or OSError if that fails for reasons other than the completion.
    """
    return check_source(program, whole_text(program, completion), sandbox, seconds=seconds)


def check_source(program: Program, code: str, sandbox: Sandbox, *, seconds: float = SECONDS) -> Outcome:
    """Run a whole program against its problem's test, as `check_completion` does."""
    try:
        interpreter = LANGUAGES[program.language].interpreter
        if interpreter is None:
            return check_cpp(program, code, sandbox, seconds)
        return check_script(program, code, interpreter, sandbox, time.monotonic() + seconds)
    except Undecided as reason:
        return Outcome(False, str(reason))


def self_test(language: str, sandbox: Sandbox) -> str | None:
    """Return why programs of a language cannot run here, None if a simple one passes."""
    prompt, test, solution = LANGUAGES[language].simple
    program = make_program(language=language, prompt=prompt, entry_point='f', test=test)
    try:
        outcome = check_completion(program, solution, sandbox, seconds=SELF_TEST_SECONDS)
    except (CannotRun, OSError) as error:
        return f'{language} programs cannot be run here: {error}'
    return None if outcome.passed else f'{language} programs cannot be run here: {outcome.reason}'


def check_script(program: Program, code: str, interpreter: Interpreter, sandbox: Sandbox, deadline: float) -> Outcome:
    """Run a program of an interpreted language."""
    test = {'prelude': program.prelude, 'target': program.target, 'test': program.test, 'pairs': program.pairs}
    while True:
        server = server_for(interpreter, sandbox)
        is_fresh = server.num_run == 0
        try:
            running = server.start_completion({'code': code, 'target': program.target})
            try:
                line = server.run(test, deadline)
                running.check_started()
            finally:
                running.stop()
        except (Undecided, OSError):
            server.close()
            raise
        if line:
            outcome = json.loads(line)
            return Outcome(outcome['passed'], outcome['reason'])
        server.close()
        if is_fresh:  # otherwise an earlier test may have broken the process: retry with a new one
            raise Undecided('the test ended without a result')


def check_cpp(program: Program, code: str, sandbox: Sandbox, seconds: float) -> Outcome:
    """Run a C++ program: the result is the exit status of the test process, which contains no code of the program."""
    problem = build_problem(program, sandbox)  # not counted towards the completion's time
    deadline = time.monotonic() + seconds
    completion = build_completion(problem, code, sandbox, deadline)
    with contextlib.ExitStack() as stack:
        pipes = Pipes()
        stack.callback(pipes.close_all)
        calls, calls_of_test = pipes.make()
        results_for_test, results = pipes.make()

        def start(image: bytes, *ends: int) -> Running:
            """Start an executable, which alone has these ends of pipes from then on."""
            command = cpp_command(stack.enter_context(file_in_memory(image)), *ends)
            running = stack.enter_context(started(sandbox, command, pass_fds=ends))
            pipes.close(*ends)
            return running

        running_completion = start(completion, calls, results)
        running_test = start(problem.test, calls_of_test, results_for_test)
        try:
            status = running_test.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            raise Undecided(LATE) from None
        running_completion.check_started()
        running_test.check_started()
        reason = STATUSES.get(abs(status), f'the test ended with status {status}')
        return Outcome(status == 0, reason if status else None)
