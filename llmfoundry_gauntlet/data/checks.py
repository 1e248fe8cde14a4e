"""Data checks: duplicates, conflicting golds, majority answers, and rows that occur in a training text."""

from __future__ import annotations

import io
import json
import re
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.data.readers import open_source
from llmfoundry_gauntlet.data.score_rows import LETTERS
from llmfoundry_gauntlet.data.stores import is_remote
from llmfoundry_gauntlet.errors import DataError

MAX_LINES = 5  # that a finding lists

CLEAR_MARGIN = 0.05  # a majority answer this far above chance is worth a warning,
CLEAR_ERRORS = 3.0  # if it is this many standard errors above it
COMMON_SHARE = 0.2  # threshold for a free-form answer, which has no chance level,
MIN_COMMON_ROWS = 10  # smaller files are not checked for it

NUM_WORDS = 13  # per sequence, as in the GPT-3 report (arXiv 2005.14165, appendix C)
MOST = 0.8  # of a row's sequences
MAX_TEMPLATE_SOURCES = 2  # a sequence shared by more sources than this, and by more than
TEMPLATE_SHARE = 0.1  # this share of them, belongs to the task's template
WORD = re.compile(r'[^\W_]+')
JSON_LINES = ('.jsonl', '.ndjson', '.json')
READ_CHARACTERS = 1 << 20  # of one line at a time

TEXTS = {
    'duplicate_rows': 'duplicate of an earlier row, which counts twice in the score',
    'repeated_prompts': 'same prompt as an earlier row, but not a duplicate',
    'other_choices': 'the prompt is repeated with other choices, or another ending, and another right answer',
    'conflicting_golds': 'the question is repeated with a different gold; no model can get both rows right',
    'identical_choices': 'a wrong choice appears twice, so a guess is right more often',
    'identical_right_choice': 'the right choice appears twice, and only one of the two counts',
}
# Findings that change what a score means.
WARNINGS = ('conflicting_golds', 'identical_right_choice', 'majority_answer', 'training_text')

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRow:
    """The parts of an evaluation row that the checks compare.

    Rows with one `prompt` may offer different choices; rows with one `question` offer the same. `answer` is the
    preferred right answer, if any, `gold` its index if there are choices. Rows on one passage share a `source`.
    """

    line: int  # 1-based
    digest: str
    source: str
    prompt: str
    question: Hashable
    answer: str | None
    choices: tuple[str, ...] = ()
    gold: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """The rows of one file of a task."""

    name: str
    source: str
    rows: tuple[CheckedRow, ...]


def check_task_files(files: Sequence[TaskFile], texts: Sequence[str]) -> tuple[list[Record], Record | None]:
    """Return the counts and findings of each file, and the rows that occur in training texts, if any are given."""
    checked = [check_file(file) for file in files]
    overlap = find_overlap(files, texts) if texts and files else None
    for record, task in zip(checked, overlap['tasks'] if overlap else (), strict=False):
        for first in task['found'][:1]:
            sequences = f'{first["num_found"]} of its {first["num_sequences"]} sequences of {NUM_WORDS} words'
            lines = [row['line'] for row in task['found']]
            record['findings'].append(finding('training_text', f'{sequences} occur in {first["place"]}', lines))
    return checked, overlap


def check_file(file: TaskFile) -> Record:
    """Return the counts and findings of one file, ready for JSON.

    `num_duplicates` counts rows equal to an earlier one, `num_repeated` rows with the prompt of an earlier one, and
    `num_conflicts` the repeated prompts that have more than one right answer.
    """
    rows = file.rows
    duplicates = [row.line for group in group_duplicates(rows, 'digest') for row in group[1:]]
    by_prompt = group_duplicates(rows, 'prompt')
    later = [row.line for group in by_prompt for row in group[1:]]
    conflicts = [group for group in by_prompt if has_conflict(group)]
    contradictory = []
    for group in conflicts:
        by_question = group_duplicates(group, 'question')
        if any(map(has_conflict, by_question)):
            contradictory.append(group[0].line)
    right_twice: list[int] = []
    wrong_twice: list[int] = []
    for row in rows:
        choices = [choice.strip() for choice in row.choices]
        if len(set(choices)) < len(choices):
            is_right = row.gold is not None and choices.count(choices[row.gold]) > 1
            (right_twice if is_right else wrong_twice).append(row.line)
    found = {
        'duplicate_rows': duplicates,
        'repeated_prompts': sorted({*later} - {*duplicates}),
        'other_choices': [group[0].line for group in conflicts if group[0].line not in contradictory],
        'conflicting_golds': contradictory,
        'identical_choices': wrong_twice,
        'identical_right_choice': right_twice,
    }
    majority, warning = majority_answer(rows)
    return {
        'name': file.name,
        'source': file.source,
        'num_rows': len(rows),
        'num_duplicates': len(duplicates),
        'num_repeated': len(later),
        'num_conflicts': len(conflicts),
        'majority': majority,
        'findings': [
            *(finding(kind, TEXTS[kind], lines) for kind, lines in found.items() if lines),
            *([finding('majority_answer', warning)] if warning else []),
        ],
    }


