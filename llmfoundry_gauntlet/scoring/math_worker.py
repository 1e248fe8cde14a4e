"""Compare expressions with sympy in a separate process: `python -m ...math_worker LIMITS`.

Reads one request per line of standard input as JSON and answers each with a line; LIMITS is a JSON object. sympy is
loaded once, and every comparison runs in a fork with limits on CPU time and memory: results do not depend on earlier
comparisons, and one that hangs or grows is killed without a restart. The process exits when standard input ends or its
parent is gone.

sympy's parser evaluates model output as Python, so names that could do harm are removed from it (`deny_names`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import math
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

from llmfoundry_gauntlet.errors import Caught
from llmfoundry_gauntlet.scoring.math_reference import reference_equal_with

DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
# Functions that sympy's parser would otherwise call for model output.
NAMES_NOT_FOR_MODELS = (
    # Python's that run or load code
    '__import__',
    'compile',
    'eval',
    'exec',
    # Python's that reach objects and their attributes
    'delattr',
    'dir',
    'getattr',
    'globals',
    'locals',
    'setattr',
    'vars',
    # Python's that open files, read standard input or start a debugger
    'breakpoint',
    'input',
    'open',
    # sympy's that run code or start programs
    'lambdify',
    'preview',
)


class StepTimeoutError(Exception):
    """Raised if a step of the reference's comparison took too long; the next step is tried."""


def main() -> None:
    """Answer requests until standard input ends."""
    limits = json.loads(sys.argv[1])
    die_with_parent()
    results = os.fdopen(os.dup(1), 'wb', buffering=0)
    os.dup2(2, 1)  # keep the output of libraries out of the answers
    try:
        prepare()
    except ImportError as error:
        results.write(json.dumps({'error': str(error)}).encode() + b'\n')
        return
    results.write(b'{"answer": "ready"}\n')
    for line in sys.stdin.buffer:
        fork = os.fork()
        if fork == 0:
            compare_and_exit(json.loads(line), limits)
        status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        answer = {0: 'equal', 1: 'not equal'}.get(status, 'broke a limit')
        results.write(json.dumps({'answer': answer}).encode() + b'\n')


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def prepare() -> None:
    """Load and warm up everything that comparisons need."""
    from sympy.parsing.latex import parse_latex

    logging.disable(logging.CRITICAL)
    deny_names()
    algebra_equal(r'2\sin(3x)+\cos(\frac{58\pi}{180})-\log_{2}{x}', r'|x-2|+\binom{5}{2}+e^{2 \pi i}')
    algebra_equal(r'y = 2x+3', r'2x-y+3 = 0')
    with unreadable():
        parse_latex(r'\frac{1}{2}+\sqrt{x}')
    gc.collect()
    gc.freeze()


def compare_and_exit(request: list[str], limits: dict[str, float]) -> None:
    """Exit with 0 if the two texts of a request are equal, else with 1; a limit ends the process by a signal."""
    status = 1
    try:
        die_with_parent()
        empty = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(empty, descriptor)
        os.closerange(3, 4096)
        question, first, second = request
        is_reference = question == 'reference'
        seconds = int(limits['reference_seconds' if is_reference else 'seconds'])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        memory = int(limits['memory_bytes'])
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(int(limits['wall_seconds']))
        if is_reference:
            equal = reference_equal(first, second, float(limits['step_seconds']))
        else:
            equal = algebra_equal(first, second)
        status = 0 if equal else 1
    finally:
        os._exit(status)  # in any case: a fork must not return to its parent's code


def algebra_equal(first: str, second: str) -> bool:
    """Return whether two expressions or two equations are equal by math-verify and by numeric evaluation."""
    from math_verify import verify
    from sympy import Eq, Set
    from sympy.core.relational import Relational

    one, other = parsed(first), parsed(second)
    if one is None or other is None:
        return False
    if isinstance(one, Eq) and isinstance(other, Eq):
        return proportional(one, other) or (solvable(one, other) and both_ways(verify, one, other))
    if isinstance(one, Relational) or isinstance(other, Relational):  # an equation is one, too
        return False
    if isinstance(one, Set) and isinstance(other, Set):
        return one == other or bool(one.symmetric_difference(other).is_empty)
    return agree(one, other) and both_ways(verify, one, other)  # the fast check first


