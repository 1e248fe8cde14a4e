"""The interpreters and compilers of the three languages, and how they are called in a sandbox."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

from llmfoundry_gauntlet.judging.code.programs import CPP, JAVASCRIPT
from llmfoundry_gauntlet.judging.code.sandbox import INSIDE, Command, Limits, Mount

RUNNERS = Path(__file__).parent / 'runners'
COMPILER = 'g++'
NODE = 'node'
COMPLETION, TESTS = 'completion', 'tests'  # roles
OPEN_FILES = 64  # besides the pipes
PACKAGES = {CPP: 'g++', JAVASCRIPT: 'nodejs'}  # Debian's


def missing_tool(language: str) -> str | None:
    """What is not there of what a language needs, and how to get it; None where all is."""
    tool = {CPP: COMPILER, JAVASCRIPT: NODE}.get(language)
    if tool is None or shutil.which(tool):
        return None
    return (
        f'{tool} is missing, which {language} programs need; install it (Debian: apt-get install {PACKAGES[language]})'
    )


def runner(name: str) -> Mount:
    """A file of ours that runs inside."""
    return Mount(str(RUNNERS / name), f'{INSIDE}/{name}')


@functools.cache
def python_mounts() -> tuple[str, tuple[Mount, ...], tuple[str, ...]]:
    """This Python's program, its folders outside the system's, and the folders of packages, which are hidden."""
    program = os.path.realpath(sys.executable)
    mounts = []
    if not Path(program).is_relative_to('/usr'):
        library = Path(sysconfig.get_paths()['stdlib']).parent
        mounts = [Mount(program, program), Mount(str(library), str(library))]
    stdlib = Path(sysconfig.get_paths()['stdlib'])
    hidden = [str(stdlib / name) for name in ('site-packages', 'dist-packages') if (stdlib / name).is_dir()]
    return program, tuple(mounts), tuple(hidden)


def python_command(role: str, *descriptors: int, num_tests: int = 1) -> Command:
    """A Python process in a role, without any installed package. Each test is a process of its own."""
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
    """Node's program, and where it is if that is outside the system's folders."""
    program = os.path.realpath(shutil.which(NODE) or NODE)
    return program, () if Path(program).is_relative_to('/usr') else (Mount(program, program),)


def node_command(role: str, *descriptors: int, num_tests: int = 1) -> Command:
    """A Node process in a role. It reserves more address space than it uses, so that does not count."""
    program, mounts = node_mounts()
    script = runner('node_runner.js')
    limits = Limits(counts_reserved=False, open_files=OPEN_FILES + len(descriptors))
    return Command(
        arguments=(program, '--max-old-space-size=512', '--no-addons', script, role, *map(str, descriptors)),
        mounts=(*mounts, script, runner('node_calls.js')),
        limits=replace(limits, cpu_seconds=limits.cpu_seconds * num_tests),
    )


def cpp_command(image: int, calls: int, results: int) -> Command:
    """A compiled program, out of an open file."""
    program = Mount(image, f'{INSIDE}/program', is_program=True)
    return Command(
        arguments=(program,),
        mounts=(program,),
        environment={'GAUNTLET_CALLS': str(calls), 'GAUNTLET_RESULTS': str(results)},
    )
