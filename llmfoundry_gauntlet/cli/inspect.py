"""`gauntlet ls` and `gauntlet validate`: list tasks and the state of their data, check YAML files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmfoundry_gauntlet.cli.data import print_json, print_rows
from llmfoundry_gauntlet.cli.options import CHECK_FAILED, GAUNTLET, GAUNTLET_TASKS, check_options, print_warnings, takes
from llmfoundry_gauntlet.data.published import PUBLISHED, origin_of
from llmfoundry_gauntlet.errors import Collected, ConfigError, DataError, GauntletError, plural, print_problems

if TYPE_CHECKING:
    from rich.text import Text

    from llmfoundry_gauntlet.data.examples import TaskRows
    from llmfoundry_gauntlet.evaluation.suite import Suite
    from llmfoundry_gauntlet.tasks import Task

NO_CATEGORY = 'in no category'
STYLES = {PUBLISHED: 'green', 'not there': 'dim'}  # colours of file states; others are yellow


@takes()
def ls(
    names: Annotated[
        list[str] | None, typer.Argument(metavar='NAME', help='Labels or categories to list. Default: all.')
    ] = None,
    *,
    tasks: Path | None,
    gauntlet: Path | None,
    score: Path | None,
    data_root: str,
    as_json: bool,
) -> None:
    """List tasks by category: shots, type, chance, rows and state of the data. Default: the Gauntlet v0.1.0.

    Examples:
      gauntlet ls
      gauntlet ls safety programming --data-root data
      gauntlet ls --tasks my_tasks.yaml
    """
    from llmfoundry_gauntlet.config.settings import SKIP
    from llmfoundry_gauntlet.evaluation.suite import keys_named, load_suite

    is_default = tasks is None and score is None
    source = GAUNTLET_TASKS if is_default else tasks
    suite = load_suite(source, gauntlet or (GAUNTLET if is_default else None), score, is_partial=True, missing=SKIP)
    if names:
        keys = keys_named(suite, names)
        suite = replace(suite, tasks=tuple(task for task in suite.tasks if task.key in keys))
    listed = list_tasks(suite, data_root)
    if as_json:
        print_json(listed)
    else:
        print_tasks(listed, data_root)


def list_tasks(suite: Suite, data_root: str) -> list[dict[str, Any]]:
    """Return tasks in the gauntlet's category order, then those in no category; a task may be in several."""
    categories = () if suite.gauntlet is None else suite.gauntlet.categories
    benchmarks_of_task: dict[str, list[tuple[str, float | None]]] = {}  # category and chance
    for category in categories:
        for benchmark in category.benchmarks:
            benchmarks_of_task.setdefault(benchmark.key, []).append((category.name, benchmark.random_baseline))
    listed = []
    for task in suite.tasks:
        data = data_of(task, data_root)
        for category_name, chance in benchmarks_of_task.get(task.key, [(NO_CATEGORY, None)]):
            listed.append(
                {
                    'category': category_name,
                    'task': task.label,
                    'num_shots': task.num_fewshot[0],
                    'type': task.icl_task_type,
                    'chance': chance,
                    'dataset_uri': task.dataset_name,
                    **data,
                }
            )
    order = [*(category.name for category in categories), NO_CATEGORY]
    return sorted(listed, key=lambda entry: order.index(entry['category']))


def data_of(task: Task, data_root: str) -> dict[str, Any]:
    """Return the number of lines of a task's data files, None if missing or remote, and the files' origin."""
    try:
        paths = task.files(data_root) if task.has_rows else ()
    except DataError:
        return {'rows': None, 'data': 'not there'}
    if not paths:
        return {'rows': None, 'data': 'elsewhere'}
    rows = sum(bool(line.strip()) for path in paths for line in path.read_bytes().splitlines())
    return {'rows': rows, 'data': origin_of(paths)}


