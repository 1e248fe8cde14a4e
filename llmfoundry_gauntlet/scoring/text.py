"""Score generations by their text: find the stop and the answer, and compare the answer as text or as a number."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from llmfoundry_gauntlet.types import Score, StopRule

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
# The other names of each unit, in the singular.
MONEY = {  # after an amount, 'a day' or 'per hour' is ignored
    '$': ('dollar', 'usd', 'buck'),
    '€': ('euro', 'eur'),
    '£': ('pound', 'gbp'),
    'rupee': ('rs', 're', 'inr'),
    'cent': (),
}
MEASURES = {
    # shares and angles
    '%': ('percent',),
    '°': ('degree',),
    # time
    'second': ('sec',),
    'minute': ('min',),
    'hour': ('hr', 'h'),
    'day': (),
    'week': (),
    'month': (),
    'year': ('yr',),
    # length
    'mm': ('millimeter', 'millimetre'),
    'cm': ('centimeter', 'centimetre'),
    'm': ('meter', 'metre'),
    'km': ('kilometer', 'kilometre'),
    'inch': ('inche',),
    'foot': ('feet', 'ft'),
    'yard': ('yd',),
    'mile': ('mi',),
    # mass
    'mg': ('milligram',),
    'g': ('gram', 'gm'),
    'kg': ('kilogram', 'kilo'),
    'ounce': ('oz',),
    'lb': (),
    # volume
    'ml': ('milliliter', 'millilitre'),
    'liter': ('litre',),
    'gallon': (),
    'cup': (),
    # speed
    'mile/hour': ('mph',),
    'km/hour': ('kmph', 'kph'),
    # temperature
    'C': ('°C', 'celsius'),
    'F': ('°F', 'fahrenheit'),
    'K': ('kelvin',),
}
UNITS = {name: unit for unit, others in {**MONEY, **MEASURES}.items() for name in (unit, *others)}  # by name
CURRENCIES = frozenset(MONEY)

MAX_CHARACTERS = 1000  # of a number; Python parses at most 4,300 digits
DIGITS = r'(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+'  # 1,234.5 and .5
SIGN_AND_CURRENCY = (  # -$5, $-5, - 5, Rs. 5
    r'(?P<sign>[-+]?)(?P<gap>\s?)(?:(?P<money>[$€£]|(?i:rs\b\.?|usd\b|eur\b))\s?)?(?P<inner>-?)'
)
DIVISOR = r'(?:\s?/\s?(?P<divisor>\d+))?'  # of 1/2
SCALE = r'(?:\s?(?P<scale>(?i:hundred|thousand|million|billion|trillion|dozen|mn|bn)|k)s?(?![^\W_]))?'  # 5 million, 5k
NUMBER = re.compile(rf'(?<![\w.,]){SIGN_AND_CURRENCY}(?P<number>{DIGITS}){DIVISOR}(?!\d){SCALE}')
# 5%, 5 °C, 5 km/h, 5 miles per hour; one letter only of units that have one.
UNIT = re.compile(r'\s*(?P<unit>[%$€£]|°\s?[CF]?(?![^\W_])|[^\W\d_]{2,}(?:(?:/| per )[^\W\d_]+)?|[mghCFK](?![^\W_]))')

# Context that makes a number part of a formula, or of another number.
LETTER = r'[^\W\d_](?![^\W_])'
FORMULA_BEFORE = re.compile(r'(?:[\^*/√+<>≤≥≠±\xd7·÷|{_-]|\w\(|\b(?:sqrt|log|ln|sin|cos|tan))\s*\Z')
FORMULA_AFTER = re.compile(
    rf"\s*(?:[\^*!√π<>≤≥≠±\xd7·÷|{{_\\]|[-+/]\s*\(?{LETTER}|['\u2019]s\b|(?![mghCFK]|(?:a|I)\s+\w\w){LETTER}"
    r'|(?i:pi|sqrt|log|ln|sin|cos|tan|squared|cubed|and (?:a|one|two|three))\b)'
)
JOINS = ('=', ':', '(')  # after these, a sign followed by a space belongs to the number

# Markup around a number.
FRACTION = re.compile(r'\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}')  # \frac{1}{2}
WRAPPED = re.compile(r'\\(?:text|mathrm|mathbf|boxed|operatorname)\s*\{([^{}]*)\}')  # \text{5}
INLINE = re.compile(r'(?<!\\)(\$\$?)((?:\\.|[^$\\])+)\1(?!\d)')  # $5$, but not $5 and $6
BOLD = re.compile(r'(?<![\w*])(\*\*?)([^\s*](?:[^*]*[^\s*])?)\1(?![\w*])')  # **5**
MINUS = re.compile(r'\b(?:minus|negative)\s+(?=[$€£]?[\d.])', re.IGNORECASE)  # minus 5
DASHES = str.maketrans(
    {
        # minus sign, hyphen, non-breaking hyphen, en dash
        '\u2212': '-',
        '\u2010': '-',
        '\u2011': '-',
        '\u2013': '-',
        # no-break spaces, and TeX's
        '\u00a0': ' ',
        '\u202f': ' ',
        '~': ' ',
    }
)
NON_FINITE_GENERATION = 'the model returned logits that are not finite numbers'

PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + '\u2018\u2019\u00b4`', ' '))
ARTICLES = re.compile(r'\b(a|an|the)\b')
ARTICLE = re.compile('a|an|the')
# At the start of an answer, before anything but the word that an article belongs to.
STANDING_ARTICLE = re.compile(
    r'[\W_]*(?:(?:a|an|the)[ \t]+)*?(a|an|the)\b(?![ \t]+(?!(?:because|since|as|is|and|or|but)\b)["\']?\w)',
    re.IGNORECASE,
)
# Signs that normalization drops but formulas depend on; FORMULA tells formulas from 'F-16' and 'War + Peace'.
SIGN = re.compile(r'[-+<>=^*/!≤≥≠±]|(?<=\d)\.(?=\d)')
FORMULA = re.compile(r'\\|\$.*\$|[<>=^√≤≥≠±]|\(.*[-+*/].*\)|[\d)]\s?[!*/]|[*/]\s?[\d(]|[\d)]\s[-+]\s|\s[-+]\s[\d(]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number and the unit after it, '' without one; `alone` if nothing but a full stop is around them."""

    value: Fraction
    unit: str
    alone: bool

    def agrees_with(self, other: Quantity) -> bool:
        """Return whether the numbers are equal, and the units if both have one."""
        return self.value == other.value and (not self.unit or not other.unit or self.unit == other.unit)


