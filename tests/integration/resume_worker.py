"""Run evaluations in forks of a process that has imported everything, and kill them.

resume_worker.py FOLDER; reads lines of 'RANKS SECONDS LINES KEY=VALUE...', and prints the exit statuses for each.
Ranks are killed after SECONDS, or when LINES are in the journal, by SIGKILL or by `signal`. Rank
`hangs` hangs at its 5th batch; `how` is asleep, or holding Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import composer.trainer  # noqa: F401  imported once, for all forks
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.composer import watchdog
from llmfoundry_gauntlet.composer.loop import EvaluationLoader
from llmfoundry_gauntlet.errors import GauntletError, print_problems


def hang(how: str) -> None:
    """Make every batch from the 5th on hang."""
    score, calls = EvaluationLoader._score, itertools.count()

    def score_or_hang(*arguments: object) -> object:
        if next(calls) < 5:
            return score(*arguments)
        if how == 'holding':
            ctypes.PyDLL(None).sleep(1000)  # like a regular expression with catastrophic backtracking
        time.sleep(1000)

    EvaluationLoader._score = score_or_hang


def run_rank(folder: Path, rank: int, num_ranks: int, port: int, settings: dict[str, object]) -> int:
    """Run one rank, in its own fork; return its exit status."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK='0',
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT=str(port),
    )
    how = str(settings.pop('how', 'asleep'))
    if settings.pop('hangs', None) == rank:
        watchdog.BACKSTOP_SECONDS = 2.0
        hang(how)
    try:
        evaluate(
            folder / 'model',
            tasks=str(folder / 'tasks.yaml'),
            gauntlet=str(folder / 'gauntlet.yaml'),
            data_root=str(folder),
            device='cpu',
            **settings,
        )
    except GauntletError as error:
        print_problems(error)
        return 2
    except Exception:
        traceback.print_exc()
        return 3
    return 0


def num_lines(out: Path) -> int:
    """Return the number of lines in the journal of an evaluation, which removes it at its end."""
    count = 0
    with contextlib.suppress(OSError):  # the folder may be removed at any moment
        for path in (out / 'journal').glob('*'):
            count += path.read_bytes().count(b'\n')
    return count


def attempt(folder: Path, num_ranks: int, seconds: float, lines: int, settings: dict[str, object]) -> list[int]:
    """Return the exit statuses of all ranks, negative for those that were killed."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port = listener.getsockname()[1]
    children = []
    kill = signal.Signals[str(settings.pop('signal', 'SIGKILL'))]
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os._exit(run_rank(folder, rank, num_ranks, port, settings))
        children.append(child)
    statuses: dict[int, int] = {}
    killed: set[int] = set()
    out = Path(str(settings['out']))
    deadline = time.monotonic() + seconds
    while len(statuses) < num_ranks:
        for child in children:
            if child not in statuses:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    statuses[child] = os.waitstatus_to_exitcode(status)
                elif child not in killed and (time.monotonic() > deadline or num_lines(out) >= lines):
                    os.kill(child, kill)
                    killed.add(child)
        time.sleep(0.005)
    return [statuses[child] for child in children]


def main(folder: Path) -> None:
    logging.basicConfig(format='%(message)s')
    for line in sys.stdin:
        num_ranks, seconds, lines, *words = line.split()
        settings = dict(word.split('=') for word in words)
        typed = {key: int(value) if value.isdecimal() else value for key, value in settings.items()}
        typed.update((key, True) for key in settings if settings[key] == 'true')
        print(*attempt(folder, int(num_ranks), float(seconds), int(lines), typed), flush=True)


if __name__ == '__main__':
    main(Path(sys.argv[1]))
