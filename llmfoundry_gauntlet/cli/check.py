"""`gauntlet data check`: data checks, and the canonical solutions of code tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmfoundry_gauntlet.cli.options import (
    CHECK_FAILED,
    GAUNTLET_TASKS,
    Confinement,
    DataRoot,
    Score,
    Tasks,
    check_options,
)
from llmfoundry_gauntlet.errors import ConfigError, DataError, print_problems

if TYPE_CHECKING:
    from llmfoundry_gauntlet.data.checks import Record
    from llmfoundry_gauntlet.tasks import Task

WIDTH = 100  # of tables, if the output is not a terminal

Against = Annotated[
    list[str] | None,
    typer.Option(
        '--against', help='Training text to look for the rows in: a file of text or JSON lines, or a folder of them.'
    ),
]


def check(
    context: typer.Context,
    tasks: Tasks = None,
    score: Score = None,
    data_root: DataRoot = 'eval_data',
    against: Against = None,
    solutions: Annotated[
        bool, typer.Option('--solutions', help='Run the canonical solutions of code tasks instead.')
    ] = False,
    sandbox: Confinement = 'auto',
    as_json: Annotated[bool, typer.Option('--json', help='Print JSON instead of tables.')] = False,
) -> None:
    """Find duplicates, conflicting golds, majority answers, and rows that occur in a training text.

    Without --tasks and --score, checks all files of the Gauntlet and of SCORE below --data-root. Status 1 if a row
    cannot be read or a solution fails; findings alone are status 0.

    gauntlet data check --data-root eval_data

    gauntlet data check --tasks tasks.yaml --against train.jsonl.gz --against books

    gauntlet data check --solutions
    """
    check_options(
        context,
        needs={'sandbox': ('solutions',)},
        excludes={'solutions': ('score', 'against')},
    )
    if solutions:
        check_programs(tasks, data_root, sandbox, as_json)
        return
    from llmfoundry_gauntlet.data.checks import check_file, find_overlap, training_files
    from llmfoundry_gauntlet.data.collection import paused_collection
    from llmfoundry_gauntlet.tasks.checked_rows import read_files

    texts = [file for source in against or () for file in training_files(source)]
    specs, absent = chosen_tasks(tasks, score, data_root, as_json=as_json)
    problems: list[str] = []
    with paused_collection():
        files = list(read_files(specs, data_root, problems))
        checked = [check_file(file) for file in files]
        overlap = find_overlap(files, texts) if texts and files else None
    if as_json:
        record = {'files': checked, 'absent': absent, 'problems': problems, 'overlap': overlap}
        typer.echo(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        print_checks(checked, absent, overlap)
    if problems:
        print_problems(DataError(problems))
        raise typer.Exit(CHECK_FAILED)


def chosen_tasks(
    tasks: Path | None, score: Path | None, data_root: str, *, as_json: bool
) -> tuple[Sequence[Task], list[str]]:
    """Return the tasks to check, and the labels of Gauntlet tasks that have no file if no task is named."""
    from llmfoundry_gauntlet.data.score_rows import FILES
    from llmfoundry_gauntlet.evaluation.suite import load_suite

    entries: Any = tasks
    datasets: Any = score
    absent: list[str] = []
    if tasks is None and score is None:
        entries, absent = gauntlet_tasks(data_root)
        datasets = [
            {'dataset': dataset}
            for dataset, files in FILES.items()
            if any((Path(data_root) / file).is_file() for file in files)
        ]
        if not entries and not datasets:
            raise ConfigError(
                f'{data_root}: has no file of the Gauntlet or of SCORE; give --data-root, --tasks or --score'
            )
    suite = load_suite(entries or None, None, datasets or None)
    for warning in suite.warnings:
        typer.echo(f'warning: {warning}', err=as_json)
    return suite.tasks, absent


def gauntlet_tasks(data_root: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the YAML entries of the Gauntlet's tasks that have a file, and the labels of the others."""
    from llmfoundry_gauntlet.config.yaml import read_yaml

    entries = read_yaml(GAUNTLET_TASKS)['icl_tasks']
    present = [entry for entry in entries if (Path(data_root) / entry['dataset_uri']).is_file()]
    return present, [entry['label'] for entry in entries if entry not in present]


