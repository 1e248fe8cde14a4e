"""Tables for the terminal, as Markdown, CSV and JSON; the report page has a template for the same tables."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import HORIZONTALS
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from tabulate import tabulate

from llmfoundry_gauntlet.metrics.statistics import interval
from llmfoundry_gauntlet.results.report.scores import ScoreRow
from llmfoundry_gauntlet.types import Measure

ABSENT = '-'
MINUS, ELLIPSIS = '\u2212', '\u2026'
ERRORS = 'error: the standard error, or the 95 % interval where that is 0 or unknown'
NAME_LENGTH, HEADER_LENGTH = 24, 14  # minimum length of a name; maximum in a header
ROUNDING = 1e-9  # an interval that is smaller is empty
GAP = 2  # spaces between columns
SPECIAL = re.compile(r'[\\|`*<\[]|(?<!\w)_|_(?!\w)')  # characters with a meaning in Markdown
# Characters that a browser would drop, replace or obey: control characters, line separators, marks that change the
# direction of writing, and halves of surrogate pairs. They are shown as Python escapes.
UNPRINTABLE = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]'
)

Cell = str | int | float | Measure | ScoreRow | None


def ends_of(cell: Cell) -> tuple[float, float] | None:
    """Return the 95 % interval of a score, `None` if it is unknown or, as for a difference of equal items, empty."""
    low: float | None = None
    high: float | None = None
    if isinstance(cell, Measure):
        low, high = interval(cell) or (None, None)
    elif isinstance(cell, ScoreRow):
        low, high = cell.low, cell.high
    if low is None or high is None or high - low < ROUNDING:
        return None
    return low, high


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its name and the format of its numbers.

    With `with_error`, errors are shown next to the numbers. `absent` is shown for a missing number.
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
        """Return the standard error of a cell, or its interval if that is 0 or unknown; '' if both are unknown."""
        standard_error = cell.standard_error if isinstance(cell, Measure | ScoreRow) else None
        if standard_error is not None:
            text = self.number(standard_error).removeprefix('+')
            if text.strip('0.'):  # not 0 once it is rounded
                return text
        ends = ends_of(cell)
        return '' if ends is None else f'[{ends[0]:.2f}, {ends[1]:.2f}]'


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of a table: its name, a mark that a note explains, and its other cells.

    Scores of several tasks are bold; `is_indented` is a task below the category it counts for. Only the report page has
    room for the `note`.
    """

    name: str
    cells: Sequence[Cell]
    is_bold: bool = False
    is_indented: bool = False
    mark: str = ''
    note: str = ''

    @property
    def full_name(self) -> str:
        """Return the name as a terminal shows it, indented and with its mark."""
        return f'{"  " * self.is_indented}{self.name}{self.mark}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows in parts below a header; `name` is that of the first column, and `columns` are the others.

    `legend` explains the columns; `notes` say why numbers are absent; `warnings` come last. The report page draws the
    intervals on an axis of the `domain`: those of scores, or those of the differences of the run with the index
    `compared_run`, which are in the first column.
    """

    title: str
    columns: Sequence[Column]
    parts: Sequence[Sequence[TableRow]]
    name: str = ''
    domain: tuple[float, float] | None = None
    compared_run: int | None = None
    legend: Sequence[str] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def reading_order(self) -> list[Sequence[TableRow]]:
        """Return the parts, averages first, which only the terminal shows last, as the end of its table."""
        return sorted(filter(None, self.parts), key=lambda part: not all(row.is_bold for row in part))

    @property
    def rows(self) -> list[TableRow]:
        """Return all rows in reading order."""
        return [row for part in self.reading_order for row in part]

    @property
    def footer(self) -> list[str]:
        """Return the lines below the table: the legend, that of errors if intervals are shown, notes, warnings."""
        lines = [*self.legend]
        if self.shows_intervals:
            lines.append(ERRORS)
        lines += self.notes
        lines += [f'warning: {warning}' for warning in self.warnings]
        return lines

    @property
    def shows_intervals(self) -> bool:
        """Return whether an interval is shown in place of an error."""
        for row in self.rows:
            for column, cell in self.pairs(row):
                if column.with_error and column.error(cell).startswith('['):
                    return True
        return False

    def pairs(self, row: TableRow) -> list[tuple[Column, Cell]]:
        """Return the cells of a row with their columns."""
        return list(zip(self.columns, row.cells, strict=True))

    def texts(self, row: TableRow) -> list[str]:
        """Return the cells of a row as texts, errors in cells of their own."""
        texts = []
        for column, cell in self.pairs(row):
            texts.append(column.text(cell).strip())
            if column.with_error:
                texts.append(column.error(cell).strip())
        return texts

    @property
    def header(self) -> list[str]:
        """Return the names of the columns, including those of errors."""
        names = []
        for column in self.columns:
            names.append(column.name)
            if column.with_error:
                names.append('error')
        return names


def print_tables(form: str, tables: Sequence[Table], rows: Sequence[Mapping[str, Any]], content: Any = None) -> None:
    """Print tables as 'table' or 'markdown', or their rows as 'csv' or 'json'; JSON is the content, if there is any.

    CSV and JSON have numbers in full precision, absent ones are empty, and warnings go to standard error, as standard
    output is for another program.
    """
    if form == 'json':
        json.dump(rows if content is None else content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
    elif form == 'csv':
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
    else:
        for index, table in enumerate(tables):
            if index > 0:
                print()
            if form == 'markdown':
                sys.stdout.write(as_markdown(table))
            else:
                print_table(table)
        return
    for warning in dict.fromkeys(warning for table in tables for warning in table.warnings):
        print(f'warning: {warning}', file=sys.stderr)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or 80 characters if standard output is not a terminal.

    Names are shortened to fit; if numbers need more room, the table is wider.
    """
    header = [shorten_middle(name, HEADER_LENGTH) for name in table.header]
    rows = [table.texts(row) for row in table.rows]
    widths = [max(map(cell_len, cells)) for cells in zip(header, *rows, strict=True)]

    # Numbers are never shortened. Names have the room that they leave, but at least NAME_LENGTH.
    width_of_numbers = sum(width + GAP for width in widths)
    longest_name = max((len(row.full_name) for row in table.rows), default=0)
    width_of_terminal = Console().width
    width_of_names = min(longest_name, max(NAME_LENGTH, width_of_terminal - width_of_numbers))
    console = Console(width=max(width_of_terminal, width_of_names + width_of_numbers))

    shown = RichTable(box=HORIZONTALS, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    shown.add_column(escape(table.name), no_wrap=True, width=width_of_names)
    for name, width in zip(header, widths, strict=True):
        shown.add_column(escape(name), justify='right', no_wrap=True, width=width)
    for part in filter(None, table.parts):
        for row in part:
            name = escape(shorten_middle(row.full_name, width_of_names))
            shown.add_row(f'[bold]{name}[/bold]' if row.is_bold else name, *map(escape, table.texts(row)))
        shown.add_section()
    console.print(table.title, style='bold', highlight=False, markup=False)
    console.print(shown)
    for line in table.footer:
        console.print(f'- {line}', highlight=False, markup=False)


def as_markdown(table: Table) -> str:
    """Return a table in Markdown below its title."""
    rows = []
    for row in table.rows:
        name = f'**{without_markdown(row.name)}**' if row.is_bold else without_markdown(row.full_name.strip())
        numbers = [text.replace('*', r'\*') for text in table.texts(row)]  # with the stars of clear differences
        rows.append([name, *numbers])
    headings = [without_markdown(name) for name in [table.name, *table.header]]
    align = ['left', *['right'] * len(table.header)]
    text = tabulate(rows, headings, tablefmt='pipe', colalign=align if rows else None, disable_numparse=True)

    title = without_markdown(table.title)
    lines = ''.join(f'- {without_markdown(line)}\n' for line in table.footer)
    footer = f'\n{lines}' if lines else ''
    return f'{title}\n\n{text}\n{footer}'


def without_markdown(text: str) -> str:
    """Return a text as one line without Markdown markup."""
    return SPECIAL.sub(lambda character: f'\\{character[0]}', ' '.join(text.split()))


def visible(text: str) -> str:
    """Return the text with unprintable characters as escapes, such as \\u2028."""
    return UNPRINTABLE.sub(lambda character: character[0].encode('unicode_escape').decode('ascii'), text)


def typographic(number: str) -> str:
    """Return a number with a typographic minus sign, and 0 without any sign."""
    return re.sub(r'^[-+](?=[0.]+$)', '', number.strip()).replace('-', MINUS)


def shorten_middle(text: str, length: int) -> str:
    """Return the text, its middle omitted if it has more than `length` characters; the shots of a task stay."""
    if len(text) <= length:
        return text
    num_shots_part = len(text) - text.rfind('/') if '/' in text else 0  # characters of '/10-shot'
    tail = num_shots_part if length // 3 < num_shots_part <= length // 2 else length // 3
    return f'{text[: length - tail - 1]}{ELLIPSIS}{text[-tail:]}'
