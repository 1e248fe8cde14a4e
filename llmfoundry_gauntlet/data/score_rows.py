"""The questions of SCORE's data sets, out of the files that their authors publish."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.decode import describe, suggestion
from llmfoundry_gauntlet.config.score import AGIEVAL, MATH, MMLU_PRO, ScoreSpec
from llmfoundry_gauntlet.data.clusters import cluster_of
from llmfoundry_gauntlet.data.collection import paused_collection
from llmfoundry_gauntlet.data.examples import TaskRows, digest_of
from llmfoundry_gauntlet.data.fields import RowError, field_value, optional_text_field, text_field, texts_field
from llmfoundry_gauntlet.data.files import locate, read_rows
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.types import Example

LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'
NUM_LETTERS = {MMLU_PRO: 10, AGIEVAL: 5}  # that their prompts speak of
FILES = {
    MMLU_PRO: ('score/mmlu_pro_test.jsonl',),
    AGIEVAL: tuple(
        f'score/agieval_v1/{subset}.jsonl'
        for subset in ('sat-math', 'lsat-lr', 'lsat-rc', 'logiqa-en', 'aqua-rat', 'sat-en', 'lsat-ar')
    ),
    MATH: tuple(
        f'score/hendrycks_math/{subject}.jsonl'
        for subject in (
            *('algebra', 'counting_and_probability', 'geometry', 'intermediate_algebra', 'number_theory'),
            *('prealgebra', 'precalculus'),
        )
    ),
}
LISTED = re.compile(r'(?:^|Choices:[^\S\n]+)([A-Za-z])\.\)?(?=\s|$)[^\S\n]*', re.MULTILINE)
LIST_HEAD = re.compile(r'(?:^|(?<=\n))[^\S\n]*Choices:?\s*$')
LIST_END = re.compile(r'\s*(?:(?:^|(?<=\s))(?:Answer|A):)?\s*$')
OPTION_LABEL = re.compile(r'\([A-Z]\)|[A-Z] |[A-Z]\? ')


@dataclass(frozen=True, slots=True)
class LetteredQuestion:
    """A question with options; `gold` is the index of the right one. `topic` is what a prompt says it is about."""

    text: str
    options: tuple[str, ...]
    gold: int
    topic: str = ''


@dataclass(frozen=True, slots=True)
class MathQuestion:
    """A problem, a solution that has the answer in a box, and the answer once it has been taken from there."""

    text: str
    solution: str
    gold: str = ''


@dataclass(slots=True)
class Oddities:
    """Counts of oddities in real data that are no errors."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, place: str) -> None:
        """Counts one."""
        self.counts[what] += 1
        self.first.setdefault(what, place)

    def lines(self) -> tuple[str, ...]:
        """One line for each kind."""
        return tuple(f'{self.first[what]}: {what} ({count} such rows)' for what, count in self.counts.items())


@paused_collection()
def read_score_rows(spec: ScoreSpec, data_root: str | Path) -> TaskRows:
    """The questions of a data set that is SCORE's own. Raises DataError with every wrong row."""
    dataset = spec.dataset
    paths, absent = find_files(spec, data_root)
    parse: Callable[[Mapping[str, Any], str], tuple[Any, str]] = PARSERS[dataset]
    oddities, problems, examples = Oddities(), [], []
    for path in paths:
        rows = read_rows(str(path))
        if not rows:
            problems.append(f'{path}: has no rows; allowed: one JSON object a line')
        for number, row in rows:
            place = f'{path}:{number + 1}'
            try:
                if not isinstance(row, Mapping):
                    raise RowError(f'is {type(row).__name__}; allowed: a JSON object')
                content, category = parse(row, path.stem)
                note_oddities(dataset, row, content, place, oddities)
            except RowError as error:
                problems.append(error.at(place))
                continue
            stem = None if dataset == MMLU_PRO else path.stem
            examples.append(
                Example(
                    row=number,
                    file=stem,
                    category=category,
                    content=content,
                    digest=digest_of(row),
                    cluster=cluster_of(path.stem, row),
                )
            )
    if problems:
        raise DataError(problems)
    warnings = [f'{spec.label}: there is no file of {name}; it is left out' for name in absent]
    return TaskRows(examples=examples, absent=absent, warnings=(*warnings, *oddities.lines()))


def find_files(spec: ScoreSpec, data_root: str | Path) -> tuple[list[Path], tuple[str, ...]]:
    """A data set's files, and the stems of those that are absent. Raises DataError where one that is named is."""
    wanted = spec.subsets
    names = {Path(name).stem: name for name in FILES[spec.dataset]}
    problems = [
        f'{spec.label}: subsets: {stem!r} is unknown{suggestion(stem, names)}'
        for stem in wanted or ()
        if stem not in names
    ]
    found, absent = [], []
    for stem, name in names.items():
        if wanted is not None and stem not in wanted:
            continue
        try:
            found.append(locate(name, data_root))
        except DataError as error:
            absent.append(stem)
            if wanted is not None:
                problems.extend(error.problems)
    if not found and not problems:
        problems = [
            f'{spec.label}: none of its files is there: {", ".join(names.values())}; set data_root to their folder'
        ]
    if problems:
        raise DataError(problems)
    return found, tuple(absent)


