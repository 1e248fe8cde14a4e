"""Tests that share a process are isolated from each other and leave nothing behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import pytest

from llmfoundry_gauntlet.scoring.code import execution
from llmfoundry_gauntlet.scoring.code.execution import (
    NUM_TESTS,
    NUM_WAITING,
    TestServer,
    Waiting,
    check_completion,
    server_for,
)
from llmfoundry_gauntlet.scoring.code.programs import JAVASCRIPT, LANGUAGES, PYTHON, Program, make_program
from llmfoundry_gauntlet.scoring.code.sandbox import Outcome, Sandbox
from tests.programs import need, problem, right, sandbox

PROMPTS = {PYTHON: 'def f():\n', JAVASCRIPT: 'const f = () => {\n'}
ONES = {PYTHON: '    return 1\n', JAVASCRIPT: '  return 1\n}\n'}
LEFT = {  # what one test does to its surroundings, and what the next one must not find
    PYTHON: [
        ('import math, sys\nmath.pi = 3\nsys.setrecursionlimit(20000)', 'import math, sys\nassert math.pi > 3.1'),
        ('import builtins\nbuiltins.max = min', 'assert max(1, 2) == 2'),
        ('import random\nrandom.seed(1)\nglobal_name = 1', 'assert "global_name" not in globals()'),
        ('open("left", "w").close()', 'import os\nassert not os.path.exists("left")'),
        ('import os\nos.environ["LEFT"] = "1"\nos.close(2)', 'import os\nassert "LEFT" not in os.environ'),
        ('import threading\nthreading.Thread(target=__import__("time").sleep, args=(60,)).start()', 'pass'),
    ],
    JAVASCRIPT: [
        ('Array.prototype.push = () => 7', 'console.assert([].push(1) === 1)'),
        ('Math.max = Math.min; globalThis.left = 1', 'console.assert(Math.max(1, 2) === 2 && !("left" in globalThis))'),
        ('const twice = 1', 'const twice = 2'),
        ('console.log = 3; console.assert = () => {}', 'console.assert(typeof console.log === "function")'),
        ('require("fs").writeFileSync("left", "")', 'console.assert(!require("fs").existsSync("left"))'),
        ('JSON.parse = null; Object.entries = null; Promise = null', 'console.assert(JSON.parse("1") === 1)'),
    ],
}


@pytest.fixture(params=[PYTHON, JAVASCRIPT])
def language(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return request.param


def test_of(language: str, does: str) -> Program:
    lines = {
        PYTHON: f'{does}\ndef check(candidate):\n    assert candidate() == 1\n',
        JAVASCRIPT: f'console.assert(f() === 1)\n{does}\n',
    }
    return make_program(language=language, prompt=PROMPTS[language], entry_point='f', test=lines[language])


test_of.__test__ = False


@pytest.mark.parametrize('number', range(6))
def test_a_test_sees_nothing_of_the_previous_one(language: str, number: int):
    first, second = (test_of(language, does) for does in LEFT[language][number])
    for program in (first, second, first, second):
        assert check_completion(program, ONES[language], sandbox()) == Outcome(True, None)


def test_results_are_in_order_over_several_processes(language: str):
    for number in range(NUM_TESTS + 5):
        passes = number % 3 != 1
        word = f'word-{number}'
        completion = right(language, word if passes else 'another')
        assert check_completion(problem(language, word), completion, sandbox()).passed == passes


def test_no_result_is_lost_if_a_process_ends(language: str):
    assert check_completion(problem(language), right(language), sandbox()).passed
    server = server_for(LANGUAGES[language].interpreter, sandbox())
    os.kill(server._running.process.pid, signal.SIGKILL)
    assert check_completion(problem(language), right(language), sandbox()).passed


def test_a_test_that_always_ends_its_process_fails(language: str):
    ends = {PYTHON: 'import os\nos._exit(3)', JAVASCRIPT: 'process.exit(3)'}
    outcome = check_completion(test_of(language, ends[language]), ONES[language], sandbox())
    assert outcome == Outcome(False, 'the test ended without a result')
    assert check_completion(problem(language), right(language), sandbox()).passed


def test_processes_end_with_their_thread():
    pids = []

    def run():
        server = server_for(LANGUAGES[PYTHON].interpreter, sandbox())
        pids.append(server._running.process.pid)
        assert server is server_for(LANGUAGES[PYTHON].interpreter, sandbox())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_an_idle_process_is_not_reused(monkeypatch: pytest.MonkeyPatch):
    server = server_for(LANGUAGES[PYTHON].interpreter, sandbox())
    monkeypatch.setattr(execution, 'IDLE_SECONDS', 0.0)
    time.sleep(0.01)
    assert server_for(LANGUAGES[PYTHON].interpreter, sandbox()) is not server


def waiting_of(language: str) -> list[Waiting]:
    """Return the processes that wait for a program after two were run."""
    server_for(LANGUAGES[language].interpreter, sandbox()).close()
    assert check_completion(problem(language), right(language), sandbox()).passed
    assert not server_for(LANGUAGES[language].interpreter, sandbox())._waiting
    assert check_completion(problem(language), right(language), sandbox()).passed
    waiting = list(server_for(LANGUAGES[language].interpreter, sandbox())._waiting)
    assert len(waiting) == NUM_WAITING
    return waiting


def test_waiting_processes_run_one_program_each(language: str):
    first, second = waiting_of(language)
    assert check_completion(problem(language), right(language), sandbox()).passed
    assert first.running.process.returncode is not None
    assert second.running.process.poll() is None
    assert server_for(LANGUAGES[language].interpreter, sandbox())._waiting[0] is second
    server_for(LANGUAGES[language].interpreter, sandbox()).close()
    assert second.running.process.returncode is not None


def test_no_result_is_lost_if_a_waiting_process_ends(language: str):
    first, second = waiting_of(language)
    os.kill(first.running.process.pid, signal.SIGKILL)
    first.running.process.wait()
    assert check_completion(problem(language), right(language), sandbox()).passed
    assert second.running.process.returncode is not None


def test_a_program_may_be_longer_than_a_pipe_holds(language: str):
    waiting_of(language)
    comment = {PYTHON: '#', JAVASCRIPT: '//'}[language] + 'x' * 300_000
    assert check_completion(problem(language), f'{right(language)}\n{comment}\n', sandbox()).passed


def test_a_process_that_waited_long_is_not_used(monkeypatch: pytest.MonkeyPatch):
    waiting_of(PYTHON)
    server = server_for(LANGUAGES[PYTHON].interpreter, sandbox())
    server._waiting[0] = dataclasses.replace(server._waiting[0], since=time.monotonic() - execution.IDLE_SECONDS - 1)
    assert server_for(LANGUAGES[PYTHON].interpreter, sandbox()) is not server


@pytest.mark.slow
def test_idle_processes_end():
    """In each language, with and without a sandbox, all waited for at once."""
    need(JAVASCRIPT)
    servers = [
        TestServer(LANGUAGES[language].interpreter, level)
        for language in (PYTHON, JAVASCRIPT)
        for level in (sandbox(), Sandbox('none'))
    ]
    for server in servers:
        server._start_waiting()
    for running in (process for server in servers for process in (server._running, server._waiting[0].running)):
        running.wait(45)
        running.check_started()
