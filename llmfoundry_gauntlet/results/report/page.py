"""The report page: one self-contained HTML file.

Jinja escapes texts from records, and scripts get them only as JSON. A Content-Security-Policy forbids every request,
and every script and style except those of the page, which it lists by digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.errors import ConfigError, RecordError
from llmfoundry_gauntlet.results.report.comparison import Comparison, compare, corrected
from llmfoundry_gauntlet.results.report.frames import curve, marks, points
from llmfoundry_gauntlet.results.report.printing import LEGEND, difference_table
from llmfoundry_gauntlet.results.report.samples import KINDS, kinds_of, logprob, make_samples
from llmfoundry_gauntlet.results.report.scores import RecordedRun, ScoreRow, find_runs, headlines
from llmfoundry_gauntlet.results.report.tables import MINUS, Cell, Column, Table, shortened, visible
from llmfoundry_gauntlet.results.runs import Run, read_run
from llmfoundry_gauntlet.types import Measure

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

NOT_ASKED = Measure(value=None, reason='this run was not asked it')
OTHER_TASKS = 'tasks outside the gauntlet'
UNIT = (-0.02, 1.02)  # so that a point at 0 or 1 is whole
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

Chart = tuple[str, Any]  # title and Altair chart
Line = tuple[str, str]  # kind and name of a headline number
PACKAGE = 'llmfoundry_gauntlet.results.report'
TITLE = 'Eval Gauntlet'
NEEDS = ('altair', 'jinja2', 'vl_convert')
EXTRA = "the report needs packages that are not installed ({}): pip install 'llmfoundry-gauntlet[report]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page under its own heading; `notes` are paragraphs, `texts` have a title each."""

    name: str
    title: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()


def make_sections(runs: Sequence[RecordedRun], results: Sequence[Run]) -> list[Section]:
    """Return the sections of a page without empty ones; `results` are the runs' last evaluations."""
    sections = [
        composites_section(runs),
        tasks_section(runs),
        score_section(runs),
        comparison_section(runs, results),
        evaluations_section(runs),
    ]
    return [one for one in sections if one.tables or one.notes]


def composites_section(runs: Sequence[RecordedRun]) -> Section:
    """Return averages and categories: over training if a run has several evaluations, else side by side."""
    lines = headlines(run.last for run in runs)
    shown = [line for kind in ('average', 'category') for line in lines if line[0] == kind]
    if not shown:
        return Section(name='scores', title='Scores', notes=['The runs have no gauntlet, so there are no composites.'])
    if all(len(run.evaluations) == 1 for run in runs):
        charts = point_charts('Averages and categories', last_rows(runs, shown), zero=True)
    else:
        rows_of = {line[1]: [row for row in all_rows(runs, line) if row.batch is not None] for line in shown}
        charts = [(name, curve(rows)) for name, rows in rows_of.items() if marks(rows)]
    table = Table(
        title='Composites',
        columns=[Column('Composite'), *score_columns(runs, 'Score')],
        groups=[[[line[1], *cells(runs, line)] for line in shown]],
    )
    if len(runs) == 1:
        rows = [[*row, interval_text(row[1])] for row in table.rows]
        table = replace(table, columns=[*table.columns, Column('95 % interval')], groups=[rows])
    notes = [composite_note(runs)]
    return Section(name='scores', title='Scores', notes=notes, charts=charts, tables=[table])


def composite_note(runs: Sequence[RecordedRun]) -> str:
    """Return the definition of composites in the first gauntlet."""
    composites = [run.last.results.composites for run in runs]
    gauntlet = next(found.gauntlet for found in composites if found is not None)
    if not gauntlet.subtract_random_baseline:
        meaning = 'Composites are weighted means of accuracies.'
    elif not gauntlet.rescale_accuracy:
        meaning = f'Composites are weighted means of accuracy {MINUS} chance.'
    else:
        meaning = 'Composites are weighted means of accuracies rescaled so that 0 is chance and 1 is perfect.'
    several = any(len(run.evaluations) > 1 for run in runs)
    last = ' Tables show the last evaluation of each run.' if several else ''
    return f'{meaning} ± is one standard error; bands and bars are 95 % intervals over items.{last}'


def tasks_section(runs: Sequence[RecordedRun]) -> Section:
    """Return the accuracies of tasks, by category."""
    lines = [line for line in headlines(run.last for run in runs) if line[0] == 'task']
    if not lines:
        return Section(name='tasks', title='Tasks')
    category = {task: name for run in reversed(runs) for task, name in run.last.task_categories.items()}
    columns = [Column('Task'), *score_columns(runs, 'Accuracy'), Column('Chance'), Column('Majority class')]
    if len(runs) == 1:
        columns += [*map(count_column, ('Items', 'Unscored', 'Truncated')), Column('Seconds')]
    first = runs[0].last
    charts: list[Chart] = []
    rows: list[list[Cell]] = []
    for name in dict.fromkeys([*category.values(), OTHER_TASKS]):
        mine = [line for line in lines if category.get(line[1], OTHER_TASKS) == name]
        charts += point_charts(name, last_rows(runs, mine), domain=UNIT)
        for line in mine:
            found = cells(runs, line)
            chance = next((cell.chance for cell in found if isinstance(cell, ScoreRow)), None)
            row: list[Cell] = [line[1], *found, chance, first.majorities.get(line[1])]
            if len(runs) == 1:
                task = first.results.tasks[line[1]]
                ran = task.metrics is not None
                row += [task.num_items, task.num_unscored, task.num_truncated] if ran else [None] * 3
                row.append(first.results.timing.tasks.get(line[1]))
            rows.append([*row, name])
    return Section(
        name='tasks',
        title='Tasks',
        notes=['Accuracy of each task with its 95 % interval; the tick marks chance.'],
        charts=charts,
        tables=[Table(title='Tasks', columns=[*columns, Column('Category')], groups=[rows])],
    )


