"""How numbers and foreign texts are written on a report page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

MINUS = '\u2212'
ELLIPSIS = '\u2026'
LABEL_LENGTH = 48  # characters of a name in a chart
# Characters that a browser would drop, replace or obey: control characters, line separators, marks that change the
# direction of writing, and halves of surrogate pairs. They are shown as Python escapes.
UNPRINTABLE = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]'
)


def visible(text: str) -> str:
    """Return the text with unprintable characters as escapes, such as \\u2028."""
    return UNPRINTABLE.sub(lambda found: found[0].encode('unicode_escape').decode('ascii'), text)


def breakable(text: str) -> Markup:
    """Return a name, escaped, that a browser breaks after `_` and `/` rather than within a word."""
    from markupsafe import Markup, escape

    return Markup(re.sub('[_/]', '\\g<0><wbr>', str(escape(visible(text)))))


def shortened(text: str, length: int) -> str:
    """Return the text, its middle left out if it has more than `length` characters."""
    if len(text) <= length:
        return text
    tail = length // 3
    return f'{text[: length - tail - 1]}{ELLIPSIS}{text[-tail:]}'


def excerpt(text: str, head: int, tail: int) -> str:
    """Return the text, or the beginning and end of a long one with the number of characters left out between."""
    num_left_out = len(text) - head - tail
    if num_left_out <= 0:
        return text
    return f'{text[:head]}\n[{num_left_out:,} of {len(text):,} characters left out]\n{text[len(text) - tail :]}'


def label(name: str) -> str:
    """Return a name as a chart shows it."""
    return visible(shortened(name, LABEL_LENGTH))


def unique_labels(names: Iterable[str]) -> list[str]:
    """Return the names as a chart shows them, numbered where two would be the same."""
    found: list[str] = []
    for name in map(label, names):
        found.append(name if name not in found else f'{name} ({len(found) + 1})')
    return found


def plain_number(value: float, places: int = 3) -> str:
    """Return a number to `places` decimal places with a typographic minus sign."""
    text = f'{value:.{places}f}'
    if float(text) == 0:
        text = text.removeprefix('-')
    return text.replace('-', MINUS)
