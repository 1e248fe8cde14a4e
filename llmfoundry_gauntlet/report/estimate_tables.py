"""A dry run's estimate as a table, in Markdown, CSV or JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from llmfoundry_gauntlet.engine.estimate import Estimate
from llmfoundry_gauntlet.report.formats import as_csv, as_json, markdown_list, markdown_table, plain
from llmfoundry_gauntlet.report.tables import WIDTH

HEADER = ('', 'items', 'tokens', 'reply tokens at most', 'truncated', 'seconds')
WHOLE = 'all'


def print_estimate(estimate: Estimate, form: str = 'table', console: Console | None = None) -> None:
    """Print what each task and all together would take: a table, or 'markdown', 'csv' or 'json'."""
    rows = rows_of(estimate)
    if form == 'csv':
        sys.stdout.write(as_csv(rows, list(rows[0])))
    elif form == 'json':
        sys.stdout.write(as_json({**asdict(estimate), 'total_seconds': estimate.total_seconds}))
    elif form == 'markdown':
        lines = [[plain(name), *further] for name, *further in map(cells, rows)]
        sys.stdout.write(markdown_table(HEADER, lines) + markdown_list(summary(estimate)))
    else:
        console = console or Console(width=None if Console().is_terminal else WIDTH)
        table = Table(title='Dry run', title_justify='left')
        for name in HEADER:
            table.add_column(name, justify='right' if name else 'left')
        for place, row in enumerate(rows, 1):
            if place == len(rows):
                table.add_section()
            table.add_row(*cells(row))
        console.print(table)
        for line in summary(estimate):
            console.print(line, highlight=False, markup=False)


def rows_of(estimate: Estimate) -> list[dict[str, Any]]:
    """Return a row for each task, and one for all."""
    rows = [asdict(task) for task in estimate.tasks]
    names = [name for name in (rows[0] if rows else ()) if name != 'task']
    return [*rows, {'task': WHOLE, **{name: sum(row[name] for row in rows) for name in names}}]


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as it is printed."""
    task, *counts, seconds = row.values()
    return [task, *(f'{count:,}' if count else '' for count in counts), f'{seconds:.1f}']


def summary(estimate: Estimate) -> list[str]:
    """Return the whole time, its parts, and how it was estimated."""
    parts = ', '.join(f'{name} {seconds:.1f} s' for name, seconds in estimate.seconds.items())
    ranks = f' on {estimate.num_ranks} ranks' if estimate.num_ranks > 1 else ''
    return [
        f'about {estimate.total_seconds:.1f} s{ranks}: {parts}',
        f'before it, reading data and loading the model: {estimate.preparing_seconds:.1f} s here',
        *estimate.notes,
    ]
