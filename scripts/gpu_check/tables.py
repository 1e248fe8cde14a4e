"""The tables of docs/speed.md from the file of results."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_check.results import PASSED, formatted

Row = Mapping[str, Any]


def markdown(parts: Mapping[str, Any]) -> str:
    """Return a section for each machine, of the parts that have run there."""
    parts_by_machine: dict[str, list[str]] = defaultdict(list)
    for name, content in parts.items():
        parts_by_machine[json.dumps(content['machine'])].append(name)
    sections = [section(json.loads(machine), names, parts) for machine, names in parts_by_machine.items()]
    return '\n'.join(sections) or 'no part has run'


def section(machine: Mapping[str, Any], names: Sequence[str], parts: Mapping[str, Any]) -> str:
    """Return the tables of the parts that have run on a machine."""
    versions = [f'{name.replace("_", " ")} {value}' for name, value in machine.items() if name != 'card']
    lines = [
        f'On {machine["card"]} ({", ".join(versions)}):',
        '',
        '| part | rows | result | seconds |',
        '|---|---|---|---|',
    ]
    for name in names:
        content = parts[name]
        size = ', quick' if content['quick'] else ''
        seconds = formatted(round(content['seconds']))
        lines.append(f'| {name}{size} | {counts(content["rows"])} | {content["status"]} | {seconds} |')
    for name in names:
        rows = parts[name]['rows']
        if rows:
            lines += ['', *tables(name, rows)]
    return '\n'.join([*lines, ''])


def counts(rows: Sequence[Row]) -> str:
    """Return how many rows have each status."""
    num_by_status = Counter(row['status'] for row in rows)
    return ', '.join(f'{count} {status}' for status, count in num_by_status.items()) or 'none'


def tables(part: str, rows: Sequence[Row]) -> list[str]:
    """Return the tables of a part, one for each kind of rows, with an empty line between them.

    Rows of a kind begin with the same figure; rows without figures, which did not run, are in the table before them.
    """
    rows_of_kind: dict[str, list[Row]] = {}
    kind = ''
    for row in rows:
        kind = next(iter(row['figures']), kind)
        rows_of_kind.setdefault(kind, []).append(row)
    lines: list[str] = []
    for of_kind in rows_of_kind.values():
        lines += ['', *table(part, of_kind)]
    return lines[1:]


def table(part: str, rows: Sequence[Row]) -> list[str]:
    """Return a table: a line for each row, but one for all rows of a group that are within their limits."""
    names = list(dict.fromkeys(name for row in rows for name in row['figures']))
    lines = [line([part, *names, 'result']), line(['---'] * (len(names) + 2))]
    for rows_of_line in grouped(rows):
        first = rows_of_line[0]
        cells = [cell(name, rows_of_line) for name in names]
        if len(rows_of_line) > 1:
            lines.append(line([f'{first["group"]}: {len(rows_of_line)} rows', *cells, PASSED]))
        else:
            result = ': '.join(first[key] for key in ('status', 'reason') if key in first)
            lines.append(line([first['name'], *cells, result]))
    return lines


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each line, in the order of their first."""
    lines: dict[Any, list[Row]] = {}
    for place, row in enumerate(rows):
        is_in_group = row.get('group') is not None and row['status'] == PASSED
        lines.setdefault(row['group'] if is_in_group else place, []).append(row)
    return list(lines.values())


def cell(name: str, rows: Sequence[Row]) -> str:
    """Return the cell of a figure with its limit: of several rows the largest number, and the row that has it."""
    with_figure = [row for row in rows if name in row['figures']]
    if not with_figure:
        return ''
    numbers = [row for row in with_figure if isinstance(row['figures'][name], int | float)]
    if len(rows) > 1 and len(numbers) < len(with_figure):  # texts
        num_by_text = Counter(str(row['figures'][name]) for row in with_figure)
        return ', '.join(f'{count} {text}' for text, count in num_by_text.most_common())
    shown = max(with_figure, key=lambda row: row['figures'][name]) if len(rows) > 1 else with_figure[0]
    limit = f' ({shown["limits"][name]})' if name in shown['limits'] else ''
    where = f', {shown["name"]}' if len(rows) > 1 else ''
    return f'{formatted(shown["figures"][name])}{limit}{where}'


def line(cells: Sequence[str]) -> str:
    """Return a line of a table."""
    escaped = [text.replace('|', '\\|') for text in cells]
    return f'| {" | ".join(escaped)} |'
