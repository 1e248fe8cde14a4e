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
        # dashes and minus signs
        '\u2010': '-',
        '\u2011': '-',
        '\u2012': '-',
        '\u2013': '-',
        '\u2212': '-',
        # spaces that do not break, and thin ones
        '\u00a0': ' ',
        '\u2009': ' ',
        '\u202f': ' ',
        '~': ' ',
        # arithmetic: times, dot, division, fraction slash, root, plus-minus, powers
        '\u00d7': r'\times ',
        '\u00b7': r'\cdot ',
        '\u22c5': r'\cdot ',
        '\u00f7': '/',
        '\u2044': '/',
        '\u221a': r'\sqrt ',
        '\u00b1': r'\pm ',
        '\u00b2': '^2',
        '\u00b3': '^3',
        # constants and units: pi, infinity, degree
        '\u03c0': r'\pi ',
        '\u221e': r'\infty ',
        '\u00b0': r'\degree ',
        # relations
        '\u2264': r'\le ',
        '\u2265': r'\ge ',
        '\u2260': r'\ne ',
        # sets and logic: element, empty set, real numbers, union, difference, or, and
        '\u2208': r'\in ',
        '\u2205': r'\emptyset ',
        '\u211d': r'\mathbb{R}',
        '\u222a': r'\cup ',
        '\u2216': r'\setminus ',
        '\u2228': r'\lor ',
        '\u2227': r'\land ',
    }
)
COMMANDS = {
    # fractions and binomials in other sizes
    r'\dfrac': r'\frac',
    r'\tfrac': r'\frac',
    r'\cfrac': r'\frac',
    r'\dbinom': r'\binom',
    r'\tbinom': r'\binom',
    # relations
    r'\leq': r'\le',
    r'\leqslant': r'\le',
    r'\leqq': r'\le',
    r'\geq': r'\ge',
    r'\geqslant': r'\ge',
    r'\geqq': r'\ge',
    r'\neq': r'\ne',
    r'\lt': '<',
    r'\gt': '>',
    # brackets
    r'\lbrace': r'\{',
    r'\rbrace': r'\}',
    r'\lbrack': '[',
    r'\rbrack': ']',
    r'\langle': '(',
    r'\rangle': ')',
    # sets and logic
    r'\varnothing': r'\emptyset',
    r'\backslash': r'\setminus',
    r'\smallsetminus': r'\setminus',
    r'\vee': r'\lor',
    r'\wedge': r'\land',
    # other signs
    r'\ast': r'\cdot',
    r'\colon': ':',
    r'\dots': r'\ldots',
    r'\cdots': r'\ldots',
    r'\textdegree': r'\degree',
    r'\degrees': r'\degree',
    # spacing and sizes, which mean nothing
    r'\quad': ' ',
    r'\qquad': ' ',
    r'\displaystyle': ' ',
    r'\textstyle': ' ',
}
FUNCTIONS = ('sin', 'cos', 'tan', 'cot', 'sec', 'csc', 'log', 'ln', 'exp', 'arcsin', 'arccos', 'arctan', 'gcd', 'lcm')
ARGUMENTS = {'frac': 2, 'binom': 2, 'sqrt': 1}
MAX_CHARACTERS = 1000
MAX_PARTS = 50
MAX_DEPTH = 6

# Kinds of forms.
NUMBER, EXPRESSION, TEXT, BASED = 'number', 'expression', 'text', 'based'
LIST, SET, TUPLE, MATRIX, RELATION = 'list', 'set', 'tuple', 'matrix', 'relation'
REALS_SET = 'real numbers'

DEGREE = '°'
INFINITY = '\\infty'
LINE = '(-\\infty,\\infty)'

# Parts of the patterns below.
TEXT_NAME = r'\\(?:text(?:rm|normal|bf|it|sf|up)?|mbox|hbox|mathrm)'  # of a command whose argument is text
DIGITS = r'(?:\d+(?:\.\d*)?|\.\d+)'
POWER = r'(?:\^\s*\{?\s*(?P<power>[234])\s*\}?)?'  # of a unit: cm^2, cm^{3}