def score_section(runs: Sequence[RecordedRun]) -> Section:
    """Return SCORE's metrics for each dataset: a table by perturbation, and accuracy by variant."""
    rows = [replace(row, run=run.name) for run in runs for row in run.last.rows if row.kind == 'perturbation']
    names = list(dict.fromkeys(row.name for row in rows))
    charts: list[Chart] = []
    tables: list[Table] = []
    for name in names:
        variants = [row for row in rows if (row.name, row.metric) == (name, BY_VARIANT)]
        variants = [replace(row, name=(row.part or '').rpartition(':')[2]) for row in variants]
        charts += point_charts(name.replace('/', ': accuracy by '), variants, domain=UNIT)
    found = {(row.name, row.run, row.metric): row for row in rows if row.part is None}
    for dataset in dict.fromkeys(name.partition('/')[0] for name in names):
        pairs = [(name, run.name) for name in names if name.startswith(f'{dataset}/') for run in runs]
        heads = [f'{name.partition("/")[2]}{f" {run}" if len(runs) > 1 else ""}' for name, run in pairs]
        cells: list[list[Cell]] = []
        for metric in SCORE_METRICS:  # the reason of a perturbation that did not run applies to all of them
            known = [found.get((*pair, metric)) or found.get((*pair, None)) or NOT_ASKED for pair in pairs]
            cells.append([metric, *known])
        tables.append(Table(title=dataset, columns=[*map(Column, ('Metric', *heads))], groups=[cells]))
    notes = ['The same questions asked in several ways: accuracy, and how often two answers to one question agree.']
    return Section(name='score', title='SCORE', notes=notes if tables else (), charts=charts, tables=tables)


def comparison_section(runs: Sequence[RecordedRun], results: Sequence[Run]) -> Section:
    """Return each run compared with the first, or a single run's last evaluation with its first."""
    pairs = [(runs[0].name, run.name, results[0], one) for run, one in zip(runs[1:], results[1:], strict=True)]
    first, *further = runs[0].evaluations
    if len(runs) == 1 and further:
        pairs = [(first.name, further[-1].name, read_run(first.folder), results[0])]
    notes: list[str] = []
    found: dict[str, Comparison] = {}
    for one, other, *compared in pairs:
        title = f'{other} {MINUS} {one}'
        try:
            found[title] = compare(*compared)
        except RecordError as error:
            notes.append(f'{title} cannot be compared: {"; ".join(error.problems)}')
    tables: list[Table] = []
    for title, comparison in zip(found, corrected(list(found.values())), strict=True):
        table = difference_table(comparison)
        notes += [f'{title}: {warning}' for warning in table.warnings]
        tables.append(replace(table, title=title, columns=[Column('Score'), *table.columns[1:]]))
    if tables:
        notes.insert(0, f'Items are paired; {LEGEND}.')
    return Section(name='comparison', title='Comparison', notes=notes, tables=tables)


def evaluations_section(runs: Sequence[RecordedRun]) -> Section:
    """Return the cost of each evaluation, and the settings of the last ones."""
    rows: list[list[Cell]] = []
    for run in runs:
        for one in run.evaluations:
            timing, environment = one.record['timing'], one.record.get('environment') or {}
            name = one.name if len(runs) == 1 else f'{run.name} {one.name}'
            counts = [timing.get(key) for key in ('model_tokens', 'batches', 'reused_items')]
            words = [str(environment.get(key) or '') for key in ('device', 'precision', 'num_ranks')]
            rows.append([name, timing['seconds'], *counts, *words])
    columns = [Column('Evaluation'), Column('Seconds')]
    columns += map(count_column, ('Tokens', 'Batches', 'Reused items'))
    columns += map(Column, ('Device', 'Precision', 'Ranks'))
    settings = {run.name: {key: run.last.record.get(key) for key in SETTINGS} for run in runs}
    return Section(
        name='evaluations',
        title='Evaluations and settings',
        tables=[Table(title='Evaluations', columns=columns, groups=[rows])],
        texts=[(f'Settings of {name}', json.dumps(one, indent=2, default=str)) for name, one in settings.items()],
    )


def count_column(name: str) -> Column:
    """Return a column of counts."""
    return Column(name, '{:,}'.format)


