"""Read the questions of SCORE's datasets from the published files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.score import AGIEVAL, MATH, MMLU_PRO, ScoreSpec
from llmfoundry_gauntlet.data.examples import TaskRows, parse_rows, row_cluster, row_digest
from llmfoundry_gauntlet.data.readers import (
    RowError,
    gold_field,
    locate,
    optional_text_field,
    read_rows,
    text_field,
    texts_field,
)
from llmfoundry_gauntlet.errors import DataError, MissingFileError, describe, named, suggestion
from llmfoundry_gauntlet.types import Example

LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'
FILES = {
    MMLU_PRO: ('score/mmlu_pro_test.jsonl',),
    AGIEVAL: (
        'score/agieval_v1/sat-math.jsonl',
        'score/agieval_v1/lsat-lr.jsonl',
        'score/agieval_v1/lsat-rc.jsonl',
        'score/agieval_v1/logiqa-en.jsonl',
        'score/agieval_v1/aqua-rat.jsonl',
        'score/agieval_v1/sat-en.jsonl',
        'score/agieval_v1/lsat-ar.jsonl',
    ),
    MATH: (
        'score/hendrycks_math/algebra.jsonl',
        'score/hendrycks_math/counting_and_probability.jsonl',
        'score/hendrycks_math/geometry.jsonl',
        'score/hendrycks_math/intermediate_algebra.jsonl',
        'score/hendrycks_math/number_theory.jsonl',
        'score/hendrycks_math/prealgebra.jsonl',
        'score/hendrycks_math/precalculus.jsonl',
    ),
}

# A list of options at the end of a query: its heading, the letter before each option, and what may follow the last.
LIST_HEAD = re.compile(r'(?:^|(?<=\n))[^\S\n]*Choices:?\s*$')
LIST_LETTER = re.compile(r'(?:^|Choices:[^\S\n]+)([A-Za-z])\.\)?(?=\s|$)[^\S\n]*', re.MULTILINE)
LIST_END = re.compile(r'\s*(?:(?:^|(?<=\s))(?:Answer|A):)?\s*$')

OPTION_LABEL = re.compile(r'\([A-Z]\)|[A-Z] |[A-Z]\? ')  # at the start of AGIEval's options


@dataclass(frozen=True, slots=True)
class LetteredQuestion:
    """A question with options; `gold` is the index of the correct one, `topic` the subject that a prompt names."""

    text: str
    options: tuple[str, ...]
    gold: int
    topic: str = ''


@dataclass(frozen=True, slots=True)
class MathQuestion:
    """A problem, a solution with a boxed answer, and that answer once it has been extracted."""

    text: str
    solution: str
    gold: str = ''


def read_score_rows(spec: ScoreSpec, data_root: str | Path) -> TaskRows:
    """Read the questions of one of SCORE's own datasets. Raise DataError with every malformed row."""
    is_mmlu_pro = spec.dataset == MMLU_PRO
    paths, absent = find_files(spec, data_root)
    problems: list[str] = []
    examples: list[Example] = []
    oddities: list[tuple[str, str]] = []  # description and place of each

    def example_of(path: Path, number: int, row: Mapping[str, Any]) -> Example:
        content, category = PARSERS[spec.dataset](row, path.stem)
        if isinstance(content, LetteredQuestion):
            place = f'{path}:{number + 1}'
            oddities.extend((oddity, place) for oddity in option_oddities(content))
            gold_letter = LETTERS[content.gold]
            if is_mmlu_pro and row.get('answer', gold_letter) != gold_letter:
                oddities.append(('answer contradicts answer_index; answer_index is used', place))
        return Example(
            row=number,
            file=None if is_mmlu_pro else path.stem,
            category=category,
            content=content,
            digest=row_digest(row),
            cluster=row_cluster(path.stem, row),
        )

    for path in paths:
        num_problems_before = len(problems)
        rows = read_rows(str(path), problems)
        if not rows and len(problems) == num_problems_before:
            problems.append(f'{path}: has no rows; allowed: one JSON object per line')
        examples += parse_rows(str(path), rows, partial(example_of, path), problems)
    if problems:
        raise DataError(problems)
    warnings = [f'{spec.label}: no file of {name}; skipped' for name in absent]
    return TaskRows(examples=examples, absent=absent, warnings=(*warnings, *oddity_warnings(oddities)))


def find_files(spec: ScoreSpec, data_root: str | Path) -> tuple[list[Path], tuple[str, ...]]:
    """Return a dataset's files and the stems of absent ones. Raise DataError if one listed in `subsets` is absent."""
    names_by_stem = {Path(name).stem: name for name in FILES[spec.dataset]}
    wanted = names_by_stem if spec.subsets is None else spec.subsets
    problems = [
        f'{spec.label}: subsets: {stem!r} is unknown{suggestion(stem, names_by_stem)}'
        for stem in wanted
        if stem not in names_by_stem
    ]
    paths: list[Path] = []
    absent: list[str] = []
    for stem, name in names_by_stem.items():
        if stem not in wanted:
            continue
        try:
            paths.append(locate(name, data_root))
        except DataError as error:
            absent.append(stem)
            if spec.subsets is not None:
                problems.extend(error.problems)
    if not paths and not problems:
        files = ', '.join(names_by_stem.values())
        raise MissingFileError(
            f'{spec.label}: none of its files exist: {files}; set {named("data_root")} to their folder'
        )
    if problems:
        raise DataError(problems)
    return paths, tuple(absent)