# One spelling, in the order of `one_spelling`. Each comment has an example of what is replaced.
SIZES = re.compile(r'\\(?:(?:left|right)(?![A-Za-z])\.?|[bB]igg?[lrm]?(?![A-Za-z]))')  # \left( and \bigl[
THOUSANDS = re.compile(r'(?<=\d)\s*(?:\{,\}|,\s*\\!|\\,|\\!)\s*(?=\d{3}(?!\d))')  # 1{,}000 and 1,\!000
ROW_END = re.compile(  # \\*, \\[2mm], \cr, \hline
    r'\\\\\s*(?:\*|\[\s*-?[\d.]+\s*(?:ex|em|pt|mm|cm|in)\s*\])|\\(?:cr|newline|tabularnewline)(?![A-Za-z])|\\hline'
)
DETERMINANT = re.compile(  # |\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}|
    r'\|\s*\\begin\{array\}(?:\{[lcr| ]*\})?((?:(?!\\begin).)*?)\\end\{array\}\s*\|', re.DOTALL
)
MORE_DIGITS = re.compile(r'(?<=\d)\s*(?:\.\.\.|\u2026|\\[lc]?dots(?![A-Za-z]))')  # 0.333...
SCIENTIFIC = re.compile(r'(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?!\s*\)?\s*_|[\w.])')  # 6.02e23
REALS = re.compile(r'\\(?:mathbb|Bbb)\s*(?:\{\s*R\s*\}|R(?![A-Za-z]))|\\R(?![A-Za-z])')  # \R and \Bbb R
DIGITS_OF_BASE = re.compile(r'\(\s*([0-9A-Fa-f.]+)\s*\)(?=\s*_)')  # (1011)_2
SPACES = re.compile(r'(\\\\)|\\[,;:!>]|\\(?=\s)')  # \, and \; but not \\
WITHOUT = re.compile(r'(?<=\\mathbb\{R\})\s*-\s*(?=\\\{)')  # \mathbb{R} - \{3\}
STYLES = re.compile(r'\\(?:mathbf|mathit|mathsf|mathcal|boldsymbol|bm|ensuremath)\s*\{([^{}]*)\}')  # \mathbf{v}
DEGREES = re.compile(r'\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}|\\degree)')  # 90^\circ
TEXTS = re.compile(  # \text{red}, \mbox{5 {cm}}
    r'\\(?:text(?:rm|normal|bf|it|sf|up)?|mbox|hbox|mathrm|emph|operatorname\*?)\s*\{((?:[^{}]|\{[^{}]*\})*)\}'
)
PERCENT = re.compile(r'\\%|(?<![A-Za-z\\])per ?cent(?![A-Za-z])')  # 50\%, 50 per cent
CONJUNCTION = re.compile(r'\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*')  # 1 and 2
FACTOR_ONE = re.compile(r'\A1\s*\\cdot(?![A-Za-z])\s*(?!10\s*\^)')  # 1 \cdot x, but not 1 \cdot 10^3

# Mathematics inside texts.
TEXT_COMMAND = re.compile(rf'{TEXT_NAME}\s*(?=\{{)')
BEGINS_A_PART = ('', *'=,;([{&')  # characters before a text that is not a unit
NOT_WORDS = re.compile(r'\\text\{[^{}]*\}|\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+')
MATH_SIGNS = re.compile(r'\\[A-Za-z]|\d.*[-+*/^_=<>()\[\],]|[-+(\[<>].*\d')

# Signs at which an answer is split.
COMMA = re.compile(r'[,;]')
RELATIONS = re.compile(r'\\(?:le|ge|ne|in|approx|equiv|to)(?![A-Za-z])|<=?|>=?|=')
COLON = re.compile(r':')
ROWS = re.compile(r'\\\\')
CELLS = re.compile(r'&')
PLUS_OR_MINUS = re.compile(r'(?<=[\w)}\s])[+-]')
FLIPPED = {'>': '<', '\\ge': '\\le', '>=': '\\le'}  # the relation with its sides exchanged

# Sets of real numbers that are not written as intervals.
SET_SIGN = re.compile(r'[<>]|\\(?:le|ge|ne|in|setminus|mathbb|lor)(?![A-Za-z])|\\text\{(?:all )?real')
OR_AND = re.compile(  # x < 2 \text{ or } x > 5
    r'\\(?:text(?:rm|normal|bf|it)?|mbox|hbox|mathrm)\s*\{\s*(or|and)\s*\}|(?<![A-Za-z\\])(or|and)(?![A-Za-z])'
)
OR, AND = re.compile(r'\\lor(?![A-Za-z])'), re.compile(r'\\land(?![A-Za-z])')
NOT_EQUAL = re.compile(r'\\ne(?![A-Za-z])')
ALL_REALS = re.compile(r'\\mathbb\{R\}|\\text\{(?:all )?(?:reals|real numbers)\}')
SET_BUILDER = re.compile(  # \{ x \in \mathbb{R} \mid x > 2 \}
    r'\\\{\s*(?P<name>[A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?'
    r'(?:\||:|\\mid(?![A-Za-z])|\\vert(?![A-Za-z]))(?P<condition>.*)\\\}'
)
MEMBER = re.compile(r'(?P<name>[A-Za-z])\s*\\in(?![A-Za-z])(?P<values>.*)')  # x \in (1,2)
INTERVALS = re.compile(r'[(\[].*[)\]]|\\\{.*\}|.*\\(?:cup|setminus)(?![A-Za-z]).*')  # (1,2], \{3\}, A \cup B

