"""The sections of a report page: learning curves as Altair charts, tables, and settings.

Names of tasks and runs are data of a chart, never names of fields or expressions, so that nothing in them is executed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.errors import RecordError, listed
from llmfoundry_gauntlet.results.report.comparison import Comparison, compare_runs, corrected
from llmfoundry_gauntlet.results.report.printing import OTHER_TASKS, difference_table, scores_table, share_notes
from llmfoundry_gauntlet.results.report.scores import ScoreRow
from llmfoundry_gauntlet.results.report.tables import MINUS, Cell, Column, Table, TableRow, ends_of, visible
from llmfoundry_gauntlet.results.runs import Run, RunSeries

BY_VARIANT = 'accuracy_by_variant'
SCORE_METRICS = (
    'accuracy',
    'consistency_rate',
    'consistency_rate_reference',
    'accuracy_worst',
    'accuracy_mean',
    'accuracy_best',
    'all_variants_right',
    'unparsed_rate',
)
SETTINGS = ('package_version', 'semantics', 'model', 'training', 'timing', 'environment', 'config', 'identity')
MOST_CHANGED = 10  # tasks of a training run
PANEL_HEIGHT = 120  # pixels
LOSS = 'loss'  # the kind of a row that is no score

Charts = Mapping[str, Any]  # Altair charts by title


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page under its own heading; `notes` are paragraphs, `charts` have a heading, `texts` a title."""

    name: str
    title: str
    notes: Sequence[str] = ()
    charts: Mapping[str, Charts] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


def make_sections(runs: Sequence[RunSeries]) -> list[Section]:
    """Return the sections of a page without empty ones."""
    is_training = any(len(run.evaluations) > 1 for run in runs)
    sections = [
        *([curves_section(runs)] if is_training else []),
        changes_section(runs),
        *([tasks_section(runs)] if is_training else []),
        scores_section(runs),
        score_section(runs),
        evaluations_section(runs),
    ]
    return [one for one in sections if one.tables or one.charts or one.notes]


def curves_section(runs: Sequence[RunSeries]) -> Section:
    """Return the learning curves of averages and categories, and the training loss, with one axis."""
    losses = [row for run in runs for row in loss_rows(run)]
    rows = [*headline_rows(runs, 'average'), *losses, *headline_rows(runs, 'category')]
    charts = curves(rows, baseline=0.0 if is_rescaled(runs) else None)
    if not charts:
        return Section(name='curves', title='Learning curves')
    notes = [f'{composite_note(runs)} Bands are 95 % intervals over items.']
    if losses:
        has_means = any(row.num_items is not None for row in losses)
        batches = 'its mean over the batches since the evaluation before' if has_means else 'that of the batch before'
        notes.append(f'The training loss at an evaluation is {batches}.')
    return Section(name='curves', title='Learning curves', notes=notes, charts={'': charts})


def tasks_section(runs: Sequence[RunSeries]) -> Section:
    """Return the learning curves of tasks, by category."""
    categories = categories_of(runs)
    charts: dict[str, dict[str, Any]] = {name: {} for name in [*dict.fromkeys(categories.values()), OTHER_TASKS]}
    for name, chart in curves(headline_rows(runs, 'task'), domain=(0, 1)).items():
        charts[categories.get(name, OTHER_TASKS)][name] = chart.properties(height=90)
    found = {name: group for name, group in charts.items() if group}
    notes = ['Accuracy with its 95 % interval; the dashed line is chance.']
    return Section(name='tasks', title='Tasks', notes=notes if found else (), charts=found)


def loss_rows(run: RunSeries) -> list[ScoreRow]:
    """Return the training loss at each evaluation where it is known.

    `num_items` is the number of batches of its mean, None for the loss of a single batch in records of version 0.1.
    """
    rows = []
    for one in run.evaluations:
        training = one.scores.training or {}
        if training.get('loss') is not None:
            row = ScoreRow(run=run.name, batch=one.batch, token=training.get('token'), kind=LOSS, name='training loss')
            rows.append(replace(row, value=training['loss'], num_items=training.get('loss_batches')))
    return rows


