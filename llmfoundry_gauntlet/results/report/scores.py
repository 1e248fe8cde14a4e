"""The scores in a results.json, checked and typed: the source of tables, frames, charts and the report page."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from llmfoundry_gauntlet.config.yaml import describe
from llmfoundry_gauntlet.errors import ConfigError, RecordError
from llmfoundry_gauntlet.metrics.comparison import CONFIDENT
from llmfoundry_gauntlet.results.files import RESULTS, find_results

COMPOSITE = 'Composite'  # the metric of categories and averages
COMPOSITES = {'category': 'categories', 'average': 'averages'}  # kind, and its key in a record
KINDS = ('task', 'category', 'average', 'perturbation')
SHOWN_OF_SCORE = ('accuracy', 'consistency_rate')
COUNTS = ('num_items', 'num_unscored', 'num_truncated')
MAJORITY = 'MajorityClass'
NO_METRICS = 'its type has no accuracy'

MAX_RUNS = 8  # that colours tell apart

Record = Mapping[str, Any]  # the content of a results.json


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One score of an evaluation, or the reason why it is absent.

    `kind` is category, average, task or perturbation (of SCORE); `part` is a category of a task, or a variant. `run` is
    the evaluation's folder, `batch` the training batch of its model. `chance` is the accuracy of guessing, given only
    for accuracies.
    """

    run: str
    batch: int | None
    kind: str
    name: str
    part: str | None = None
    metric: str | None = None
    value: float | None = None
    standard_error: float | None = None
    reason: str | None = None
    num_items: int | None = None
    chance: float | None = None


def interval(value: float | None, error: float | None) -> tuple[float, float] | None:
    """Return the 95 % interval of a value with this standard error; `None` if either is missing."""
    return None if value is None or error is None else (value - CONFIDENT * error, value + CONFIDENT * error)


@dataclass(frozen=True, kw_only=True)
class RecordedEvaluation:
    """One results.json and its checked numbers."""

    folder: Path
    record: Record
    rows: tuple[ScoreRow, ...]

    @property
    def batch(self) -> int | None:
        """Return the training batch, `None` if unknown."""
        return batch_of(self.record)

    @property
    def name(self) -> str:
        """Return the training batch, else the name of the folder."""
        return (self.folder.name or str(self.folder)) if self.batch is None else f'ba{self.batch}'

    @cached_property
    def headline(self) -> dict[tuple[str, str], ScoreRow]:
        """Return the main scores by kind and name.

        These are the accuracy of each task, categories, averages, and accuracy and consistency of SCORE.
        """
        found: dict[tuple[str, str], ScoreRow] = {}
        for row in self.rows:
            for name in headline_names(row):
                found.setdefault((row.kind, name), row)
        return found

    @property
    def majorities(self) -> dict[str, float]:
        """Return the accuracy of always giving the most common answer, by task."""
        rows = (row for row in self.rows if row.metric == MAJORITY and row.part is None)
        return {row.name: row.value for row in rows if row.value is not None}


def headline_names(row: ScoreRow) -> Iterator[str]:
    """Yield the names under which a number may be shown; a task's first number is its accuracy."""
    if row.part is None and row.kind != 'perturbation':
        yield row.name
    elif row.part is None:
        yield from (f'{score_name(row)} {metric}' for metric in SHOWN_OF_SCORE if row.metric in (metric, None))


def score_name(row: ScoreRow) -> str:
    """Return the name of a perturbation in tables."""
    return f'score {row.name.replace("/", " ")}'


def headlines(evaluations: Iterable[RecordedEvaluation]) -> list[tuple[str, str]]:
    """Return kind and name of all headline numbers, tasks first."""
    names = dict.fromkeys(name for one in evaluations for name in one.headline)
    return sorted(names, key=lambda name: KINDS.index(name[0]))


def find_evaluations(folders: Sequence[Path]) -> list[RecordedEvaluation]:
    """Return the evaluations at or below each folder, each once, in the order of training. Raise RecordError."""
    found = {path.resolve(): (path, record) for folder in folders for path, record in find_results(folder)}
    return [recorded_evaluation(path, record) for path, record in found.values()]