def print_tasks(listed: Sequence[dict[str, Any]], data_root: str) -> None:
    """Print a table of tasks by category."""
    from rich.text import Text

    rows: list[list[str | Text]] = []
    for category, entries in groupby(listed, key=itemgetter('category')):
        rows.append([Text(category, 'bold'), '', '', '', '', ''])
        rows += [row_of(entry) for entry in entries]
    print_rows(('task', 'shots', 'type', 'chance', 'rows', f'data in {data_root}'), rows, fits_terminal=True)
    # A task that is in several categories counts once.
    tasks = {(entry['task'], entry['num_shots']) for entry in listed}
    num_tasks = plural(len(tasks), 'task')
    rows_of_task = {(entry['task'], entry['num_shots']): entry['rows'] or 0 for entry in listed}
    typer.echo(f'{num_tasks}, {plural(sum(rows_of_task.values()), "row")}')
    typer.echo('gauntlet explain TASK shows a prompt; gauntlet data fetch --to data downloads the published data')


def row_of(entry: Mapping[str, Any]) -> list[str | Text]:
    """Return the cells of a task in the table of `gauntlet ls`."""
    from rich.text import Text

    return [
        f'  {entry["task"]}',
        str(entry['num_shots']),
        entry['type'],
        '' if entry['chance'] is None else f'{entry["chance"]:.2f}',
        '' if entry['rows'] is None else f'{entry["rows"]:,}',
        Text(entry['data'], STYLES.get(entry['data'], 'yellow')),
    ]


@takes()
def validate(
    context: typer.Context,
    no_data: Annotated[
        bool, typer.Option('--no-data', help='Check only the YAML files.', rich_help_panel='Tasks')
    ] = False,
    *,
    tasks: Path | None,
    gauntlet: Path | None,
    score: Path | None,
    data_root: str,
) -> None:
    r"""Check YAML files and the data of their tasks; list all errors at once. Exit status 1 if there are any.

    Examples:
      gauntlet validate --tasks yamls/tasks/gauntlet_v0.1.yaml \
          --gauntlet yamls/gauntlets/eval_gauntlet_v0.1.yaml
      # a YAML file of yours before its data are there
      gauntlet validate --tasks my_tasks.yaml --no-data
    """
    if tasks is None and gauntlet is None and score is None:
        raise ConfigError('nothing to check: give at least one of --tasks, --gauntlet and --score')
    check_options(context, needs={'data_root': ('tasks', 'score')}, excludes={'no_data': ('data_root',)})
    try:
        check_suite(tasks, gauntlet, score, None if no_data else data_root)
    except GauntletError as error:
        print_problems(error)
        raise typer.Exit(CHECK_FAILED) from error
    typer.echo('no errors found')


def check_suite(tasks: Path | None, gauntlet: Path | None, score: Path | None, data_root: str | None) -> None:
    """Print a summary and all warnings; read the data if `data_root` is given.

    Raise ConfigError or DataError with every problem found, those in data of valid tasks included.
    """
    from llmfoundry_gauntlet.evaluation.suite import read_suite

    collected = Collected()
    suite, problems = read_suite(tasks, gauntlet, score, is_partial=tasks is None)
    if problems:
        collected.add(ConfigError(problems))
    rows: Mapping[str, TaskRows] = {}
    complete = replace(suite, tasks=tuple(task for task in suite.tasks if task.has_rows))
    if complete.tasks and data_root is not None:
        from llmfoundry_gauntlet.evaluation.inputs import read_data  # which loads numpy

        with collected:
            rows, _ = read_data(complete, data_root)
    collected.raise_all()
    print_warnings(suite.warnings)
    num_score = sum(not task.metrics() for task in suite.tasks)
    if tasks is not None:
        typer.echo(f'{tasks}: {plural(len(suite.tasks) - num_score, "task")}')
    if score is not None:
        typer.echo(f'{score}: {plural(num_score, "SCORE dataset")}')
    if suite.gauntlet is not None:
        typer.echo(f'{gauntlet}: {plural(len(suite.gauntlet.categories), "category")}')
    if rows:
        print_warnings([warning for of_task in rows.values() for warning in of_task.warnings])
        num_rows = sum(len(of_task.examples) for of_task in rows.values())
        typer.echo(f'{data_root}: {plural(num_rows, "row")} of {plural(len(rows), "task")}')