def headline_rows(runs: Sequence[RunSeries], kind: str) -> list[ScoreRow]:
    """Return the headline numbers of a kind in all evaluations, under the names of the runs."""
    found = [(run.name, row) for run in runs for one in run.evaluations for row in one.headline.values()]
    return [replace(row, run=name) for name, row in found if row.kind == kind]


def categories_of(runs: Sequence[RunSeries]) -> dict[str, str]:
    """Return the category of each task that is in one."""
    return {task: name for run in reversed(runs) for task, name in run.last.task_categories.items()}


def gauntlet_of(runs: Sequence[RunSeries]) -> GauntletSpec | None:
    """Return the first gauntlet of the runs, `None` if none has one."""
    composites = [run.last.scores.composites for run in runs]
    return next((found.gauntlet for found in composites if found is not None), None)


def is_rescaled(runs: Sequence[RunSeries]) -> bool:
    """Return whether composites are 0 at chance."""
    gauntlet = gauntlet_of(runs)
    return gauntlet is not None and gauntlet.subtract_random_baseline


def composite_note(runs: Sequence[RunSeries]) -> str:
    """Return the definition of composites in the first gauntlet."""
    gauntlet = gauntlet_of(runs)
    if gauntlet is None:
        return no_composites(runs)
    if not gauntlet.subtract_random_baseline:
        return 'Composites are weighted means of accuracies.'
    if not gauntlet.rescale_accuracy:
        return f'Composites are weighted means of accuracy {MINUS} chance.'
    return 'Composites are weighted means of accuracies rescaled so that 0 is chance and 1 is perfect.'


def no_composites(runs: Sequence[RunSeries]) -> str:
    """Return why there are no composites: a part of a gauntlet was run, or there is none."""
    configs = [run.last.scores.config or {} for run in runs]
    partial = next((one for one in configs if one.get('gauntlet') is not None), None)
    if partial is None:
        return 'The runs have no gauntlet, so there are no composites.'
    names = partial.get('only')
    part = 'A part of the gauntlet' if not names else f'Only {listed(names)} of the gauntlet'
    return f'{part} was run, without a whole category, so there are no composites.'


def scores_section(runs: Sequence[RunSeries]) -> Section:
    """Return all scores of the last evaluations, with their intervals drawn."""
    evaluations = [run.last for run in runs]
    is_single = len(runs) == 1
    table = scores_table(evaluations, ['score'] if is_single else [run.name for run in runs], with_errors=True)
    if is_single:
        table = with_counts(table, runs[0].last)
        table = replace(table, notes=[*table.notes, *share_notes(recorded_shares(runs[0].last))])
    lows = [ends[0] for row in table.rows for ends in map(ends_of, row.cells) if ends is not None]
    last = f' after {runs[0].last.name}' if is_single and len(runs[0].evaluations) > 1 else ''
    return Section(
        name='scores',
        title=f'Scores{last}',
        notes=[f'{composite_note(runs)} The bars are 95 % intervals, the ticks chance.'],
        tables=[replace(table, title=f'Scores{last}', domain=(min([0.0, *lows]), 1.0))],
    )


def recorded_shares(evaluation: Run) -> dict[str, dict[str, float]]:
    """Return the share of each task in the variance of each average; {} for averages of older records."""
    composites = evaluation.scores.composites
    return {} if composites is None else {name: one.variance_shares for name, one in composites.averages.items()}


def with_counts(table: Table, evaluation: Run) -> Table:
    """Return the table with the items and seconds of each task."""

    def counts(row: TableRow) -> list[Cell]:
        task = evaluation.scores.tasks.get(row.name)
        return [task.num_items, evaluation.scores.timing.tasks.get(row.name)] if task is not None else [None, None]

    columns = [Column('items', '{:,}'.format, absent=''), Column('seconds', '{:.1f}'.format, absent='')]
    parts = [[replace(row, cells=[*row.cells, *counts(row)]) for row in part] for part in table.parts]
    return replace(table, columns=[*table.columns, *columns], parts=parts)