# Numbers.
DECIMAL = re.compile(rf'([+-]?)\s*({DIGITS})')
RECURRING = re.compile(  # 0.\overline{36}, 0.1\dot{6}, 0.\dot{1}4\dot{2}, 0.(3)
    r'([+-]?)\s*(\d*)\.(\d*)\s*'
    r'(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))|\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?|\((\d+)\))'
)
GOES_ON = re.compile(r'([+-]?)\s*(\d*)\.(\d*?)(?:(\d)\4{2,}|(\d{2,20})\5+)\s*\\ldots')  # 0.333..., 0.3636...
ONE_GROUPED = re.compile(r'[^\d,]*\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?[^,]*')  # 1,234 with surrounding text
QUOTIENT = re.compile(  # \frac{1}{2}, 1/2
    rf'([+-]?)\s*(?:\\frac\{{\s*([+-]?{DIGITS})\s*\}}\{{\s*([+-]?{DIGITS})\s*\}}|({DIGITS})\s*/\s*({DIGITS}))'
)
MIXED = re.compile(  # 1\frac{1}{2}, 1 1/2
    r'([+-]?)\s*(\d+)(?:\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}|\s+(\d+)\s*/\s*(\d+))'
)
IN_BASE = re.compile(  # 1011_2, 2A_{16}, 12_{\text{nine}}, 12\text{ base }9
    r'([+-]?)\s*([0-9A-Fa-f]*[0-9][0-9A-Fa-f]*(?:\.[0-9A-Fa-f]+)?)\s*'
    r'(?:_\s*\{?\s*\(?\s*(?:\\text\{)?\s*(\d+|[a-z]+)\s*\}*\s*\)?\s*\}*|\\text\{\s*(?:in )?base[ -]?(\d+|[a-z]+)\s*\})'
)
NAMED_BASES = ('two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten', 'eleven', 'twelve')
BASES = {name: str(base) for base, name in enumerate(NAMED_BASES, start=2)}
TIME = re.compile(r'\d{1,2}\s*:\s*[0-5]\d(?:\s*:\s*[0-5]\d)?')  # 4:30

# Names and words.
NAME_OF_VALUE = (  # x, AB, area, \theta, each perhaps with a prime; \text{area}; \angle ABC, \overline{AB}
    r"(?:(?:\\[A-Za-z]+|[A-Za-z]|[A-Z]{2}|[A-Za-z]{3,})'?|\\text\{[^{}]*\}"
    r'|\\(?:angle|triangle|overline|widehat)\s*\{?\s*[A-Z]+\s*\}?)'
)
INDEX = r'(?:_(?:\w|\{\w+\}))?'  # _1, _{12}
ARGUMENTS_OF_FUNCTION = r'(?:\s*\(\s*-?\w+(?:\s*,\s*-?\w+)*\s*\))?'  # (2), (x, y)
NAMES_OF_PAIR = r'\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)'  # (x, y)
LABEL = re.compile(rf'{NAME_OF_VALUE}{INDEX}{ARGUMENTS_OF_FUNCTION}|{NAMES_OF_PAIR}')
VARIABLE = re.compile(r'[A-Za-z]|\\[A-Za-z]+')
WORDS = re.compile(r"[A-Za-z][A-Za-z'. -]*")
BARE_WORD = re.compile(r'[A-Za-z]{4,}(?: [A-Za-z]+)*')  # not a product of variables
WHOLE_TEXT = re.compile(r'\\text\{([^{}]*)\}')
NUMBER_IN_TEXT = re.compile(r'(-?[\d.,:]*\d)\s*([A-Za-z][A-Za-z. ]*)?')  # 5 cm

# Matrices.
MATRIX_WHOLE = re.compile(
    r'\\begin\{(?P<name>(?:[pbB]|small)?matrix|array)\*?\}(?:\{[lcr| ]*\}|\[[lcr]\])?(?P<rows>.*)\\end\{(?P=name)\*?\}',
    re.DOTALL,
)
MATRIX_IN_BRACKETS = re.compile(r'[(\[]\s*(?P<matrix>\\begin\{(?:array|(?:small)?matrix)\*?\}.*\})\s*[)\]]', re.DOTALL)
FACTOR_OF_MATRIX = re.compile(  # \frac{1}{2} \begin{pmatrix} ...
    r'(?P<factor>[^&]+?)\s*(?:\\cdot|\\times)?\s*(?P<matrix>[(\[]?\s*\\begin\{[a-zA-Z]*(?:matrix|array)\*?\}.*)',
    re.DOTALL,
)

# Units.
UNIT_TEXT = re.compile(  # 5\text{ cm}^2, 3\text{ km}/\text{h}
    rf'(?P<core>.*?)\s*\\text\{{\s*(?P<unit>[^\d{{}}][^{{}}]*?)\s*\}}\s*{POWER}(?P<more>\s*/\s*\\text\{{[^{{}}]*\}})?'
)
UNIT_WORDS = re.compile(  # 5 cm^2, 3 km/h
    r'(?P<core>.*?(?:[\d)}]|\\pi))\s*(?<![A-Za-z\\])(?P<unit>[A-Za-z][A-Za-z.]+(?:[ /][A-Za-z.]+)*)'
    rf'\s*{POWER}'
)
# Things that are counted: 5 apples. It is no function and no Greek letter whose backslash was lost.
NOUN = r'(?!(?:arc)?(?:sin|cos|tan|sec|csc|cot)|log|sqrt|theta|alpha|beta|gamma|choose|over)[A-Za-z]{4,}(?: [A-Za-z]+)*'
MONEY = re.compile(r'(-?)\s*(?:\\money|[€£])\s*(.*)')  # \$5, -€3
POWERS = {'square': '2', 'sq': '2', 'squared': '2', 'cubic': '3', 'cubed': '3'}
DEGREES_OF = re.compile(r'(\d+(?:\.\d+)?)\s*\\degree(?![A-Za-z])')  # 30\degree

