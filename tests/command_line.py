"""Run the `gauntlet` command in tests."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from typing import Any

import pytest

from llmfoundry_gauntlet.cli import main


def run_cli(*arguments: Any) -> int:
    """Run `gauntlet` with these arguments and return its exit status; the log level is restored."""
    log = logging.getLogger('llmfoundry_gauntlet')
    level = log.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['gauntlet', *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        finally:
            log.setLevel(level)
    return 0


def loaded_by(*arguments: Any, names: tuple[str, ...] = ('torch', 'composer', 'transformers', 'datasets')) -> list[str]:
    """Return those of these packages `gauntlet` imports with these arguments, in a subprocess that must succeed."""
    script = (
        'import sys\n'
        'from llmfoundry_gauntlet.cli import main\n'
        'try:\n'
        '    main()\n'
        'except SystemExit as end:\n'
        '    assert not end.code, end.code\n'
        f'sys.exit(" ".join(name for name in {names!r} if name in sys.modules) or "-")\n'
    )
    done = subprocess.run([sys.executable, '-c', script, *map(str, arguments)], capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    return [] if last == '-' else last.split()


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command; `&&` and `|` end a command, `>` and what follows are dropped."""
    commands: list[list[str]] = []
    for line in text.replace('\\\n', ' ').splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars='&|;>')
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ';']:
            if word not in ('&&', '|', ';'):
                words.append(word)
                continue
            if words:
                commands.append(words[: words.index('>')] if '>' in words else words)
            words = []
    return commands
