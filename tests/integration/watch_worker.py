"""Trains and watches in forks of a process that has imported everything, so that tests can start many and kill them.

Lines of JSON are read: {"start": "train" or "watch", "ranks": N, "log": PATH, "arguments": [...]} is answered by the
process ids of the ranks, {"wait": PID, "seconds": N} by the exit status; who takes longer is killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import composer.trainer  # noqa: F401  imported once, for all forks
import tiny
import transformers.models.gpt2.modeling_gpt2  # noqa: F401
from composer.core import Callback

import llmfoundry_gauntlet.composer.watch  # noqa: F401
from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.cli import main as gauntlet


class Slow(Callback):
    """A training of so many seconds a batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)


def train(folder: Path, batches: int, seconds: float) -> None:
    """Trains with a checkpoint every other batch, evaluated by the callback."""
    callback = EvalGauntlet(
        tasks=str(folder / 'tasks.yaml'),
        gauntlet=str(folder / 'gauntlet.yaml'),
        data_root=str(folder),
        tokens_per_batch=120,
        interval='checkpoint',
        save_folder=str(folder / 'training'),
    )
    trainer = tiny.trainer(
        [callback, Slow(seconds)],
        max_duration=f'{batches}ba',
        save_folder=str(folder / 'checkpoints'),
        save_interval='2ba',
    )
    trainer.fit()
    trainer.close()


def run(kind: str, arguments: list[str]) -> int:
    """What a fork does; its exit status."""
    try:
        if kind == 'train':
            train(Path(arguments[0]), int(arguments[1]), float(arguments[2]))
        else:
            sys.argv = ['gauntlet', 'watch', *arguments]
            gauntlet()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 3
    return 0


def start(kind: str, ranks: int, log: str, arguments: list[str]) -> list[int]:
    """Forks the ranks of one job; their process ids."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port = listener.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            if ranks > 1:
                os.environ.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    NODE_RANK='0',
                    WORLD_SIZE=str(ranks),
                    LOCAL_WORLD_SIZE=str(ranks),
                    MASTER_ADDR='127.0.0.1',
                    MASTER_PORT=str(port),
                )
            status = run(kind, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    return children


def wait(child: int, seconds: float) -> int:
    """The exit status of a fork, which is killed after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if 'wait' in message:
            answer: Any = wait(message['wait'], message['seconds'])
        else:
            answer = start(message['start'], message['ranks'], message['log'], message['arguments'])
        print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    main()
