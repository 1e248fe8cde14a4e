"""Compare answers by their forms: numbers with units, pairs, intervals, sets, lists, matrices, words and expressions.

Forms distinguish answers that a computer algebra system treats as equal: (1,2) and {1,2}, 10 in base 2 and 10, 5 cm and
5 m, 50% and 50. Only plain numbers are evaluated; expressions are compared by a function that the caller passes in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from llmfoundry_gauntlet.scoring.text import UNITS, unit_called

CHARACTERS = str.maketrans(
    {
        **dict.fromkeys('\u2212\u2010\u2011\u2012\u2013', '-'),
        **dict.fromkeys('\u00a0\u2009\u202f~', ' '),
        **{'\u00d7': r'\times ', '\u00b7': r'\cdot ', '\u22c5': r'\cdot ', '\u00f7': '/', '\u2044': '/'},
        **{'\u03c0': r'\pi ', '\u221e': r'\infty ', '\u221a': r'\sqrt ', '\u00b1': r'\pm ', '\u222a': r'\cup '},
        **{'\u2264': r'\le ', '\u2265': r'\ge ', '\u2260': r'\ne ', '\u2208': r'\in ', '\u2205': r'\emptyset '},
        **{'\u211d': r'\mathbb{R}', '\u2216': r'\setminus ', '\u2228': r'\lor ', '\u2227': r'\land '},
        **{'\u00b0': r'\degree ', '\u00b2': '^2', '\u00b3': '^3'},
    }
)
COMMANDS = {
    **dict.fromkeys((r'\dfrac', r'\tfrac', r'\cfrac'), r'\frac'),
    **dict.fromkeys((r'\dbinom', r'\tbinom'), r'\binom'),
    **dict.fromkeys((r'\leq', r'\leqslant', r'\leqq'), r'\le'),
    **dict.fromkeys((r'\geq', r'\geqslant', r'\geqq'), r'\ge'),
    **dict.fromkeys((r'\textdegree', r'\degrees'), r'\degree'),
    **{r'\neq': r'\ne', r'\varnothing': r'\emptyset', r'\ast': r'\cdot', r'\dots': r'\ldots', r'\cdots': r'\ldots'},
    **{r'\lbrace': r'\{', r'\rbrace': r'\}', r'\lbrack': '[', r'\rbrack': ']', r'\langle': '(', r'\rangle': ')'},
    **{r'\vee': r'\lor', r'\wedge': r'\land', r'\backslash': r'\setminus', r'\smallsetminus': r'\setminus'},
    **{r'\lt': '<', r'\gt': '>', r'\colon': ':'},
    **dict.fromkeys((r'\quad', r'\qquad', r'\displaystyle', r'\textstyle'), ' '),
}
# Notations of one thing: real numbers, the end of a row with its distance, powers of ten, recurring decimals, bases.
REALS = re.compile(r'\\(?:mathbb|Bbb)\s*(?:\{\s*R\s*\}|R(?![A-Za-z]))|\\R(?![A-Za-z])')
WITHOUT = re.compile(r'(?<=\\mathbb\{R\})\s*-\s*(?=\\\{)')
ROW_END = re.compile(
    r'\\\\\s*(?:\*|\[\s*-?[\d.]+\s*(?:ex|em|pt|mm|cm|in)\s*\])|\\(?:cr|newline|tabularnewline)(?![A-Za-z])|\\hline'
)
DETERMINANT = re.compile(r'\|\s*\\begin\{array\}(?:\{[lcr| ]*\})?((?:(?!\\begin).)*?)\\end\{array\}\s*\|', re.DOTALL)
SCIENTIFIC = re.compile(r'(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?!\s*\)?\s*_|[\w.])')
MORE_DIGITS = re.compile(r'(?<=\d)\s*(?:\.\.\.|\u2026|\\[lc]?dots(?![A-Za-z]))')
DIGITS_OF_BASE = re.compile(r'\(\s*([0-9A-Fa-f.]+)\s*\)(?=\s*_)')
SIZES = re.compile(r'\\(?:(?:left|right)(?![A-Za-z])\.?|[bB]igg?[lrm]?(?![A-Za-z]))')
THOUSANDS = re.compile(r'(?<=\d)\s*(?:\{,\}|,\s*\\!|\\,|\\!)\s*(?=\d{3}(?!\d))')
SPACES = re.compile(r'(\\\\)|\\[,;:!>]|\\(?=\s)')
STYLES = re.compile(r'\\(?:mathbf|mathit|mathsf|mathcal|boldsymbol|bm|ensuremath)\s*\{([^{}]*)\}')
TEXTS = re.compile(
    r'\\(?:text(?:rm|normal|bf|it|sf|up)?|mbox|hbox|mathrm|emph|operatorname\*?)\s*\{((?:[^{}]|\{[^{}]*\})*)\}'
)
FUNCTIONS = ('sin', 'cos', 'tan', 'cot', 'sec', 'csc', 'log', 'ln', 'exp', 'arcsin', 'arccos', 'arctan', 'gcd', 'lcm')
DEGREES = re.compile(r'\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}|\\degree)')
CONJUNCTION = re.compile(r'\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*')
PERCENT = re.compile(r'\\%|(?<![A-Za-z\\])per ?cent(?![A-Za-z])')
TEXT_COMMAND = re.compile(r'\\(?:text(?:rm|normal|bf|it|sf|up)?|mbox|hbox|mathrm)\s*(?=\{)')
BEGINS_A_PART = ('', *'=,;([{&')  # characters before a text that is not a unit
NOT_WORDS = re.compile(r'\\text\{[^{}]*\}|\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+')
MATH_SIGNS = re.compile(r'\\[A-Za-z]|\d.*[-+*/^_=<>()\[\],]|[-+(\[<>].*\d')
FACTOR_ONE = re.compile(r'\A1\s*\\cdot(?![A-Za-z])\s*(?!10\s*\^)')
ARGUMENTS = {'frac': 2, 'binom': 2, 'sqrt': 1}
MAX_CHARACTERS = 1000
MAX_PARTS = 50
MAX_DEPTH = 6

NUMBER, EXPRESSION, TEXT, BASED = 'number', 'expression', 'text', 'based'
LIST, SET, TUPLE, MATRIX, RELATION = 'list', 'set', 'tuple', 'matrix', 'relation'
REALS_SET = 'real numbers'
DEGREE = '°'
INFINITY = '\\infty'

COMMA = re.compile(r'[,;]')
RELATIONS = re.compile(r'\\(?:le|ge|ne|in|approx|equiv|to)(?![A-Za-z])|<=?|>=?|=')
FLIPPED = {'>': '<', '\\ge': '\\le', '>=': '\\le'}
COLON = re.compile(r':')
TIME = re.compile(r'\d{1,2}\s*:\s*[0-5]\d(?:\s*:\s*[0-5]\d)?')
ROWS = re.compile(r'\\\\')
PLUS_OR_MINUS = re.compile(r'(?<=[\w)}\s])[+-]')
CELLS = re.compile(r'&')

# Sets of real numbers that are not written as intervals.
SET_SIGN = re.compile(r'[<>]|\\(?:le|ge|ne|in|setminus|mathbb|lor)(?![A-Za-z])|\\text\{(?:all )?real')
OR_AND = re.compile(
    r'\\(?:text(?:rm|normal|bf|it)?|mbox|hbox|mathrm)\s*\{\s*(or|and)\s*\}|(?<![A-Za-z\\])(or|and)(?![A-Za-z])'
)
OR, AND = re.compile(r'\\lor(?![A-Za-z])'), re.compile(r'\\land(?![A-Za-z])')
NOT_EQUAL = re.compile(r'\\ne(?![A-Za-z])')
ALL_REALS = re.compile(r'\\mathbb\{R\}|\\text\{(?:all )?(?:reals|real numbers)\}')
SET_BUILDER = re.compile(
    r'\\\{\s*(?P<name>[A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\mid(?![A-Za-z])|\\vert(?![A-Za-z]))(?P<condition>.*)\\\}'
)
MEMBER = re.compile(r'(?P<name>[A-Za-z])\s*\\in(?![A-Za-z])(?P<values>.*)')
INTERVALS = re.compile(r'[(\[].*[)\]]|\\\{.*\}|.*\\(?:cup|setminus)(?![A-Za-z]).*')
LINE = '(-\\infty,\\infty)'

DIGITS = r'(?:\d+(?:\.\d*)?|\.\d+)'
DECIMAL = re.compile(rf'([+-]?)\s*({DIGITS})')
RECURRING = re.compile(
    r'([+-]?)\s*(\d*)\.(\d*)\s*'
    r'(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))|\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?|\((\d+)\))'
)
GOES_ON = re.compile(r'([+-]?)\s*(\d*)\.(\d*?)(?:(\d)\4{2,}|(\d{2,20})\5+)\s*\\ldots')  # 0.333..., 0.3636...
ONE_GROUPED = re.compile(r'[^\d,]*\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?[^,]*')  # 1,234 with surrounding text
QUOTIENT = re.compile(
    rf'([+-]?)\s*(?:\\frac\{{\s*([+-]?{DIGITS})\s*\}}\{{\s*([+-]?{DIGITS})\s*\}}|({DIGITS})\s*/\s*({DIGITS}))'
)
MIXED = re.compile(r'([+-]?)\s*(\d+)(?:\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}|\s+(\d+)\s*/\s*(\d+))')
LABEL = re.compile(
    r"(?:(?:\\[A-Za-z]+|[A-Za-z]|[A-Z]{2}|[A-Za-z]{3,})'?|\\text\{[^{}]*\}|\\(?:angle|triangle|overline|widehat)\s*\{?\s*[A-Z]+\s*\}?)"
    r'(?:_(?:\w|\{\w+\}))?(?:\s*\(\s*-?\w+(?:\s*,\s*-?\w+)*\s*\))?|\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)'
)
VARIABLE = re.compile(r'[A-Za-z]|\\[A-Za-z]+')
WORDS = re.compile(r"[A-Za-z][A-Za-z'. -]*")
WHOLE_TEXT = re.compile(r'\\text\{([^{}]*)\}')
NUMBER_IN_TEXT = re.compile(r'(-?[\d.,:]*\d)\s*([A-Za-z][A-Za-z. ]*)?')
IN_BASE = re.compile(
    r'([+-]?)\s*([0-9A-Fa-f]*[0-9][0-9A-Fa-f]*(?:\.[0-9A-Fa-f]+)?)\s*'
    r'(?:_\s*\{?\s*\(?\s*(?:\\text\{)?\s*(\d+|[a-z]+)\s*\}*\s*\)?\s*\}*|\\text\{\s*(?:in )?base[ -]?(\d+|[a-z]+)\s*\})'
)
NAMED_BASES = ('two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten', 'eleven', 'twelve')
BASES = {name: str(base) for base, name in enumerate(NAMED_BASES, start=2)}
MATRIX_WHOLE = re.compile(
    r'\\begin\{(?P<name>(?:[pbB]|small)?matrix|array)\*?\}(?:\{[lcr| ]*\}|\[[lcr]\])?(?P<rows>.*)\\end\{(?P=name)\*?\}',
    re.DOTALL,
)
MATRIX_IN_BRACKETS = re.compile(r'[(\[]\s*(?P<matrix>\\begin\{(?:array|(?:small)?matrix)\*?\}.*\})\s*[)\]]', re.DOTALL)
FACTOR_OF_MATRIX = re.compile(
    r'(?P<factor>[^&]+?)\s*(?:\\cdot|\\times)?\s*(?P<matrix>[(\[]?\s*\\begin\{[a-zA-Z]*(?:matrix|array)\*?\}.*)',
    re.DOTALL,
)
UNIT_TEXT = re.compile(
    r'(?P<core>.*?)\s*\\text\{\s*(?P<unit>[^\d{}][^{}]*?)\s*\}\s*(?:\^\s*\{?\s*(?P<power>[234])\s*\}?)?(?P<more>\s*/\s*\\text\{[^{}]*\})?'
)
UNIT_WORDS = re.compile(
    r'(?P<core>.*?(?:[\d)}]|\\pi))\s*(?<![A-Za-z\\])(?P<unit>[A-Za-z][A-Za-z.]+(?:[ /][A-Za-z.]+)*)'
    r'\s*(?:\^\s*\{?\s*(?P<power>[234])\s*\}?)?'
)
NOUN = r'(?!(?:arc)?(?:sin|cos|tan|sec|csc|cot)|log|sqrt|theta|alpha|beta|gamma|choose|over)[A-Za-z]{4,}(?: [A-Za-z]+)*'
MONEY = re.compile(r'(-?)\s*(?:\\money|[€£])\s*(.*)')
POWERS = {'square': '2', 'sq': '2', 'squared': '2', 'cubic': '3', 'cubed': '3'}

# Returns whether two expressions, or two equations, are equal; neither is a list, a number with a unit, or too long.
Algebra = Callable[[str, str], bool]

BARE_WORD = re.compile(r'[A-Za-z]{4,}(?: [A-Za-z]+)*')  # not a product of variables
DEGREES_OF = re.compile(r'(\d+(?:\.\d+)?)\s*\\degree(?![A-Za-z])')


@lru_cache(maxsize=65536)
def one_spelling(text: str) -> str:
    """Normalize an answer's LaTeX: no spacing and fonts, every argument in braces, texts as \\text{...}."""
    text = text.translate(CHARACTERS).replace('\\$', r'\money ').replace('$', ' ')
    text = re.sub(r'(?<!\\)\\[()\[\]]', ' ', text)
    text = THOUSANDS.sub('', SIZES.sub('', text))
    text = ROW_END.sub(lambda found: ' ' if found[0] == r'\hline' else r'\\ ', text)
    text = DETERMINANT.sub(r'\\begin{vmatrix}\1\\end{vmatrix}', text)
    text = SCIENTIFIC.sub(r'\1 \\times 10^{\2}', MORE_DIGITS.sub(r'\\ldots ', text))
    text = DIGITS_OF_BASE.sub(r'\1', REALS.sub(r'\\mathbb{R}', text))
    text = with_mathematics_bare(text)
    text = SPACES.sub(lambda found: found[1] or ' ', text)
    text = re.sub(r'\\[A-Za-z]+', lambda found: COMMANDS.get(found[0], found[0]), text)
    text = WITHOUT.sub(r' \\setminus ', text)
    text = DEGREES.sub(r'\\degree ', STYLES.sub(r'\1', text))
    text = PERCENT.sub('%', TEXTS.sub(one_text, text))
    text = ' '.join(CONJUNCTION.sub(',', text).split())
    return FACTOR_ONE.sub('', without_outer_braces(with_braces(text)))


