"""Whether a completion solves its problem: it and the test run apart, and only plain values cross.

The verdict is the test's process's. What the completion's process prints, exits with or does to itself is of no
consequence; it can only answer calls, wrongly or rightly. What cannot be decided in time is wrong, with a reason.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from llmfoundry_gauntlet.judging.code.cpp import build_completion, build_problem
from llmfoundry_gauntlet.judging.code.programs import CPP, JAVASCRIPT, PYTHON, Program, make_program, whole_text
from llmfoundry_gauntlet.judging.code.sandbox import Running, Sandbox, in_memory
from llmfoundry_gauntlet.judging.code.tools import cpp_command, node_command, python_command
from llmfoundry_gauntlet.judging.code.verdicts import CannotJudge, Undecided, Verdict

SELF_TEST_SECONDS = 60.0
SECONDS = 10.0  # of wall time, for a completion and all that is done for it
MAX_VERDICT = 65536  # bytes
SIMPLE = {  # a problem of each language and its solution
    PYTHON: ('def f(x):\n', 'def check(candidate):\n    assert candidate(1) == 2\n', '    return x + 1\n'),
    CPP: (
        'int f(int x) {\n',
        '#undef NDEBUG\n#include <assert.h>\nint main() { assert(f(1) == 2); }\n',
        'return x + 1;\n}\n',
    ),
    JAVASCRIPT: ('const f = (x) => {\n', 'console.assert(f(1) === 2)\n', '  return x + 1\n}\n'),
}

LATE = 'not done in time'
ENDED = 'the program ended before its test did'
NOT_PLAIN = 'the result of a call is no plain value'
UNEXPECTED = 'the result of a call is not the expected one'
STATUSES = {
    90: ENDED,
    141: ENDED,
    13: ENDED,
    91: NOT_PLAIN,
    92: 'the test makes no call',
    134: UNEXPECTED,
    6: UNEXPECTED,
}


def judge(program: Program, completion: str, sandbox: Sandbox, *, seconds: float = SECONDS) -> Verdict:
    """Runs a completion against its problem's test.

    Raises CannotJudge or OSError where that could not be done, by no fault of the completion's.
    """
    code = whole_text(program, completion)
    try:
        if program.language == CPP:
            return judge_cpp(program, code, sandbox, seconds)
        return judge_script(program, code, sandbox, time.monotonic() + seconds)
    except Undecided as reason:
        return Verdict(False, str(reason))


def self_test(language: str, sandbox: Sandbox) -> str | None:
    """Why no program of a language can be run here, None where a simple one passes."""
    prompt, test, solution = SIMPLE[language]
    program = make_program(language=language, prompt=prompt, entry_point='f', test=test)
    try:
        verdict = judge(program, solution, sandbox, seconds=SELF_TEST_SECONDS)
    except (CannotJudge, OSError) as error:
        return f'{language} programs cannot be run here: {error}'
    return None if verdict.passed else f'{language} programs cannot be run here: {verdict.reason}'


def judge_script(program: Program, code: str, sandbox: Sandbox, deadline: float) -> Verdict:
    """A program of an interpreted language."""
    command = {PYTHON: python_command, JAVASCRIPT: node_command}[program.language]
    test: dict[str, Any] = {'prelude': program.prelude, 'target': program.target, 'test': program.test}
    test['pairs'] = program.pairs
    with Pipes() as pipes:
        pipes.start(
            sandbox,
            command('completion', pipes.calls[0], pipes.results[1]),
            {'code': code, 'target': program.target},
            (pipes.calls[0], pipes.results[1]),
        )
        pipes.start(
            sandbox,
            command('test', pipes.calls[1], pipes.results[0], pipes.verdict[1]),
            test,
            (pipes.calls[1], pipes.results[0], pipes.verdict[1]),
        )
        said = pipes.wait(deadline)
        try:
            found = json.loads(said)
            return pipes.verdict_of(found['passed'] is True, found['reason'])
        except (ValueError, KeyError, TypeError):
            return pipes.verdict_of(False, 'the test ended without a verdict')


def judge_cpp(program: Program, code: str, sandbox: Sandbox, seconds: float) -> Verdict:
    """A C++ program: its verdict is the exit status of the test's process, in which none of its code is."""
    problem = build_problem(program, sandbox)  # whose time is not the completion's
    deadline = time.monotonic() + seconds
    completion = build_completion(problem, code, sandbox, deadline)
    with Pipes() as pipes:
        pipes.start_binary(sandbox, completion, pipes.calls[0], pipes.results[1])
        running = pipes.start_binary(sandbox, problem.test, pipes.calls[1], pipes.results[0], pipes.verdict[1])
        pipes.wait(deadline)
        try:
            status = running.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Undecided(LATE) from None
        reason = STATUSES.get(abs(status), f'the test ended with status {status}')
        return pipes.verdict_of(status == 0, reason if status else None)


class Pipes(ExitStack):
    """The two processes of a run and what joins them; on leaving both are gone."""

    def __enter__(self) -> Pipes:
        super().__enter__()
        self.calls, self.results, self.verdict = os.pipe(), os.pipe(), os.pipe()
        self.open = {*self.calls, *self.results, *self.verdict}
        self.callback(self._close, self.open)
        self.running: list[Running] = []
        return self

    def _close(self, descriptors: Sequence[int]) -> None:
        for descriptor in tuple(descriptors):
            os.close(descriptor)
            self.open.discard(descriptor)

    def start(self, sandbox: Sandbox, command: Any, program: Any, descriptors: Sequence[int]) -> Running:
        """Starts one of the two; its ends of the pipes are closed here."""
        stdin = subprocess.DEVNULL if program is None else in_memory(json.dumps(program).encode())
        try:
            running = sandbox.start(command, stdin=stdin, pass_fds=descriptors)
        finally:
            if program is not None:
                os.close(stdin)
        self.callback(running.stop)
        self.running.append(running)
        self._close(descriptors)
        return running

    def start_binary(self, sandbox: Sandbox, binary: bytes, calls: int, results: int, *more: int) -> Running:
        """Starts a compiled program."""
        image = in_memory(binary)
        try:
            return self.start(sandbox, cpp_command(image, calls, results), None, (calls, results, *more))
        finally:
            os.close(image)

    def verdict_of(self, passed: bool, reason: str | None) -> Verdict:
        """The verdict, if both processes did begin. Raises OSError where one did not."""
        for running in self.running:
            running.check_started()
        return Verdict(passed, reason)

    def wait(self, deadline: float) -> bytes:
        """What the test says, once it has ended. Raises Undecided where it has not in time."""
        said = b''
        ended = os.pidfd_open(self.running[-1].process.pid)
        self.callback(os.close, ended)
        poll = select.poll()
        poll.register(self.verdict[0], select.POLLIN)
        poll.register(ended, select.POLLIN)  # for a child that another thread forked may hold the pipe open
        while not said.endswith(b'\n'):
            left = deadline - time.monotonic()
            ready = dict(poll.poll(left * 1000)) if left > 0 else {}
            if not ready:
                raise Undecided(LATE)
            if ready.get(self.verdict[0], 0) & select.POLLIN:
                said += os.read(self.verdict[0], MAX_VERDICT)
            elif ended in ready:
                break
            if len(said) > MAX_VERDICT:
                raise Undecided('the test said too much')
            if ready.get(self.verdict[0]) == select.POLLHUP:
                poll.unregister(self.verdict[0])
        return said
