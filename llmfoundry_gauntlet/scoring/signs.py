"""Find what surrounds an answer without being part of it: special tokens, and signs such as a check mark.

A tokenizer drops its special tokens when it decodes; a server may return them, and a model may write those of another
tokenizer. Signs are dropped only where they cannot be what is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

BAR = r'[|\uff5c]'  # DeepSeek's tokens have full-width bars
INNER = r'[A-Za-z\u2581][\w\u2581.:-]{0,40}'
# Special tokens of models' tokenizers.
SPECIAL = (
    rf'<{BAR}{INNER}{BAR}>|</?s>|<(?:bos|eos|pad|unk|eot|eod|sep|cls|mask|sop|eop|BOS_TOKEN|EOS_TOKEN|PAD)>|'
    r'<(?:start|end)_of_(?:turn|text|utterance|image)>|<(?:unused|extra_id_|reserved_|reserved_token_)\d+>|'
    r'\[/?INST\]|<</?SYS>>|\[(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|gMASK|/?SYSTEM_PROMPT)\]'
)
# Those at which an answer is over: the end of a text or a turn, and the beginning of the next turn.
END = (
    rf'<{BAR}(?=[^|\uff5c]*(?:end|eo[stmd]\b|eos_|return|user|start|observation)){INNER}{BAR}>|'
    r'</s>|<(?:eos|eot|eod|eop|EOS_TOKEN)>|<(?:start|end)_of_(?:turn|text|utterance)>|\[INST\]|\[EOS\]'
)
ROLE = r'(?:assistant|model)[^\S\n]*(?=\n|<)'
OPENING = re.compile(rf'(?:\s*(?:{SPECIAL})(?:{ROLE})?)+', re.IGNORECASE)
ENDING = re.compile(END, re.IGNORECASE)
CLOSING = re.compile(rf'(?:{SPECIAL})\s*\Z', re.IGNORECASE)
MAX_TOKEN = 200  # characters of a special token and the white space after it
QUOTES = '"\'`'

# Bullets, check marks and other pictures with their modifiers; not crosses, which may say that an answer is wrong.
CROSSES = '\u2715\u2716\u2717\u2718\u274c\u274e\u2612'
SIGN = re.compile(
    rf'(?![{CROSSES}])[\u2022\u25a0-\u25ff\u2600-\u27bf\u2b00-\u2bff\u200b-\u200d\u2060\ufeff\ufe0e\ufe0f\u20e3'
    r'\U0001f000-\U0001faff]'
)
ARROWS = re.compile(r'\A\s*[\u2190-\u21ff]+|[\u2190-\u21ff]+\s*\Z')  # at an end
# The A of letters in a square, in filled circles and squares, and of flags.
LETTERS_IN_SHAPES = (0x1F130, 0x1F150, 0x1F170, 0x1F1E6)
FIRST_FULL_WIDTH, NUM_FULL_WIDTH = 0xFF01, 94  # an exclamation mark, and what follows it in ASCII
# The ASCII characters that these stand for.
PLAIN_LETTERS = {
    **{first + index: chr(ord('A') + index) for first in LETTERS_IN_SHAPES for index in range(26)},
    **{FIRST_FULL_WIDTH + index: chr(ord('!') + index) for index in range(NUM_FULL_WIDTH)},
}


def opening_end(text: str, start: int = 0) -> int:
    """Return the end of the special tokens at the beginning of a text, with the role after one; else `start`."""
    opening = OPENING.match(text, start)
    return opening.end() if opening else start


def without_special_tokens(text: str) -> str:
    """Return a text up to the token that ends its turn, without special tokens at its end; those in quotes are text."""
    for ending in ENDING.finditer(text):
        before = text[max(0, ending.start() - 1) : ending.start()]
        after = text[ending.end() : ending.end() + 1]
        is_quoted = bool(before) and before in QUOTES and before == after
        is_of_html = ending[0].lower() == '</s>' and '<s>' in text[: ending.start()]  # strikes a text through
        if not is_quoted and not is_of_html:
            text = text[: ending.start()]
            break
    closing = CLOSING.search(text, max(0, len(text) - MAX_TOKEN))
    while closing is not None:
        text = text[: closing.start()]
        closing = CLOSING.search(text, max(0, len(text) - MAX_TOKEN))
    return text


def without_signs(text: str, beside: Iterable[str] = ()) -> str:
    """Return a text with spaces in place of signs, unless one of the texts `beside` it, such as options, has any."""
    if any(map(SIGN.search, beside)):
        return text
    return SIGN.sub(' ', text)


def plain_letters(text: str) -> str:
    """Return a text with ASCII in place of full-width characters and of letters in filled circles or squares."""
    return text.translate(PLAIN_LETTERS)


def bare_answer(answer: str, golds: Iterable[str]) -> str:
    """Return an answer without signs, and with plain letters and digits, unless a gold answer has any of these."""
    golds = tuple(golds)
    if all(plain_letters(gold) == gold for gold in golds):
        answer = plain_letters(answer)
    if not any(map(ARROWS.search, golds)):
        answer = ARROWS.sub('', answer)
    return without_signs(answer, golds)