def with_mathematics_bare(text: str) -> str:
    """Unwrap mathematics inside \\text and similar commands: \\text{3\\sqrt{2}} becomes 3\\sqrt{2}.

    A text that contains a word stays, as does one that follows a value, because it is the unit.
    """
    place = 0
    while found := TEXT_COMMAND.search(text, place):
        end = closing(text, found.end())
        if end is None:
            break
        content = text[found.end() + 1 : end]
        if text[: found.start()].rstrip()[-1:] in BEGINS_A_PART and is_mathematics(content):
            text = f'{text[: found.start()]}{content}{text[end + 1 :]}'
            place = found.start()
        else:
            place = found.end()
    return text


def is_mathematics(content: str) -> bool:
    """Return whether the content of a text is the LaTeX of a value, without words outside nested texts."""
    return bool(MATH_SIGNS.search(content)) and not re.search(r'[A-Za-z]{2}', NOT_WORDS.sub(' ', content))


def one_text(found: re.Match[str]) -> str:
    """Return a text as \\text{...} without inner braces: several for a list; functions and a lone e or i bare."""
    content = found[1].replace('{', '').replace('}', '')
    if content.strip() in FUNCTIONS:
        return f'\\{content.strip()} '
    if content in ('e', 'i') and '\\mathrm' in found[0]:
        return content
    pieces = re.split(r'\s*[,;]\s*', CONJUNCTION.sub(',', content))
    return ','.join(f'\\text{{{piece.strip()}}}' if piece.strip() else ' ' for piece in pieces)


