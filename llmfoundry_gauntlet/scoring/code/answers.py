"""Take the program out of an answer: out of code blocks, from between sentences, with or without a signature."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmfoundry_gauntlet.scoring.code.lexers import (
    FENCE,
    FUNCTIONS,
    WHOLE_EXPORT,
    ProgramEnd,
    defined_name,
    definition_of,
    end_of_definitions,
    first_of_code,
    is_body,
    is_prose,
    masked,
    same_lines,
    top_lines,
    unopened_brace,
)
from llmfoundry_gauntlet.scoring.code.programs import CPP, JAVASCRIPT, PYTHON

INFO_STRINGS = {
    PYTHON: frozenset({'', 'python', 'python3', 'py', 'pycon'}),
    CPP: frozenset({'', 'c++', 'cpp', 'cc', 'cxx', 'c'}),
    JAVASCRIPT: frozenset({'', 'javascript', 'js', 'node', 'jsx', 'mjs', 'typescript', 'ts'}),
}
INLINE = re.compile(r'(?P<marks>`+)(?:(?:python|py|cpp|c\+\+|javascript|js)[ \t])?(?P<code>[^\n`]+)(?P=marks)\s*')
IMPORTS = {
    PYTHON: re.compile(r'(?:import|from)\b'),
    CPP: re.compile(r'#|using\b|typedef\b|namespace\b'),
    JAVASCRIPT: re.compile(r'import\b|"use strict"|(?:const|let|var)[^=\n]*=[ \t]*require\b'),
}
METHOD = {
    PYTHON: r'^[ \t]+(?:async[ \t]+)?def[ \t]+{name}[ \t]*\(',
    CPP: r'[\s>*&]{name}\s*\(',
    JAVASCRIPT: r'^[ \t]*(?:async[ \t]+)?{name}[ \t]*\(',
}
OF_CLASS = {PYTHON: '{name}().{target}', CPP: '{name}().{target}', JAVASCRIPT: 'new {name}().{target}'}
EXPORTED = 'module.exports'  # of a JavaScript module
SIGN_OF_CODE = re.compile(r'[;{}()=]|//|/\*|^[ \t]*#[ \t]*(?:define|if|include|pragma|undef)')  # C++, JavaScript
LAST_LINE = '\n\n.\n'  # a statement that is no definition, which ends the ones before it


@dataclass(frozen=True, slots=True)
class CodeAnswer:
    """The program in an answer: the body of the prompt's function, or with `function` a program of its own.

    `function` is an expression for the function in that program, such as its name. `is_marked`: the code stood in a
    code block.
    """

    code: str
    function: str | None = None
    is_marked: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A Markdown code block."""

    info: str
    code: str


def read_answer(text: str, end: ProgramEnd) -> CodeAnswer:
    """Return the program in an answer up to its end.

    Of several code blocks the last one that defines the function counts, with helpers that other blocks define.
    """
    text = same_lines(text[: end.position(text)])
    language, target = end.language, end.target

    # Marks of code blocks inside a body belong to its strings, unless it begins with one.
    is_python_body = language == PYTHON and is_body(text, masked(text, PYTHON), continues_line=end.continues_line)
    begins_block = FENCE.match(text.lstrip('\n')) is not None
    blocks = [] if is_python_body and not begins_block else code_blocks(text)
    inline = INLINE.fullmatch(text.strip())
    if blocks:
        text = joined_blocks(blocks, language, target)
    elif inline:
        text = inline['code'] + '\n'
    is_marked = bool(blocks or inline)
    if is_python_body and not is_marked:
        return CodeAnswer(text)
    return (
        whole_program(text, language, target, is_marked=is_marked)
        or program_of_class(text, language, target, is_marked=is_marked)
        or function_body(text, language, is_marked=is_marked)
    )


def code_blocks(text: str) -> list[Block]:
    """Return the code blocks of a Markdown text; the last one may be unfinished."""
    blocks = []
    opening: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence['info'] and fence['marks'].startswith(opening['marks']):
            blocks.append(block_of(opening, text[opening.end() + 1 : fence.start()]))
            opening = None
    if opening is not None:
        before, after = text[: opening.start()].strip(), text[opening.end() + 1 :].rstrip()
        if before and not blocks and not opening['info'] and (not after or before.endswith((';', '}'))):
            # It closes a block that the prompt opened.
            blocks.append(Block('', text[: opening.start()]))
        else:
            blocks.append(block_of(opening, after.removesuffix(opening['marks']) + '\n'))
    return [block for block in blocks if block.code.strip()]


