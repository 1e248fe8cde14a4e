"""Tell when a generation that should continue a program has turned to something else for good.

Young models write lines of text, or one line without an end. A code block or a definition may still follow, so that is
not where the program ends (`lexers.ProgramEnd`), but it is not worth the remaining tokens.
"""

from __future__ import annotations

import re

from llmfoundry_gauntlet.scoring.code.programs import CPP, JAVASCRIPT, PYTHON

MAX_LINES = 16  # of text, as an introduction may have
MAX_OTHER_LINES = 3  # one after another that are neither text nor code: sums, single letters, brackets
MAX_LINE_CHARACTERS = 1000

# Places for a long text: a code block, a string of several lines, a comment of several lines.
LONG_PARTS = re.compile(r'```|~~~|"""|\'\'\'|/\*')
# A line at the left margin that may belong to a program: a comment, a definition, an assignment or another statement.
ASSIGNMENT = r'(?!\d)[\w.,\[\]"\'() \t*]+[-+*/%|&^@<>]{0,2}=(?!=)'
SIGN_OR_COMMA = r'[#@)\]}]|.*,[ \t]*\Z'  # a comment, a decorator, the rest of a call
STATEMENT = r'(?:async|class|def|import|return|raise|assert|pass|print|yield|del|global|nonlocal|try|else|finally)\b'
FROM_IMPORT = r'from[ \t]+[\w.]+[ \t]+import\b'
HEAD_OF_BLOCK = (
    r'(?:for|if|while|with|elif|except|match|case)\b.*:[ \t]*(?:#.*)?\Z'  # words of prose, too, so the colon counts
)
CALL = r'(?!\d)[\w.]+\('
CODE = {
    PYTHON: re.compile(rf'{SIGN_OR_COMMA}|{STATEMENT}|{FROM_IMPORT}|{HEAD_OF_BLOCK}|{CALL}|{ASSIGNMENT}'),
    CPP: re.compile(rf'.*(?:[;{{}}()#]|//|,[ \t]*\Z)|{ASSIGNMENT}'),
    JAVASCRIPT: re.compile(rf'.*(?:[;{{}}()]|//|,[ \t]*\Z)|{ASSIGNMENT}'),
}
# Two words side by side, one word as a heading, or a script that need not have spaces between words.
TEXT = re.compile(r'.*?(?:[^\W\d_]{2,},?[ \t]+[^\W\d_]{2,}|[^\x00-\x7f])|[^\W\d_]{2,}[:.]?[ \t]*\Z')


def is_digression(text: str, language: str, *, continues_line: bool) -> bool:
    """Return whether a generation is plainly no program any more, though one might follow.

    Lines at the left margin count from the last one on that may be code. `continues_line`: the first line continues one
    of the prompt.
    """
    if LONG_PARTS.search(text):
        return False
    num_lines = num_other_lines = 0
    *finished, last = text.split('\n')
    for index, line in enumerate(finished):
        is_indented = line[:1].isspace()
        if not line.strip() or is_indented or (continues_line and index == 0):
            continue
        if CODE[language].match(line):
            num_lines = num_other_lines = 0
            continue
        num_lines += 1
        num_other_lines = 0 if TEXT.match(line) else num_other_lines + 1
    return num_lines >= MAX_LINES or num_other_lines >= MAX_OTHER_LINES or len(last) >= MAX_LINE_CHARACTERS
