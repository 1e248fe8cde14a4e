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
from llmfoundry_gauntlet.metrics.comparison import Difference
from llmfoundry_gauntlet.metrics.keys import GOLD_BITS
from llmfoundry_gauntlet.results.report.comparison import Comparison, compare_runs, corrected
from llmfoundry_gauntlet.results.report.printing import (
    BITS_PER_BYTE,
    CLEAR,
    GOLD_BITS_HEADING,
    OTHER_TASKS,
    count_cell,
    difference_table,
    gold_bits_table,
    scores_table,
    share_notes,
)
from llmfoundry_gauntlet.results.report.scores import ScoreRow
from llmfoundry_gauntlet.results.report.tables import (
    MINUS,
    Cell,
    Column,
    Table,
    TableRow,
    ends_of,
    typographic,
    visible,
)
from llmfoundry_gauntlet.results.runs import Run, RunSeries
from llmfoundry_gauntlet.types import Measure

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
    'accuracy_over_prompts',  # with errors over questions and prompts
    'consistency_rate_over_prompts',
    'prompt_deviation',
)
SETTINGS = ('package_version', 'semantics', 'model', 'training', 'timing', 'environment', 'config', 'identity')
MOST_CHANGED = 10  # tasks of a training run
PANEL_HEIGHT, TASK_PANEL_HEIGHT = 120, 90  # pixels
LOSS = 'loss'  # the kind of a row that is no score
BAND_OPACITY = 0.16
SMALLEST_DIFFERENCE = 0.01  # that has an axis of its own
NOUNS = {'composites': 'averages and categories', 'tasks': 'tasks', 'score': 'measures of SCORE'}
BARS_LEGEND = (
    f'bars: 95 % intervals of differences, cut at the ends of the axis; those with p below {CLEAR} have colour'
)

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
    sections = [changes_section(runs), scores_section(runs), score_section(runs), evaluations_section(runs)]
    if any(len(run.evaluations) > 1 for run in runs):
        # The page begins with the averages over training; the curves of tasks come after what changed.
        sections.insert(0, curves_section(runs))
        sections.insert(2, tasks_section(runs))
    return [section for section in sections if section.tables or section.charts or section.notes]


def curves_section(runs: Sequence[RunSeries]) -> Section:
    """Return the learning curves of averages and categories, and the training loss, with one axis.

    The bits per byte of gold answers follow, of averages alone.
    """
    losses = [row for run in runs for row in loss_rows(run)]
    rows = [*headline_rows(runs, 'average'), *losses, *headline_rows(runs, 'category')]
    charts = curves(rows, baseline=0.0 if is_rescaled(runs) else None)
    if not charts:
        return Section(name='curves', title='Learning curves')

    notes = [f'{composite_note(runs)} Bands are 95 % intervals over items.']
    if losses:
        notes.append('The training loss at an evaluation is its mean over the batches since the evaluation before.')
    # On axes of their own: bits are no shares.
    of_averages = [row for row in headline_rows(runs, GOLD_BITS) if row.kind == 'average']
    gold_bits = curves([replace(row, name=f'{row.name} {BITS_PER_BYTE}') for row in of_averages])
    all_charts = {'': charts, GOLD_BITS_HEADING: gold_bits} if gold_bits else {'': charts}
    return Section(name='curves', title='Learning curves', notes=notes, charts=all_charts)


def tasks_section(runs: Sequence[RunSeries]) -> Section:
    """Return the learning curves of tasks, by category."""
    category_of_task = categories_of(runs)
    category_names = [*dict.fromkeys(category_of_task.values()), OTHER_TASKS]
    charts: dict[str, dict[str, Any]] = {category: {} for category in category_names}
    for task, chart in curves(headline_rows(runs, 'task'), domain=(0, 1)).items():
        category = category_of_task.get(task, OTHER_TASKS)
        charts[category][task] = chart.properties(height=TASK_PANEL_HEIGHT)

    drawn = {category: group for category, group in charts.items() if group}
    notes = ['Accuracy with its 95 % interval; the dashed line is chance.'] if drawn else []
    return Section(name='tasks', title='Tasks', notes=notes, charts=drawn)


