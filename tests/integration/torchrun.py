"""Commands under `torchrun`, in processes in which Composer cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import ROOT

WITHOUT_COMPOSER = ROOT / 'tests' / 'integration' / 'without_composer.py'
GAUNTLET = ('-m', 'llmfoundry_gauntlet')


def words_of(*words: Any, num_ranks: int) -> list[str]:
    """Return the command that runs a script or a module on ranks; a single one is a process of its own."""
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(num_ranks)]
    return [*launcher, str(WITHOUT_COMPOSER), *map(str, words)]


def environment() -> dict[str, str]:
    """Return the environment of every rank, whatever their number: the same threads, so the same bits."""
    return {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}


def run(*words: Any, num_ranks: int, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = words_of(*words, num_ranks=num_ranks)
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)


def run_well(*words: Any, num_ranks: int, cwd: Path = ROOT) -> str:
    """Run a command that must succeed; return its standard output."""
    done = run(*words, num_ranks=num_ranks, cwd=cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
