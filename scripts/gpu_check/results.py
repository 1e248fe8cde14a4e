"""The results of all parts in one JSON file, written after every row.

{"numbers": {"status": "passed", "seconds": 41.2, "quick": true, "machine": {...}, "rows": [
    {"name": "llama bf16", "status": "passed", "seconds": 0.6, "figures": {"nats off": 0.012},
     "limits": {"nats off": "at most 0.05"}}]}}
"""

from __future__ import annotations

import json
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNNING = 'running'  # as the file has it while the part runs, and afterwards if the process was killed
PASSED = 'passed'
FAILED = 'failed'  # a figure is beyond its limit
ERROR = 'error'  # an exception, which the file has
SKIPPED = 'skipped'  # for a reason, such as a package that is not installed
STOPPED = 'stopped'  # the part's time was over
WORST_LAST = (SKIPPED, PASSED, STOPPED, FAILED, ERROR)


class Skipped(Exception):
    """Raised within a row that cannot run here; the message says why."""


class TimeIsUp(BaseException):
    """Raised in the middle of a part whose time is over; it is no Exception, which a row would record as its own."""


@dataclass(slots=True)
class Row:
    """The figures of one row, and their limits."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)

    def note(self, **figures: Any) -> None:
        """Record figures without a limit; underscores in their names become spaces."""
        for name, figure in figures.items():
            self.figures[name.replace('_', ' ')] = plain(figure)

    def check(self, name: str, figure: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Record a figure with a limit, which a NaN misses."""
        self.figures[name] = plain(figure)
        if at_most is not None:
            self.limits[name] = f'at most {at_most:.3g}'
            is_within = figure <= at_most
        else:
            assert at_least is not None
            self.limits[name] = f'at least {at_least:.3g}'
            is_within = figure >= at_least
        if not is_within:
            self.misses.append(name)

    def expect(self, name: str, found: Any, expected: Any) -> None:
        """Record something that must be equal to what is expected."""
        self.figures[name] = plain(found)
        self.limits[name] = f'{plain(expected)}'
        if found != expected:
            self.misses.append(name)


class Rows:
    """The rows of one part."""

    def __init__(self, part: str, content: dict[str, Any], write: Callable[[], None]) -> None:
        self.part = part
        self.content = content
        self._write = write

    @contextmanager
    def row(self, name: str, group: str | None = None) -> Iterator[Row]:
        """Yield a place for figures, and record them, or the exception that was raised instead: the next row runs.

        Rows of a group have one line in the tables, with the largest of each figure.
        """
        row = Row(name)
        started = time.perf_counter()
        ended: dict[str, Any] = {}
        try:
            yield row
            ended['status'] = FAILED if row.misses else PASSED
        except Skipped as reason:
            ended = {'status': SKIPPED, 'reason': str(reason)}
        except TimeIsUp:
            ended['status'] = STOPPED
            raise
        except Exception as error:  # noqa: BLE001  # of any kind: that is what the row is there to show
            ended = {'status': ERROR, 'reason': one_line(error), 'traceback': traceback.format_exc()}
        finally:
            if ended:  # not so if the user interrupts
                recorded: dict[str, Any] = {
                    'name': name,
                    'group': group,
                    **ended,
                    'seconds': round(time.perf_counter() - started, 3),
                    'figures': row.figures,
                    'limits': row.limits,
                }
                if row.misses:
                    recorded['missed'] = row.misses
                self.content['rows'].append(recorded)
                print(f'{recorded["status"]:<8} {self.part:<10} {described(recorded)}', flush=True)
                self._write()


class Results:
    """The file. Parts of earlier runs stay in it until they run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, Any] = json.loads(path.read_text('utf-8')) if path.exists() else {}

    def run_part(
        self, name: str, part: Callable[[Rows], None], *, about: Mapping[str, Any], most_seconds: float | None
    ) -> str:
        """Run a part, at most so many seconds, record it with `about`, and return its status."""
        content: dict[str, Any] = {'status': RUNNING, 'seconds': 0.0, **about, 'rows': []}
        self.parts.pop(name, None)  # so that parts are in the order in which they have run
        self.parts[name] = content
        self.write()
        started = time.perf_counter()
        status = PASSED
        try:
            with nullcontext() if most_seconds is None else stopped_after(most_seconds):
                part(Rows(name, content, self.write))
        except TimeIsUp:
            status = STOPPED
            content['reason'] = f'stopped after {most_seconds:g} seconds: rows are missing'
        except Skipped as reason:
            status = SKIPPED
            content['reason'] = str(reason)
        except Exception as error:  # noqa: BLE001  # of any kind: the next part runs
            status = ERROR
            content |= {'reason': one_line(error), 'traceback': traceback.format_exc()}
        if 'reason' in content:
            print(f'{status:<8} {name:<10} {content["reason"]}', flush=True)
        statuses = [status, *(row['status'] for row in content['rows'])]
        content['status'] = max(statuses, key=WORST_LAST.index)
        content['seconds'] = round(time.perf_counter() - started, 1)
        self.write()
        return str(content['status'])

    def write(self) -> None:
        """Write everything; a process that is killed leaves the file whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part_of_file = self.path.with_name(f'{self.path.name}.part')
        part_of_file.write_text(json.dumps(self.parts, indent=1) + '\n', 'utf-8')
        part_of_file.replace(self.path)


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp within the context once so many seconds are over, between two steps of Python."""

    def stop(*_: Any) -> None:
        raise TimeIsUp

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def plain(figure: Any) -> Any:
    """Return a figure as JSON has it: numbers of numpy as Python's, those that are not finite as text."""
    if hasattr(figure, 'item'):
        figure = figure.item()
    if isinstance(figure, float) and not math.isfinite(figure):
        return str(figure)
    return figure


def described(row: Mapping[str, Any]) -> str:
    """Return a row's line on the screen."""
    figures = []
    for name, figure in row['figures'].items():
        limit = f' ({row["limits"][name]})' if name in row['limits'] else ''
        figures.append(f'{name} {formatted(figure)}{limit}')
    if 'reason' in row:
        figures.append(row['reason'])
    figures.append(f'{row["seconds"]:.1f} s')
    return f'{row["name"]}: {", ".join(figures)}'


def formatted(figure: Any) -> str:
    """Return a figure as text: large numbers with separators, others with three digits."""
    if isinstance(figure, bool) or not isinstance(figure, int | float):
        return str(figure)
    if isinstance(figure, int) or abs(figure) >= 1000:
        return f'{figure:,.0f}'
    return f'{figure:.3g}'


def one_line(error: Exception) -> str:
    """Return an exception's type and the first line of its message."""
    message = str(error).strip().partition('\n')[0]
    return f'{type(error).__name__}: {message}' if message else type(error).__name__
