"""The letter chosen by a generation that answers a lettered multiple-choice question, extracted by two rules.

`tolerant_letter` reads what people would read and leaves ambiguous answers open: it requires a statement, or a
generation that is nothing but its answer, and never takes a letter from running text. Scoring is by letter, so a letter
beside another option's text counts. Not covered: numerals instead of letters, other alphabets, other languages than
English.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

PHRASE = 'the best answer is'
UNSAID = ''  # a statement without a letter, such as 'the best answer is that of the author'

PLAIN = str.maketrans('\u2018\u2019\u201c\u201d\u00b4', "''\"\"'", '*`$')
TAGS = re.compile(r'</?(?:b|i|u|p|em|br|code|span|strong)\s*/?>|</answer>', re.IGNORECASE)
WRAPPED = re.compile(r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf)\s*\{([^{}]*)\}')
MATHS = re.compile(r'\\[()\[\]]')

# What a statement begins with; 'is' and 'be' commit an answer to what follows, the other endings may lead anywhere.
ABOUT = r'(?:\s+(?:choice|option|letter|here))?(?:\s+(?:to|for|among|from|of)(?:\s+\w+){1,4}?)?\s*'
ENDING = r'(?P<commits>\bis\b(?!\s*$)|\b(?:would|must|should|has\s+to)\s+be\b)|["\']?\s*[:=]|\s[-\u2013\u2014]\s'
BEST = re.compile(rf'[Bb](?i:est\s+answer{ABOUT}(?:{ENDING}))')  # a set of letters first makes a search fast
OTHER = re.compile(
    rf'(?:\banswer|\b(?:correct|right|best|final)\s+(?:option|choice)){ABOUT}(?:{ENDING})|'
    r"\bI(?:'d|'ll|\s+would|\s+will)?\s+(?:choose|pick|select|go\s+(?:with|for))\b|<answer>|\\f?boxed\s*(?=\{)",
    re.IGNORECASE,
)
# 'Option B is correct', 'so C is the best answer'; 'if B is ...' and 'vitamin C is ...' are none.
BEFORE = re.compile(
    r'(?:(?:^|[.!?,;:]\s|\b(?:[Ss]o|[Tt]herefore|[Tt]hus|[Hh]ence|that|think|believe|guess)\s)[ \t]*)'
    r'(?P<noun>(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+|(?=[(\[]))?[(\["\']?(?P<letter>[A-Z])[)\]"\']?\s+is\s+'
    r'(?:the\s+)?(?:correct|right|best)\b(?P<answer>\s+(?:answer|option|choice)\b)?',
    re.MULTILINE,
)
PLACEHOLDER = re.compile(r'[\s:"\'(\[{<]*(?:(?:the_)?answer_letter|(?:insert\s+)?letter\s*[)\]}>]|_)', re.IGNORECASE)

FILLER = (
    r'[\s:=,"\'(\[{<>\u2013\u2014]|-(?=\s)|\.\.\.|\\f?boxed\b|\b(?:therefore|thus|indeed|clearly|likely|most\s+likely|'
    r'probably|definitely|obviously|actually|simply|still)\b'
)
CLOSE = r'(?P<close>(?:[)\]}>]|["\'](?!\w))*)'
NOUN = r'(?:the\s+)?\b(?:option|choice|letter|answer|alternative)\b'
LETTER = re.compile(rf'(?:{FILLER})*+(?P<noun>(?i:{NOUN}))?(?:{FILLER})*+(?P<letter>[A-Za-z]){CLOSE}')
# What shows that a letter is part of a word, a formula or a name: 'e.g.', 'B12', 'C++', "A's", 'D-glucose', 'B = 5'.
PART = re.compile(r"[\w+#%\u00b0^\\{]|[.,]\d|\.[A-Za-z](?!\w)|[-\u2013']\w|[ \t]*[=<>+*^\u2264\u2265\u2260\u2248]")
JOINED = re.compile(
    r'[ \t.,;?!]*(?:(?:\band/or\b|\band\b|\bor\b|\bnor\b|\bto\b|\bthrough\b|\bvs\b\.?|[&/,;+]|[\u2013-](?=\w))[ \t]*)+'
    r'(?:(?:maybe|perhaps|possibly|also|even|both|either)\s+)*(?:(?:option|choice|answer|letter)\s+)?["\'(\[]*'
    rf'(?P<letter>[A-Za-z]){CLOSE}'
)
OPEN_END = re.compile(r'[ \t,.?]*\bor\b', re.IGNORECASE)
ANOTHER = re.compile(r'\b(?:and|or)\s+(?:(?:option|choice)\s+)?[(\[]([A-Za-z])[)\]]')
CLAUSE_END = re.compile(r'[.;,]\s|\n|\b(?:because|since|as|while|whereas|but|not)\b')
# What may follow a bare 'A', 'I' or small letter, which else is an article, a pronoun or a name.
REASONED = r'(?:because|since|as|due|given|based|which|where|and|but|so|thus|therefore|according|considering|is)\b'
STANDS = re.compile(rf'\s*$|[ \t]*\n|\s*[.,;:!?]|\s+{REASONED}', re.IGNORECASE)
CAPITAL_STANDS = re.compile(r'\s*[(\[]|\s+[-\u2013\u2014]\s')
NOTE = re.compile(r'\s*[(\[][A-Za-z][)\]]\W*$')
OPENERS = re.compile(r'^(?:[\s:=,"\'({\[]|\\f?boxed)+')
AFTER_TEXT = re.compile(
    r'["\'}\])]*\s*(?:[(\[](?P<letter>[a-z])[)\]])?\s*(?:$|[.;!](?:\s|$)|[,:]?\s*(?:because|since|as|due|which)\b)'
)


def reference_letter(completion: str) -> str:
    """Return what SCORE in lm-eval 0.4.13 extracts from a generation, which is not stripped first.

    After the last 'the best answer is ' up to a line break or a space, without punctuation, in upper case; without the
    phrase the whole generation, in upper case. For numbered options it would translate numerals as well.
    """
    lowered = completion.lower()
    if PHRASE not in lowered:
        return completion.upper()
    said = lowered.rpartition(f'{PHRASE} ')[2].partition('\n')[0].partition(' ')[0]
    return re.sub('[^a-z0-9]', '', said).upper()


def tolerant_letter(completion: str, options: Sequence[str]) -> str | None:
    """Return the letter of the option that a generation chooses, 'A' for the first; None if it chooses none or several.

    The last statement counts: of those with 'best answer', if there are any, else of other usual ones. Without a
    statement the generation, or its first or last line, must be an answer and nothing else. An option's text counts as
    its letter if no other option has the same text.
    """
    text = cleaned(completion)
    texts = [folded(option) for option in options]
    for found in reversed(list(BEST.finditer(text))):
        if PLACEHOLDER.match(text, found.end()):
            continue
        said = said_in(text[found.end() :], texts)
        if said != UNSAID:
            return said
        if found['commits']:
            return other_statement(text, texts, found.end()) or None
    said = other_statement(text, texts, 0)
    return whole_reply(text.strip(), texts) if said == UNSAID else said


def other_statement(text: str, texts: Sequence[str], start: int) -> str | None:
    """Return the letter of the last statement other than 'the best answer is' that begins at `start` or later."""
    places = [*OTHER.finditer(text, start), *BEFORE.finditer(text, start)]
    for found in sorted(places, key=lambda found: found.end(), reverse=True):
        if found.re is BEFORE:
            if found['noun'] is not None or found['answer']:
                return option_letter(found['letter'], texts)
            continue
        if PLACEHOLDER.match(text, found.end()):
            continue
        said = said_in(text[found.end() :], texts)
        if said != UNSAID:
            return said
        if found['commits']:
            return None
    return UNSAID


def said_in(statement: str, texts: Sequence[str]) -> str | None:
    """Return the letter at the beginning of a statement, as itself or by its option's text.

    None if it names several or one beyond the options, UNSAID if it has none.
    """
    named = named_by_text(statement, texts)
    if named != UNSAID:
        return named
    found = LETTER.match(statement)
    if found is None:
        return UNSAID
    letter, rest = found['letter'], statement[found.end() :]
    if is_joined(letter, rest):
        return None
    if PART.match(rest) and not found['close']:
        return UNSAID
    if not found['close'] and not found['noun'] and not stands_alone(letter, rest):
        return UNSAID
    clause = CLAUSE_END.split(rest, maxsplit=1)[0]
    if OPEN_END.match(rest) or {other.upper() for other in ANOTHER.findall(clause)} - {letter.upper()}:
        return None
    return option_letter(letter, texts)


def is_joined(letter: str, rest: str) -> bool:
    """Return whether another letter follows as an equal: 'A or B', '(A) and (C)', 'B, D', 'A-C'."""
    found = JOINED.match(rest)
    if found is None or found['letter'].upper() == letter.upper():
        return False
    after = rest[found.end() :]
    if found['close']:
        return True
    if PART.match(after) or (found['letter'].islower() and letter.isupper()):
        return False
    return stands_alone(found['letter'], after)


def stands_alone(letter: str, rest: str) -> bool:
    """Return whether a bare letter is one, by what follows: 'A' and 'I' are words as well, and small letters names."""
    if letter.isupper() and letter not in 'AI':
        return True
    return bool(STANDS.match(rest) or (letter.isupper() and CAPITAL_STANDS.match(rest)))


def named_by_text(statement: str, texts: Sequence[str]) -> str | None:
    """Return the letter of the option whose text a statement is, or begins with before a reason; else UNSAID.

    The longest text counts; None if several options have it, or if a letter in brackets contradicts it. Texts that are
    a single letter do not count here.
    """
    wholes, lines = set(), set()
    for begun in (statement.lstrip(' \n\t:='), OPENERS.sub('', statement)):
        line = folded(begun.partition('\n')[0])
        lines.add(line)
        wholes |= {folded(begun), line, line.removesuffix('}'), line.rstrip('}])')}
    longest, suffix = '', None
    for text in set(texts):
        if len(text) <= len(longest) or is_letter(text):
            continue
        reasons = [AFTER_TEXT.match(line, len(text)) for line in lines if line.startswith(text)]
        if text in wholes:
            longest, suffix = text, None
        elif any(reasons):
            longest, suffix = text, next(filter(None, reasons))['letter']
    if not longest:
        return UNSAID
    places = [string.ascii_uppercase[index] for index, text in enumerate(texts) if text == longest]
    if suffix is not None:
        return suffix.upper() if suffix.upper() in places else None
    return places[0] if len(places) == 1 else None


def whole_reply(text: str, texts: Sequence[str]) -> str | None:
    """Return the letter of a generation without a statement: it, its first or its last line is just an answer."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if folded(NOTE.sub('', text)) in texts and (named := named_by_text(text, texts)) != UNSAID:
        return named
    alone = {line: letter for line in lines if (letter := lone_letter(line, texts)) is not None}
    if alone:
        at_an_end = lines[0] in alone or lines[-1] in alone
        return (
            option_letter(alone.popitem()[1], texts)
            if at_an_end and len({letter.upper() for letter in alone.values()}) == 1
            else None
        )
    found = re.match(r'[(\[]?([A-Z])\s*,?\s+(?:because|since)\b', text)
    return option_letter(found[1], texts) if found else None


