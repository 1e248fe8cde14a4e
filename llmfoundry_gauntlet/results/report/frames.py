"""Scores and items of evaluations as pandas frames, and scores as Altair charts, for notebooks and the report page.

Names of tasks, runs and categories are data, never names of fields or expressions, so that nothing in them is executed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.files import results_record
from llmfoundry_gauntlet.results.report.scores import RecordedEvaluation, ScoreRow, interval, recorded_evaluation
from llmfoundry_gauntlet.results.runs import Run
from llmfoundry_gauntlet.results.samples import sample_line

WIDTH, PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 480, 180, 120, 4  # pixels, and panels in a row
ROW_HEIGHT = 22  # pixels, of a name with one run
GROUPS = {'categories and averages': ('category', 'average'), 'tasks': ('task',)}

Scored = Evaluation | Run
Datum = dict[str, Any]  # the name, run, value, low, high, chance and batch of a mark


def scores_frame(scored: Scored | Iterable[Scored]) -> Any:
    """Return a pandas.DataFrame with a row for each number of the evaluations; columns are the fields of ScoreRow.

    >>> frame = scores_frame(run)
    >>> sorted(frame.kind.unique())
    ['average', 'category', 'perturbation', 'task']
    >>> bool((frame.value.isna() == frame.reason.notna()).all())
    True
    """
    pd = importlib.import_module('pandas')  # has no types

    found = [asdict(row) for _, one in recorded(scored) for row in one.rows]
    frame = pd.DataFrame(found, columns=[field.name for field in fields(ScoreRow)])
    integers = dict.fromkeys(('batch', 'num_items'), 'Int64')
    return frame.astype({**integers, **dict.fromkeys(('value', 'standard_error', 'chance'), 'float64')})


def samples_frame(scored: Scored | Iterable[Scored]) -> Any:
    """Return a pandas.DataFrame with a row for each item; columns are run, batch, task and the keys of a samples file.

    >>> items = samples_frame(run)
    >>> bool((items.score.isna() == (items.status == 'unscored')).all())
    True
    """
    pd = importlib.import_module('pandas')  # has no types

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

    One evaluation is drawn as points with a tick at chance; several as curves over training batches or, if these are
    unknown or equal, as points side by side. Raise ConfigError if Altair is not installed.

    >>> chart = scores_chart(run)
    >>> [part['title'] for part in chart.to_dict()['vconcat']]
    ['categories and averages', 'tasks']
    """
    if find_spec('altair') is None:
        raise ConfigError("charts need Altair, which is not installed: pip install 'llmfoundry-gauntlet[report]'")
    evaluations = [one for _, one in recorded(scored)]
    numbers = [row for one in evaluations for row in one.headline.values()]
    rows = [row for row in numbers if row.kind != 'perturbation' and row.value is not None]
    batches = {one.batch for one in evaluations}
    if len(evaluations) > 1 and None not in batches and len(batches) == len(evaluations):
        shown = [row for row in rows if row.kind != 'task'] or rows
        panels = [
            curve([datum(row, 'run') for row in shown if row.name == name]).properties(
                title=name, width=PANEL_WIDTH, height=PANEL_HEIGHT
            )
            for name in dict.fromkeys(row.name for row in shown)
        ]
        return altair().concat(*panels, columns=COLUMNS)
    parts = []
    for title, kinds in GROUPS.items():
        data = [datum(row, row.run) for row in rows if row.kind in kinds]
        if data:
            parts.append(points(data).properties(title=title, width=WIDTH))
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


def datum(row: ScoreRow, run: str) -> Datum:
    """Return the mark of a score."""
    return mark(row.name, run, row.value, row.standard_error) | {'chance': row.chance, 'batch': row.batch}


def mark(name: str, run: str, value: float | None, error: float | None) -> Datum:
    """Return a mark with its 95 % interval; without a standard error both ends are the value."""
    low, high = interval(value, error) or (value, value)
    return {'name': name, 'run': run, 'value': value, 'low': low, 'high': high}


def altair() -> Any:
    """Return the altair module, untyped: each of its arguments has dozens of types."""
    return importlib.import_module('altair')


def inline(data: Sequence[Datum]) -> Any:
    """Return data as part of the chart."""
    return altair().InlineData(values=list(data))


def encodings(data: Sequence[Datum], *fields: str) -> dict[str, Any]:
    """Return colour by run, with a legend for several, and a tooltip of these fields and the numbers."""
    alt = altair()
    is_single = len({one['run'] for one in data}) == 1
    legend = None if is_single else alt.Legend(title=None, orient='top', labelLimit=0)
    numbers = [alt.Tooltip(f'{field}:Q', format='.3f') for field in ('value', 'low', 'high')]
    return {'color': alt.Color('run:N', sort=None, legend=legend), 'tooltip': [*fields, *numbers]}


def points(data: Sequence[Datum], *, zero: bool = False, domain: Sequence[float] | None = None) -> Any:
    """Return a chart with a point and its 95 % interval for each name and run, and a tick at chance if it is known.

    `zero` draws a line at 0, `domain` fixes the ends of the axis.
    """
    alt = altair()
    names = list(dict.fromkeys(one['name'] for one in data))
    runs = list(dict.fromkeys(one['run'] for one in data))
    scale = alt.Scale(zero=False, nice=True) if domain is None else alt.Scale(domain=list(domain), nice=False)
    x = alt.X('value:Q', title=None, scale=scale)
    y = alt.Y('name:N', sort=names, title=None)
    offset = {'yOffset': alt.YOffset('run:N', sort=runs)} if len(runs) > 1 else {}
    base = alt.Chart(inline(data)).encode(y=y, **offset, **encodings(data, 'name:N', 'run:N'))
    layers = [base.mark_rule(clip=True).encode(x='low:Q', x2='high:Q'), base.mark_point(filled=True).encode(x=x)]
    guesses = {one['name']: one['chance'] for one in data if one.get('chance') is not None}
    if guesses:
        ticks = inline([{'name': name, 'value': chance, 'mark': 'chance'} for name, chance in guesses.items()])
        layers.insert(0, alt.Chart(ticks).mark_tick(thickness=2).encode(x=x, y=y, tooltip=['mark:N', 'value:Q']))
    if zero:
        layers.insert(0, alt.Chart(inline([{'value': 0}])).mark_rule(strokeDash=[3, 3]).encode(x=x))
    return alt.layer(*layers).properties(height=len(names) * (ROW_HEIGHT if len(runs) == 1 else 12 + 12 * len(runs)))


def curve(data: Sequence[Datum]) -> Any:
    """Return a chart of one score of one or several runs over training batches with its 95 % interval."""
    alt = altair()
    base = alt.Chart(inline(data)).encode(
        x=alt.X('batch:Q', title='training batch', scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4)),
        **encodings(data, 'run:N', 'batch:Q'),
    )
    y = alt.Y('value:Q', title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    band = base.mark_area(opacity=0.16).encode(y=alt.Y('low:Q', title=None), y2='high:Q')
    line = base.mark_line(point=True).encode(y=y)
    return alt.layer(band, line).properties(height=PANEL_HEIGHT + 50)
