"""The sections of a report page: tables and charts of recorded numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.records.runs import Run, read_run
from llmfoundry_gauntlet.report import charts
from llmfoundry_gauntlet.report.charts import Datum
from llmfoundry_gauntlet.report.comparison import Comparison, compare
from llmfoundry_gauntlet.report.comparison_tables import CLEAR, groups, is_clear
from llmfoundry_gauntlet.report.runs import RecordedRun
from llmfoundry_gauntlet.report.scores import ScoreRow, task_categories
from llmfoundry_gauntlet.report.tables import Line, majorities, score_lines
from llmfoundry_gauntlet.report.wording import MINUS, label, unique_labels
from llmfoundry_gauntlet.scores.keys import ITEMS
from llmfoundry_gauntlet.values import Measure

NOT_ASKED = Measure(value=None, reason='this run was not asked it')
OTHER_TASKS = 'tasks outside the gauntlet'
MARGIN = 0.02  # so that a point at 0 or 1 is whole
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

Cell = str | int | float | Measure | ScoreRow | None
Chart = tuple[str, Any]  # title and Vega-Lite specification


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that can be sorted; a long one is folded and has a search box."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    is_long: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page under its own heading; `notes` are paragraphs."""

    name: str
    title: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = field(default_factory=tuple)  # title and preformatted text


def make_sections(runs: Sequence[RecordedRun], results: Sequence[Run]) -> list[Section]:
    """Return the sections of a page, those that are empty left out; `results` are the runs' last evaluations."""
    lines = score_lines([(run.last.folder, run.last.record) for run in runs])
    sections = [
        composites_section(runs, lines),
        tasks_section(runs, lines),
        score_section(runs),
        comparison_section(runs, results),
        evaluations_section(runs),
    ]
    return [one for one in sections if one.tables or one.notes]


def composites_section(runs: Sequence[RecordedRun], lines: Sequence[Line]) -> Section:
    """Return averages and categories: over training where a run has several evaluations, else side by side."""
    shown = sorted((line for line in lines if line.kind in ('category', 'average')), key=lambda one: one.kind)
    if not shown:
        return Section(name='scores', title='Scores', notes=['The runs have no gauntlet, so there are no composites.'])
    header = ['Composite', *(['Score', '95 % interval'] if len(runs) == 1 else names_of(runs))]
    rows = [[line.name, *cells(line), *([interval_text(line.rows[0])] if len(runs) == 1 else [])] for line in shown]
    return Section(
        name='scores',
        title='Scores',
        notes=[composite_note(runs)],
        charts=composite_charts(runs, shown),
        tables=[Table(caption='Composites', header=header, rows=rows)],
    )


def composite_note(runs: Sequence[RecordedRun]) -> str:
    """Return what composites are under the first gauntlet."""
    composites = [run.last.record['composites'] for run in runs]
    gauntlet: dict[str, Any] = next((found['gauntlet'] for found in composites if found), {})
    if not gauntlet.get('subtract_random_baseline', True):
        meaning = 'Composites are weighted means of accuracies.'
    elif not gauntlet.get('rescale_accuracy', True):
        meaning = f'Composites are weighted means of accuracy {MINUS} chance.'
    else:
        meaning = 'Composites are weighted means of accuracies rescaled so that 0 is chance and 1 is perfect.'
    several = any(len(run.evaluations) > 1 for run in runs)
    last = ' Tables show the last evaluation of each run.' if several else ''
    return f'{meaning} ± is one standard error; bands and bars are 95 % intervals over items.{last}'


def composite_charts(runs: Sequence[RecordedRun], lines: Sequence[Line]) -> list[Chart]:
    """Return a learning curve for each composite, or one chart of all where no run has several evaluations."""
    if all(len(run.evaluations) == 1 for run in runs):
        data = data_of(lines, runs)
        return [('Averages and categories', finished(charts.points(data, zero=True)))] if data else []
    found = []
    for line in lines:
        data = [
            charts.datum(row, run.label)
            for run in runs
            for evaluation in run.evaluations
            for row in charts.headline(evaluation.scores)
            if (row.kind, row.name) == (line.kind, line.name) and row.batch is not None
        ]
        if data:
            found.append((line.name, finished(charts.curve(data))))
    return found