def loss_rows(run: RunSeries) -> list[ScoreRow]:
    """Return the training loss at each evaluation where it is known.

    `num_items` is the number of batches that the loss is the mean of.
    """
    rows = []
    for evaluation in run.evaluations:
        training = evaluation.scores.training or {}
        if training.get('loss') is not None:
            rows.append(
                ScoreRow(
                    run=run.name,
                    batch=evaluation.batch,
                    token=training.get('token'),
                    kind=LOSS,
                    name='training loss',
                    value=training['loss'],
                    num_items=training.get('loss_batches'),
                )
            )
    return rows


def headline_rows(runs: Sequence[RunSeries], kind: str) -> list[ScoreRow]:
    """Return the headline numbers of a kind in all evaluations, under the names of the runs."""
    rows = []
    for run in runs:
        for evaluation in run.evaluations:
            of_kind = [row for (kind_of_row, _), row in evaluation.headline.items() if kind_of_row == kind]
            rows += [replace(row, run=run.name) for row in of_kind]
    return rows


def categories_of(runs: Sequence[RunSeries]) -> dict[str, str]:
    """Return the category of each task that is in one; the first run that has the task decides."""
    category_of_task: dict[str, str] = {}
    for run in reversed(runs):  # so that the first one is written last
        category_of_task.update(run.last.task_categories)
    return category_of_task


def gauntlet_of(runs: Sequence[RunSeries]) -> GauntletSpec | None:
    """Return the first gauntlet of the runs, `None` if none has one."""
    for run in runs:
        composites = run.last.scores.composites
        if composites is not None:
            return composites.gauntlet
    return None


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
    of_gauntlet = [config for config in configs if config.get('gauntlet') is not None]
    if not of_gauntlet:
        return 'The runs have no gauntlet, so there are no composites.'
    names = of_gauntlet[0].get('only')
    part = f'Only {listed(names)} of the gauntlet' if names else 'A part of the gauntlet'
    return f'{part} was run, without a whole category, so there are no composites.'


def scores_section(runs: Sequence[RunSeries]) -> Section:
    """Return all scores of the last evaluations, with their intervals drawn."""
    evaluations = [run.last for run in runs]
    title = 'Scores'
    if len(runs) == 1:
        (run,) = runs
        if len(run.evaluations) > 1:
            title = f'Scores after {run.last.name}'
        table = with_counts(scores_table(evaluations, ['score'], with_errors=True), run.last)
        table = replace(table, notes=[*table.notes, *share_notes(recorded_shares(run.last))])
    else:
        table = scores_table(evaluations, [run.name for run in runs], with_errors=True)

    # Bits per byte have a table of their own, as they have no place on the axis of shares.
    gold_bits = gold_bits_table(evaluations, [column.name for column in table.columns[: len(evaluations)]])
    table = replace(table, parts=[part for part in table.parts if not part or part[0].name != GOLD_BITS_HEADING])

    # The axis of the intervals begins at 0, or below for composites worse than chance.
    intervals = [ends_of(cell) for row in table.rows for cell in row.cells]
    lows = [ends[0] for ends in intervals if ends is not None]
    tables = [replace(table, title=title, domain=(min([0.0, *lows]), 1.0))]
    if gold_bits is not None:
        tables.append(gold_bits)
    return Section(
        name='scores',
        title=title,
        notes=[f'{composite_note(runs)} The bars are 95 % intervals, the ticks chance.'],
        tables=tables,
    )


def recorded_shares(evaluation: Run) -> dict[str, dict[str, float]]:
    """Return the share of each task in the variance of each average; {} for averages in records of 0.1.0."""
    composites = evaluation.scores.composites
    if composites is None:
        return {}
    return {name: average.variance_shares for name, average in composites.averages.items()}