def score_columns(runs: Sequence[RecordedRun], name: str) -> list[Column]:
    """Return a column for each run: its name, or this one for a single run."""
    return [Column(name)] if len(runs) == 1 else [Column(run.name) for run in runs]


def cells(runs: Sequence[RecordedRun], line: Line) -> list[Cell]:
    """Return a number as the last evaluation of each run has it."""
    return [run.last.headline.get(line, NOT_ASKED) for run in runs]


def interval_text(cell: Cell) -> str:
    """Return the 95 % interval of a score, empty if unknown."""
    if not isinstance(cell, ScoreRow) or cell.low is None:
        return ''
    return f'{cell.low:.3f} to {cell.high:.3f}'.replace('-', MINUS)


def all_rows(runs: Sequence[RecordedRun], line: Line) -> list[ScoreRow]:
    """Return a number in all evaluations, under the names of the runs."""
    found = [(run.name, one.headline.get(line)) for run in runs for one in run.evaluations]
    return [replace(row, run=name) for name, row in found if row is not None]


def last_rows(runs: Sequence[RecordedRun], lines: Sequence[Line]) -> list[ScoreRow]:
    """Return numbers in the last evaluations, under the names of the runs."""
    found = [(run.name, run.last.headline.get(line)) for line in lines for run in runs]
    return [replace(row, run=name) for name, row in found if row is not None]


def point_charts(title: str, rows: Sequence[ScoreRow], **settings: Any) -> list[Chart]:
    """Return a chart of the scores that have a value, none without any."""
    return [(title, points(rows, **settings))] if marks(rows) else []


def make_page(
    folders: Sequence[Path],
    *,
    title: str | None = None,
    samples: int = 5,
    data_root: str | None = None,
    with_prompts: bool = True,
) -> str:
    """Return the HTML of a page over the evaluations at or below these folders, with this many samples of each task.

    `data_root` is the folder of the data files, `None` for the recorded one; without `with_prompts` none are read.
    Raise GauntletError.
    """
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise ConfigError(EXTRA.format(', '.join(missing)))
    from jinja2.utils import htmlsafe_json_dumps
    from markupsafe import Markup

    runs = find_runs(folders)
    results = [read_run(run.last.folder) for run in runs]
    sections = make_sections(runs, results)
    shown = make_samples(results, samples, data_root=data_root, with_prompts=with_prompts)
    templates = resources.files(PACKAGE) / 'templates'
    style, script = ((templates / name).read_text(encoding='utf-8') for name in ('page.css', 'page.js'))
    scripts = [chart_library(), script]
    charts = []
    for chart in (chart for section in sections for _, chart in section.charts):  # without what all of them share
        spec = chart.properties(width='container').to_dict()
        charts.append({key: value for key, value in spec.items() if key not in ('$schema', 'config')})
    return (
        make_environment()
        .get_template('page.html')
        .render(
            title=title or default_title(runs),
            version=version('llmfoundry-gauntlet'),
            runs=runs,
            sections=sections,
            samples=shown,
            kinds=KINDS,
            per_task=samples,
            sample_tasks=list(dict.fromkeys(sample.key.task for sample in shown)),
            footnotes={},
            style=Markup(style),
            scripts=list(map(Markup, scripts)),
            digests={'style': digest(style), 'scripts': list(map(digest, scripts))},
            data=htmlsafe_json_dumps(charts, separators=(',', ':'), allow_nan=False),
        )
    )


def default_title(runs: Sequence[RecordedRun]) -> str:
    """Return the name of a single run's model, else of the gauntlet."""
    name = (runs[0].last.record['model'] or {}).get('name')
    return f'{TITLE}: {shortened(str(name), 80)}' if len(runs) == 1 and name else TITLE


def make_environment() -> Environment:
    """Return a template environment that escapes all values and writes unprintable characters as escapes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        is_text = isinstance(value, str | Path) and not isinstance(value, Markup)
        return visible(str(value)) if is_text else value

    environment = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(breakable=breakable, exact=repr, typographic=typographic, excerpt=excerpt)
    environment.globals.update(kinds_of=kinds_of, logprob=logprob)
    return environment


def breakable(text: str) -> Markup:
    """Return a name, escaped, that a browser breaks after `_` and `/` rather than within a word."""
    from markupsafe import Markup, escape

    return Markup(re.sub('[_/]', '\\g<0><wbr>', str(escape(visible(text)))))


def typographic(number: str) -> str:
    """Return a number with a typographic minus sign, and 0 without any."""
    return re.sub(r'^-(?=[0.]+$)', '', number.strip()).replace('-', MINUS)


def excerpt(text: str, head: int, tail: int) -> str:
    """Return the text, or the beginning and end of a long one with the number of omitted characters between."""
    num_left_out = len(text) - head - tail
    if num_left_out <= 0:
        return text
    return f'{text[:head]}\n[{num_left_out:,} of {len(text):,} characters left out]\n{text[len(text) - tail :]}'


@cache
def chart_library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    script = vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')
    return script.replace('</script', '<\\/script').replace('<!--', '<\\!--').replace('\r', '')


def digest(text: str) -> str:
    """Return the name of a script or a style in a security policy."""
    return f'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'
