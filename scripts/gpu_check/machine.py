"""The machine that figures are from: card, driver, versions, and the commit of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import torch
import transformers

from gpu_check.options import Options

UNKNOWN = 'unknown'


def machine(options: Options, commit: str | None) -> dict[str, Any]:
    """Return what figures depend on. `commit` names the code where there is no git."""
    described: dict[str, Any] = {
        'card': f'CPU, {torch.get_num_threads()} threads of {os.cpu_count()}',
        'python': platform.python_version(),
        'torch': torch.__version__,
        'transformers': transformers.__version__,
        'huggingface_hub': huggingface_hub.__version__,
        'numpy': np.__version__,
        'commit': commit or commit_of(Path(__file__).parent),
    }
    if options.is_cpu:
        return described
    properties = torch.cuda.get_device_properties(options.torch_device)
    return described | {
        'card': properties.name,
        'memory_gib': round(properties.total_memory / 2**30, 1),
        'capability': f'{properties.major}.{properties.minor}',
        'multiprocessors': properties.multi_processor_count,
        'cuda': torch.version.cuda,
        'driver': output_of('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader', '--id=0') or UNKNOWN,
    }


def commit_of(folder: Path) -> str:
    """Return the commit of a folder's files, with a plus if they differ from it; `unknown` without git."""
    commit = output_of('git', '-C', str(folder), 'rev-parse', '--short=12', 'HEAD')
    if commit is None:
        return UNKNOWN
    is_changed = output_of('git', '-C', str(folder), 'status', '--porcelain', '--untracked-files=no')
    return f'{commit}+' if is_changed else commit


def output_of(*command: str) -> str | None:
    """Return what a command prints, None if there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
