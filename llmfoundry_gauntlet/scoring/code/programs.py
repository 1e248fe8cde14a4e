"""Define languages and programs; problem and test are separate, so that a completion cannot access the test."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from llmfoundry_gauntlet.scoring.code import tools
from llmfoundry_gauntlet.scoring.code.sandbox import INSIDE, Command, Mount, ProgramLimits

RUNNERS = Path(__file__).parent / 'runners'
COMPLETION, TESTS = 'completion', 'tests'  # roles
OPEN_FILES = 64  # besides the pipes
PYTHON, CPP, JAVASCRIPT = 'python', 'c++', 'javascript'


class Interpreter(Protocol):
    """A function that returns an interpreter's command for a role; a process in the TESTS role runs several tests."""

    def __call__(self, role: str, *descriptors: int, num_tests: int = 1) -> Command:
        """Return the command."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """A programming language.

    `begins` matches the start of a function in a prompt; the last match is the function to complete. `simple` is a
    prompt, its test and a correct completion. `missing` returns why its tools are not here, None if they are.
    `interpreter` starts a process that runs tests or completions (a script in `runners`); without one, programs are
    compiled (`execution.check_completion`).
    """

    begins: re.Pattern[str]
    simple: tuple[str, str, str]
    missing: Callable[[], str | None] = lambda: None
    interpreter: Interpreter | None = None


def missing_compiler() -> str | None:
    """Return that C++ programs have no compiler and how to install one, None if they have."""
    if tools.gpp() or tools.zig():
        return None
    return f'g++ is missing, which {CPP} programs need; {tools.install("g++", "cpp")}'


def missing_node() -> str | None:
    """Return that JavaScript programs have no Node and how to install it, None if they have."""
    if tools.node():
        return None
    return f'node is missing, which {JAVASCRIPT} programs need; {tools.install("nodejs", "code")}'


def runner(name: str) -> Mount:
    """Return the mount of a file in `runners`, which runs inside the sandbox."""
    return Mount(str(RUNNERS / name), f'{INSIDE}/{name}')


@functools.cache
def python_mounts() -> tuple[str, tuple[Mount, ...], tuple[str, ...]]:
    """Return this Python's executable, its folders outside the system's, and its package folders, which are hidden."""
    program = os.path.realpath(sys.executable)
    stdlib = Path(sysconfig.get_paths()['stdlib'])
    mounts = []
    if not Path(program).is_relative_to('/usr'):
        library = str(stdlib.parent)
        mounts = [Mount(program, program), Mount(library, library)]
    package_folders = [stdlib / 'site-packages', stdlib / 'dist-packages']
    hidden = [str(folder) for folder in package_folders if folder.is_dir()]
    return program, tuple(mounts), tuple(hidden)


def python_command(role: str, *descriptors: int, num_tests: int = 1) -> Command:
    """Return the command of a Python process without installed packages. Each test runs in its own process."""
    program, mounts, hidden = python_mounts()
    script = runner('python_runner.py')
    return Command(
        arguments=(program, '-I', '-S', '-B', script, role, *map(str, descriptors)),
        mounts=(*mounts, script),
        hidden=hidden,
        limits=ProgramLimits(open_files=OPEN_FILES + len(descriptors)),
        may_fork=role == TESTS,
    )


@functools.cache
def node_program() -> Mount:
    """Return the mount of Node's executable, which may be in a folder that the sandbox does not show."""
    return Mount(os.path.realpath(tools.node() or 'node'), f'{INSIDE}/node')


def node_command(role: str, *descriptors: int, num_tests: int = 1) -> Command:
    """Return the command of a Node process. Its address space is not limited: Node reserves more than it uses."""
    program = node_program()
    script = runner('node_runner.js')
    limits = ProgramLimits(counts_reserved=False, open_files=OPEN_FILES + len(descriptors))
    return Command(
        arguments=(program, '--max-old-space-size=512', '--no-addons', script, role, *map(str, descriptors)),
        mounts=(program, script, runner('node_calls.js')),
        limits=replace(limits, cpu_seconds=limits.cpu_seconds * num_tests),
    )


def cpp_command(image: int, calls: int, results: int) -> Command:
    """Return the command of a compiled program, run from an open file."""
    program = Mount(image, f'{INSIDE}/program', is_program=True)
    return Command(
        arguments=(program,),
        mounts=(program,),
        environment={'GAUNTLET_CALLS': str(calls), 'GAUNTLET_RESULTS': str(results)},
    )


