"""Read the scores in results.json, checked and typed: the source of tables, frames, charts and the report page."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, ClassVar

from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.config.yaml import decode
from llmfoundry_gauntlet.errors import Problems, join
from llmfoundry_gauntlet.metrics.keys import GOLD_BITS
from llmfoundry_gauntlet.metrics.statistics import NORMAL_QUANTILE
from llmfoundry_gauntlet.results.token_limits import TokenLimitRecord

COMPOSITE = 'Composite'  # the metric of categories and averages
ORIGINS = ('sample', 'unofficial', 'own', 'published')  # of data; the first say most about what a score is worth
KINDS = ('task', 'category', 'average', GOLD_BITS, 'perturbation')  # of headline scores
MAJORITY = 'MajorityClass'
NO_METRICS = 'its type has no accuracy'
OF_GUESSING = ('accuracy', 'accuracy_mean', 'accuracy_by_variant')  # of SCORE, whose value for guesses is chance
# Metrics of SCORE by letter of an answer that is the same letter in every variant.
OF_CONSTANT_LETTERS = {
    'accuracy': 'accuracy_by_constant_letter',
    'consistency_rate': 'consistency_rate_by_constant_letter',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One score of an evaluation, or the reason why it is absent.

    `kind` is category, average, task or perturbation (of SCORE); `part` is a category of a task, or a variant. `run` is
    the evaluation's folder, `batch` and `token` are the training of its model. `low` and `high` are the ends of the
    95 % interval, `None` if unknown; `no_error` is why a value cannot have an error. `chance` is the accuracy of
    guessing, given only for accuracies. `constant_letter` is the highest value that SCORE's accuracy or consistency
    rate has if one letter is the answer to every variant.
    `data_origin` of the rows is sample, published, unofficial or own; that of a composite is the first of
    `ORIGINS` among its tasks.
    """

    run: str
    batch: int | None
    token: int | None = None
    kind: str
    name: str
    part: str | None = None
    metric: str | None = None
    value: float | None = None
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    no_error: str | None = None
    num_items: int | None = None
    chance: float | None = None
    constant_letter: float | None = None
    data_origin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRecord:
    """A measure in results.json; `variance_shares` of a composite are those of its tasks in its error."""

    ignore_unknown_keys: ClassVar = True
    value: float | None = None
    standard_error: float | None = None
    confidence_interval: tuple[float, ...] = ()
    reason: str | None = None
    no_error: str | None = None
    variance_shares: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.value is None) == (self.reason is None):
            raise ValueError('is neither a value nor a reason, or both')
        if not math.isfinite(self.value or 0) or not 0 <= (self.standard_error or 0) < math.inf:
            raise ValueError(f'is {self.value}, standard error {self.standard_error}; allowed: finite numbers')
        ends = self.confidence_interval
        if ends and (len(ends) != 2 or not all(map(math.isfinite, ends)) or ends[0] > ends[1]):
            raise ValueError(f'confidence_interval: is {ends}; allowed: two finite numbers')

    def columns(self, least: float = -math.inf, most: float = math.inf) -> dict[str, Any]:
        """Return the fields of a ScoreRow.

        0.1.0 recorded no interval: then it is that of the error, within the possible values.
        """
        ends = self.confidence_interval
        if not ends and self.value is not None and self.standard_error:
            half = NORMAL_QUANTILE * self.standard_error
            ends = (max(least, self.value - half), min(most, self.value + half))
        low, high = ends or (None, None)
        shown = {
            'value': self.value,
            'standard_error': self.standard_error,
            'reason': self.reason,
            'no_error': self.no_error,
        }
        return {**shown, 'low': low, 'high': high}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """The scores of a task, or of a category of it, in results.json; `metrics` is `None` if it was not run."""

    ignore_unknown_keys: ClassVar = True
    metrics: dict[str, MeasureRecord] | None = None
    reason: str | None = None
    num_items: int = 0
    num_unscored: int = 0
    num_shortened: int = 0
    effective_shots: float | None = None
    ended_at_limit: TokenLimitRecord | None = None
    data_origin: str | None = None
    data_sha256: str | None = None
    subset_items: int | None = None
    chance: float | None = None
    categories: dict[str, TaskRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.metrics is None) == (self.reason is None):
            raise ValueError('has neither metrics nor a reason, or both')
        counts = (self.num_items, self.num_unscored, self.num_shortened)
        if min(counts) < 0:
            raise ValueError(f'num_items, num_unscored, num_shortened: are {counts}; allowed: 0 or more')


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositesRecord:
    """The composites in results.json."""

    ignore_unknown_keys: ClassVar = True
    categories: dict[str, MeasureRecord]
    averages: dict[str, MeasureRecord]
    gauntlet: GauntletSpec
    gold_bits_per_byte: dict[str, MeasureRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRecord:
    """A dataset of SCORE in results.json: all measures of each perturbation, or the reason why it was not run."""

    ignore_unknown_keys: ClassVar = True
    perturbations: dict[str, dict[str, Any]]
    task: str
    num_items: int
    ended_at_limit: TokenLimitRecord | None = None
    chance: float | None = None
    data_origin: str | None = None
    data_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRecord:
    """The seconds of an evaluation in results.json."""

    ignore_unknown_keys: ClassVar = True
    seconds: float
    tasks: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsRecord:
    """The part of results.json that tables and pages show."""

    ignore_unknown_keys: ClassVar = True
    tasks: dict[str, TaskRecord]
    composites: CompositesRecord | None
    score: dict[str, DatasetRecord] | None
    timing: TimingRecord
    model: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    config: dict[str, Any] | None = None


def score_name(row: ScoreRow) -> str:
    """Return the name of a perturbation in tables."""
    return row.name.replace('/', ' ')


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its path without the parts at the beginning and end that all have in common."""
    # The last part that would be left of a path stays, even if all have it in common.
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    num_first = min(num_common(paths), min(map(len, paths)) - 1)
    ends = [path[num_first:] for path in paths]

    reversed_ends = [end[::-1] for end in ends]
    num_last = min(num_common(reversed_ends), min(map(len, ends)) - 1)
    return ['/'.join(end[: len(end) - num_last]) for end in ends]


def num_common(paths: Sequence[Sequence[str]]) -> int:
    """Return the number of parts at the beginning that all paths have in common."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def score_rows(results: ResultsRecord, problems: Problems) -> Iterator[dict[str, Any]]:
    """Yield the fields of ScoreRows: composites first, then tasks, then SCORE."""
    yield from composite_rows(results)
    yield from task_rows(results)
    yield from perturbation_rows(results, problems)


def composite_rows(results: ResultsRecord) -> Iterator[dict[str, Any]]:
    """Yield categories and averages."""
    if results.composites is None:
        return
    composites = results.composites
    tasks = tasks_of_composites(composites.gauntlet)
    for kind, group in (('category', composites.categories), ('average', composites.averages)):
        for name, measure in group.items():
            origins = {results.tasks[key].data_origin for key in tasks.get(name, ()) if key in results.tasks}
            data_origin = next((origin for origin in ORIGINS if origin in origins), None)
            row = {'kind': kind, 'name': name, 'data_origin': data_origin}
            yield {**row, 'metric': COMPOSITE, **measure.columns(most=1.0)}
            bits = composites.gold_bits_per_byte.get(name)
            if bits is not None:  # older records have none
                yield {**row, 'metric': GOLD_BITS, **bits.columns(least=0.0)}


def tasks_of_composites(gauntlet: GauntletSpec) -> dict[str, list[str]]:
    """Return the tasks of each category and average."""
    tasks = {}
    for category in gauntlet.categories:
        tasks[category.name] = [benchmark.key for benchmark in category.benchmarks]
    for name, members in gauntlet.named_averages.items():
        # A task may be in several categories of an average.
        of_members = chain.from_iterable(tasks.get(member, ()) for member in members)
        tasks[name] = list(dict.fromkeys(of_members))
    return tasks


def task_rows(results: ResultsRecord) -> Iterator[dict[str, Any]]:
    """Yield all metrics of each task, the accuracy first, then those of its own categories."""
    chance_in_gauntlet: dict[str, float] = {}
    if results.composites is not None:
        for category in results.composites.gauntlet.categories:
            for benchmark in category.benchmarks:
                chance_in_gauntlet.setdefault(benchmark.key, benchmark.random_baseline)

    for task, entry in results.tasks.items():
        if entry.metrics is None:
            yield {'kind': 'task', 'name': task, 'reason': entry.reason}
            continue
        chance = chance_in_gauntlet.get(task, entry.chance)
        of_task = {'kind': 'task', 'name': task, 'data_origin': entry.data_origin}
        for part, score in [(None, entry), *entry.categories.items()]:
            row = {**of_task, 'part': part, 'num_items': score.num_items}
            if not score.metrics:
                yield {**row, 'reason': NO_METRICS}
                continue
            (accuracy_name, accuracy), *others = score.metrics.items()
            yield {**row, 'metric': accuracy_name, 'chance': chance, **accuracy.columns(0.0, 1.0)}
            for metric, measure in others:
                yield {**row, 'metric': metric, **measure.columns()}


def perturbation_rows(results: ResultsRecord, problems: Problems) -> Iterator[dict[str, Any]]:
    """Yield all metrics of each SCORE dataset under each perturbation, then those by variant and by gold label."""
    for dataset, entry in (results.score or {}).items():
        for perturbation, record in entry.perturbations.items():
            row = {
                'kind': 'perturbation',
                'name': f'{dataset}/{perturbation}',
                'num_items': record.get('num_questions'),
                'data_origin': entry.data_origin,
            }
            if 'accuracy' not in record:
                yield {**row, 'reason': str(record.get('reason'))}
                continue
            where = f'score.{dataset}.perturbations.{perturbation}'
            measures = {
                metric: dict(measures_in(content, join(where, metric), problems))
                for metric, content in record.items()
                if isinstance(content, Mapping)  # else a count
            }
            for metric, of_metric in measures.items():
                baselines = {
                    'chance': entry.chance if metric in OF_GUESSING else None,
                    'constant_letter': best_constant_letter(metric, measures),
                }
                for part, measure in of_metric.items():
                    yield {**row, 'metric': metric, 'part': part, **baselines, **measure.columns(0.0, 1.0)}


def best_constant_letter(metric: str, measures: Mapping[str, Mapping[str | None, MeasureRecord]]) -> float | None:
    """Return the highest value of a metric by constant letter; None for other metrics, and in earlier records."""
    by_letter = measures.get(OF_CONSTANT_LETTERS.get(metric, ''), {})
    values = [measure.value for measure in by_letter.values() if measure.value is not None]
    return max(values, default=None)


def measures_in(
    content: Mapping[str, Any], where: str, problems: Problems
) -> Iterator[tuple[str | None, MeasureRecord]]:
    """Yield the measure that is recorded, with None, or the recorded measures by variant or gold label."""
    if content.keys() & {'value', 'reason'}:
        measure: MeasureRecord | None = decode(MeasureRecord, content, where, problems)
        if measure is not None:
            yield None, measure
        return
    for part, record in content.items():
        measure = decode(MeasureRecord, record, join(where, part), problems)
        if measure is not None:
            yield part, measure
