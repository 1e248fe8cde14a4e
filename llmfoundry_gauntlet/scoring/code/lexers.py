"""Find the top-level statements of a text that may be a program, and where the program in it ends.

Texts come from language models: prose may surround the program, and any of it may be broken or cut off. So nothing
here parses. Pygments' lexers tell code from comments and strings, and the rest is brackets and the starts of lines.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from pygments.lexer import RegexLexer, default, include, inherit
from pygments.lexers.c_cpp import CppLexer
from pygments.lexers.javascript import JavascriptLexer
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Error, Punctuation, String

from llmfoundry_gauntlet.scoring.code.digressions import MAX_LINE_CHARACTERS, is_digression
from llmfoundry_gauntlet.scoring.code.programs import CPP, JAVASCRIPT, PYTHON

IN_STRING = '"'  # stands for every character of a string, the ends of its lines included

# A line that opens or closes a Markdown code block: its indentation, marks and info string.
FENCE = re.compile(
    r'^(?:(?P<indent>[ \t>]*)|[^\n`]*[:.!][ \t]+)(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>[^\n`]*?)[ \t]*$', re.MULTILINE
)
BRACKETS = re.compile(r'[()\[\]{}]|\n')
BLANK_LINES = re.compile(r'\n\s*\n')
WORD = re.compile(r'\w+')

# The functions and types that a statement at the start of a line defines.
FUNCTIONS = {
    PYTHON: re.compile(r'(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)'),  # def f, class Solution
    CPP: re.compile(  # template <class T> T f(vector<T> a) {, struct Node {, int f(int);
        r'(?!(?:return|else|case|throw|delete|goto|new)\b)(?:template[ \t]*<[^;{}]{0,300}>\s*)?'
        r'(?:(?:struct|class|enum(?:[ \t]+class)?|union)[ \t]+(\w+)[^;()]{0,200}?[{;]'
        r'|[\w:][^\n(){};=]{0,200}?[\s>*&](\w+)\s*\([^(){};]*(?:\([^(){};]*\)[^(){};]*)*\)[\w\s]*[{;])'
    ),
    JAVASCRIPT: re.compile(  # function f, class A, const f = (a) =>, exports.f = function
        r'(?:export[ \t]+(?:default[ \t]+)?)?(?:(?:async[ \t]+)?function[ \t]*\*?[ \t]*(\w[\w$]*)|class[ \t]+(\w+)'
        r'|(?:(?:const|let|var)[ \t]+|(?:module[ \t]*\.[ \t]*)?exports[ \t]*\.[ \t]*)?(\w[\w$]*)[ \t]*=[ \t]*'
        r'(?:async\b[ \t]*)?(?:function\b|class\b|\w+[ \t]*=>|\([^()]*(?:\([^()]*\)[^()]*)*\)[ \t]*=>))'
    ),
}
# The values that it defines.
VALUES = {
    PYTHON: re.compile(r'(\w+)[ \t]*(?::[^=\n]*)?=(?!=)'),  # x = 1, x: int = 1
    CPP: re.compile(r'[\w:][^\n(){};=]{0,200}?[\s>*&](\w+)[ \t]*(?:\[[^\]\n]*\][ \t]*)*(?:=|\{[^{}\n]*\}[ \t]*;|;)'),
    JAVASCRIPT: re.compile(r'(?:export[ \t]+)?(?:const|let|var)[ \t]+(\w[\w$]*)[ \t]*='),
}
CONSTANT = re.compile(r'[A-Z_][A-Z0-9_]*')
WHOLE_EXPORT = re.compile(r'module[ \t]*\.[ \t]*exports[ \t]*=|export[ \t]+default\b')
# Statements that begin whatever brackets seem to be open: one in the prose before them may never be closed.
RESTARTS = {
    PYTHON: re.compile(
        r'(?:async[ \t]+)?def[ \t]+\w+[ \t]*\(|class[ \t]+\w+[ \t]*[:(]|from[ \t]+[\w.]+[ \t]+import\b|@\w'
    ),
    CPP: re.compile(r'#[ \t]*include\b|using[ \t]+namespace\b'),
    JAVASCRIPT: re.compile(r'(?!)'),
}
# A line that continues the statement of the line before it, though it begins at the left margin.
CONTINUES = {
    PYTHON: re.compile(r'(?!)'),
    CPP: re.compile(r'[{})\]]'),
    JAVASCRIPT: re.compile(r'[{})\].,?:]|&&|\|\|'),
}


class Javascript(JavascriptLexer):  # type: ignore[misc]
    """Pygments' lexer with four repairs, for version 2.21.

    Strings end with their line, so that an apostrophe in prose does not swallow the program that follows. Braces inside
    `${...}` nest. A pattern may follow an arrow. A string or pattern that the end of the text cuts off is one: what is
    in it may not end a program.
    """

    name = 'JavaScript in answers'
    aliases: ClassVar[list[str]] = []

    tokens: ClassVar[dict[str, list[object]]] = {
        'root': [
            (r'"(?:\\.|[^"\\\n])*(?:"|\\?\Z)', String.Double),
            (r"'(?:\\.|[^'\\\n])*(?:'|\\?\Z)", String.Single),
            (r'["\']', Error),
            (r'=>', Punctuation, 'slashstartsregex'),
            inherit,
        ],
        'slashstartsregex': [
            (r'/(?![/*])(?:\\.|[^[/\\\n]|\[(?:\\.|[^\]\\\n])*(?:\]|\\?\Z))*\\?\Z', String.Regex, '#pop'),
            inherit,
        ],
        'interp-inside': [
            (r'\{', Punctuation, ('nested', 'slashstartsregex')),
            inherit,
        ],
        'nested': [
            (r'\{', Punctuation, ('#push', 'slashstartsregex')),
            (r'\}', Punctuation, '#pop'),
            include('root'),
        ],
    }


class Cpp(CppLexer):  # type: ignore[misc]
    """Pygments' lexer with two repairs, for version 2.21.

    Its patterns for the heads of functions, which take minutes for an answer of white space, are left out. A comment or
    string that the end of the text cuts off is one, and so is a line after `#if 0`.
    """

    name = 'C++ in answers'
    aliases: ClassVar[list[str]] = []

    tokens: ClassVar[dict[str, list[object]]] = {
        'root': [default('function')],
        'whitespace': [
            (r'//[^\n]*\Z', Comment.Single),
            inherit,
        ],
        'if0': [
            (r'[^\n]+\Z', Comment),
            inherit,
        ],
        'statements': [
            (r'(?:[LuU]|u8)?R"(?:[^\\()\s"]{,16}\Z|([^\\()\s"]{,16})\((?:[^)]|\)(?!\1"))*\Z)', String),
            (r"'(?:\\.|[^'\\\n])*\\?\Z", String.Char),
            inherit,
        ],
    }


@functools.cache
def lexer_of(language: str) -> RegexLexer:
    """Return the lexer of a language."""
    lexers: dict[str, type[RegexLexer]] = {PYTHON: PythonLexer, CPP: Cpp, JAVASCRIPT: Javascript}
    return lexers[language]()


@functools.lru_cache(maxsize=64)
def masked(text: str, language: str) -> str:
    """Return a text of the same length in which comments are blank and strings hold nothing but IN_STRING.

    A line end inside a string is masked too: what follows it does not begin a line of the program. The brackets of C++
    macros are blank, as they need not close.
    """
    if language == CPP:  # its lexer takes quadratic time for blank lines
        text = BLANK_LINES.sub(lambda lines: '\n' + ' ' * (len(lines[0]) - 2) + '\n', text)
    parts = []
    for _, kind, value in lexer_of(language).get_tokens_unprocessed(text):
        if kind in Comment.Preproc:
            parts.append(re.sub(r'[()\[\]{}]', ' ', value))
        elif kind in Comment and kind not in Comment.PreprocFile:
            parts.append(re.sub(r'[^\n]', ' ', value))
        elif kind in String:
            parts.append(IN_STRING * len(value))
        else:
            parts.append(value)
    return ''.join(parts)


@functools.lru_cache(maxsize=64)
def top_lines(code: str, language: str) -> tuple[int, ...]:
    """Return where lines of masked code begin at the left margin, outside brackets, with a statement of their own."""
    starts = []
    depth = 0
    is_continued = False
    for start, line in lines_with_starts(code):
        restarts = RESTARTS[language].match(line)
        if restarts:
            depth = 0
        is_statement = bool(line.strip()) and not line[0].isspace() and not CONTINUES[language].match(line)
        if is_statement and depth == 0 and (restarts or not is_continued):
            starts.append(start)
        for bracket in BRACKETS.findall(line):
            # A bracket that closes nothing is prose, or the end of the function that the prompt began.
            depth = depth + 1 if bracket in '([{' else max(0, depth - 1)
        is_continued = line.rstrip('\n').endswith('\\')
    return tuple(starts)


def lines_with_starts(text: str) -> Iterator[tuple[int, str]]:
    """Yield the start of every line and the line; only a line feed ends one."""
    start = 0
    for line in text.split('\n'):
        yield start, line
        start += len(line) + 1


def defined_name(code: str, start: int, patterns: Mapping[str, re.Pattern[str]], language: str) -> str | None:
    """Return the name that the statement at `start` of masked code defines, None if it defines nothing."""
    definition = patterns[language].match(code, start)
    if definition is None:
        return None
    return next(filter(None, definition.groups()), None)


def definition_of(code: str, language: str, target: str) -> int | None:
    """Return where masked code first defines the function `target` at its top level, None if it does not.

    In JavaScript what a whole module exports also counts, in Python any value of that name.
    """
    closing = None if language == PYTHON else unopened_brace(code)  # of the function that the prompt began
    for start in top_lines(code, language):
        if closing is not None and start >= closing:
            return None
        definition = FUNCTIONS[language].match(code, start)
        if definition and target in definition.groups():
            is_declaration = language == CPP and not definition[0].endswith('{')
            if not is_declaration:
                return start
        if language == PYTHON and defined_name(code, start, VALUES, PYTHON) == target:
            return start
        if language == JAVASCRIPT and WHOLE_EXPORT.match(code, start):
            return start
    return None


def unopened_brace(code: str) -> int | None:
    """Return the end of the first closing brace in masked code that the code did not open, None without one."""
    depth = 0
    for brace in re.finditer(r'[{}]', code):
        depth += 1 if brace[0] == '{' else -1
        if depth < 0:
            return brace.end()
    return None


def end_of_definitions(code: str, language: str, defined: int) -> int | None:
    """Return the end of a whole program in masked code which defines its function at `defined`; None if it may go on.

    After that function come only functions, types and constants whose names the program used before. Anything else at
    the left margin (a call, a test, prose, the next function that a base model goes on to write) is not part of it.
    """
    defines = FUNCTIONS[language].match(code, defined)
    head_end = defines.end() if defines else defined + 1  # which may take several lines
    for start in top_lines(code, language):
        if start < head_end:
            continue
        if language == PYTHON and code[start] == '@':
            continue  # the line after it decides
        if not is_complete(code, start, language):
            return None
        name = defined_name(code, start, FUNCTIONS, language)
        if name is None:
            name = defined_name(code, start, VALUES, language)
            if name is not None and not CONSTANT.fullmatch(name):
                name = None
        is_redefined = name is not None and name == defined_name(code, defined, FUNCTIONS, language)
        if name is None or is_redefined or name not in WORD.findall(code[:start]):
            return before_decorators(code, start)
        kept = FUNCTIONS[language].match(code, start)
        head_end = kept.end() if kept else head_end
    return None


def is_complete(code: str, start: int, language: str) -> bool:
    """Return whether the text is long enough to tell what the statement at `start` defines."""
    if language == CPP:
        return bool(re.compile(r'[;{]|\n[ \t]*\n').search(code, start))
    # A string defines nothing, and one that is never closed has no line end.
    return code[start] == IN_STRING or '\n' in code[start:]


def before_decorators(code: str, start: int) -> int:
    """Return the start of the decorators above a line, between which there may be blank lines."""
    while True:
        before = code[:start].rstrip()
        above = before.rfind('\n') + 1
        if not before.startswith('@', above):
            return start
        start = above


def first_of_code(code: str) -> int | None:
    """Return the place of the first character of masked code that is not white space."""
    character = re.search(r'\S', code)
    return character.start() if character else None


def is_body(text: str, code: str, *, continues_line: bool) -> bool:
    """Return whether a Python text begins inside the function that the prompt began; `code` is the text, masked."""
    first = first_of_code(code)
    if first is None:
        return False
    line = code.rfind('\n', 0, first) + 1
    if line == 0 and continues_line:
        return not has_words(text.partition('\n')[0]) and not RESTARTS[PYTHON].match(text)
    return line < first


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of a generation that is a program, or that holds one.

    A generation which simply continues the prompt ends with the function: in Python before the next line at the left
    margin (outside strings and brackets; comments do not count), in C++ and JavaScript with its closing brace. One that
    defines the function `target` anew ends before the first line that cannot belong to the program. One with Markdown
    code blocks ends only with the text, as a later block may hold a better program.

    A longer text has the same end: a generation that was stopped there is scored as one that was not.
    `continues_line`: the prompt ends in the middle of a line. `in_chat`: the prompt is a message of a chat, so its
    answer may introduce the program at any length.
    """

    language: str
    target: str
    continues_line: bool = False
    in_chat: bool = False

    def position(self, text: str) -> int | None:
        """Return where the program in a text ends, None if it may go on."""
        text = same_lines(text)
        if self._has_no_end(text):
            return None
        fence = first_fence(text, self.language)
        before = text if fence is None else text[:fence]
        code = masked(before, self.language)
        if self.language == PYTHON and is_body(before, code, continues_line=self.continues_line):
            first = first_of_code(code)
            later = [start for start in top_lines(code, PYTHON) if first is not None and start > first]
            return later[0] if later else fence
        defined = definition_of(code, self.language, self.target)
        if defined is not None:
            end = end_of_definitions(code, self.language, defined)
            return fence if end is None else end
        return None if self.language == PYTHON else unopened_brace(code)

    def may_end(self, text: str, start: int) -> bool:
        """Return whether characters from `start` on may be what ends a program. It is quick, and may rarely be wrong.

        A generation that is stopped late for it is cut at the same place when it is scored.
        """
        line_start = text.rfind('\n', 0, start) + 1
        touched_lines = text[line_start:]
        if re.search(r'(?:^|\n)[ \t]*[`~]{3}', touched_lines):
            return True
        # A line at the left margin is looked at when it begins and when it ends, as each look reads the whole text.
        begins_or_ends_line = start == line_start or '\n' in text[start:]
        # In C++ and JavaScript only a program that defines the function anew ends before such a line.
        may_end_before_line = self.language == PYTHON or self._may_define_function(text)
        if begins_or_ends_line and may_end_before_line and re.search(r'(?:^|\n)[^\s#]', touched_lines):
            return True
        return self.language != PYTHON and '}' in text[start:] and text.count('}') > text.count('{')

    def gives_up(self, text: str, start: int) -> bool:
        """Return whether a generation may end though its program does not: it is none, and its prompt no message.

        Characters from `start` on are new. Only a model that is asked for more tokens uses this; a text is scored as it
        is.
        """
        if self.in_chat or not ('\n' in text[start:] or len(text) >= MAX_LINE_CHARACTERS):
            return False
        return is_digression(same_lines(text), self.language, continues_line=self.continues_line)

    def _has_no_end(self, text: str) -> bool:
        """Return whether a text lacks what the end of any program needs. It is quick: nothing is lexed."""
        if self._may_define_function(text):
            return False
        if self.language != PYTHON:
            return '}' not in text
        first = text.lstrip('\n')[:1]
        begins_at_margin = bool(first) and not first.isspace() and first != '#'
        return begins_at_margin and (text.startswith('\n') or not self.continues_line)

    def _may_define_function(self, text: str) -> bool:
        """Return whether the name of the function, or the export of a whole module, is anywhere in a text."""
        return self.target in text or 'export' in text

    def __str__(self) -> str:
        return f'where the {self.language} program ends'