def with_braces(text: str) -> str:
    """Put braces around the arguments of fractions, binomials and roots: \\frac12 becomes \\frac{1}{2}."""
    built, place = [], 0
    for found in re.finditer(r'\\(frac|binom|sqrt)(?![A-Za-z])', text):
        if found.start() < place:
            continue
        built.append(text[place : found.end()])
        place = found.end()
        index = re.compile(r'\s*\[[^\[\]{}]*\]').match(text, place)
        if found[1] == 'sqrt' and index:
            built.append(index[0].strip())
            place = index.end()
        for _ in range(ARGUMENTS[found[1]]):
            begin, end = argument_at(text, place)
            content = text[begin:end]
            if content.startswith('{') and content.endswith('}') and len(content) > 1:
                content = content[1:-1]
            content = re.sub(r'(?<=\d),(?=\d{3}(?!\d))', '', content)
            nested = begin < end and len(content) < len(text)
            built.append(f'{{{with_braces(content) if nested else content}}}')
            place = end
    return ''.join([*built, text[place:]])


def argument_at(text: str, place: int) -> tuple[int, int]:
    """Return the start and end of a command's argument: a group, a command, or one character."""
    while place < len(text) and text[place] == ' ':
        place += 1
    if place >= len(text) or text[place] in '}])':
        return place, place
    if text[place] == '{':
        end = closing(text, place)
        return place, len(text) if end is None else end + 1
    if command := re.compile(r'\\(?:[A-Za-z]+|.)').match(text, place):
        end = command.end()
        if command[0] in ('\\sqrt', '\\frac'):
            for _ in range(ARGUMENTS[command[0][1:]]):
                end = argument_at(text, end)[1]
        return place, end
    return place, place + 1


