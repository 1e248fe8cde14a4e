"""Compare two answers form by form, and two expressions by a caller's function."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from llmfoundry_gauntlet.scoring.math_forms import (
    BASED,
    EXPRESSION,
    LIST,
    NUMBER,
    RELATION,
    SET,
    TEXT,
    WORDS,
    Form,
    forms_of,
)

# Whether two expressions, or two equations, are equal; neither is a list, a number with a unit, or too long.
Algebra = Callable[[str, str], bool]

BARE_WORD = re.compile(r'[A-Za-z]{4,}(?: [A-Za-z]+)*')  # not a product of variables
DEGREES = re.compile(r'(\d+(?:\.\d+)?)\s*\\degree(?![A-Za-z])')


def answers_equal(algebra: Algebra, first: str, second: str) -> bool:
    """Return whether two answers are equal, whichever comes first. An empty answer equals nothing."""
    if not first.strip() or not second.strip():
        return False
    if first.split() == second.split():
        return True
    forms = forms_of(first), forms_of(second)
    return any(same(algebra, one, other) for one in forms[0] for other in forms[1])


def same(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two forms are equal."""
    if one.label and other.label and one.label != other.label:
        scalars = one.kind in (NUMBER, EXPRESSION) and other.kind in (NUMBER, EXPRESSION)
        return scalars and not one.unit and not other.unit and equations_equal(algebra, one, other)
    if one.unit and other.unit and one.unit != other.unit:
        return False
    kinds = {one.kind, other.kind}
    if kinds <= {LIST, SET}:
        return lists_equal(algebra, one, other)
    if kinds == {RELATION, EXPRESSION} or kinds == {RELATION, NUMBER}:
        return equations_equal(algebra, one, other)
    if kinds <= {NUMBER, EXPRESSION}:
        return quantities_equal(algebra, one, other)
    if TEXT in kinds:
        return texts_equal(one, other)
    if len(kinds) > 1:
        return False
    if one.kind == BASED:
        return (one.text, one.ends) == (other.text, other.ends)
    if one.kind == RELATION and one.ends == other.ends == '=' and algebra(written(one.text), written(other.text)):
        return True
    return one.ends == other.ends and in_order(algebra, one.parts, other.parts)


def in_order(algebra: Algebra, ones: Sequence[Form], others: Sequence[Form]) -> bool:
    """Return whether parts are equal one by one."""
    pairs = list(zip(ones, others, strict=False))
    return len(ones) == len(others) and all(same(algebra, one, other) for one, other in pairs)


def lists_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two lists have equal parts, in any order unless only one of them says what each part is."""
    if len(one.parts) != len(other.parts) or (one.label and other.label and one.label != other.label):
        return False
    if says_which(one) != says_which(other):
        return in_order(algebra, one.parts, other.parts)
    left = list(other.parts)
    for part in one.parts:
        found = next((index for index, candidate in enumerate(left) if same(algebra, part, candidate)), None)
        if found is None:
            return False
        del left[found]
    return True


def says_which(form: Form) -> bool:
    """Return whether the parts of a list have names of their own, as in x = 1, y = 2."""
    return len({part.label for part in form.parts}) > 1


def quantities_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two numbers or expressions are equal, and their units where both have one.

    A percentage equals another, and the number that it is, but not the number before its sign.
    """
    percent = '%' in (one.unit, other.unit)
    if percent and one.unit != other.unit:
        if one.value is None or other.value is None or {one.unit, other.unit} != {'%', ''}:
            return False
        return one.value / (100 if one.unit else 1) == other.value / (100 if other.unit else 1)
    if one.value is not None and other.value is not None:
        return one.value == other.value
    if BARE_WORD.fullmatch(one.text) and BARE_WORD.fullmatch(other.text):
        return texts_equal(one, other)
    first, second = written(one.text), written(other.text)
    return first.replace(' ', '') == second.replace(' ', '') or algebra(first, second)


def texts_equal(one: Form, other: Form) -> bool:
    """Return whether two words are equal but for case and punctuation; a bare word is one too."""
    if not all(form.kind == TEXT or WORDS.fullmatch(form.text) for form in (one, other)):
        return False
    keys = [re.sub(r'[^a-z0-9]', '', form.text.lower()) for form in (one, other)]
    return keys[0] == keys[1] != ''


def equations_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two equations are equal, of which a label and its value are one."""
    texts = []
    for form in (one, other):
        if form.kind == RELATION:
            if form.ends != '=':
                return False
            texts.append(form.text)
        elif form.label:
            texts.append(f'{form.label} = {form.text}')
        else:
            return False
    return algebra(written(texts[0]), written(texts[1]))


def written(text: str) -> str:
    """Return an expression in the form for algebra: degrees as numbers."""
    return DEGREES.sub(r'(\\frac{\1 \\pi}{180})', text)
