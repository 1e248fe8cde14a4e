"""Errors that the user can fix, which the command line prints without a traceback, and the words of their messages.

* GauntletError
  * ConfigError       a YAML file, or values given in its place
  * DataError         an evaluation data file
    * MissingFileError  a data file that does not exist
  * ModelError        a model, checkpoint or tokenizer
  * RecordError       an output folder, or a file written by a run
    * UnwrittenError    scores that could not be written, which it carries
  * StoreError        a folder, bucket or endpoint that is unavailable
  * MissingPackageError  a package that is not installed, also an ImportError

A caller's mistake in Python raises ValueError or TypeError as usual.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

COMMAND_LINE = 'command line'  # the source of settings that are options
MAX_LISTED = 20  # problems in the text of an error
MOST_SHOWN = 60  # characters of a value or a path
FOREIGN_ERRORS = (  # built-in errors that third-party code raises for invalid values, at any depth
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    ImportError,
)


# The errors


class GauntletError(Exception):
    """Base of all errors that the user can fix: one problem, or every problem found.

    Each problem names its place, what was found and what is allowed. The message has the first 20, `problems` all.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        shown = list(self.problems[:MAX_LISTED])
        if len(self.problems) > MAX_LISTED:
            shown.append(f'... and {len(self.problems) - MAX_LISTED} more')
        super().__init__('\n'.join(shown))


class ConfigError(GauntletError):
    """Invalid task, gauntlet or run settings; each problem is `file: dotted.path: what is wrong`."""


class DataError(GauntletError):
    """Invalid evaluation data; each problem is `file:line: what is wrong`."""


class MissingFileError(DataError):
    """A data file that does not exist."""


class ModelError(GauntletError):
    """A model, checkpoint or tokenizer that cannot be evaluated."""


class RecordError(GauntletError):
    """An output folder or a record that cannot be written or read."""


class UnwrittenError(RecordError):
    """Scores that could not be written to `folder`; `record` is what its results.json would have been."""

    def __init__(
        self, problems: str | Sequence[str], *, folder: Path | None = None, record: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(problems)  # the others have defaults, as unpickling on other ranks sets them later
        self.folder = Path() if folder is None else folder
        self.record: Mapping[str, Any] = {} if record is None else record


class StoreError(GauntletError):
    """A folder, bucket or endpoint that is unavailable; the files in it may be intact."""


class MissingPackageError(GauntletError, ImportError):
    """A package that an optional part needs and that is not installed."""


def print_problems(error: GauntletError) -> None:
    """Print every problem on standard error, one per line."""
    for problem in error.problems:
        print(f'error: {problem}', file=sys.stderr)


# The names of settings, in the words of who gave them

# The options of the command that runs, by setting; empty elsewhere, where settings are keys.
OPTIONS: ContextVar[Mapping[str, str]] = ContextVar('OPTIONS', default={})  # noqa: B039 - never changed in place
KEY = re.compile(r'\w+(?=[.:\[])')  # at the beginning of a problem


@contextlib.contextmanager
def named_as_options(options: Mapping[str, str]) -> Iterator[None]:
    """Name these settings in messages by their options while the context lasts."""
    token = OPTIONS.set(options)
    try:
        yield
    finally:
        OPTIONS.reset(token)


def named(key: str) -> str:
    """Return the name of a setting for a message: its option on the command line, elsewhere its key."""
    return OPTIONS.get().get(key, key)


def as_given(key: str, value: Any = True) -> str:
    """Return how a setting is given a value: `--sandbox none`, and `--resume` for True; elsewhere `sandbox: none`."""
    text = 'true' if value is True else str(value)
    if key not in OPTIONS.get():
        return f'{key}: {text}'
    return named(key) if value is True else f'{named(key)} {text}'


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Begin the problems of a GauntletError in the context with the name of the setting that they are about."""
    try:
        yield
    except GauntletError as error:
        raise type(error)([f'{named(key)}: {problem}' for problem in error.problems]) from error


# Problems and errors, collected or caught


class Problems:
    """Collect the problems of one source, each with its dotted path."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.messages: list[str] = []

    def add(self, path: str, message: str, *, key: str = '') -> None:
        """Add a problem at a dotted path ('' for the whole source), or at a `key` below it that is named already."""
        if self.source == COMMAND_LINE:
            text = f'{path}: {message}' if path else message
            self.messages.append(KEY.sub(lambda match: named(match[0]), text, count=1) if KEY.match(text) else text)
            return
        place = join(path, key) if key else path
        source = f'{self.source}{self.line_of(place)}' if place else self.source
        self.messages.append(f'{source}: {path}: {message}' if path else f'{source}: {message}')

    def line_of(self, path: str) -> str:
        """Return ':LINE (LABEL)' of a dotted path, '' if the source has no lines."""
        return ''

    def raise_all(self) -> None:
        """Raise one ConfigError with all problems, if there are any."""
        if self.messages:
            raise ConfigError(self.messages)


def join(path: str, key: str) -> str:
    """Return the dotted path of a key below `path`."""
    return f'{path}.{key}' if path else key


class Collected:
    """Context manager that catches GauntletErrors, so that all checks run before the first error is raised.

    It can be entered several times, once for each check:

        collected = Collected()
        with collected:
            check_one()
        with collected:
            check_another()
        collected.raise_all()
    """

    def __init__(self) -> None:
        self.errors: list[GauntletError] = []

    def __enter__(self) -> Collected:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, GauntletError):
            return False
        self.errors.append(error)
        return True

    def add(self, error: GauntletError) -> None:
        """Add an error that a check has returned."""
        self.errors.append(error)

    def error(self) -> GauntletError:
        """Return one error with all problems caught so far, of the type of the first."""
        problems = [problem for error in self.errors for problem in error.problems]
        return type(self.errors[0])(list(dict.fromkeys(problems)))

    def raise_all(self) -> None:
        """Raise one error with all problems caught so far, if there are any."""
        if self.errors:
            raise self.error() from self.errors[0]


