"""Time the scoring of programs in each language, in the sandbox and as bare processes.

    make bench PART=programs [QUICK=1]      (or: .venv/bin/python scripts/bench/program_speed.py [--quick])

Programs are the solutions in HumanEval's files or, if absent, in our own. Each is scored as in an evaluation: the
program and its test in two processes, compiled first in C++. `alone` is the median of one program after another, `bare`
the same without a sandbox, and `parallel` the total time by the number of programs with one per processor at a time. In
C++ a problem's test is built once for all its programs: `first` includes that, `alone` does not.

Results are in runs/bench/code.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tabulate import tabulate

from llmfoundry_gauntlet.scoring.code.execution import check_completion
from llmfoundry_gauntlet.scoring.code.programs import LANGUAGES, Program, make_program
from llmfoundry_gauntlet.scoring.code.sandbox import NONE, Sandbox, find_sandbox

OUT = Path('runs/bench')
DATA_ROOTS = ('../shared/data/local_data', 'eval_data')
FILES = {
    'python': 'human_eval.jsonl',
    'c++': 'processed_human_eval_cpp.jsonl',
    'javascript': 'processed_human_eval_js.jsonl',
}
COUNTS = {'python': (160, 30), 'c++': (24, 5), 'javascript': (160, 30)}  # in a full run, in a quick one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--quick', action='store_true', help='fewer programs')
    parser.add_argument('--data-root', default=next(root for root in DATA_ROOTS if Path(root).is_dir()))
    arguments = parser.parse_args()
    sandbox = find_sandbox()
    results = []
    for language in LANGUAGES:
        if missing := LANGUAGES[language].missing():
            print(f'{language}: {missing}')
            continue
        rows = read(arguments.data_root, language, COUNTS[language][arguments.quick])
        results.append(measure(language, rows, sandbox))
    print(f'{sandbox}; seconds per program, {os.cpu_count()} processors')
    print(tabulate(results, headers='keys', floatfmt='.4g'))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / 'code.json').write_text(json.dumps({'sandbox': str(sandbox), 'languages': results}, indent=2) + '\n')
    print(f'{OUT / "code.json"}')


def read(data_root: str, language: str, count: int) -> list[tuple[Program, str]]:
    """Return problems with their solutions."""
    path = Path(data_root) / 'programming' / FILES[language]
    lines = path.read_text(encoding='utf-8').splitlines()
    problems = []
    for line in lines[:count]:
        row = json.loads(line)
        program = make_program(
            language=row['language'], prompt=row['prompt'], entry_point=row['entry_point'], test=row['test']
        )
        problems.append((program, row['canonical_solution']))
    return problems


def measure(language: str, rows: list[tuple[Program, str]], sandbox: Sandbox) -> dict[str, Any]:
    """Return all figures of a language, in seconds."""
    first = [timed(*row, sandbox) for row in rows]
    alone = [timed(*row, sandbox) for row in rows]
    bare_sandbox = Sandbox(NONE)
    for row in rows[:1] if language != 'c++' else rows:  # build their tests
        timed(*row, bare_sandbox)
    bare = [timed(*row, bare_sandbox) for row in rows]
    started = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda row: check_completion(*row, sandbox), rows))
    wall = time.perf_counter() - started
    return {
        'language': language,
        'programs': len(rows),
        'passed': sum(outcome.passed for outcome in outcomes),
        'first': statistics.median(first),
        'alone': statistics.median(alone),
        'bare': statistics.median(bare),
        'parallel': wall / len(rows),
        'programs_per_second': len(rows) / wall,
    }


def timed(program: Program, solution: str, sandbox: Sandbox) -> float:
    """Return the wall seconds of one program."""
    started = time.perf_counter()
    check_completion(program, solution, sandbox)
    return time.perf_counter() - started


if __name__ == '__main__':
    main()
