"""Tables for the terminal, as Markdown, CSV and JSON; the report page has a template for the same tables."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from tabulate import tabulate

from llmfoundry_gauntlet.results.report.scores import ScoreRow
from llmfoundry_gauntlet.types import Measure

ABSENT = '-'
WIDTH = 130  # characters of a table that is not printed on a terminal
MINUS, ELLIPSIS = '\u2212', '\u2026'
LABEL_LENGTH = 48  # characters of a name in a chart
SPECIAL = re.compile(r'[\\|`*<\[]|(?<!\w)_|_(?!\w)')  # characters with a meaning in Markdown
# Characters that a browser would drop, replace or obey: control characters, line separators, marks that change the
# direction of writing, and halves of surrogate pairs. They are shown as Python escapes.
UNPRINTABLE = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]'
)

Cell = str | int | float | Measure | ScoreRow | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its name and the format of its numbers.

    With `with_error`, standard errors are shown next to the numbers. `absent` is shown for a missing number.
    """

    name: str
    number: Callable[[Any], str] = '{:.3f}'.format
    with_error: bool = False
    absent: str = ABSENT

    def text(self, cell: Cell) -> str:
        """Return a cell as text, without its error."""
        value = cell.value if isinstance(cell, Measure | ScoreRow) else cell
        if value is None:
            return self.absent
        return value if isinstance(value, str) else self.number(value)

    def error(self, cell: Cell) -> str:
        """Return the standard error of a cell, '' if there is none."""
        found = cell.standard_error if isinstance(cell, Measure | ScoreRow) else None
        return '' if found is None else self.number(found).removeprefix('+')


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows in groups below a header. A row starts with its name.

    Names in `composites` are bold, and their rows come first, except on the terminal, which shows the end of a table.
    `legend` explains the columns; `notes` say why numbers are absent; `warnings` come last.
    """

    title: str
    columns: Sequence[Column]
    groups: Sequence[Sequence[Sequence[Cell]]]
    composites: frozenset[str] = frozenset()
    legend: str = ''
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def rows(self) -> list[Sequence[Cell]]:
        """Return all rows, those of composites first."""
        return sorted((row for group in self.groups for row in group), key=lambda row: row[0] not in self.composites)


def print_table(table: Table, console: Console | None = None, *, width: int = WIDTH) -> None:
    """Print a table for the terminal; `width` is used if standard output is not one."""
    console = console or Console(width=None if Console().is_terminal else width)
    shown = RichTable(title=escape(table.title), title_justify='left')
    shown.add_column(escape(table.columns[0].name), no_wrap=True)
    for column in table.columns[1:]:
        style = None if column.absent else 'dim'
        shown.add_column(escape(column.name), justify='right', style=style, overflow='fold')
        if column.with_error:
            shown.add_column('error', justify='right', style='dim')
    for group in table.groups:
        for name, *cells in group:
            texts = [f'[bold]{escape(str(name))}[/bold]' if name in table.composites else escape(str(name))]
            for column, cell in zip(table.columns[1:], cells, strict=True):
                texts.append(escape(column.text(cell)))
                if column.with_error:
                    texts.append(f'±{error}' if (error := column.error(cell)) else '')
            shown.add_row(*texts)
        shown.add_section()
    console.print(shown)
    for line in (*filter(None, [table.legend]), *(f'{ABSENT} {note}' for note in table.notes)):
        console.print(line, style='dim', highlight=False, markup=False)
    for warning in table.warnings:
        console.print(f'warning: {warning}', highlight=False, markup=False)


def as_markdown(table: Table) -> str:
    """Return a table in Markdown without its title, errors in their own columns, the first column aligned left."""
    header, rows = [], []
    for column in table.columns:
        header += [plain(column.name), '±'] if column.with_error else [plain(column.name)]
    for name, *cells in table.rows:
        texts = [f'**{plain(str(name))}**' if name in table.composites else plain(str(name))]
        for column, cell in zip(table.columns[1:], cells, strict=True):
            texts.append(column.text(cell).strip().replace('*', r'\*'))
            if column.with_error:
                texts.append(column.error(cell))
        rows.append(texts)
    align = ['left', *['right'] * (len(header) - 1)]
    text = f'{tabulate(rows, header, tablefmt="pipe", colalign=align if rows else None, disable_numparse=True)}\n'
    lines = [*table.notes, *(f'warning: {warning}' for warning in table.warnings)]
    legend = f'\n{plain(table.legend)}\n' if table.legend else ''
    return text + legend + ''.join(['\n', *(f'- {plain(line)}\n' for line in lines)] if lines else [])


def plain(text: str) -> str:
    """Return a text as one line without Markdown markup."""
    return SPECIAL.sub(lambda found: f'\\{found[0]}', ' '.join(text.split()))


def print_records(
    form: str, rows: Sequence[Mapping[str, Any]], content: Any = None, warnings: Sequence[str] = ()
) -> None:
    """Print rows as 'csv', or the content, if not the rows, as 'json': numbers in full precision, absent ones empty.

    Warnings go to standard error, as standard output is for another program.
    """
    if form == 'json':
        json.dump(rows if content is None else content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
    else:
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
    for warning in warnings:
        print(f'warning: {warning}', file=sys.stderr)


def visible(text: str) -> str:
    """Return the text with unprintable characters as escapes, such as \\u2028."""
    return UNPRINTABLE.sub(lambda found: found[0].encode('unicode_escape').decode('ascii'), text)


def shortened(text: str, length: int) -> str:
    """Return the text, its middle omitted if it has more than `length` characters."""
    if len(text) <= length:
        return text
    tail = length // 3
    return f'{text[: length - tail - 1]}{ELLIPSIS}{text[-tail:]}'


def unique_labels(names: Iterable[str]) -> dict[str, str]:
    """Return a chart's label for each name; equal ones are numbered."""
    labels: dict[str, str] = {}
    for name in dict.fromkeys(names):
        label = visible(shortened(name, LABEL_LENGTH))
        labels[name] = label if label not in labels.values() else f'{label} ({len(labels) + 1})'
    return labels
