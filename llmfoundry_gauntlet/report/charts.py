"""Scores as Altair charts, for notebooks, files and the report page.

Names of tasks, runs and categories are data, never names of fields or expressions, so that nothing in them is executed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.report.frames import Scored, records_of, several
from llmfoundry_gauntlet.report.scores import ScoreRow, interval, read_scores

WIDTH, PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 480, 180, 120, 4  # pixels, and panels in a row
ROW_HEIGHT = 22  # pixels, of a name with one run
GROUPS = {'categories and averages': ('category', 'average'), 'tasks': ('task',)}

Datum = dict[str, Any]  # what a mark is drawn from: name, run, value, low, high; of tasks chance, of courses batch


def scores_chart(scored: Scored | Iterable[Scored]) -> Any:
    """Return an altair.Chart of accuracies and composites with 95 % intervals.

    One evaluation is drawn as points with a tick at chance; several as curves over training batches, or, where these
    are unknown or equal, as points side by side. Raises ConfigError if Altair is not installed.

    >>> chart = scores_chart(run)
    >>> [part['title'] for part in chart.to_dict()['vconcat']]
    ['categories and averages', 'tasks']
    """
    if find_spec('altair') is None:
        raise ConfigError("charts need Altair, which is not installed: pip install 'llmfoundry-gauntlet[report]'")
    rows = [row for folder, record in records_of(several(scored)) for row in headline(read_scores(folder, record))]
    batches = {row.run: row.batch for row in rows}
    alt = altair()
    if len(batches) > 1 and None not in batches.values() and len(set(batches.values())) == len(batches):
        shown = [row for row in rows if row.kind != 'task'] or rows
        panel = curve_layers(1).properties(width=PANEL_WIDTH, height=PANEL_HEIGHT)
        names = list(dict.fromkeys(row.name for row in shown))
        facet = alt.Facet('name:N', sort=names, title=None)
        return panel.facet(facet, data=inline([datum(row, 'run') for row in shown]), columns=COLUMNS)
    parts = []
    for title, kinds in GROUPS.items():
        data = [datum(row, row.run) for row in rows if row.kind in kinds]
        if data:
            parts.append(points(data).properties(title=title, width=WIDTH))
    return alt.vconcat(*parts).configure_axis(labelLimit=0)


def headline(rows: Iterable[ScoreRow]) -> list[ScoreRow]:
    """Return composites and the accuracy of each task, as far as they have a value."""
    first: dict[tuple[str, str], ScoreRow] = {}
    for row in rows:
        if row.kind != 'perturbation' and row.part is None:
            first.setdefault((row.kind, row.name), row)
    return [row for row in first.values() if row.value is not None]


def datum(row: ScoreRow, run: str) -> Datum:
    """Return what a mark of a score is drawn from."""
    return {**mark(row.name, run, row.value, row.standard_error), 'chance': row.chance, 'batch': row.batch}


def mark(name: str, run: str, value: float | None, error: float | None) -> Datum:
    """Return what a mark with an interval is drawn from; without a standard error both ends are the value."""
    low, high = interval(value, error) or (value, value)
    return {'name': name, 'run': run, 'value': value, 'low': low, 'high': high}


def altair() -> Any:
    """Return the module, without its types, in which each argument has dozens."""
    return importlib.import_module('altair')


def inline(data: Sequence[Datum]) -> Any:
    """Return data as part of the chart."""
    return altair().InlineData(values=list(data))


def encodings(num_runs: int) -> dict[str, Any]:
    """Return colour by run, with a legend for several."""
    alt = altair()
    legend = alt.Legend(title=None, orient='top', labelLimit=0) if num_runs > 1 else None
    return {'color': alt.Color('run:N', sort=None, legend=legend)}


def tooltips(*fields: str) -> list[Any]:
    """Return tooltips with the numbers to three places."""
    alt = altair()
    numbers = [alt.Tooltip(f'{field}:Q', format='.3f') for field in ('value', 'low', 'high')]
    return [*(alt.Tooltip(f'{field}:{"Q" if field == "batch" else "N"}') for field in fields), *numbers]


def points(data: Sequence[Datum], *, zero: bool = False, domain: Sequence[float] | None = None) -> Any:
    """Return a chart with a point and its 95 % interval for each name and run, and a tick at chance where it is known.

    `zero` draws a line at 0, `domain` fixes the ends of the axis.
    """
    alt = altair()
    names = list(dict.fromkeys(one['name'] for one in data))
    runs = list(dict.fromkeys(one['run'] for one in data))
    scale = alt.Scale(zero=False, nice=True) if domain is None else alt.Scale(domain=list(domain), nice=False)
    x = alt.X('value:Q', title=None, scale=scale)
    y = alt.Y('name:N', sort=names, title=None)
    offset = {'yOffset': alt.YOffset('run:N', sort=runs)} if len(runs) > 1 else {}
    base = alt.Chart(inline(data)).encode(y=y, tooltip=tooltips('name', 'run'), **offset, **encodings(len(runs)))
    layers = [base.mark_rule(clip=True).encode(x='low:Q', x2='high:Q'), base.mark_point(filled=True).encode(x=x)]
    guesses = {one['name']: one['chance'] for one in data if one.get('chance') is not None}
    if guesses:
        ticks = inline([{'name': name, 'value': chance, 'mark': 'chance'} for name, chance in guesses.items()])
        layers.insert(0, alt.Chart(ticks).mark_tick(thickness=2).encode(x=x, y=y, tooltip=['mark:N', 'value:Q']))
    if zero:
        layers.insert(0, alt.Chart(inline([{'value': 0}])).mark_rule(strokeDash=[3, 3]).encode(x=x))
    return alt.layer(*layers).properties(height=len(names) * (ROW_HEIGHT if len(runs) == 1 else 12 + 12 * len(runs)))


def curve_layers(num_runs: int) -> Any:
    """Return a score over training batches with its 95 % interval, without data."""
    alt = altair()
    base = alt.Chart().encode(
        x=alt.X('batch:Q', title='training batch', scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4)),
        **encodings(num_runs),
    )
    y = alt.Y('value:Q', title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    band = base.mark_area(opacity=0.16).encode(y=alt.Y('low:Q', title=None), y2='high:Q')
    line = base.mark_line(point=True).encode(y=y, tooltip=tooltips('run', 'batch'))
    return alt.layer(band, line)


def curve(data: Sequence[Datum]) -> Any:
    """Return one score of one or several runs over training batches."""
    num_runs = len({one['run'] for one in data})
    return curve_layers(num_runs).properties(data=inline(data), height=PANEL_HEIGHT + 50)
