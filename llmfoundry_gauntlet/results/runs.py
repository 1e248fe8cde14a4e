"""Read evaluations back from their folders with tasks, settings and all items: to recompute metrics, or as frames."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.score import ScoreSpec
from llmfoundry_gauntlet.config.settings import AUTO, EvaluationSettings
from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.config.yaml import Problems, decode
from llmfoundry_gauntlet.errors import ConfigError, RecordError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData
from llmfoundry_gauntlet.evaluation.run import Evaluation, Scores, summarize
from llmfoundry_gauntlet.evaluation.suite import Suite, decode_task
from llmfoundry_gauntlet.results.files import RESULTS, find_results, read_results, results_record
from llmfoundry_gauntlet.results.journal import Finished
from llmfoundry_gauntlet.results.report.scores import RecordedEvaluation, ScoreRow, recorded_evaluation
from llmfoundry_gauntlet.results.samples import read_samples, sample_line, samples_file
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.score import score_task
from llmfoundry_gauntlet.types import FileSizes, ItemResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Scores):
    """A recorded evaluation: its results.json, its tasks with their settings, and their items."""

    folder: Path
    record: Mapping[str, Any]
    data: EvaluationData
    results: Mapping[str, tuple[ItemResult, ...]]

    @property
    def tasks(self) -> dict[str, Task]:
        """Return the tasks that were run, by key."""
        return {task.key: task for task in self.data.suite.tasks}

    @property
    def batch(self) -> int | None:
        """Return the training batch of the model; None if unknown."""
        return (self.record['training'] or {}).get('batch')


def read_run(folder: str | Path) -> Run:
    """Return the evaluation in a folder. Raise RecordError."""
    folder = Path(folder)
    record = read_results(folder)
    try:
        data = recorded_data(record, folder / RESULTS)
    except (KeyError, TypeError) as error:
        raise RecordError(f'{folder / RESULTS}: cannot be used: {error!r}; evaluate again') from error
    except ConfigError as error:
        raise RecordError(
            [f'{folder / RESULTS}: cannot be used: {text}; evaluate again' for text in error.problems]
        ) from error
    results = {task.key: read_samples(folder, task.key) for task in data.suite.tasks}
    counts = {key: entry.get('num_items') for key, entry in record['tasks'].items()}
    counts.update({entry['task']: entry['num_items'] for entry in (record['score'] or {}).values()})
    for key, found in results.items():
        num_items = len({result.key for result in found})
        if not num_items == len(found) == counts[key]:
            raise RecordError(
                f'{samples_file(folder, key)}: has {len(found)} lines of {num_items} items, but {RESULTS} says '
                f'{counts[key]}; evaluate again'
            )
    return Run(folder=folder, record=record, data=data, results=results)


def finished_run(folder: Path) -> Finished | None:
    """Return the items of a finished evaluation; None if its identity is unknown."""
    run = read_run(folder)
    if run.record.get('identity') is None:
        return None
    results = {result.key: result for items in run.results.values() for result in items}
    timing = run.record['timing']
    started = timing.get('started') and datetime.fromisoformat(timing['started']).timestamp()
    return Finished(identity=run.record['identity'], started=started, seconds=timing['seconds'], results=results)


def read_runs(run: str | Path) -> list[Run]:
    """Return every evaluation at or below a folder, in training order. Raise RecordError."""
    return [read_run(folder) for folder, _ in find_results(Path(run))]


def recorded_data(record: Mapping[str, Any], path: Path) -> EvaluationData:
    """Return the data of a recorded evaluation, without its rows."""
    problems = Problems(str(path))
    asked = {**record['tasks'], **{entry['task']: entry for entry in (record['score'] or {}).values()}}
    lacking = [key for key, entry in asked.items() if 'spec' not in entry and 'reason' not in entry]
    if lacking:
        raise ConfigError(f'it does not say how {", ".join(lacking)} was asked, as an older version has written it')
    tasks = [recorded_task(entry['spec'], problems) for entry in asked.values() if 'spec' in entry]
    gauntlet = None
    if record['composites'] is not None:
        gauntlet = decode(GauntletSpec, record['composites']['gauntlet'], 'gauntlet', problems)
    names = {field.name for field in fields(EvaluationSettings)}
    given = {key: value for key, value in record['config'].items() if key in names} | {'sandbox': AUTO}
    settings: EvaluationSettings | None = decode(EvaluationSettings, given, 'config', problems)
    if problems.found or settings is None:
        raise ConfigError(problems.found)
    return EvaluationData(
        settings=settings,
        suite=Suite(
            tasks=tuple(task.with_settings(settings) for task in tasks if task is not None),
            gauntlet=gauntlet,
            warnings=(),
        ),
        examples={},
        unsupported={key: entry['reason'] for key, entry in record['tasks'].items() if 'spec' not in entry},
        absent={entry['task']: tuple(entry['absent_files']) for entry in (record['score'] or {}).values()},
        subset_sizes={key: entry['subset_items'] for key, entry in asked.items() if entry.get('subset_items')},
        origins={key: entry['data_origin'] for key, entry in asked.items() if entry.get('data_origin')},
        file_sizes={
            key: read_file_clusters(entry['file_clusters'])
            for key, entry in asked.items()
            if entry.get('file_clusters')
        },
        digests={key: entry['data_sha256'] for key, entry in asked.items() if 'data_sha256' in entry},
    )


def read_file_clusters(record: Mapping[str, Mapping[str, int]]) -> FileSizes:
    """Return the number of rows of each cluster of a data file by category, from its record."""
    import numpy as np

    return {
        category or None: np.repeat([int(size) for size in found], [*found.values()])
        for category, found in record.items()
    }


def recorded_task(spec: Mapping[str, Any], problems: Problems) -> Task | None:
    """Return a task from its entry in results.json."""
    if 'dataset' in spec:
        score: ScoreSpec | None = decode(ScoreSpec, spec, 'score', problems)
        return None if score is None else score_task(score, ())
    return decode_task(spec, 'tasks', problems)


def summarize_again(run: Run, gauntlet: GauntletSpec | None, *, allow_missing: bool) -> Evaluation:
    """Recompute all metrics of a run from its items with this version's code, with another gauntlet if given."""
    data = run.data
    if gauntlet is not None:
        data = replace(data, suite=replace(data.suite, gauntlet=gauntlet))
    return summarize(data, run.tasks, run.results, run.record['timing']['tasks'], allow_missing=allow_missing)


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

    found = [asdict(row) for _, one in recorded(scored) for row in one.rows]
    frame = pd.DataFrame(found, columns=[field.name for field in fields(ScoreRow)])
    integers = dict.fromkeys(('batch', 'token', 'num_items'), 'Int64')
    return frame.astype({**integers, **dict.fromkeys(('value', 'standard_error', 'low', 'high', 'chance'), 'float64')})


