"""Wrong answers similar to right ones must be refused in either order.

A seeded generator makes them from hand-written right answers and, if available, from MATH's own.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from fractions import Fraction

import pytest

from llmfoundry_gauntlet.scoring.math_forms import NUMBER, SET, TEXT, TUPLE, Form, forms_of
from llmfoundry_gauntlet.scoring.mathematics import Comparer, gold_of

NUM_WRONG = 300
GOLDS = (
    '18',
    '-7',
    '0.25',
    '14,\\!400',
    '3.75',
    '137 \\frac{1}{2}',
    '\\frac{5}{9}',
    '-\\frac{2}{3}',
    '2^{2005}',
    '44\\%',
    '7.2\\%',
    '\\$18.90',
    '5\\text{ cm}',
    '440\\text{ cm}^2',
    '30^\\circ',
    '85\\text{ feet}',
    '9\\text{ a.m.}',
    '2112_6',
    '11010_2',
    '152A_{11}',
    '3:1',
    '\\text{Friday}',
    '\\text{(C)}',
    '\\text{even}',
    '(3,-4)',
    '(1,2,3)',
    '\\left(\\frac{3}{5},\\frac{8}{3}\\right]',
    '[0,\\infty)',
    '(-\\infty,-8)\\cup (8,\\infty)',
    '4,6,14,15',
    '2 + \\sqrt{6}, 2 - \\sqrt{6}',
    '\\{1\\pm\\sqrt{5},-2\\}',
    '\\frac{\\pi}{4}, \\frac{9 \\pi}{4}',
    '\\begin{pmatrix} 2 & 0 \\\\ -3 & 5 \\end{pmatrix}',
    '\\begin{pmatrix} -7 \\\\ 16 \\\\ 5 \\end{pmatrix}',
    'x^3 + 2x^2 + x',
    '7(x+3) (x-3)',
    '\\frac{x+2}{7}',
    '\\frac{6\\sqrt{5}}{5}',
    '99\\pi',
    '5 - 10i',
    '36x \\sqrt{35x}',
    'x = 4',
    'y = 2x + 3',
    'x^2 + y^2 = 13',
    '4x-5y=-50',
    'f(2) < f(1) < f(4)',
    'x \\ge 3',
    '\\cos 58^\\circ',
)
WORDS = ('Monday', 'odd', 'Evelyn', 'D', 'parabola')

Wrong = Callable[[str, Form, random.Random], str | None]


def replaced_once(pattern: str, new: Callable[[re.Match[str]], str]) -> Wrong:
    """Return a change of one match of a pattern."""

    def wrong(gold: str, _: Form, rng: random.Random) -> str | None:
        places = list(re.finditer(pattern, gold))
        if not places:
            return None
        place = rng.choice(places)
        return gold[: place.start()] + new(place) + gold[place.end() :]

    return wrong


def digit_changed(gold: str, _: Form, rng: random.Random) -> str | None:
    places = [place.start() for place in re.finditer(r'\d', gold)]
    if not places:
        return None
    place = rng.choice(places)
    digit = rng.choice([str(digit) for digit in range(1, 10) if str(digit) != gold[place]])
    return gold[:place] + digit + gold[place + 1 :]


def of_number(new: Callable[[Fraction], str]) -> Wrong:
    """Return a change of a number without a unit."""

    def wrong(_: str, form: Form, __: random.Random) -> str | None:
        return new(form.value) if form.kind == NUMBER and not form.unit and form.value else None

    return wrong


def as_latex(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f'\\frac{{{value.numerator}}}{{{value.denominator}}}'


def cut_decimal(_: str, form: Form, __: random.Random) -> str | None:
    is_periodic = form.kind == NUMBER and re.search('[^25]', str(prime_part(form.value.denominator)))
    return f'{float(form.value):.9f}' if is_periodic else None


def prime_part(number: int) -> int:
    for prime in (2, 5):
        while number % prime == 0:
            number //= prime
    return number if number > 1 else 2


def wrong_unit(gold: str, form: Form, _: random.Random) -> str | None:
    others = {'cm': 'm', 'foot': 'inches', 'inch': 'feet', '$': 'cents', 'am': 'p.m.', '°': '\\%', 'hour': 'minutes'}
    if form.kind != NUMBER or not form.unit or form.unit == '%':
        return None
    name = others.get(form.unit.partition('^')[0], 'liters')
    return f'{form.text}\\%' if name == '\\%' else f'{form.text}\\text{{ {name}}}'


def wrong_power_of_unit(_: str, form: Form, __: random.Random) -> str | None:
    unit = form.unit.partition('^')[0]
    if form.kind != NUMBER or unit not in ('cm', 'foot', 'inch', 'm'):
        return None
    return f'{form.text}\\text{{ {unit}}}' + ('' if '^' in form.unit else '^2')


def in_brackets(new: Callable[[list[str]], str | None], *, kinds: tuple[str, ...]) -> Wrong:
    """Return a change of the parts of a pair, an interval or a set."""

    def wrong(_: str, form: Form, __: random.Random) -> str | None:
        return new([part.text for part in form.parts]) if form.kind in kinds and form.ends in ('()', '') else None

    return wrong


def interval_ends(gold: str, form: Form, _: random.Random) -> str | None:
    if form.kind != TUPLE or form.ends not in ('[]', '(]', '[)', '()') or len(form.parts) != 2:
        return None
    other_opening = {'[': '(', '(': '['}[form.ends[0]]
    ends = ','.join(part.text for part in form.parts)
    return f'{other_opening}{ends}{form.ends[1]}'


def one_part_less(gold: str, form: Form, _: random.Random) -> str | None:
    pieces = re.split(r'\\cup|,(?![^()\[\]]*[)\]])', gold)
    if len(pieces) == 1 or 'pm' in gold:
        return None
    joint = r'\cup' if 'cup' in gold else ','
    return joint.join(pieces[1:])


def one_part_more(gold: str, form: Form, _: random.Random) -> str | None:
    return f'{gold}, 77' if form.kind not in (TEXT,) and '=' not in gold else None


def swapped_columns(gold: str, _: Form, __: random.Random) -> str | None:
    rows = re.fullmatch(r'(\\begin\{pmatrix\})(.*?)\\\\(.*?)((?:\\\\.*)?\\end\{pmatrix\})', gold, re.DOTALL)
    if rows is None or rows[2].split() == rows[3].split():
        return None
    return f'{rows[1]}{rows[3]}\\\\{rows[2]}{rows[4]}'


def another_word(_: str, form: Form, rng: random.Random) -> str | None:
    return f'\\text{{{rng.choice(WORDS)}}}' if form.kind == TEXT and form.text.strip('()') not in WORDS else None


def base_lost(gold: str, form: Form, _: random.Random) -> str | None:
    return gold.partition('_')[0] if form.kind == 'based' else None


def base_changed(gold: str, form: Form, _: random.Random) -> str | None:
    return f'{gold.partition("_")[0]}_{{{int(form.ends) + 1}}}' if form.kind == 'based' else None


def base_added(gold: str, _: Form, __: random.Random) -> str | None:
    return f'{gold}_2' if re.fullmatch('1[01]+', gold) else f'{gold}_9' if re.fullmatch('[1-8][0-8]+', gold) else None


def swap_first(parts: list[str]) -> str | None:
    return f'({",".join([parts[1], parts[0], *parts[2:]])})' if len(parts) > 1 and parts[0] != parts[1] else None


KINDS: dict[str, Wrong] = {
    'digit changed': digit_changed,
    'sign changed': lambda gold, form, _: f'-({gold})' if form.value or form.kind == 'expression' else None,
    'plus for minus': replaced_once(r'(?<=[\w})]) ?[-+] ?(?=[\w\\(])', lambda m: '-' if '+' in m[0] else '+'),
    'set for tuple': in_brackets(lambda parts: f'\\{{{",".join(parts)}\\}}', kinds=(TUPLE,)),
    'tuple for set': in_brackets(lambda parts: f'({",".join(parts)})', kinds=(SET,)),
    'interval ends': interval_ends,
    'reordered tuple': in_brackets(swap_first, kinds=(TUPLE,)),
    'base lost': base_lost,
    'base changed': base_changed,
    'base added': base_added,
    'unit changed': wrong_unit,
    'power of unit': wrong_power_of_unit,
    'percent sign lost': lambda _, form, __: form.text if form.unit == '%' else None,
    'percent sign added': of_number(lambda value: f'{as_latex(value)}\\%'),
    'hundredfold': of_number(lambda value: as_latex(value * 100)),
    'hundredth': of_number(lambda value: as_latex(value / 100)),
    'a millionth more': of_number(lambda value: as_latex(value + Fraction(1, 10**7))),
    'decimal cut': cut_decimal,
    'fraction upside down': replaced_once(
        r'\\frac\{(\w+)\}\{(\w+)\}', lambda m: f'\\frac{{{m[2]}}}{{{m[1]}}}' if m[1] != m[2] else '0'
    ),
    'part missing': one_part_less,
    'part added': one_part_more,
    'exponent': replaced_once(r'(?<=[a-z])\^(\d)(?!\d)', lambda m: f'^{int(m[1]) + 1}'),
    'root lost': replaced_once(r'\\sqrt\{(\d*[2-9]\d*|\d{2,}|[a-z])\}', lambda m: m[1]),
    'factor of pi lost': replaced_once(r'(?<=[\d} ])\s*\\pi', lambda _: ''),
    'another variable': replaced_once(r'(?<![\\a-zA-Z])x(?![a-zA-Z])', lambda _: 'w'),
    'capital letter': replaced_once(r'(?<![\\a-zA-Z{])x(?![a-zA-Z])', lambda _: 'X'),
    'imaginary part': lambda gold, _, __: f'({gold})-2i' if re.search(r'(?<![\\a-z])i\b', gold) else None,
    'strict for not': replaced_once(r'<|\\le(?![a-z])|\\ge(?![a-z])', lambda m: '\\le ' if m[0] == '<' else '<'),
    'rows swapped': swapped_columns,
    'another word': another_word,
}


def wrong_answers(golds: list[str], number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield this number of kinds, right and wrong answers: kinds in turn, golds at random."""
    rng, made = random.Random(seed), 0
    while made < number:
        for kind, wrong in KINDS.items():
            for gold in rng.sample(golds, len(golds)):
                form = forms_of(gold)[-1]
                answer = wrong(gold, form, rng)
                if answer is not None and answer != gold:
                    yield kind, gold, answer
                    made += 1
                    break
            if made == number:
                return


def assert_none_accepted(cases: list[tuple[str, str, str]]) -> None:
    with closing(Comparer()) as comparer:
        outcomes = comparer.equal_many([(answer, gold) for _, gold, answer in cases])
        others = comparer.equal_many([(gold, answer) for _, gold, answer in cases])
    assert outcomes == others
    assert [case for case, accepted in zip(cases, outcomes, strict=True) if accepted] == []


def test_hand_written_golds_cover_every_kind_of_wrong_answer():
    kinds = Counter(kind for kind, *_ in wrong_answers(list(GOLDS), NUM_WRONG, seed=1))
    assert set(kinds) == set(KINDS)
    assert kinds.total() == NUM_WRONG


def test_wrong_answers_to_hand_written_golds_are_refused():
    assert_none_accepted(list(wrong_answers(list(GOLDS), NUM_WRONG, seed=1)))


@pytest.mark.parametrize('seed', [1, 2, 3])
def test_wrong_answers_to_real_golds_are_refused(rows: list[dict[str, str]], seed: int):
    golds = sorted({gold_of(row['problem'], row['solution'], None) for row in rows})
    assert_none_accepted(list(wrong_answers(golds, NUM_WRONG, seed)))
