"""Answers to MATH problems: extraction from a generation, and equality.

Our equality is symmetric and takes different notations of a value for equal: it compares forms first (`math_forms`),
and expressions with math-verify, in a process with limits. The reference's rules are here too (`math_reference`).
Importing this module does not load sympy; comparing loads it only in the other process, which is started on first use,
as a program of its own rather than a fork, so that a training job with threads and CUDA can have one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from types import TracebackType
from typing import IO, Literal, Self, TypedDict

from llmfoundry_gauntlet.errors import GauntletError
from llmfoundry_gauntlet.scoring.math_equality import answers_equal
from llmfoundry_gauntlet.scoring.math_forms import MAX_CHARACTERS, NUMBER, forms_of
from llmfoundry_gauntlet.scoring.math_reference import (
    reference_answer_of,
    reference_equal_with,
    reference_gold_of,
)

MIB = 2**20
START_SECONDS = 120  # on a machine that is busy; a second or two otherwise
STOP_SECONDS = 2
PASSED_ON = ('PATH', 'LD_LIBRARY_PATH', 'PYTHONHOME')
WORKER = 'llmfoundry_gauntlet.scoring.math_worker'

Question = Literal['algebra', 'reference']
Request = tuple[Question, str, str]
__all__ = [
    'Comparer',
    'ComparisonError',
    'Limits',
    'answer_of',
    'boxed',
    'gold_of',
    'reference_answer_of',
    'reference_equal',
    'reference_gold_of',
]

BOX = re.compile(r'\\(?:boxed|fbox)(?![A-Za-z])\s*')
OPENED_BOX = re.compile(r'\s*\\(?:boxed|fbox)\s*(?=\{)')
BRACES = re.compile(r'\\.|[{}]', re.DOTALL)
UNBRACED = re.compile(r'-?\d+(?:[.,]\d+)*|-?[A-Za-z]|-?\\[A-Za-z]+')
HIDDEN = re.compile(r'\\[hv]?phantom\s*\{[^{}]*\}|\\[,;:! ]|\\q?quad')
REMARK = re.compile(r'\n[ \t]*(?:\*\*)?(?:Note|Remark)\b')
EITHER = re.compile(r'\beither\b.{0,60}\b(?:accepted|acceptable|correct)\b', re.IGNORECASE | re.DOTALL)
MATH_MARKS = re.compile(r'\$|\\[()\[\]]|&|\\text\s*\{|[{}]')
JOINED = re.compile(r'\s*[,;]?\s*(?:and|or)?\s*(?:[A-Za-z]\w?\s*(?:=|is)\s*)?')
ROW = re.compile(r'\s*[,;]\s*\\\\[^$]*=\s*')
NEW_START = re.compile(
    r'\b(?:thus|therefore|hence|finally|final|answers?|wait|actually|mistake|wrong|incorrect|instead|however|check|'
    r'total|sum|product|conclu\w+|alternative\w*|or)\b',
    re.IGNORECASE,
)
ENUMERATED = re.compile(r'\b(?:another|other|second|third|fourth|last)\b', re.IGNORECASE)
NO_LABEL = ('answer', 'result', 'value', 'solution', 'it', 'this', 'that', 'which', 'there')
MAX_BETWEEN = 600
MAX_CACHED = 200_000
MAX_NESTING = 60


class Line(TypedDict, total=False):
    """A message of the process: first that it is ready or what is wrong, then the result of a request."""

    ready: bool
    error: str
    number: int
    equal: bool


class ComparisonError(GauntletError):
    """Raised if mathematical answers cannot be compared on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a comparison. CPU seconds decide, so that a busy machine changes no result; wall seconds end it.

    `reference_seconds` is for the reference's comparison, a step of which may take `step_seconds`.
    """

    seconds: int = 5
    reference_seconds: int = 20
    step_seconds: float = 5.0
    wall_seconds: float = 60.0
    memory_bytes: int = 1024 * MIB
    processes: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))


class Process:
    """A worker process, started on first use and once more if it was lost. Use it from one thread at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes], int], Process] | None = None
        self._unread = b''
        self._owner = 0

    def ask(self, requests: Sequence[Request]) -> list[bool]:
        """Return whether each request's two texts are equal. Raise ComparisonError if no process can be started."""
        for is_last_try in (False, True):
            try:
                return self._ask(requests)
            except OSError as error:
                self.close()
                if is_last_try:
                    raise ComparisonError(
                        f'comparing MATH answers: the process that does it was lost: {error}'
                    ) from error
        raise AssertionError

    def _ask(self, requests: Sequence[Request]) -> list[bool]:
        process = self._start()
        requested, _ = pipes_of(process)
        lines = [
            json.dumps({'number': number, 'question': question, 'first': first, 'second': second}) + '\n'
            for number, (question, first, second) in enumerate(requests)
        ]
        outcomes: dict[int, bool] = {}
        limit = self._limits.wall_seconds * 2 + STOP_SECONDS
        try:
            for begin in range(0, len(lines), 100):  # no more than the pipes hold
                requested.write(''.join(lines[begin : begin + 100]).encode())
                requested.flush()
                for _ in lines[begin : begin + 100]:
                    answer = self._receive(process, limit)
                    outcomes[answer['number']] = answer['equal']
        finally:
            if len(outcomes) < len(lines):  # interrupted: a later request would get the answers to these
                self.close()
        return [outcomes[number] for number in range(len(lines))]

    def _start(self) -> subprocess.Popen[bytes]:
        """Return the process, started if it is not running, or if it belongs to the process that forked this one."""
        if self._running is not None and self._owner == os.getpid() and self._running.poll() is None:
            return self._running
        self.close()
        environment = {
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            'PYTHONPATH': os.pathsep.join(map(os.path.abspath, sys.path)),
            'PYTHONHASHSEED': '0',
            'OMP_NUM_THREADS': '1',
            'OPENBLAS_NUM_THREADS': '1',
        }
        process = self._running = subprocess.Popen(
            [sys.executable, '-P', '-m', WORKER, json.dumps(asdict(self._limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd='/',
            start_new_session=True,
        )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, stop, process, self._owner)
        hello = self._receive(process, START_SECONDS)
        if 'ready' not in hello:
            self.close()
            raise ComparisonError(f'comparing MATH answers needs math-verify and sympy: {hello["error"]}')
        return process

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> Line:
        """Return the next line. Raise OSError if none comes in time, or can come."""
        output = pipes_of(process)[1].fileno()
        deadline = time.monotonic() + seconds
        while b'\n' not in self._unread:
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f'no answer in {seconds:.0f} s')
            received = os.read(output, 65536)
            if not received:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                raise BrokenPipeError(f'it ended with status {process.returncode}')
            self._unread += received
        line, self._unread = self._unread.split(b'\n', 1)
        said: Line = json.loads(line)
        return said

    def close(self) -> None:
        """End the process and everything that it runs."""
        if self._finalizer is not None:
            self._finalizer()
        self._running, self._finalizer, self._unread = None, None, b''


def pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Return the descriptors that a worker process reads from and writes to."""
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def stop(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a worker process with everything it started; a fork leaves its parent's running."""
    if os.getpid() != owner:
        return
    for stream in pipes_of(process):
        with contextlib.suppress(OSError):  # a line was left that nobody can read
            stream.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a text: its beginning, end and content."""

    begin: int
    end: int
    content: str


def boxes_in(text: str) -> list[Box]:
    """Return the boxes of a text that are in no other box, in order; unclosed ones are ignored."""
    found, place, closing = [], 0, matching_braces(text)
    while command := BOX.search(text, place):
        place = command.end()
        if text.startswith('{', place):
            if (end := closing.get(place)) is not None:
                found.append(Box(command.start(), end + 1, text[place + 1 : end]))
                place = end + 1
        elif content := UNBRACED.match(text, place):
            found.append(Box(command.start(), content.end(), content[0]))
            place = content.end()
    return found


def matching_braces(text: str) -> dict[int, int]:
    """Return where each brace closes that does, escaped braces aside."""
    found, open_ones = {}, []
    for mark in BRACES.finditer(text):
        if mark[0] == '{':
            open_ones.append(mark.start())
        elif mark[0] == '}' and open_ones:
            found[open_ones.pop()] = mark.start()
    return found


def boxed(text: str) -> list[str]:
    """Return what is in each \\boxed or \\fbox of a text that is in no other."""
    return [box.content for box in boxes_in(text)]


def gold_of(problem: str, solution: str, fixes: Mapping[str, str] | None) -> str:
    """Return the right answer to a problem: the fix table's, else that of its solution. Raise ValueError without a box.

    Boxes at the end of a solution are joined by ', '; boxes in earlier steps are no answer.
    """
    if fixes and problem in fixes:
        return fixes[problem]
    gold = answer_of(solution)
    if gold is None:
        raise ValueError('the solution has no \\boxed{...}')
    return gold


def answer_of(completion: str) -> str | None:
    """Return the last box of a generation that is not empty, or its final boxes, joined by ', '; None without one.

    Boxes belong together if they are adjacent, in rows of one formula, or each say what the same thing is. If a
    generation says that either of two is right the last is taken; a note after the answer is not part of it.
    """
    boxes = [replace(box, content=without_boxes(box.content)) for box in boxes_in(completion)]
    found = [box for box in boxes if HIDDEN.sub('', box.content).strip('{} \t\n')]
    if (remark := REMARK.search(completion)) and any(box.end <= remark.start() for box in found):
        found = [box for box in found if box.end <= remark.start()]
    if not found:
        return None
    answers = found[-1:]
    if not EITHER.search(completion[found[-1].end : found[-1].end + 200]):
        for box in reversed(found[:-1]):
            if not belong_together(completion, box, answers[0]):
                break
            answers.insert(0, box)
    contents = {same_key(box.content): box.content.strip() for box in answers}
    return ', '.join(contents.values())


def without_boxes(content: str) -> str:
    """Return what is in a box without the boxes that are in it in turn."""
    closing = matching_braces(content)
    begin, end = 0, len(content)
    while command := OPENED_BOX.match(content, begin):
        closed = closing.get(command.end())
        if closed is None or content[closed + 1 : end].strip():
            break
        begin, end = command.end() + 1, closed
    return BOX.sub('', content[begin:end])


def belong_together(completion: str, box: Box, following: Box) -> bool:
    """Return whether two boxes are parts of one answer."""
    between = completion[box.end : following.begin]
    plain = ' '.join(MATH_MARKS.sub(' ', between).split())
    if re.match(r'[,;]|and\b|or\b', plain) and JOINED.fullmatch(plain):
        return True
    if ROW.fullmatch(between):
        return True
    label = label_before(completion, following)
    if not label or len(between) > MAX_BETWEEN or NEW_START.search(between):
        return False
    return label == label_before(completion, box) and (len(label) == 1 or ENUMERATED.search(between) is not None)


def label_before(completion: str, box: Box) -> str | None:
    """Return the name of a box: x in `x = \\boxed{1}`, angle in `this angle is \\boxed{30}`; None without one."""
    before = completion[max(0, box.begin - 200) : box.begin].replace('&', '')
    prose, _, formula = before.rpartition('$')
    if named := re.match(r'\s*([A-Za-z](?:_\{?\w+\}?)?)\s*=', formula):
        return named[1]
    named = re.search(r'([A-Za-z]+)\s+(?:is|are|equals)\s*\Z', prose)
    return named[1].lower() if named and named[1].lower() not in NO_LABEL else None


def same_key(content: str) -> object:
    """Return what two boxes have in common that say the same: a number's value, or the terms of a sum in any order."""
    forms = forms_of(content)
    if len(forms) == 1 and forms[0].kind == NUMBER:
        return forms[0].value, forms[0].unit
    text = ''.join((forms[0].text if forms else content).split())
    if re.search(r'[(){},=]', text):
        return text
    return tuple(sorted(re.findall(r'[+-][^+-]+', text if text[:1] in '+-' else f'+{text}')))


class Unknown(Exception):
    """Raised if a comparison needs the other process for these two texts."""

    def __init__(self, request: Request) -> None:
        self.request = request


class Comparer:
    """Compares answers and caches results. Several threads may use it, one at a time; close it after use.

    Two answers whose comparison exceeds a limit are not equal. Numbers, words, and identical texts need no process; it
    is started by the first comparison that does.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._process = Process(limits or Limits())
        self._lock = threading.RLock()
        self._known: dict[Request, bool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process; a later comparison starts another."""
        with self._lock:
            self._process.close()

    def equal(self, a: str | None, b: str | None) -> bool:
        """Return whether two answers are equal in either order; None is no answer, but a later None is the word."""
        return self.equal_many([(a, b)])[0]

    def equal_many(self, pairs: Iterable[tuple[str | None, str | None]]) -> list[bool]:
        """Return whether the two answers of each pair are equal; faster than one by one."""
        return self._settled([partial(self._ours, *pair) for pair in pairs])

    def equal_reference(self, a: str | None, b: str | None) -> bool:
        """Return the reference's `math_equal(a, b)`, which is not symmetric.

        None, a missing answer, equals nothing, but as the later one it is compared as the word None.
        """
        return self.equal_reference_many([(a, b)])[0]

    def equal_reference_many(self, pairs: Iterable[tuple[str | None, str | None]]) -> list[bool]:
        """Return the reference's `math_equal` of each pair."""
        return self._settled([partial(self._reference, *pair) for pair in pairs])

    def _settled(self, comparisons: list[Callable[[], bool]]) -> list[bool]:
        """Return the results, retried until the process was asked for everything that they need."""
        outcomes: dict[int, bool] = {}
        with self._lock:
            while len(outcomes) < len(comparisons):
                needed: dict[Request, None] = {}
                for index, comparison in enumerate(comparisons):
                    if index not in outcomes:
                        try:
                            outcomes[index] = comparison()
                        except Unknown as unknown:
                            needed[unknown.request] = None
                if needed:
                    if len(self._known) > MAX_CACHED:
                        self._known.clear()
                    self._known.update(zip(needed, self._process.ask(list(needed)), strict=True))
        return [outcomes[index] for index in range(len(comparisons))]

    def _ours(self, a: str | None, b: str | None) -> bool:
        return a is not None and b is not None and answers_equal(self._algebra, *sorted((a, b)))

    def _algebra(self, first: str, second: str) -> bool:
        first, second = sorted((first, second))
        return self._look_up(('algebra', first, second))

    def _reference(self, a: str | None, b: str | None) -> bool:
        if a is None or b is None:
            return reference_equal_with(lambda *_: False, a, b)
        request: Request = ('reference', a, b)
        if request in self._known:
            return self._known[request]
        if max(len(a), len(b)) > 10 * MAX_CHARACTERS or max(map(a.count, '([')) > MAX_NESTING:
            raise Unknown(request)

        def ask(*_: str) -> bool:
            raise Unknown(request)

        return reference_equal_with(ask, a, b)

    def _look_up(self, request: Request) -> bool:
        if request not in self._known:
            raise Unknown(request)
        return self._known[request]


def reference_equal(a: str | None, b: str | None) -> bool:
    """Return the reference's `math_equal(a, b)`, with a comparer that lives as long as this process."""
    return shared_comparer().equal_reference(a, b)


@cache
def shared_comparer() -> Comparer:
    """Return the comparer of `reference_equal`."""
    return Comparer()
