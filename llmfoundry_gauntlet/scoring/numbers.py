"""Numbers in answers: '18', '$18.00' and '18 dollars' are equal; '18x', '18 cents' and '18 thousand' are different."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

SCALES = {
    'hundred': 100,
    'thousand': 1000,
    'k': 1000,
    'million': 10**6,
    'mn': 10**6,
    'billion': 10**9,
    'bn': 10**9,
    'trillion': 10**12,
    'dozen': 12,
}
# Names of one unit in the singular. Money comes first: what stands after it, 'a day' or 'per hour', is left aside.
MONEY = ('$ dollar usd buck', '€ euro eur', '£ pound gbp', 'rupee rs re inr', 'cent')
MEASURES = (
    '% percent',
    '° degree',
    'second sec',
    'minute min',
    'hour hr h',
    'day',
    'week',
    'month',
    'year yr',
    'mm millimeter millimetre',
    'cm centimeter centimetre',
    'm meter metre',
    'km kilometer kilometre',
    'inch inche',
    'foot feet ft',
    'yard yd',
    'mile mi',
    'mg milligram',
    'g gram gm',
    'kg kilogram kilo',
    'ounce oz',
    'lb',
    'ml milliliter millilitre',
    'liter litre',
    'gallon',
    'cup',
    'mile/hour mph',
    'km/hour kmph kph',
    'C °C celsius',
    'F °F fahrenheit',
    'K kelvin',
)
UNITS = {name: names.split()[0] for names in (*MONEY, *MEASURES) for name in names.split()}
CURRENCIES = {names.split()[0] for names in MONEY}

MAX_CHARACTERS = 1000  # of a number; Python reads no more than 4,300 digits
DIGITS = r'(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+'
NUMBER = re.compile(
    r'(?<![\w.,])(?P<sign>[-+]?)(?P<gap>\s?)(?:(?P<money>[$€£]|(?i:rs\b\.?|usd\b|eur\b))\s?)?(?P<inner>-?)'
    rf'(?P<number>{DIGITS})(?:\s?/\s?(?P<divisor>\d+))?(?!\d)'
    r'(?:\s?(?P<scale>(?i:hundred|thousand|million|billion|trillion|dozen|mn|bn)|k)s?(?![^\W_]))?'
)
UNIT = re.compile(r'\s*(?P<unit>[%$€£]|°\s?[CF]?(?![^\W_])|[^\W\d_]{2,}(?:(?:/| per )[^\W\d_]+)?|[mghCFK](?![^\W_]))')

# What makes a number part of a formula, or of another number.
LETTER = r'[^\W\d_](?![^\W_])'
FORMULA_BEFORE = re.compile(r'(?:[\^*/√+<>≤≥≠±\xd7·÷|{_-]|\w\(|\b(?:sqrt|log|ln|sin|cos|tan))\s*\Z')
FORMULA_AFTER = re.compile(
    rf"\s*(?:[\^*!√π<>≤≥≠±\xd7·÷|{{_\\]|[-+/]\s*\(?{LETTER}|['\u2019]s\b|(?![mghCFK]|(?:a|I)\s+\w\w){LETTER}"
    r'|(?i:pi|sqrt|log|ln|sin|cos|tan|squared|cubed|and (?:a|one|two|three))\b)'
)
JOINS = ('=', ':', '(')  # a sign that stands apart belongs to the number after these

FRACTION = re.compile(r'\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}')
WRAPPED = re.compile(r'\\(?:text|mathrm|mathbf|boxed|operatorname)\s*\{([^{}]*)\}')
INLINE = re.compile(r'(?<!\\)(\$\$?)((?:\\.|[^$\\])+)\1(?!\d)')
BOLD = re.compile(r'(?<![\w*])(\*\*?)([^\s*](?:[^*]*[^\s*])?)\1(?![\w*])')
MINUS = re.compile(r'\b(?:minus|negative)\s+(?=[$€£]?[\d.])', re.IGNORECASE)
# minus sign, hyphen, non-breaking hyphen, en dash, no-break space, TeX's space
DASHES = str.maketrans(
    {'\u2212': '-', '\u2010': '-', '\u2011': '-', '\u2013': '-', '\u00a0': ' ', '\u202f': ' ', '~': ' '}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number and the unit after it, '' without one; `alone` if only a full stop may be around them."""

    value: Fraction
    unit: str
    alone: bool

    def agrees_with(self, other: Quantity) -> bool:
        """Return whether the numbers are equal, and the units where both have one."""
        return self.value == other.value and (not self.unit or not other.unit or self.unit == other.unit)