def with_counts(table: Table, evaluation: Run) -> Table:
    """Return the table with the items and seconds of each task."""
    seconds_by_task = evaluation.scores.timing.tasks

    def with_counts_of_task(row: TableRow) -> TableRow:
        task = evaluation.scores.tasks.get(row.name)
        counts: list[Cell] = [None, None] if task is None else [task.num_items, seconds_by_task.get(row.name)]
        return replace(row, cells=[*row.cells, *counts])

    columns = [
        *table.columns,
        Column('items', '{:,}'.format, absent=''),
        Column('seconds', '{:.1f}'.format, absent=''),
    ]
    parts = [list(map(with_counts_of_task, part)) for part in table.parts]
    return replace(table, columns=columns, parts=parts)


def score_section(runs: Sequence[RunSeries]) -> Section:
    """Return SCORE's metrics for each dataset by perturbation, and the accuracies of variants."""
    rows = []
    for run in runs:
        rows += [replace(row, run=run.name) for row in run.last.rows if row.kind == 'perturbation']

    # The name of a row is dataset/perturbation. Perturbations that were not run have only a reason.
    names = list(dict.fromkeys(row.name for row in rows if row.value is not None))
    datasets = dict.fromkeys(name.partition('/')[0] for name in names)
    tables = []
    for dataset in datasets:
        names_of_dataset = [name for name in names if name.startswith(f'{dataset}/')]
        tables.append(dataset_table(dataset, names_of_dataset, [run.name for run in runs], rows))

    notes = ['The same questions asked in several ways: accuracy, and how often two answers to one question agree.']
    return Section(name='score', title='SCORE', notes=notes if tables else (), tables=tables)


def dataset_table(
    dataset: str, perturbations: Sequence[str], run_names: Sequence[str], rows: Sequence[ScoreRow]
) -> Table:
    """Return a dataset of SCORE with a column for each perturbation and run."""
    columns = [(perturbation, run) for perturbation in perturbations for run in run_names]
    scores = {((row.name, row.run), row.metric, row.part): row for row in rows}

    def cells(metric: str, part: str | None = None) -> list[Cell]:
        return [scores.get((column, metric, part)) for column in columns]

    # Without the prompt perturbation there are no errors over prompts.
    known = {metric for (_, metric, _) in scores}
    metrics: list[TableRow] = []
    for metric in SCORE_METRICS:
        if metric in known:
            metrics.append(TableRow(name=metric, cells=cells(metric)))
            metrics += baselines_below(metric, [scores.get((column, metric, None)) for column in columns])
    accuracies = [scores.get((column, 'accuracy', None)) for column in columns]
    counts = [0 if accuracy is None else accuracy.num_items or 0 for accuracy in accuracies]
    if len(set(counts) - {0}) > 1:
        metrics.append(TableRow(name='questions', cells=list(map(count_cell, counts))))

    variants = dict.fromkeys(row.part for row in rows if row.metric == BY_VARIANT and (row.name, row.run) in columns)
    of_variants = [TableRow(name=variant or BY_VARIANT, cells=cells(BY_VARIANT, variant)) for variant in variants]

    headings = []
    for perturbation, run in columns:
        short_name = perturbation.partition('/')[2]
        heading = short_name if len(run_names) == 1 else f'{short_name} {run}'
        headings.append(Column(heading, with_error=True, absent=''))
    return Table(title=dataset, columns=headings, parts=[metrics, of_variants])


def baselines_below(metric: str, shown: Sequence[ScoreRow | None]) -> list[TableRow]:
    """Return the rows of a metric's baselines that any of its scores has: chance, and the best constant letter."""
    chances: list[Cell] = [None if score is None else score.chance for score in shown]
    constants: list[Cell] = [None if score is None else score.constant_letter for score in shown]
    rows: list[TableRow] = []
    # Accuracies by prompt have the same chance as the accuracy.
    if metric == 'accuracy' and any(chance is not None for chance in chances):
        rows.append(TableRow(name='chance', cells=chances))
    if any(constant is not None for constant in constants):
        rows.append(TableRow(name=f'{metric} of the best constant letter', cells=constants))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPair:
    """Two evaluations to compare, and the names under which the page shows them."""

    first: Run
    second: Run
    names: tuple[str, str]
    index: int  # of the second among the runs of the page, which have a colour each

    @property
    def title(self) -> str:
        """Return the difference in words."""
        return f'{self.names[1]} {MINUS} {self.names[0]}'