def score_section(runs: Sequence[RunSeries]) -> Section:
    """Return SCORE's metrics for each dataset by perturbation, and the accuracies of variants."""
    rows = [replace(row, run=run.name) for run in runs for row in run.last.rows if row.kind == 'perturbation']
    found = {(row.name, row.run, row.metric, row.part): row for row in rows}
    names = list(dict.fromkeys(row.name for row in rows if row.value is not None))
    tables: list[Table] = []
    for dataset in dict.fromkeys(name.partition('/')[0] for name in names):
        columns = [(name, run.name) for name in names if name.startswith(f'{dataset}/') for run in runs]
        heads = [f'{name.partition("/")[2]}{f" {run}" if len(runs) > 1 else ""}' for name, run in columns]
        variants = {row.part: None for row in rows if row.metric == BY_VARIANT and (row.name, row.run) in columns}
        parts = [
            [
                TableRow(name=part or name, cells=[found.get((*one, name, part)) for one in columns])
                for name, part in lines
            ]
            for lines in ([(name, None) for name in SCORE_METRICS], [(BY_VARIANT, part) for part in variants])
        ]
        accuracies = [found.get((*one, 'accuracy', None)) for one in columns]
        chances: list[Cell] = [None if accuracy is None else accuracy.chance for accuracy in accuracies]
        if any(chance is not None for chance in chances):
            parts[0].insert(1, TableRow(name='chance', cells=chances))
        heading = [Column(head, with_error=True, absent='') for head in heads]
        tables.append(Table(title=dataset, columns=heading, parts=parts))
    notes = ['The same questions asked in several ways: accuracy, and how often two answers to one question agree.']
    return Section(name='score', title='SCORE', notes=notes if tables else (), tables=tables)


def changes_section(runs: Sequence[RunSeries]) -> Section:
    """Return each run compared with the first, or a single run's last evaluation with the one before."""
    pairs = [(runs[0].name, run.name, runs[0].last, run.last) for run in runs[1:]]
    title, is_training = 'Comparison', len(runs) == 1 and len(runs[0].evaluations) > 1
    if is_training:
        before, last = runs[0].evaluations[-2:]
        pairs = [(before.name, last.name, before, last)]
        title = f'What changed since {before.name}'
    notes: list[str] = []
    found: dict[str, Comparison] = {}
    names: dict[str, tuple[str, str]] = {}
    for one, other, *compared in pairs:
        name = f'{other} {MINUS} {one}'
        names[name] = one, other
        try:
            found[name] = compare_runs(*compared)
        except RecordError as error:
            notes.append(f'{name} cannot be compared: {"; ".join(error.problems)}')
    tables: list[Table] = []
    for name, comparison in zip(found, corrected(list(found.values())), strict=True):
        table = replace(difference_table(comparison, names=names[name], difference_first=True), title=name)
        tasks, *others = table.parts
        if is_training and len(tasks) > MOST_CHANGED:
            table = replace(table, parts=[tasks[:MOST_CHANGED], *others])
            notes.append(f'The {MOST_CHANGED} of {len(tasks)} tasks that changed most; gauntlet compare shows all.')
        tables.append(table)
    return Section(name='changes', title=title, notes=notes, tables=tables)


