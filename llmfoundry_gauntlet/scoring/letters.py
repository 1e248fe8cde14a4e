"""Extract the letter that a generation chooses in a lettered multiple-choice question, by either of two rules.

`tolerant_letter` accepts what a human reader would and rejects ambiguous answers: it requires an explicit statement, or
a generation that consists only of its answer, and never takes a letter from running text. Scoring is by letter, so a
letter counts even next to another option's text. Not covered: numerals instead of letters, other alphabets, languages
other than English.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from llmfoundry_gauntlet.scoring.signs import plain_letters, without_signs

PHRASE = 'the best answer is'
MAX_STATEMENT = 1000  # characters of a statement that are read, beside the text of an option
UNSAID = ''  # a statement without a letter, such as 'the best answer is that of the author'

# Quotes, East Asian brackets and full stop; Markdown and dollar signs are dropped.
PLAIN = str.maketrans('\u2018\u2019\u201c\u201d\u3010\u3011\u300c\u300d\u3002', '\'\'""[][].', '*`$')
TAGS = re.compile(r'</?(?:b|i|u|em|strong|code|span)>|</answer>', re.IGNORECASE)
WRAPPED = re.compile(r'\\(?:text|math)[a-z]*\{([^{}]*)\}')  # \textbf{B}
MATHS = re.compile(r'\\[()\[\]]')  # \( and \)

# The beginning of a statement. After 'is' or 'be' the answer must follow; after a colon or dash it need not.
ABOUT = r'(?:\s+(?:choice|option))?(?:\s+(?:to|for|among|from|of)(?:\s+\w+){1,4}?)?\s*'  # 'choice', 'to this question'
POINTS = r'=>|[-=]>|[\u2190-\u21ff]'  # arrows
ENDING = (
    r'(?P<commits>\bis\b|\b(?:would|must|should|has\s+to)\s+be\b)|"?:|\s[-\u2013\u2014]\s|'
    rf'\s*(?:{POINTS}|=)'
)
# 'The best answer is'; searching is fast with a leading character class.
BEST = re.compile(rf'[Bb](?i:est\s+answer{ABOUT}(?:{ENDING}))')
# 'The answer is', 'the right option is'
ANSWER_IS = rf'(?:\banswer|\b(?:correct|right|best|final)\s+(?:option|choice)){ABOUT}(?:{ENDING})'
# "I'd go with"
I_CHOOSE = r"\bI(?:'d|'ll|\s+would|\s+will)?\s+(?:choose|pick|select|go\s+(?:with|for))\b"
OTHER = re.compile(rf'{ANSWER_IS}|{I_CHOOSE}|<answer>|\\boxed', re.IGNORECASE)
# Statements that begin with the letter: 'Option B is correct' and 'so C is the best answer', but not 'if B is ...' or
# 'vitamin C is ...'.
START_OF_CLAUSE = r'(?:^|[.,]\s|\b(?i:so|that|think|believe|thus|therefore)\s)'
BEFORE = re.compile(
    rf'{START_OF_CLAUSE}(?P<noun>(?i:option|choice|answer)\s+|(?=\())?'
    r'\(?(?P<letter>[A-Z])\)?\s+is\s+(?:the\s+)?(?:correct|right|best)(?P<answer>\s+(?:answer|option|choice))?',
    re.MULTILINE,
)

# The letter of a statement, and what is around it: ' therefore option (B)'.
FILLER = r'[\s:"\'(\[{]|[-\u2013\u2014>#]\s|\\boxed|\b(?:therefore|thus|indeed|(?:most\s+)?\w+ly)\b|' + POINTS
CLOSE = r'(?P<close>(?:[)\]}]|["\'](?!\w))*)'
NOUN = r'(?:the\s+)?\b(?:option|choice|letter|answer)\b'
LETTER = re.compile(rf'(?:{FILLER})*+(?P<noun>(?i:{NOUN}))?(?:{FILLER})*+(?P<letter>[A-Za-z]){CLOSE}')
# Follows a letter that is part of a word, a formula or a name: 'e.g.', 'B12', 'C++', "A's", 'D-glucose', 'B = 5',
# 'A. J. P. Taylor'.
PART = re.compile(r"[\w+#^\\]|\.[A-Za-z](?!\w)|\.\s(?:[A-Z]\.\s)+[A-Z]\w|[-']\w|\s*[=<>]")
# Another letter joined to it: ' or B', ', and (C)', '/D'.
JOINED = re.compile(rf'\s*(?:(?:\b(?:and|or)\b|[&/,])\s*)+(?:(?:option|choice)\s+)?["(\[]*(?P<letter>[A-Za-z]){CLOSE}')
OPEN_END = re.compile(r'[\s,.]*\bor\b', re.IGNORECASE)  # 'B. Or C.'
ANOTHER = re.compile(r'\b(?:and|or)\s+\(([A-Z])\)')  # 'Paris and (C)'
REASON = r'(?:because|since|as|due)\b'

# Placeholders for the letter in an instruction. Models, above all young ones, repeat its sentence after their answer.
LEAD = r'(?:[\s:"\'(\[{<]|\\boxed|indeed\b)*+'
BLANK = r'(?i:letter|answer|option|choice|label|insert|your|here|placeholder|blank)'
NO_LETTER = r'(?!\s*["\'(\[:]*\s*[A-WZ]\b)'  # no letter of an option follows
UNKNOWN = re.compile(  # 'X', '(x)'
    rf'{LEAD}(?P<letter>[XY](?!{PART})|[xy](?=["\')\]}}>]*\s*(?:$|\n|[.,:!])))'
)
PLACEHOLDERS = (
    # nothing at the end of the generation, '...', '?', '[]'
    rf'{LEAD}(?:\.?\s*\Z|\.\s|\.\.|\u2026|_|\?|[\])}}>])',
    # '[letter]', '(its letter)', '\boxed{answer}', '<insert your answer here>'
    r'[\s:"\']*(?:\\boxed)?\s*[(\[{<]+(?![^)\]}>\n]*\b[A-WZ]\b)'
    rf'[^)\]}}>\n]{{0,80}}?(?:\b|_){BLANK}(?:\b|_)[^)\]}}>\n]{{0,80}}[)\]}}>]',
    # 'the letter of your choice'
    r'[\s:"\']*(?i:(?:the|its|your|an?|one|right|correct|best|single|chosen|corresponding)\s+)*'
    rf'(?i:(?:the_)?(?:answer[ _])?letter)\b{NO_LETTER}',
    # 'LETTER', 'YOUR_ANSWER'
    rf'{LEAD}(?:LETTER|ANSWER|OPTION|CHOICE|YOUR[\s_]+[A-Z]+)\b{NO_LETTER}',
    # '"The best answer is" and then its letter'
    r'["\'](?!\s*[(\[]?[A-Za-z]\b)',
)
PLACEHOLDER = re.compile('|'.join(PLACEHOLDERS))
# 'A, B, C or D'
SEVERAL = re.compile(r'[\s:"\'(\[{]*[A-Z](?:\)?\s*(?:[/|,]|\bor\b|\band\b)+\s*(?:or\s+|and\s+)?\(?[A-Z]\b)+')
CLAUSE_END = re.compile(rf'[.;,]\s|\n|\b{REASON}')
# Must follow a bare 'A', 'I' or lower-case letter, which is otherwise an article, a pronoun or a name.
STANDS = re.compile(rf'\s*(?:$|\n|[.,:!])|\s+{REASON}')
CAPITAL_STANDS = re.compile(r'\s*\(|\s+[-\u2013\u2014]\s')  # 'A (Paris)', 'A - Paris'
BULLET = re.compile(rf'\s*(?:(?:[-\u2013\u2014>#]+|{POINTS})\s+)+')  # '- ', '## '
# 'B: Paris', '(B) Paris'
LABELLED = re.compile(r'\(?(?P<letter>[A-Z])(?:\):?|[.:])\s+\S')
# Text that may follow that of an option: its letter, then the end of the sentence or a reason.
AFTER_TEXT = re.compile(rf'["}})]*\s*(?:\((?P<letter>[a-z])\))?(?:$|[.!](?:\s|$)|,?\s*{REASON})')


def reference_letter(completion: str) -> str:
    """Return the letter that SCORE in lm-eval 0.4.13 extracts from a generation, which is not stripped first.

    It is the text after the last 'the best answer is ' up to a line break or a space, without punctuation, in upper
    case; without the phrase, the whole generation in upper case. For numbered options SCORE also translates numerals.
    """
    lowered = completion.lower()
    if PHRASE not in lowered:
        return completion.upper()
    said = lowered.rpartition(f'{PHRASE} ')[2].partition('\n')[0].partition(' ')[0]
    return re.sub('[^a-z0-9]', '', said).upper()


def tolerant_letter(completion: str, options: Sequence[str]) -> str | None:
    """Return the letter of the option that a generation chooses, 'A' for the first; None if it chooses none or several.

    The last statement counts: the last with 'best answer' if there is one, else the last of another common form.
    Without a statement the generation, or its first or last line, must be an answer and nothing else. An option's text
    counts as its letter if no other option has the same text.
    """
    text = cleaned(without_signs(plain_letters(completion), options))
    texts = [folded(option) for option in options]
    for patterns in ((BEST,), (OTHER, BEFORE)):
        letter = last_statement(text, texts, patterns)
        if letter != UNSAID:
            return letter
    return whole_reply(text, texts)


def last_statement(text: str, texts: Sequence[str], patterns: Sequence[re.Pattern[str]]) -> str | None:
    """Return the letter of the last statement that starts with one of these patterns; UNSAID if there is none.

    'The best answer is' without an answer after it is overridden only by a later statement.
    """
    beginnings = [beginning for pattern in patterns for beginning in pattern.finditer(text)]
    beginnings.sort(key=lambda beginning: beginning.end(), reverse=True)
    max_length = MAX_STATEMENT + 3 * max(map(len, texts), default=0)
    for beginning in beginnings:
        if beginning.re is BEFORE:
            is_statement = beginning['noun'] is not None or beginning['answer']
            if is_statement and not is_instruction(beginning['letter'], texts):
                return option_letter(beginning['letter'], texts)
            continue
        rest = text[beginning.end() : beginning.end() + max_length]
        if is_instruction(rest, texts):
            continue
        letter = said_in(rest, texts)
        if letter != UNSAID:
            return letter
        if beginning['commits']:
            if beginning.re is OTHER:
                return None
            return last_statement(text[beginning.end() :], texts, (OTHER, BEFORE)) or None
    return UNSAID


def is_instruction(statement: str, texts: Sequence[str]) -> bool:
    """Return whether a statement names no option but the place of one, as the sentence of an instruction does."""
    unknown, several = UNKNOWN.match(statement), SEVERAL.match(statement)
    if unknown is not None:
        stands_for_another = option_letter(unknown['letter'], texts) is None
    elif several is not None:
        labels = set(string.ascii_uppercase[: len(texts)])
        stands_for_another = len(texts) > 2 and set(re.findall(r'\b[A-Z]\b', several[0])) == labels
    else:
        stands_for_another = PLACEHOLDER.match(statement) is not None
    return stands_for_another and named_by_text(statement, texts) == UNSAID


def said_in(statement: str, texts: Sequence[str]) -> str | None:
    """Return the letter at the beginning of a statement, given as a letter or as its option's text.

    Return None if the statement names several letters or one beyond the options, UNSAID if it names none.
    """
    named = named_by_text(statement, texts)
    if named != UNSAID:
        return named
    begins = LETTER.match(statement)
    if begins is None:
        return UNSAID
    letter, rest = begins['letter'], statement[begins.end() :]
    if is_joined(letter, rest):
        return None
    is_marked = begins['close'] or begins['noun'] or stands_alone(letter, rest)
    if PART.match(rest) or not is_marked:
        return UNSAID

    # Later in the clause another letter may be named: '(A), as neither (B) and (C)'.
    clause = CLAUSE_END.split(rest, maxsplit=1)[0]
    others = set(ANOTHER.findall(clause)) - {letter}
    if OPEN_END.match(rest) or others:
        return None
    return option_letter(letter, texts)


def is_joined(letter: str, rest: str) -> bool:
    """Return whether another letter is joined to this one: 'A or B', '(A) and (C)', 'B, D', 'A-C'."""
    joined = JOINED.match(rest)
    if joined is None or joined['letter'] == letter:
        return False
    return stands_alone(joined['letter'], rest[joined.end() :])


def stands_alone(letter: str, rest: str) -> bool:
    """Return whether a bare letter is a choice, given what follows it.

    'A' and 'I' may also be words, and lower-case letters names.
    """
    if letter.isupper() and letter not in 'AI':
        return True
    return bool(STANDS.match(rest) or (letter.isupper() and CAPITAL_STANDS.match(rest)))


def named_by_text(statement: str, texts: Sequence[str]) -> str | None:
    """Return the letter of the option whose text a statement equals, or starts with before a reason; else UNSAID.

    The longest matching text counts. Return None if several options have it, or if a letter in brackets contradicts
    it. Options that are a single letter are not matched here.
    """
    # The text may stand in quotes or brackets, and may be all of the statement or its first line.
    stripped = [statement.lstrip(' \n\t:'), statement.lstrip(' \n\t:"({')]
    lines = {folded(part) for text in stripped for part in (text, text.partition('\n')[0])}

    # The letter after each matching text, None without one: 'paris (b)'.
    letter_after_text: dict[str, str | None] = {}
    for line in lines:
        for text in texts:
            is_letter = re.fullmatch('[a-z]?', text) is not None
            if not is_letter and line.startswith(text):
                after = AFTER_TEXT.match(line, len(text))
                if after is not None:
                    letter_after_text[text] = after['letter']
    if not letter_after_text:
        return UNSAID

    longest = max(letter_after_text, key=len)
    letters = letters_of(longest, texts)
    letter = letter_after_text[longest]
    if letter:
        return letter.upper() if letter.upper() in letters else None
    return letters[0] if len(letters) == 1 else None


def letters_of(text: str, texts: Sequence[str]) -> list[str]:
    """Return the letters of the options that have this text."""
    return [string.ascii_uppercase[index] for index, other in enumerate(texts) if other == text]


def whole_reply(text: str, texts: Sequence[str]) -> str | None:
    """Return the letter of a generation without a statement if it, its first or its last line is just an answer."""
    named = named_by_text(without_bullet(text), texts)
    if named != UNSAID:
        return named
    lines = without_lists([line for line in text.splitlines() if line.strip()], texts)
    letter_of_line = {line: lone_letter(line, texts) for line in lines}
    letters = {letter for letter in letter_of_line.values() if letter is not None}
    if letters:
        is_at_an_end = letter_of_line[lines[0]] is not None or letter_of_line[lines[-1]] is not None
        return option_letter(letters.pop(), texts) if is_at_an_end and len(letters) == 1 else None

    with_reason = re.match(rf'([A-Z]),? {REASON}', text)
    return option_letter(with_reason[1], texts) if with_reason else None


def without_lists(lines: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return lines without the lists of a question's options that models repeat, with their texts or with others."""
    kept: list[str] = []
    lettered: list[tuple[str, str]] = []  # lines one after another that may be a list, after their letters
    for line in [*lines, '']:  # the empty line ends a list at the end
        letter = letter_before_text(line, texts)
        if letter is not None:
            lettered.append((letter, line))
            continue
        is_list = len({letter for letter, _ in lettered}) > 1
        if not is_list:
            kept += [line for _, line in lettered]
        is_cut_off = is_list and lone_letter(line, texts) == chr(ord(lettered[-1][0]) + 1)  # before its text
        if line and not is_cut_off:
            kept.append(line)
        lettered = []
    return kept