# Returns whether two expressions, or two equations, are equal; neither is a list, a number with a unit, or too long.
Algebra = Callable[[str, str], bool]


@lru_cache(maxsize=65536)
def one_spelling(text: str) -> str:
    """Normalize an answer's LaTeX: no spacing and fonts, every argument in braces, texts as \\text{...}."""
    # Characters outside ASCII, and the dollar signs of formulas; \$ is one of money.
    text = text.translate(CHARACTERS).replace('\\$', r'\money ').replace('$', ' ')
    text = re.sub(r'(?<!\\)\\[()\[\]]', ' ', text)

    # Notations of one thing. Separators of thousands must go before the spaces that they are made of.
    text = SIZES.sub('', text)
    text = THOUSANDS.sub('', text)
    text = ROW_END.sub(lambda end: ' ' if end[0] == r'\hline' else r'\\ ', text)
    text = DETERMINANT.sub(r'\\begin{vmatrix}\1\\end{vmatrix}', text)
    text = MORE_DIGITS.sub(r'\\ldots ', text)
    text = SCIENTIFIC.sub(r'\1 \\times 10^{\2}', text)
    text = REALS.sub(r'\\mathbb{R}', text)
    text = DIGITS_OF_BASE.sub(r'\1', text)
    text = with_mathematics_bare(text)

    # Spaces, then commands by their usual names, which what follows expects.
    text = SPACES.sub(lambda space: space[1] or ' ', text)
    text = re.sub(r'\\[A-Za-z]+', lambda command: COMMANDS.get(command[0], command[0]), text)
    text = WITHOUT.sub(r' \\setminus ', text)
    text = STYLES.sub(r'\1', text)
    text = DEGREES.sub(r'\\degree ', text)

    # Texts, and words outside them.
    text = TEXTS.sub(one_text, text)
    text = PERCENT.sub('%', text)
    text = CONJUNCTION.sub(',', text)
    text = ' '.join(text.split())
    text = without_outer_braces(with_braces(text))
    return FACTOR_ONE.sub('', text)


def with_mathematics_bare(text: str) -> str:
    """Unwrap mathematics inside \\text and similar commands: \\text{3\\sqrt{2}} becomes 3\\sqrt{2}.

    A text that contains a word stays, as does one that follows a value, because it is the unit.
    """
    place = 0
    while command := TEXT_COMMAND.search(text, place):
        end = closing(text, command.end())
        if end is None:
            break
        before = text[: command.start()]
        content = text[command.end() + 1 : end]
        begins_a_part = before.rstrip()[-1:] in BEGINS_A_PART
        if begins_a_part and is_mathematics(content):
            text = f'{before}{content}{text[end + 1 :]}'
            place = command.start()
        else:
            place = command.end()
    return text


def is_mathematics(content: str) -> bool:
    """Return whether the content of a text is the LaTeX of a value, without words outside nested texts."""
    return bool(MATH_SIGNS.search(content)) and not re.search(r'[A-Za-z]{2}', NOT_WORDS.sub(' ', content))


def one_text(command: re.Match[str]) -> str:
    """Return a text as \\text{...} without inner braces: several for a list; functions and a lone e or i bare."""
    content = command[1].replace('{', '').replace('}', '')
    if content.strip() in FUNCTIONS:
        return f'\\{content.strip()} '
    if content in ('e', 'i') and '\\mathrm' in command[0]:
        return content
    pieces = re.split(r'\s*[,;]\s*', CONJUNCTION.sub(',', content))
    stripped = [piece.strip() for piece in pieces]
    return ','.join(f'\\text{{{piece}}}' if piece else ' ' for piece in stripped)


