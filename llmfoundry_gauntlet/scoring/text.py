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
# The names of each unit in the singular. After an amount of money, 'a day' or 'per hour' is ignored.
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

MAX_CHARACTERS = 1000  # of a number; Python parses at most 4,300 digits
DIGITS = r'(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+'
NUMBER = re.compile(
    r'(?<![\w.,])(?P<sign>[-+]?)(?P<gap>\s?)(?:(?P<money>[$€£]|(?i:rs\b\.?|usd\b|eur\b))\s?)?(?P<inner>-?)'
    rf'(?P<number>{DIGITS})(?:\s?/\s?(?P<divisor>\d+))?(?!\d)'
    r'(?:\s?(?P<scale>(?i:hundred|thousand|million|billion|trillion|dozen|mn|bn)|k)s?(?![^\W_]))?'
)
UNIT = re.compile(r'\s*(?P<unit>[%$€£]|°\s?[CF]?(?![^\W_])|[^\W\d_]{2,}(?:(?:/| per )[^\W\d_]+)?|[mghCFK](?![^\W_]))')

# Context that makes a number part of a formula, or of another number.
LETTER = r'[^\W\d_](?![^\W_])'
FORMULA_BEFORE = re.compile(r'(?:[\^*/√+<>≤≥≠±\xd7·÷|{_-]|\w\(|\b(?:sqrt|log|ln|sin|cos|tan))\s*\Z')
FORMULA_AFTER = re.compile(
    rf"\s*(?:[\^*!√π<>≤≥≠±\xd7·÷|{{_\\]|[-+/]\s*\(?{LETTER}|['\u2019]s\b|(?![mghCFK]|(?:a|I)\s+\w\w){LETTER}"
    r'|(?i:pi|sqrt|log|ln|sin|cos|tan|squared|cubed|and (?:a|one|two|three))\b)'
)
JOINS = ('=', ':', '(')  # after these, a sign followed by a space belongs to the number

FRACTION = re.compile(r'\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}')
WRAPPED = re.compile(r'\\(?:text|mathrm|mathbf|boxed|operatorname)\s*\{([^{}]*)\}')
INLINE = re.compile(r'(?<!\\)(\$\$?)((?:\\.|[^$\\])+)\1(?!\d)')
BOLD = re.compile(r'(?<![\w*])(\*\*?)([^\s*](?:[^*]*[^\s*])?)\1(?![\w*])')
MINUS = re.compile(r'\b(?:minus|negative)\s+(?=[$€£]?[\d.])', re.IGNORECASE)
# minus sign, hyphen, non-breaking hyphen, en dash, no-break space, TeX's space
DASHES = str.maketrans(
    {'\u2212': '-', '\u2010': '-', '\u2011': '-', '\u2013': '-', '\u00a0': ' ', '\u202f': ' ', '~': ' '}
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
    """Return whether the text before a number's digits is its sign, if anything, and not an operation."""
    if found['sign'] and found['inner']:
        return False
    return not (found['sign'] and found['gap']) or not before.strip() or before.rstrip().endswith(JOINS)


@lru_cache(maxsize=65536)
def quantity_of(gold: str) -> Quantity | None:
    """Return a gold answer that is a number, with a currency or unit; None if it is anything else."""
    quantity = number_in(gold)
    if quantity is None or not quantity.alone or not is_known(quantity.unit):
        return None
    return quantity


def without_number_markup(text: str) -> str:
    """Return a text without the markup that LaTeX and Markdown put around a number."""
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
    """Return whether a unit is empty or in UNITS."""
    return not unit or all(part in UNITS for part in unit.split('/'))


def stop_position(text: str, rule: StopRule, start: int = 0) -> int | None:
    """Return the end of a generation, None if nothing stops it. Stop strings that begin before `start` are ignored."""
    found = [place for word in rule.strings if (place := text.find(word, start)) >= 0]
    if rule.answer_end:
        found += answer_position(text, rule)
    if rule.program is not None and (start == 0 or rule.program.may_end(text, start)):
        end_of_program = rule.program.position(text)
        found += [] if end_of_program is None else [end_of_program]
    return min(found, default=None)


def answer_position(text: str, rule: StopRule) -> list[int]:
    """Return the end of the answer in a generation, if there is one."""
    begin = text.find(rule.answer_delimiter)
    if begin < 0:
        return []
    begin += len(rule.answer_delimiter)
    rest = text[begin:]
    begin += len(rest) - len(rest.lstrip())
    end = text.find(rule.answer_end, begin)
    return [end] if end >= 0 else []


def cut_at_stops(text: str, rule: StopRule) -> str:
    """Return a generation truncated at its stop.

    With `as_pattern` the strings form one regular expression, and the text ends at its first match (llm-foundry 0.22,
    `eval/metrics/nlp.py:InContextLearningGenerationExactMatchAccuracy`).
    """
    if rule.as_pattern:
        return re.split('|'.join(rule.strings), text)[0] if rule.strings else text
    return text[: stop_position(text, rule)]


def answer_in(text: str, cot_delimiter: str) -> str:
    """Return the text after the last chain-of-thought delimiter; the whole generation if there is none."""
    return text.split(cot_delimiter)[-1] if cot_delimiter else text


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
    return f'{normalize_answer(before)} {last}'.strip() if ARTICLE.fullmatch(last) else normalize_answer(text)


def has_prefix_of(answer: str, golds: Iterable[str], *, normalize: bool, reference: bool) -> bool:
    """Return whether an answer starts with one of the gold answers, both normalized or stripped.

    A gold answer that is empty after normalization must be matched in full, except for case and surrounding white
    space. With `reference` it matches everything, as in llm-foundry, where 'A' is empty too.
    """
    clean = normalize_answer if normalize else str.strip
    given = clean(answer)
    for gold in golds:
        wanted = clean(gold)
        if normalize and not reference and normalize_words(gold) != wanted:
            if starts_with_name(answer, normalize_words(gold).split()):
                return True
        elif given.startswith(wanted) if wanted or reference else is_same_text(answer, gold):
            return True
    return False


def starts_with_name(answer: str, name: Sequence[str]) -> bool:
    """Return whether an answer starts with these words, of which the last is spelled like an article.

    Other articles do not matter. A name of one word must stand by itself: 'A) 12 cm', 'A because', but not 'a dog'.
    """
    if len(name) == 1:
        alone = STANDING_ARTICLE.match(answer)
        return alone is not None and alone[1].lower() == name[0]
    num_found = 0
    for word in words_in(answer).split():
        if word == name[num_found]:
            num_found += 1
            if num_found == len(name):
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
        return (found := number_in(answer)) is not None and found.agrees_with(quantity)
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
    named = [
        index
        for index, choice in enumerate(choices)
        if (name := choice.strip().lower()) and re.match(rf'{re.escape(name)}(?!\w|[.,]\d)', given)
    ]
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