def both_ways(verify: Any, one: Any, other: Any) -> bool:
    """Return whether math-verify accepts the pair in either order."""
    return bool(verify(one, other, timeout_seconds=None) or verify(other, one, timeout_seconds=None))


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
    replacements = {number: sympy.Rational(str(number)) for number in form.atoms(sympy.Float)}
    for symbol in form.atoms(sympy.Symbol):
        replacements[symbol] = sympy.I if symbol.name == 'i' else sympy.Symbol(symbol.name, real=True)
    form = form.xreplace(replacements)
    if isinstance(form, sympy.Set):
        return form.xreplace({sympy.Interval(-sympy.oo, sympy.oo): sympy.S.Reals}).doit()
    return form


def agree(one: Any, other: Any) -> bool:
    """Return whether two expressions have the same value for several values of their variables.

    math-verify alone rounds to six digits and ignores percent signs. It decides on expressions without a numeric value.
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
    """Return whether two complex numbers agree to 20 digits, or are both zero up to rounding."""
    (real, imaginary), (other_real, other_imaginary) = one.as_real_imag(), other.as_real_imag()
    parts = [real, imaginary, other_real, other_imaginary]
    # sympy gives a result that may be 0 a precision of 1.
    if all(part == 0 or getattr(part, '_prec', 2) == 1 for part in parts):
        return True
    tolerance = max(map(abs, parts)) * 10**-20
    return bool(abs(real - other_real) <= tolerance and abs(imaginary - other_imaginary) <= tolerance)


def points(symbols: Any) -> Iterator[dict[Any, Any]]:
    """Yield three assignments of values to the variables."""
    from sympy import Rational

    in_order = sorted(symbols, key=str)
    for start in (3, 17, -11):
        yield {
            symbol: Rational(start * 7 + 13 * index * index + 5 * index, 6 + index)
            for index, symbol in enumerate(in_order)
        }


def proportional(one: Any, other: Any) -> bool:
    """Return whether two equations are equal up to a constant factor."""
    difference, other_difference = one.lhs - one.rhs, other.lhs - other.rhs
    ratios = []
    for values in points(one.free_symbols | other.free_symbols):
        above = difference.subs(values).doit().evalf(40)
        below = other_difference.subs(values).doit().evalf(40)
        are_numbers = above.is_number and below.is_number and above.is_finite and below.is_finite
        if not are_numbers or not above or not below:
            return False
        ratios.append((above / below).evalf(30))
    return all(near(ratio, ratios[0]) for ratio in ratios)


def solvable(one: Any, other: Any) -> bool:
    """Return whether two equations have solutions; math-verify treats any two without solutions as equal."""
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
    """Parse a text with sympy as Python, else as LaTeX, else return it unchanged; most texts fail one of the two."""
    from sympy.parsing.latex import parse_latex
    from sympy.parsing.sympy_parser import parse_expr

    for parse in (parse_expr, parse_latex):
        with unreadable(), time_limit(step_seconds):
            return parse(text)
    return text


def unreadable() -> Caught:
    """Return a context that suppresses the errors of texts that cannot be parsed or evaluated within the limits.

    sympy evaluates them as Python; latex2sympy2 and sympy's own LaTeX parser also raise plain `Exception`.
    """
    kinds = (NameError, SyntaxError, MemoryError, EOFError, StopIteration, StepTimeoutError)
    return Caught(kinds=kinds, packages=('sympy', 'mpmath', 'antlr4', 'latex2sympy2_extended', 'tokenize'), bare=True)


def has_no_entries(text: str) -> bool:
    """Return whether a text is a sympy matrix without entries."""
    from sympy.parsing.sympy_parser import parse_expr

    with unreadable():
        return len(parse_expr(text)) == 0
    return False


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise StepTimeoutError in the context if it uses more CPU time than this."""

    def stop(*_: object) -> None:
        raise StepTimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def deny_names() -> None:
    """Remove dangerous names that mathematics does not need from sympy's parser, which evaluates model output."""
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