class Caught:
    """Context manager that catches errors of third-party code and stores the one caught in `error`.

    Catches FOREIGN_ERRORS, additional `kinds`, and errors whose class is defined in one of these top-level `packages`;
    with `bare` also plain `Exception`, which an except clause cannot catch without all its subclasses.
    """

    def __init__(
        self, *, kinds: Sequence[type[Exception]] = (), packages: Sequence[str] = (), bare: bool = False
    ) -> None:
        self.kinds: tuple[type[BaseException], ...] = (*FOREIGN_ERRORS, *kinds)
        self.packages = packages
        self.bare = bare
        self.error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if kind is None:
            return False
        is_foreign = issubclass(kind, self.kinds) or kind.__module__.partition('.')[0] in self.packages
        if error is None or not (is_foreign or (self.bare and kind is Exception)):
            return False
        self.error = error.with_traceback(None)  # its frames would keep their local variables alive
        return True


def tokenizer_errors() -> Caught:
    """Return a context that catches a tokenizer's errors; the tokenizers library, in Rust, raises Exception itself."""
    return Caught(packages=('pyo3_runtime',), bare=True)


# The words of messages


def describe(value: Any) -> str:
    """Return a short description of an invalid value: its kind, or the value itself if it is short."""
    if value is None:
        return 'empty'
    if isinstance(value, Mapping):
        return 'a mapping' if value else 'an empty mapping'
    if isinstance(value, (list, tuple)):
        return 'a list' if value else 'an empty list'
    text = repr(value)
    return text if len(text) < MOST_SHOWN else f'{type(value).__name__} {text[:50]}...'


def suggestion(word: str, allowed: Iterable[str]) -> str:
    """Return ', did you mean ...?' if an allowed word is close, else the list of allowed words."""
    allowed = sorted(allowed)
    close = closest(word, allowed)
    return f'; allowed: {", ".join(allowed)}' if close is None else f", did you mean '{close}'?"


def closest(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word that is most similar to this one, None if none is close."""
    close = difflib.get_close_matches(word, sorted(allowed), n=1)
    return close[0] if close else None


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return the names separated by commas; beyond `most`, only the number of others."""
    names = list(names)
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(names[:most]) + more


def plural(count: int, noun: str) -> str:
    """Return a number with its noun, such as '1 task' or '2,000 tasks'; a noun in -y has the plural -ies."""
    if count == 1:
        return f'{count} {noun}'
    return f'{count:,} {noun[:-1]}ies' if noun.endswith('y') else f'{count:,} {noun}s'


def duration(seconds: float) -> str:
    """Return a time in the units in which one speaks of it: '0.2 s', '3 min 2 s' or '1 h 5 min'."""
    if round(seconds, 1) < 60:
        return f'{seconds:.1f} s'
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f'{minutes} min {seconds} s'
    hours, minutes = divmod(round(minutes + seconds / 60), 60)
    return f'{hours} h {minutes} min'
