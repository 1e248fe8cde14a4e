"""Compares expressions with sympy, for a process that cannot do so itself: `python -m ...math_worker LIMITS`.

Reads requests, a JSON line each, and answers each with a line; LIMITS is a JSON object. sympy is loaded once; every
comparison runs in a fork, which has limits of its own for CPU time and memory and may neither start processes, write
files nor open connections. So a result depends on nothing that was compared before, and what hangs or grows is killed
and costs no new start; a text that was killed for twice is not compared any more. All ends when standard input does,
or when the process that started this one is gone.

sympy's parser evaluates model output as Python. It may use only a few names; a seccomp filter that denies
what arithmetic does not need (processes, programs, connections, files to write) is the second line of defence, if the
kernel has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import platform
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from llmfoundry_gauntlet.errors import Caught
from llmfoundry_gauntlet.scoring.code.sandbox import (
    ALLOW,
    DENY,
    JUMP_EQUAL,
    JUMP_SET,
    LOAD,
    RETURN,
    Instruction,
    bpf_program,
)
from llmfoundry_gauntlet.scoring.math_reference import reference_equal_with

# System calls that are left, by machine (Linux, asm/unistd.h): memory, time, signals, and reading files.
ALLOWED = {
    'x86_64': (
        *(0, 1, 3, 5, 8, 16, 17, 72),  # read, write, close, fstat, lseek, ioctl, pread64, fcntl
        *(4, 6, 21, 79, 89, 217, 262, 267, 269, 332, 439),  # stat, lstat, access, getcwd, readlink, getdents64, ...
        *(9, 10, 11, 12, 25, 28),  # mmap, mprotect, munmap, brk, mremap, madvise
        *(13, 14, 15, 38, 131),  # rt_sigaction, rt_sigprocmask, rt_sigreturn, setitimer, sigaltstack
        *(24, 39, 96, 98, 102, 104, 107, 108, 186, 202, 204, 228, 229, 318, 334),  # time, ids, futex, getrandom
        *(60, 231),  # exit, exit_group
    ),
    'aarch64': (
        *(63, 64, 57, 80, 62, 29, 67, 25),
        *(79, 48, 17, 78, 61, 291, 439),
        *(222, 226, 215, 214, 216, 233),
        *(134, 135, 139, 103, 132),
        *(124, 172, 169, 165, 174, 175, 176, 177, 178, 98, 123, 113, 114, 278, 293),
        *(93, 94),
    ),
}
OPENAT = {'x86_64': 257, 'aarch64': 56}
THIRD_ARGUMENT = 32  # offset in struct seccomp_data: the flags of openat
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEATH_SIGNAL, SET_SECCOMP, NO_NEW_PRIVILEGES = 1, 22, 38
FILTER = 2
POLL_SECONDS = 2.0
MAX_BROKEN = 2  # comparisons that broke a limit, after which the longer text of both equals no other
WARM_UP = (
    (r'\frac{\sqrt{3}}{3}', r'\frac{1}{\sqrt{3}}'),
    (r'x^2+2x+1', r'(x+1)^{2}'),
    (r'y = 2x+3', r'2x-y+3 = 0'),
    (r'2\sin(3x)+\cos(\frac{58\pi}{180})-\log_{2}{x}', r'|x-2|+\binom{5}{2}+e^{2 \pi i}'),
    (r'\frac{2a + b}{2}-3.5', r'a\cdot 4+b!'),
)
NAMES_NOT_FOR_MODELS = (  # builtins that sympy's parser would call for whoever writes them
    *(
        '__import__',
        'breakpoint',
        'compile',
        'delattr',
        'dir',
        'eval',
        'exec',
        'getattr',
        'globals',
        'input',
        'lambdify',
    ),
    *('locals', 'open', 'preview', 'setattr', 'vars'),
)


class Program(ctypes.Structure):
    """The C struct sock_fprog."""

    _fields_ = (('length', ctypes.c_ushort), ('code', ctypes.c_char_p))


def confine() -> None:
    """Confine this process, which then dies with the one that forked it."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if platform.machine() not in ALLOWED:
        return
    code = allow_list(platform.machine())
    program = Program(len(code) // 8, code)
    with contextlib.suppress(OSError):
        library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        library.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0)


