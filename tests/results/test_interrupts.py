"""Commands that are interrupted say what is kept, and exit with the conventional status."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import journals
import pytest

from llmfoundry_gauntlet.results.interrupts import Interrupted

SLEEPING = """
import time
from llmfoundry_gauntlet.results.interrupts import exit_on_signals
with exit_on_signals(lambda: 'all is kept'):
    try:
        print('ready', flush=True)
        time.sleep(1000)
    finally:
        print('ending', flush=True)
        time.sleep(WAIT)
"""


def start(wait_seconds: float) -> subprocess.Popen[str]:
    """Start a process that waits for a signal, then takes this long to end."""
    script = SLEEPING.replace('WAIT', str(wait_seconds))
    process = subprocess.Popen(
        [sys.executable, '-c', script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == 'ready\n'
    return process


@pytest.mark.parametrize(
    ('number', 'status', 'cause'), [(signal.SIGINT, 130, 'Ctrl-C'), (signal.SIGTERM, 143, 'SIGTERM')]
)
def test_a_signal_has_a_message_and_its_exit_status(number: signal.Signals, status: int, cause: str):
    with start(wait_seconds=0) as process:
        process.send_signal(number)
        _, err = process.communicate()
    assert (process.returncode, err) == (status, f'interrupted by {cause}: all is kept\n')


def test_a_second_ctrl_c_ends_the_process_at_once_but_a_launchers_sigterm_does_not():
    """Mutation: a second signal raises again in the middle of the end."""
    with start(wait_seconds=1000) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == 'ending\n'
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.count('interrupted') == 1 and 'Traceback' not in err


def test_the_message_counts_the_items_of_all_ranks_once_and_names_the_way_to_resume(tmp_path: Path):
    out = tmp_path / 'out'
    interrupted = Interrupted(folder=out, option='--resume')
    assert interrupted().endswith('to go on: the same command again')

    # A journal without items makes the folder one that is refused.
    journals.write(out)
    assert interrupted() == 'nothing was computed yet that could be kept\nto go on: the same command with --resume'

    # Items 0 to 4, of which 2 is in both files and the last line of one is torn.
    journals.write(out, [journals.item(row) for row in range(3)], rank=1)
    torn = journals.write(out, [journals.item(row) for row in (2, 3, 4)], rank=2)
    torn.write_bytes(torn.read_bytes()[:-5])
    assert interrupted() == f'4 finished items are kept in {out}/journal\nto go on: the same command with --resume'

    resumed = Interrupted(folder=out, option=None)
    assert resumed().endswith('to go on: the same command again')


def test_results_of_this_evaluation_are_complete_but_not_those_that_it_replaces(tmp_path: Path):
    (tmp_path / 'results.json').write_text('{}')
    later = Interrupted(folder=tmp_path, option='--resume', started=(tmp_path / 'results.json').stat().st_mtime + 1)
    assert 'nothing was computed' in later()
    now = Interrupted(folder=tmp_path, option='--resume', started=0)
    assert now() == f'the evaluation was complete\nits scores: gauntlet show {tmp_path}'