def parse_mmlu_pro(row: Mapping[str, Any], stem: str) -> tuple[LetteredQuestion, str]:
    """Parse `{"question", "options", "answer", "answer_index", "category"}`; `answer_index` is the gold."""
    options = lettered(texts_field(row, 'options'), 10)
    gold = gold_field(row, len(options), 'answer_index')
    category = text_field(row, 'category', allow_empty=False)
    text = text_field(row, 'question')
    question = LetteredQuestion(text=text, options=options, gold=gold, topic=category)
    return question, category


def parse_agieval(row: Mapping[str, Any], stem: str) -> tuple[LetteredQuestion, str]:
    """Parse `{"passage", "question", "options", "label"}`; options begin with their letter."""
    options = lettered(texts_field(row, 'options'), 5)
    label = text_field(row, 'label', allow_empty=False)
    letters = LETTERS[: len(options)]
    if len(label) != 1 or label not in letters:
        raise RowError(f'label is {describe(label)}; allowed: one letter of {letters}')
    passage = optional_text_field(row, 'passage')
    question = text_field(row, 'question')
    text = f'{passage}Q: {question}' if passage else question
    bare_options = tuple(map(without_label, options))
    return LetteredQuestion(text=text, options=bare_options, gold=letters.index(label)), stem


def without_label(option: str) -> str:
    """Return an option of AGIEval without the letter at its start."""
    label = OPTION_LABEL.match(option)
    return option if label is None else option[label.end() :]


def parse_math(row: Mapping[str, Any], stem: str) -> tuple[MathQuestion, str]:
    """Parse `{"problem", "level", "type", "solution"}`."""
    return MathQuestion(text_field(row, 'problem', allow_empty=False), text_field(row, 'solution')), stem


PARSERS: Mapping[str, Callable[[Mapping[str, Any], str], tuple[LetteredQuestion | MathQuestion, str]]] = {
    MMLU_PRO: parse_mmlu_pro,
    AGIEVAL: parse_agieval,
    MATH: parse_math,
}


def lettered(options: tuple[str, ...], most: int) -> tuple[str, ...]:
    """Return the options unchanged. Raise RowError if there are more than `most`."""
    if len(options) > most:
        last = LETTERS[most - 1]
        raise RowError(f'there are {len(options)} options; allowed: {most}, one per letter from A to {last}')
    return options


def option_oddities(content: LetteredQuestion) -> Iterator[str]:
    """Yield oddities of a question's options that are not errors: empty or repeated options."""
    if '' in content.options:
        yield 'an option is empty'
    if len(set(content.options)) < len(content.options):
        is_gold = content.options.count(content.options[content.gold]) > 1
        yield 'the right option is repeated' if is_gold else 'an option is repeated'


def oddity_warnings(oddities: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return a warning per description, with its first place and the number of places."""
    places_by_oddity = defaultdict(list)
    for oddity, place in oddities:
        places_by_oddity[oddity].append(place)
    return tuple(f'{places[0]}: {oddity} ({len(places)} such rows)' for oddity, places in places_by_oddity.items())


def as_lettered(query: str, choices: Sequence[str], gold: int, topic: str) -> LetteredQuestion:
    """Return the question and options of a multiple_choice row.

    Many rows list the options in the query. If the choices are letters, the options are taken from the list; if the
    list equals the choices, it is removed from the question. Raise RowError for letters without a list.
    """
    text, options = split_list(query, len(choices))
    bare_choices = tuple(choice.strip() for choice in choices)
    are_letters = all(choice.strip(' ().') == letter for choice, letter in zip(choices, LETTERS, strict=False))
    if are_letters and options is None:
        raise RowError("the choices are letters, but the query does not end in a list of options (lines 'A. ...')")
    if options is None or (not are_letters and options != bare_choices):
        text = LIST_END.sub('', query)
        options = tuple(choices)
    return LetteredQuestion(text, lettered(options, len(LETTERS)), gold, topic)


def split_list(query: str, num_options: int) -> tuple[str, tuple[str, ...] | None]:
    """Return the part of a query before its list of options, and the options, or None if it ends in no list.

    Each option begins a line with 'A. ' or 'A.) '; letters within a line may be initials, as in 'C. B. F. Skinner'.
    """
    marks = list(LIST_LETTER.finditer(query))[-num_options:]
    letters = ''.join(mark[1] for mark in marks)
    if letters.upper() != LETTERS[:num_options]:
        return query, None
    text = LIST_HEAD.sub('', query[: marks[0].start()]).rstrip()

    # Each option ends where the next letter begins; the last one before a final 'Answer:' or 'A:'.
    list_end = LIST_END.search(query)
    ends = [mark.start() for mark in marks[1:]]
    ends.append(len(query) if list_end is None else list_end.start())

    options = []
    for mark, end in zip(marks, ends, strict=True):
        option = query[mark.end() : end]
        options.append(option.strip())
    return text, tuple(options)
