"""Split a problem and its test, so that a completion runs without access to the test."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from llmfoundry_gauntlet.scoring.code.languages import CPP, LANGUAGES, PYTHON


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A problem of one language.

    `prelude` is what its prompt has before the function to write, whose name is `target`: imports and helpers that the
    test may use as well. `pairs` are source texts of arguments and results, which take the place of the test where they
    are not None; they are calls of the entry point, whatever else a prompt begins. `joins_lines` gives an indented
    Python completion a line of its own where the prompt does not end one.
    """

    language: str
    prompt: str
    prelude: str
    target: str
    test: str
    pairs: tuple[tuple[str, str], ...] | None = None
    joins_lines: bool = True


class Begun(NamedTuple):
    """A function that a text begins, and where; for C++ also its return type and parameters."""

    start: int
    name: str
    returns: str = ''
    parameters: str = ''

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters. Raise ValueError for a parameter without one."""
        return [name_of(part) for part in split_parameters(self.parameters)]


def make_program(
    *,
    language: str,
    prompt: str,
    entry_point: str,
    test: str,
    pairs: tuple[tuple[str, str], ...] | None = None,
    joins_lines: bool = True,
) -> Program:
    """Return a problem split into its parts. If a prompt begins no function, `entry_point` is the one to write."""
    prelude, target = '', entry_point
    if begun := functions(language, prompt):
        prelude, target = prompt[: begun[-1].start], begun[-1].name
    return Program(
        language=language,
        prompt=prompt,
        prelude=prelude,
        target=target if pairs is None else entry_point,
        test=test,
        pairs=pairs,
        joins_lines=joins_lines,
    )


def functions(language: str, text: str) -> list[Begun]:
    """Return all functions that begin at the start of a line."""
    found = LANGUAGES[language].begins.finditer(text)
    if language == CPP:
        return [
            Begun(match.start(), match['name'], bare_type(match['returns']), match['parameters'].strip())
            for match in found
        ]
    return [Begun(match.start(), next(filter(None, match.groups()))) for match in found]


def signature_of(program: Program) -> Begun:
    """Return how a C++ prompt declares the function to write. Raises ValueError where it does not."""
    begun = [function for function in functions(CPP, program.prompt) if function.name == program.target]
    if not begun:
        raise ValueError(f'the prompt does not begin {program.target}')
    return begun[-1]


def bare_type(text: str) -> str:
    """Return a type without linkage specifiers."""
    return ' '.join(word for word in text.split() if word not in ('inline', 'static', 'constexpr', 'extern'))


def split_parameters(text: str) -> list[str]:
    """Return the parameters; their types may contain commas."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in '<{[') - (letter in '>}]')
        if letter == ',' and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def name_of(parameter: str) -> str:
    """Return the name of a parameter."""
    found = re.search(r'(\w+)\s*(?:\[\s*\]\s*)?$', parameter.split('=')[0].strip())
    if found is None:
        raise ValueError(f'the parameter {parameter!r} has no name')
    return found[1]


def whole_text(program: Program, completion: str) -> str:
    """Return prompt and completion as one text.

    In Python an indented completion begins a new line, which the prompt may lack; not in Composer 0.17.
    """
    lacks_line = completion.startswith(('  ', '\t')) and not program.prompt.endswith('\n')
    joins = program.joins_lines and program.language == PYTHON and lacks_line
    return program.prompt + ('\n' if joins else '') + completion
