"""Builds C++ programs in the sandbox: a completion and a test of separate sources, which share none of their text."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmfoundry_gauntlet.judging.code.programs import Begun, Program, signature_of
from llmfoundry_gauntlet.judging.code.sandbox import INSIDE, MIB, Command, Limits, Mount, Sandbox, in_memory, started
from llmfoundry_gauntlet.judging.code.tools import COMPILER, runner
from llmfoundry_gauntlet.judging.code.verdicts import Undecided
from llmfoundry_gauntlet.prompts.cache import cache_folder

log = logging.getLogger(__name__)

FLAGS = '-std=c++17 -w'
INCLUDE = f'{FLAGS} -include $FILES/remote.hpp'
BUILD_LIMITS = Limits(threads=32, file_bytes=64 * MIB, tmp_bytes=256 * MIB)
HEADER_LIMITS = Limits(cpu_seconds=60, threads=32, file_bytes=512 * MIB, tmp_bytes=600 * MIB, memory_bytes=2048 * MIB)
BUILD_SECONDS = 60.0  # for what is ours
KEPT = 32  # problems whose test is kept built
NOT_BUILT = 'does not compile'

TEST = """{prelude}
static gauntlet::Asked gauntlet_asked;
{returns} {name}({parameters}) {{ return gauntlet::call<{returns}>({names}); }}
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
CLOSE = 'std::abs(a - b) < 1e-4'
ALL_CLOSE = (
    'a.size() == b.size() && '
    'std::equal(a.begin(), a.end(), b.begin(), [](double a, double b) { return std::abs(a - b) < 1e-4; })'
)
EQUAL_TYPES = (
    *('std::string', 'char', 'int', 'long long', 'bool', 'std::vector<std::string>', 'std::vector<int>'),
    *('std::vector<std::vector<int>>', 'std::map<char, int>', 'std::map<std::string, int>'),
)
CLOSE_TYPES = {'double': CLOSE, 'std::vector<float>': ALL_CLOSE}
COMPLETION = '#define main gauntlet_unused_main\n'  # a completion's own main is not run


def build_cpp(program: Program, code: str, sandbox: Sandbox, deadline: float) -> tuple[bytes, bytes]:
    """The programs of the test and of the completion. Raises Undecided where one is not built."""
    try:
        signature = signature_of(program)
        names = ', '.join(signature.names)
    except ValueError as error:
        raise Undecided(f'the problem cannot be run: {error}') from None
    test, server = build_problem(program, signature, names, sandbox)
    if test is None or server is None:
        raise Undecided('the test does not compile')
    built = build(
        f'{COMPILER} {INCLUDE} $FILES/completion.cpp $FILES/server.o -o $TMPDIR/program && cat $TMPDIR/program',
        header_mounts(sandbox),
        {'completion.cpp': (COMPLETION + code).encode(), 'server.o': server},
        sandbox,
        deadline,
    )
    if built is None:
        raise Undecided(NOT_BUILT)
    return test, built


@functools.lru_cache(maxsize=KEPT)
def build_problem(
    program: Program, signature: Begun, names: str, sandbox: Sandbox
) -> tuple[bytes | None, bytes | None]:
    """The test's program, and the object that serves calls to a completion: the same for all completions."""
    deadline = time.monotonic() + BUILD_SECONDS
    parts = {'returns': signature.returns, 'name': signature.name, 'parameters': signature.parameters, 'names': names}
    test = build(
        f'{COMPILER} {INCLUDE} $FILES/test.cpp -o $TMPDIR/program && cat $TMPDIR/program',
        header_mounts(sandbox),
        {'test.cpp': TEST.format(prelude=program.prelude, test=test_of(program), **parts).encode()},
        sandbox,
        deadline,
    )
    server = build(
        f'{COMPILER} {INCLUDE} -c $FILES/server.cpp -o $TMPDIR/server.o && cat $TMPDIR/server.o',
        header_mounts(sandbox),
        {'server.cpp': SERVER.format(**parts).encode()},
        sandbox,
        deadline,
    )
    return test, server


def test_of(program: Program) -> str:
    """The test's source; of pairs one that compares every result, floats within 1e-4, as Composer 0.17 did."""
    if program.pairs is None:
        return program.test
    overloads = [SAME.format(type=kind, test='a == b') for kind in EQUAL_TYPES]
    overloads += [SAME.format(type=kind, test=test) for kind, test in CLOSE_TYPES.items()]
    checks = [f'  if (!issame({program.target}({given}), {wanted})) std::abort();' for given, wanted in program.pairs]
    return PAIRS.format(overloads='\n'.join(overloads), checks='\n'.join(checks))


def build(
    script: str,
    mounts: Sequence[Mount],
    files: Mapping[str, bytes],
    sandbox: Sandbox,
    deadline: float,
    limits: Limits = BUILD_LIMITS,
) -> bytes | None:
    """What a shell script in the sandbox writes, given these files; None where it fails. Raises Undecided in time."""
    descriptors = {name: in_memory(content) for name, content in files.items()}
    output = os.memfd_create('gauntlet', os.MFD_CLOEXEC)
    try:
        ours = [Mount(descriptor, f'{INSIDE}/{name}') for name, descriptor in descriptors.items()]
        command = Command(arguments=('sh', '-c', script), mounts=(*mounts, *ours), limits=limits, may_fork=True)
        with started(sandbox, command, stdout=output) as running:
            try:
                status = running.wait(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                raise Undecided('not compiled in time') from None
            running.check_started()
        return os.pread(output, os.fstat(output).st_size, 0) if status == 0 else None
    finally:
        for descriptor in (output, *descriptors.values()):
            os.close(descriptor)


@functools.lru_cache(maxsize=1)
def header_mounts(sandbox: Sandbox) -> tuple[Mount, ...]:
    """Our header, and the same compiled, which is kept in the user's cache folder; built once for a compiler."""
    header = runner('remote.hpp')
    folder = cache_folder('headers')
    if folder is None:
        return (header,)
    version = subprocess.run([COMPILER, '--version'], capture_output=True, check=True).stdout
    content = Path(header.source).read_bytes()
    digest = hashlib.sha256(b'\0'.join([version, FLAGS.encode(), content])).hexdigest()[:16]
    compiled = folder / f'{digest}.gch'
    if not compiled.exists():
        built = build(
            f'cp $FILES/remote.hpp $TMPDIR && {COMPILER} {FLAGS} -x c++-header $TMPDIR/remote.hpp '
            '-o $TMPDIR/remote.hpp.gch && cat $TMPDIR/remote.hpp.gch',
            (header,),
            {},
            sandbox,
            time.monotonic() + BUILD_SECONDS,
            HEADER_LIMITS,
        )
        if built is None or not keep(compiled, built):
            return (header,)
    return (header, Mount(str(compiled), f'{header.target}.gch'))


def keep(path: Path, content: bytes) -> bool:
    """Writes a file that others may read or write as well; whether it could."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as stream:
            stream.write(content)
        os.chmod(stream.name, 0o644)
        os.replace(stream.name, path)
    except OSError as error:
        log.warning('%s: the compiled header is not kept, programs take longer to build: %s', path, error)
        return False
    return True
