"""Tell the answer of a generation from the reasoning before it.

A model that reasons writes `<think>...</think>`, or the like, before its answer; its chat template may write the
beginning. Every scorer gets the answer alone. Marks inside quotes, as in a program that handles them, do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from llmfoundry_gauntlet.scoring.signs import opening_end, without_special_tokens
from llmfoundry_gauntlet.scoring.text import cut_at_stops, stop_position
from llmfoundry_gauntlet.types import Reasoning, ReasoningMarkers, StopRule

UNFINISHED_REASONING = 'its reasoning does not end'

TAGS = ('think', 'thinking', 'thought', 'reasoning', 'seed:think', 'longcat_think')
IN_TAGS = tuple(ReasoningMarkers(f'<{tag}>', f'</{tag}>') for tag in TAGS)
KNOWN_MARKERS = (
    *IN_TAGS,
    ReasoningMarkers('[THINK]', '[/THINK]'),  # Magistral
    ReasoningMarkers('<|begin_of_thought|>', '<|end_of_thought|>'),  # OpenThinker, Sky-T1
    ReasoningMarkers('<|START_THINKING|>', '<|END_THINKING|>'),  # Command A
    ReasoningMarkers('\u25c1think\u25b7', '\u25c1/think\u25b7'),  # Kimi
    ReasoningMarkers('<|channel|>analysis', '<|channel|>final<|message|>'),  # gpt-oss
    ReasoningMarkers('', 'assistantfinal'),  # gpt-oss after a server has dropped its special tokens
)
CHANNEL_MESSAGE = '<|message|>'  # may follow the start of a channel at the end of a prompt
QUOTES = '"\'`'
BLANK_LINES = re.compile(r'(?:[^\S\n]*\n)*')


@dataclass(frozen=True, slots=True)
class Reading:
    """A generation as read: its text up to its stop, and the answer in it, None if its reasoning does not end."""

    text: str
    answer: str | None


def read_generation(text: str, stops: StopRule, reasoning: Reasoning | None) -> Reading:
    """Return a generation up to its stop, with its answer; without `reasoning` all of it is the answer.

    Special tokens around an answer are no part of it.
    """
    if reasoning is None:
        answer = cut_at_stops(text, stops)
        return Reading(answer, answer)
    place = answer_place(text, reasoning)
    if place is None:
        return Reading(text, None)
    begin = opening_end(text, place[0])
    answer = cut_at_stops(text[begin : place[1]], stops)
    return Reading(text[:begin] + answer, without_special_tokens(answer))


def answer_stop(text: str, stops: StopRule, reasoning: Reasoning | None) -> int | None:
    """Return the end of a generation, None if nothing stops it; stops in its reasoning do not count."""
    if reasoning is None:
        return stop_position(text, stops)
    place = answer_place(text, reasoning)
    if place is None:
        return None
    begin = opening_end(text, place[0])
    stop = stop_position(text[begin : place[1]], stops)
    return None if stop is None else begin + stop


class GrowingAnswer:
    """Find where the answer begins in a text that grows; `begin` is None while the model still reasons."""

    def __init__(self, reasoning: Reasoning | None) -> None:
        self._markers = () if reasoning is None else reasoning.markers
        marks = [mark for pair in self._markers for mark in (pair.start, pair.end)]
        self._longest = max(map(len, marks), default=0)
        self._is_after_reasoning = False
        self.begin: int | None = None if reasoning is not None and reasoning.is_open else 0

    def read(self, text: str, known: int) -> None:
        """Read a text whose first `known` characters were read before."""
        # A mark may have begun in what was read before.
        for _, end, is_end in marks_in(text, self._markers, max(0, known - self._longest)):
            self.begin = end if is_end else None
            self._is_after_reasoning = is_end or self._is_after_reasoning
        if self.begin and self._is_after_reasoning:
            self.begin = after_blank_lines(text, self.begin, len(text))


def answer_place(text: str, reasoning: Reasoning) -> tuple[int, int] | None:
    """Return where the answer of a generation begins and ends; None if its reasoning does not end.

    The answer follows the end of the last reasoning that is followed by any text, and ends where further reasoning
    begins. Text before the first reasoning is no answer. An end without a beginning ends what comes before it.
    """
    # Text between the end of reasoning and the beginning of more, or the end of the text.
    answers: list[tuple[int, int]] = []
    begin = None if reasoning.is_open else 0
    is_after_reasoning = False
    for start, end, is_end in marks_in(text, reasoning.markers):
        if begin is not None and is_after_reasoning:
            answers.append((begin, start))
        begin = end if is_end else None
        is_after_reasoning = is_after_reasoning or is_end
    is_reasoning_at_end = begin is None
    if begin is not None:
        answers.append((begin, len(text)))

    with_text = [(start, end) for start, end in answers if text[start:end].strip()]
    if not with_text and is_reasoning_at_end:
        return None
    begin, end = with_text[-1] if with_text else answers[-1]
    return (after_blank_lines(text, begin, end) if is_after_reasoning else begin), end


def after_blank_lines(text: str, begin: int, end: int) -> int:
    """Return the beginning of the first line that is not blank; what begins in the middle of a line stays."""
    blank = BLANK_LINES.match(text, begin, end)
    return blank.end() if blank else begin


def marks_in(text: str, markers: tuple[ReasoningMarkers, ...], first: int = 0) -> Iterator[tuple[int, int, bool]]:
    """Yield the place of each mark from `first` on, and whether it ends reasoning; those in quotes are left out."""
    if not markers:
        return
    for mark in pattern_of(markers).finditer(text, first):
        before = text[max(0, mark.start() - 1) : mark.start()]
        after = text[mark.end() : mark.end() + 1]
        is_in_quotes = bool(before) and before in QUOTES and before == after
        begins_code_block = text.startswith('```', mark.end())
        if not is_in_quotes or begins_code_block:
            yield mark.start(), mark.end(), mark['end'] is not None


@lru_cache(maxsize=64)
def pattern_of(markers: tuple[ReasoningMarkers, ...]) -> re.Pattern[str]:
    """Return the pattern of all starts and ends, the longest first; its group `end` is an end."""
    starts = sorted({pair.start for pair in markers if pair.start}, key=len, reverse=True)
    ends = sorted({pair.end for pair in markers}, key=len, reverse=True)
    pattern = f'(?P<end>{"|".join(map(re.escape, ends))})'
    if starts:
        pattern += '|' + '|'.join(map(re.escape, starts))
    return re.compile(pattern, re.IGNORECASE)


def is_opened_by(prompt: str, markers: tuple[ReasoningMarkers, ...]) -> bool:
    """Return whether a prompt, or its last characters, ends inside reasoning, so that a generation starts there."""
    end = prompt.rstrip().removesuffix(CHANNEL_MESSAGE).casefold()
    return any(pair.start and end.endswith(pair.start.casefold()) for pair in markers)
