"""Say what is kept and how to go on: on Ctrl-C and SIGTERM, with the conventional exit status, and on a full disk."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.errors import UnwrittenError, plural
from llmfoundry_gauntlet.results.files import RESULTS
from llmfoundry_gauntlet.results.journal import JOURNAL, num_finished

CAUSES = {signal.SIGINT: 'Ctrl-C', signal.SIGTERM: 'SIGTERM'}


@contextmanager
def exit_on_signals(explain: Callable[[], str]) -> Iterator[list[int]]:
    """Exit at the first SIGINT or SIGTERM with 128 plus its number, after rank 0 has printed the explanation.

    A second SIGINT ends the process at once. A SIGTERM after the first signal changes nothing: launchers send one after
    Ctrl-C, which their ranks have received too. Yield the signals received so far: the exception with which the handler
    exits is lost if it interrupts an object's finalizer.
    """
    received: list[int] = []
    owner = os.getpid()

    def stop(number: int, frame: object) -> None:
        if os.getpid() != owner:  # a fork that has inherited this handler
            os._exit(128 + number)
        if received and number == signal.SIGINT:
            os._exit(128 + number)
        if received:
            return
        received.append(number)
        # At once, as closing loggers and leaving the process group may take seconds.
        if os.environ.get('RANK', '0') == '0':
            print_now(f'interrupted by {CAUSES[signal.Signals(number)]}: {explain()}')
        sys.exit(128 + number)

    earlier = {number: signal.signal(number, stop) for number in CAUSES}
    try:
        yield received
    finally:
        if not received:  # else a second Ctrl-C must also end the shutdown
            for number, handler in earlier.items():
                signal.signal(number, handler)


def print_now(text: str) -> None:
    """Print lines on standard error from a signal handler, which may have interrupted a `print` to the same file."""
    before = '\n' if os.isatty(2) else ''  # there may be a progress bar in the line
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f'{before}{text}\n'.encode('utf-8', 'backslashreplace'))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """Explain what an interrupted evaluation keeps in its folder and how to go on.

    `option` is what the command needs in order to resume, None if it has it.
    """

    folder: Path
    option: str | None
    started: float = field(default_factory=time.time)

    def __call__(self) -> str:
        """Return two lines."""
        results = self.folder / RESULTS
        with suppress(OSError):
            if results.stat().st_mtime >= self.started:
                return f'the evaluation was complete\nits scores: gauntlet show {self.folder}'
        num_items = num_finished(self.folder)
        kept = 'nothing was computed yet that could be kept'
        if num_items:
            verb = 'is' if num_items == 1 else 'are'
            kept = f'{plural(num_items, "finished item")} {verb} kept in {self.folder / JOURNAL}'
        return f'{kept}\nto go on: {self.command}'

    @property
    def command(self) -> str:
        """Return the command with which to go on."""
        # A folder with content, were it a journal without items, is refused unless the command resumes.
        has_content = self.folder.is_dir() and any(self.folder.iterdir())
        if self.option is None or not has_content:
            return 'the same command again'
        return f'the same command with {self.option}'


def with_remedy(error: UnwrittenError, kept: Interrupted) -> UnwrittenError:
    """Return the error with the command that writes the scores, and what it has to compute again."""
    num_items = sum(task.get('num_items', 0) for task in recorded_tasks(error.record))
    num_kept = num_finished(kept.folder)
    what = 'reuses all items'
    if num_kept < num_items:
        what = f'reuses {num_kept} of {plural(num_items, "item")}: the journal could not be written either'
    problems = [f'{problem}, then run {kept.command}, which {what}' for problem in error.problems]
    return UnwrittenError(problems, folder=error.folder, record=error.record)


def recorded_tasks(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tasks and SCORE's datasets of a record."""
    return [*record['tasks'].values(), *(record['score'] or {}).values()]


def nothing_written() -> str:
    """Explain that an interrupted command wrote nothing."""
    return 'nothing was written'
