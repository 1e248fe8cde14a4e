"""Build C++ programs in the sandbox: completion and test are separate sources that share no text."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmfoundry_gauntlet.config.resources import cache_folder
from llmfoundry_gauntlet.data.stores import write_atomically
from llmfoundry_gauntlet.scoring.code.compilers import FLAGS, RUNNERS, find_compiler
from llmfoundry_gauntlet.scoring.code.programs import Program, runner, signature_of
from llmfoundry_gauntlet.scoring.code.sandbox import (
    INSIDE,
    MIB,
    CannotRun,
    Command,
    Mount,
    ProgramLimits,
    Sandbox,
    Undecided,
    file_in_memory,
    started,
)

log = logging.getLogger(__name__)

_building = threading.Lock()

WITH_COMMON = '-include "$FILES/common.hpp"'
WITH_CALLS = '-include "$FILES/remote.hpp"'
BUILD_LIMITS = ProgramLimits(cpu_seconds=8, threads=32, file_bytes=64 * MIB, tmp_bytes=256 * MIB)
HEADER_LIMITS = ProgramLimits(
    cpu_seconds=60, threads=32, file_bytes=512 * MIB, tmp_bytes=600 * MIB, memory_bytes=2048 * MIB
)
BUILD_SECONDS = 60.0  # for the test, the server and the header; a completion has its own deadline
KEPT = 32  # problems whose compiled parts are cached
NOT_BUILT = 'does not compile'

TEST = """{prelude}
static gauntlet::Asked gauntlet_asked;
std::decay_t<{returns}> gauntlet_{name}({parameters}) {{ return gauntlet::call<{returns}>({names}); }}
#define {name} gauntlet_{name}
{test}
"""
SERVER = """using namespace std;
{returns} {name}({parameters});
int main() {{
  {returns} (*function)({parameters}) = ::{name};
  return gauntlet::serve(function);
}}
"""
PAIRS = """
#include <cstdlib>
{overloads}
int main() {{
{checks}
}}
"""
SAME = 'inline bool issame({type} a, {type} b) {{ return {test}; }}'
KNOWN_CHECK = '  if (!issame({call}, {wanted})) std::abort();'
EQUAL_CHECK = '  {{ {returns} expected = {wanted}; if (!({call} == expected)) std::abort(); }}'
CLOSE = 'std::abs(a - b) < 1e-4'
ALL_CLOSE = (
    'a.size() == b.size() && '
    'std::equal(a.begin(), a.end(), b.begin(), [](double a, double b) { return std::abs(a - b) < 1e-4; })'
)
EQUAL_TYPES = (
    # single values
    'std::string',
    'char',
    'int',
    'long long',
    'bool',
    # containers
    'std::vector<std::string>',
    'std::vector<int>',
    'std::vector<std::vector<int>>',
    'std::map<char, int>',
    'std::map<std::string, int>',
)
CLOSE_TYPES = {'double': CLOSE, 'std::vector<float>': ALL_CLOSE}
COMPLETION = '#define main gauntlet_unused_main\n'  # a completion's own main is not run


@dataclass(frozen=True, slots=True)
class CompiledProblem:
    """The compiled parts shared by all completions of a problem: the test, and the object file that serves calls."""

    test: bytes
    server: bytes


def build_completion(problem: CompiledProblem, code: str, sandbox: Sandbox, deadline: float) -> bytes:
    """Compile a completion and return its executable. Raise Undecided if it does not compile."""
    compiler = find_compiler()
    built = run_script(
        f'{compiler.compile} {WITH_COMMON} -c "$FILES/completion.cpp" -o "$TMPDIR/completion.o" && '
        f'{compiler.link} "$TMPDIR/completion.o" "$FILES/server.o" -o "$TMPDIR/program" && cat "$TMPDIR/program"',
        header_mounts(sandbox),
        {'completion.cpp': (COMPLETION + code).encode(errors='replace'), 'server.o': problem.server},
        sandbox,
        deadline,
    )
    if built is None:
        raise Undecided(NOT_BUILT)
    return built


@functools.lru_cache(maxsize=KEPT)
def build_problem(program: Program, sandbox: Sandbox) -> CompiledProblem:
    """Compile the parts of a problem.

    Raise CannotRun if that fails; with `pairs`, some of which are invalid in the data, raise Undecided.
    """
    failure = CannotRun if program.pairs is None else Undecided
    try:
        signature = signature_of(program)
        names = ', '.join(signature.names)
    except ValueError as error:
        raise failure(f'the problem cannot be run: {error}') from None
    parts = {'returns': signature.returns, 'name': signature.name, 'parameters': signature.parameters, 'names': names}
    test = TEST.format(prelude=program.prelude, test=test_of(program, signature.returns), **parts)
    server = SERVER.format(prelude=program.prelude, **parts)
    compiler = find_compiler()
    mounts = (*header_mounts(sandbox), runner('remote.hpp'))
    deadline = time.monotonic() + BUILD_SECONDS

    def built(name: str, source: str, last_step: str) -> bytes | None:
        """Return what the steps build from the source, None if it does not compile. Raise Undecided on a timeout."""
        return run_script(
            f'{compiler.compile} {WITH_COMMON} {WITH_CALLS} -c "$FILES/{name}.cpp" -o "$TMPDIR/{name}.o" '
            f'&& {last_step}',
            mounts,
            {f'{name}.cpp': source.encode(errors='replace')},
            sandbox,
            deadline,
        )

    try:
        built_test = built('test', test, f'{compiler.link} "$TMPDIR/test.o" -o "$TMPDIR/test" && cat "$TMPDIR/test"')
        built_server = built('server', server, 'cat "$TMPDIR/server.o"')
    except Undecided as reason:
        raise CannotRun(f'the test: {reason}') from None
    if built_test is None or built_server is None:
        raise failure('the test does not compile')
    return CompiledProblem(built_test, built_server)


def test_of(program: Program, returns: str) -> str:
    """Return the test's source; for pairs, a test that compares every result.

    As in Composer 0.17, floats are equal within 1e-4; results of types it did not know must be equal.
    """
    if program.pairs is None:
        return program.test
    overloads = [SAME.format(type=kind, test='a == b') for kind in EQUAL_TYPES]
    overloads += [SAME.format(type=kind, test=test) for kind, test in CLOSE_TYPES.items()]

    known_types = {without_namespace(kind) for kind in (*EQUAL_TYPES, *CLOSE_TYPES, 'float')}
    check = KNOWN_CHECK if without_namespace(returns) in known_types else EQUAL_CHECK
    checks = []
    for given, wanted in program.pairs:
        checks.append(check.format(call=f'{program.target}({given})', wanted=wanted, returns=returns))
    return PAIRS.format(overloads='\n'.join(overloads), checks='\n'.join(checks))


def without_namespace(kind: str) -> str:
    """Return a type without spaces and the name of the standard namespace."""
    return kind.replace(' ', '').replace('std::', '')


def run_script(
    script: str,
    mounts: Sequence[Mount],
    files: Mapping[str, bytes],
    sandbox: Sandbox,
    deadline: float,
    limits: ProgramLimits = BUILD_LIMITS,
) -> bytes | None:
    """Return the output of a shell script in the sandbox, None if it fails. Raise Undecided on a timeout."""
    with contextlib.ExitStack() as stack:
        ours = [
            Mount(stack.enter_context(file_in_memory(content)), f'{INSIDE}/{name}') for name, content in files.items()
        ]
        output = stack.enter_context(file_in_memory(b''))
        command = Command(arguments=('sh', '-c', script), mounts=(*mounts, *ours), limits=limits, may_fork=True)
        with started(sandbox, command, stdout=output) as running:
            try:
                status = running.wait(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                raise Undecided('not compiled in time') from None
            running.check_started()
        return os.pread(output, os.fstat(output).st_size, 0) if status == 0 else None


def header_mounts(sandbox: Sandbox) -> tuple[Mount, ...]:
    """Return the mounts of the header that all programs include, precompiled if that can be cached for this user."""
    with _building:
        return compiled_header(sandbox)


@functools.lru_cache(maxsize=1)
def compiled_header(sandbox: Sandbox) -> tuple[Mount, ...]:
    """Return `header_mounts`, computed once per compiler."""
    compiler = find_compiler()
    header = runner('common.hpp')
    plain = (*compiler.mounts, header)
    folder = cache_folder('headers')
    is_movable = sandbox.is_isolated or compiler.header_moves  # without isolation every program has a folder of its own
    if folder is None or not is_movable:
        return plain
    content = (RUNNERS / 'common.hpp').read_bytes()
    digest = hashlib.sha256(b'\0'.join([compiler.version, FLAGS.encode(), content])).hexdigest()[:16]
    compiled = folder / f'{digest}.gch'
    if not os.path.exists(compiled):
        try:
            built = run_script(
                f'{compiler.compile} -x c++-header "$FILES/common.hpp" -o "$TMPDIR/common.hpp.gch" '
                '&& cat "$TMPDIR/common.hpp.gch"',
                plain,
                {},
                sandbox,
                time.monotonic() + BUILD_SECONDS,
                HEADER_LIMITS,
            )
        except Undecided:
            built = None
        if built is None or not keep(compiled, built):
            return plain
    return (*plain, Mount(str(compiled), f'{header.target}.gch'))


def keep(path: Path, content: bytes) -> bool:
    """Write a file that other processes may read or write at the same time; return whether that succeeded."""
    try:
        write_atomically(path, [content])
    except OSError as error:
        log.warning('%s: the compiled header is not kept, programs take longer to build: %s', path, error)
        return False
    return True
