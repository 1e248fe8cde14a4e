"""Read evaluations back from their folders with tasks, settings and all items: to recompute metrics, or as frames."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.score import ScoreSpec
from llmfoundry_gauntlet.config.settings import AUTO, EvaluationSettings
from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.config.yaml import decode
from llmfoundry_gauntlet.errors import ConfigError, Problems, RecordError, plural
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData
from llmfoundry_gauntlet.evaluation.run import Evaluation, Scores, summarize
from llmfoundry_gauntlet.evaluation.suite import Suite, decode_task
from llmfoundry_gauntlet.metrics.keys import GOLD_BITS
from llmfoundry_gauntlet.results.files import RESULTS, average_size, find_results, read_results, results_record
from llmfoundry_gauntlet.results.journal import Finished
from llmfoundry_gauntlet.results.report.scores import (
    ResultsRecord,
    ScoreRow,
    score_name,
    score_rows,
    short_names,
)
from llmfoundry_gauntlet.results.samples import read_samples, sample_line, samples_file
from llmfoundry_gauntlet.scoring.mathematics import Comparer
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.gold import gold_of
from llmfoundry_gauntlet.tasks.score import score_task
from llmfoundry_gauntlet.types import ItemKey, ItemResult

SHOWN_OF_SCORE = ('accuracy', 'consistency_rate')
MAX_RUNS = 8  # that colours tell apart
EVALUATIONS = 'gauntlet'  # the folder of evaluations within that of a run, by default


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSource:
    """The rows of which the items of a task are chosen, and how many are; `subset_version` is None if all of them."""

    num_items: int
    rows_sha256: str
    subset_version: int | None = None


@dataclass(frozen=True, kw_only=True)
class Run(Scores):
    """A recorded evaluation: its results.json, checked; its tasks and items are read from its folder on first use."""

    folder: Path
    record: Mapping[str, Any]
    scores: ResultsRecord
    rows: tuple[ScoreRow, ...]

    @cached_property
    def data(self) -> EvaluationData:
        """Return the settings and the tasks, without their rows. Raise RecordError."""
        path = self.folder / RESULTS
        try:
            return recorded_data(self.record, path)
        except (KeyError, TypeError) as error:
            raise RecordError(f'{path}: cannot be used: {error!r}; evaluate again') from error
        except ConfigError as error:
            raise RecordError([f'{path}: cannot be used: {text}; evaluate again' for text in error.problems]) from error

    @cached_property
    def results(self) -> dict[str, tuple[ItemResult, ...]]:
        """Return the items of each task. Raise RecordError."""
        recorded_counts = {key: task.num_items for key, task in self.scores.tasks.items()}
        recorded_counts.update({dataset.task: dataset.num_items for dataset in (self.scores.score or {}).values()})
        results_by_task = {}
        for key in self.tasks:
            results = read_samples(self.folder, key)
            # A duplicate may be in the place of a lost line, so both lines and items are counted.
            num_lines = len(results)
            num_items = len({result.key for result in results})
            if not num_items == num_lines == recorded_counts[key]:
                lines = f'{plural(num_lines, "line")} of {plural(num_items, "item")}'
                raise RecordError(
                    f'{samples_file(self.folder, key)}: has {lines}, but {RESULTS} says {recorded_counts[key]}; '
                    'evaluate again'
                )
            results_by_task[key] = results
        return results_by_task

    @property
    def tasks(self) -> dict[str, Task]:
        """Return the tasks that were run, by key."""
        return {task.key: task for task in self.data.suite.tasks}

    @property
    def batch(self) -> int | None:
        """Return the training batch, `None` if unknown."""
        return (self.scores.training or {}).get('batch')

    @property
    def name(self) -> str:
        """Return the training batch, else the name of the folder."""
        if self.batch is None:
            return self.folder.name or str(self.folder)
        return f'ba{self.batch}' if self.average is None else f'average_{self.average}/ba{self.batch}'

    @property
    def average(self) -> int | None:
        """Return how many checkpoints its weights are the mean of, `None` for those of a single one."""
        return average_size(self.record)

    @property
    def origins(self) -> dict[str, str | None]:
        """Return the origin of the data of each task that was run, SCORE's too; `None` if unknown."""
        origins = {key: task.data_origin for key, task in self.scores.tasks.items() if task.metrics is not None}
        for dataset in (self.scores.score or {}).values():
            origins[dataset.task] = dataset.data_origin
        return origins

    @property
    def sources_of_items(self) -> dict[str, ItemSource]:
        """Return where the items of each task are from, SCORE's too, if it is known."""
        version = (self.scores.config or {}).get('subset_version')
        sources = {}
        for key, task in self.scores.tasks.items():
            if task.data_sha256 is not None:
                sources[key] = ItemSource(
                    num_items=task.num_items,
                    rows_sha256=task.data_sha256,
                    subset_version=version if task.subset_items else None,
                )
        for dataset in (self.scores.score or {}).values():
            if dataset.data_sha256 is not None:
                sources[dataset.task] = ItemSource(num_items=dataset.num_items, rows_sha256=dataset.data_sha256)
        return sources

    @cached_property
    def headline(self) -> dict[tuple[str, str], ScoreRow]:
        """Return the main scores by kind and name.

        These are the accuracy of each task, categories, averages, the bits per byte of the gold answers of both, and
        accuracy and consistency of SCORE.
        """
        scores: dict[tuple[str, str], ScoreRow] = {}
        for row in self.rows:
            if row.part is not None:
                continue
            if row.metric == GOLD_BITS:
                scores[GOLD_BITS, row.name] = row
                continue
            if row.kind != 'perturbation':
                scores.setdefault((row.kind, row.name), row)  # a task's first number is its accuracy
                continue
            for metric in SHOWN_OF_SCORE:
                if row.metric in (metric, None):  # None for the reason why a perturbation was not run
                    scores.setdefault((row.kind, f'{score_name(row)} {metric}'), row)
        return scores

    @property
    def task_categories(self) -> dict[str, str]:
        """Return the first category of the gauntlet that counts each task."""
        category_of_task: dict[str, str] = {}
        composites = self.scores.composites
        if composites is not None:
            for category in reversed(composites.gauntlet.categories):  # so that the first one is written last
                for benchmark in category.benchmarks:
                    category_of_task[benchmark.key] = category.name
        return category_of_task


