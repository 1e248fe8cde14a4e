"""The contenders as seen by the controller: one process each, kept for the whole run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name('worker.py')
GRACE_SECONDS = 10
LOG_LINES = 20  # shown in the error about a process that ended
# By default glibc returns large blocks to the system and gets them again page by page: up to a tenth of the time.
KEEPS_MEMORY = {'MALLOC_MMAP_THRESHOLD_': str(4 * 2**30), 'MALLOC_TRIM_THRESHOLD_': str(8 * 2**30)}
ONE_THREAD = {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'RAYON_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}


class ContenderError(Exception):
    """Raised if a contender failed; the message has its output."""


class Contender:
    """A process that answers requests one at a time and is idle in between."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open('w') as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )

    def send(self, method: str, **arguments: Any) -> None:
        """Call a method of the contender's class; `receive` waits for the answer."""
        try:
            print(json.dumps({'method': method, 'arguments': arguments}), file=self.process.stdin, flush=True)
        except BrokenPipeError as error:
            raise self.ended() from error

    def receive(self) -> Any:
        """Return the answer to the last request. Raise ContenderError if there is none."""
        line = self.process.stdout.readline()
        if not line:
            raise self.ended()
        answer = json.loads(line)
        if 'error' in answer:
            raise ContenderError(f'{answer["error"].rstrip()}\n(more in {self.log})')
        return answer['answer']

    def ask(self, method: str, **arguments: Any) -> Any:
        """Return the answer to a request."""
        self.send(method, **arguments)
        return self.receive()

    def ended(self) -> ContenderError:
        """Return the error to raise if the process has ended."""
        status = self.process.wait()
        tail = '\n'.join(self.log.read_text(errors='replace').splitlines()[-LOG_LINES:])
        return ContenderError(f'the process ended with status {status}; the end of {self.log}:\n{tail}')

    def close(self) -> None:
        """End the process, by force if it does not end with its input."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@contextmanager
def running(
    commands: Mapping[str, tuple[str, str]], folder: Path, device: str = 'cpu'
) -> Iterator[dict[str, Contender]]:
    """Yield the contenders by name, each started from (interpreter, MODULE:CLASS), and end them with the context."""
    scratch = (folder / 'scratch').resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    environment = {
        **(ONE_THREAD if device == 'cpu' else {}),
        'TOKENIZERS_PARALLELISM': 'false',
        'HF_HUB_OFFLINE': '1',
        'HF_DATASETS_CACHE': str(scratch / 'datasets'),
        'TMPDIR': str(scratch),
        **KEEPS_MEMORY,
    }
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        contenders = {}
        for name, (python, of_class) in commands.items():
            contenders[name] = Contender([python, str(WORKER), of_class], folder / 'logs' / f'{name}.log', environment)
            stack.callback(contenders[name].close)
        yield contenders


def load_all(contenders: Mapping[str, Contender], model_folder: Path, **where: str) -> dict[str, Any]:
    """Load the same model in all contenders at once; return their answers by name."""
    for contender in contenders.values():
        contender.send('load', model_folder=str(model_folder), **where)
    return {name: contender.receive() for name, contender in contenders.items()}
