"""The LaTeX of an answer in a normal form: what looks the same is written the same, and nothing is evaluated."""

from __future__ import annotations

import re
from functools import lru_cache

CHARACTERS = str.maketrans(
    {
        **dict.fromkeys('\u2212\u2010\u2011\u2012\u2013', '-'),
        **dict.fromkeys('\u00a0\u2009\u202f~', ' '),
        **{'\u00d7': r'\times ', '\u00b7': r'\cdot ', '\u22c5': r'\cdot ', '\u00f7': '/', '\u2044': '/'},
        **{'\u03c0': r'\pi ', '\u221e': r'\infty ', '\u221a': r'\sqrt ', '\u00b1': r'\pm ', '\u222a': r'\cup '},
        **{'\u2264': r'\le ', '\u2265': r'\ge ', '\u2260': r'\ne ', '\u2208': r'\in ', '\u2205': r'\emptyset '},
        **{'\u00b0': r'\degree ', '\u00b2': '^2', '\u00b3': '^3'},
    }
)
COMMANDS = {
    **dict.fromkeys(('dfrac', 'tfrac', 'cfrac'), 'frac'),
    **dict.fromkeys(('dbinom', 'tbinom'), 'binom'),
    **dict.fromkeys(('leq', 'leqslant', 'leqq'), 'le'),
    **dict.fromkeys(('geq', 'geqslant', 'geqq'), 'ge'),
    **dict.fromkeys(('neq', 'not='), 'ne'),
    **dict.fromkeys(('textdegree', 'degrees'), 'degree'),
    **{'varnothing': 'emptyset', 'ast': 'cdot', 'dots': 'ldots', 'cdots': 'ldots'},
}
SYMBOLS = {
    **{'lbrace': r'\{', 'rbrace': r'\}', 'lbrack': '[', 'rbrack': ']', 'langle': '(', 'rangle': ')'},
    **{'lt': '<', 'gt': '>', 'quad': ' ', 'qquad': ' ', 'displaystyle': ' ', 'textstyle': ' '},
}
SIZES = re.compile(r'\\(?:(?:left|right)(?![A-Za-z])\.?|[bB]igg?[lrm]?(?![A-Za-z]))')
THOUSANDS = re.compile(r'(?<=\d)\s*(?:\{,\}|,\s*\\!|\\,|\\!)\s*(?=\d{3}(?!\d))')
SPACES = re.compile(r'(\\\\)|\\[,;:!>]|\\(?=\s)')
HIDDEN = re.compile(r'\\[hv]?phantom\s*\{[^{}]*\}')
STYLES = re.compile(r'\\(?:mathbf|mathit|mathsf|mathcal|boldsymbol|bm|ensuremath)\s*\{([^{}]*)\}')
TEXTS = re.compile(
    r'\\(?:text(?:rm|normal|bf|it|sf|up)?|mbox|hbox|mathrm|emph|operatorname\*?)\s*\{((?:[^{}]|\{[^{}]*\})*)\}'
)
FUNCTIONS = ('sin', 'cos', 'tan', 'cot', 'sec', 'csc', 'log', 'ln', 'exp', 'arcsin', 'arccos', 'arctan', 'gcd', 'lcm')
DEGREES = re.compile(r'\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}|\\degree)')
CONJUNCTION = re.compile(r'\s*(?:[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*')
PERCENT = re.compile(r'\\%|(?<![A-Za-z\\])per ?cent(?![A-Za-z])')
TEXT_COMMAND = re.compile(r'\\(?:text(?:rm|normal|bf|it|sf|up)?|mbox|hbox|mathrm)\s*(?=\{)')
BEGINS_A_PART = ('', *'=,;([{&')  # what stands before a text that is no unit
NOT_WORDS = re.compile(r'\\text\{[^{}]*\}|\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+')
MATH_SIGNS = re.compile(r'\\[A-Za-z]|\d.*[-+*/^_=<>()\[\],]|[-+(\[<>].*\d')
FACTOR_ONE = re.compile(r'\A1\s*\\cdot(?![A-Za-z])\s*(?!10\s*\^)')
ARGUMENTS = {'frac': 2, 'binom': 2, 'sqrt': 1}