def lone_letter(line: str, texts: Sequence[str]) -> str | None:
    """Return the letter of a line that is a letter, 'option B' or a letter with its text: 'B) Paris' or 'B. Paris'.

    After a full stop, a colon or a dash the text must be that option's: 'A: ...' may be an answer, 'E. coli' a name.
    """
    found = LETTER.match(line)
    if found is None or is_joined(found['letter'], line[found.end() :]):
        return None
    letter, rest = found['letter'], line[found.end() :]
    if not rest.strip(' .,:;!'):
        return letter
    if ')' in found['close'] and letter.isupper():
        return letter
    index = string.ascii_uppercase.find(letter)
    marked = re.match(r'\s*[.:\-\u2013\u2014]\s*', rest)
    if marked and 0 <= index < len(texts) and folded(rest[marked.end() :]) == texts[index]:
        return letter
    return None


def option_letter(letter: str, texts: Sequence[str]) -> str | None:
    """Return a letter as one of the options', or the one option with that text; None for another.

    A lower-case letter that is both, such as 'c' if an option is 'c', may mean either.
    """
    places = [string.ascii_uppercase[index] for index, text in enumerate(texts) if text == letter.lower()]
    if letter.upper() in string.ascii_uppercase[: len(texts)]:
        return letter.upper() if letter.isupper() or places in ([], [letter.upper()]) else None
    return places[0] if len(places) == 1 else None


def is_letter(text: str) -> bool:
    """Return whether a text is a single Latin letter."""
    return len(text) == 1 and text in string.ascii_letters


def cleaned(text: str) -> str:
    """Return a text without Markdown, HTML, dollar signs and LaTeX fonts, in plain letters and quotes."""
    if not text.isascii():
        text = unicodedata.normalize('NFKC', text)
    text = text.translate(PLAIN).replace('__', '')
    if '<' in text:
        text = TAGS.sub('', text)
    return MATHS.sub('', WRAPPED.sub(r'\1', text)) if '\\' in text else text


@lru_cache(maxsize=65536)
def folded(text: str) -> str:
    """Return a text for comparison: cleaned, lower case, single spaces, without surrounding quotes and full stop."""
    return ' '.join(cleaned(text).casefold().split()).strip('"\' ').rstrip('.').strip('"\' ')
