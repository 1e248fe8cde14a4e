"""Run a completion against the test of its problem: in separate processes, between which only plain values pass.

The result is that of the test's process. What the completion's process prints, exits with or does to itself is ignored;
it can only answer calls, rightly or wrongly. Anything undecided in time is wrong, with a reason.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time

from llmfoundry_gauntlet.scoring.code.cpp import build_completion, build_problem
from llmfoundry_gauntlet.scoring.code.languages import LANGUAGES, Interpreter, cpp_command
from llmfoundry_gauntlet.scoring.code.outcomes import LATE, CannotRun, Outcome, Undecided
from llmfoundry_gauntlet.scoring.code.programs import Program, make_program, whole_text
from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox, file_in_memory, started
from llmfoundry_gauntlet.scoring.code.servers import Pipes, server_for

SELF_TEST_SECONDS = 60.0
SECONDS = 10.0  # of wall time, for a completion and all that is done for it

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


def check_completion(program: Program, completion: str, sandbox: Sandbox, *, seconds: float = SECONDS) -> Outcome:
    """Run a completion against its problem's test.

    Raise CannotJudge or OSError if that was impossible for reasons other than the completion.
    """
    code = whole_text(program, completion)
    try:
        interpreter = LANGUAGES[program.language].interpreter
        if interpreter is None:
            return check_cpp(program, code, sandbox, seconds)
        return check_script(program, code, interpreter, sandbox, time.monotonic() + seconds)
    except Undecided as reason:
        return Outcome(False, str(reason))


def self_test(language: str, sandbox: Sandbox) -> str | None:
    """Return why no program of a language can be run here, None where a simple one passes."""
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
                said = server.run(test, deadline)
                running.check_started()
            finally:
                running.stop()
        except (Undecided, OSError):
            server.close()
            raise
        if said:
            outcome = json.loads(said)
            return Outcome(outcome['passed'], outcome['reason'])
        server.close()
        if is_fresh:  # else it may have ended for what another test had done
            raise Undecided('the test ended without a result')


def check_cpp(program: Program, code: str, sandbox: Sandbox, seconds: float) -> Outcome:
    """Run a C++ program: its result is the exit status of the test's process, which contains none of its code."""
    problem = build_problem(program, sandbox)  # whose time is not the completion's
    deadline = time.monotonic() + seconds
    completion = build_completion(problem, code, sandbox, deadline)
    with contextlib.ExitStack() as stack:
        pipes = Pipes()
        stack.callback(pipes.close_all)
        (calls, their_calls), (their_results, results) = pipes.make(), pipes.make()
        both = []
        for image, *ends in ((completion, calls, results), (problem.test, their_calls, their_results)):
            command = cpp_command(stack.enter_context(file_in_memory(image)), *ends)
            both.append(stack.enter_context(started(sandbox, command, pass_fds=ends)))
            pipes.close(*ends)
        try:
            status = both[-1].wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            raise Undecided(LATE) from None
        for running in both:
            running.check_started()
        reason = STATUSES.get(abs(status), f'the test ended with status {status}')
        return Outcome(status == 0, reason if status else None)