def changes_section(runs: Sequence[RunSeries]) -> Section:
    """Return each run compared with the first, or a single run's last evaluation with the one before."""
    is_training = len(runs) == 1 and len(runs[0].evaluations) > 1
    if is_training:
        before, last = runs[0].evaluations[-2:]
        title = f'What changed since {before.name}'
        pairs = [ComparedPair(first=before, second=last, names=(before.name, last.name), index=0)]
    else:
        title = 'Comparison'
        baseline = runs[0]
        pairs = [
            ComparedPair(first=baseline.last, second=run.last, names=(baseline.name, run.name), index=index)
            for index, run in enumerate(runs[1:], start=1)
        ]

    notes: list[str] = []
    comparisons: list[Comparison] = []
    comparable: list[ComparedPair] = []
    for pair in pairs:
        try:
            comparisons.append(compare_runs(pair.first, pair.second))
            comparable.append(pair)
        except RecordError as error:
            notes.append(f'{pair.title} cannot be compared: {"; ".join(error.problems)}')

    tables: list[Table] = []
    for pair, comparison in zip(comparable, corrected(comparisons), strict=True):
        notes.append(clear_differences(pair, comparison))
        table = difference_table(comparison, names=pair.names, difference_first=True)
        tasks, composites, *others = table.parts
        composites = sorted(composites, key=lambda row: row.name not in comparison.averages)
        table = replace(table, parts=[tasks, composites, *others], legend=[*table.legend, BARS_LEGEND])
        if is_training and len(tasks) > MOST_CHANGED:
            table = replace(table, parts=[tasks[:MOST_CHANGED], composites, *others])
            notes.append(f'The {MOST_CHANGED} of {len(tasks)} tasks that changed most; gauntlet compare shows all.')
        tables.append(replace(table, title=pair.title, domain=domain_of_differences(table), compared_run=pair.index))
    return Section(name='changes', title=title, notes=notes, tables=tables)


def clear_differences(pair: ComparedPair, comparison: Comparison) -> str:
    """Return a sentence with the clear differences of each kind."""
    first, second = pair.names
    parts = []
    for kind, noun in NOUNS.items():
        # Without an error nothing is known about a difference, so it is not counted.
        differences = comparison.groups[kind]
        with_error = {name: found for name, found in differences.items() if found.p_holm is not None}
        if with_error:
            clear = clear_values(with_error)
            part = f'{len(clear)} of {len(with_error)} {noun}'
            if clear:
                named = listed(f'{name} {typographic(f"{value:+.3f}")}' for name, value in clear.items())
                part = f'{part} ({named})'
            parts.append(part)
    if not parts:
        return f'The errors of all differences between {second} and {first} are unknown.'
    return f'{second} differs clearly (p below {CLEAR} after correction) from {first} in {"; ".join(parts)}.'


def clear_values(differences: Mapping[str, Difference]) -> dict[str, float]:
    """Return the clear differences by name, the largest first."""
    clear: dict[str, float] = {}
    for name, compared in differences.items():
        value = compared.difference.value
        if value is not None and compared.p_holm is not None and compared.p_holm < CLEAR:
            clear[name] = value
    return dict(sorted(clear.items(), key=lambda name_and_value: -abs(name_and_value[1])))


def domain_of_differences(table: Table) -> tuple[float, float]:
    """Return an axis with 0 in its middle that ends at twice the largest difference, at most at 1.

    Intervals of tasks with few items may be wider. With room for them, those of composites would be points.
    """
    differences = [row.cells[0] for row in table.rows]
    sizes = [abs(difference.value or 0.0) for difference in differences if isinstance(difference, Measure)]
    bound = min(1.0, 2 * max([SMALLEST_DIFFERENCE, *sizes]))
    return -bound, bound


