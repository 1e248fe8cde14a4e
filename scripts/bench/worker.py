"""The side of a contender's own process: models are loaded and jobs measured on request.

    python worker.py MODULE:CLASS --threads N

Requests and answers are JSON objects, one a line, over standard input and output; what libraries print goes to
standard error. The process ends with its standard input, and between requests it waits for a line. The class has two
methods: `load(model_folder)`, and `measure(**job)` for a mapping with at least the seconds of `measure` below and
`predictions` by row: the chosen index, 1 or 0 for language_modeling, or the text of a generation.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO


def serve(contender: Any, requests: TextIO, answers: TextIO) -> None:
    """Answers requests until there are no more. A failed one is answered by its traceback."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = {'answer': getattr(contender, request['method'])(**request['arguments'])}
        except Exception:  # noqa: BLE001  # whatever it is, the controller is to say so
            answer = {'error': traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def measure(run: Callable[[], Any], device: str = 'cpu') -> tuple[dict[str, float], Any]:
    """Return the seconds of one call by clock (of the process: with all its threads), and its result."""
    gc.collect()
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    synchronize(device)
    return {'wall_seconds': time.perf_counter() - wall, 'cpu_seconds': time.process_time() - cpu}, result


def synchronize(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    if device == 'cuda':
        import torch

        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('contender', help='MODULE:CLASS')
    parser.add_argument('--threads', type=int, default=1)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(options.threads)
    module, _, name = options.contender.partition(':')
    contender = getattr(importlib.import_module(module), name)()
    serve(contender, sys.stdin, answers)


if __name__ == '__main__':
    main()
