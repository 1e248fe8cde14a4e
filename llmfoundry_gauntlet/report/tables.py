"""Scores of one or several evaluations as a table, in the terminal and in Markdown, CSV and JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmfoundry_gauntlet.records.results import RESULTS, find_results
from llmfoundry_gauntlet.report.formats import as_csv, as_json, bold, markdown_list, markdown_table, plain
from llmfoundry_gauntlet.report.scores import MAJORITY, Record, ScoreRow, read_scores

ABSENT = '-'
SHOWN_OF_SCORE = ('accuracy', 'consistency_rate')
WIDTH = 110  # of a table that is not printed on a terminal

Found = Sequence[tuple[Path, Record]]


@dataclass(frozen=True, slots=True)
class Line:
    """A score as each evaluation has it, `None` where an evaluation does not have it."""

    kind: str
    name: str
    rows: tuple[ScoreRow | None, ...]


def print_runs(run: Path, console: Console | None = None) -> None:
    """Print the scores of every evaluation at or below `run`, and where its files are."""
    print_scores(find_results(run), console=console)


def print_scores(found: Found, form: str = 'table', console: Console | None = None) -> None:
    """Print the scores of evaluations as a 'table' with the paths of their files, or as 'markdown', 'csv' or 'json'."""
    if form in ('csv', 'json'):
        rows = [asdict(row) for folder, record in found for row in read_scores(folder, record)]
        columns = [field.name for field in fields(ScoreRow)]
        sys.stdout.write(as_json(rows) if form == 'json' else as_csv(rows, columns))
    elif form == 'markdown':
        sys.stdout.write(scores_markdown(found))
    else:
        console = console or Console(width=None if Console().is_terminal else WIDTH)
        console.print(scores_table(found))
        for line in absences(*found[-1]):
            console.print(f'{ABSENT} {line}', style='dim', highlight=False, markup=False)
        for folder, _ in found:
            console.print(f'{folder / RESULTS}', highlight=False, markup=False)


def score_lines(found: Found) -> list[Line]:
    """Return tasks with their accuracy, categories, averages, and accuracy and consistency of SCORE."""
    names: dict[tuple[str, str], None] = {}
    by_name: list[dict[tuple[str, str], ScoreRow]] = []
    for folder, record in found:
        mine: dict[tuple[str, str], ScoreRow] = {}
        for row in read_scores(folder, record):
            for name in shown_names(row):
                mine.setdefault((row.kind, name), row)
        names |= dict.fromkeys(mine)
        by_name.append(mine)
    kinds = ('task', 'category', 'average', 'perturbation')
    ordered = sorted(names, key=lambda key: kinds.index(key[0]))
    return [Line(kind, name, tuple(mine.get((kind, name)) for mine in by_name)) for kind, name in ordered]


def shown_names(row: ScoreRow) -> Iterator[str]:
    """Yield the names of the lines that a number may stand in; a task's first number is its accuracy."""
    if row.part is None and row.kind != 'perturbation':
        yield row.name
    elif row.part is None:
        for metric in SHOWN_OF_SCORE:
            if row.metric in (metric, None):
                yield f'score {row.name.replace("/", " ")} {metric}'


def majorities(found: Found) -> dict[str, float]:
    """Return the accuracy of always giving the commonest answer, of the first evaluation's tasks."""
    rows = read_scores(*found[0])
    return {
        row.name: row.value for row in rows if row.metric == MAJORITY and row.part is None and row.value is not None
    }


def scores_table(found: Found) -> Table:
    """Return a row per task and composite and a column per evaluation.

    A single evaluation has standard errors, and beside tasks the accuracies of guessing and of the majority class.
    """
    is_single, majority = len(found) == 1, majorities(found)
    table = Table(title='Eval Gauntlet', title_justify='left')
    table.add_column('')
    for name in column_names(found):
        table.add_column(escape(name), justify='right')
    for name in ('error', 'chance', 'majority') if is_single else ():
        table.add_column(name, justify='right', style='dim')
    kind = None
    for line in score_lines(found):
        if kind not in (None, line.kind):
            table.add_section()
        kind = line.kind
        name = f'[bold]{escape(line.name)}[/bold]' if kind in ('category', 'average') else escape(line.name)
        beside = [error_cell(line.rows[0], '±'), *beside_tasks(line, majority)] if is_single else []
        table.add_row(name, *map(cell, line.rows), *beside)
    table.add_section()
    table.add_row('seconds', *(f'{record["timing"]["seconds"]:.1f}' for _, record in found))
    return table


def scores_markdown(found: Found) -> str:
    """Return the same in Markdown: categories and averages first, errors in columns of their own."""
    is_single, majority = len(found) == 1, majorities(found)
    header = ['', *(name for column in column_names(found) for name in (plain(column), '±'))]
    header += ['chance', 'majority'] if is_single else []
    kinds = ('category', 'average', 'task', 'perturbation')
    rows = []
    for line in sorted(score_lines(found), key=lambda line: kinds.index(line.kind)):
        name = bold(line.name) if line.kind in kinds[:2] else plain(line.name)
        cells = [text for row in line.rows for text in (cell(row), error_cell(row))]
        rows.append([name, *cells, *(beside_tasks(line, majority) if is_single else [])])
    return markdown_table(header, rows) + markdown_list(absences(*found[-1]))


def beside_tasks(line: Line, majority: Mapping[str, float]) -> list[str]:
    """Return the cells for chance and majority class, empty for all but tasks."""
    row = line.rows[0]
    chance = None if row is None else row.chance
    common = majority.get(line.name) if line.kind == 'task' else None
    return ['' if value is None else f'{value:.3f}' for value in (chance, common)]


def column_names(found: Found) -> list[str]:
    """Return the training batch of each evaluation, else its folder's name; the folder where these are not unique."""
    names = [
        f'ba{record["training"]["batch"]}' if record['training'] else folder.name or str(folder)
        for folder, record in found
    ]
    return names if len(set(names)) == len(names) else [str(folder) for folder, _ in found]


def cell(row: ScoreRow | None) -> str:
    """Return a value to three places."""
    return ABSENT if row is None or row.value is None else f'{row.value:.3f}'


def error_cell(row: ScoreRow | None, sign: str = '') -> str:
    """Return a standard error, empty where there is none."""
    return '' if row is None or row.standard_error is None else f'{sign}{row.standard_error:.3f}'


def absences(folder: Path, record: Record) -> list[str]:
    """Return why scores are absent: a line per reason, one for all composites."""
    by_reason: dict[str, dict[str, None]] = {}
    composites: list[str] = []
    for row in read_scores(folder, record):
        if row.reason is None or row.part is not None:
            continue
        if row.kind in ('category', 'average'):
            composites.append(row.name)
        elif row.kind == 'task':
            by_reason.setdefault(row.reason, {})[row.name] = None
        elif row.metric in ('accuracy', None):
            by_reason.setdefault(row.reason, {})[f'score {row.name.replace("/", " ")}'] = None
    lines = [f'{reason}: {", ".join(names)}' for reason, names in by_reason.items()]
    if composites:
        lines.append(f'composites over tasks without a score are absent: {", ".join(composites)}')
    return lines
