"""Progress reports of an evaluation."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
import tiny

from llmfoundry_gauntlet.composer import evaluate
from llmfoundry_gauntlet.composer.progress import Work, describe, is_terminal, progress_report
from llmfoundry_gauntlet.composer.progress import log as progress_log

# A rank with 30 of 100 items, 12 of which it has done, which was a quarter of its work: 40 of all are taken for done.
A_QUARTER = Work(num_items=100, num_own=30, num_done=12, cost=800.0, cost_done=200.0, task='boolq/10-shot')


@pytest.mark.parametrize(
    ('work', 'seconds', 'described'),
    [
        (A_QUARTER, 2.2, '40 of 100 items, 18.2 items/s, 00:06 left, boolq/10-shot'),
        (A_QUARTER, 250.0, '40 of 100 items, 0.16 items/s, 12:30 left, boolq/10-shot'),
        (A_QUARTER, 1300.0, '40 of 100 items, 0.0308 items/s, 1:05:00 left, boolq/10-shot'),
        (Work(), 5.0, 'probing the model'),
        (Work(num_items=4, num_own=4, cost=8.0), 5.0, '0 of 4 items'),
    ],
)
def test_the_time_left_follows_from_the_share_done_after_the_plan(work: Work, seconds: float, described: str):
    assert describe(work, seconds) == described


def test_without_a_terminal_lines_are_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, progress_log.name)
    deadline = time.monotonic() + 60
    with progress_report('gauntlet ba7', lambda: A_QUARTER, stream=io.StringIO(), line_seconds=0.01):
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(caplog.messages) >= 2
    assert all(message.startswith('gauntlet ba7: 25%, 40 of 100 items, ') for message in caplog.messages)
    num_lines = len(caplog.messages)
    time.sleep(0.05)
    assert len(caplog.messages) == num_lines


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """Return both ends of a terminal of 40 rows and 120 columns."""
    ours, theirs = pty.openpty()
    resize(theirs, 40, 120)
    with os.fdopen(theirs, 'w') as stream:
        yield ours, stream
    os.close(ours)


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack('HHHH', rows, columns, 0, 0))


def test_on_a_terminal_a_bar_is_drawn_and_removed(terminal: tuple[int, TextIO]):
    ours, stream = terminal
    seen = b''
    with progress_report('gauntlet ba7', lambda: A_QUARTER, stream=stream):
        while b'25%' not in seen:
            seen += os.read(ours, 4096)
    stream.write('end')
    stream.flush()
    while b'end' not in seen:
        seen += os.read(ours, 4096)
    assert b'gauntlet ba7  25%|' in seen and b'40 of 100 items' in seen
    assert seen.rpartition(b'\r')[2] == b'end'
    resize(stream.fileno(), 0, 0)  # as in some containers
    assert stream.isatty() and not is_terminal(stream)


def test_an_evaluation_counts_all_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last report says that everything is done, each item once."""
    seen: list[Work] = []

    @contextmanager
    def noted(title: str, work: Callable[[], Work]) -> Iterator[None]:
        with progress_report(title, work):
            yield
            seen.append(work())

    monkeypatch.setattr('llmfoundry_gauntlet.composer.callback.progress_report', noted)
    settings = tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path))
    evaluate(tiny.save(tiny.model(), tmp_path / 'model'), **settings)
    (work,) = seen
    assert (work.num_items, work.num_own, work.num_done, work.num_finished) == (28 + 80,) * 4
    assert work.cost > 0 and work.share == 1.0
    assert 'gauntlet-progress' not in [thread.name for thread in threading.enumerate()]
