"""Find the boxed answers of generations and solutions: `\\boxed{...}` and `\\fbox{...}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from llmfoundry_gauntlet.scoring.math_forms import NUMBER, forms_of

BOX = re.compile(r'\\(?:boxed|fbox)(?![A-Za-z])\s*')
OPENED_BOX = re.compile(r'\s*\\(?:boxed|fbox)\s*(?=\{)')
BRACES = re.compile(r'\\.|[{}]', re.DOTALL)
UNBRACED = re.compile(r'-?\d+(?:[.,]\d+)*|-?[A-Za-z](?![A-Za-z])|-?\\[A-Za-z]+')  # \boxed 5, \boxed x, \boxed\pi
HIDDEN = re.compile(r'\\[hv]?phantom\s*\{[^{}]*\}|\\[,;:! ]|\\q?quad')  # \phantom{5}
# 'Either of the two is accepted.'
EITHER = re.compile(r'\beither\b.{0,60}\b(?:accepted|acceptable|correct)\b', re.IGNORECASE | re.DOTALL)

# Words that instructions write into a box in place of an answer, besides the words of the prompt that was asked.
BLANK = re.compile(r'(?:[.?\s]|\\(?:[lc]?dots|square|box)(?![a-z]))*')  # ..., \square
FONTS = re.compile(  # \text, \mathbf, \langle, \_
    r'\\(?:text[a-z]*|math[a-z]+|emph|underline|mbox|hbox|bm|boldsymbol|operatorname\*?|hspace\*?\s*\{[^{}]*\})(?![A-Za-z])'
    r'|\\[lr]angle(?![A-Za-z])|\\(?=[_"\'])|[_~]'
)
PLACEHOLDER = re.compile(  # your final answer here
    r'(?:(?:the|your|my|final|correct|exact|simplified|numeric(?:al)?|insert|put|write|enter|place) )*'
    r'(?:answer|result|solution)(?: (?:goes )?here)?|your [a-z]+(?: here)?'
)
QUOTES = ' \t\n{}[]()<>"\'`*$.:\u2026\u201c\u201d\u2018\u2019\u00ab\u00bb'

# Text that may stand between two boxes of one answer. Ends of rows become ampersands, then marks without meaning go.
ROW_END = re.compile(r'\\\\(?:\s*\[[^\[\]]*\])?|\\(?:cr|newline)(?![A-Za-z])')  # \\, \\[2mm], \cr
MARKS = re.compile(
    r'\$|\\[()\[\],;:! ]|\\(?:q?quad|displaystyle|left\.?|right\.?)(?![A-Za-z])|[{}~*]'
    r'|\\(?:text(?:rm|bf|it|normal)?|mbox|hbox|mathrm)\s*(?=\{)|\^\s*\{?\s*\\circ(?![A-Za-z])|\\%'
)
JOINT = r'(?:[,;&]|\b(?:and|or)\b)'
# A name of the next box's value: `x =`, `x_2 =`, `f(1) =`, `AB =`, `\theta =`, `x \in`, `x is`.
NAME = r"(?:[A-Za-z]|[A-Z]{2}|\\[A-Za-z]+)'?(?:\s*_\s*\w+)?(?:\s*\([^()=]*\))?\s*&?\s*(?:=|\\in\b|is\b)\s*"
JOINED = re.compile(rf'\s*{JOINT}(?:\s|{JOINT})*(?:{NAME})?', re.ASCII)
# The next row of a list of equations. A row without a left side goes on with the calculation, words begin another.
ROW = re.compile(r'\s*[,;]\s*&\s*[^\s&=$][^$]*=\s*')
WORDS = re.compile(
    r'\\(?:text|mbox|implies|therefore|[Rr]ightarrow|Longrightarrow)|(?<![\\A-Za-z])(?:so|[A-Za-z]{3,})\b'
)
MAX_JOINED = 300  # characters between two boxes of one answer

# Of solutions only, which are not taken back: boxes with the same label are values of one unknown.
REMARK = re.compile(r'\n[ \t]*(?:\*\*)?(?:Note|Remark)\b')
NEW_START = re.compile(
    r'\b(?:thus|therefore|hence|finally|final|answers?|wait|actually|mistake|wrong|incorrect|instead|however|check|'
    r'total|sum|product|conclu\w+|alternative\w*|or)\b',
    re.IGNORECASE,
)
ENUMERATED = re.compile(r'\b(?:another|other|second|third|fourth|last)\b', re.IGNORECASE)
NO_LABEL = ('answer', 'result', 'value', 'solution', 'it', 'this', 'that', 'which', 'there')
MAX_BETWEEN = 600


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a text: its beginning, end and content."""

    begin: int
    end: int
    content: str


def boxes_in(text: str) -> list[Box]:
    """Return the outermost boxes of a text, in order; unclosed ones are ignored."""
    boxes = []
    closing = matching_braces(text)
    place = 0
    while command := BOX.search(text, place):
        place = command.end()
        if text.startswith('{', place):
            end = closing.get(place)
            if end is not None:
                boxes.append(Box(command.start(), end + 1, text[place + 1 : end]))
                place = end + 1
            continue
        content = UNBRACED.match(text, place)
        if content is not None:
            boxes.append(Box(command.start(), content.end(), content[0]))
            place = content.end()
    return boxes


def matching_braces(text: str) -> dict[int, int]:
    """Return the position of the closing brace by that of its opening brace; escaped and unmatched ones are ignored."""
    closing: dict[int, int] = {}
    unclosed: list[int] = []
    for mark in BRACES.finditer(text):
        if mark[0] == '{':
            unclosed.append(mark.start())
        elif mark[0] == '}' and unclosed:
            closing[unclosed.pop()] = mark.start()
    return closing