def with_braces(text: str) -> str:
    """Put braces around the arguments of fractions, binomials and roots: \\frac12 becomes \\frac{1}{2}."""
    built: list[str] = []
    place = 0  # up to which the text is built
    for command in re.finditer(r'\\(frac|binom|sqrt)(?![A-Za-z])', text):
        if command.start() < place:  # inside an argument, which has been built
            continue
        built.append(text[place : command.end()])
        place = command.end()

        # The index of a root, as in \sqrt[3]{8}.
        index = re.compile(r'\s*\[[^\[\]{}]*\]').match(text, place)
        if command[1] == 'sqrt' and index:
            built.append(index[0].strip())
            place = index.end()

        for _ in range(ARGUMENTS[command[1]]):
            begin, end = argument_at(text, place)
            argument = text[begin:end]
            if argument.startswith('{') and argument.endswith('}') and len(argument) > 1:
                argument = argument[1:-1]
            argument = re.sub(r'(?<=\d),(?=\d{3}(?!\d))', '', argument)  # separators of thousands
            if begin < end and len(argument) < len(text):
                argument = with_braces(argument)
            built.append(f'{{{argument}}}')
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
    command = re.compile(r'\\(?:[A-Za-z]+|.)').match(text, place)
    if command is None:
        return place, place + 1
    end = command.end()
    if command[0] in ('\\sqrt', '\\frac'):
        for _ in range(ARGUMENTS[command[0][1:]]):
            _, end = argument_at(text, end)
    return place, end


def closing(text: str, begin: int) -> int | None:
    """Return the position of the bracket that closes the one at `begin`, whatever its shape; None if unclosed."""
    depth = 0
    for mark in re.compile(r'\\[{}]|\\[^{}]|[{}()\[\]]').finditer(text, begin):
        bracket = mark[0][-1] if mark[0] in ('\\{', '\\}') else mark[0]
        if len(bracket) > 1:  # another command
            continue
        depth += 1 if bracket in '{([' else -1
        if depth == 0:
            return mark.end() - 1
        if depth < 0:
            return None
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
    # A bracket or environment, a mark to split at, or another command with one character of its name.
    token = re.compile(rf'(?P<open>\\?\{{|[(\[]|\\begin(?![A-Za-z]))|(?P<mark>{pattern.pattern})|\\.')
    pieces: list[str] = []
    marks: list[str] = []
    start_of_piece = 0
    end_of_brackets = 0
    for match in token.finditer(text):
        if match.start() < end_of_brackets:
            continue
        if match['open']:
            end = text.rfind('\\end') if match['open'] == '\\begin' else closing(text, match.start())
            # A group that is not closed goes on to the end.
            end_of_brackets = len(text) if end is None or end < match.start() else end + 1
        elif match['mark']:
            pieces.append(text[start_of_piece : match.start()])
            marks.append(match['mark'])
            start_of_piece = match.end()
    if len(pieces) >= MAX_PARTS:
        return [text], []
    return [*pieces, text[start_of_piece:]], marks


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
        if number.kind == NUMBER:
            forms.append(number)
    if SET_SIGN.search(text):
        reals = as_real_set(answer)
        if reals is not None:
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
        form = reading(text, depth)
        if form is not None:
            return form

    # Both values of a plus-minus sign; of several signs it is unclear which belong together.
    signs = re.findall(r'\\(?:pm|mp)(?![A-Za-z])', text)
    if len(signs) == 1:
        values = [form_of(text.replace(signs[0], sign), depth + 1) for sign in '+-']
        return Form(kind=LIST, text=text, parts=tuple(values))

    core, unit = without_unit(text)
    if unit and unit != '%':  # (1,2) cm
        form = in_brackets(core, depth) or in_matrix(core, depth)
        if form is not None and not form.unit:
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
    sides = [piece.strip() for piece in pieces]

    # x = 5, x \in (1,2), and y = 2 + 3 = 5, whose last side is the value.
    is_label = [bool(LABEL.fullmatch(side)) for side in sides]
    names_last = set(marks) <= {'=', '\\in'} and is_label[0] and not any(is_label[1:-1])
    if names_last and sides[-1] and not occurs_in(sides[0], sides[-1]):
        value = form_of(sides[-1], depth + 1)
        if not value.label:
            return replace(value, label=''.join(sides[0].split()))

    # Inequalities go from the smaller to the larger; 1 < x > 0 goes both ways.
    signs = [FLIPPED.get(mark, '\\le' if mark == '<=' else mark) for mark in marks]
    num_flipped = sum(mark in FLIPPED for mark in marks)
    if num_flipped == len(marks):
        sides.reverse()
        signs.reverse()
    elif len(sides) > 2 and num_flipped > 0:
        return Form(kind=EXPRESSION, text=text)

    parts = tuple(form_of(side, depth + 1) for side in sides)
    if set(signs) <= {'<', '\\le'}:
        interval = as_interval(text, sides, signs, parts)
        if interval is not None:
            return interval
    return Form(kind=RELATION, text=text, ends=' '.join(signs), parts=parts)


def as_real_set(answer: str) -> Form | None:
    """Return the set of real numbers that conditions on one variable describe, in intervals; None if they do not.

    If it depends on whether commas mean `or` or `and`, the second set is the part of the first.
    """
    signs = {'or': r' \lor ', 'and': r' \land '}
    spelled = one_spelling(OR_AND.sub(lambda word: signs[word[1] or word[2]], answer))
    names: set[str] = set()
    text = set_of(spelled, names, 0)
    if text is None or len(names) > 1:
        return None
    form = form_of(text, 1)
    kind = REALS_SET if form.kind == EXPRESSION else form.kind

    parts = form.parts
    with_and = set_of(spelled, names, 0, comma=r'\cap')
    if with_and is not None and with_and != text:
        parts = (form_of(with_and, 1),)
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
        if None in sets:
            return None
        sign_by_pattern = {OR: r'\cup', AND: r'\cap', COMMA: r'\cap' if are_exceptions else comma}
        return sign_by_pattern[pattern].join(f'({condition})' for condition in sets)
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