def tasks_section(runs: Sequence[RecordedRun], lines: Sequence[Line]) -> Section:
    """Return the accuracies of tasks by category, and all numbers in a folded table."""
    shown = [line for line in lines if line.kind == 'task']
    if not shown:
        return Section(name='tasks', title='Tasks')
    category = {task: name for run in reversed(runs) for task, name in task_categories(run.last.record).items()}
    order = list(dict.fromkeys([*category.values(), OTHER_TASKS]))
    shown.sort(key=lambda line: order.index(category.get(line.name, OTHER_TASKS)))
    found: list[Chart] = []
    for name in order:
        data = data_of([line for line in shown if category.get(line.name, OTHER_TASKS) == name], runs)
        if data:
            found.append((name, finished(charts.points(data, domain=(-MARGIN, 1 + MARGIN)))))
    majority = majorities([(runs[0].last.folder, runs[0].last.record)])
    header = ['Task', *(['Accuracy'] if len(runs) == 1 else names_of(runs)), 'Chance', 'Majority class']
    header += ['Items', 'Unscored', 'Truncated', 'Seconds'] if len(runs) == 1 else []
    rows = [
        [
            line.name,
            *cells(line),
            next((row.chance for row in line.rows if row is not None), None),
            majority.get(line.name),
            *(counts(runs[0], line.name) if len(runs) == 1 else ()),
            category.get(line.name, OTHER_TASKS),
        ]
        for line in shown
    ]
    table = Table(caption='Tasks', header=[*header, 'Category'], rows=rows)
    notes = ['Accuracy of each task with its 95 % interval; the tick marks chance.']
    return Section(name='tasks', title='Tasks', notes=notes, charts=found, tables=[table, all_numbers(runs)])


def counts(run: RecordedRun, task: str) -> list[Cell]:
    """Return items, unscored and truncated items, and seconds of a task."""
    entry, timing = run.last.record['tasks'].get(task, {}), run.last.record['timing']['tasks']
    return [*(entry.get(name) for name in ('num_items', 'num_unscored', 'num_truncated')), timing.get(task)]


def all_numbers(runs: Sequence[RecordedRun]) -> Table:
    """Return every number of the last evaluations."""
    found = [{(row.name, row.part, row.metric): row for row in run.last.scores} for run in runs]
    keys = dict.fromkeys(key for one in found for key in one)
    return Table(
        caption='All numbers',
        header=['Score', 'Part', 'Metric', *(['Value'] if len(runs) == 1 else names_of(runs))],
        rows=[[*(part or '' for part in key), *(one.get(key, NOT_ASKED) for one in found)] for key in keys],
        is_long=True,
    )


def score_section(runs: Sequence[RecordedRun]) -> Section:
    """Return SCORE's numbers for each data set: a table by perturbation, and accuracy by variant."""
    found = [{(row.name, row.part, row.metric): row for row in run.last.scores if is_score(row)} for run in runs]
    perturbations = list(dict.fromkeys(name for one in found for name, _, _ in one))
    plots: list[Chart] = []
    for name in perturbations:
        data = [
            charts.datum(row, run.label) | {'name': label((part or '').partition(':')[2] or part or '')}
            for run, one in zip(runs, found, strict=True)
            for (of, part, metric), row in one.items()
            if (of, metric) == (name, BY_VARIANT) and row.value is not None
        ]
        if data:
            title = f'{name.replace("/", ": accuracy by ")}'
            plots.append((title, finished(charts.points(data, domain=(-MARGIN, 1 + MARGIN)))))
    tables = []
    for dataset in dict.fromkeys(name.partition('/')[0] for name in perturbations):
        columns = [
            (name, place) for name in perturbations if name.startswith(f'{dataset}/') for place in range(len(runs))
        ]
        header = [
            f'{name.partition("/")[2]}{f" {runs[place].name}" if len(runs) > 1 else ""}' for name, place in columns
        ]
        rows = [
            [metric, *(score_cell(found[place], name, metric) for name, place in columns)] for metric in SCORE_METRICS
        ]
        tables.append(Table(caption=dataset, header=['Metric', *header], rows=rows))
    notes = ['The same questions asked in several ways: accuracy, and how often two answers to one question agree.']
    return Section(name='score', title='SCORE', notes=notes if tables else (), charts=plots, tables=tables)


def is_score(row: ScoreRow) -> bool:
    """Return whether a number is one of SCORE's."""
    return row.kind == 'perturbation'


def score_cell(found: dict[tuple[str, str | None, str | None], ScoreRow], name: str, metric: str) -> Cell:
    """Return a metric of a data set under a perturbation; the reason of the perturbation where it did not run."""
    return found.get((name, None, metric)) or found.get((name, None, None)) or NOT_ASKED