def finding(kind: str, text: str, lines: Sequence[int] = ()) -> Record:
    """Return a finding about the rows on these lines, listing the first; without lines it is about the whole file."""
    return {
        'kind': kind,
        'text': text,
        'count': len(lines) or 1,
        'lines': sorted(lines)[:MAX_LINES],
        'is_warning': kind in WARNINGS,
    }


def group_duplicates(rows: Iterable[CheckedRow], attribute: str) -> list[list[CheckedRow]]:
    """Return the groups of two or more rows with the same value of an attribute, in file order."""
    groups: dict[Hashable, list[CheckedRow]] = defaultdict(list)
    for row in rows:
        groups[getattr(row, attribute)].append(row)
    return [group for group in groups.values() if len(group) > 1]


def has_conflict(rows: Iterable[CheckedRow]) -> bool:
    """Return whether the right answers differ."""
    return len({row.answer for row in rows}) > 1


def majority_answer(rows: Sequence[CheckedRow]) -> tuple[Record | None, str]:
    """Return the most common right answer with its share of the rows and a random guess's, and a warning if large.

    The answer is a choice's letter, or its text if all rows have the same choices. `chance` is `None` without choices.
    """
    answers = Counter(row.answer for row in rows if row.answer is not None)
    golds = Counter(row.gold for row in rows if row.gold is not None)
    if not answers:
        return None, ''
    counts: Counter[Any] = golds or answers
    best = max(counts.values())
    share = best / counts.total()
    often = 'every row' if share == 1 else f'{share:.0%} of the rows'
    chance = None
    if golds:
        chosen = [row for row in rows if row.gold is not None]
        gold = min(gold for gold in golds if golds[gold] == best)
        is_same = all(row.choices == chosen[0].choices for row in chosen)
        answer = chosen[0].choices[gold] if is_same else LETTERS[gold : gold + 1] or str(gold)
        chance = sum(1 / len(row.choices) for row in chosen) / len(chosen)
        standard_error = (chance * (1 - chance) / len(rows)) ** 0.5
        is_common = share - chance > max(CLEAR_MARGIN, CLEAR_ERRORS * standard_error)
        text = f'choice {answer!r} is right in {often} (chance {chance:.0%})'
    else:
        answer = answers.most_common(1)[0][0]
        is_common = share >= COMMON_SHARE and len(rows) >= MIN_COMMON_ROWS
        text = f'{answer!r} is right in {often}'
    warning = f'{text}; always choosing it scores as much' if is_common else ''
    return {'answer': answer, 'share': share, 'chance': chance}, warning


def words_of(text: str) -> list[str]:
    """Return the words of a text: letters and digits, lower case."""
    return WORD.findall(text.lower())


def sequences_of(words: Sequence[str]) -> list[int]:
    """Return a hash of every 13 consecutive words, of 64 bits and comparable only within one process."""
    return [hash(tuple(words[start : start + NUM_WORDS])) for start in range(len(words) - NUM_WORDS + 1)]


