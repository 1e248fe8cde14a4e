"""Answers to MATH problems: extraction from a generation, and equality.

Our equality is symmetric and takes different notations of a value for equal: it compares forms first (`math_forms`),
and expressions with math-verify, in a process with limits. The reference's rules are here too (`math_reference`).
Importing this module does not load sympy; comparing loads it only in the other process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import TracebackType
from typing import Self

from llmfoundry_gauntlet.scoring.math_equality import answers_equal
from llmfoundry_gauntlet.scoring.math_forms import MAX_CHARACTERS, NUMBER, forms_of
from llmfoundry_gauntlet.scoring.math_process import ComparisonError, Limits, Process, Request
from llmfoundry_gauntlet.scoring.math_reference import (
    reference_answer_of,
    reference_equal_with,
    reference_gold_of,
)

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
