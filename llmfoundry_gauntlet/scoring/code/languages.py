"""Programming languages: patterns of functions in prompts, and interpreters and compilers in a sandbox."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llmfoundry_gauntlet.scoring.code.sandbox import INSIDE, Command, Limits, Mount

RUNNERS = Path(__file__).parent / 'runners'
COMPILER = 'g++'
NODE = 'node'
COMPLETION, TESTS = 'completion', 'tests'  # roles
OPEN_FILES = 64  # besides the pipes
PYTHON, CPP, JAVASCRIPT = 'python', 'c++', 'javascript'


class Interpreter(Protocol):
    """Starts a process of an interpreter in a role with these open descriptors; one for tests runs several of them."""

    def __call__(self, role: str, *descriptors: int, num_tests: int = 1) -> Command:
        """Return the command that starts it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """A language of programs.

    `begins` matches what begins a function in a prompt; the last one there is for a completion to write. With
    `has_braces` a completion ends with the brace that closes it. `simple` is a prompt, its test and a right completion.
    `tool` is a program that must be on the path, Debian's package of it `package`. `interpreter` starts a process that
    runs tests or completions (a script in `runners`); without one programs are compiled (`execution.check_completion`).
    """

    begins: re.Pattern[str]
    has_braces: bool
    simple: tuple[str, str, str]
    tool: str | None = None
    package: str = ''
    interpreter: Interpreter | None = None


def missing_tool(language: str) -> str | None:
    """Return what is not there of what a language needs, and how to get it; None where all is."""
    tool, package = LANGUAGES[language].tool, LANGUAGES[language].package
    if tool is None or shutil.which(tool):
        return None
    return f'{tool} is missing, which {language} programs need; install it (Debian: apt-get install {package})'


def runner(name: str) -> Mount:
    """Return one of our files that run inside."""
    return Mount(str(RUNNERS / name), f'{INSIDE}/{name}')


@functools.cache
def python_mounts() -> tuple[str, tuple[Mount, ...], tuple[str, ...]]:
    """Return this Python's program, its folders outside the system's, and the folders of packages, which are hidden."""
    program = os.path.realpath(sys.executable)
    mounts = []
    if not Path(program).is_relative_to('/usr'):
        library = Path(sysconfig.get_paths()['stdlib']).parent
        mounts = [Mount(program, program), Mount(str(library), str(library))]
    stdlib = Path(sysconfig.get_paths()['stdlib'])
    hidden = [str(stdlib / name) for name in ('site-packages', 'dist-packages') if (stdlib / name).is_dir()]
    return program, tuple(mounts), tuple(hidden)


def python_command(role: str, *descriptors: int, num_tests: int = 1) -> Command:
    """Return a Python process in a role, without any installed package. Each test is a process of its own."""
    program, mounts, hidden = python_mounts()
    script = runner('python_runner.py')
    return Command(
        arguments=(program, '-I', '-S', '-B', script, role, *map(str, descriptors)),
        mounts=(*mounts, script),
        hidden=hidden,
        limits=Limits(open_files=OPEN_FILES + len(descriptors)),
        may_fork=role == TESTS,
    )


@functools.cache
def node_mounts() -> tuple[str, tuple[Mount, ...]]:
    """Return Node's program, and its location if that is outside the system's folders."""
    program = os.path.realpath(shutil.which(NODE) or NODE)
    return program, () if Path(program).is_relative_to('/usr') else (Mount(program, program),)


def node_command(role: str, *descriptors: int, num_tests: int = 1) -> Command:
    """Return a Node process in a role. It reserves more address space than it uses, so that is not limited."""
    program, mounts = node_mounts()
    script = runner('node_runner.js')
    limits = Limits(counts_reserved=False, open_files=OPEN_FILES + len(descriptors))
    return Command(
        arguments=(program, '--max-old-space-size=512', '--no-addons', script, role, *map(str, descriptors)),
        mounts=(*mounts, script, runner('node_calls.js')),
        limits=replace(limits, cpu_seconds=limits.cpu_seconds * num_tests),
    )


def cpp_command(image: int, calls: int, results: int) -> Command:
    """Return a compiled program, run from an open file."""
    program = Mount(image, f'{INSIDE}/program', is_program=True)
    return Command(
        arguments=(program,),
        mounts=(program,),
        environment={'GAUNTLET_CALLS': str(calls), 'GAUNTLET_RESULTS': str(results)},
    )


LANGUAGES = {
    PYTHON: Language(
        begins=re.compile(r'^(?:async +)?def +(\w+) *\(', re.MULTILINE),
        has_braces=False,
        simple=('def f(x):\n', 'def check(candidate):\n    assert candidate(1) == 2\n', '    return x + 1\n'),
        interpreter=python_command,
    ),
    CPP: Language(
        begins=re.compile(
            r'^[^\S\n]*(?P<returns>[^\n(){};]*?[\s>*&])(?P<name>\w+)\s*\((?P<parameters>[^(){}]*)\)\s*\{', re.MULTILINE
        ),
        has_braces=True,
        simple=(
            'int f(int x) {\n',
            '#undef NDEBUG\n#include <assert.h>\nint main() { assert(f(1) == 2); }\n',
            'return x + 1;\n}\n',
        ),
        tool=COMPILER,
        package='g++',
    ),
    JAVASCRIPT: Language(
        begins=re.compile(r'^(?:(?:const|let|var) +(\w+) *=|(?:async +)?function *\*? *(\w+) *\()', re.MULTILINE),
        has_braces=True,
        simple=('const f = (x) => {\n', 'console.assert(f(1) === 2)\n', '  return x + 1\n}\n'),
        tool=NODE,
        package='nodejs',
        interpreter=node_command,
    ),
}