def comparison_section(runs: Sequence[RecordedRun], results: Sequence[Run]) -> Section:
    """Return each run compared with the first, or the last evaluation of a single run with its first."""
    pairs: list[tuple[str, str, Run, Run]] = []
    if len(runs) > 1:
        pairs = [(runs[0].name, run.name, results[0], one) for run, one in zip(runs[1:], results[1:], strict=True)]
    elif len(evaluations := runs[0].evaluations) > 1:
        pairs = [(evaluations[0].name, evaluations[-1].name, read_run(evaluations[0].folder), results[0])]
    notes: list[str] = []
    plots: list[Chart] = []
    tables: list[Table] = []
    for first, second, *compared in pairs:
        title = f'{second} {MINUS} {first}'
        try:
            found = compare(*compared)
        except RecordError as error:
            notes.append(f'{title} cannot be compared: {"; ".join(error.problems)}')
            continue
        notes += [f'{title}: {warning}' for warning in found.warnings]
        plots += difference_charts(found, title)
        tables.append(difference_table(found, title))
    if tables:
        notes.insert(0, f'Items are paired. * p below {CLEAR} after correction for the number of comparisons (Holm).')
    return Section(name='comparison', title='Comparison', notes=notes, charts=plots, tables=tables)


def difference_charts(found: Comparison, title: str) -> list[Chart]:
    """Return the differences of composites, tasks and SCORE, each from the largest to the smallest."""
    plots: list[Chart] = []
    for kind, group in zip(('tasks', 'composites', 'SCORE'), groups(found), strict=True):
        known = [(name, one) for name, one in group.items() if one.difference.value is not None]
        known.sort(key=lambda pair: -(pair[1].difference.value or 0))
        labels = unique_labels([f'{name}{" *" if is_clear(one) else ""}' for name, one in known])
        measures = [one.difference for _, one in known]
        data = [charts.mark(name, '', m.value, m.standard_error) for name, m in zip(labels, measures, strict=True)]
        if data:
            plots.append((f'{title}: {kind}', finished(charts.points(data, zero=True))))
    return sorted(plots, key=lambda plot: plot[0].endswith('tasks'))  # the longest last


def difference_table(found: Comparison, title: str) -> Table:
    """Return all differences of a pair, those of composites first."""
    header = ['Score', 'First', 'Second', 'Difference', '', 'p (Holm)', 'Minimum detectable', 'Items']
    rows: list[list[Cell]] = []
    for group in (found.composites, found.tasks, found.score):
        for name, one in group.items():
            star = '*' if is_clear(one) else ''
            rows.append([name, one.first, one.second, one.difference, star, one.p_holm, one.detectable, one.num_items])
    return Table(caption=title, header=header, rows=rows, is_long=True)


def evaluations_section(runs: Sequence[RecordedRun]) -> Section:
    """Return what each evaluation took and how it was run, and the settings of the last ones."""
    header = ['Evaluation', 'Seconds', 'Items', 'Tokens', 'Batches', 'Reused items', 'Device', 'Precision', 'Ranks']
    rows: list[list[Cell]] = []
    for run in runs:
        for one in run.evaluations:
            timing, environment = one.record['timing'], one.record.get('environment') or {}
            name = one.name if len(runs) == 1 else f'{run.name} {one.name}'
            numbers = [(one.record.get('metrics') or {}).get(ITEMS)]
            numbers += [timing.get(key) for key in ('model_tokens', 'batches', 'reused_items')]
            words = [environment.get(key) for key in ('device', 'precision', 'num_ranks')]
            words += [timing.get(key) for key in ('scoring', 'replies')]
            rows.append(
                [name, timing['seconds'], *map(integer, numbers), *('' if w is None else str(w) for w in words)]
            )
    kept = ('package_version', 'semantics', 'model', 'training', 'environment', 'config', 'identity')
    texts = [
        (f'Settings of {run.name}', json.dumps({key: run.last.record.get(key) for key in kept}, indent=2, default=str))
        for run in runs
    ]
    table = Table(caption='Evaluations', header=[*header, 'Scoring', 'Generation'], rows=rows)
    return Section(name='evaluations', title='Evaluations and settings', tables=[table], texts=texts)


def integer(value: Any) -> int | None:
    """Return a recorded count, `None` for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def cells(line: Line) -> list[Cell]:
    """Return a line's numbers."""
    return [NOT_ASKED if row is None else row for row in line.rows]


def interval_text(row: ScoreRow | None) -> str:
    """Return a 95 % interval, empty where it is unknown."""
    return '' if row is None or row.interval is None else '{:.3f} to {:.3f}'.format(*row.interval).replace('-', MINUS)


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of runs, heads of the columns that have a number of each."""
    return [run.name for run in runs]


def data_of(lines: Sequence[Line], runs: Sequence[RecordedRun]) -> list[Datum]:
    """Return what the points of lines are drawn from, those without a value left out."""
    labels = unique_labels([line.name for line in lines])
    return [
        charts.datum(row, run.label) | {'name': name}
        for name, line in zip(labels, lines, strict=True)
        for run, row in zip(runs, line.rows, strict=True)
        if row is not None and row.value is not None
    ]


def finished(chart: Any) -> Any:
    """Return the specification of a chart that is as wide as its place, without what all charts share."""
    spec = chart.properties(width='container').to_dict()
    return {key: value for key, value in spec.items() if key not in ('$schema', 'config')}
