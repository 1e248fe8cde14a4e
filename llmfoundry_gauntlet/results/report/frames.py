"""Scores and items of evaluations as pandas frames, and scores as Altair charts, for notebooks and the report page.

Names of tasks, runs and categories are data, never names of fields or expressions, so that nothing in them is executed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.files import results_record
from llmfoundry_gauntlet.results.report.scores import RecordedEvaluation, ScoreRow, recorded_evaluation
from llmfoundry_gauntlet.results.report.tables import unique_labels
from llmfoundry_gauntlet.results.runs import Run
from llmfoundry_gauntlet.results.samples import sample_line

WIDTH, PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 480, 180, 120, 4  # pixels, and panels in a row
ROW_HEIGHT = 22  # pixels, of a name with one run
GROUPS = {'categories and averages': ('category', 'average'), 'tasks': ('task',)}

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


def scores_chart(scored: Scored | Iterable[Scored]) -> Any:
    """Return an altair.Chart of accuracies and composites with 95 % intervals.

    One evaluation is drawn as points with a tick at chance; several as curves over training or, if their batches are
    unknown or equal, as points side by side. Raise ConfigError if Altair is not installed.

    >>> chart = scores_chart(run)
    >>> [part['title'] for part in chart.to_dict()['vconcat']]
    ['categories and averages', 'tasks']
    """
    if find_spec('altair') is None:
        raise ConfigError("charts need Altair, which is not installed: pip install 'llmfoundry-gauntlet[report]'")
    evaluations = [one for _, one in recorded(scored)]
    rows = [row for one in evaluations for row in one.headline.values() if row.kind != 'perturbation']
    batches = {one.batch for one in evaluations}
    if len(evaluations) > 1 and None not in batches and len(batches) == len(evaluations):
        known = [replace(row, run='run') for row in rows if row.value is not None]
        shown = [row for row in known if row.kind != 'task'] or known
        panels = [
            chart.properties(title=name, width=PANEL_WIDTH, height=PANEL_HEIGHT)
            for name, chart in curves(shown).items()
        ]
        return altair().concat(*panels, columns=COLUMNS)
    groups = {title: [row for row in rows if row.kind in kinds] for title, kinds in GROUPS.items()}
    parts = [points(group).properties(title=title, width=WIDTH) for title, group in groups.items() if marks(group)]
    return altair().vconcat(*parts).configure_axis(labelLimit=0)


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


def altair() -> Any:
    """Return the altair module, untyped: each of its arguments has dozens of types."""
    return importlib.import_module('altair')


def marks(rows: Sequence[ScoreRow]) -> list[dict[str, Any]]:
    """Return the data of a chart: the scores with a value, their intervals, and labels of names and runs."""
    known = [row for row in rows if row.value is not None]
    names, runs = unique_labels(row.name for row in known), unique_labels(row.run for row in known)
    found = []
    for row in known:
        low, high = (row.value, row.value) if row.low is None else (row.low, row.high)
        training = {'batch': row.batch, 'token': row.token}
        labels = {'name': names[row.name], 'run': runs[row.run], **training, 'chance': row.chance}
        found.append({**labels, 'value': row.value, 'low': low, 'high': high})
    return found


def encodings(data: Sequence[dict[str, Any]], *fields: str) -> dict[str, Any]:
    """Return colour by run, with a legend for several, and a tooltip of these fields and the numbers."""
    alt = altair()
    is_single = len({one['run'] for one in data}) == 1
    legend = None if is_single else alt.Legend(title=None, orient='top', labelLimit=0)
    numbers = [alt.Tooltip(f'{field}:Q', format='.3f') for field in ('value', 'low', 'high')]
    return {'color': alt.Color('run:N', sort=None, legend=legend), 'tooltip': [*fields, *numbers]}


def points(rows: Sequence[ScoreRow]) -> Any:
    """Return a chart with a point and its 95 % interval for each name and run, and a tick at chance if it is known."""
    alt, data = altair(), marks(rows)
    names, runs = (list(dict.fromkeys(one[key] for one in data)) for key in ('name', 'run'))
    x = alt.X('value:Q', title=None, scale=alt.Scale(zero=False, nice=True))
    y = alt.Y('name:N', sort=names, title=None)
    offset = {'yOffset': alt.YOffset('run:N', sort=runs)} if len(runs) > 1 else {}
    base = alt.Chart(alt.InlineData(values=data)).encode(y=y, **offset, **encodings(data, 'name:N', 'run:N'))
    layers = [base.mark_rule(clip=True).encode(x='low:Q', x2='high:Q'), base.mark_point(filled=True).encode(x=x)]
    guesses = {one['name']: one['chance'] for one in data if one['chance'] is not None}
    if guesses:
        ticks = [{'name': name, 'value': chance, 'mark': 'chance'} for name, chance in guesses.items()]
        tick = alt.Chart(alt.InlineData(values=ticks)).mark_tick(thickness=2)
        layers.insert(0, tick.encode(x=x, y=y, tooltip=['mark:N', 'value:Q']))
    return alt.layer(*layers).properties(height=len(names) * (ROW_HEIGHT if len(runs) == 1 else 12 + 12 * len(runs)))


def curves(
    rows: Sequence[ScoreRow], *, baseline: float | None = None, domain: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return a chart of each score over training with its 95 % interval, a line for each run, by name.

    A dashed line is at chance or, for scores without one, at `baseline`. All charts have the same axes: over tokens if
    they are known, else over batches, and over the values from `domain`, or of all intervals.
    """
    alt = altair()
    known = [row for row in rows if row.value is not None and row.batch is not None]
    by_token = len({row.token for row in known}) > 1 and all(row.token is not None for row in known)
    data = marks(known)
    ends = [one[key] for one in data for key in ('low', 'high')] + ([] if baseline is None else [baseline])
    domain = domain or ([min(ends), max(ends)] if ends else None)
    field, title = ('token', 'training tokens') if by_token else ('batch', 'training batch')
    axis = alt.Axis(tickCount=4, format='~s' if by_token else ',')
    x = alt.X(f'{field}:Q', title=title, scale=alt.Scale(zero=False, nice=False), axis=axis)
    y = alt.Y('value:Q', title=None, scale=alt.Scale(domain=domain), axis=alt.Axis(tickCount=4))
    found = {}
    for name in dict.fromkeys(row.name for row in known):
        mine = [one for one, row in zip(data, known, strict=True) if row.name == name]
        base = alt.Chart(alt.InlineData(values=mine)).encode(x=x, **encodings(mine, 'run:N', f'{field}:Q'))
        band = base.mark_area(opacity=0.16, clip=True).encode(y=alt.Y('low:Q', title=None), y2='high:Q')
        chance = next((one['chance'] for one in mine if one['chance'] is not None), baseline)
        line = alt.Chart(alt.InlineData(values=[] if chance is None else [{'value': chance, 'mark': 'chance'}]))
        rule = line.mark_rule(strokeDash=[3, 3]).encode(y='value:Q', tooltip=['mark:N', 'value:Q'])
        found[name] = alt.layer(band, rule, base.mark_line(point=True).encode(y=y)).properties(height=PANEL_HEIGHT)
    return found
