"""Fixtures of the integration tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from attempts import NEVER, UNTIL_DONE, Attempt
from paths import ROOT

HERE = Path(__file__).parent
SUMS = [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(300)]


@pytest.fixture
def tiny_settings(tmp_path: Path) -> dict[str, str]:
    """Write the tiny tasks into the test's folder; return the settings that name them."""
    return tiny.write_tasks(tmp_path)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tasks of several hundred items and a saved model."""
    folder = tmp_path_factory.mktemp('resume')
    tiny.write_tasks(folder, replies=True)
    (folder / 'sums.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in SUMS))
    tiny.model().save_pretrained(folder / 'model')
    tiny.tokenizer().save_pretrained(folder / 'model')
    return folder


@pytest.fixture(scope='module')
def attempt(folder: Path) -> Iterator[Attempt]:
    """Evaluate on some ranks, killed after some seconds or lines in the journal; return the exit statuses."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join([str(HERE), str(ROOT)])}
    with (folder / 'errors.txt').open('w') as errors:
        worker = subprocess.Popen(
            [sys.executable, str(HERE / 'resume_worker.py'), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )

        def attempt(
            out: Path, num_ranks: int, seconds: float = UNTIL_DONE, lines: int = NEVER, **settings: object
        ) -> list[int]:
            settings = {'out': out, 'tokens_per_batch': 120, 'resume': 'true', **settings}
            words = [f'{key}={value}' for key, value in settings.items() if value is not None]
            assert worker.stdin is not None and worker.stdout is not None
            print(num_ranks, seconds, lines, *words, file=worker.stdin, flush=True)
            while True:  # the evaluation may print as well
                line = worker.stdout.readline()
                assert line, (folder / 'errors.txt').read_text()[-2000:]
                if all(word.lstrip('-').isdigit() for word in line.split()):
                    return [int(word) for word in line.split()]

        yield attempt
        with worker:  # closes its pipes
            worker.kill()
