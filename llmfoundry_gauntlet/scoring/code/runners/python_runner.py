"""Run a completion that answers calls, or the tests that make them, as a standalone script inside the sandbox.

    python -I -S python_runner.py completion CALLS RESULTS
    python -I -S python_runner.py tests OUTCOMES CALLS RESULTS [CALLS RESULTS ...]

CALLS, RESULTS and OUTCOMES are descriptors. Standard input has one line of JSON with the completion's program, or one
for each test, which runs in its own process with the next pair of descriptors. Calls and results are lines of JSON with
plain values only, so a test compares objects of built-in types, whatever the completion returned.

Every program waits for this script to start, so it imports little. Annotations are strings if they need types that are
imported only for the type checker: `from __future__ import annotations` would also apply to programs compiled here.
"""

import builtins
import importlib
import os
import select
import sys
import types
from _json import encode_basestring_ascii, make_scanner  # importing json takes as long as starting Python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO, NoReturn

MAX_LINE = 64 * 2**20
MAX_ITEMS = 10**6  # of an iterator
IDLE_MILLISECONDS = 30_000
LOADED_ONCE = ('math', 'typing')  # used by most tests and slow to import
SMALL = 2**53
EMPTY: dict[object, object] = {}
DICT_KEYS, DICT_VALUES, DICT_ITEMS = type(EMPTY.keys()), type(EMPTY.values()), type(EMPTY.items())
COLLECTIONS: 'tuple[type[Any], ...]' = (tuple, set, frozenset)
MODULES = {'Fraction': 'fractions', 'Decimal': 'decimal'}
EXACT = {(module, kind) for kind, module in MODULES.items()}
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
    OverflowError,
    SystemError,
)
NO_EXPRESSION = (SyntaxError, NameError, TypeError, AttributeError, ValueError, ArithmeticError, LookupError)
WHEN, MAX_NAME = ('in a call', 'before the first call'), 40
NOT_PLAIN = 'the result of a call is no plain value'


class NotPlain(Exception):
    """Raised for a value that is not of a built-in type."""


class CompletionFailed(Exception):
    """Raised if the completion cannot answer this call or any later one."""


class Raised:
    """An exception that a call raised."""

    reason: str


