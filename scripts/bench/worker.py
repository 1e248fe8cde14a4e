"""Load models and measure jobs on request, in a contender's own process.

    python worker.py MODULE:CLASS

Requests and answers are JSON objects, one per line, over standard input and output; the output of libraries goes to
standard error. The process ends at the end of its standard input. The class has two methods: `load(model_folder)`, and
`measure(**job)`, which returns a mapping with at least the seconds of `measure` below and `predictions` by row: the
chosen index, 1 or 0 for language_modeling, or the text of a generation. With `logprobs`, those of each row's choices,
and `notes` by name, the table has them too.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import torch

NUM_WARM_UP_ROWS = 2
WARM_UP_TOKENS = 4  # of a generation


def serve(contender: Any, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more; a failed one with its traceback."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = {'answer': getattr(contender, request['method'])(**request['arguments'])}
        except Exception:  # noqa: BLE001  # the controller reports it
            answer = {'error': traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def measure(run: Callable[[], Any], device: str = 'cpu') -> tuple[dict[str, float], Any]:
    """Return the wall and processor seconds of one call (all threads of the process), and its result.

    On a GPU also `peak_bytes`, the most memory allocated during the call, weights included.
    """
    gc.collect()
    if device == 'cuda':
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    if device == 'cuda':
        torch.cuda.synchronize()
    seconds = {'wall_seconds': time.perf_counter() - wall, 'cpu_seconds': time.process_time() - cpu}
    return seconds | ({'peak_bytes': torch.cuda.max_memory_allocated()} if device == 'cuda' else {}), result


def main() -> None:
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(':')
    contender = getattr(importlib.import_module(module), name)()
    serve(contender, sys.stdin, answers)


if __name__ == '__main__':
    main()
