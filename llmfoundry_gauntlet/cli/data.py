"""`gauntlet data`: list the published evaluation files, and download or copy them."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmfoundry_gauntlet.cli.options import CHECK_FAILED, CliCommand, CliGroup, check_options, takes
from llmfoundry_gauntlet.config.resources import path_problem
from llmfoundry_gauntlet.data.published import (
    FAILED,
    MISSING,
    OTHER,
    DataFile,
    FileState,
    copy_file,
    fetch_file,
    list_copies,
    look,
    look_for_sample,
    select_files,
)
from llmfoundry_gauntlet.errors import ConfigError, naming, plural

if TYPE_CHECKING:
    from rich.text import Text

PLAIN_WIDTH = 200  # columns of tables; a narrower terminal wraps whole lines, so names are not split
STATUS_WIDTH = 15
OFFLINE_VARIABLES = ('HF_HUB_OFFLINE', 'HF_DATASETS_OFFLINE')
YES = ('1', 'on', 'yes', 'true')

FileNames = Annotated[
    list[str] | None, typer.Argument(metavar='NAME', help='Tasks, categories or files. Default: all.')
]


def possible(path: Path) -> Path:
    """Return a path. Raise ConfigError if no folder can have it."""
    if problem := path_problem(str(path)):
        raise ConfigError(f'--to: {problem}')
    if path.is_file():
        raise ConfigError(f'--to: {path} is a file; allowed: a folder, which is made if it is not there')
    return path


@takes()
def list_files(
    context: typer.Context,
    names: FileNames = None,
    urls: Annotated[bool, typer.Option('--urls', help='Print the addresses alone, one per line.')] = False,
    *,
    data_root: str,
    as_json: bool,
) -> None:
    """List every file: task, rows, size, licence, where it is published, and its state below the data root.

    States: published (byte for byte), no hash (as many rows as published, and no hash is known), sample, other bytes,
    missing. Status 1 if a file has other bytes.

    Examples:
      gauntlet data ls --data-root data
      gauntlet data ls safety --urls
    """
    check_options(context, excludes={'urls': ('data_root', 'as_json')})
    files = select_files(names or ())
    if urls:
        typer.echo('\n'.join(file.url for file in files))
        return
    states = [look_for_sample(file, Path(data_root)) for file in files]
    if as_json:
        print_json([entry_of(state) for state in states])
    else:
        print_table(states, data_root)
    if any(state.status == OTHER for state in states):
        raise typer.Exit(CHECK_FAILED)


def entry_of(state: FileState) -> dict[str, Any]:
    """Return all that is known of a file and its state, for JSON."""
    entry = asdict(state.file)
    entry['rows'] = entry.pop('num_rows')
    entry['bytes'] = entry.pop('num_bytes')
    entry['category'] = state.file.category
    entry['url'] = state.file.url
    entry['status'] = state.status
    entry['detail'] = state.detail or None
    return entry


def print_table(states: Sequence[FileState], data_root: str) -> None:
    """Print a row per file, then how each file with other bytes differs from the published one."""
    rows = []
    for state in states:
        file = state.file
        num_bytes = '' if file.num_bytes is None else f'{file.num_bytes:,}'
        repository = file.repository.partition(':')[2]
        star = ' *' if file.converter else ''
        rows.append(
            (file.path, file.task, state.status, f'{file.num_rows:,}', num_bytes, file.licence, f'{repository}{star}')
        )
    print_rows(('file', 'task', data_root, 'rows', 'bytes', 'licence', 'published in'), rows)

    num_rows = sum(state.file.num_rows for state in states)
    legend = '; * is converted' if any(state.file.converter for state in states) else ''
    num_by_status = Counter(state.status for state in states)
    counts = ', '.join(f'{count} {status}' for status, count in num_by_status.items())
    typer.echo(f'{plural(len(states), "file")}, {num_rows:,} rows when published; below {data_root}: {counts}{legend}')
    for state in states:
        if state.status == OTHER:
            typer.secho(f'{state.place}: {state.detail}', fg='red')


def fetch(
    context: typer.Context,
    to: Annotated[
        Path, typer.Option('--to', metavar='FOLDER', help='Data root that the files are put into.', callback=possible)
    ],
    names: FileNames = None,
    source: Annotated[
        str | None,
        typer.Option(
            '--from', metavar='FOLDER', help='Copy from a clone of llm-foundry, any folder with the files, or its URL.'
        ),
    ] = None,
    retries: Annotated[
        int,
        typer.Option(metavar='INTEGER', min=0, help='How many times a download that failed is tried again.'),
    ] = 3,
    overwrite: Annotated[bool, typer.Option('--overwrite', help='Replace files in --to that differ.')] = False,
    offline: Annotated[
        bool, typer.Option('--offline', help='Open no connection: list what is missing, and its addresses.')
    ] = False,
) -> None:
    """Download files into a data root, or copy them. Verified files are skipped; safe to rerun.

    With --from, files with the published names and bytes are copied from anywhere below a folder, which may be a URL
    that fsspec supports, such as s3://bucket/data; published parquet files are converted.

    Status 1 if a file failed, or with --offline if one is missing; 2 if --from has none of the files.

    Examples:
      gauntlet data fetch --to data
      gauntlet data fetch squad safety --to data
      # from files that were downloaded before, without a connection
      gauntlet data fetch --from llm-foundry --to data
    """
    check_options(context, excludes={'offline': ('source', 'retries', 'overwrite'), 'source': ('retries',)})
    files = select_files(names or ())
    offline_variables = [name for name in OFFLINE_VARIABLES if os.environ.get(name, '').lower() in YES]
    if source is not None:
        copy_files(files, source, to, overwrite=overwrite)
    elif offline or offline_variables:
        reason = '' if offline else f', as {offline_variables[0]} is set'
        typer.echo(f'offline{reason}: nothing is downloaded')
        exit_with(print_states((look(file, to) for file in files), files), {MISSING, OTHER})
    else:
        states = (fetch_file(file, to, overwrite=overwrite, num_retries=retries) for file in files)
        exit_with(print_states(states, files), {FAILED})


def copy_files(files: Sequence[DataFile], source: str, to: Path, *, overwrite: bool) -> None:
    """Copy files from anywhere below a folder or URL into a data root. Raise ConfigError if it has none of them."""
    with naming('source'):
        places = list_copies(files, source)
    states = (copy_file(file, places[file.path], to, overwrite=overwrite) for file in files)
    statuses = print_states(states, files)
    if statuses == {MISSING}:
        shown = ', '.join(file.path.rpartition('/')[2] for file in files[:3])
        more = ', ...' if len(files) > 3 else ''
        raise ConfigError(f'--from: {source}: has none of the files; looked for {shown}{more}')
    exit_with(statuses, {FAILED})


def exit_with(statuses: set[str], failures: set[str]) -> None:
    """Raise typer.Exit with status 1 if one of the statuses is a failure."""
    if statuses & failures:
        raise typer.Exit(CHECK_FAILED)


def print_states(states: Iterable[FileState], files: Sequence[DataFile]) -> set[str]:
    """Print a line for each finished file, then the counts; return the statuses. Failures go to standard error.

    Lines of files that are missing or differ from the published ones include the address.
    """
    width = max(len(file.path) for file in files)
    num_by_status: Counter[str] = Counter()
    failures = []
    for state in states:
        status, file = state.status, state.file
        num_by_status[status] += 1
        detail = f'{state.place}: {state.detail}' if state.place and state.detail else state.detail
        if status == FAILED:
            failures.append(f'error: {file.path}: {detail}')
            detail = ''
        elif status in (MISSING, OTHER):
            detail = f'{detail}; published at {file.url}'.removeprefix('; ')
        line = f'{status.ljust(STATUS_WIDTH)}{file.path.ljust(width)}  {detail}'
        typer.secho(line.rstrip(), fg='red' if status in (FAILED, OTHER) else None)
    counts = ', '.join(f'{count} {status}' for status, count in num_by_status.items())
    typer.echo(f'{plural(num_by_status.total(), "file")}: {counts}')
    for failure in failures:
        print(failure, file=sys.stderr)
    return set(num_by_status)


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


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


data_commands = typer.Typer(
    cls=CliGroup, help='Download the published evaluation files, or list their state.', no_args_is_help=True
)
data_commands.command('fetch', cls=CliCommand)(fetch)
data_commands.command('ls', cls=CliCommand)(list_files)
