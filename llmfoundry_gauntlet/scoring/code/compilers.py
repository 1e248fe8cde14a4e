"""Describe the C++ compiler of this machine as commands inside the sandbox: g++ or, where there is none, Zig's clang.

Zig builds its standard library when it first links a program, which takes a minute or two, and checks what it has
built at every link, for which it writes to its cache. Programs in the sandbox may write to no cache, so the libraries
are built outside of it, once for a user, and linked by the linker alone.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from llmfoundry_gauntlet.config.resources import VARIABLE, cache_folder
from llmfoundry_gauntlet.scoring.code import tools
from llmfoundry_gauntlet.scoring.code.sandbox import INSIDE, CannotRun, Mount

log = logging.getLogger(__name__)

FLAGS = '-std=c++17 -w'
RUNNERS = Path(__file__).parent / 'runners'
BITS = Mount(str(RUNNERS / 'libcxx'), f'{INSIDE}/libcxx')  # bits/stdc++.h, which only g++ has

# The oldest glibc that has what libc++ needs; programs run with it and all later ones.
ZIG_TARGET = f'{platform.machine()}-linux-gnu.2.28'
# As with g++, undefined behaviour is not trapped, and a precompiled header is used whatever times its files have.
ZIG_FLAGS = f'-target {ZIG_TARGET} -g0 -fno-sanitize=undefined -Xclang -fno-pch-timestamp'
ZIG_CACHE = 'ZIG_GLOBAL_CACHE_DIR="$TMPDIR/zig" ZIG_LOCAL_CACHE_DIR="$TMPDIR/zig"'
ZIG_BUILD_SECONDS = 1200
SOURCE = '#include <string>\nint main(int count, char**) { return std::string(count, 1).empty(); }\n'
LINKER = 'ld.lld '  # begins the line that shows the call of the linker
ARGUMENTS = 'arguments.txt'


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A C++ compiler in the sandbox.

    `compile` is the beginning of a shell command that takes options of g++ and makes an object file, `link` of one that
    takes object files and makes a program. `version` tells compilers apart whose precompiled headers differ;
    `header_moves` is whether these may be used in another folder than that of the header they were built from.
    """

    compile: str
    link: str
    version: bytes
    header_moves: bool = True
    mounts: tuple[Mount, ...] = ()


@functools.cache
def find_compiler() -> Compiler:
    """Return the compiler of this machine. Raise CannotRun if it has none, or it cannot be prepared."""
    if tools.gpp() is not None:
        return Compiler(compile=f'g++ {FLAGS}', link='g++', version=version_of('g++', '--version'))
    zig = tools.zig()
    if zig is None:
        raise CannotRun('there is no C++ compiler')
    return zig_compiler(zig)


def version_of(*command: str) -> bytes:
    """Return what a command that shows a version prints. Raise CannotRun if it fails."""
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRun(f'{shlex.join(command)}: {error}') from None


def zig_compiler(zig: str) -> Compiler:
    """Return Zig's compiler with its libraries, which are built if they are not cached. Raise CannotRun."""
    version = version_of(zig, 'version')
    libraries = zig_libraries(zig, version.decode().strip())
    executable = '"$FILES/zig/zig"'
    return Compiler(
        compile=f'{ZIG_CACHE} {executable} c++ {FLAGS} {ZIG_FLAGS} -I "$FILES/libcxx"',
        link=f'cd "$FILES/libraries" && {executable} ld.lld @{ARGUMENTS}',
        version=version + ZIG_FLAGS.encode(),
        header_moves=False,
        mounts=(
            Mount(str(Path(zig).parent), f'{INSIDE}/zig'),
            Mount(str(libraries), f'{INSIDE}/libraries'),
            BITS,
        ),
    )


def zig_libraries(zig: str, version: str) -> Path:
    """Return the folder with Zig's C++ libraries and the linker's arguments that name them. Raise CannotRun."""
    cache = cache_folder('zig')
    if cache is None:
        raise CannotRun(f'ziglang builds its C++ library into the cache, which {VARIABLE} turns off; or install g++')
    libraries = cache / f'{version}-{ZIG_TARGET}'
    if libraries.is_dir():
        return libraries
    # On every rank, as only the first one's messages may be shown, and another may be the one that builds.
    log.warning('ziglang builds its C++ library, once, in about two minutes: %s', libraries)
    start = time.monotonic()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / 'lock'):  # the others wait: each would take all cores
            if not libraries.is_dir():
                build_libraries(zig, libraries)
    except OSError as error:
        raise CannotRun(f'{cache}: ziglang cannot build its C++ library here: {error}') from None
    log.warning('ziglang: the C++ library is built, in %.0f s', time.monotonic() - start)
    return libraries


def build_libraries(zig: str, libraries: Path) -> None:
    """Build Zig's C++ libraries into a new folder. Raise CannotRun, or OSError."""
    with tempfile.TemporaryDirectory(dir=libraries.parent) as work:
        source = Path(work, 'empty.cpp')
        source.write_text(
            '#include <string>\nint main(int number, char**) { return std::string(number, 1).empty(); }\n'
        )
        folder = Path(work, libraries.name)
        folder.mkdir()
        cache = Path(work, 'cache')
        arguments = [relocated(argument, cache, folder) for argument in linker_arguments(zig, source, cache)]
        (folder / ARGUMENTS).write_text('\n'.join(arguments) + '\n')
        os.rename(folder, libraries)


def linker_arguments(zig: str, source: Path, cache: Path) -> list[str]:
    """Return the arguments of Zig's linker for a program, but not the program's own files. Raise CannotRun."""
    compiled, program = source.with_name('compiled.o'), source.with_name('program')
    compiler = [zig, 'c++', *FLAGS.split(), *ZIG_FLAGS.split()]
    shown_by_zig([*compiler, '-c', str(source), '-o', str(compiled)], cache)
    shown = shown_by_zig([*compiler, str(compiled), '-o', str(program)], cache)
    lines = [line for line in shown.splitlines() if line.startswith(LINKER)]
    if not lines:
        raise CannotRun(f'ziglang does not show how it links: {last_line(shown)}')
    of_program = [str(compiled), '-o', str(program)]
    arguments = shlex.split(lines[-1].removeprefix(LINKER))
    return [argument for argument in arguments if argument not in of_program]


def shown_by_zig(command: Sequence[str], cache: Path) -> str:
    """Return what a command of Zig shows. Raise CannotRun if it fails."""
    folders = {'ZIG_GLOBAL_CACHE_DIR': str(cache), 'ZIG_LOCAL_CACHE_DIR': str(cache)}
    environment = {**os.environ, **folders, 'ZIG_VERBOSE_LINK': '1'}
    try:
        done = subprocess.run(
            command, cwd=cache.parent, env=environment, capture_output=True, text=True, timeout=ZIG_BUILD_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(f'ziglang has not built its C++ library in {ZIG_BUILD_SECONDS} seconds') from None
    if done.returncode != 0:
        raise CannotRun(f'ziglang cannot build its C++ library: {last_line(done.stderr)}')
    return done.stderr


def last_line(text: str) -> str:
    """Return the last line of a message."""
    return (text.strip().splitlines() or ['no message'])[-1]


def relocated(argument: str, cache: Path, folder: Path) -> str:
    """Return an argument of the linker; a file in Zig's cache is copied into `folder`, where the linker will run."""
    path = cache.parent / argument  # Zig shortens paths below the working directory
    if not path.is_relative_to(cache):
        return argument
    shutil.copyfile(path, folder / path.name)
    return path.name