def samples_frame(scored: Scored | Iterable[Scored]) -> Any:
    """Return a pandas.DataFrame with a row for each item; columns are run, batch, task and the keys of a samples file.

    >>> items = samples_frame(run)
    >>> bool((items.score.isna() == (items.status == 'unscored')).all())
    True
    """
    pd = importlib.import_module('pandas')  # untyped

    rows = [
        {'run': str(found.folder), 'batch': found.batch, 'task': task, **json.loads(sample_line(result))}
        for one, found in recorded(scored)
        for task, results in one.results.items()
        for result in results
    ]
    frame = pd.DataFrame(rows)
    return frame.astype({'batch': 'Int64'}) if rows else frame


def recorded(scored: Scored | Iterable[Scored]) -> list[tuple[Scored, RecordedEvaluation]]:
    """Return each evaluation with its numbers; without a folder it is 'evaluation 1', 'evaluation 2', ..."""
    several = [scored] if isinstance(scored, Evaluation | Run) else list(scored)
    found = []
    for number, one in enumerate(several, 1):
        if isinstance(one, Run):
            folder, record = one.folder, one.record
        else:
            folder, record = Path(one.data.settings.save_folder or f'evaluation {number}'), results_record(one)
        found.append((one, recorded_evaluation(folder, record)))
    return found
