"""`gauntlet data`: list, download, import, verify and check the evaluation files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmfoundry_gauntlet.cli.options import (
    CHECK_FAILED,
    GAUNTLET_TASKS,
    CliCommand,
    check_options,
    print_warnings,
    takes,
)
from llmfoundry_gauntlet.config.resources import path_problem
from llmfoundry_gauntlet.data.published import (
    DataFile,
    FileState,
    fetch_file,
    find,
    import_file,
    list_copies,
    look,
    origin_of,
    select_files,
)
from llmfoundry_gauntlet.errors import ConfigError, DataError, plural, print_problems

if TYPE_CHECKING:
    from rich.text import Text

PLAIN_WIDTH = 200  # columns of tables; a narrower terminal wraps whole lines, so names are not split
STATUS_WIDTH = 15
OFFLINE_VARIABLES = ('HF_HUB_OFFLINE', 'HF_DATASETS_OFFLINE')
YES = ('1', 'on', 'yes', 'true')

Against = Annotated[
    list[str] | None,
    typer.Option(
        '--against', help='Training text to look for the rows in: a file of text or JSON lines, or a folder of them.'
    ),
]
FileNames = Annotated[
    list[str] | None, typer.Argument(metavar='NAME', help='Tasks, categories or files. Default: all.')
]


def possible(path: Path) -> Path:
    """Return a path. Raise ConfigError if no folder can have it."""
    if problem := path_problem(str(path)):
        raise ConfigError(f'--to: {problem}')
    return path


To = Annotated[Path, typer.Option('--to', help='Data root that the files are put into.', callback=possible)]
Overwrite = Annotated[bool, typer.Option('--overwrite', help='Replace files in --to that differ.')]


@takes()
def check_data(
    context: typer.Context,
    against: Against = None,
    solutions: Annotated[
        bool, typer.Option('--solutions', help='Run the canonical solutions of code tasks instead.')
    ] = False,
    *,
    tasks: Path | None,
    score: Path | None,
    data_root: str,
    sandbox: str,
    as_json: bool,
) -> None:
    """Find duplicates, conflicting golds, majority answers, and rows that occur in a training text.

    Without --tasks and --score, checks all files of the Gauntlet and of SCORE below --data-root. Status 1 if a row
    cannot be read or a solution fails; findings alone are status 0.

    gauntlet data check --data-root eval_data

    gauntlet data check --tasks tasks.yaml --against train.jsonl.gz --against books

    gauntlet data check --solutions
    """
    check_options(context, needs={'sandbox': ('solutions',)}, excludes={'solutions': ('score', 'against')})
    if solutions:
        run_solutions(tasks, data_root, sandbox, as_json)
        return
    from llmfoundry_gauntlet.data.checks import check_task_files, training_files
    from llmfoundry_gauntlet.data.score_rows import FILES
    from llmfoundry_gauntlet.evaluation.suite import load_suite
    from llmfoundry_gauntlet.tasks.checked_rows import read_files

    texts = [file for source in against or () for file in training_files(source)]
    entries: Any = tasks
    datasets: Any = score
    absent: list[str] = []
    if tasks is None and score is None:
        entries, absent = gauntlet_tasks(data_root)
        root = Path(data_root)
        datasets = [
            {'dataset': name} for name, paths in FILES.items() if any((root / path).is_file() for path in paths)
        ]
        if not entries and not datasets:
            raise ConfigError(f'{data_root}: has no file of the Gauntlet or of SCORE; give another --data-root')
    suite = load_suite(entries or None, None, datasets or None)
    print_warnings(suite.warnings, err=as_json)
    problems: list[str] = []
    checked, overlap = check_task_files(list(read_files(suite.tasks, data_root, problems)), texts)
    if as_json:
        print_json({'files': checked, 'absent': absent, 'problems': problems, 'overlap': overlap})
    else:
        print_checks(checked, absent, overlap)
    if problems:
        print_problems(DataError(problems))
        raise typer.Exit(CHECK_FAILED)


def gauntlet_tasks(data_root: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the YAML entries of Gauntlet tasks whose data file exists, and the labels of the others."""
    from llmfoundry_gauntlet.config.yaml import read_yaml

    entries = read_yaml(GAUNTLET_TASKS)['icl_tasks']
    present = [entry for entry in entries if (Path(data_root) / entry['dataset_uri']).is_file()]
    return present, [entry['label'] for entry in entries if entry not in present]


