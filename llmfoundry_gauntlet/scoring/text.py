"""Score generations by their text: where a generation ends, what its answer is, and whether that is right."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from functools import lru_cache

from llmfoundry_gauntlet.scoring.numbers import DASHES, number_in, plain, quantity_of
from llmfoundry_gauntlet.types import Score, StopRule

NON_FINITE_GENERATION = 'the model returned logits that are not finite numbers'

PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + '\u2018\u2019\u00b4`', ' '))
ARTICLES = re.compile(r'\b(a|an|the)\b')
# Signs that normalisation drops and a formula depends on; what tells a formula from 'F-16' and 'War + Peace'.
SIGN = re.compile(r'[-+<>=^*/!≤≥≠±]|(?<=\d)\.(?=\d)')
# What has braces that count for nothing, in C++ and JavaScript, also while it is not finished; and braces.
BRACES = re.compile(
    r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*(?:"|\\?\Z|(?=\n))|'
    r"'(?:\\.|[^'\\\n])*(?:'|\\?\Z|(?=\n))|`(?:\\.|[^`\\])*(?:`|\\?\Z)|[{}]",
    re.DOTALL,
)
FORMULA = re.compile(r'\\|\$.*\$|[<>=^√≤≥≠±]|\(.*[-+*/].*\)|[\d)]\s?[!*/]|[*/]\s?[\d(]|[\d)]\s[-+]\s|\s[-+]\s[\d(]')


def stop_position(text: str, rule: StopRule, start: int = 0) -> int | None:
    """Return where a generation ends, None if nothing stops it. Strings that begin before `start` are not looked for."""
    found = [place for word in rule.strings if (place := text.find(word, start)) >= 0]
    if rule.answer_end:
        found += answer_position(text, rule)
    if rule.closes_block and '}' in text[start:]:
        found += block_end(text)
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


def block_end(text: str) -> list[int]:
    """Return where the first closing brace ends that text did not open, comments and strings aside, or nothing."""
    depth = 0
    for found in BRACES.finditer(text):
        depth += {'{': 1, '}': -1}.get(found[0], 0)
        if depth < 0:
            return [found.end()]
    return []


def cut_at_stops(text: str, rule: StopRule) -> str:
    """Return a generation up to its stop.

    As a pattern the strings are one regular expression, at whose first match the text ends (llm-foundry 0.22,
    `eval/metrics/nlp.py:InContextLearningGenerationExactMatchAccuracy`).
    """
    if rule.as_pattern:
        return re.split('|'.join(rule.strings), text)[0] if rule.strings else text
    return text[: stop_position(text, rule)]


def answer_in(text: str, cot_delimiter: str) -> str:
    """Return what follows the last delimiter of a chain of thought; the whole generation if there is none."""
    return text.split(cot_delimiter)[-1] if cot_delimiter else text


@lru_cache(maxsize=65536)
def normalize_answer(text: str) -> str:
    """Return lower case without punctuation, articles and surplus white space, as in TriviaQA's evaluation.

    Minus signs and decimal points are dropped as well.
    """
    words = text.replace('_', ' ').lower().translate(PUNCTUATION)
    return ' '.join(ARTICLES.sub(' ', words).split())


def has_prefix_of(answer: str, golds: Iterable[str], *, normalize: bool, reference: bool) -> bool:
    """Return whether an answer begins with one of the right answers, both normalised or stripped.

    A right answer of which nothing is left when normalised must be met in full, but for case and white space around
    it. With `reference` it accepts whatever there is, as in llm-foundry.
    """
    clean = normalize_answer if normalize else str.strip
    given = clean(answer)
    for gold in golds:
        wanted = clean(gold)
        if given.startswith(wanted) if wanted or reference else is_same_text(answer, gold):
            return True
    return False


def is_strict_match(answer: str, golds: Iterable[str], *, normalize: bool) -> bool:
    """Return whether an answer is one of the right answers, nothing before or after.

    Normalised both, and of the same value where the right answer is a number, with the same signs where it is a
    formula; not normalised but for white space around them and a full stop at the end.
    """
    return any(is_strictly(answer, gold, normalize=normalize) for gold in golds)


def is_strictly(answer: str, gold: str, *, normalize: bool) -> bool:
    """Return whether an answer is this right answer."""
    if not normalize:
        return bool(gold.strip()) and trimmed(answer) == trimmed(gold)
    wanted = normalize_answer(gold)
    if not wanted:
        return is_same_text(answer, gold)
    if normalize_answer(answer.translate(DASHES)) != normalize_answer(gold.translate(DASHES)):
        return False
    quantity = quantity_of(gold)
    if quantity is not None:
        return (found := number_in(answer)) is not None and found.agrees_with(quantity)
    return not FORMULA.search(gold.translate(DASHES)) or SIGN.findall(plain(answer)) == SIGN.findall(plain(gold))


def is_numeric_match(answer: str, golds: Iterable[str], *, normalize: bool) -> bool:
    """Return whether an answer's number is that of a right answer, or it matches strictly one that is no number.

    The answer is its first line that is not blank, and has a single number; words around it do not matter, but a
    unit must not contradict that of the right answer.
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
    """Score the choice that a generation begins with, ignoring case; the longest of several. None is wrong."""
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
    """Return whether two texts are equal but for case and white space around them; an empty one is equal to none."""
    return bool(gold.strip()) and answer.strip().lower() == gold.strip().lower()


def trimmed(text: str) -> str:
    """Return a text without surrounding white space and a final full stop."""
    return text.strip().removesuffix('.').rstrip()
