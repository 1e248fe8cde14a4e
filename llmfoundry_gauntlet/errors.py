"""Errors that are a user's to mend; the command line prints them without a traceback.

* GauntletError
  * ConfigError       a YAML file, or values given in its place
  * DataError         an evaluation data file
  * ModelError        a model, checkpoint or tokenizer
  * RecordError       an output folder or a file that a run wrote

A caller's mistake in Python is a ValueError or TypeError as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

MAX_LISTED = 20


class GauntletError(Exception):
    """Base of all errors that a user can mend: one problem, or every problem found.

    A problem says where, what was found and what is allowed. The message holds the first 20, `problems` all.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        shown = list(self.problems[:MAX_LISTED])
        if len(self.problems) > MAX_LISTED:
            shown.append(f'... and {len(self.problems) - MAX_LISTED} more')
        super().__init__('\n'.join(shown))


class ConfigError(GauntletError):
    """Wrong task, gauntlet or run settings; each problem is `file: dotted.path: what is wrong`."""


class DataError(GauntletError):
    """Wrong evaluation data; each problem is `file:line: what is wrong`."""


class ModelError(GauntletError):
    """A model, checkpoint or tokenizer that cannot be evaluated."""


class RecordError(GauntletError):
    """An output folder or a record that cannot be written or read."""


def print_problems(error: GauntletError) -> None:
    """Prints every problem on standard error, a line each."""
    for problem in error.problems:
        print(f'error: {problem}', file=sys.stderr)
