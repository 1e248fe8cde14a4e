"""`gauntlet run` and `gauntlet eval`, interrupted: the message, the exit status and the items that are reused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from forks import PATHS, PATIENCE, command, start, statuses, tail_of
from tiny import journal_lines, record

pytestmark = pytest.mark.slow

KEPT = re.compile(r'interrupted by (Ctrl-C|SIGTERM): (\d+) finished items are kept in (\S+)\nto go on: (.*)\n')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a saved model and tasks of several hundred items."""
    tiny.write_tasks(tmp_path)
    tiny.write_rows(tmp_path / 'sums.jsonl', [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(300)])
    tiny.save(tiny.model(), tmp_path / 'model')
    return tmp_path


def wait_for_items(out: Path, log: Path) -> None:
    """Wait until an evaluation has finished some items."""
    end = time.monotonic() + PATIENCE
    while len(journal_lines(out)) < 20:
        assert time.monotonic() < end, tail_of(log)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ('number', 'status', 'cause'),
    [
        (signal.SIGINT, 130, 'Ctrl-C'),
        (signal.SIGTERM, 143, 'SIGTERM'),
    ],
)
def test_an_interrupted_run_says_what_is_kept_and_its_command_goes_on(
    folder: Path, number: signal.Signals, status: int, cause: str
):
    out, log = folder / 'out', folder / 'log.txt'
    settings = {**tiny.settings_of(folder), 'model': str(folder / 'model'), 'tokens_per_batch': '120', 'device': 'cpu'}
    options = [word for name, value in settings.items() for word in (f'--{name.replace("_", "-")}', value)]

    run = start(command, log, 'run', *options, '--out', str(out))
    wait_for_items(out, log)
    os.kill(run.pid, number)

    assert statuses([run], log) == [status], tail_of(log)
    message = KEPT.search(log.read_text())
    assert message is not None
    stated_cause, num_kept, journal, to_go_on = message.groups()
    assert 'Traceback' not in log.read_text()
    assert stated_cause == cause
    assert journal == str(out / 'journal')
    assert to_go_on == 'the same command with --resume'

    resumed = start(command, log, 'run', *options, '--out', str(out), '--resume')
    assert statuses([resumed], log) == [0], tail_of(log)
    assert record(out)['timing']['reused_items'] >= int(num_kept)


def test_under_the_launcher_rank_0_alone_has_a_message_and_both_ranks_items_are_reused(folder: Path):
    out, log = folder / 'out', folder / 'log.txt'
    settings = {**tiny.settings_of(folder), 'model': str(folder / 'model'), 'tokens_per_batch': 120, 'device': 'cpu'}
    (folder / 'eval.yaml').write_text(json.dumps({**settings, 'out': str(out)}))
    launcher = [str(Path(sys.executable).parent / 'composer'), '-n', '2', '-m', 'llmfoundry_gauntlet', 'eval']
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])  # of the python that it starts
    environment = {**os.environ, 'PATH': path, 'PYTHONPATH': PATHS, 'OMP_NUM_THREADS': '1'}

    def launch(*overrides: str) -> subprocess.Popen[bytes]:
        with log.open('ab') as output:
            words = [*launcher, str(folder / 'eval.yaml'), *overrides]
            return subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)

    first = launch()
    wait_for_items(out, log)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to the launcher and its ranks
    assert first.wait(PATIENCE) != 0
    (message,) = KEPT.finditer(log.read_text())
    _, num_kept, _, to_go_on = message.groups()
    assert to_go_on == 'the same command with resume=true'

    assert launch('resume=true').wait(PATIENCE) == 0, tail_of(log)
    assert record(out)['timing']['reused_items'] >= int(num_kept)
    assert 'finished items of an earlier attempt' in log.read_text()