def as_interval(text: str, sides: list[str], signs: list[str], parts: tuple[Form, ...]) -> Form | None:
    """Return the interval that one or two bounds define for a variable, the smaller on the left; None if none."""
    is_variable = [bool(VARIABLE.fullmatch(side)) for side in sides]
    if len(sides) == 3 and is_variable[1]:  # 1 < x < 2
        name = sides[1]
        low, _, high = parts
        is_low_in, is_high_in = (sign == '\\le' for sign in signs)
    elif len(sides) == 2 and is_variable[0] and not is_variable[1]:  # x < 2
        name = sides[0]
        low, high = Form(kind=EXPRESSION, text=f'-{INFINITY}'), parts[1]
        is_low_in, is_high_in = False, signs[0] == '\\le'
    elif len(sides) == 2 and is_variable[1] and not is_variable[0]:  # 1 < x
        name = sides[1]
        low, high = parts[0], Form(kind=EXPRESSION, text=INFINITY)
        is_low_in, is_high_in = signs[0] == '\\le', False
    else:
        return None
    opening = '[' if is_low_in else '('
    closing = ']' if is_high_in else ')'
    return Form(kind=TUPLE, text=text, ends=opening + closing, parts=(low, high), label=name)


def in_brackets(text: str, depth: int) -> Form | None:
    """Return a set, a pair or an interval; or the content of parentheses."""
    opening = re.match(r'\\\{|[(\[]', text)
    end = closing(text, 0)
    if opening is None or end is None or end + 1 != len(text):
        return None
    is_set = opening[0] == '\\{'
    if is_set != (text[end] == '}'):
        return None

    content = text[len(opening[0]) : end - 1 if is_set else end]
    pieces, _ = split_outside(content, COMMA)
    if is_set:
        return list_of(text, pieces, depth, kind=SET)
    ends = text[0] + text[end]
    if len(pieces) == 1:
        return form_of(content, depth + 1) if ends == '()' and content.strip() else None
    parts = [form_of(piece, depth + 1) for piece in pieces]
    return Form(kind=TUPLE, text=text, ends=ends, parts=tuple(parts))


def in_matrix(text: str, depth: int) -> Form | None:
    """Return a matrix or vector: a part for each row, of parts for its entries. A factor before it goes into them."""
    factor = ''
    multiplied = FACTOR_OF_MATRIX.fullmatch(text)
    if multiplied is not None:
        before = multiplied['factor'].strip()
        _, signs = split_outside(multiplied['factor'], PLUS_OR_MINUS)
        is_sum = bool(signs)
        if not is_sum and before not in ('(', '['):
            factor, text = before, multiplied['matrix'].strip()

    in_other_brackets = MATRIX_IN_BRACKETS.fullmatch(text)
    if in_other_brackets is not None:
        text = in_other_brackets['matrix']
    matrix = MATRIX_WHOLE.fullmatch(text)
    if matrix is None or '\\begin' in matrix['rows'] or '\\end' in matrix['rows']:  # several, or nested ones
        return None

    rows, _ = split_outside(matrix['rows'], ROWS)
    forms_of_rows = []
    for row in rows:
        if row.strip():
            cells, _ = split_outside(row, CELLS)
            entries = [times(factor, cell, depth + 1) for cell in cells]
            forms_of_rows.append(Form(kind=TUPLE, text=row, ends='&', parts=tuple(entries)))
    return Form(kind=MATRIX, text=text, parts=tuple(forms_of_rows))


def times(factor: str, cell: str, depth: int) -> Form:
    """Return an entry of a matrix times the factor before the matrix, '' for none."""
    if not factor:
        return form_of(cell, depth)
    value_of_factor = exact_value(f'{factor}1' if factor in ('+', '-') else factor)
    value_of_cell = exact_value(cell.strip())
    if value_of_factor is not None and value_of_cell is not None:
        value = value_of_factor * value_of_cell
        return Form(kind=NUMBER, text=f'\\frac{{{value.numerator}}}{{{value.denominator}}}', value=value)
    return Form(kind=EXPRESSION, text=f'{factor}({cell.strip()})')


def in_words(text: str, depth: int) -> Form | None:
    """Return a text, or the number in it."""
    whole = WHOLE_TEXT.fullmatch(text)
    if whole is None:
        return None
    content = whole[1].strip()
    quantity = NUMBER_IN_TEXT.fullmatch(content)
    if quantity is None:
        return Form(kind=TEXT, text=content)
    number, unit = quantity.groups()
    return form_of(f'{number}\\text{{{unit}}}' if unit else number, depth + 1)