def boxed(text: str) -> list[str]:
    """Return the content of each outermost \\boxed or \\fbox of a text."""
    return [box.content for box in boxes_in(text)]


def gold_of(problem: str, solution: str, fixes: Mapping[str, str] | None) -> str:
    """Return the gold answer to a problem: from the fix table, else from its solution. Raise ValueError without a box.

    Boxes at the end of a solution are joined by ', '; boxes in earlier steps are not part of the answer. Solutions also
    give the values of an unknown one by one (`If $r=1$ then $b=\\boxed{3}$. If ...`), and a remark after the answer.
    """
    if fixes and problem in fixes:
        return fixes[problem]
    boxes = filled_boxes(solution)
    if not boxes:
        raise ValueError('the solution has no \\boxed{...}')
    remark = REMARK.search(solution)
    if remark is not None:
        before_remark = [box for box in boxes if box.end <= remark.start()]
        boxes = before_remark or boxes
    return joined_answer(solution, boxes, (are_joined, have_one_label))


def answer_of(completion: str, placeholders: Collection[str] = ()) -> str | None:
    """Return the last box of a generation that holds an answer, with the boxes that are joined to it; None without one.

    Boxes are one answer if nothing stands between them but a comma, `and`, `or`, or the end of a row, and then a name
    of the value. If a generation says that either of two is correct, the last is taken. A box that repeats the
    instruction holds no answer: `placeholders` are what its own boxes hold, such as "answer".
    """
    keys = {placeholder_key(placeholder) for placeholder in placeholders}
    boxes = [box for box in filled_boxes(completion) if not is_placeholder_box(box.content, keys)]
    return joined_answer(completion, boxes, (are_joined,)) if boxes else None


def is_placeholder_box(content: str, keys: Collection[str]) -> bool:
    """Return whether a box holds what an instruction writes in place of an answer."""
    key = placeholder_key(content)
    return key in keys or bool(BLANK.fullmatch(key) or PLACEHOLDER.fullmatch(key))


def placeholder_key(content: str) -> str:
    """Return a placeholder in lower case, without the commands of texts, brackets and quotation marks around it."""
    bare = MARKS.sub(' ', FONTS.sub(' ', content))
    return ' '.join(bare.strip(QUOTES).lower().split())


def filled_boxes(text: str) -> list[Box]:
    """Return the outermost boxes with content, without the commands of boxes inside them."""
    boxes = [replace(box, content=without_boxes(box.content)) for box in boxes_in(text)]
    return [box for box in boxes if HIDDEN.sub('', box.content).strip('{} \t\n')]


def joined_answer(text: str, boxes: Sequence[Box], rules: Sequence[Callable[[str, Box, Box], bool]]) -> str:
    """Return the last box and those before it that one of the rules joins to the next; equal ones only once."""
    *earlier, last = boxes
    answers = [last]
    says_either = EITHER.search(text[last.end : last.end + 200]) is not None
    if not says_either:
        for box in reversed(earlier):
            is_joined = any(belong_together(text, box, answers[0]) for belong_together in rules)
            if not is_joined:
                break
            answers.insert(0, box)

    content_by_key = {same_key(box.content): box.content.strip() for box in answers}
    return ', '.join(content_by_key.values())


def are_joined(text: str, box: Box, following: Box) -> bool:
    """Return whether only a comma, `and`, `or` or the end of a row stands between two boxes, and a name."""
    between = text[box.end : following.begin]
    if len(between) > MAX_JOINED:
        return False
    between = ROW_END.sub(' & ', between)
    if JOINED.fullmatch(MARKS.sub(' ', between)):
        return True
    return bool(ROW.fullmatch(between)) and not WORDS.search(between)


def have_one_label(text: str, box: Box, following: Box) -> bool:
    """Return whether two boxes of a solution have the same label and no new start between them."""
    between = text[box.end : following.begin]
    label = label_before(text, following)
    if not label or len(between) > MAX_BETWEEN or NEW_START.search(between):
        return False
    return label == label_before(text, box) and (len(label) == 1 or ENUMERATED.search(between) is not None)


def without_boxes(content: str) -> str:
    """Return the content of a box without the commands of boxes nested in it."""
    closing = matching_braces(content)
    begin, end = 0, len(content)
    while command := OPENED_BOX.match(content, begin):
        closed = closing.get(command.end())
        if closed is None or content[closed + 1 : end].strip():
            break
        begin, end = command.end() + 1, closed
    return BOX.sub('', content[begin:end])


def label_before(completion: str, box: Box) -> str | None:
    """Return the label of a box: x in `x = \\boxed{1}`, angle in `this angle is \\boxed{30}`; None without one."""
    before = completion[max(0, box.begin - 200) : box.begin].replace('&', '')
    prose, _, formula = before.rpartition('$')
    variable = re.match(r'\s*([A-Za-z](?:_\{?\w+\}?)?)\s*=', formula)
    if variable is not None:
        return variable[1]
    noun = re.search(r'([A-Za-z]+)\s+(?:is|are|equals)\s*\Z', prose)
    if noun is None or noun[1].lower() in NO_LABEL:
        return None
    return noun[1].lower()


def same_key(content: str) -> object:
    """Return a key shared by boxes with the same answer: a number's value, or the terms of a sum in any order."""
    forms = forms_of(content)
    if len(forms) == 1 and forms[0].kind == NUMBER:
        return forms[0].value, forms[0].unit
    spelled = forms[0].text if forms else content
    text = ''.join(spelled.split())
    if re.search(r'[(){},=]', text):
        return text
    with_sign = text if text[:1] in '+-' else f'+{text}'
    return tuple(sorted(re.findall(r'[+-][^+-]+', with_sign)))