class Numbers:
    """The settings of the JSON scanner."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = None


how_to_read: 'Any' = Numbers()  # typeshed asks for a scanner here
scan = make_scanner(how_to_read)


def loads(text: str) -> 'Any':
    """Return the value of a JSON text. Raise ValueError."""
    try:
        value, end = scan(text, 0)
    except StopIteration:
        raise ValueError('no JSON') from None
    if text[end:].strip():
        raise ValueError('more than JSON')
    return value


def dumps(value: object) -> str:
    """Return an encoded value as JSON."""
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, list):
        return f'[{",".join([dumps(item) for item in value])}]'
    if isinstance(value, dict):
        return f'{{{",".join([f"{encode_basestring_ascii(key)}:{dumps(item)}" for key, item in value.items()])}}}'
    if value is None or value is True or value is False:
        return {None: 'null', True: 'true', False: 'false'}[value]
    return repr(value)


def pack_value(value: 'Any') -> object:
    """Return a plain value in JSON types; subclasses become their base types."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        value = int.__index__(value)
        return value if -SMALL < value < SMALL else {'int': hex(value)}
    if isinstance(value, float):
        value = float.__add__(value, 0.0) if value != 0 else float(value)
        return value if value - value == 0 else {'float': repr(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [pack_value(item) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {'dict': [[pack_value(key), pack_value(item)] for key, item in dict.items(value)]}
    for name, view in (('keys', DICT_KEYS), ('values', DICT_VALUES), ('items', DICT_ITEMS)):
        if type(value) is view:
            return {name: [pack_value(item) for item in value]}
    for kind in COLLECTIONS:
        if isinstance(value, kind):
            return {kind.__name__: [pack_value(item) for item in kind.__iter__(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: bytes(value).hex()}
    if isinstance(value, complex):
        return {'complex': [pack_value(value.real), pack_value(value.imag)]}
    if (type(value).__module__, type(value).__name__) in EXACT:
        return {type(value).__name__: str(value)}
    if isinstance(value, range):
        return {'range': [value.start, value.stop, value.step]}
    if hasattr(type(value), '__next__'):
        items = []
        for item in value:
            items.append(pack_value(item))
            if len(items) > MAX_ITEMS:
                raise NotPlain('an endless iterator')
        return {'iterator': items}
    raise NotPlain(type(value).__name__)


def unpack_value(value: 'Any') -> 'Any':
    """Return the built-in value that was encoded. Raise ValueError."""
    if isinstance(value, list):
        return [unpack_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == 'int':
        return int(content, 16)
    if kind == 'float':
        return {'nan': float('nan'), 'inf': float('inf'), '-inf': -float('inf')}[content]
    if kind == 'dict':
        return {unpack_value(key): unpack_value(item) for key, item in content}
    if kind in ('bytes', 'bytearray'):
        return (bytes if kind == 'bytes' else bytearray).fromhex(content)
    if kind in MODULES:
        return getattr(importlib.import_module(MODULES[kind]), kind)(content)
    items = [unpack_value(item) for item in content]
    if kind == 'items':
        return dict(items).items()
    if kind == 'keys':
        return dict.fromkeys(items).keys()
    if kind == 'values':
        return dict(enumerate(items)).values()
    if kind == 'complex':
        return complex(*items)
    kinds: dict[str, Callable[..., object]]
    kinds = {'tuple': tuple, 'set': set, 'frozenset': frozenset, 'range': range, 'iterator': iter}
    return kinds[kind](*(items if kind == 'range' else [items]))


def send(stream: 'BinaryIO', message: dict[str, object]) -> None:
    """Write one line."""
    stream.write(dumps(message).encode() + b'\n')
    stream.flush()


def builtin_name(error: BaseException) -> str:
    """Return the name of an exception's nearest built-in class, which contains no text of the program."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == 'builtins')


def new_module() -> 'dict[str, Any]':
    """Return an empty module for a program's code, registered by name as dataclasses require."""
    module = types.ModuleType('program')
    sys.modules['program'] = module
    return module.__dict__


def serve(program: dict[str, str], calls: 'BinaryIO', results: 'BinaryIO') -> None:
    """Run the completion's code, then answer calls to its function."""
    namespace = new_module()
    try:
        exec(compile(program['code'], 'program', 'exec'), namespace)
        function = namespace[program['target']]
    except BaseException as error:
        send(results, {'failed': f'{builtin_name(error)} before the first call'})
        return
    send(results, {'ready': True})
    answer: dict[str, object]
    while line := calls.readline():
        try:
            message = loads(line.decode())
            value = function(*unpack_value(message['args']), **unpack_value(message['kwargs']))
            if isinstance(value, types.CoroutineType):
                value = importlib.import_module('asyncio').run(value)
            answer = {'value': pack_value(value)}
        except NotPlain:
            answer = {'failed': NOT_PLAIN}
        except BaseException as error:
            answer = {'failed': f'{builtin_name(error)} in a call'}
        send(results, answer)


class Candidate:
    """The completion's function as the test sees it."""

    def __init__(self, calls: 'BinaryIO', results: 'BinaryIO') -> None:
        self._calls, self._results = calls, results
        self.num_calls = 0
        self.failure: str | None = None  # kept beside the exception, which a test might catch

    def give_up(self, reason: str) -> 'NoReturn':
        """Fail the test, even if it catches the exception."""
        self.failure = self.failure or reason
        raise CompletionFailed(reason) from None

    def fail(self, failed: 'Any') -> 'NoReturn':
        """Raise in the test the exception a call raised, if it is a built-in one."""
        # The completion's process may say anything; none of its text may get into the reason.
        name, _, when = failed.partition(' ') if isinstance(failed, str) else ('', '', '')
        is_name = name.isascii() and name.isalpha() and len(name) <= MAX_NAME
        if failed != NOT_PLAIN and not (is_name and when in WHEN):
            self.give_up('a call failed')

        kind = getattr(builtins, name, None)
        if not failed.endswith(' in a call') or not isinstance(kind, type) or not issubclass(kind, Exception):
            self.give_up(failed)
        try:
            error = type(kind.__name__, (kind, Raised), {})()
        except TypeError:  # the class requires arguments
            self.give_up(failed)
        error.reason = failed
        raise error

    def answer(self) -> 'Any':
        """Return the completion's next answer."""
        line = self._results.readline(MAX_LINE)
        if not line:
            self.give_up('the program ended before its test did')
        if not line.endswith(b'\n'):
            self.give_up(NOT_PLAIN)
        try:
            message = loads(line.decode())
            failed = message.get('failed')
            value = None if 'value' not in message else unpack_value(message['value'])
        except UNREADABLE:
            self.give_up(NOT_PLAIN)
        if failed is not None:
            self.fail(failed)
        return value

    def __call__(self, *args: object, **kwargs: object) -> 'Any':
        """Return the result of a call."""
        self.num_calls += 1
        try:
            send(self._calls, {'args': pack_value(list(args)), 'kwargs': pack_value(kwargs)})
        except BrokenPipeError:
            self.give_up('the program ended before its test did')
        return self.answer()


def run_test(program: 'dict[str, Any]', candidate: Candidate) -> str | None:
    """Return None if the completion passes, else the reason."""
    try:
        candidate.answer()  # wait until the completion is ready
        namespace = new_module()
        exec(compile(program['prelude'], 'prelude', 'exec'), namespace)
        namespace[program['target']] = candidate
        if program['pairs'] is not None:
            return run_pairs(program['pairs'], candidate)
        exec(compile(program['test'], 'test', 'exec'), namespace)
        namespace['check'](candidate)
    except CompletionFailed as error:
        return str(error)
    except AssertionError:
        return f'call {candidate.num_calls}: the result is not the expected one'
    except BaseException as error:
        if isinstance(error, Raised):
            return error.reason
        return f'{builtin_name(error)} in the test, after call {candidate.num_calls}'
    return candidate.failure or (None if candidate.num_calls else 'the test makes no call')


def run_pairs(pairs: list[list[str]], candidate: Candidate) -> str | None:
    """Compare results by Composer 0.17's rule: an expected output that is not an expression is taken literally."""
    for given, wanted in pairs:
        arguments = eval(given, {})
        try:
            expected = eval(wanted, {})
        except NO_EXPRESSION:
            expected = wanted
        if candidate(*arguments) != expected:
            return f'call {candidate.num_calls}: the result is not the expected one'
    return None if pairs else 'there are no pairs of input and output'


def report_test(program: 'dict[str, Any]', calls: int, results: int, outcomes: int) -> None:
    """Run one test and write its outcome."""
    reason = run_test(program, Candidate(os.fdopen(calls, 'wb'), os.fdopen(results, 'rb')))
    with os.fdopen(outcomes, 'wb') as stream:
        send(stream, {'passed': reason is None, 'reason': reason})


def next_line() -> bytes:
    """Return the next line of standard input, empty at its end or after a timeout."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    return sys.stdin.buffer.readline() if waiting.poll(IDLE_MILLISECONDS) else b''


def run_tests(outcomes: int, pairs: list[tuple[int, int]]) -> None:
    """Run each test in a fork of this process, until none arrives before the timeout."""
    for name in LOADED_ONCE:
        importlib.import_module(name)
    files = os.listdir('.')
    for calls, results in pairs:
        if not (line := next_line()):
            return
        if child := os.fork():
            os.close(calls)
            os.close(results)
            if os.waitpid(child, 0)[1] or os.listdir('.') != files:  # the next test must not find them
                return
            continue
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        report_test(loads(line.decode()), calls, results, outcomes)
        os._exit(0)


def main(role: str, *numbers: str) -> None:
    """Run in the given role."""
    descriptors = [int(text) for text in numbers]
    if role == 'tests':
        run_tests(descriptors[0], list(zip(descriptors[1::2], descriptors[2::2], strict=True)))
        return
    if not (line := next_line()):
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    calls, results = descriptors
    serve(loads(line.decode()), os.fdopen(calls, 'rb'), os.fdopen(results, 'wb'))


if __name__ == '__main__':
    main(*sys.argv[1:])
    os._exit(0)