@lru_cache(maxsize=65536)
def number_in(text: str) -> Quantity | None:
    """Return the only number in a text; None if it has none, several, or one that is part of a formula."""
    text = without_number_markup(text)
    number = NUMBER.search(text)
    if number is None or len(number[0]) > MAX_CHARACTERS or int(number['divisor'] or 1) == 0:
        return None
    before, after = text[: number.start()], text[number.end() :]
    has_other_numbers = any(character.isnumeric() for character in before + after)
    if has_other_numbers or not has_own_sign(number, before):
        return None

    # An amount of money has its unit before it; a word after it is no unit.
    currency = number['money']
    after_number = UNIT.match(after)
    name = after_number['unit'] if after_number else ''
    rest = after[after_number.end() :] if after_number and not currency else after
    unit = unit_called((currency or name).rstrip('.'))

    if FORMULA_BEFORE.search(before) or FORMULA_AFTER.match(after) or FORMULA_AFTER.match(rest):
        return None
    if after[:1].isalpha() and (currency or not is_known(unit)):  # $5K, 18th
        return None
    if currency and len(name) == 1:  # £5 m
        return None
    return Quantity(value=value_of(number), unit=unit, alone=not before.strip() and rest.strip() in ('', '.'))


def value_of(number: re.Match[str]) -> Fraction:
    """Return the value of a match of NUMBER."""
    is_negative = '-' in (number['sign'], number['inner'])
    digits = number['number'].replace(',', '')
    scale = SCALES.get((number['scale'] or '').lower(), 1)
    value = Fraction(digits) * scale / int(number['divisor'] or 1)
    return -value if is_negative else value


def has_own_sign(number: re.Match[str], before: str) -> bool:
    """Return whether the text before a number's digits is its sign, if anything, and not an operation."""
    if number['sign'] and number['inner']:  # two signs: -$-5
        return False
    is_apart = number['sign'] and number['gap']  # as in 3 - 5
    return not is_apart or not before.strip() or before.rstrip().endswith(JOINS)


@lru_cache(maxsize=65536)
def quantity_of(gold: str) -> Quantity | None:
    """Return a gold answer that is a number, with a currency or unit; None if it is anything else."""
    quantity = number_in(gold)
    if quantity is None or not quantity.alone or not is_known(quantity.unit):
        return None
    return quantity


def without_number_markup(text: str) -> str:
    """Return a text without the markup that LaTeX and Markdown put around a number."""
    # Fonts: \text{5}, $5$, **5**.
    text = WRAPPED.sub(r'\1', text)
    text = INLINE.sub(r'\2', text)
    text = BOLD.sub(r'\2', text)

    # Fractions; a mixed number, 1\frac{1}{2}, is two numbers.
    text = re.sub(r'(?<=\d)(?=\s*\\[dt]?frac)', ' ', text)
    text = FRACTION.sub(r'\1/\2', text)

    # Separators of thousands, spacing, escapes and dashes.
    text = text.replace('{,}', ',')
    text = re.sub(r'\\[()\[\],!;:]', '', text)
    text = re.sub(r'\\([%$ ])', r'\1', text)
    text = text.translate(DASHES)

    # Words for signs.
    text = re.sub(r'(?i:\bper cent\b)', 'percent', text)
    return MINUS.sub('-', text)