def in_base(text: str, _: int) -> Form | None:
    """Return digits in a base; they are not converted, as the base is part of the question."""
    based = IN_BASE.fullmatch(text)
    if based is None:
        return None
    sign, digits, *bases = based.groups()
    base = next(name for name in bases if name)
    digits = digits.upper().lstrip('0') or '0'
    return Form(kind=BASED, text=sign.strip('+') + digits, ends=BASES.get(base, base))


def as_ratio(text: str, depth: int) -> Form | None:
    """Return the parts of a ratio or a time, which are separated by colons."""
    pieces, _ = split_outside(text, COLON)
    if not 1 < len(pieces) < 5:
        return None
    parts = [form_of(piece, depth + 1) for piece in pieces]
    return Form(kind=TUPLE, text=text, ends='::', parts=tuple(parts))


def without_unit(text: str) -> tuple[str, str]:
    """Return an expression and its unit, currency, degree or percent sign, '' without one."""
    money = MONEY.fullmatch(text)
    if money is not None:
        sign, amount = money.groups()
        with_unit = UNIT_TEXT.fullmatch(amount) or UNIT_WORDS.fullmatch(amount)  # \$5 per hour
        return sign + (with_unit['core'] if with_unit else amount), '$'

    for suffix, unit in (('%', '%'), ('\\degree', DEGREE)):
        if text.endswith(suffix) and not is_sum(text):
            number = text.removesuffix(suffix)
            if re.search(r'\d[)}]?\s*\Z', number):
                return number, unit

    in_text = UNIT_TEXT.fullmatch(text)
    if in_text is not None and in_text['core'].strip() not in ('', '-'):
        return in_text['core'], unit_of(in_text['unit'] + (in_text['more'] or ''), in_text['power'])

    bare = UNIT_WORDS.fullmatch(text)
    if bare is not None and (is_unit_word(bare['unit']) or re.search(rf'[\d)}}] {NOUN}\Z', text)):
        return bare['core'], unit_of(bare['unit'], bare['power'])
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
    plain = re.sub(r'\\text|[{}.\\]', ' ' if '/' in name else '', name.lower())
    words = plain.replace('/', ' per ').replace('-', ' ').split()
    powers = [POWERS[word] for word in words if word in POWERS]
    if powers:  # square feet
        power = powers[0]
    unit = unit_called(' '.join(word for word in words if word != 'of' and word not in POWERS))
    return f'{unit}^{power}' if power else unit