def recorded_evaluation(folder: Path, record: Record) -> RecordedEvaluation:
    """Return a record with its scores. Raise RecordError."""
    return RecordedEvaluation(folder=folder, record=record, rows=tuple(read_scores(folder, record)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """At least one evaluation, in the order of training, under a short name."""

    name: str
    evaluations: Sequence[RecordedEvaluation]

    @property
    def last(self) -> RecordedEvaluation:
        """Return the evaluation that represents the run in comparisons."""
        return self.evaluations[-1]


def find_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs at or below these folders.

    Sibling folders with evaluations of different training batches are one run; every other evaluation is a run of its
    own. Raise RecordError for a damaged record, ConfigError for more runs than a page can show.
    """
    found = {place.resolve(): (place, run) for folder in folders for place, run in runs_below(folder)}
    places = [place for place, _ in found.values()]
    if len(found) > MAX_RUNS:
        named = ', '.join(map(str, places[:3]))
        raise ConfigError(f'there are {len(found)} runs ({named}, ...); a page shows at most {MAX_RUNS}: name fewer')
    runs = zip(short_names(places), found.values(), strict=True)
    return [RecordedRun(name=name, evaluations=evaluations) for name, (_, evaluations) in runs]


def runs_below(folder: Path) -> Iterator[tuple[Path, list[RecordedEvaluation]]]:
    """Yield the runs at or below one folder, in the order of their paths."""
    groups: dict[Path, list[RecordedEvaluation]] = {}
    for found in sorted(find_evaluations([folder]), key=lambda one: one.folder):
        groups.setdefault(found.folder.parent, []).append(found)
    for parent, members in groups.items():
        batches = {member.batch for member in members}
        if len(members) > 1 and None not in batches and len(batches) == len(members):
            yield parent, sorted(members, key=lambda member: member.batch or 0)
        else:
            yield from ((member.folder, [member]) for member in members)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders without their common parent path."""
    if len(folders) == 1:
        return [str(folders[0])]
    paths = [os.path.abspath(folder) for folder in folders]
    common = os.path.commonpath(paths)
    return [path if path == common else os.path.relpath(path, common) for path in paths]


class WrongRecord(ValueError):
    """Raised if a key of a record has the wrong type."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value inside a record with its dotted path. Its methods raise WrongRecord for a value of another type."""

    value: Any
    path: str = ''

    def __getitem__(self, name: str) -> Node:
        found = self.get(name)
        if found is None:
            raise WrongRecord(f'{self.path}{"." * bool(self.path)}{name}: is missing')
        return found

    def get(self, name: str) -> Node | None:
        """Return the value of a key, `None` if it is missing or null."""
        found = self.mapping().get(name)
        return None if found is None else Node(found, f'{self.path}{"." * bool(self.path)}{name}')

    def items(self) -> Iterator[tuple[str, Node]]:
        """Yield each key with its value."""
        for name, value in self.mapping().items():
            yield name, Node(value, f'{self.path}.{name}')

    def entries(self) -> Iterator[Node]:
        """Yield each element of a list."""
        if not isinstance(self.value, list | tuple):
            self.wrong('a list')
        for place, value in enumerate(self.value):
            yield Node(value, f'{self.path}[{place}]')

    def mapping(self) -> Mapping[str, Any]:
        """Return the value, a mapping."""
        return self.value if isinstance(self.value, Mapping) else self.wrong('a mapping')

    def text(self) -> str:
        """Return the value, a string."""
        return self.value if isinstance(self.value, str) else self.wrong('text')

    def count(self) -> int:
        """Return the value, an integer of at least 0."""
        if isinstance(self.value, int) and not isinstance(self.value, bool) and self.value >= 0:
            return self.value
        self.wrong('a whole number, 0 or more')

    def number(self, least: float = -math.inf) -> float:
        """Return the value, a finite number of at least `least`; Python's JSON reads NaN and Infinity too."""
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        try:
            if is_number and math.isfinite(self.value) and self.value >= least:
                return float(self.value)
        except OverflowError:
            pass
        self.wrong('a finite number' + (f', {least:g} or more' if least > -math.inf else ''))

    def wrong(self, allowed: str) -> NoReturn:
        """Raise WrongRecord."""
        raise WrongRecord(f'{self.path}: is {describe(self.value)}; allowed: {allowed}')


def read_scores(folder: Path | str, record: Record) -> list[ScoreRow]:
    """Return all scores of a record: categories and averages first, then tasks, then SCORE.

    Raise RecordError naming the file and the invalid key.
    """
    root = Node(record)
    try:
        for name in ('model', 'training', 'environment', 'config', 'timing'):
            if (part := root.get(name)) is not None:
                part.mapping()
        for value in (root['timing']['seconds'], *(found for _, found in root['timing']['tasks'].items())):
            value.number(0)
        rows = [*composite_rows(root), *task_rows(root), *perturbation_rows(root)]
    except WrongRecord as error:
        raise RecordError(f'{Path(folder) / RESULTS}: {error}; evaluate again') from error
    return [ScoreRow(run=str(folder), batch=batch_of(record), **row) for row in rows]


def batch_of(record: Record) -> int | None:
    """Return the training batch of the evaluated model, `None` if unknown."""
    return (record['training'] or {}).get('batch')


def measure(node: Node) -> dict[str, Any]:
    """Return the value and standard error of a measure, or its reason."""
    if node.get('value') is None:
        return {'reason': node['reason'].text()}
    error = node.get('standard_error')
    return {'value': node['value'].number(), 'standard_error': None if error is None else error.number(0)}


def composite_rows(root: Node) -> Iterator[dict[str, Any]]:
    """Yield categories and averages."""
    composites = root.get('composites')
    if composites is None:
        return
    for kind, group in COMPOSITES.items():
        for name, node in composites[group].items():
            yield {'kind': kind, 'name': name, 'metric': COMPOSITE, **measure(node)}


def task_rows(root: Node) -> Iterator[dict[str, Any]]:
    """Yield all metrics of each task, the accuracy first, then those of its own categories."""
    chance = {key: one.number() for key, (one, _) in benchmarks(root).items()}
    for task, entry in root['tasks'].items():
        if entry.get('metrics') is None:
            yield {'kind': 'task', 'name': task, 'reason': entry['reason'].text()}
            continue
        categories = entry.get('categories')
        for part, score in [(None, entry), *(categories.items() if categories is not None else ())]:
            counts = {name: score[name].count() for name in COUNTS}
            row = {'kind': 'task', 'name': task, 'part': part, 'num_items': counts['num_items']}
            metrics = list(score['metrics'].items())
            for place, (metric, node) in enumerate(metrics):
                guess = chance.get(task) if place == 0 else None
                yield {**row, 'metric': metric, 'chance': guess, **measure(node)}
            if not metrics:
                yield {**row, 'reason': NO_METRICS}


def benchmarks(root: Node) -> dict[str, tuple[Node, str]]:
    """Return the chance accuracy of each task of the gauntlet, and the first category that counts it."""
    found: dict[str, tuple[Node, str]] = {}
    composites = root.get('composites')
    for category in composites['gauntlet']['categories'].entries() if composites is not None else ():
        for one in category['benchmarks'].entries():
            key = f'{one["name"].text()}/{one["num_fewshot"].count()}-shot'
            found.setdefault(key, (one['random_baseline'], category['name'].text()))
    return found


def perturbation_rows(root: Node) -> Iterator[dict[str, Any]]:
    """Yield all metrics of each SCORE dataset under each perturbation, then those by variant and by gold label."""
    score = root.get('score') if 'score' in root.mapping() else root['score']
    for dataset, entry in score.items() if score is not None else ():
        for perturbation, found in entry['perturbations'].items():
            row: dict[str, Any] = {'kind': 'perturbation', 'name': f'{dataset}/{perturbation}'}
            if 'accuracy' not in found.mapping():
                yield {**row, 'reason': found['reason'].text()}
                continue
            row['num_items'] = found['num_questions'].count()
            for metric, node in found.items():
                if not isinstance(node.value, Mapping):
                    continue
                is_measure = bool(node.value.keys() & {'value', 'reason'})
                for part, one in [(None, node)] if is_measure else node.items():
                    yield {**row, 'metric': metric, 'part': part, **measure(one)}


def task_categories(record: Record) -> dict[str, str]:
    """Return the first category of the gauntlet that counts each task."""
    return {key: category for key, (_, category) in benchmarks(Node(record)).items()}