def evaluations_section(runs: Sequence[RunSeries]) -> Section:
    """Return the cost of each evaluation, and the settings of the last ones."""
    rows: list[TableRow] = []
    for run in runs:
        for evaluation in run.evaluations:
            timing = evaluation.record['timing']
            environment = evaluation.record.get('environment') or {}
            counts = [timing.get(key) for key in ('model_tokens', 'batches', 'reused_items')]
            words = [str(environment.get(key) or '') for key in ('device', 'precision', 'num_ranks')]
            name = evaluation.name
            if len(runs) > 1:
                # A run of one evaluation has its name, or a longer one of the same folder.
                is_alone = len(run.evaluations) == 1 and evaluation.batch is None
                name = run.name if is_alone else f'{run.name} {evaluation.name}'
            rows.append(TableRow(name=name, cells=[timing['seconds'], *counts, *words]))
    columns = [
        Column('seconds', '{:.1f}'.format),
        Column('tokens', '{:,}'.format, absent=''),
        Column('batches', '{:,}'.format, absent=''),
        Column('reused items', '{:,}'.format, absent=''),
        Column('device'),
        Column('precision'),
        Column('ranks'),
    ]

    texts = {}
    for run in runs:
        settings = {key: run.last.record.get(key) for key in SETTINGS}
        texts[f'Settings of {run.name}'] = json.dumps(settings, indent=2, default=str)
    return Section(
        name='evaluations',
        title='Evaluations and settings',
        tables=[Table(title='Evaluations', columns=columns, parts=[rows])],
        texts=texts,
    )


def altair() -> Any:
    """Return the module of charts, which only a report needs; each of its arguments has dozens of types."""
    return importlib.import_module('altair')


