"""Scores and items of evaluations as pandas frames."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from llmfoundry_gauntlet.evaluation import Evaluation
from llmfoundry_gauntlet.records.results import results_record
from llmfoundry_gauntlet.records.runs import Run
from llmfoundry_gauntlet.records.samples import sample_line
from llmfoundry_gauntlet.report.scores import Record, ScoreRow, batch_of, read_scores

Scored = Evaluation | Run


def scores_frame(scored: Scored | Iterable[Scored]) -> Any:
    """Return a pandas.DataFrame with a row for each number of the evaluations; columns are the fields of ScoreRow.

    >>> frame = scores_frame(run)
    >>> sorted(frame.kind.unique())
    ['average', 'category', 'perturbation', 'task']
    >>> bool((frame.value.isna() == frame.reason.notna()).all())
    True
    """
    pd = importlib.import_module('pandas')  # has no types

    found = [row for folder, record in records_of(several(scored)) for row in read_scores(folder, record)]
    frame = pd.DataFrame([asdict(row) for row in found], columns=[field.name for field in fields(ScoreRow)])
    integers = dict.fromkeys(('batch', 'num_items'), 'Int64')
    return frame.astype({**integers, **dict.fromkeys(('value', 'standard_error', 'chance'), 'float64')})


def samples_frame(scored: Scored | Iterable[Scored]) -> Any:
    """Return a pandas.DataFrame with a row for each item; columns are run, batch, task and the keys of a samples file.

    >>> items = samples_frame(run)
    >>> bool((items.credit.isna() == (items.status == 'unscored')).all())
    True
    """
    pd = importlib.import_module('pandas')  # has no types

    rows = []
    evaluations = several(scored)
    for one, (folder, record) in zip(evaluations, records_of(evaluations), strict=True):
        origin = {'run': folder, 'batch': batch_of(record)}
        for task, results in one.results.items():
            rows += [{**origin, 'task': task, **json.loads(sample_line(result))} for result in results]
    frame = pd.DataFrame(rows)
    return frame.astype({'batch': 'Int64'}) if rows else frame


def several(scored: Scored | Iterable[Scored]) -> list[Scored]:
    """Return the evaluations as a list, also a single one."""
    return [scored] if isinstance(scored, Evaluation | Run) else list(scored)


def records_of(evaluations: Iterable[Scored]) -> list[tuple[str, Record]]:
    """Return the folder and record of each evaluation; without a folder it is 'evaluation 1', 'evaluation 2', ..."""
    return [
        (str(one.folder), one.record)
        if isinstance(one, Run)
        else (one.data.settings.save_folder or f'evaluation {number}', results_record(one))
        for number, one in enumerate(evaluations, 1)
    ]