LANGUAGES = {
    PYTHON: Language(
        begins=re.compile(r'^(?:async +)?def +(\w+) *\(', re.MULTILINE),
        simple=('def f(x):\n', 'def check(candidate):\n    assert candidate(1) == 2\n', '    return x + 1\n'),
        interpreter=python_command,
    ),
    CPP: Language(
        begins=re.compile(
            r'^[^\S\n]*(?P<returns>[^\n(){};]*?[\s>*&])(?P<name>\w+)\s*\((?P<parameters>[^(){}]*)\)\s*\{', re.MULTILINE
        ),
        simple=(
            'int f(int x) {\n',
            '#undef NDEBUG\n#include <assert.h>\nint main() { assert(f(1) == 2); }\n',
            'return x + 1;\n}\n',
        ),
        missing=missing_compiler,
    ),
    JAVASCRIPT: Language(
        begins=re.compile(r'^(?:(?:const|let|var) +(\w+) *=|(?:async +)?function *\*? *(\w+) *\()', re.MULTILINE),
        simple=('const f = (x) => {\n', 'console.assert(f(1) === 2)\n', '  return x + 1\n}\n'),
        missing=missing_node,
        interpreter=node_command,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A problem in one language.

    `prelude` is the part of the prompt before the `function` to complete: imports and helpers that the test may use
    too. `pairs` are source texts of arguments and results that replace the test if not None. The test calls `target`,
    which is the function; pairs call the entry point, whatever other functions a prompt starts. `joins_lines` puts an
    indented Python completion on a new line if the prompt does not end one.
    """

    language: str
    prompt: str
    prelude: str
    function: str
    target: str
    test: str
    pairs: tuple[tuple[str, str], ...] | None = None
    joins_lines: bool = True


class Begun(NamedTuple):
    """A function that a text starts, and its position; for C++ also its return type and parameters."""

    start: int
    name: str
    returns: str = ''
    parameters: str = ''

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters. Raise ValueError for a parameter without one."""
        return [parameter_name(part) for part in split_parameters(self.parameters)]


def make_program(
    *,
    language: str,
    prompt: str,
    entry_point: str,
    test: str,
    pairs: tuple[tuple[str, str], ...] | None = None,
    joins_lines: bool = True,
) -> Program:
    """Split a problem into its parts. If the prompt starts no function, `entry_point` is the one to write."""
    prelude, function = '', entry_point
    begun = functions(language, prompt)
    if begun:  # the last one is to be completed, those before it are helpers
        prelude, function = prompt[: begun[-1].start], begun[-1].name
    return Program(
        language=language,
        prompt=prompt,
        prelude=prelude,
        function=function,
        target=function if pairs is None else entry_point,
        test=test,
        pairs=pairs,
        joins_lines=joins_lines,
    )


def functions(language: str, text: str) -> list[Begun]:
    """Return all functions that begin at the start of a line."""
    begun = []
    for match in LANGUAGES[language].begins.finditer(text):
        if language == CPP:
            returns, parameters = bare_type(match['returns']), match['parameters'].strip()
            begun.append(Begun(match.start(), match['name'], returns, parameters))
        else:
            begun.append(Begun(match.start(), next(filter(None, match.groups()))))
    return begun


def signature_of(program: Program) -> Begun:
    """Return the function to complete as a C++ prompt declares it. Raise ValueError if the prompt does not."""
    begun = [function for function in functions(CPP, program.prompt) if function.name == program.target]
    if not begun:
        raise ValueError(f'the prompt does not begin {program.target}')
    return begun[-1]


def bare_type(text: str) -> str:
    """Return a type without linkage specifiers."""
    return ' '.join(word for word in text.split() if word not in ('inline', 'static', 'constexpr', 'extern'))


def split_parameters(text: str) -> list[str]:
    """Return the parameters; their types may contain commas."""
    parameters = ['']
    depth = 0
    for letter in text:
        if letter in '<{[':
            depth += 1
        elif letter in '>}]':
            depth -= 1
        if letter == ',' and depth == 0:
            parameters.append('')
        else:
            parameters[-1] += letter
    return [parameter.strip() for parameter in parameters if parameter.strip()]


def parameter_name(parameter: str) -> str:
    """Return the name of a parameter."""
    without_default = parameter.split('=')[0].strip()
    name = re.search(r'(\w+)\s*(?:\[\s*\]\s*)?$', without_default)  # int a, int a[]
    if name is None:
        raise ValueError(f'the parameter {parameter!r} has no name')
    return name[1]


def whole_text(program: Program, completion: str) -> str:
    """Return prompt and completion as one text.

    In Python an indented completion starts a new line if the prompt does not end one; Composer 0.17 does not do that.
    """
    lacks_line = completion.startswith(('  ', '\t')) and not program.prompt.endswith('\n')
    joins = program.joins_lines and program.language == PYTHON and lacks_line
    return program.prompt + ('\n' if joins else '') + completion