@lru_cache(maxsize=65536)
def one_spelling(text: str) -> str:
    """Return an answer's LaTeX without spacing and fonts, every argument in braces, texts as \\text{...}."""
    text = text.translate(CHARACTERS).replace('\\$', r'\money ').replace('$', ' ')
    text = re.sub(r'(?<!\\)\\[()\[\]]', ' ', text)
    text = THOUSANDS.sub('', SIZES.sub('', text))
    text = with_mathematics_bare(text)
    text = HIDDEN.sub('', SPACES.sub(lambda found: found[1] or ' ', text))
    text = re.sub(r'\\([A-Za-z]+)', one_command, text)
    text = DEGREES.sub(r'\\degree ', STYLES.sub(r'\1', text))
    text = PERCENT.sub('%', TEXTS.sub(one_text, text))
    text = CONJUNCTION.sub(outside_braces, text) if 'and' in text or 'or' in text else text
    text = re.sub(r'(?:,\s*)+,', ',', text)
    return FACTOR_ONE.sub('', unwrapped(with_braces(' '.join(text.split()))))


def with_mathematics_bare(text: str) -> str:
    """Return the LaTeX with the mathematics in texts as such: \\text{3\\sqrt{2}} as 3\\sqrt{2}.

    A text with a word in it stays, and what follows a value, which is its unit.
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
    """Return whether the content of a text is LaTeX of a value, without words outside a text of its own."""
    return bool(MATH_SIGNS.search(content)) and not re.search(r'[A-Za-z]{2}', NOT_WORDS.sub(' ', content))


def one_command(found: re.Match[str]) -> str:
    """Return the canonical name of a command, or the character that it stands for."""
    name = found[1]
    return SYMBOLS.get(name) or '\\' + COMMANDS.get(name, name)


def one_text(found: re.Match[str]) -> str:
    """A text as \\text{...}: a list as several, functions and lone e and i as mathematics, no braces within."""
    content = found[1].replace('{', '').replace('}', '')
    if content.strip() in FUNCTIONS:
        return f'\\{content.strip()} '
    if content in ('e', 'i') and '\\mathrm' in found[0]:
        return content
    if re.fullmatch(r'\s*(?:%|per ?cent)\s*', content):
        return '%'
    pieces = CONJUNCTION.split(content)
    return ','.join(f'\\text{{{piece.strip()}}}' if piece.strip() else ' ' for piece in pieces)


def outside_braces(found: re.Match[str]) -> str:
    """Return a comma for 'and' and 'or'; a comma or semicolon is kept."""
    return found[0] if found[0].strip() in (',', ';') else ','


def with_braces(text: str) -> str:
    """Braces around the arguments of fractions, binomials and roots: \\frac12 as \\frac{1}{2}."""
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
    """Return where the argument of a command begins and ends: a group, a command, or one character."""
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
    """Return where the bracket at `begin` closes, whatever its shape; None where it does not."""
    depth = 0
    for found in re.compile(r'\\[{}]|\\[^{}]|[{}()\[\]]').finditer(text, begin):
        mark = found[0][-1] if found[0] in ('\\{', '\\}') else found[0]
        if len(mark) > 1:
            continue
        depth += 1 if mark in '{([' else -1
        if depth <= 0:
            return found.end() - 1 if depth == 0 else None
    return None


def unwrapped(text: str) -> str:
    """Return a text without surrounding white space and braces, and without final punctuation."""
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip('.,;').strip()
        if text.startswith('{') and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
    return text


def split_outside(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Return the pieces of a text between matches of a pattern outside of brackets, and these matches."""
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
    return [*pieces, text[place:]], marks
