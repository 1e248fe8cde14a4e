"""Decode plain YAML values into frozen dataclasses, collecting all problems in one pass."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

TYPE_NAMES = {str: 'text', int: 'a whole number', float: 'a number', bool: 'true or false', dict: 'a mapping'}


class Problems:
    """Collects problems, each with its file and dotted path."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[str] = []

    def add(self, path: str, message: str) -> None:
        """Add a problem at a dotted path ('' for the whole file)."""
        self.found.append(f'{self.source}: {path}: {message}' if path else f'{self.source}: {message}')


def suggestion(word: str, allowed: typing.Iterable[str]) -> str:
    """Return ', did you mean ...?' if an allowed word is close, else the list of allowed words."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(word, allowed, n=1)
    return f", did you mean '{close[0]}'?" if close else f'; allowed: {", ".join(allowed)}'


def decode(cls: type, value: Any, path: str, problems: Problems) -> Any:
    """Return an instance of the dataclass `cls` from a mapping, or None if anything in it is wrong."""
    if not isinstance(value, Mapping):
        problems.add(path, f'is {describe(value)}; allowed: a mapping')
        return None
    before = len(problems.found)
    hints = hints_of(cls)
    known = {item.name: item for item in fields(cls)}
    for key in value:
        if key not in known:
            problems.add(join(path, str(key)), f"unknown key '{key}'{suggestion(str(key), known)}")
    arguments = {}
    for name, item in known.items():
        if name in value:
            arguments[name] = decode_value(hints[name], value[name], join(path, name), problems)
        elif item.default is MISSING and item.default_factory is MISSING:
            problems.add(path, f"the key '{name}' is missing")
    if len(problems.found) > before:
        return None
    try:
        return cls(**arguments)
    except ValueError as error:
        problems.add(path, str(error))
        return None


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, cached because resolving them is slow."""
    return typing.get_type_hints(cls)


def decode_value(hint: Any, value: Any, path: str, problems: Problems) -> Any:
    """Return `value` as the annotated type, or None with a problem for a wrong type."""
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return decode_value(next(a for a in arguments if a is not type(None)), value, path, problems)
    if isinstance(hint, type) and is_dataclass(hint):
        return decode(hint, value, path, problems)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            problems.add(path, f'is {describe(value)}; allowed: a list')
            return None
        return tuple(decode_value(arguments[0], item, f'{path}[{i}]', problems) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            problems.add(path, f'is {describe(value)}; allowed: a mapping')
            return None
        return {key: decode_value(arguments[1], item, join(path, str(key)), problems) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        problems.add(path, f'is {describe(value)}; allowed: {TYPE_NAMES[hint]}')
        return None
    return value


def join(path: str, key: str) -> str:
    """Return the dotted path of a key below `path`."""
    return f'{path}.{key}' if path else key


def describe(value: Any) -> str:
    """Return a short description of a wrong value: its kind, or itself if it is short."""
    if value is None:
        return 'empty'
    if isinstance(value, Mapping):
        return 'a mapping' if value else 'an empty mapping'
    if isinstance(value, (list, tuple)):
        return 'a list' if value else 'an empty list'
    return repr(value) if len(repr(value)) < 60 else f'{type(value).__name__} {repr(value)[:50]}...'