def first_fence(text: str, language: str) -> int | None:
    """Return the start of the first line that opens or closes a code block, outside strings and comments."""
    for fence in FENCE.finditer(text):
        # A JavaScript lexer takes the marks for a template literal, so there the line alone decides.
        # The text up to the end of the line is enough, and is not lexed again when more has been generated.
        place = fence.start('marks')
        if language == JAVASCRIPT or masked(text[: fence.end() + 1], language)[place] == fence['marks'][0]:
            return fence.start()
    return None


def same_lines(text: str) -> str:
    """Return a text of the same length whose lines all end in a single line feed."""
    return text.replace('\r\n', ' \n').replace('\r', '\n')


# Words that may stand beside another word in Python or JavaScript.
KEYWORDS = frozenset(
    {
        # Python's
        *keyword.kwlist,
        *keyword.softkwlist,
        'print',
        # JavaScript's that declare
        'const',
        'export',
        'extends',
        'function',
        'get',
        'let',
        'set',
        'static',
        'var',
        # JavaScript's in statements and expressions
        'case',
        'default',
        'delete',
        'instanceof',
        'new',
        'of',
        'switch',
        'throw',
        'typeof',
        'void',
    }
)
ALONE = frozenset({'default', 'else', 'except', 'finally', 'try'})  # statements that are one word and a colon
QUOTED = re.compile(r"""(?<!\w)[bfruBFRU]{0,2}(?:'[^'\n]*'|"[^"\n]*")|(?:#|//).*""")
TWO_WORDS = re.compile(r"(?<![\w'\u2019])([^\W\d]\w*)[ \t]+(?=([^\W\d]\w*))")
# One word with a colon or full stop ("Solution:"), a contraction ("Here's"), or Markdown and special tokens.
ONE_WORD = re.compile(r'(\w+)[:!.?]')
INTRODUCTION = re.compile(rf'(?!(?:{"|".join(sorted(KEYWORDS))})\b)\w+,?[ \t][^()\[\]{{}}="]*:')  # "This is it:"
CONTRACTION = re.compile(r"\w+['\u2019](?:s|re|m|ll|ve|d|t)\b")
MARKUP = re.compile(r'(?:[-*+>|]|\d+[.)])\s|\*\*|<[|/]|[^\x00-\x7f]')


def is_prose(line: str) -> bool:
    """Return whether a line of an answer is prose or markup rather than Python or JavaScript."""
    return bool(MARKUP.match(line.strip())) or has_words(line)


def has_words(line: str) -> bool:
    """Return whether a line has words side by side, as prose has and Python and JavaScript have not."""
    words = QUOTED.sub('""', line).strip()
    alone = ONE_WORD.fullmatch(words)
    if alone:
        return alone[1] not in ALONE
    if CONTRACTION.match(words) or INTRODUCTION.fullmatch(words):
        return True
    return any(KEYWORDS.isdisjoint(pair.groups()) for pair in TWO_WORDS.finditer(words))