def letter_before_text(line: str, texts: Sequence[str]) -> str | None:
    """Return the letter of a line such as 'B) Paris', whether or not that is the option's text; None without a text."""
    bare = without_bullet(line)
    labelled = LABELLED.match(bare)
    if labelled is not None:
        return labelled['letter']
    letter = LETTER.match(bare)
    has_text = letter is not None and any(map(str.isalnum, bare[letter.end() :]))
    return lone_letter(line, texts) if has_text else None


def without_bullet(line: str) -> str:
    """Return a line without the bullets or arrows at its beginning."""
    bullet = BULLET.match(line)
    return line[bullet.end() :] if bullet else line


def lone_letter(line: str, texts: Sequence[str]) -> str | None:
    """Return the letter of a line that is a letter, 'option B' or a letter with its text: 'B) Paris' or 'B. Paris'.

    After a full stop, a colon, a dash or nothing the text must be that option's: 'A: ...' may be an answer, 'E. coli' a
    name.
    """
    line = without_bullet(line)
    begins = LETTER.match(line)
    if begins is None or is_instruction(begins['letter'], texts):
        return None
    letter, rest = begins['letter'], line[begins.end() :]
    if is_joined(letter, rest):
        return None
    is_alone = not rest.strip(' .,:;!')
    if is_alone or ')' in begins['close']:
        return letter

    index = string.ascii_uppercase.find(letter)
    if not 0 <= index < len(texts):
        return None
    text = folded(re.sub(r'\A\s*[.:\u2013\u2014-]?\s*', '', rest))
    return letter if texts[index] in (text, text.rstrip(')]}! ')) else None


def option_letter(letter: str, texts: Sequence[str]) -> str | None:
    """Return the letter of the option meant by a letter: its label, or the text of a single option; None if unclear.

    A lower-case letter that is also the text of another option, such as 'c', may mean either.
    """
    as_label = letter.upper()
    letters_as_text = letters_of(letter.lower(), texts)
    if as_label in string.ascii_uppercase[: len(texts)]:
        is_clear = letter.isupper() or letters_as_text in ([], [as_label])
        return as_label if is_clear else None
    return letters_as_text[0] if len(letters_as_text) == 1 else None


def cleaned(text: str) -> str:
    """Return a text without Markdown, HTML, dollar signs and LaTeX fonts, with letters and quotes normalized."""
    text = unicodedata.normalize('NFKC', plain_letters(text)).translate(PLAIN)
    text = TAGS.sub('', text.replace('__', ''))
    return MATHS.sub('', WRAPPED.sub(r'\1', text))


@lru_cache(maxsize=65536)
def folded(text: str) -> str:
    """Return a text for comparison: cleaned, lower case, single spaces, without surrounding quotes and full stop."""
    return ' '.join(cleaned(text).casefold().split()).lstrip('"\'').rstrip('."\' ')
