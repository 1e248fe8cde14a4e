"""Join the program in an answer with its problem's prompt."""

from __future__ import annotations

import re
from dataclasses import replace

from llmfoundry_gauntlet.scoring.code.answers import CodeAnswer, is_consistent, read_answer, statements_of
from llmfoundry_gauntlet.scoring.code.lexers import ProgramEnd, masked
from llmfoundry_gauntlet.scoring.code.programs import CPP, JAVASCRIPT, PYTHON, Program, signature_of, whole_text

INDENTATION = '    '
FUTURE = re.compile(r'^from[ \t]+__future__[ \t]+import\b[^\n]*\n', re.MULTILINE)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include\b[^\n]*\n?', re.MULTILINE)
EXPORT = re.compile(r'^export[ \t]+(default[ \t]+)?', re.MULTILINE)

# The answer's own program has a scope of its own: it may repeat what the prompt has defined, and in C++ its function
# may take and return other types than the prompt's, such as references.
CPP_PROGRAM = """{includes}{prelude}
namespace gauntlet_answer {{
{code}
}}
{returns} {name}({parameters}) {{ return gauntlet_answer::{function}({names}); }}
"""
JAVASCRIPT_PROGRAM = """{prelude}
var {name} = (() => {{
const module = {{exports: {{}}}}, exports = module.exports;
{code}
return {function};
}})();
"""
OF_CLASS = '{code}\n{name} = {function}\n'
EXPORTED_FUNCTION = "typeof module.exports === 'function' ? module.exports : module.exports.{name}"


def program_end(program: Program, *, in_chat: bool = False) -> ProgramEnd:
    """Return where a generation that completes this program ends."""
    return ProgramEnd(
        language=program.language,
        target=program.function,
        continues_line=not program.prompt.endswith('\n'),
        in_chat=in_chat,
    )


def source_of(program: Program, text: str) -> str:
    """Return the source of the program in an answer: the prompt with the body, or the answer's own function."""
    answer = read_answer(text, program_end(program))
    if answer.function is not None:
        return OWN_PROGRAMS[program.language](program, answer.code, answer.function)
    if program.language == PYTHON:
        return with_python_body(program, answer)
    return whole_text(program, answer.code)


def own_python(program: Program, code: str, function: str) -> str:
    """Return the source of a whole Python program after the imports and helpers of the prompt."""
    futures = ''.join(FUTURE.findall(code))  # must come first
    code = FUTURE.sub('', code)
    if function != program.function:
        code = OF_CLASS.format(code=code, name=program.function, function=function)
    return f'{futures}{program.prelude}\n{code}'


def own_cpp(program: Program, code: str, function: str) -> str:
    """Return the source of a whole C++ program, whose function is called by one with the prompt's signature."""
    try:
        signature = signature_of(program)
        names = ', '.join(signature.names)
    except ValueError:
        return f'{program.prelude}\n{code}'
    return CPP_PROGRAM.format(
        includes=''.join(line.rstrip('\n') + '\n' for line in INCLUDE.findall(code)),
        prelude=program.prelude,
        code=INCLUDE.sub('', code),
        returns=signature.returns,
        name=signature.name,
        parameters=signature.parameters,
        names=names,
        function=function,
    )


def own_javascript(program: Program, code: str, function: str) -> str:
    """Return the source of a whole JavaScript program."""
    if re.match(r'module\b', function):
        code = re.sub(r'^export[ \t]+default\b', 'module.exports =', code, flags=re.MULTILINE)
        function = EXPORTED_FUNCTION.format(name=program.function)
    code = EXPORT.sub('', code)
    return JAVASCRIPT_PROGRAM.format(prelude=program.prelude, name=program.function, code=code, function=function)


OWN_PROGRAMS = {PYTHON: own_python, CPP: own_cpp, JAVASCRIPT: own_javascript}


def with_python_body(program: Program, answer: CodeAnswer) -> str:
    """Return the prompt with a Python body after it, indented as the prompt's function is."""
    body = answer.code
    code = masked(body, PYTHON)
    statements = statements_of(code)
    if not statements:
        return whole_text(program, body)
    begun = program.prompt.rpartition('\n')[2]
    begun_code = masked(begun, PYTHON).strip()
    if begun_code and (answer.is_marked or len(begun_code) > 1) and statements[0].lstrip().startswith(begun_code):
        # The body repeats the line in which the prompt ends.
        program = replace(program, prompt=program.prompt.removesuffix(begun))
    elif begun and not answer.is_marked and not body.startswith(('  ', '\t', '\n')):
        return whole_text(program, body)  # it continues that line
    own = statements_of(masked(program.prompt[len(program.prelude) :], PYTHON))
    if (own and is_unfinished(own[-1])) or fits(statements[0], own):
        return whole_text(program, body)
    joint = '' if program.prompt.endswith('\n') else '\n'
    return program.prompt + joint + indented(body, code, indentation_in(own))


def fits(statement: str, own: list[str]) -> bool:
    """Return whether a statement may follow these statements of a Python function with the indentation that it has."""
    column = column_of(statement)
    if not own:
        return column != ''
    opens_block = own[-1].rstrip().endswith(':')
    if opens_block and column and column.startswith(column_of(own[-1])):
        return True
    columns_of_body = [column_of(earlier) for earlier in own[1:]]
    return column in columns_of_body


def is_unfinished(statement: str) -> bool:
    """Return whether a masked Python statement ends inside brackets."""
    return len(re.findall(r'[(\[{]', statement)) > len(re.findall(r'[)\]}]', statement))


def indentation_in(own: list[str]) -> str:
    """Return the indentation of what comes after these statements of a Python function."""
    if not own:
        return INDENTATION
    column = column_of(own[-1])
    return column + INDENTATION if own[-1].rstrip().endswith(':') else column


def column_of(statement: str) -> str:
    """Return the white space before a statement."""
    return statement[: len(statement) - len(statement.lstrip())]


def indented(body: str, code: str, indentation: str) -> str:
    """Return a Python body with its first statement at this indentation, and the others in step with it."""
    statements = statements_of(code)
    column = column_of(statements[0])
    only_first = column == '' and not is_consistent(code)
    lines: list[str] = []
    start = 0
    # Lines end where masked lines do: those inside strings keep their indentation.
    for hidden in code.split('\n'):
        line = body[start : start + len(hidden)]
        start += len(hidden) + 1
        if line.startswith(column) and line.strip() and not (only_first and any(lines)):
            line = indentation + line.removeprefix(column)
        lines.append(line)
    return '\n'.join(lines)