def block_of(opening: re.Match[str], code: str) -> Block:
    """Return a block, its lines without the indentation and the quotation marks of the line that opened it."""
    indent = opening['indent'] or ''
    if '>' in indent:
        code = re.sub(r'^[ \t]*>[ \t]?', '', code, flags=re.MULTILINE)
    elif indent:
        code = re.sub(rf'^[ \t]{{1,{len(indent)}}}', '', code, flags=re.MULTILINE)
    info = opening['info'].lower().strip('{}. ')
    return Block(re.split(r'[\s{,:]', info, maxsplit=1)[0], code)


def joined_blocks(blocks: Sequence[Block], language: str, target: str) -> str:
    """Return the code of the block that counts, and of others that only define what it may use."""
    of_language = [block for block in blocks if block.info in INFO_STRINGS[language]] or list(blocks)
    codes = [textwrap.dedent(block.code) for block in of_language]
    defining = [place for place, code in enumerate(codes) if defines(code, language, target)]
    if not defining:
        bodies = [block.code for block in of_language if re.search(r'\breturn\b', block.code)]
        return bodies[-1] if bodies else of_language[0].code
    last = defining[-1]
    chosen = {last}
    names = defined_names(codes[last], language)
    # From the last to the first: of a helper that is written twice the later one counts.
    for place in reversed(range(len(codes))):
        new_names = defined_names(codes[place], language)
        if place not in defining and not new_names & names and only_defines(codes[place], language):
            chosen.add(place)
            names |= new_names
    return '\n'.join(codes[place].rstrip('\n') + '\n' for place in sorted(chosen))


def defines(code: str, language: str, target: str) -> bool:
    """Return whether code defines a function, in a class or not."""
    is_defined = definition_of(masked(code, language), language, target) is not None
    return is_defined or class_with(code, language, target) is not None


def defined_names(code: str, language: str) -> set[str]:
    """Return the names of the functions and types that code defines at its top level."""
    hidden = masked(code, language)
    names = (defined_name(hidden, start, FUNCTIONS, language) for start in top_lines(hidden, language))
    return {name for name in names if name is not None}


def only_defines(code: str, language: str) -> bool:
    """Return whether code consists of imports, functions and types."""
    hidden = masked(code, language)
    starts = top_lines(hidden, language)
    for start in starts:
        if not IMPORTS[language].match(hidden, start) and not FUNCTIONS[language].match(hidden, start):
            return False
    return bool(starts)


def whole_program(text: str, language: str, target: str, *, is_marked: bool) -> CodeAnswer | None:
    """Return the program that defines the function itself, None if none does; prose between its parts is left out."""
    code = masked(text, language)
    defined = definition_of(code, language, target)
    if defined is None:
        return None
    function = target
    if language == JAVASCRIPT and WHOLE_EXPORT.match(code, defined):
        function = EXPORTED
    return CodeAnswer(program_around(text, language, defined), function, is_marked)


def program_of_class(text: str, language: str, target: str, *, is_marked: bool) -> CodeAnswer | None:
    """Return the program whose class, such as `Solution`, has the function as a method; None without one."""
    start = class_with(text, language, target)
    if start is None:
        return None
    name = defined_name(masked(text, language), start, FUNCTIONS, language)
    function = OF_CLASS[language].format(name=name, target=target)
    return CodeAnswer(program_around(text, language, start), function, is_marked)


def class_with(text: str, language: str, target: str) -> int | None:
    """Return the start of the class that has a method of this name, None without one."""
    code = masked(text, language)
    method = re.compile(METHOD[language].format(name=re.escape(target)), re.MULTILINE)
    starts = top_lines(code, language)
    for start, after in pairwise((*starts, len(code))):
        if re.match(r'(?:class|struct)\b', code[start:]) and method.search(code, start, after):
            return start
    return None