def evaluations_section(runs: Sequence[RunSeries]) -> Section:
    """Return the cost of each evaluation, and the settings of the last ones."""
    rows: list[TableRow] = []
    for run in runs:
        for one in run.evaluations:
            timing, environment = one.record['timing'], one.record.get('environment') or {}
            counts = [timing.get(key) for key in ('model_tokens', 'batches', 'reused_items')]
            words = [str(environment.get(key) or '') for key in ('device', 'precision', 'num_ranks')]
            name = one.name if len(runs) == 1 else f'{run.name} {one.name}'
            rows.append(TableRow(name=name, cells=[timing['seconds'], *counts, *words]))
    columns = [Column('seconds', '{:.1f}'.format)]
    columns += [Column(name, '{:,}'.format, absent='') for name in ('tokens', 'batches', 'reused items')]
    columns += [Column(name) for name in ('device', 'precision', 'ranks')]
    settings = {run.name: {key: run.last.record.get(key) for key in SETTINGS} for run in runs}
    return Section(
        name='evaluations',
        title='Evaluations and settings',
        tables=[Table(title='Evaluations', columns=columns, parts=[rows])],
        texts={f'Settings of {name}': json.dumps(one, indent=2, default=str) for name, one in settings.items()},
    )


def curves(
    rows: Sequence[ScoreRow], *, baseline: float | None = None, domain: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return a chart of each score over training with its 95 % interval, a line for each run, by name.

    A dashed line is at chance or, for scores without one, at `baseline`. All charts have the same axes: over tokens if
    they are known, else over batches, and over the values from `domain`, or of all intervals. Losses have their own
    values, and a line over the batches that a mean is of.
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
    for one, row in zip(data, known, strict=True):
        if row.kind == LOSS and row.num_items is not None:
            earlier = [other[field] for other in data if other['run'] == one['run'] and other[field] < one[field]]
            one |= {'begin': max(earlier, default=min(places)), 'batches': row.num_items}
    axis = alt.Axis(tickCount=4, format='~s' if by_token else ',')
    scale_of_x = alt.Scale(domain=[min(places), max(places)], nice=False)

    def x_of(name: str) -> Any:
        return alt.X(f'{name}:Q', title=title, scale=scale_of_x, axis=axis)

    legend = None if len(runs) == 1 else alt.Legend(title=None, orient='top', labelLimit=0)
    color = alt.Color('run:N', sort=runs, legend=legend)
    found = {}
    for name, kind in dict.fromkeys((row.name, row.kind) for row in known):
        mine = [one for one, row in zip(data, known, strict=True) if (row.name, row.kind) == (name, kind)]
        numbers = ['value'] if kind == LOSS else ['value', 'low', 'high']
        counts = ['batches:Q'] if 'batches' in mine[0] else []
        tooltip = ['run:N', f'{field}:Q', *counts, *(alt.Tooltip(f'{number}:Q', format='.3f') for number in numbers)]
        base = alt.Chart(alt.InlineData(values=mine)).encode(x=x_of(field), color=color, tooltip=tooltip)
        scale = alt.Scale(zero=False, nice=True) if kind == LOSS else alt.Scale(domain=domain or [min(ends), max(ends)])
        y = alt.Y('value:Q', title=None, scale=scale, axis=alt.Axis(tickCount=4))
        if kind != LOSS:
            chance = next((one['chance'] for one in mine if one['chance'] is not None), baseline)
            line = alt.Chart(alt.InlineData(values=[] if chance is None else [{'value': chance, 'mark': 'chance'}]))
            rule = line.mark_rule(strokeDash=[3, 3]).encode(y='value:Q', tooltip=['mark:N', 'value:Q'])
            band = base.mark_area(opacity=0.16, clip=True).encode(y=alt.Y('low:Q', title=None), y2='high:Q')
            layers = [band, rule, base.mark_line(point=True).encode(y=y)]
        elif all('begin' in one for one in mine):
            mean_of_batches = base.mark_rule().encode(y=y, x=x_of('begin'), x2=f'{field}:Q')
            layers = [mean_of_batches, base.mark_point(filled=True).encode(y=y)]
        else:
            layers = [base.mark_line(point=True).encode(y=y)]
        found[name] = alt.layer(*layers).properties(height=PANEL_HEIGHT)
    return found
