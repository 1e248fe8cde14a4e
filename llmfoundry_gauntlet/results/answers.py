"""External answers: JSON lines that name an item with the same keys as exported requests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.decode import describe
from llmfoundry_gauntlet.config.tasks import task_key
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.types import Answer, ItemKey


class LineError(ValueError):
    """Raised for a line that cannot be read as an answer."""


def read_answers(path: Path) -> Iterator[Answer]:
    """Yield the answers of a file. Raise DataError with every invalid line, after all were read."""
    problems: list[str] = []
    try:
        with path.open(encoding='utf-8') as lines:
            for number, line in enumerate(lines, 1):
                place = f'{path}:{number}'
                if not line.strip():
                    continue
                try:
                    yield parse_answer(json.loads(line), place)
                except json.JSONDecodeError as error:
                    problems.append(f'{place}: malformed JSON: {error.msg} at column {error.colno}')
                except LineError as error:
                    problems.append(f'{place}: {error}')
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f'{path}: cannot be read: {error}') from error
    if problems:
        raise DataError(problems)


def parse_answer(row: Any, place: str) -> Answer:
    """Return one line as an Answer. Unknown keys are ignored."""
    if not isinstance(row, dict):
        raise LineError(f'is {describe(row)}; allowed: a JSON object')
    text = optional(row, 'text', str)
    logprobs = optional_list(row, 'logprobs', (int, float, type(None)))
    if text is None and logprobs is None:
        raise LineError('has neither text nor logprobs')
    num_tokens = optional_list(row, 'num_tokens', int)
    return Answer(
        place=place,
        key=ItemKey(
            task=task_key(required(row, 'task', str), required(row, 'num_shots', int)),
            row=required(row, 'row', int),
            file=optional(row, 'file', str),
            variant=optional(row, 'variant', str),
            sample=optional(row, 'sample', int) or 0,
        ),
        text=text,
        logprobs=None if logprobs is None else tuple(math.nan if value is None else float(value) for value in logprobs),
        num_tokens=None if num_tokens is None else tuple(num_tokens),
        is_argmax=optional(row, 'is_argmax', bool),
    )


def required(row: dict[str, Any], key: str, kind: type) -> Any:
    """Return the value at `key`."""
    if row.get(key) is None:
        raise LineError(f"the key '{key}' is missing")
    return optional(row, key, kind)


def optional(row: dict[str, Any], key: str, kind: type) -> Any:
    """Return the value at `key`, None if it is missing."""
    value = row.get(key)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise LineError(f'{key} is {describe(value)}; allowed: {KINDS[kind]}')
    return value


def optional_list(row: dict[str, Any], key: str, kinds: Any) -> list[Any] | None:
    """Return the list of numbers at `key`, None if it is missing."""
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise LineError(f'{key} is {describe(value)}; allowed: a list of numbers')
    for index, item in enumerate(value):
        if not isinstance(item, kinds) or isinstance(item, bool):
            raise LineError(f'{key}[{index}] is {describe(item)}; allowed: a number')
    return value


KINDS = {str: 'text', int: 'a whole number', bool: 'true or false'}
