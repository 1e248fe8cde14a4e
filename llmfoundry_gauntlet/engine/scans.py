"""Let the scans of recurrent layers work in chunks that suit the rows of a forward.

Mamba 2 and the delta rule compute a row in chunks. The length of a chunk is a parameter of the algorithm and does not
change its result, but each row is padded to a multiple of it: in transformers to 64, 128 or 256 tokens, so that a
choice of 8 tokens costs as much as a long one. Kernels for GPUs keep their length.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import find_spec

import torch

from llmfoundry_gauntlet.engine.attention import Change, changed

CHUNKS = (8, 16, 32)  # tokens; measured on a CPU: longer ones are never faster, whatever the length of the rows
KERNELS = ('mamba_ssm', 'fla', 'kernels')  # packages


def chunk_for(longest: int) -> int:
    """Return the length of chunks for rows of at most this length: a compromise of little padding and few chunks."""

    def work(chunk: int) -> float:
        num_chunks = -(-longest // chunk)
        return num_chunks * (chunk + 1)

    return min(CHUNKS, key=work)


class Scans:
    """The places where a model, or the code that it runs, says how long the chunks of its scans are."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = [] if has_scan_kernels() else list(model.modules())
        # Layers of Mamba 2 read an attribute at every forward.
        self.layers: list[tuple[torch.nn.Module, int]] = []  # with their own length
        for module in modules:
            chunk = getattr(module, 'chunk_size', None)
            if hasattr(module, 'conv1d') and isinstance(chunk, int):
                self.layers.append((module, chunk))
        # The delta rule is a function of the Python module of its layer, with a default.
        python_modules = {type(module).__module__ for module in modules}
        self.functions = [
            (sys.modules[name], function) for name in sorted(python_modules) for function in functions_in_chunks(name)
        ]

    def __bool__(self) -> bool:
        return bool(self.layers or self.functions)

    def chunked_for(self, longest: int) -> AbstractContextManager[None]:
        """Return the context in which scans work in chunks for rows of at most this length."""
        if not self or longest == 1:  # a single token is a step without a scan
            return nullcontext()
        chunk = chunk_for(longest)
        changes: list[Change] = [(layer, 'chunk_size', chunk) for layer, own in self.layers if own > chunk]
        for module, name in self.functions:
            changes.append((module, name, partial(getattr(module, name), chunk_size=chunk)))
        return changed(changes)


@cache
def functions_in_chunks(python_module: str) -> tuple[str, ...]:
    """Return the names of the functions in a Python module that take the length of chunks, and have a default."""
    names = []
    for name, value in vars(sys.modules[python_module]).items():
        if not inspect.isfunction(value):
            continue
        parameter = inspect.signature(value).parameters.get('chunk_size')
        if parameter is not None and isinstance(parameter.default, int):
            names.append(name)
    return tuple(names)


@cache
def has_scan_kernels() -> bool:
    """Return whether kernels may be installed that scan on a GPU."""
    return torch.cuda.is_available() and any(map(find_spec, KERNELS))