def closing(text: str, begin: int) -> int | None:
    """Return the position of the bracket that closes the one at `begin`, whatever its shape; None if unclosed."""
    depth = 0
    for found in re.compile(r'\\[{}]|\\[^{}]|[{}()\[\]]').finditer(text, begin):
        mark = found[0][-1] if found[0] in ('\\{', '\\}') else found[0]
        if len(mark) > 1:
            continue
        depth += 1 if mark in '{([' else -1
        if depth <= 0:
            return found.end() - 1 if depth == 0 else None
    return None


def without_outer_braces(text: str) -> str:
    """Return a text without surrounding white space and braces, and without final punctuation."""
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip('.,;').strip()
        if text.startswith('{') and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
    return text


def split_outside(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split a text at the matches of a pattern outside brackets, unless too many; return the pieces and the matches."""
    pieces, marks, place, skip_to = [], [], 0, 0
    for found in re.compile(rf'(?P<open>\\?\{{|[(\[]|\\begin(?![A-Za-z]))|(?P<mark>{pattern.pattern})|\\.').finditer(
        text
    ):
        if found.start() < skip_to:
            continue
        if found['open']:
            end = text.rfind('\\end') if found['open'] == '\\begin' else closing(text, found.start())
            skip_to = len(text) if end is None or end < found.start() else end + 1
        elif found['mark']:
            pieces.append(text[place : found.start()])
            marks.append(found['mark'])
            place = found.end()
    return ([*pieces, text[place:]], marks) if len(pieces) < MAX_PARTS else ([text], [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One reading of an answer.

    `text` is its LaTeX without unit and label, `label` what precedes an equals sign or a sign of membership, `ends` the
    two brackets of a pair or an interval, the base of digits, or the signs of a relation.
    """

    kind: str
    text: str
    value: Fraction | None = None
    unit: str = ''
    label: str = ''
    ends: str = ''
    parts: tuple[Form, ...] = ()


@lru_cache(maxsize=65536)
def forms_of(answer: str) -> tuple[Form, ...]:
    """Return the readings of an answer, two for '1,234'; none for one that is too long."""
    if len(answer) > MAX_CHARACTERS:
        return ()
    text = one_spelling(answer)
    if not text or len(text) > 2 * MAX_CHARACTERS:
        return ()
    forms = [form_of(text, 0)]
    if forms[0].kind == LIST and ONE_GROUPED.fullmatch(text):
        number = form_of(text.replace(',', ''), 0)
        forms += [number] if number.kind == NUMBER else []
    if SET_SIGN.search(text) and (reals := as_real_set(answer)):
        forms.append(reals)
    return tuple(forms)


def form_of(text: str, depth: int) -> Form:
    """Return the form of a normalized text. Below six levels of nesting everything is an expression."""
    text = without_outer_braces(text)
    if depth >= MAX_DEPTH:
        return Form(kind=EXPRESSION, text=text)
    for pattern in (COMMA, RELATIONS):
        pieces, marks = split_outside(text, pattern)
        if marks:
            return list_of(text, pieces, depth) if pattern is COMMA else relation(text, pieces, marks, depth)
    for reading in (in_matrix, in_brackets, in_words, in_base, as_ratio):
        if form := reading(text, depth):
            return form
    if len(signs := re.findall(r'\\(?:pm|mp)(?![A-Za-z])', text)) == 1:
        both = [text.replace(signs[0], sign) for sign in '+-']
        return Form(kind=LIST, text=text, parts=tuple(form_of(one, depth + 1) for one in both))
    core, unit = without_unit(text)
    if unit and unit != '%' and (form := in_brackets(core, depth) or in_matrix(core, depth)) and not form.unit:
        return replace(form, unit=unit)
    core = re.sub(r'\A\+\s*', '', without_outer_braces(core))
    value = exact_value(core)
    return Form(kind=EXPRESSION if value is None else NUMBER, text=core or text, value=value, unit=unit)


def list_of(text: str, pieces: list[str], depth: int, kind: str = LIST) -> Form:
    """Return the answers of a list; a plus-minus sign makes two, a label on the first alone belongs to the list."""
    parts: list[Form] = []
    num_first = 0  # values of the first piece, two for \pm
    for piece in pieces:
        if piece.strip():
            part = form_of(piece, depth + 1)
            values = part.parts if part.kind == LIST else (part,)
            parts += [replace(value, label=value.label or part.label) for value in values]
            num_first = num_first or len(parts)
    if kind == LIST and parts and parts[0].label and not any(part.label for part in parts[num_first:]):
        parts[:num_first] = [replace(part, label='') for part in parts[:num_first]]
    return Form(kind=kind, text=text, parts=tuple(parts))


def relation(text: str, pieces: list[str], marks: list[str], depth: int) -> Form:
    """Return a labelled value or set, the interval that an inequality describes, or else a relation."""
    pieces = [piece.strip() for piece in pieces]
    is_label = [bool(LABEL.fullmatch(piece)) for piece in pieces]
    names_last = set(marks) <= {'=', '\\in'} and is_label[0] and not any(is_label[1:-1])
    if names_last and pieces[-1] and not occurs_in(pieces[0], pieces[-1]):
        value = form_of(pieces[-1], depth + 1)
        if not value.label:
            return replace(value, label=''.join(pieces[0].split()))
    signs = [FLIPPED.get(mark, '\\le' if mark == '<=' else mark) for mark in marks]
    if all(mark in FLIPPED for mark in marks):
        pieces.reverse()
        signs.reverse()
    elif len(pieces) > 2 and any(mark in FLIPPED for mark in marks):
        return Form(kind=EXPRESSION, text=text)
    parts = tuple(form_of(piece, depth + 1) for piece in pieces)
    if set(signs) <= {'<', '\\le'} and (interval := as_interval(text, pieces, signs, parts)):
        return interval
    return Form(kind=RELATION, text=text, ends=' '.join(signs), parts=parts)


def as_real_set(answer: str) -> Form | None:
    """Return the set of real numbers that conditions on one variable describe, in intervals; None if they do not.

    If it depends on whether commas mean `or` or `and`, the second set is the part of the first.
    """
    names: set[str] = set()
    signs = {'or': r' \lor ', 'and': r' \land '}
    spelled = one_spelling(OR_AND.sub(lambda found: signs[found[1] or found[2]], answer))
    text = set_of(spelled, names, 0)
    if text is None or len(names) > 1:
        return None
    form = form_of(text, 1)
    kind = REALS_SET if form.kind == EXPRESSION else form.kind
    with_and = set_of(spelled, names, 0, comma=r'\cap')
    parts = form.parts if with_and is None or with_and == text else (form_of(with_and, 1),)
    return replace(form, kind=kind, label=next(iter(names), ''), parts=parts)


def set_of(text: str, names: set[str], depth: int, comma: str = r'\cup') -> str | None:
    """Return the set that a condition describes, as intervals, unions and complements; add its variable to `names`.

    `comma` is the sign for a comma between conditions.
    """
    text = without_outer_braces(text)
    if depth >= MAX_DEPTH or not text:
        return None
    if ALL_REALS.fullmatch(text):
        return LINE
    if builder := SET_BUILDER.fullmatch(text):
        names.add(builder['name'])
        return set_of(builder['condition'], names, depth + 1, comma)
    # With an exception among the conditions a comma means `and`: x > 0, x \ne 1.
    for pattern in (OR, AND, COMMA):
        pieces, marks = split_outside(text, pattern)
        if not marks:
            continue
        if pattern is COMMA:
            pieces = with_exceptions(pieces)
        are_exceptions = any(NOT_EQUAL.search(piece) or is_of_reals(piece) for piece in pieces)
        sets = [set_of(piece, names, depth + 1, comma) for piece in pieces]
        sign = {OR: r'\cup', AND: r'\cap', COMMA: r'\cap' if are_exceptions else comma}[pattern]
        return None if None in sets else sign.join(f'({found})' for found in sets)
    return set_of_one(text, names, depth)


def is_of_reals(text: str) -> bool:
    """Return whether a condition says that a variable is a real number."""
    member = MEMBER.fullmatch(text.strip())
    return member is not None and bool(ALL_REALS.fullmatch(member['values'].strip()))


def with_exceptions(pieces: list[str]) -> list[str]:
    """Return the conditions of a list in full: x \\ne 1, 2 is x \\ne 1 and x \\ne 2."""
    full: list[str] = []
    for piece in pieces:
        if full and NOT_EQUAL.search(full[-1]) and not RELATIONS.search(piece):
            name = NOT_EQUAL.split(full[-1])[0]
            piece = f'{name}\\ne {piece}'
        full.append(piece)
    return full


def set_of_one(text: str, names: set[str], depth: int) -> str | None:
    """Return the set of a single condition: an exception, an equation, an inequality, or membership."""
    if member := MEMBER.fullmatch(text):
        names.add(member['name'])
        return set_of(member['values'], names, depth + 1)
    pieces, marks = split_outside(text, RELATIONS)
    sides = [piece.strip() for piece in pieces]
    if marks in (['\\ne'], ['=']):
        name, value = sides if VARIABLE.fullmatch(sides[0]) else sides[::-1]
        if not VARIABLE.fullmatch(name) or not value or occurs_in(name, value):
            return None
        names.add(name)
        point = f'\\{{{value}\\}}'
        return f'{LINE}\\setminus {point}' if marks == ['\\ne'] else point
    if marks:
        form = form_of(text, depth + 1)
        if form.kind != TUPLE or not form.label or form.label == '\\infty':
            return None
        names.add(form.label)
        left, right = form.parts
        return f'{form.ends[0]}{left.text},{right.text}{form.ends[1]}'
    text = text.replace('\\mathbb{R}', LINE)
    return text if INTERVALS.fullmatch(text) else None


def occurs_in(label: str, value: str) -> bool:
    """Return whether a label occurs in its value: x = x + 1 is an equation and does not name a value."""
    return bool(re.search(rf'(?<![A-Za-z\\]){re.escape(label)}(?![A-Za-z])', value))


def as_interval(text: str, pieces: list[str], signs: list[str], parts: tuple[Form, ...]) -> Form | None:
    """Return the interval that one or two bounds define for a variable, the smaller on the left; None if none."""
    closed = [sign == '\\le' for sign in signs]
    infinite = Form(kind=EXPRESSION, text=INFINITY)
    below = Form(kind=EXPRESSION, text=f'-{INFINITY}')
    variables = [bool(VARIABLE.fullmatch(piece)) for piece in pieces]
    if len(pieces) == 3 and variables[1]:
        left, right, name = parts[0], parts[2], pieces[1]
    elif len(pieces) == 2 and variables[0] and not variables[1]:
        left, right, name, closed = below, parts[1], pieces[0], [False, *closed]
    elif len(pieces) == 2 and variables[1] and not variables[0]:
        left, right, name, closed = parts[0], infinite, pieces[1], [*closed, False]
    else:
        return None
    ends = ('[' if closed[0] else '(') + (']' if closed[1] else ')')
    return Form(kind=TUPLE, text=text, ends=ends, parts=(left, right), label=name)


def in_brackets(text: str, depth: int) -> Form | None:
    """Return a set, a pair or an interval; or the content of parentheses."""
    opening = re.match(r'\\\{|[(\[]', text)
    if not opening or (end := closing(text, 0)) is None:
        return None
    is_set = opening[0] == '\\{'
    if end + 1 != len(text) or is_set != (text[end] == '}'):
        return None
    within = text[len(opening[0]) : end - 1 if is_set else end]
    pieces, _ = split_outside(within, COMMA)
    if is_set:
        return list_of(text, pieces, depth, kind=SET)
    ends = text[0] + text[end]
    if len(pieces) == 1:
        return form_of(within, depth + 1) if ends == '()' and within.strip() else None
    return Form(kind=TUPLE, text=text, ends=ends, parts=tuple(form_of(piece, depth + 1) for piece in pieces))


def in_matrix(text: str, depth: int) -> Form | None:
    """Return a matrix or vector: a part for each row, of parts for its entries. A factor before it goes into them."""
    factor = ''
    if multiplied := FACTOR_OF_MATRIX.fullmatch(text):
        is_sum = bool(split_outside(multiplied['factor'], PLUS_OR_MINUS)[1])
        if not is_sum and multiplied['factor'].strip() not in ('(', '['):
            factor, text = multiplied['factor'].strip(), multiplied['matrix'].strip()
    if bracketed := MATRIX_IN_BRACKETS.fullmatch(text):
        text = bracketed['matrix']
    found = MATRIX_WHOLE.fullmatch(text)
    if not found or '\\begin' in found['rows'] or '\\end' in found['rows']:
        return None
    rows = [row for row in split_outside(found['rows'], ROWS)[0] if row.strip()]
    parts = []
    for row in rows:
        cells = [times(factor, cell, depth + 1) for cell in split_outside(row, CELLS)[0]]
        parts.append(Form(kind=TUPLE, text=row, ends='&', parts=tuple(cells)))
    return Form(kind=MATRIX, text=text, parts=tuple(parts))


def times(factor: str, cell: str, depth: int) -> Form:
    """Return an entry of a matrix times the factor before the matrix, '' for none."""
    if not factor:
        return form_of(cell, depth)
    values = exact_value(f'{factor}1' if factor in ('+', '-') else factor), exact_value(cell.strip())
    if values[0] is not None and values[1] is not None:
        value = values[0] * values[1]
        return Form(kind=NUMBER, text=f'\\frac{{{value.numerator}}}{{{value.denominator}}}', value=value)
    return Form(kind=EXPRESSION, text=f'{factor}({cell.strip()})')


def in_words(text: str, depth: int) -> Form | None:
    """Return a text, or the number in it."""
    found = WHOLE_TEXT.fullmatch(text)
    if not found:
        return None
    content = found[1].strip()
    if number := NUMBER_IN_TEXT.fullmatch(content):
        return form_of(f'{number[1]}\\text{{{number[2]}}}' if number[2] else number[1], depth + 1)
    return Form(kind=TEXT, text=content)


def in_base(text: str, _: int) -> Form | None:
    """Return digits in a base; they are not converted, as the base is part of the question."""
    found = IN_BASE.fullmatch(text)
    if not found:
        return None
    base = next(name for name in found.groups()[2:] if name)
    base = BASES.get(base, base)
    digits = found[2].upper().lstrip('0') or '0'
    return Form(kind=BASED, text=found[1].strip('+') + digits, ends=base)


def as_ratio(text: str, depth: int) -> Form | None:
    """Return the parts of a ratio or a time, which are separated by colons."""
    pieces, _ = split_outside(text, COLON)
    if not 1 < len(pieces) < 5:
        return None
    return Form(kind=TUPLE, text=text, ends='::', parts=tuple(form_of(piece, depth + 1) for piece in pieces))


def without_unit(text: str) -> tuple[str, str]:
    """Return an expression and its unit, currency, degree or percent sign, '' without one."""
    if money := MONEY.fullmatch(text):
        amount = UNIT_TEXT.fullmatch(money[2]) or UNIT_WORDS.fullmatch(money[2])
        return money[1] + (amount['core'] if amount else money[2]), '$'
    for sign, unit in (('%', '%'), ('\\degree', DEGREE)):
        if text.endswith(sign) and re.search(r'\d[)}]?\s*\Z', text.removesuffix(sign)) and not is_sum(text):
            return text.removesuffix(sign), unit
    found = UNIT_TEXT.fullmatch(text)
    if found and found['core'].strip() and found['core'].strip() != '-':
        return found['core'], unit_of(found['unit'] + (found['more'] or ''), found['power'])
    found = UNIT_WORDS.fullmatch(text)
    if found and (is_unit_word(found['unit']) or re.search(rf'[\d)}}] {NOUN}\Z', text)):
        return found['core'], unit_of(found['unit'], found['power'])
    return text, ''


def is_sum(text: str) -> bool:
    """Return whether a sign at the end belongs only to the last term, or to a function's argument."""
    return bool(re.search(r'(?<!\A)[+\-]|\\(?!(?:frac|degree|sqrt|pi|cdot|times)(?![a-z]))[a-z]{2,}', text))


def is_unit_word(name: str) -> bool:
    """Return whether a bare word is a known unit of more than one letter."""
    lower = name.lower().replace('.', '')
    return lower in ('am', 'pm') or lower in UNITS or lower.removesuffix('s') in UNITS or '/' in name


def unit_of(name: str, power: str | None) -> str:
    """Return a unit by its canonical name, with its power."""
    name = re.sub(r'\\text|[{}.\\]', ' ' if '/' in name else '', name.lower())
    words = [word for word in name.replace('/', ' per ').replace('-', ' ').split() if word != 'of']
    power = next((POWERS[word] for word in words if word in POWERS), power)
    words = [word for word in words if word not in POWERS]
    known = unit_called(' '.join(words))
    return f'{known}^{power}' if power else known


def exact_value(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal, a fraction or a mixed number."""
    try:
        if found := DECIMAL.fullmatch(text):
            value = Fraction(found[2])
        elif found := QUOTIENT.fullmatch(text):
            value = Fraction(found[2] or found[4]) / Fraction(found[3] or found[5])
        elif found := RECURRING.fullmatch(text) or GOES_ON.fullmatch(text):
            block = ''.join(digits for digits in found.groups()[3:] if digits)
            value = recurring(found[2], found[3], block)
        elif found := MIXED.fullmatch(text):
            value = int(found[2]) + Fraction(int(found[3] or found[5]), int(found[4] or found[6]))
        else:
            return None
    except ZeroDivisionError:
        return None
    return -value if found[1] == '-' else value


def recurring(whole: str, before: str, block: str) -> Fraction:
    """Return the value of a decimal whose last block of digits recurs without end."""
    fixed = Fraction(int(f'{whole}{before}' or '0'), 10 ** len(before))
    return fixed + Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(before))


def answers_equal(algebra: Algebra, first: str, second: str) -> bool:
    """Return whether two answers are equal, in either order. An empty answer equals nothing."""
    if not first.strip() or not second.strip():
        return False
    if first.split() == second.split():
        return True
    forms = forms_of(first), forms_of(second)
    if all(form[-1:] and form[-1].kind == REALS_SET for form in forms):
        # As lists of conditions they would be equal whatever joins these: x > 2 or x < 5, x > 2 and x < 5.
        forms = forms[0][-1:], forms[1][-1:]
    return any(forms_equal(algebra, one, other) for one in forms[0] for other in forms[1])


def forms_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two forms are equal."""
    if one.label and other.label and one.label != other.label:
        scalars = one.kind in (NUMBER, EXPRESSION) and other.kind in (NUMBER, EXPRESSION)
        return scalars and not one.unit and not other.unit and equations_equal(algebra, one, other)
    if one.unit and other.unit and one.unit != other.unit:
        return False
    kinds = {one.kind, other.kind}
    if kinds <= {LIST, SET}:
        return lists_equal(algebra, one, other)
    if REALS_SET in kinds:
        both_sets = all(form.kind == REALS_SET or is_interval_form(form) for form in (one, other))
        return both_sets and algebra(set_meant(algebra, one), set_meant(algebra, other))
    if '::' in (one.ends, other.ends) and not is_time(one) * is_time(other):
        return ratios_equal(algebra, one, other)
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
    return one.ends == other.ends and parts_equal(algebra, one.parts, other.parts)


def set_meant(algebra: Algebra, form: Form) -> str:
    """Return a set of real numbers in intervals. Commas mean `and` if every number met one of the conditions they join.

    So x > 2, x < 5 is the interval between the two, but x < 2, x > 5 the union of two rays.
    """
    depends_on_commas = form.kind == REALS_SET and bool(form.parts)
    return form.parts[0].text if depends_on_commas and algebra(form.text, LINE) else form.text


def is_interval_form(form: Form) -> bool:
    """Return whether a form is written as an interval, or as a union or complement of sets."""
    if form.kind == TUPLE:
        return len(form.parts) == 2 and form.text[:1] in ('(', '[') and form.ends in ('()', '(]', '[)', '[]')
    return form.kind == EXPRESSION and bool(re.search(r'\\(?:cup|cap|setminus)(?![A-Za-z])', form.text))


def is_time(form: Form) -> bool:
    """Return whether a text with colons can be a time, which is no ratio: 4:30 is not 2:15."""
    return form.ends == '::' and bool(TIME.fullmatch(form.text.strip()))


def ratios_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two ratios are equal: 2:3, 4:6 and the fraction 2/3, but not a number without a fraction bar."""
    if one.ends == other.ends == '::':
        if len(one.parts) != len(other.parts):
            return False
        if any(part.unit for form in (one, other) for part in form.parts):
            return parts_equal(algebra, one.parts, other.parts)
        first, second = one.parts[0], other.parts[0]
        crossed = ((product(a, second), product(b, first)) for a, b in zip(one.parts, other.parts, strict=True))
        is_zero = all(part.value == 0 for part in one.parts) or all(part.value == 0 for part in other.parts)
        return not is_zero and all(forms_equal(algebra, *pair) for pair in crossed)
    ratio, value = (one, other) if one.ends == '::' else (other, one)
    if len(ratio.parts) != 2 or value.kind not in (NUMBER, EXPRESSION) or value.unit:
        return False
    if is_time(ratio) or not re.search(r'\\frac|/', value.text):
        return False
    above, below = ratio.parts
    quotient = Form(kind=EXPRESSION, text=f'\\frac{{{above.text}}}{{{below.text}}}')
    if above.value is not None and below.value:
        quotient = replace(quotient, kind=NUMBER, value=above.value / below.value)
    return forms_equal(algebra, quotient, value)


def product(one: Form, other: Form) -> Form:
    """Return the product of two parts of ratios."""
    if one.value is not None and other.value is not None:
        return Form(kind=NUMBER, text=f'{one.value * other.value}', value=one.value * other.value)
    return Form(kind=EXPRESSION, text=f'({one.text})({other.text})')


def parts_equal(algebra: Algebra, ones: Sequence[Form], others: Sequence[Form]) -> bool:
    """Return whether corresponding parts are equal."""
    return len(ones) == len(others) and all(forms_equal(algebra, *pair) for pair in zip(ones, others, strict=True))


def lists_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two lists have equal parts, in any order unless only one of them labels its parts."""
    if len(one.parts) != len(other.parts) or (one.label and other.label and one.label != other.label):
        return False
    if says_which(one) != says_which(other):
        return parts_equal(algebra, one.parts, other.parts)
    left = list(other.parts)
    for part in one.parts:
        found = next((index for index, candidate in enumerate(left) if forms_equal(algebra, part, candidate)), None)
        if found is None:
            return False
        del left[found]
    return True


def says_which(form: Form) -> bool:
    """Return whether the parts of a list have different labels, as in x = 1, y = 2."""
    return len({part.label for part in form.parts}) > 1


def quantities_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two numbers or expressions are equal, and their units if both have one.

    A percentage equals a percentage or its value: 50% equals 0.5, but not 50.
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
    """Return whether two words are equal except for case and punctuation; a bare word counts as well."""
    if not all(form.kind == TEXT or WORDS.fullmatch(form.text) for form in (one, other)):
        return False
    keys = [re.sub(r'[^a-z0-9]', '', form.text.lower()) for form in (one, other)]
    return keys[0] == keys[1] != ''


def equations_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two equations are equal; a label with its value is an equation, too."""
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
    """Return an expression as `Algebra` expects it, with degrees as numbers."""
    return DEGREES_OF.sub(r'(\\frac{\1 \\pi}{180})', text)
