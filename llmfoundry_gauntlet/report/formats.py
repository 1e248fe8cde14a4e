"""Rows as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

SPECIAL = re.compile(r'[\\|`*<\[]|(?<!\w)_|_(?!\w)')  # characters with a meaning in Markdown


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, the first column aligned left and the others right. Cells are Markdown."""
    align = ['left', *['right'] * (len(header) - 1)]
    table: str = tabulate(rows, header, tablefmt='pipe', colalign=align if rows else None, disable_numparse=True)
    return f'{table}\n'


def markdown_list(lines: Sequence[str]) -> str:
    """Return plain-text lines as a list to stand below a table, nothing for none."""
    return ''.join(['\n', *(f'- {plain(line)}\n' for line in lines)]) if lines else ''


def plain(text: str) -> str:
    """Return a text as one line in which Markdown finds no markup."""
    return SPECIAL.sub(lambda found: f'\\{found[0]}', ' '.join(text.split()))


def bold(text: str) -> str:
    """Return a text in bold."""
    return f'**{plain(text)}**'


def as_json(content: Any) -> str:
    """Return JSON; numbers keep their full precision."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + '\n'


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return rows below a header, numbers in full precision, absent ones empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