def exact_value(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal, a fraction or a mixed number."""
    try:
        if number := DECIMAL.fullmatch(text):
            value = Fraction(number[2])
        elif number := QUOTIENT.fullmatch(text):
            value = Fraction(number[2] or number[4]) / Fraction(number[3] or number[5])
        elif number := RECURRING.fullmatch(text) or GOES_ON.fullmatch(text):
            block = ''.join(digits for digits in number.groups()[3:] if digits)
            value = recurring(number[2], number[3], block)
        elif number := MIXED.fullmatch(text):
            value = int(number[2]) + Fraction(int(number[3] or number[5]), int(number[4] or number[6]))
        else:
            return None
    except ZeroDivisionError:
        return None
    return -value if number[1] == '-' else value


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
    forms_of_first, forms_of_second = forms_of(first), forms_of(second)
    if is_real_set(forms_of_first[-1:]) and is_real_set(forms_of_second[-1:]):
        # As lists of conditions they would be equal whatever joins these: x > 2 or x < 5, x > 2 and x < 5.
        forms_of_first, forms_of_second = forms_of_first[-1:], forms_of_second[-1:]
    return any(forms_equal(algebra, one, other) for one in forms_of_first for other in forms_of_second)


def is_real_set(forms: Sequence[Form]) -> bool:
    """Return whether there is a form and the last one is a set of real numbers."""
    return bool(forms) and forms[-1].kind == REALS_SET


def forms_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two forms are equal."""
    kinds = {one.kind, other.kind}
    if one.label and other.label and one.label != other.label:
        # y = 2x and x = y/2 are one equation.
        are_equations = kinds <= {NUMBER, EXPRESSION} and not one.unit and not other.unit
        return are_equations and equations_equal(algebra, one, other)
    if one.unit and other.unit and one.unit != other.unit:
        return False

    # Kinds that may equal another kind.
    if kinds <= {LIST, SET}:
        return lists_equal(algebra, one, other)
    if REALS_SET in kinds:
        are_sets = all(form.kind == REALS_SET or is_interval_form(form) for form in (one, other))
        return are_sets and algebra(set_meant(algebra, one), set_meant(algebra, other))
    has_colons = '::' in (one.ends, other.ends)
    if has_colons and not (is_time(one) and is_time(other)):
        return ratios_equal(algebra, one, other)
    if kinds in ({RELATION, EXPRESSION}, {RELATION, NUMBER}):
        return equations_equal(algebra, one, other)
    if kinds <= {NUMBER, EXPRESSION}:
        return quantities_equal(algebra, one, other)
    if TEXT in kinds:
        return texts_equal(one, other)

    # Two of one kind.
    if len(kinds) > 1 or one.ends != other.ends:
        return False
    if one.kind == BASED:
        return one.text == other.text
    is_equation = one.kind == RELATION and one.ends == '='
    if is_equation and algebra(written(one.text), written(other.text)):
        return True
    return parts_equal(algebra, one.parts, other.parts)


def set_meant(algebra: Algebra, form: Form) -> str:
    """Return a set of real numbers in intervals. Commas mean `and` if every number met one of the conditions they join.

    So x > 2, x < 5 is the interval between the two, but x < 2, x > 5 the union of two rays.
    """
    depends_on_commas = form.kind == REALS_SET and bool(form.parts)
    if depends_on_commas and algebra(form.text, LINE):
        return form.parts[0].text
    return form.text


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
        return proportions_equal(algebra, one.parts, other.parts)
    ratio, value = (one, other) if one.ends == '::' else (other, one)
    if len(ratio.parts) != 2 or value.kind not in (NUMBER, EXPRESSION) or value.unit:
        return False
    has_fraction_bar = re.search(r'\\frac|/', value.text) is not None
    if is_time(ratio) or not has_fraction_bar:
        return False
    above, below = ratio.parts
    quotient = Form(kind=EXPRESSION, text=f'\\frac{{{above.text}}}{{{below.text}}}')
    if above.value is not None and below.value:
        quotient = replace(quotient, kind=NUMBER, value=above.value / below.value)
    return forms_equal(algebra, quotient, value)


def proportions_equal(algebra: Algebra, ones: Sequence[Form], others: Sequence[Form]) -> bool:
    """Return whether the parts of two ratios are equal up to one factor; parts with units must be equal."""
    if len(ones) != len(others):
        return False
    if any(part.unit for part in (*ones, *others)):
        return parts_equal(algebra, ones, others)
    is_zero = all(part.value == 0 for part in ones) or all(part.value == 0 for part in others)
    if is_zero:
        return False
    # a : b equals c : d if a * c equals c * a, and b * c equals d * a.
    for one, other in zip(ones, others, strict=True):
        if not forms_equal(algebra, product(one, others[0]), product(other, ones[0])):
            return False
    return True


def product(one: Form, other: Form) -> Form:
    """Return the product of two parts of ratios."""
    if one.value is not None and other.value is not None:
        value = one.value * other.value
        return Form(kind=NUMBER, text=f'{value}', value=value)
    return Form(kind=EXPRESSION, text=f'({one.text})({other.text})')


def parts_equal(algebra: Algebra, ones: Sequence[Form], others: Sequence[Form]) -> bool:
    """Return whether corresponding parts are equal."""
    if len(ones) != len(others):
        return False
    return all(forms_equal(algebra, one, other) for one, other in zip(ones, others, strict=True))


def lists_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two lists have equal parts, in any order unless only one of them labels its parts."""
    if len(one.parts) != len(other.parts) or (one.label and other.label and one.label != other.label):
        return False
    if says_which(one) != says_which(other):
        return parts_equal(algebra, one.parts, other.parts)
    unmatched = list(other.parts)
    for part in one.parts:
        equal_ones = (index for index, candidate in enumerate(unmatched) if forms_equal(algebra, part, candidate))
        index = next(equal_ones, None)
        if index is None:
            return False
        del unmatched[index]
    return True


def says_which(form: Form) -> bool:
    """Return whether the parts of a list have different labels, as in x = 1, y = 2."""
    return len({part.label for part in form.parts}) > 1


def quantities_equal(algebra: Algebra, one: Form, other: Form) -> bool:
    """Return whether two numbers or expressions are equal, and their units if both have one.

    A percentage equals a percentage or its value: 50% equals 0.5, but not 50.
    """
    units = {one.unit, other.unit}
    if '%' in units and one.unit != other.unit:
        if one.value is None or other.value is None or units != {'%', ''}:
            return False
        first_value = one.value / 100 if one.unit else one.value
        second_value = other.value / 100 if other.unit else other.value
        return first_value == second_value
    if one.value is not None and other.value is not None:
        return one.value == other.value
    if BARE_WORD.fullmatch(one.text) and BARE_WORD.fullmatch(other.text):
        return texts_equal(one, other)
    first, second = written(one.text), written(other.text)
    if first.replace(' ', '') == second.replace(' ', ''):
        return True
    return algebra(first, second)


def texts_equal(one: Form, other: Form) -> bool:
    """Return whether two words are equal except for case and punctuation; a bare word counts as well."""
    are_words = all(form.kind == TEXT or WORDS.fullmatch(form.text) for form in (one, other))
    key, key_of_other = (re.sub(r'[^a-z0-9]', '', form.text.lower()) for form in (one, other))
    return are_words and key != '' and key == key_of_other


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
