"""The watched scores of a training run, evaluation by evaluation, from which alerts follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.evaluation.run import Evaluation, composites_of, gauntlet_version
from llmfoundry_gauntlet.metrics.alerts import NUM_BEFORE, Alert, WatchedScore, alerts_of
from llmfoundry_gauntlet.metrics.metrics import task_score
from llmfoundry_gauntlet.results.files import RESULTS, read_results
from llmfoundry_gauntlet.results.runs import Run, read_run
from llmfoundry_gauntlet.types import Composites, Measure, TaskScore

log = logging.getLogger(__name__)

Items = Mapping[str, Any]  # what determines the items of an evaluation, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierScores:
    """The watched scores of an earlier evaluation, and what determined its items."""

    batch: int
    items: Items
    values: Mapping[str, float]


class AlertHistory:
    """The watched scores of the evaluations of a training run, on the rank that decides on alerts.

    Those of earlier jobs of the run are read from its `folder` of records (None: there are none) at the first
    evaluation. Only evaluations of the same items as the current one count, back to the last one of others.
    """

    def __init__(self, folder: Path | None, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = names
        self._earlier: list[EarlierScores] | None = None  # in the order of training; None: not read yet
        self._measures: dict[int, Mapping[str, Measure]] = {}  # by batch, of the latest evaluations

    def alerts_of(self, evaluation: Evaluation, batch: int) -> tuple[Alert, ...] | None:
        """Return the alerts of an evaluation, and keep its scores; None while too few evaluations are known."""
        if self._earlier is None:
            self._earlier = self._recorded()
        # A job that was resumed, or begun again, repeats evaluations.
        self._earlier = [scores for scores in self._earlier if scores.batch < batch]
        measures = watched_measures(self.names, evaluation.composites, evaluation.scores)
        known = {name: measure for name, measure in measures.items() if measure.value is not None}
        items = items_of(evaluation)
        alerts = alerts_of(self._watched(known, items), batch)

        values = {name: measure.value for name, measure in known.items() if measure.value is not None}
        self._earlier.append(EarlierScores(batch=batch, items=items, values=values))
        self._measures[batch] = known
        latest = {scores.batch for scores in self._earlier[-NUM_BEFORE:]}
        self._measures = {kept: self._measures[kept] for kept in self._measures if kept in latest}
        return alerts

    def _watched(self, measures: Mapping[str, Measure], items: Items) -> dict[str, WatchedScore]:
        """Return each score with its past over the same items."""
        past: list[EarlierScores] = []
        for scores in reversed(self._earlier or ()):
            if scores.items != items:
                break
            past.insert(0, scores)

        watched = {}
        for name, measure in measures.items():
            with_score = [scores for scores in past if name in scores.values]
            values = [scores.values[name] for scores in with_score]
            assert measure.value is not None  # the caller leaves out the others
            score = WatchedScore(values=[*values, measure.value], latest=())
            if not score.is_silent:
                before = [self._measure(scores, name) for scores in with_score[-NUM_BEFORE:]]
                score = WatchedScore(values=score.values, latest=[*before, measure])
            watched[name] = score
        return watched

    def _measure(self, scores: EarlierScores, name: str) -> Measure:
        """Return a score of an earlier evaluation with its spread, which is unknown if its samples cannot be read."""
        if scores.batch not in self._measures:
            self._measures[scores.batch] = self._measures_of_record(scores.batch)
        return self._measures[scores.batch].get(name, Measure(value=scores.values[name]))

    def _measures_of_record(self, batch: int) -> Mapping[str, Measure]:
        """Compute the watched scores of an earlier job's evaluation again, from its samples."""
        assert self.folder is not None  # it is where the evaluation was read from
        try:
            run = read_run(self.folder / f'ba{batch}')
        except (RecordError, OSError) as error:
            log.warning('alert_on: %s: no alert until three more evaluations', error)
            return {}
        return measures_of_run(run, self.names)

    def _recorded(self) -> list[EarlierScores]:
        """Return the scores in the records of earlier jobs, in the order of training."""
        if self.folder is None:
            return []
        recorded = []
        for path in self.folder.glob(f'ba*/{RESULTS}'):
            try:
                record = read_results(path.parent)
            except RecordError as error:
                log.warning('alert_on: %s: it is left out', error)
                continue
            training = record['training']
            if training is not None and path.parent.name == f'ba{training["batch"]}':
                recorded.append(scores_in(record, self.names))
        return sorted(recorded, key=lambda scores: scores.batch)


def items_of(evaluation: Evaluation) -> Items:
    """Return what determines the items of an evaluation and how they are scored."""
    data = evaluation.data
    gauntlet = data.suite.gauntlet
    version = None if gauntlet is None or evaluation.composites is None else gauntlet_version(data, gauntlet)
    tasks = {
        key: [data.digests.get(key), data.subset_sizes.get(key)]
        for key, task in evaluation.tasks.items()
        if not task.asks_variants
    }
    return {'semantics': data.settings.semantics, 'version': version, 'tasks': tasks}


def items_in(record: Mapping[str, Any]) -> Items:
    """Return the same from the record of an evaluation."""
    tasks = {}
    for key, task in record['tasks'].items():
        if 'spec' in task:  # else it was not run
            tasks[key] = [task['data_sha256'], task['subset_items']]
    return {
        'semantics': record['semantics'],
        'version': (record['composites'] or {}).get('version'),
        'tasks': tasks,
    }


def scores_in(record: Mapping[str, Any], names: Sequence[str]) -> EarlierScores:
    """Return the watched scores in the record of an evaluation."""
    composites = record['composites'] or {'averages': {}, 'categories': {}}
    values = {}
    for name in names:
        metrics = record['tasks'].get(name, {}).get('metrics') or {}
        accuracy: Mapping[str, Any] = next(iter(metrics.values()), {})
        measure = composites['averages'].get(name) or composites['categories'].get(name) or accuracy
        if 'value' in measure:
            values[name] = measure['value']
    return EarlierScores(batch=record['training']['batch'], items=items_in(record), values=values)


def watched_measures(
    names: Sequence[str], composites: Composites | None, scores: Mapping[str, TaskScore]
) -> dict[str, Measure]:
    """Return the measures of these averages, categories and tasks, as far as there are any."""
    by_name = {} if composites is None else composites.by_name
    measures = {}
    for name in names:
        if name in by_name:
            measures[name] = by_name[name]
        elif name in scores and scores[name].metrics:
            measures[name] = scores[name].accuracy
    return measures


def measures_of_run(run: Run, names: Sequence[str]) -> dict[str, Measure]:
    """Return the watched measures of a recorded evaluation with their spreads, from its items' scores."""
    scores = {}
    for key, task in run.tasks.items():
        if not task.asks_variants:
            accuracy = task.metrics()[:1]  # all others are not needed
            scores[key] = task_score(key, accuracy, run.results[key])
    return watched_measures(names, composites_of(run.data, scores), scores)