def print_checks(files: Sequence[dict[str, Any]], absent: Sequence[str], overlap: dict[str, Any] | None) -> None:
    """Print a line for each file, then all warnings, then notes on findings that do not affect scores."""
    rows = []
    lines: dict[str, list[str]] = {'warnings': [], 'notes': []}
    for file in files:
        majority = file['majority'] or {'share': None, 'chance': None}
        shares = ['-' if majority[key] is None else f'{majority[key]:.0%}' for key in ('share', 'chance')]
        counts = (file[key] for key in ('name', 'num_rows', 'num_duplicates', 'num_repeated', 'num_conflicts'))
        rows.append([*map(str, counts), *shares])
        for found in file['findings']:
            lines['warnings' if found['is_warning'] else 'notes'].append(finding_line(file['source'], found))
    print_rows(('', 'rows', 'duplicates', 'repeated prompts', 'conflicts', 'majority answer', 'chance'), rows)
    if overlap is not None:
        num_found = sum(len(task['found']) for task in overlap['tasks'])
        num_checked, num_most = (sum(task[key] for task in overlap['tasks']) for key in ('num_checked', 'num_most'))
        typer.echo(
            f'\ntraining text of {overlap["num_words"]:,} words: {num_found:,} of {num_checked:,} rows share a '
            f'sequence of words with it, {num_most:,} share most of theirs'
        )
    if absent:
        lines['notes'].append(f'no file for {plural(len(absent), "task")}: {", ".join(absent)}')
    for kind, found in lines.items():
        typer.echo('\n'.join([f'\n{kind}: {len(found)}', *found]))


def finding_line(source: str, finding: dict[str, Any]) -> str:
    """Format a finding as `file:line: problem (number of rows, the first lines)`, or `file: problem`."""
    lines, count = finding['lines'], finding['count']
    place = ':'.join(map(str, (source, *lines[:1])))
    more = ', ...' if count > len(lines) else ''
    rows = f' ({count} rows: lines {", ".join(map(str, lines))}{more})' if count > 1 else ''
    return f'{place}: {finding["text"]}{rows}'


