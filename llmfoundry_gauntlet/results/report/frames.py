"""Scores and items of evaluations as pandas frames, and learning curves as Altair charts.

Names of tasks, runs and categories are data, never names of fields or expressions, so that nothing in them is executed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.files import results_record
from llmfoundry_gauntlet.results.report.scores import RecordedEvaluation, ScoreRow, recorded_evaluation
from llmfoundry_gauntlet.results.report.tables import visible
from llmfoundry_gauntlet.results.runs import Run
from llmfoundry_gauntlet.results.samples import sample_line

PANEL_HEIGHT = 120  # pixels
LOSS = 'loss'  # the kind of a row that is no score

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


def curves(
    rows: Sequence[ScoreRow], *, baseline: float | None = None, domain: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return a chart of each score over training with its 95 % interval, a line for each run, by name.

    A dashed line is at chance or, for scores without one, at `baseline`. All charts have the same axes: over tokens if
    they are known, else over batches, and over the values from `domain`, or of all intervals. Losses have their own.
    """
    alt: Any = importlib.import_module('altair')  # each of its arguments has dozens of types
    known = [row for row in rows if row.value is not None and row.batch is not None]
    if not known:
        return {}
    by_token = len({row.token for row in known}) > 1 and all(row.token is not None for row in known)
    runs = list(dict.fromkeys(visible(row.run) for row in known))
    data = [
        {name: getattr(row, name) for name in ('name', 'batch', 'token', 'chance', 'value')}
        | {'run': visible(row.run)}
        | {'low': row.value if row.low is None else row.low, 'high': row.value if row.high is None else row.high}
        for row in known
    ]
    scores = [one for one, row in zip(data, known, strict=True) if row.kind != LOSS]
    ends = [one[key] for one in scores for key in ('low', 'high')] + ([] if baseline is None else [baseline])
    field, title = ('token', 'training tokens') if by_token else ('batch', 'training batch')
    places = [one[field] for one in data]
    axis = alt.Axis(tickCount=4, format='~s' if by_token else ',')
    x = alt.X(f'{field}:Q', title=title, scale=alt.Scale(domain=[min(places), max(places)], nice=False), axis=axis)
    legend = None if len(runs) == 1 else alt.Legend(title=None, orient='top', labelLimit=0)
    color = alt.Color('run:N', sort=runs, legend=legend)
    found = {}
    for name, kind in dict.fromkeys((row.name, row.kind) for row in known):
        mine = [one for one, row in zip(data, known, strict=True) if (row.name, row.kind) == (name, kind)]
        numbers = ['value'] if kind == LOSS else ['value', 'low', 'high']
        tooltip = ['run:N', f'{field}:Q', *(alt.Tooltip(f'{number}:Q', format='.3f') for number in numbers)]
        base = alt.Chart(alt.InlineData(values=mine)).encode(x=x, color=color, tooltip=tooltip)
        scale = alt.Scale(zero=False, nice=True) if kind == LOSS else alt.Scale(domain=domain or [min(ends), max(ends)])
        y = alt.Y('value:Q', title=None, scale=scale, axis=alt.Axis(tickCount=4))
        layers = [base.mark_line(point=True).encode(y=y)]
        if kind != LOSS:
            chance = next((one['chance'] for one in mine if one['chance'] is not None), baseline)
            line = alt.Chart(alt.InlineData(values=[] if chance is None else [{'value': chance, 'mark': 'chance'}]))
            rule = line.mark_rule(strokeDash=[3, 3]).encode(y='value:Q', tooltip=['mark:N', 'value:Q'])
            band = base.mark_area(opacity=0.16, clip=True).encode(y=alt.Y('low:Q', title=None), y2='high:Q')
            layers = [band, rule, *layers]
        found[name] = alt.layer(*layers).properties(height=PANEL_HEIGHT)
    return found
