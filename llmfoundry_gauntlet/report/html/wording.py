"""How numbers and foreign texts are written in a page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

MINUS = '\u2212'
ABSENT = '\u2013'
ELLIPSIS = '\u2026'
# What a browser would drop, replace or obey: control characters, line separators, marks that turn the direction of
# writing around, and halves of surrogate pairs. They are shown as Python would write them.
UNPRINTABLE = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]'
)


def visible(text: str) -> str:
    """The text with what cannot be shown written as an escape, such as \\u2028."""
    return UNPRINTABLE.sub(lambda found: found[0].encode('unicode_escape').decode('ascii'), text)


def breakable(text: str) -> Markup:
    """A name, escaped, that a browser breaks after its strokes rather than within a word."""
    from markupsafe import Markup, escape

    return Markup(re.sub('[_/]', '\\g<0><wbr>', str(escape(visible(text)))))


def shortened(text: str, length: int) -> str:
    """The text with its middle left out where it has more characters than that."""
    if len(text) <= length:
        return text
    tail = length // 3
    return f'{text[: length - tail - 1]}{ELLIPSIS}{text[-tail:]}'


def plain_number(value: float | None, places: int = 3) -> str:
    """A number to so many places, with a real minus; a dash where there is none."""
    if value is None:
        return ABSENT
    text = f'{value:.{places}f}'
    if float(text) == 0:
        text = text.removeprefix('-')
    return text.replace('-', MINUS)


def signed_number(value: float) -> str:
    """A difference, always with its sign."""
    text = plain_number(value)
    return text if text.startswith(MINUS) or float(text) == 0 else f'+{text}'


def whole_number(value: int) -> str:
    """A count, its thousands apart."""
    return f'{value:,}'