def program_around(text: str, language: str, defined: int) -> str:
    """Return the statements of the program whose function, or its class, is defined at `defined`."""
    # The program may end with the text, which is no end that `end_of_definitions` sees.
    end = end_of_definitions(masked(text + LAST_LINE, language), language, defined)
    end_of_program = len(text) if end is None else min(end, len(text))

    starts = [start for start in top_lines(masked(text, language), language) if start < end_of_program]
    statements = [text[start:after] for start, after in pairwise((*starts, end_of_program))]
    of_program = [statement for statement in statements if not is_comment_on(statement, language)]
    return ''.join(of_program).rstrip() + '\n'


def is_comment_on(statement: str, language: str) -> bool:
    """Return whether a top-level statement of an answer is prose."""
    if language == CPP:
        return not re.search(r'[;{}#]', masked(statement, CPP)) and not statement.startswith('template')
    return is_prose(statement.partition('\n')[0])


def function_body(text: str, language: str, *, is_marked: bool) -> CodeAnswer:
    """Return the body of the function in a text without a function of that name."""
    if language == PYTHON:
        return CodeAnswer(python_body(text), is_marked=is_marked)
    body = without_prose_before(text)
    closing = unopened_brace(masked(body, language))
    if closing is not None:
        return CodeAnswer(body[:closing] + '\n', is_marked=is_marked)
    # The closing brace of the function is often left out of a block, as the prompt has the opening one.
    return CodeAnswer(body.rstrip('\n') + '\n}\n' if is_marked else body, is_marked=is_marked)


def without_prose_before(text: str) -> str:
    """Return a C++ or JavaScript text from its first line with a sign of code."""
    lines = text.splitlines(keepends=True)
    while lines and not SIGN_OF_CODE.search(lines[0]):
        lines.pop(0)
    while lines and is_prose(lines[0]) and lines[0].rstrip().endswith((':', '.')):
        lines.pop(0)
    return ''.join(lines)


def python_body(text: str) -> str:
    """Return the body of a Python function, without prose before and after it."""
    code = masked(text, PYTHON)
    begin = 0
    for start in top_lines(code, PYTHON):
        if first_of_code(code[begin:start]) is not None or not is_prose(line_at(text, start)):
            break
        begin = start + len(line_at(text, start)) + 1
    body, code = text[begin:], code[begin:]
    first = first_of_code(code)
    if first is None:
        return body
    later = [start for start in top_lines(code, PYTHON) if start > first]
    is_at_margin = code.rfind('\n', 0, first) + 1 == first
    if is_at_margin and is_consistent(code):
        # Written without indentation: it goes on until prose, or what cannot be reached.
        later = [start for start in later if is_prose(line_at(body, start)) or follows_return(code, start)]
    return body[: later[0]] if later else body


def line_at(text: str, start: int) -> str:
    """Return the line that begins at `start`."""
    return text[start:].partition('\n')[0]


def follows_return(code: str, start: int) -> bool:
    """Return whether a `return` at the left margin stands before a line."""
    return re.search(r'^return\b', code[:start], re.MULTILINE) is not None


def is_consistent(code: str) -> bool:
    """Return whether the lines of masked Python go back only to columns at which an earlier line began, up to `return`.

    This fails if the first line alone has lost its indentation.
    """
    columns: list[str] = []
    opens_block = True
    for line in statements_of(code):
        column = line[: len(line) - len(line.lstrip())]
        if opens_block:
            if columns and len(column) <= len(columns[-1]):
                return False
            columns.append(column)
        else:
            while columns and len(column) < len(columns[-1]):
                columns.pop()
            if not columns or column != columns[-1]:
                return False
        if re.match(r'return\b', line):
            return True
        opens_block = line.rstrip().endswith(':')
    return True


def statements_of(code: str) -> list[str]:
    """Return the statements of masked Python, each with its indentation; lines inside brackets are joined."""
    statements: list[str] = []
    depth = 0
    for line in code.split('\n'):
        if depth > 0:
            statements[-1] += line
        elif line.strip():
            statements.append(line)
        depth = max(0, depth + len(re.findall(r'[(\[{]', line)) - len(re.findall(r'[)\]}]', line)))
    return statements
