"""Parse the code blocks and inline code of the documentation.

A block that cannot be run has `<!-- not run: reason -->` on the line before it: its commands are checked and its Python
is compiled all the same. `title="name"` in the first line of a block writes it to that file.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from paths import ROOT

PAGES = sorted((ROOT / 'docs').glob('*.md'))
TEXTS = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *PAGES]
MARK = re.compile(r'<!-- not run: (.+?) -->')
TITLE = re.compile(r'title="(.+?)"')
PROMPT = '$ '
OPERATORS = ('&&', '|', ';')


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block; `line` is the line of its text in the page, from 1."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    reason: str | None  # why it is not run

    @property
    def place(self) -> str:
        return f'{self.page.name}:{self.line}'

    @property
    def commands(self) -> list[list[str]]:
        """Return the words of each command of a bash block, without comments."""
        return commands_of(self.text)


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command; `&&` and `|` end a command, `>` and what follows are dropped."""
    found: list[list[str]] = []
    for line in text.replace('\\\n', ' ').splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars='&|;>')
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ';']:
            if word not in OPERATORS:
                words.append(word)
                continue
            if words:
                found.append(words[: words.index('>')] if '>' in words else words)
            words = []
    return found


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    blocks, before = [], None
    for token in MarkdownIt().parse(page.read_text('utf-8')):
        if token.type == 'fence' and token.map is not None:
            language, _, rest = token.info.strip().partition(' ')
            title = TITLE.search(rest)
            mark = (
                MARK.fullmatch(before.content.strip()) if before is not None and before.type == 'html_block' else None
            )
            blocks.append(
                Block(
                    page=page,
                    line=token.map[0] + 2,
                    language=language,
                    title=title[1] if title else None,
                    text=token.content,
                    reason=mark[1] if mark else None,
                )
            )
        before = token
    return blocks


def inline_code(page: Path) -> list[str]:
    """Return the inline code of a page, with single spaces."""
    found: list[str] = []

    def walk(tokens: list[Token]) -> None:
        for token in tokens:
            if token.type == 'code_inline':
                found.append(' '.join(token.content.split()))
            walk(token.children or [])

    walk(MarkdownIt().enable('table').parse(page.read_text('utf-8')))
    return found


def sessions_of(block: Block) -> list[tuple[str, list[str]]]:
    """Return the commands after `$ `, each with the lines that it prints."""
    sessions: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith(PROMPT):
            sessions.append((line.removeprefix(PROMPT), []))
        elif sessions:
            sessions[-1][1].append(line)
    return sessions