@lru_cache(maxsize=65536)
def number_in(text: str) -> Quantity | None:
    """Return the number of a text with just one; None if it has none, several, or one that is part of a formula."""
    text = plain(text)
    found = NUMBER.search(text)
    if found is None or len(found[0]) > MAX_CHARACTERS or int(found['divisor'] or 1) == 0:
        return None
    before, after = text[: found.start()], text[found.end() :]
    if any(character.isnumeric() for character in before + after) or not has_own_sign(found, before):
        return None
    named = UNIT.match(after)
    name = named['unit'] if named else ''
    rest = after[named.end() :] if named and not found['money'] else after
    unit = unit_called((found['money'] or name).rstrip('.'))
    if FORMULA_BEFORE.search(before) or FORMULA_AFTER.match(after) or FORMULA_AFTER.match(rest):
        return None
    if after[:1].isalpha() and (found['money'] or not is_known(unit)):  # $5K, 18th
        return None
    if found['money'] and len(name) == 1:  # £5 m
        return None
    value = Fraction(found['number'].replace(',', '')) * SCALES.get((found['scale'] or '').lower(), 1)
    return Quantity(
        value=value / int(found['divisor'] or 1) * (-1 if '-' in (found['sign'], found['inner']) else 1),
        unit=unit,
        alone=not before.strip() and rest.strip() in ('', '.'),
    )


def has_own_sign(found: re.Match[str], before: str) -> bool:
    """Return whether what stands before a number's digits is its sign, if anything is, and not an operation."""
    if found['sign'] and found['inner']:
        return False
    return not (found['sign'] and found['gap']) or not before.strip() or before.rstrip().endswith(JOINS)


@lru_cache(maxsize=65536)
def quantity_of(gold: str) -> Quantity | None:
    """Return the number that a right answer is, with a currency or unit; None if it is anything else."""
    quantity = number_in(gold)
    if quantity is None or not quantity.alone or not is_known(quantity.unit):
        return None
    return quantity


def plain(text: str) -> str:
    """Return a text without what LaTeX and Markdown put around a number."""
    text = BOLD.sub(r'\2', INLINE.sub(r'\2', WRAPPED.sub(r'\1', text)))
    text = FRACTION.sub(r'\1/\2', re.sub(r'(?<=\d)(?=\s*\\[dt]?frac)', ' ', text))
    text = re.sub(r'\\[()\[\],!;:]', '', text.replace('{,}', ','))
    text = re.sub(r'\\([%$ ])', r'\1', text).translate(DASHES)
    return MINUS.sub('-', re.sub(r'(?i:\bper cent\b)', 'percent', text))


def unit_called(name: str) -> str:
    """Return the unit of a name: one spelling for all names of a known unit, else the name in lower case."""
    parts = [one_unit(part) for part in re.split(r'/| per ', name)]
    if parts[0] in CURRENCIES:
        return parts[0]
    unit = '/'.join(parts)
    return UNITS.get(unit, unit)


def one_unit(name: str) -> str:
    """Return the unit of a name without a division."""
    lower = name.lower().replace(' ', '') if len(name) > 1 else name
    return UNITS.get(lower.replace('°c', '°C').replace('°f', '°F')) or UNITS.get(lower.removesuffix('s'), lower)


def is_known(unit: str) -> bool:
    """Return whether a unit is one of ours, or none."""
    return not unit or all(part in UNITS for part in unit.split('/'))