def print_checks(files: Sequence[Record], absent: Sequence[str], overlap: Record | None) -> None:
    """Print a line for each file, then all warnings, then notes on what changes no score."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, markup=False)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ('', 'rows', 'duplicates', 'repeated prompts', 'conflicts', 'majority answer', 'chance'):
        table.add_column(name, justify='right' if name else 'left', overflow='fold')
    for file in files:
        counts = [file[key] for key in ('name', 'num_rows', 'num_duplicates', 'num_repeated', 'num_conflicts')]
        majority = file['majority'] or {'share': None, 'chance': None}
        shares = ['-' if majority[key] is None else f'{majority[key]:.0%}' for key in ('share', 'chance')]
        table.add_row(*map(str, counts), *shares)
    if files:
        console.print(table)
    findings = [(file['source'], finding) for file in files for finding in file['findings']]
    if overlap is not None:
        num_checked, num_most = (sum(task[key] for task in overlap['tasks']) for key in ('num_checked', 'num_most'))
        console.print(
            f'\ntraining text of {overlap["num_words"]:,} words: '
            f'{sum(len(task["found"]) for task in overlap["tasks"]):,} of {num_checked:,} rows share a sequence of '
            f'words with it, {num_most:,} share most of theirs'
        )
        findings += [(task['source'], overlap_warning(task['found'])) for task in overlap['tasks'] if task['found']]
    for name, warns, style in (('warnings', True, None), ('notes', False, 'dim')):
        lines = [finding_line(source, finding) for source, finding in findings if finding['is_warning'] == warns]
        if absent and not warns:
            lines.append(f'{len(absent)} tasks have no file: {", ".join(absent)}')
        console.print(f'\n{name}: {len(lines)}', style='bold')
        for line in lines:
            console.print(line, style=style)


def overlap_warning(found: Sequence[Record]) -> Record:
    """Return a finding about the rows of a file that occur in training text, with the place of the first."""
    from llmfoundry_gauntlet.data.checks import MAX_LINES, NUM_WORDS

    sequences = f'{found[0]["num_found"]} of its {found[0]["num_sequences"]} sequences of {NUM_WORDS} words'
    return {
        'text': f'{sequences} occur in {found[0]["place"]}',
        'count': len(found),
        'lines': [row['line'] for row in found[:MAX_LINES]],
        'is_warning': True,
    }


def finding_line(source: str, finding: Record) -> str:
    """Return `file:line: problem (number of rows, the first lines)`, or `file: problem`."""
    lines, count = finding['lines'], finding['count']
    if not lines:
        return f'{source}: {finding["text"]}'
    more = ', ...' if count > len(lines) else ''
    rows = '' if count == 1 else f' ({count} rows: lines {", ".join(map(str, lines))}{more})'
    return f'{source}:{lines[0]}: {finding["text"]}{rows}'


def check_programs(tasks: Path | None, data_root: str, sandbox: str, as_json: bool) -> None:
    """Run the canonical solutions of code tasks. Raises typer.Exit if one fails."""
    from llmfoundry_gauntlet.config.settings import decode_settings
    from llmfoundry_gauntlet.evaluation.inputs import load_data, with_programs
    from llmfoundry_gauntlet.results.external import check_solutions
    from llmfoundry_gauntlet.tasks.code import CodeTask

    entries: Any = tasks
    if tasks is None:
        entries = [entry for entry in gauntlet_tasks(data_root)[0] if entry['icl_task_type'] == CodeTask.type_name]
        if not entries:
            raise ConfigError(f'{data_root}: has no file of a code task; give --data-root or --tasks')
    data = with_programs(
        load_data(decode_settings({'tasks': entries, 'data_root': data_root, 'sandbox': sandbox}, 'data check'))
    )
    for task, reason in data.unsupported.items():
        typer.echo(f'warning: {task}: {reason}', err=as_json)
    checked = check_solutions(data)
    if not checked:
        raise ConfigError(f'{tasks or data_root}: none of the tasks runs programs here')
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in checked], indent=2, ensure_ascii=False))
    for result in () if as_json else checked:
        num_passed = result.num_solutions - len(result.failures)
        typer.echo(f'{result.task}: {num_passed} of {result.num_solutions} solutions pass ({result.seconds:.1f} s)')
        for row, reason in result.failures.items():
            typer.echo(f'{result.task} row {row}: {reason}')
    if any(result.failures for result in checked):
        raise typer.Exit(CHECK_FAILED)