def unit_called(name: str) -> str:
    """Return the unit of a name: one spelling for all names of a known unit, else the name in lower case."""
    parts = [one_unit(part) for part in re.split(r'/| per ', name)]
    if parts[0] in CURRENCIES:
        return parts[0]
    unit = '/'.join(parts)
    return UNITS.get(unit, unit)


def one_unit(name: str) -> str:
    """Return the unit of a name without a division."""
    # Single letters differ by case: C is Celsius, K Kelvin, and k no unit.
    lower = name.lower().replace(' ', '') if len(name) > 1 else name
    with_degrees = lower.replace('°c', '°C').replace('°f', '°F')
    singular = lower.removesuffix('s')
    return UNITS.get(with_degrees) or UNITS.get(singular, lower)


def is_known(unit: str) -> bool:
    """Return whether a unit is empty or in UNITS."""
    return not unit or all(part in UNITS for part in unit.split('/'))


def stop_position(text: str, rule: StopRule, start: int = 0) -> int | None:
    """Return the end of a generation, None if nothing stops it. Stop strings that begin before `start` are ignored."""
    ends: list[int | None] = []
    for word in rule.strings:
        ends.append(text.find(word, start))
    if rule.answer_end:
        ends.append(answer_position(text, rule))
    if rule.program is not None and (start == 0 or rule.program.may_end(text, start)):
        ends.append(rule.program.position(text))
    return min((end for end in ends if end is not None and end >= 0), default=None)


def answer_position(text: str, rule: StopRule) -> int | None:
    """Return the end of the answer in a generation, None if there is none; white space before it is no answer."""
    delimiter = delimiter_pattern(rule.answer_delimiter).search(text)
    if delimiter is None:
        return None
    begin = delimiter.end()
    rest = text[begin:]
    begin += len(rest) - len(rest.lstrip())
    end = text.find(rule.answer_end, begin)
    return None if end < 0 else end


def cut_at_stops(text: str, rule: StopRule) -> str:
    """Return a generation truncated at its stop.

    With `as_pattern` the strings form one regular expression, and the text ends at its first match (llm-foundry 0.22,
    `eval/metrics/nlp.py:InContextLearningGenerationExactMatchAccuracy`).
    """
    if rule.as_pattern:
        return re.split('|'.join(rule.strings), text)[0] if rule.strings else text
    return text[: stop_position(text, rule)]


def answer_in(text: str, cot_delimiter: str, *, reference: bool) -> str | None:
    """Return the text after the last chain-of-thought delimiter of a generation, None if it has no delimiter.

    As `reference` the delimiter is found only with its own white space, as in llm-foundry.
    """
    if reference:
        _, delimiter, answer = text.rpartition(cot_delimiter)
        return answer if delimiter else None
    ends = [delimiter.end() for delimiter in delimiter_pattern(cot_delimiter).finditer(text)]
    return text[ends[-1] :] if ends else None


@lru_cache(maxsize=64)
def delimiter_pattern(delimiter: str) -> re.Pattern[str]:
    """Return the pattern of a delimiter in whatever white space a model writes it.

    ' #### ' is also found at the beginning of a line, before the end of one, and without any space. A delimiter that is
    nothing but white space stands for itself.
    """
    words = delimiter.split()
    if not words:
        return re.compile(re.escape(delimiter))
    pattern = r'\s+'.join(map(re.escape, words))
    # Without the white space it may still not be a part of something longer: of a word, or of #####.
    if delimiter[0].isspace():
        pattern = f'(?<!{neighbor(words[0][0])}){pattern}'
    if delimiter[-1].isspace():
        pattern = rf'{pattern}(?!{neighbor(words[-1][-1])})\s*'
    return re.compile(pattern)


def neighbor(character: str) -> str:
    """Return the pattern of the characters beside this one that make a longer word or sign of it."""
    return r'\w' if re.match(r'\w', character) else re.escape(character)


@lru_cache(maxsize=65536)
def normalize_answer(text: str) -> str:
    """Return a text in lower case without punctuation, articles and extra white space, as in TriviaQA's evaluation.

    Minus signs and decimal points are dropped as well.
    """
    return ' '.join(ARTICLES.sub(' ', words_in(text)).split())


def words_in(text: str) -> str:
    """Return a text in lower case without punctuation."""
    return text.replace('_', ' ').lower().translate(PUNCTUATION)


