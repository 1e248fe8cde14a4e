"""`gauntlet ls`: list tasks and the state of their data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from llmfoundry_gauntlet.cli.data import PLAIN_WIDTH, STYLES, presence
from llmfoundry_gauntlet.cli.options import GAUNTLET, GAUNTLET_TASKS, DataRoot, Gauntlet, Score, Tasks

if TYPE_CHECKING:
    from llmfoundry_gauntlet.config.tasks import GauntletSpec
    from llmfoundry_gauntlet.evaluation.suite import Suite
    from llmfoundry_gauntlet.tasks import Task

NO_CATEGORY = 'in no category'


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A listed task. `rows` counts the lines of its data file; None if the file is missing or remote."""

    category: str
    task: str
    num_shots: int
    type: str
    chance: float | None
    dataset_uri: str
    rows: int | None
    data: str


def ls(
    names: Annotated[
        list[str] | None, typer.Argument(metavar='[NAME]...', help='Labels or categories to list. Default: all.')
    ] = None,
    tasks: Tasks = None,
    gauntlet: Gauntlet = None,
    score: Score = None,
    data_root: DataRoot = 'eval_data',
    as_json: Annotated[bool, typer.Option('--json', help='Print JSON instead of a table.')] = False,
) -> None:
    """List tasks by category: shots, type, chance, rows and state of the data. Default: the Gauntlet v0.1.0.

    gauntlet ls

    gauntlet ls safety programming --data-root data

    gauntlet ls --tasks my_tasks.yaml
    """
    from llmfoundry_gauntlet.config.decode import suggestion
    from llmfoundry_gauntlet.errors import ConfigError
    from llmfoundry_gauntlet.evaluation.suite import load_suite

    is_default = tasks is None and score is None
    suite = load_suite(
        GAUNTLET_TASKS if is_default else tasks, gauntlet or (GAUNTLET if is_default else None), score, is_partial=True
    )
    listed = list_tasks(suite, data_root)
    known = {name for one in listed for name in (one.category, one.task)}
    unknown = [
        f'{name}: no such task or category{suggestion(name, known)}' for name in names or () if name not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    chosen = [one for one in listed if not names or {one.category, one.task} & set(names)]
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in chosen], indent=1))
    else:
        print_tasks(chosen, data_root)


def list_tasks(suite: Suite, data_root: str) -> list[Listed]:
    """Return tasks in the gauntlet's order of categories, then those in none; a task may appear in several."""
    places = places_of(suite.gauntlet)
    order = dict.fromkeys(name for found in places.values() for name, _ in found)
    ranks = {name: rank for rank, name in enumerate(order)}
    found = [
        (ranks.get(category, len(ranks)), listed_task(task, category, chance, data_root))
        for task in suite.tasks
        for category, chance in places.get(task.key, [(NO_CATEGORY, None)])
    ]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def places_of(gauntlet: GauntletSpec | None) -> dict[str, list[tuple[str, float | None]]]:
    """Return the categories of each task by '{label}/{n}-shot', with the accuracy of guessing."""
    places: dict[str, list[tuple[str, float | None]]] = {}
    for category in () if gauntlet is None else gauntlet.categories:
        for benchmark in category.benchmarks:
            places.setdefault(benchmark.key, []).append((category.name, benchmark.random_baseline))
    return places


def listed_task(task: Task, category: str, chance: float | None, data_root: str) -> Listed:
    """Return a task with the state of its data."""
    rows, data = data_of(task, data_root)
    return Listed(
        category=category,
        task=task.label,
        num_shots=task.num_fewshot[0],
        type=task.icl_task_type,
        chance=chance,
        dataset_uri=task.dataset_uri,
        rows=rows,
        data=data,
    )


def data_of(task: Task, data_root: str) -> tuple[int | None, str]:
    """Return the number of lines of a task's data file, and its state by its size."""
    from llmfoundry_gauntlet.data.files import locate
    from llmfoundry_gauntlet.data.manifest import read_manifest
    from llmfoundry_gauntlet.errors import DataError

    if '://' in task.dataset_uri:
        return None, 'elsewhere'
    try:
        path = locate(task.dataset_uri, data_root)
    except DataError:
        return None, 'not there'
    with path.open('rb') as lines:
        rows = sum(1 for line in lines if line.strip())
    file = next((file for file in read_manifest() if path.as_posix().endswith(f'/{file.path}')), None)
    return rows, 'there' if file is None else presence(file, path)


def print_tasks(listed: Sequence[Listed], data_root: str) -> None:
    """Print a table of tasks by category."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else PLAIN_WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ('task', 'shots', 'type', 'chance', 'rows', f'data in {data_root}'):
        is_number = name in ('shots', 'chance', 'rows')
        table.add_column(escape(name), justify='right' if is_number else 'left', overflow='fold')
    category = None
    for one in listed:
        if one.category != category:
            category = one.category
            table.add_row(f'[bold]{escape(category)}[/bold]')
        table.add_row(
            f'  {escape(one.task)}',
            str(one.num_shots),
            one.type,
            '' if one.chance is None else f'{one.chance:.2f}',
            '' if one.rows is None else f'{one.rows:,}',
            f'[{STYLES.get(one.data, "yellow")}]{one.data}[/]',
        )
    console.print(table)
    num_tasks = len({(one.task, one.num_shots) for one in listed})
    console.print(
        f'{num_tasks} tasks; gauntlet explain TASK shows one; gauntlet data fetch downloads the published data'
    )
