"""Report the progress of an evaluation: a progress bar on a terminal, else a log line every 30 seconds."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

log = logging.getLogger(__name__)

LINE_SECONDS = 30.0
BAR_SECONDS = 0.5
NUM_TASK = 40  # characters shown of a task's name


@dataclass(slots=True)
class Work:
    """The work of an evaluation and this rank's progress; all 0 before the plan is made.

    `num_items` counts the items of all ranks, `num_own` and `num_done` this rank's, `num_steps` its steps as far as
    known. Costs are this rank's, in tokens. Ranks run steps of similar cost at the same time, so this rank's progress
    represents that of all.
    """

    num_steps: int = 0
    num_items: int = 0
    num_own: int = 0
    num_done: int = 0
    cost: float = 0.0
    cost_done: float = 0.0
    task: str = ''  # of the current step

    def add(self, num_items: int, num_own: int, cost: float) -> None:
        """Add planned work."""
        self.num_items += num_items
        self.num_own += num_own
        self.cost += cost

    @property
    def share(self) -> float:
        """Return the fraction of work done, 0 to 1."""
        return min(1.0, self.cost_done / self.cost) if self.cost else 0.0

    @property
    def num_finished(self) -> int:
        """Return the estimated number of finished items on all ranks."""
        return round(self.num_items * self.num_done / self.num_own) if self.num_own else 0


class ProgressReport:
    """Report the progress of an evaluation between `start` and `stop`; `work` returns the current state.

    On a terminal it draws a bar; elsewhere it logs a line every `line_seconds`.
    """

    def __init__(
        self,
        title: str,
        work: Callable[[], Work],
        *,
        stream: TextIO | None = None,
        line_seconds: float = LINE_SECONDS,
    ) -> None:
        self.title = title
        self.work = work
        self.stream = stream or sys.stderr
        self.draws = is_terminal(self.stream)
        self.pause = BAR_SECONDS if self.draws else line_seconds
        self._started = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._report, name='gauntlet-progress', daemon=True)

    def start(self) -> None:
        """Start reporting."""
        self._started = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting and remove the bar."""
        self._stopped.set()
        self._thread.join()

    def _report(self) -> None:
        if self.draws:
            self._draw()
            return
        while not self._stopped.wait(self.pause):
            work = self.work()
            log.info('%s: %.0f%%, %s', self.title, 100 * work.share, self._described(work))

    def _draw(self) -> None:
        from tqdm import tqdm

        layout = '{desc} {percentage:3.0f}%|{bar}|{postfix}'
        with tqdm(total=100, desc=self.title, bar_format=layout, leave=False, file=self.stream) as bar:
            while not self._stopped.wait(self.pause):
                work = self.work()
                bar.n = 100 * work.share
                bar.set_postfix_str(self._described(work))

    def _described(self, work: Work) -> str:
        return describe(work, time.monotonic() - self._started)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a bar can be drawn; on a terminal without a size, as in some containers, tqdm draws nothing."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def describe(work: Work, seconds: float) -> str:
    """Describe the progress of work begun `seconds` ago and the estimated time left."""
    if not work.cost:
        return 'probing the model'
    parts = [f'{work.num_finished} of {work.num_items} items']
    if work.cost_done and seconds:
        parts.append(f'{work.num_finished / seconds:.3g} items/s')
    if work.cost_done and work.share < 1:
        parts.append(f'{clock(seconds * (1 - work.share) / work.share)} left')
    if work.task:
        parts.append(work.task if len(work.task) <= NUM_TASK else f'{work.task[: NUM_TASK - 3]}...')
    return ', '.join(parts)


def clock(seconds: float) -> str:
    """Format seconds as 0:07, 12:30 or 1:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{rest:02}' if hours else f'{minutes}:{rest:02}'