@lru_cache(maxsize=65536)
def normalize_words(text: str) -> str:
    """Return a text as `normalize_answer` does, with its last word even if that is spelled like an article.

    An article precedes a word, so the last one is a name: the letter A, vitamin A.
    """
    before, _, last = words_in(text).rstrip().rpartition(' ')
    if not ARTICLE.fullmatch(last):
        return normalize_answer(text)
    return f'{normalize_answer(before)} {last}'.strip()


def has_prefix_of(answer: str, golds: Iterable[str], *, normalize: bool, reference: bool) -> bool:
    """Return whether an answer starts with one of the gold answers, both normalized or stripped.

    A gold answer that is empty after normalization must be matched in full, except for case and surrounding white
    space. With `reference` it matches everything, as in llm-foundry, where 'A' is empty too.
    """
    clean = normalize_answer if normalize else str.strip
    given = clean(answer)
    for gold in golds:
        wanted = clean(gold)
        ends_like_article = normalize and not reference and normalize_words(gold) != wanted
        if ends_like_article:
            is_right = starts_with_name(answer, normalize_words(gold).split())
        elif wanted or reference:
            is_right = given.startswith(wanted)
        else:
            is_right = is_same_text(answer, gold)
        if is_right:
            return True
    return False


def starts_with_name(answer: str, name: Sequence[str]) -> bool:
    """Return whether an answer starts with these words, of which the last is spelled like an article.

    Other articles do not matter. A name of one word must stand by itself: 'A) 12 cm', 'A because', but not 'a dog'.
    """
    if len(name) == 1:
        alone = STANDING_ARTICLE.match(answer)
        return alone is not None and alone[1].lower() == name[0]
    num_matched = 0  # words of the name
    for word in words_in(answer).split():
        if word == name[num_matched]:
            num_matched += 1
            if num_matched == len(name):
                return True
        elif not ARTICLE.fullmatch(word):
            return False
    return False


def is_strict_match(answer: str, golds: Iterable[str], *, normalize: bool) -> bool:
    """Return whether an answer is one of the gold answers, with nothing before or after.

    Both are normalized; if the gold answer is a number they must have the same value, if it is a formula the same
    signs. Without normalization, only surrounding white space and a final full stop are ignored.
    """
    return any(is_strictly(answer, gold, normalize=normalize) for gold in golds)


def is_strictly(answer: str, gold: str, *, normalize: bool) -> bool:
    """Return whether an answer strictly matches this gold answer."""
    if not normalize:
        return bool(gold.strip()) and trimmed(answer) == trimmed(gold)
    if not normalize_words(gold):
        return is_same_text(answer, gold)
    if normalize_words(answer.translate(DASHES)) != normalize_words(gold.translate(DASHES)):
        return False
    quantity = quantity_of(gold)
    if quantity is not None:
        given = number_in(answer)
        return given is not None and given.agrees_with(quantity)
    if not FORMULA.search(gold.translate(DASHES)):
        return True
    signs_of_answer = SIGN.findall(without_number_markup(answer))
    signs_of_gold = SIGN.findall(without_number_markup(gold))
    return signs_of_answer == signs_of_gold


def is_numeric_match(answer: str, golds: Iterable[str], *, normalize: bool) -> bool:
    """Return whether an answer's number equals a gold answer's, or it strictly matches a gold that is not a number.

    The number is the only one in the first line that is not blank. Words around it do not matter, but its unit must
    not contradict the gold's.
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    given = number_in(lines[0]) if lines else None
    for gold in golds:
        wanted = quantity_of(gold)
        if wanted is None:
            if is_strictly(answer, gold, normalize=normalize):
                return True
        elif given is not None and given.agrees_with(wanted):
            return True
    return False


def score_named(text: str, choices: Sequence[str], gold: int) -> Score:
    """Score the choice that a generation starts with, ignoring case: the longest if several match, 0 if none does."""
    given = text.strip().lower()
    names = [choice.strip().lower() for choice in choices]
    named = []
    for index, name in enumerate(names):
        # Not a part of a word or a number: 'no' in 'not', '1' in '1.5'.
        if name and re.match(rf'{re.escape(name)}(?!\w|[.,]\d)', given):
            named.append(index)
    if not named:
        return Score(value=0.0, answer=text.strip(), reason='the generation starts with none of the choices')
    longest = max(named, key=lambda index: len(choices[index].strip()))
    return Score(value=float(longest == gold), predicted=longest, answer=text.strip())


def is_same_text(answer: str, gold: str) -> bool:
    """Return whether two texts are equal except for case and surrounding white space; an empty one equals nothing."""
    return bool(gold.strip()) and answer.strip().lower() == gold.strip().lower()


def trimmed(text: str) -> str:
    """Return a text without surrounding white space and a final full stop."""
    return text.strip().removesuffix('.').rstrip()
