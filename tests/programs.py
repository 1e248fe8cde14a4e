"""Problems for tests that run programs, and the sandbox they run in."""

from __future__ import annotations

import pytest

from llmfoundry_gauntlet.scoring.code.compilers import find_compiler
from llmfoundry_gauntlet.scoring.code.cpp import build_problem, compiled_header
from llmfoundry_gauntlet.scoring.code.programs import (
    CPP,
    JAVASCRIPT,
    LANGUAGES,
    PYTHON,
    Program,
    make_program,
    node_program,
)
from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox, SandboxError, find_sandbox

PROMPTS = {
    PYTHON: 'def answer(n: int) -> str:\n    """The answer."""\n',
    CPP: '#include <string>\nusing namespace std;\nstring answer(int n) {\n',
    JAVASCRIPT: 'const answer = (n) => {\n',
}
TESTS = {
    PYTHON: 'def check(candidate):\n    assert candidate(0) == {secret!r}\n    assert candidate(1) == {secret!r}\n',
    CPP: '#undef NDEBUG\n#include <assert.h>\nint main() {{\n  assert(answer(0) == "{secret}");\n'
    '  assert(answer(1) == "{secret}");\n}}\n',
    JAVASCRIPT: "console.assert(answer(0) === '{secret}')\nconsole.assert(answer(1) === '{secret}')\n",
}
RIGHT = {
    PYTHON: '    return {secret!r}\n',
    CPP: '  return "{secret}";\n}}\n',
    JAVASCRIPT: "  return '{secret}'\n}}\n",
}
SECRET = 'the-word-9157'  # the value a program must return and cannot know


def problem(language: str, secret: str = SECRET) -> Program:
    """Return a problem whose right answer only the test has; skip the test if its language cannot run here."""
    need(language)
    return make_program(
        language=language,
        prompt=PROMPTS[language],
        entry_point='answer',
        test=TESTS[language].format(secret=secret),
    )


def right(language: str, secret: str = SECRET) -> str:
    """Return the right completion."""
    return RIGHT[language].format(secret=secret)


def sandbox() -> Sandbox:
    """Return the machine's sandbox; skip the test if there is none."""
    try:
        return find_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))


def can_confine() -> bool:
    """Return whether this machine has a sandbox."""
    try:
        find_sandbox()
    except SandboxError:
        return False
    return True


def can_run_all() -> bool:
    """Return whether programs of every language can run here."""
    return can_confine() and not any(language.missing() for language in LANGUAGES.values())


def need(language: str) -> None:
    """Skip the test if programs of a language cannot run here."""
    if reason := LANGUAGES[language].missing():
        pytest.skip(reason)


def find_tools_anew() -> None:
    """Forget which tools were found."""
    for cached in (find_sandbox, node_program, find_compiler, compiled_header, build_problem):
        cached.cache_clear()