def parse_mmlu_pro(row: Mapping[str, Any], stem: str) -> tuple[LetteredQuestion, str]:
    """A row: `{"question", "options", "answer", "answer_index", "category"}`. The index says which option is right."""
    options = lettered(texts_field(row, 'options'), MMLU_PRO)
    gold = field_value(row, 'answer_index')
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(options):
        raise RowError(f'answer_index is {describe(gold)}; allowed: 0..{len(options) - 1}')
    category = text_field(row, 'category', allow_empty=False)
    return LetteredQuestion(text_field(row, 'question'), options, gold, category), category


def parse_agieval(row: Mapping[str, Any], stem: str) -> tuple[LetteredQuestion, str]:
    """A row: `{"passage", "question", "options", "label"}`; options begin with their letter."""
    options = lettered(texts_field(row, 'options'), AGIEVAL)
    label = text_field(row, 'label', allow_empty=False)
    letters = LETTERS[: len(options)]
    if len(label) != 1 or label not in letters:
        raise RowError(f'label is {describe(label)}; allowed: one letter of {letters}')
    passage = optional_text_field(row, 'passage')
    question = text_field(row, 'question')
    text = f'{passage}Q: {question}' if passage else question
    bare = tuple(OPTION_LABEL.sub('', option, count=1) if OPTION_LABEL.match(option) else option for option in options)
    return LetteredQuestion(text, bare, letters.index(label)), stem


def parse_math(row: Mapping[str, Any], stem: str) -> tuple[MathQuestion, str]:
    """A row: `{"problem", "level", "type", "solution"}`."""
    return MathQuestion(text_field(row, 'problem', allow_empty=False), text_field(row, 'solution')), stem


PARSERS = {MMLU_PRO: parse_mmlu_pro, AGIEVAL: parse_agieval, MATH: parse_math}


def lettered(options: tuple[str, ...], dataset: str) -> tuple[str, ...]:
    """The options, if there are letters for all."""
    most = NUM_LETTERS.get(dataset, len(LETTERS))
    if len(options) > most:
        raise RowError(f'there are {len(options)} options; allowed: {most}, one a letter from A to {LETTERS[most - 1]}')
    return options


def note_oddities(dataset: str, row: Mapping[str, Any], content: Any, place: str, oddities: Oddities) -> None:
    """Counts what is odd in a row."""
    if isinstance(content, MathQuestion):
        return
    note_repeats(content, place, oddities)
    if dataset == MMLU_PRO and row.get('answer', LETTERS[content.gold]) != LETTERS[content.gold]:
        oddities.add('answer names another option than answer_index, which is taken', place)


def note_repeats(content: LetteredQuestion, place: str, oddities: Oddities) -> None:
    """Counts a row in which two options have the same text, or one has none."""
    if '' in content.options:
        oddities.add('an option is empty', place)
    if len(set(content.options)) < len(content.options):
        is_gold = content.options.count(content.options[content.gold]) > 1
        oddities.add(f'an option stands there twice{", the right one" if is_gold else ""}', place)


def as_lettered(query: str, choices: Sequence[str], gold: int, topic: str) -> LetteredQuestion:
    """A multiple_choice row's question and options.

    Many rows list the options in the query. Where their choices are letters the list gives the options; where it says
    the same as the choices it is taken out of the question. Raises RowError where letters stand for nothing.
    """
    text, options = split_list(query, len(choices))
    if all(choice.strip(' ().') == letter for choice, letter in zip(choices, LETTERS, strict=False)):
        if options is None:
            raise RowError("the choices are letters, and the query does not end in a list of options: lines 'A. ...'")
    elif options != tuple(choice.strip() for choice in choices):
        text, options = LIST_END.sub('', query), tuple(choices)
    return LetteredQuestion(text, lettered(options, ''), gold, topic)


def list_end(query: str) -> int:
    """Return where a list that ends a query does, without a word such as 'Answer:' after it."""
    found = LIST_END.search(query)
    return len(query) if found is None else found.start()


def split_list(query: str, num_options: int) -> tuple[str, tuple[str, ...] | None]:
    """A query before its list of options, and the options; None where no such list ends it.

    Each option begins a line, as 'A. ' or 'A.) '; letters within a line may be names, as in 'C. B. F. Skinner'.
    """
    marks = list(LISTED.finditer(query))[-num_options:]
    if ''.join(match[1] for match in marks).upper() != LETTERS[:num_options]:
        return query, None
    ends = [match.start() for match in marks[1:]] + [list_end(query)]
    options = tuple(query[match.end() : end].strip() for match, end in zip(marks, ends, strict=True))
    return LIST_HEAD.sub('', query[: marks[0].start()]).rstrip(), options
