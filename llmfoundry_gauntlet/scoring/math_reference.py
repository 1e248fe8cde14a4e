"""Extract and compare MATH answers as SCORE's reference does, bugs included, to report its numbers next to ours.

Reimplements the behaviour of lm-eval 0.4.13, `lm_eval/tasks/score/math/{utils_math,math_grader}.py`. Where the
reference raises, the answers are not equal here. The caller passes in a function for the parts that need sympy: this
file never imports sympy, which evaluates model output and therefore must run in a separate process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Literal

MAX_CHARACTERS = 1000  # of an answer; the rest is ignored
TOLERANCE = 1e-4
BOX = '\\boxed{'
WRITTEN_AS_EQUATION = (
    'Find the equation',
    'Enter the equation',
    'What is the equation',
    'described by the equation',
    'Find an equation',
)
WEEKDAYS = ('Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday')
# Regular expressions in the order of removal; they match inside words, too.
UNITS = (
    'degree',
    'cm',
    'centimeter',
    'meter',
    'mile',
    'second',
    'minute',
    'hour',
    'week',
    'month',
    'year',
    'foot',
    'feet',
    'inch',
    'yard',
    'p.m.',
    'PM',
)
WRAPPERS = ('text', 'mathrm', 'mathcal', 'textbf', 'textit')
# In the order of replacement.
REPLACED = (
    # spacing, percent, dollar and degree signs
    ('\\!', ''),
    ('\\%', '%'),
    ('\\$', '$'),
    ('$', ''),
    ('%', ''),
    ('^{\\circ}', ''),
    # words between the parts of a list
    (' or ', ' , '),
    (' and ', ' , '),
    # large numbers
    ('million', '*10^6'),
    ('billion', '*10^9'),
    ('trillion', '*10^12'),
)
INTERVALS = {'Interval': '[]', 'Interval.Ropen': '[)', 'Interval.Lopen': '(]', 'Interval.open': '()'}

SympyQuestion = Literal['expressions', 'no_entries']
# Asks sympy whether two texts are equal as expressions, or whether the first is a matrix without entries.
Sympy = Callable[[SympyQuestion, str, str], bool]


def reference_answer_of(completion: str) -> str | None:
    """Return the content of the last \\boxed; None without one, or if it has no braces or no end."""
    begin = completion.rfind('\\boxed')
    if begin < 0 or not completion.startswith(BOX, begin):
        return None
    end = closing_brace(completion, begin + len(BOX))
    return None if end is None else completion[begin + len(BOX) : end]


def closing_brace(text: str, begin: int) -> int | None:
    """Return the position of the brace that closes the one opened just before `begin`; escaped braces count."""
    depth = 1
    for brace in re.compile('[{}]').finditer(text, begin):
        depth += 1 if brace[0] == '{' else -1
        if depth == 0:
            return brace.start()
    return None


def reference_gold_of(problem: str, solution: str, fixes: Mapping[str, str] | None) -> str:
    """Return the gold answer of a solution, or of the fix table if its boxes differ. Raise ValueError if none."""
    entries = [normalized(entry) for entry in outer_boxes(solution)]
    if not entries:
        raise ValueError('the solution has no \\boxed{...}')
    joined = ', '.join(entries)
    gold = entries[0] if len(set(entries)) == 1 else (fixes or {}).get(problem, joined)
    if gold.count('=') == 1 and not any(words in problem for words in WRITTEN_AS_EQUATION):
        gold = gold.partition('=')[2]
    return gold


def outer_boxes(text: str) -> list[str]:
    """Return the contents of all outermost boxes."""
    contents = []
    command = text.find(BOX)
    while command >= 0:
        begin = command + len(BOX)
        end = closing_brace(text, begin)
        if end is None:
            break
        contents.append(text[begin:end])
        command = text.find(BOX, end)
    return contents


def normalized(text: str) -> str:
    """Return an answer without units, spaces and much of its LaTeX. Raise ValueError for two \\mbox in an answer."""
    # The order is the reference's, and each step expects what those before it leave.
    text = text.replace('\\left', '').replace('\\right', '')
    text = re.sub(r'\s*\\text\{\s*(?:or|and)\s*\}\s*', ',', text)
    text = re.sub(r',\s*,', ',', text)
    text = without_unit_after(text)
    if '\\in ' in text:
        text = text.split('\\in ')[1].strip()
    for name in WRAPPERS:
        text = text.replace(f'\\\\{name}', '')
        whole = re.search(rf'^\\{name}\{{(.+?)\}}$', text)
        if whole is not None:
            text = whole[1]
    for old, new in REPLACED:
        text = text.replace(old, new)
    for unit in UNITS:
        text = re.sub(rf'{unit}(?:es)?s? *(?:\^[0-9]+)?', '', text)
    if 'day' in text and not any(day in text for day in WEEKDAYS):
        text = re.sub('days?', '', text)
    text = re.sub(r'\^ *\\circ', '', text)
    if text.startswith('{') and text.endswith('}'):
        text = text[1:-1]
    text = re.sub(r'\\sqrt(\s*\w+)', r'\\sqrt{\1}', text)
    text = with_braced_fractions(text)
    text = re.sub('- *', '-', text)
    text = re.sub(r'([0-9]) +([0-9])', r'\1+\2', text)
    text = re.sub(r'(\d+) *\\frac\{(\d+)\}\{(\d+)\}', r'\1+\2/\3', text)
    return as_integer(text.replace(' ', ''))


def without_unit_after(text: str) -> str:
    """Return an answer up to its only \\text or its \\mbox; several \\text are replaced by their contents."""
    pieces = re.split(r'\\text\s*\{\s*', text) if '\\text' in text else []
    if len(pieces) == 2 and pieces[0] not in ('', '('):
        return pieces[0]
    if '\\text{' in text:
        return re.sub(r'\\text\{([^}]+)\}', r'\1', text)
    pieces = text.split('\\mbox{')
    if len(pieces) > 2:
        raise ValueError('the answer has several \\mbox')
    return pieces[0]


def with_braced_fractions(text: str) -> str:
    """Write \\frac12 and \\frac1{2} as \\frac{1}{2}; if an argument is missing, only remove spaces after \\frac."""
    text = re.sub(r'\\frac +', r'\\frac', text)
    first, *others = text.split('\\frac')
    built = [first]
    for piece in others:
        if not piece.startswith('{'):
            if len(piece) < 2:
                return text
            below = piece[1:] if piece[1] == '{' else f'{{{piece[1]}}}{piece[2:]}'
            piece = f'{{{piece[0]}}}{below}'
        built.append(piece)
    return '\\frac'.join(built)


def as_integer(text: str) -> str:
    """Return a number within 1e-7 of an integer truncated to an integer; a base after it is dropped.

    Other texts are unchanged.
    """
    # Commas between thousands, from the last to the first: 1,234,567.
    plain, before = text, None
    while plain != before:
        before = plain
        plain = re.sub(r'(\d),(\d\d\d)($|\D)', r'\1\2\3', plain)
    try:
        value = float(plain)
        if abs(value - round(value)) > 1e-7:
            return text
    except (ValueError, OverflowError):
        return text
    return str(int(float(text.replace(',', '').split('_')[0])))


def as_number(text: str) -> float | None:
    """Return a text as a number, ignoring commas."""
    try:
        return float(text.replace('{,}' if '{,}' in text else ',', ''))
    except ValueError:
        return None


def without_sign(text: str) -> str:
    """Return an answer without the dollar sign before a number, or the percent sign after one."""
    if re.match(r'\$\d+(\.\d+)?', text):
        return text[1:]
    if re.match(r'\d+(\.\d+)?\\?%$', text):
        return text.replace('\\%', '').replace('%', '')
    return text


def reference_equal_with(sympy: Sympy, answer: str | None, gold: str | None) -> bool:
    """Return the reference's comparison, which is not symmetric and treats 0.5, 50 and 5000 as equal.

    A missing `answer` equals nothing, but a missing `gold` is compared as the word None.
    """
    if answer is None:
        return False
    try:
        answer = normalized(without_sign(answer))[:MAX_CHARACTERS]
        wanted_text = None if gold is None else normalized(without_sign(gold))
    except ValueError:
        return False
    gold = 'None' if wanted_text is None else wanted_text
    if wanted_text is not None and answer.strip().lower() == gold.strip().lower():
        return True
    if answer.replace(' ', '') == gold.replace(' ', ''):
        return True
    given, wanted = as_number(answer), as_number(gold)
    if given is not None and wanted is not None:
        near = (wanted / 100, wanted, wanted * 100)
        return any(math.isclose(value, given, rel_tol=TOLERANCE) for value in near)
    if not answer:
        return False
    answer, gold = as_brackets(answer.strip()), gold.strip()
    if without_brackets(answer, gold) == without_brackets(gold, gold, like=answer):
        return True
    outcome = equal_by_parts(sympy, answer, gold)
    return sympy('expressions', answer, gold) if outcome is None else outcome


def as_brackets(text: str) -> str:
    """Convert an interval from sympy's notation to brackets."""
    for name, ends in INTERVALS.items():
        whole = re.match(rf'{re.escape(name)}\((.*)\)$', text)
        if whole is not None:
            return f'{ends[0]}{whole[1]}{ends[1]}'
    return text