def row_sequences(rows: Sequence[CheckedRow]) -> list[array[int]]:
    """Return each row's sequences to search for: those of the prompt, and of the right answer if the prompt is short.

    Sequences that many sources share, such as an instruction, belong to the task's template and are left out.
    """
    found: list[array[int]] = []
    by_source: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        words = words_of(row.prompt)
        if len(words) < NUM_WORDS:
            words += words_of(row.answer or '')
        found.append(array('q', sequences_of(words)))
        by_source[row.source].update(found[-1])
    num_sources = Counter(chain.from_iterable(by_source.values()))
    limit = max(MAX_TEMPLATE_SOURCES, TEMPLATE_SHARE * len(by_source))
    template = {sequence for sequence, count in num_sources.items() if count > limit}
    return [array('q', (sequence for sequence in own if sequence not in template)) for own in found]


def find_overlap(files: Sequence[TaskFile], texts: Sequence[str]) -> Record:
    """Return the rows that share sequences of words with training texts, ready for JSON.

    In each file, `num_checked` rows are long enough to be searched for; `num_most` rows have at least 80% of their
    sequences in the texts. Raise DataError for an unreadable text.
    """
    sequences = [row_sequences(file.rows) for file in files]
    wanted = {sequence for rows in sequences for own in rows for sequence in own}
    places: dict[int, str] = {}
    num_words = sum(search_text(text, wanted, places) for text in texts)
    tasks: list[Record] = []
    for file, rows in zip(files, sequences, strict=True):
        found: list[Record] = [
            {'line': row.line, 'num_found': len(hits), 'num_sequences': len(own), 'place': hits[0]}
            for row, own in zip(file.rows, rows, strict=True)
            if (hits := [places[sequence] for sequence in own if sequence in places])
        ]
        tasks.append(
            {
                'name': file.name,
                'source': file.source,
                'num_rows': len(file.rows),
                'num_checked': sum(len(own) > 0 for own in rows),
                'num_most': sum(row['num_found'] >= MOST * row['num_sequences'] for row in found),
                'found': found,
            }
        )
    return {'files': list(texts), 'num_words': num_words, 'tasks': tasks}


def training_files(source: str) -> list[str]:
    """Return a file or URL itself, or all files below a folder. Raise DataError if there is none."""
    path = Path(source)
    if is_remote(source) or path.is_file():
        return [source]
    found = [str(file) for file in sorted(path.rglob('*')) if file.is_file()]
    if not found:
        raise DataError(f'{source}: no such file; allowed: text or JSON lines, also compressed, or a folder of them')
    return found


def search_text(source: str, wanted: set[int], places: dict[int, str]) -> int:
    """Add the line on which each wanted sequence first ends in a training text to `places`; return the number of words.

    Files named .jsonl, .ndjson or .json hold one document per line, all of whose strings are searched; other files are
    one document of plain text. Either may be compressed (.gz, .bz2, .xz, .zst). Raise DataError for an unreadable file.
    """
    import fsspec

    compression = fsspec.utils.infer_compression(source)
    is_json = source.removesuffix(Path(source).suffix if compression else '').endswith(JSON_LINES)
    num_words, number = 0, 1
    words: list[str] = []  # preceded by the last 12 of the document's earlier lines, as a sequence may span lines
    with open_source(source) as raw:
        try:
            text = io.TextIOWrapper(
                fsspec.compression.compr[compression](raw, mode='rb'), 'utf-8-sig', errors='ignore', newline='\n'
            )
            # Plain text is read at most a megabyte at a time; a word across such a boundary is split.
            while line := text.readline(-1 if is_json else READ_CHARACTERS):
                if not is_json and '\0' in line:
                    raise DataError(f'{source}:{number}: binary data; allowed: text or JSON lines, also compressed')
                new = words_of(json_strings(line, f'{source}:{number}') if is_json else line)
                num_words += len(new)
                words = ([] if is_json else words[1 - NUM_WORDS :]) + new
                for sequence in wanted.intersection(sequences_of(words)):
                    places.setdefault(sequence, f'{source}:{number}')
                number += line.endswith('\n')
        except (OSError, EOFError, zlib.error, ImportError, ValueError) as error:
            raise DataError(f'{source}: cannot be read: {error}') from error
    return num_words


def json_strings(line: str, place: str) -> str:
    """Return all strings of a JSON line; nothing for a blank one. Raise DataError."""
    try:
        return '\n'.join(strings_in(json.loads(line.rstrip()))) if line.strip() else ''
    except json.JSONDecodeError as error:
        raise DataError(f'{place}: malformed JSON: {error.msg} at column {error.colno}') from error


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings anywhere in a JSON value, except for keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)
