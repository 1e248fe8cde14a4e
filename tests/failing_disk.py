"""Make disk operations fail, once or from then on, as after a kill."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

OF_OS = ('mkdir', 'open', 'fsync', 'replace', 'rename', 'unlink', 'rmdir')
OPERATIONS = ((io, 'open'), *((os, name) for name in OF_OS))


@contextlib.contextmanager
def failing_disk(at: int | None = None, *, killed: bool = False) -> Iterator[list[str]]:
    """Fail operation number `at`, with `killed` also all later ones; yield the names of the operations so far.

    The disk then holds what a process leaves behind that is killed right before the operation.
    """
    done: list[str] = []
    io_open = io.open

    def failing(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keys: Any) -> Any:
            if operation is io_open and not set('wxa') & set(arguments[1]):  # reading never fails
                return operation(*arguments, **keys)
            done.append(name)
            number = len(done) - 1
            if at is not None and (number == at or (killed and number > at)):
                raise OSError(errno.EIO, f'operation {number}, {name}, fails')
            return operation(*arguments, **keys)

        return run

    with contextlib.ExitStack() as stack:
        for module, name in OPERATIONS:
            stack.enter_context(mock.patch.object(module, name, failing(name, getattr(module, name))))
        yield done