def without_brackets(text: str, gold: str, *, like: str | None = None) -> str:
    """Return a text without braces and parentheses, or outer square brackets if the answer `like` may lose them."""
    answer = text if like is None else like
    square = answer.startswith('[') and answer.endswith(']') and not gold.startswith('(')
    round_ = answer.startswith('(') and answer.endswith(')') and not gold.startswith('[')
    if square or round_:
        text = text.strip('[]()')
    return re.sub('[{}()]', '', text)


def equal_by_parts(sympy: Sympy, answer: str, gold: str) -> bool | None:
    """Return whether two lists are equal part by part; None if that cannot be decided."""

    def all_equal(answers: list[str], golds: list[str]) -> bool:
        if len(answers) != len(golds):
            return False
        return all(reference_equal_with(sympy, *pair) for pair in zip(answers, golds, strict=True))

    # Pairs and intervals: (1, 2], with the same brackets.
    same_ends = bool(answer and gold) and answer[0] == gold[0] and answer[-1] == gold[-1]
    if same_ends and answer[0] in '([' and answer[-1] in ')]' and all_equal(inner(answer), inner(gold)):
        return True

    # Lists: 1, 2.
    if ',' in answer and ',' in gold:
        answers = [part.strip() for part in answer.split(',')]
        golds = [part.strip() for part in gold.split(',')]
        if len(answers) == len(golds):
            return all_equal(answers, golds)

    # sympy's points and matrices: Point(1, 2), Matrix([]).
    if answer.startswith('Point'):
        if not gold:
            return False
        coordinates = answer[answer.find('(') + 1 : -1].split(',')
        if gold[0] == '(' and gold[-1] == ')' and all_equal(coordinates, inner(gold)):
            return True
    if gold.startswith('\\begin{pmatrix}') and answer.startswith('Matrix') and len(gold.split()) < 3:
        return sympy('no_entries', answer, gold) or None
    return None


def inner(text: str) -> list[str]:
    """Return the text between the first and the last character, split at commas."""
    return text[1:-1].split(',')