def allow_list(machine: str) -> bytes:
    """Return a BPF program that denies all but the calls above, and opening files except for reading."""
    refuse = (RETURN, 0, 0, DENY | errno.EPERM)
    code: list[Instruction] = []
    for number in ALLOWED[machine]:
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    code += [
        (JUMP_EQUAL, 1, 0, OPENAT[machine]),
        refuse,
        (LOAD, 0, 0, THIRD_ARGUMENT),
        (JUMP_SET, 0, 1, WRITES),
        refuse,
        (RETURN, 0, 0, ALLOW),
    ]
    return bpf_program(machine, code)


class StepTimeoutError(Exception):
    """Raised if a step of the reference's comparison took too long; the next step is tried."""


def main() -> None:
    """Serve requests until standard input ends."""
    limits = json.loads(sys.argv[1])
    starter = os.getppid()
    results = os.fdopen(os.dup(1), 'wb', buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        prepare()
    except ImportError as error:
        results.write(json.dumps({'error': str(error)}).encode() + b'\n')
        return
    results.write(b'{"ready": true}\n')
    Server(limits, starter, results).serve()


def prepare() -> None:
    """Load what every comparison needs, and use it once."""
    import gc
    import logging

    from sympy.parsing.latex import parse_latex

    logging.disable(logging.CRITICAL)
    deny_names()
    for first, second in WARM_UP:
        algebra_equal(first, second)
    with unreadable():
        parse_latex(r'\frac{1}{2}+\sqrt{x}')
    gc.collect()
    gc.freeze()


class Server:
    """Runs each request in a fork, several at a time."""

    def __init__(self, limits: dict[str, float], starter: int, results: Any) -> None:
        self._limits = limits
        self._starter = starter
        self._results = results
        self._waiting: list[dict[str, Any]] = []
        self._running: dict[int, tuple[int, dict[str, Any], float]] = {}  # pipe: process, request, when to give it up
        self._broken: Counter[str] = Counter()  # how often a text broke a limit
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._unread = b''
        self._open = True

    def serve(self) -> None:
        """Answer requests until there are no more; kill what still runs then."""
        try:
            while self._open and os.getppid() == self._starter:
                while self._waiting and len(self._running) < self._limits['processes']:
                    request = self._waiting.pop(0)
                    if max(self._broken[request['first']], self._broken[request['second']]) < MAX_BROKEN:
                        self._start(request)
                    else:
                        self._say(request, b'')
                for descriptor, _ in self._poll.poll(self._patience() * 1000):
                    if descriptor == 0:
                        self._read()
                    elif descriptor in self._running:
                        self._finish(descriptor)
                for descriptor, (*_, deadline) in list(self._running.items()):
                    if time.monotonic() > deadline:
                        self._finish(descriptor)
        finally:
            for descriptor in list(self._running):
                self._finish(descriptor, answer=False)

    def _patience(self) -> float:
        deadlines = [deadline for *_, deadline in self._running.values()]
        return max(0.0, min([POLL_SECONDS, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _read(self) -> None:
        received = os.read(0, 65536)
        if not received:
            self._open = False
            return
        *lines, self._unread = (self._unread + received).split(b'\n')
        self._waiting += map(json.loads, lines)

    def _start(self, request: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            compare_and_exit(request, self._limits, writing)
        os.close(writing)
        self._running[reading] = process, request, time.monotonic() + self._limits['wall_seconds']
        self._poll.register(reading, select.POLLIN)

    def _finish(self, descriptor: int, *, answer: bool = True) -> None:
        """Take a fork's result; a fork without one, or a late one, is killed, and the answers are not equal."""
        process, request, deadline = self._running.pop(descriptor)
        self._poll.unregister(descriptor)
        outcome = os.read(descriptor, 1) if answer and time.monotonic() <= deadline else b''
        os.close(descriptor)
        os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        if answer:
            if not outcome and os.WIFSIGNALED(status):
                self._broken[max(request['first'], request['second'], key=len)] += 1
            self._say(request, outcome)

    def _say(self, request: dict[str, Any], outcome: bytes) -> None:
        line = {'number': request['number'], 'equal': outcome == b'1'}
        self._results.write(json.dumps(line).encode() + b'\n')


def compare_and_exit(request: dict[str, Any], limits: dict[str, float], writing: int) -> None:
    """Write whether a request's texts are equal, as one byte; nothing if that is unknown."""
    try:
        is_reference = request['question'] != 'algebra'
        seconds = int(limits['reference_seconds' if is_reference else 'seconds'])
        empty = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(empty, descriptor)
        os.dup2(writing, 3)
        os.closerange(4, 4096)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        memory = int(limits['memory_bytes'])
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        confine()
        step_seconds = float(limits['step_seconds'])
        equal = (reference_equal if is_reference else algebra_equal)(request['first'], request['second'], step_seconds)
        os.write(3, b'1' if equal else b'0')
        os._exit(0)
    finally:
        os._exit(1)  # whatever happened: a fork must not return into its parent's code


def algebra_equal(first: str, second: str, step_seconds: float = 0) -> bool:
    """Return whether two expressions or two equations are equal: math-verify says so, and numbers put in agree."""
    from math_verify import verify
    from sympy import Eq
    from sympy.core.relational import Relational

    one, other = parsed(first), parsed(second)
    if one is None or other is None:
        return False
    equations = isinstance(one, Eq), isinstance(other, Eq)
    if all(equations):
        return proportional(one, other) or (solvable(one, other) and both_ways(verify, one, other))
    if any(equations) or isinstance(one, Relational) or isinstance(other, Relational):
        return False
    return agree(one, other) and both_ways(verify, one, other)  # the former is fast


def both_ways(verify: Any, one: Any, other: Any) -> bool:
    """Return whether math-verify takes either for the other."""
    return any(verify(*pair, timeout_seconds=None) for pair in ((one, other), (other, one)))


def parsed(text: str) -> Any:
    """Return a text as a sympy expression, with real variables, i as the imaginary unit and exact decimals; or None."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy

    form = None
    with unreadable():
        form = latex2sympy(
            text,
            is_real=True,
            normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed='none'),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    if not isinstance(form, sympy.Basic):
        return None
    symbols = {
        symbol: sympy.I if symbol.name == 'i' else sympy.Symbol(symbol.name, real=True)
        for symbol in form.atoms(sympy.Symbol)
    }
    exact = {number: sympy.Rational(str(number)) for number in form.atoms(sympy.Float)}
    return form.xreplace(symbols | exact)


def agree(one: Any, other: Any) -> bool:
    """Return whether two expressions have one value for several values of their variables.

    math-verify rounds to six digits and leaves percent signs out. What has no value as a number is left to it.
    """
    checked = False
    for values in points(one.free_symbols | other.free_symbols):
        numbers = [expression.subs(values).doit().evalf(40) for expression in (one, other)]
        if not all(number.is_number and number.is_finite for number in numbers):
            continue
        if not near(*numbers):
            return False
        checked = True
    return checked or one == other or bool(one.free_symbols)


def near(one: Any, other: Any) -> bool:
    """Return whether two complex numbers agree in 20 digits, or are nothing but rounding."""
    sides = [number.as_real_imag() for number in (one, other)]
    if all(part == 0 or getattr(part, '_prec', 2) == 1 for side in sides for part in side):
        return True
    size = max(abs(part) for side in sides for part in side)
    return all(abs(first - second) <= size * 10**-20 for first, second in zip(*sides, strict=True))


def points(symbols: Any) -> Iterator[dict[Any, Any]]:
    """Return three values for each variable."""
    from sympy import Rational

    for start in (3, 17, -11):
        yield {
            symbol: Rational(start * 7 + 13 * index * index + 5 * index, 6 + index)
            for index, symbol in enumerate(sorted(symbols, key=str))
        }


def proportional(one: Any, other: Any) -> bool:
    """Return whether two equations are one but for a constant factor."""
    sides = [equation.lhs - equation.rhs for equation in (one, other)]
    ratios = []
    for values in points(one.free_symbols | other.free_symbols):
        above, below = (side.subs(values).doit().evalf(40) for side in sides)
        if not (above.is_number and below.is_number and above.is_finite and below.is_finite) or not above or not below:
            return False
        ratios.append((above / below).evalf(30))
    return all(near(ratio, ratios[0]) for ratio in ratios)


def solvable(one: Any, other: Any) -> bool:
    """Return whether two equations have solutions, without which math-verify takes any two for equal."""
    from sympy import solve

    same_symbols = one.free_symbols == other.free_symbols
    return same_symbols and all(solve(equation, equation.free_symbols) for equation in (one, other))


def reference_equal(first: str, second: str, step_seconds: float) -> bool:
    """Return the reference's comparison, including the part that needs sympy."""

    def ask(question: str, answer: str, gold: str) -> bool:
        if question == 'no_entries':
            return has_no_entries(answer)
        return symbolic_equal(answer, gold, step_seconds)

    return reference_equal_with(ask, first, second)


def symbolic_equal(answer: str, gold: str, step_seconds: float) -> bool:
    """Return whether the difference of two texts is zero, or they are within 1e-4 of each other as numbers."""
    import sympy

    expressions = [reference_parsed(text, step_seconds) for text in (answer, gold)]
    with unreadable(), time_limit(step_seconds):
        if sympy.simplify(expressions[0] - expressions[1]) == 0:
            return True
    with unreadable(), time_limit(step_seconds):
        return math.isclose(*map(sympy.N, expressions), rel_tol=1e-4)
    return False


def reference_parsed(text: str, step_seconds: float) -> Any:
    """Return a text parsed as Python for sympy, else as LaTeX, else as it is; for most texts one of the two fails."""
    from sympy.parsing.latex import parse_latex
    from sympy.parsing.sympy_parser import parse_expr

    for parse in (parse_expr, parse_latex):
        with unreadable(), time_limit(step_seconds):
            return parse(text)
    return text


def unreadable() -> Caught:
    """Return a context that ends if a text cannot be parsed, computed with, or handled within its limits.

    sympy evaluates it as Python; latex2sympy2 and sympy's own parser of LaTeX also raise plain `Exception`.
    """
    kinds = (NameError, SyntaxError, MemoryError, EOFError, StopIteration, StepTimeoutError)
    return Caught(kinds=kinds, packages=('sympy', 'mpmath', 'antlr4', 'latex2sympy2_extended', 'tokenize'), bare=True)


def has_no_entries(text: str) -> bool:
    """Return whether a text is a matrix of sympy's with nothing in it."""
    from sympy.parsing.sympy_parser import parse_expr

    with unreadable():
        return len(parse_expr(text)) == 0
    return False


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise StepTimeoutError in code that takes more CPU time."""

    def stop(*_: object) -> None:
        raise StepTimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def deny_names() -> None:
    """Remove from sympy's parser, which evaluates model output, the names that mathematics does not need."""
    import re

    from sympy.parsing import sympy_parser

    evaluate = sympy_parser.eval_expr

    def denied(*_: object, **__: object) -> None:
        raise ValueError('not a mathematical expression')

    def evaluate_mathematics(code: Any, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        if isinstance(code, str) and re.search(r'\.\s*_|__\w+__', code):
            denied()
        return evaluate(code, local_dict, {**global_dict, **dict.fromkeys(NAMES_NOT_FOR_MODELS, denied)})

    sympy_parser.eval_expr = evaluate_mathematics


if __name__ == '__main__':
    main()
