"""vLLM in a process of its own, which another Python may run, beside the memory that this one holds."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from contenders import WORKER, Contender

from gpu_check.options import Options
from gpu_check.results import Rows
from gpu_check.shapes import Shape

CONTENDER = 'vllm_contender:VLLM'
MEMORY_SHARE = 0.6  # of the card, which this process may hold some GiB of
NO_VLLM = 'vLLM is not installed; --vllm-python names a Python that has it'
FIND = 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'


@cache
def is_vllm_here(options: Options) -> bool:
    """Return whether the Python for vLLM has it."""
    return subprocess.run([options.vllm_python, '-c', FIND], capture_output=True).returncode == 0


@contextmanager
def running_vllm(shape: Shape, options: Options, rows: Rows) -> Iterator[Contender | None]:
    """Yield vLLM with a model of this shape; a row says how long its start took. Yield None if it did not start."""
    folder = shape.save(options.folder / 'vllm')
    log = options.folder / 'logs' / f'vllm-{folder.name}.log'
    engine = Contender([options.vllm_python, str(WORKER), CONTENDER], log, {})
    started = None
    try:
        with rows.row(f'{shape.name}: vLLM started') as row:
            started = engine.ask(
                'load',
                model_folder=str(folder),
                memory_share=MEMORY_SHARE,
                max_model_len=shape.settings['max_position_embeddings'],
            )
            row.note(start_seconds=started['start_seconds'])
        yield None if started is None else engine
    finally:
        engine.close()