def recorded_run(folder: Path, record: Mapping[str, Any]) -> Run:
    """Return a record as a run. Raise RecordError naming the file and each invalid key."""
    problems = Problems(str(folder / RESULTS))
    scores: ResultsRecord | None = decode(ResultsRecord, record, '', problems)
    fields_of_rows = [] if scores is None else list(score_rows(scores, problems))
    if scores is None or problems.messages:
        raise RecordError([f'{problem}; evaluate again' for problem in problems.messages])
    training = scores.training or {}
    point: dict[str, Any] = {'run': str(folder), 'batch': training.get('batch'), 'token': training.get('token')}
    rows = tuple(ScoreRow(**point, **fields_of_row) for fields_of_row in fields_of_rows)
    return Run(folder=folder, record=record, scores=scores, rows=rows)


def read_run(folder: str | Path) -> Run:
    """Return the evaluation in a folder, with all its items. Raise RecordError."""
    run = recorded_run(Path(folder), read_results(Path(folder)))
    _ = run.results  # reads them now
    return run


def find_evaluations(folders: Sequence[Path]) -> list[Run]:
    """Return the evaluations at or below each folder, each once, in the order of training. Raise RecordError."""
    records = {}
    for folder in folders:
        for path, record in find_results(folder):
            records[path.resolve()] = path, record
    return [recorded_run(path, record) for path, record in records.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeries:
    """At least one evaluation, in the order of training, under a short name."""

    name: str
    evaluations: Sequence[Run]

    @property
    def last(self) -> Run:
        """Return the evaluation that represents the run in comparisons."""
        return self.evaluations[-1]


def find_runs(folders: Sequence[Path]) -> list[RunSeries]:
    """Return the runs at or below these folders, under short names.

    Sibling folders with evaluations of different training batches are one run; every other evaluation is a run of its
    own. Raise RecordError for a damaged record, ConfigError for more runs than a page can show.
    """
    runs = {}  # a folder that is given twice, perhaps by another name, is one run
    for folder in folders:
        for path, evaluations in runs_below(folder):
            runs[path.resolve()] = path, evaluations
    paths = [path for path, _ in runs.values()]
    if len(paths) > MAX_RUNS:
        named = ', '.join(map(str, paths[:3]))
        raise ConfigError(f'there are {len(paths)} runs ({named}, ...); a page shows at most {MAX_RUNS}: name fewer')

    return [
        RunSeries(name=name, evaluations=evaluations)
        for name, (_, evaluations) in zip(run_names(paths), runs.values(), strict=True)
    ]


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return a name for the run in each folder: of a single one that of the folder, of several by `short_names`."""
    # The folder of evaluations is called alike in every run, so its name tells nothing.
    whole_paths = [Path(os.path.abspath(folder)) for folder in folders]
    paths = [Path(*[part for part in path.parts if part != EVALUATIONS]) for path in whole_paths]
    if len({*paths}) < len(paths):
        paths = whole_paths
    if len(paths) > 1:
        return short_names(paths)

    (path,) = paths
    is_one_of_a_run = whole_paths[0].parent.name == EVALUATIONS
    return ['/'.join(path.parts[-2:]) if is_one_of_a_run else path.name or str(path)]


def runs_below(folder: Path) -> Iterator[tuple[Path, list[Run]]]:
    """Yield the runs at or below one folder, in the order of their paths."""
    evaluations = find_evaluations([folder])
    evaluations.sort(key=lambda evaluation: evaluation.folder)
    siblings_by_parent: dict[Path, list[Run]] = {}
    for evaluation in evaluations:
        siblings_by_parent.setdefault(evaluation.folder.parent, []).append(evaluation)

    for parent, siblings in siblings_by_parent.items():
        batches = {evaluation.batch for evaluation in siblings}
        is_training = len(siblings) > 1 and None not in batches and len(batches) == len(siblings)
        if is_training:
            yield parent, sorted(siblings, key=lambda evaluation: evaluation.batch or 0)
        else:
            for evaluation in siblings:
                yield evaluation.folder, [evaluation]


def finished_run(folder: Path) -> Finished | None:
    """Return the items of a finished evaluation; None if its identity is unknown."""
    run = read_run(folder)
    if run.record.get('identity') is None:
        return None
    results: dict[ItemKey, ItemResult] = {}
    for result in chain.from_iterable(run.results.values()):
        results[result.key] = result
        gold = gold_of(result)  # an item of its own while an evaluation runs
        if gold is not None:
            results[gold.key] = gold
    timing = run.record['timing']
    started = None
    if timing.get('started') is not None:  # 0.1.0 did not record it
        started = datetime.fromisoformat(timing['started']).timestamp()
    return Finished(identity=run.record['identity'], started=started, seconds=timing['seconds'], results=results)


def read_runs(run: str | Path) -> list[Run]:
    """Return every evaluation at or below a folder, in training order. Raise RecordError."""
    return [read_run(folder) for folder, _ in find_results(Path(run))]


def recorded_data(record: Mapping[str, Any], path: Path) -> EvaluationData:
    """Return the data of a recorded evaluation, without its rows."""
    problems = Problems(str(path))
    datasets = (record['score'] or {}).values()
    entries = {**record['tasks'], **{entry['task']: entry for entry in datasets}}
    lacking = [key for key, entry in entries.items() if 'spec' not in entry and 'reason' not in entry]
    if lacking:
        raise ConfigError(f'it does not say how {", ".join(lacking)} was asked')
    tasks = recorded_tasks([entry['spec'] for entry in entries.values() if 'spec' in entry], problems)

    gauntlet = None
    if record['composites'] is not None:
        gauntlet = decode(GauntletSpec, record['composites']['gauntlet'], 'gauntlet', problems)

    # The record also has values that the evaluation found, such as its tokenizer, and the sandbox of its machine.
    names = {field.name for field in fields(EvaluationSettings)}
    given = {key: value for key, value in record['config'].items() if key in names}
    settings: EvaluationSettings | None = decode(EvaluationSettings, {**given, 'sandbox': AUTO}, 'config', problems)
    if problems.messages or settings is None:
        raise ConfigError(problems.messages)
    return EvaluationData(
        settings=settings,
        suite=Suite(
            tasks=tuple(task.with_settings(settings) for task in tasks),
            gauntlet=gauntlet,
            warnings=(),
        ),
        examples={},
        unsupported={key: entry['reason'] for key, entry in record['tasks'].items() if 'spec' not in entry},
        absent={entry['task']: tuple(entry['absent_files']) for entry in datasets},
        subset_sizes=given_in(entries, 'subset_items'),
        origins=given_in(entries, 'data_origin'),
        num_rows=given_in(entries, 'num_rows'),
        digests=given_in(entries, 'data_sha256'),
    )


def given_in(entries: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the value of this name for each task whose entry has one."""
    return {key: entry[name] for key, entry in entries.items() if entry.get(name)}


def recorded_tasks(specs: Sequence[Mapping[str, Any]], problems: Problems) -> list[Task]:
    """Return the tasks from their entries in results.json; SCORE on one of the tasks has that task's rows."""
    decoded = [decode_task(spec, 'tasks', problems) for spec in specs if 'dataset' not in spec]
    tasks = [task for task in decoded if task is not None]
    score_specs: list[ScoreSpec | None] = [
        decode(ScoreSpec, spec, 'score', problems) for spec in specs if 'dataset' in spec
    ]
    return [*tasks, *(score_task(spec, tasks) for spec in score_specs if spec is not None)]


def summarize_again(run: Run, gauntlet: GauntletSpec | None, *, allow_missing: bool) -> Evaluation:
    """Recompute all metrics of a run from its items with this version's code, with another gauntlet if given.

    Answers to MATH problems are compared again, by processes that end with it.
    """
    data = run.data
    if gauntlet is not None:
        data = replace(data, suite=replace(data.suite, gauntlet=gauntlet))
    seconds = run.record['timing']['tasks']
    with Comparer() as comparer:
        return summarize(data, run.tasks, run.results, seconds, comparer=comparer, allow_missing=allow_missing)


Scored = Evaluation | Run


def scores_frame(scored: Scored | Iterable[Scored]) -> Any:
    """Return a pandas.DataFrame with a row for each number of the evaluations; columns are the fields of ScoreRow.

    >>> frame = scores_frame(run)
    >>> sorted(frame.kind.unique())
    ['average', 'category', 'perturbation', 'task']
    >>> bool((frame.value.isna() == frame.reason.notna()).all())
    True
    """
    pd = importlib.import_module('pandas')  # untyped

    rows = [asdict(row) for run, _ in recorded(scored) for row in run.rows]
    frame = pd.DataFrame(rows, columns=[field.name for field in fields(ScoreRow)])
    integers = dict.fromkeys(('batch', 'token', 'num_items'), 'Int64')
    numbers = dict.fromkeys(('value', 'standard_error', 'low', 'high', 'chance'), 'float64')
    return frame.astype({**integers, **numbers})


def samples_frame(scored: Scored | Iterable[Scored]) -> Any:
    """Return a pandas.DataFrame with a row for each item; columns are run, batch, task and the keys of a samples file.

    >>> items = samples_frame(run)
    >>> bool((items.score.isna() == (items.status == 'unscored')).all())
    True
    """
    pd = importlib.import_module('pandas')  # untyped

    rows = []
    for run, results_by_task in recorded(scored):
        for task, results in results_by_task.items():
            names = {'run': str(run.folder), 'batch': run.batch, 'task': task}
            rows += [{**names, **json.loads(sample_line(result))} for result in results]
    frame = pd.DataFrame(rows)
    return frame.astype({'batch': 'Int64'}) if rows else frame


def recorded(scored: Scored | Iterable[Scored]) -> Iterator[tuple[Run, Mapping[str, Sequence[ItemResult]]]]:
    """Yield each evaluation as a run, with its items; without a folder it is 'evaluation 1', 'evaluation 2', ..."""
    evaluations = [scored] if isinstance(scored, Evaluation | Run) else scored
    for number, evaluation in enumerate(evaluations, 1):
        if isinstance(evaluation, Run):
            yield evaluation, evaluation.results
        else:
            folder = Path(evaluation.data.settings.save_folder or f'evaluation {number}')
            yield recorded_run(folder, results_record(evaluation)), evaluation.results
