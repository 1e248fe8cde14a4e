"""Checked access to the fields of one row; every problem is a RowError with what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmfoundry_gauntlet.config.decode import describe, suggestion

MOST_NAME, MOST_NAMES = 40, 20  # characters of a key, and number of keys, in a message
MOST_TEXT = 200  # characters at each end of a message


class RowError(ValueError):
    """A malformed row; the reader adds file and line."""

    def at(self, place: str) -> str:
        """Return the problem with the row's place, shortened to one printable line."""
        text = str(self)
        if len(text) > 2 * MOST_TEXT:
            text = f'{text[:MOST_TEXT]} [...] {text[-MOST_TEXT:]}'
        return f'{place}: {"".join(char if char.isprintable() else repr(char)[1:-1] for char in text)}'


def text_field(row: Mapping[str, Any], key: str, *, allow_empty: bool = True) -> str:
    """Return the string at `key`."""
    value = field_value(row, key)
    if not isinstance(value, str):
        raise RowError(f'{key} is {describe(value)}; allowed: text')
    if not value and not allow_empty:
        raise RowError(f'{key} is empty; allowed: text')
    return value


def texts_field(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of two or more non-empty strings at `key`."""
    value = field_value(row, key)
    if not isinstance(value, list) or len(value) < 2:
        raise RowError(f'{key} is {describe(value)}; allowed: a list of two or more texts')
    for index, item in enumerate(value):
        if not isinstance(item, str) or not item:
            raise RowError(f'{key}[{index}] is {describe(item)}; allowed: a non-empty text')
    return tuple(value)


def optional_text_field(row: Mapping[str, Any], key: str) -> str | None:
    """Return the string at `key`; None if it is absent or null."""
    return None if row.get(key) is None else text_field(row, key)


def optional_texts_field(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of strings at `key`; empty if it is absent or null."""
    value = row.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError(f'{key} is {describe(value)}; allowed: a list of texts')
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise RowError(f'{key}[{index}] is {describe(item)}; allowed: text')
    return tuple(value)


def gold_field(row: Mapping[str, Any], num_choices: int) -> int:
    """Return the index of the right choice at `gold`."""
    value = field_value(row, 'gold')
    if not isinstance(value, int) or isinstance(value, bool):
        raise RowError(f'gold is {describe(value)}; allowed: a whole number 0..{num_choices - 1}')
    if not 0 <= value < num_choices:
        raise RowError(f'gold is {describe(value)} but there are {num_choices} choices (0..{num_choices - 1})')
    return value


def field_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value at `key`. Raises RowError if the key is missing."""
    if key not in row:
        found = [name for name in row if name.isprintable() and len(name) <= MOST_NAME][:MOST_NAMES]
        raise RowError(f"the key '{key}' is missing{suggestion(key, found).replace('; allowed:', '; found:')}")
    return row[key]