def print_rows(header: Sequence[str], rows: Sequence[Sequence[str | Text]], *, fits_terminal: bool = False) -> None:
    """Print a table with right-aligned numeric columns; with `fits_terminal` cells are folded to a terminal's width."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, *cells in zip(header, *rows, strict=True):
        is_text = any(str(cell).lstrip()[:1].isalpha() for cell in cells)
        table.add_column(name, justify='left' if is_text else 'right', overflow='fold')
    for row in rows:
        table.add_row(*row)
    width = None if fits_terminal and Console().is_terminal else PLAIN_WIDTH
    Console(width=width, highlight=False, markup=False).print(table)


def run_solutions(tasks: Path | None, data_root: str, sandbox: str, as_json: bool) -> None:
    """Run the canonical solutions of code tasks. Raise typer.Exit if one fails."""
    from llmfoundry_gauntlet.evaluation.inputs import load_inputs, with_programs
    from llmfoundry_gauntlet.results.external import check_solutions

    entries: Any = tasks
    if tasks is None:
        entries = [entry for entry in gauntlet_tasks(data_root)[0] if entry['icl_task_type'] == 'code_evaluation']
        if not entries:
            raise ConfigError(f'{data_root}: has no file of a code task; give --data-root or --tasks')
    data = with_programs(load_inputs({'tasks': entries, 'data_root': data_root, 'sandbox': sandbox}, 'data check'))
    print_warnings((f'{task}: {reason}' for task, reason in data.unsupported.items()), err=as_json)
    checked = check_solutions(data)
    if not checked:
        raise ConfigError(f'{tasks or data_root}: none of the tasks runs programs here')
    if as_json:
        print_json([asdict(result) for result in checked])
    for result in () if as_json else checked:
        num_passed = result.num_solutions - len(result.failures)
        typer.echo(
            f'{result.task}: {num_passed} of {plural(result.num_solutions, "solution")} pass ({result.seconds:.1f} s)'
        )
        for row, reason in result.failures.items():
            typer.echo(f'{result.task} row {row}: {reason}')
    if any(result.failures for result in checked):
        raise typer.Exit(CHECK_FAILED)


@takes()
def list_files(
    context: typer.Context,
    names: FileNames = None,
    urls: Annotated[bool, typer.Option('--urls', help='Print the addresses alone, one per line.')] = False,
    *,
    data_root: str,
    as_json: bool,
) -> None:
    """List every file: task, rows, size, licence, where it is published, and whether it is present.

    gauntlet data ls safety --data-root data

    gauntlet data ls --urls
    """
    check_options(context, excludes={'urls': ('data_root', 'as_json')})
    files = select_files(names or ())
    if urls:
        typer.echo('\n'.join(file.url for file in files))
        return
    there = {file.path: presence(Path(data_root) / file.path) for file in files}
    if as_json:
        renamed = {'num_rows': 'rows', 'num_bytes': 'bytes'}
        entries = [{renamed.get(name, name): value for name, value in asdict(file).items()} for file in files]
        computed = [{'category': file.category, 'url': file.url, 'there': there[file.path]} for file in files]
        print_json([{**entry, **more} for entry, more in zip(entries, computed, strict=True)])
        return
    print_rows(
        ('file', 'task', data_root, 'rows', 'bytes', 'licence', 'published in'),
        [
            (
                file.path,
                file.task,
                there[file.path],
                f'{file.num_rows:,}',
                '' if file.num_bytes is None else f'{file.num_bytes:,}',
                file.licence,
                file.repository.partition(':')[2] + (' *' if file.converter else ''),
            )
            for file in files
        ],
    )
    starred = '; * is converted' if any(file.converter for file in files) else ''
    typer.echo(f'{plural(len(files), "file")}, {sum(file.num_rows for file in files):,} rows{starred}')


def presence(path: Path) -> str:
    """Return the origin of a file, identified by its content, or that it is missing."""
    try:
        return origin_of([path])
    except FileNotFoundError:
        return 'not there'
    except OSError as error:
        return f'cannot be read: {error.strerror or error}'


def fetch(
    context: typer.Context,
    to: To,
    names: FileNames = None,
    retries: Annotated[int, typer.Option(min=0, help='How many times a download that failed is tried again.')] = 3,
    overwrite: Overwrite = False,
    offline: Annotated[
        bool, typer.Option('--offline', help='Open no connection: list what is missing, and its addresses.')
    ] = False,
) -> None:
    """Download files into a data root. Verified files are skipped; safe to rerun.

    Status 1 if a file failed, or with --offline if one is missing.

    gauntlet data fetch --to data

    gauntlet data fetch squad safety --to data
    """
    check_options(context, excludes={'offline': ('retries', 'overwrite')})
    files = select_files(names or ())
    variable = next((name for name in OFFLINE_VARIABLES if os.environ.get(name, '').lower() in YES), None)
    if offline or variable is not None:
        typer.echo(f'offline{"" if offline else f", as {variable} is set"}: nothing is downloaded')
        states = (look(file, to) for file in files)
    else:
        states = (fetch_file(file, to, overwrite=overwrite, num_retries=retries) for file in files)
    statuses = print_states(states, files)
    if not statuses.isdisjoint(('failed', 'missing', 'other bytes')):
        raise typer.Exit(CHECK_FAILED)


def import_files(
    folder: Annotated[str, typer.Argument(help='A clone of llm-foundry, any folder with the files, or its URL.')],
    to: To,
    names: FileNames = None,
    overwrite: Overwrite = False,
) -> None:
    """Copy files with the published names and hashes, anywhere below a folder, into a data root.

    The folder may be a URL that fsspec supports, such as s3://bucket/data. Published parquet files are converted.
    Status 1 if a file is not the published one, 2 if none is found.

    gauntlet data import llm-foundry --to data
    """
    files = select_files(names or ())
    places = list_copies(files, folder)
    states = (import_file(file, places[file.path], to, overwrite=overwrite) for file in files)
    statuses = print_states(states, files)
    if 'failed' in statuses:
        raise typer.Exit(CHECK_FAILED)
    if statuses == {'missing'}:
        shown = ', '.join(file.path.rpartition('/')[2] for file in files[:3]) + (', ...' if len(files) > 3 else '')
        raise ConfigError(f'{folder}: has none of the files; looked for {shown}')


@takes()
def verify(
    folder: Annotated[str, typer.Argument(help='A data root, a clone of llm-foundry, any folder, or its URL.')],
    names: FileNames = None,
    *,
    as_json: bool,
) -> None:
    """Compare files with the published ones, byte for byte. Status 1 if one differs; missing files are ignored.

    gauntlet data verify data

    gauntlet data verify llm-foundry squad safety
    """
    files = select_files(names or ())
    places = list_copies(files, folder)
    states = (find(file, places[file.path])[0] for file in files)
    if as_json:
        found = list(states)
        statuses = {state.status for state in found}
        listed = [
            {'path': one.file.path, 'task': one.file.task, 'status': one.status, 'found': one.place or None}
            | {'detail': one.detail or None}
            for one in found
        ]
        print_json({'folder': folder, 'files': listed})
    else:
        statuses = print_states(states, files)
    if 'other bytes' in statuses:
        raise typer.Exit(CHECK_FAILED)


def print_states(states: Iterable[FileState], files: Sequence[DataFile]) -> set[str]:
    """Print a line for each finished file, then the counts; return the statuses. Failures go to standard error.

    Lines of files that are missing or differ from the published ones include the address.
    """
    width = max(len(file.path) for file in files)
    statuses: list[str] = []
    failures = []
    for state in states:
        status, file = state.status, state.file
        statuses.append(status)
        detail = ': '.join(filter(None, (state.place, state.detail))) if state.detail else ''
        if status == 'failed':
            failures.append(f'error: {file.path}: {detail}')
            detail = ''
        elif status in ('missing', 'other bytes'):
            detail = f'{detail}; published at {file.url}'.removeprefix('; ')
        line = f'{status.ljust(STATUS_WIDTH)}{file.path.ljust(width)}  {detail}'
        typer.secho(line.rstrip(), fg='red' if status in ('failed', 'other bytes') else None)
    counts = ', '.join(f'{statuses.count(status)} {status}' for status in dict.fromkeys(statuses))
    typer.echo(f'{plural(len(statuses), "file")}: {counts}')
    for failure in failures:
        print(failure, file=sys.stderr)
    return set(statuses)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


data_commands = typer.Typer(help='The evaluation files.', no_args_is_help=True)
data_commands.command('check', cls=CliCommand)(check_data)
data_commands.command('fetch', cls=CliCommand)(fetch)
data_commands.command('ls', cls=CliCommand)(list_files)
data_commands.command('verify', cls=CliCommand)(verify)
data_commands.command('import', cls=CliCommand)(import_files)
