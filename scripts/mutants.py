"""Apply mutations to a copy of the package, one at a time, and show which tests fail for each.

    make mutants    (or: .venv/bin/python scripts/mutants.py [--only WORD] [--jobs N])

A mutation is a plausible fault: a text that occurs exactly once in a file, its replacement, and the tests that should
fail; `mutations.yaml` lists them. It survives if these pass; then a test is missing. It is out of date if its text does
not occur once. The exit status is 1 if any survives or is out of date.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parent.parent
COPIED = (
    'llmfoundry_gauntlet',
    'tests',
    'scripts',
    'yamls',
    'eval_data',
    'docs',
    'pyproject.toml',
    'README.md',
    'CONTRIBUTING.md',
    'mkdocs.yml',
    'Makefile',
    '.pre-commit-config.yaml',
)
SECONDS = 300


class Mutation(NamedTuple):
    """`old` becomes `new` in `file`, a path below the package; `tests` are paths below tests/."""

    file: str
    tests: str
    name: str
    old: str
    new: str


def read_mutations() -> list[Mutation]:
    """Return all faults of mutations.yaml, in its order."""
    files = yaml.safe_load(Path(__file__).with_name('mutations.yaml').read_text('utf-8'))
    return [
        Mutation(file, tests, name, old, new)
        for file, by_tests in files.items()
        for tests, faults in by_tests.items()
        for name, (old, new) in faults.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', help='mutations whose name or file contains this word')
    parser.add_argument('--jobs', type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    chosen = [
        mutation
        for mutation in read_mutations()
        if arguments.only is None or arguments.only in mutation.name or arguments.only in mutation.file
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = []
        for mutation, (killed, outcome) in zip(chosen, pool.map(try_out, chosen), strict=True):
            outcomes.append(killed)
            print(f'{"" if killed else "SURVIVES "}{mutation.name} ({mutation.file}): {outcome}', flush=True)
    print(f'{sum(outcomes)} of {len(outcomes)} mutations noticed in {time.perf_counter() - started:.0f} s')
    sys.exit(not all(outcomes))


def try_out(mutation: Mutation) -> tuple[bool, str]:
    """Return whether a test fails for it, and which; or why none does."""
    path = Path('llmfoundry_gauntlet', mutation.file)
    text = (ROOT / path).read_text('utf-8')
    if (count := text.count(mutation.old)) != 1:
        return False, f'out of date: its text occurs {count} times in the file'
    with tempfile.TemporaryDirectory(prefix='mutant-') as folder:
        copy = Path(folder, 'project')
        copy.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy(ROOT / name, copy / name)
        if (shared := ROOT.parent / 'shared').is_dir():
            Path(folder, 'shared').symlink_to(shared.resolve())
        (copy / path).write_text(text.replace(mutation.old, mutation.new), 'utf-8')
        tests = [f'tests/{name}' for name in mutation.tests.split()]
        command = [sys.executable, '-m', 'pytest', '-x', '-p', 'no:cacheprovider', '-m', 'not long', *tests]
        environment = {**os.environ, 'PYTHONPATH': str(copy), 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return True, f'not done in {SECONDS} s'
    failed = [line for line in done.stdout.splitlines() if line.startswith('FAILED')]
    if done.returncode == 1 and failed:
        return True, failed[0].removeprefix('FAILED ').split(' - ')[0]
    return (
        False,
        'no test fails' if done.returncode == 0 else f'pytest ended with {done.returncode}: {done.stdout[-300:]}',
    )


if __name__ == '__main__':
    main()
