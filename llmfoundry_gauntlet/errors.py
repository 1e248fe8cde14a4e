"""Errors that the user can fix; the command line prints them without a traceback.

* GauntletError
  * ConfigError       a YAML file, or values given in its place
  * DataError         an evaluation data file
    * MissingFileError  one that is not there
  * ModelError        a model, checkpoint or tokenizer
  * RecordError       an output folder, or a file written by a run
  * StoreError        a folder, bucket or endpoint that is unavailable

A caller's mistake in Python is a ValueError or TypeError as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

MAX_LISTED = 20
FOREIGN_ERRORS = (  # of Python, which other people's code raises for a wrong value, wherever it comes upon it
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError),
    ImportError,
)


class GauntletError(Exception):
    """Base of all errors that the user can fix: one problem, or every problem found.

    A problem says where it is, what was found and what is allowed. The message has the first 20, `problems` all.
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
    """A data file that is not there."""


class ModelError(GauntletError):
    """A model, checkpoint or tokenizer that cannot be evaluated."""


class RecordError(GauntletError):
    """An output folder or a record that cannot be written or read."""


class StoreError(GauntletError):
    """A folder, bucket or endpoint that is unavailable; the files in it may be intact."""


class Caught:
    """A context that catches the errors of foreign code and keeps the `error`.

    It catches FOREIGN_ERRORS, other `kinds`, and errors whose classes belong to one of these top-level `packages`; with
    `bare` also `Exception` itself, which an except clause cannot name without all its subclasses.
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
        self.error = error.with_traceback(None)  # whose frames would keep all that they refer to, and this
        return True


def print_problems(error: GauntletError) -> None:
    """Print every problem on standard error, one per line."""
    for problem in error.problems:
        print(f'error: {problem}', file=sys.stderr)