def curves(
    rows: Sequence[ScoreRow], *, baseline: float | None = None, domain: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return a chart of each score over training, a line for each run, by name.

    All charts have the same axes: over tokens if they are known, else over batches. That of scores is `domain`, or from
    the lowest to the highest end of their intervals. A dashed line is at chance or, for scores without one, at
    `baseline`.
    """
    drawn = [row for row in rows if row.value is not None and row.batch is not None]
    if not drawn:
        return {}

    axes = shared_axes(drawn, baseline, domain)
    charts = {}
    for name, kind in dict.fromkeys((row.name, row.kind) for row in drawn):
        if kind == LOSS:
            chart = loss_curve(drawn, axes)
        else:
            rows_of_score = [row for row in drawn if (row.name, row.kind) == (name, kind)]
            chart = score_curve(rows_of_score, axes, baseline)
        charts[name] = chart.properties(height=PANEL_HEIGHT)
    return charts


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes and colors that all charts of a section share, so that they can be compared by eye."""

    progress: str  # the field of a row on the horizontal axis: 'token' or 'batch'
    progress_title: str
    progress_axis: Any
    progress_scale: Any
    color: Any
    score_domain: Sequence[float]

    def x(self, field: str) -> Any:
        """Return the horizontal axis for a field of the data."""
        return altair().X(f'{field}:Q', title=self.progress_title, scale=self.progress_scale, axis=self.progress_axis)


def shared_axes(rows: Sequence[ScoreRow], baseline: float | None, domain: Sequence[float] | None) -> Axes:
    """Return the axes on which all rows have room."""
    alt = altair()

    # Batches of different sizes are not comparable, so tokens are used where every row has them.
    tokens = {row.token for row in rows}
    by_token = None not in tokens and len(tokens) > 1
    progress = 'token' if by_token else 'batch'
    progress_of_rows = [getattr(row, progress) for row in rows]

    run_names = list(dict.fromkeys(visible(row.run) for row in rows))
    legend = None if len(run_names) == 1 else alt.Legend(title=None, orient='top', labelLimit=0)

    if domain is None:
        bounds = [bound for row in rows if row.kind != LOSS for bound in interval_of(row)]
        if baseline is not None:
            bounds.append(baseline)
        domain = [min(bounds), max(bounds)] if bounds else []
    return Axes(
        progress=progress,
        progress_title='training tokens' if by_token else 'training batch',
        # d3 would write 0 tokens as 0M.
        progress_axis=alt.Axis(tickCount=4, labelExpr=f"format(datum.value, '{'~s' if by_token else ','}')"),
        progress_scale=alt.Scale(domain=[min(progress_of_rows), max(progress_of_rows)], nice=False),
        color=alt.Color('run:N', sort=run_names, legend=legend),
        score_domain=domain,
    )


def interval_of(row: ScoreRow) -> tuple[Any, Any]:
    """Return the ends of the 95 % interval; a score without one is a point."""
    low = row.value if row.low is None else row.low
    high = row.value if row.high is None else row.high
    return low, high


def data_of(row: ScoreRow) -> dict[str, Any]:
    """Return the fields of a row in the data of a chart."""
    low, high = interval_of(row)
    return {
        'name': row.name,
        'batch': row.batch,
        'token': row.token,
        'chance': row.chance,
        'value': row.value,
        'run': visible(row.run),
        'low': low,
        'high': high,
    }


def score_curve(rows: Sequence[ScoreRow], axes: Axes, baseline: float | None) -> Any:
    """Return the chart of a score: a line for each run in a band of its intervals, and a dashed line at chance."""
    alt = altair()
    numbers = [alt.Tooltip(f'{name}:Q', format='.3f') for name in ('value', 'low', 'high')]
    chart = alt.Chart(alt.InlineData(values=list(map(data_of, rows)))).encode(
        x=axes.x(axes.progress), color=axes.color, tooltip=['run:N', f'{axes.progress}:Q', *numbers]
    )
    y = alt.Y('value:Q', title=None, scale=alt.Scale(domain=axes.score_domain), axis=alt.Axis(tickCount=4))
    line = chart.mark_line(point=True).encode(y=y)
    band = chart.mark_area(opacity=BAND_OPACITY, clip=True).encode(y=alt.Y('low:Q', title=None), y2='high:Q')

    # All rows of a score have the same chance, but records of 0.1.0 have none.
    chances = [row.chance for row in rows if row.chance is not None]
    chance = chances[0] if chances else baseline
    marked = [] if chance is None else [{'value': chance, 'mark': 'chance'}]
    rule = (
        alt.Chart(alt.InlineData(values=marked))
        .mark_rule(strokeDash=[3, 3])
        .encode(y='value:Q', tooltip=['mark:N', 'value:Q'])
    )
    return alt.layer(band, rule, line)  # the line on top


def loss_curve(rows: Sequence[ScoreRow], axes: Axes) -> Any:
    """Return the chart of the training loss: each mean as a line over its batches, with a point at the evaluation.

    `rows` are those of all charts. A loss has neither chance nor an interval, and a range of its own.
    """
    alt = altair()
    values = []
    first = min(getattr(row, axes.progress) for row in rows)
    for row in rows:
        if row.kind == LOSS:
            # The batches of a mean begin at the evaluation before, which may have no loss.
            progress = getattr(row, axes.progress)
            evaluated = [getattr(other, axes.progress) for other in rows if other.run == row.run]
            begin = max((earlier for earlier in evaluated if earlier < progress), default=first)
            values.append({**data_of(row), 'begin': begin, 'batches': row.num_items})

    value = alt.Tooltip('value:Q', format='.3f')
    chart = alt.Chart(alt.InlineData(values=values)).encode(
        x=axes.x(axes.progress), color=axes.color, tooltip=['run:N', f'{axes.progress}:Q', 'batches:Q', value]
    )
    y = alt.Y('value:Q', title=None, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(tickCount=4))
    lines = chart.mark_rule().encode(y=y, x=axes.x('begin'), x2=f'{axes.progress}:Q')
    points = chart.mark_point(filled=True).encode(y=y)
    return alt.layer(lines, points)
