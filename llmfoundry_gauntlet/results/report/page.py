"""The report page: one self-contained HTML file.

Jinja escapes texts from records, and scripts get them only as JSON. A Content-Security-Policy forbids every request,
and every script and style except those of the page, which it lists by digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.errors import ConfigError, RecordError
from llmfoundry_gauntlet.metrics.keys import ITEMS
from llmfoundry_gauntlet.results.report.comparison import Comparison, compare
from llmfoundry_gauntlet.results.report.frames import Datum, curve, datum, mark, points
from llmfoundry_gauntlet.results.report.printing import LEGEND, difference_table, is_clear
from llmfoundry_gauntlet.results.report.samples import KINDS, kinds_of, logprob, make_samples
from llmfoundry_gauntlet.results.report.scores import (
    COUNTS,
    RecordedRun,
    ScoreRow,
    find_runs,
    headlines,
    interval,
    task_categories,
)
from llmfoundry_gauntlet.results.report.tables import MINUS, Cell, Column, Table, shortened, unique_labels, visible
from llmfoundry_gauntlet.results.runs import Run, read_run
from llmfoundry_gauntlet.types import Measure

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

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
KEPT = ('package_version', 'semantics', 'model', 'training', 'environment', 'config', 'identity')

Chart = tuple[str, Any]  # title and Vega-Lite specification
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
    lines = headlines(run.last for run in runs)
    sections = [
        composites_section(runs, lines),
        tasks_section(runs, [line for line in lines if line[0] == 'task']),
        score_section(runs),
        comparison_section(runs, results),
        evaluations_section(runs),
    ]
    return [one for one in sections if one.tables or one.notes]


def composites_section(runs: Sequence[RecordedRun], lines: Sequence[Line]) -> Section:
    """Return averages and categories: over training if a run has several evaluations, else side by side."""
    shown = [line for kind in ('average', 'category') for line in lines if line[0] == kind]
    if not shown:
        return Section(name='scores', title='Scores', notes=['The runs have no gauntlet, so there are no composites.'])
    if all(len(run.evaluations) == 1 for run in runs):
        data = last_data(runs, shown)
        charts = [('Averages and categories', finished(points(data, zero=True)))] if data else []
    else:
        courses = [(name, curve_data(runs, (kind, name))) for kind, name in shown]
        charts = [(name, finished(curve(data))) for name, data in courses if data]
    columns = [Column('Composite'), *score_columns(runs, 'Score')]
    columns += [Column('95 % interval')] if len(runs) == 1 else []
    rows = [[line[1], *cells(runs, line), *intervals(runs, line)] for line in shown]
    return Section(
        name='scores',
        title='Scores',
        notes=[composite_note(runs)],
        charts=charts,
        tables=[Table(title='Composites', columns=columns, groups=[rows])],
    )


def composite_note(runs: Sequence[RecordedRun]) -> str:
    """Return the definition of composites in the first gauntlet."""
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


def tasks_section(runs: Sequence[RecordedRun], lines: Sequence[Line]) -> Section:
    """Return the accuracies of tasks by category, and all numbers in a folded table."""
    if not lines:
        return Section(name='tasks', title='Tasks')
    category = {task: name for run in reversed(runs) for task, name in task_categories(run.last.record).items()}
    charts, rows = [], []
    majorities, record = runs[0].last.majorities, runs[0].last.record
    for name in dict.fromkeys([*category.values(), OTHER_TASKS]):
        mine = [line for line in lines if category.get(line[1], OTHER_TASKS) == name]
        if data := last_data(runs, mine):
            charts.append((name, finished(points(data, domain=(-MARGIN, 1 + MARGIN)))))
        for line in mine:
            found = cells(runs, line)
            chance = next((cell.chance for cell in found if isinstance(cell, ScoreRow)), None)
            row: list[Cell] = [line[1], *found, chance, majorities.get(line[1])]
            if len(runs) == 1:
                entry = record['tasks'].get(line[1], {})
                row += [*map(entry.get, COUNTS), record['timing']['tasks'].get(line[1])]
            rows.append([*row, name])
    columns = [Column('Task'), *score_columns(runs, 'Accuracy'), Column('Chance'), Column('Majority class')]
    if len(runs) == 1:
        columns += [*map(count_column, ('Items', 'Unscored', 'Truncated')), Column('Seconds')]
    return Section(
        name='tasks',
        title='Tasks',
        notes=['Accuracy of each task with its 95 % interval; the tick marks chance.'],
        charts=charts,
        tables=[Table(title='Tasks', columns=[*columns, Column('Category')], groups=[rows]), all_numbers(runs)],
    )


def all_numbers(runs: Sequence[RecordedRun]) -> Table:
    """Return every number of the last evaluations."""
    found = [{(row.name, row.part, row.metric): row for row in run.last.rows} for run in runs]
    keys = dict.fromkeys(key for one in found for key in one)
    return Table(
        title='All numbers',
        columns=[*map(Column, ('Score', 'Part', 'Metric')), *score_columns(runs, 'Value')],
        groups=[[[*(part or '' for part in key), *(one.get(key, NOT_ASKED) for one in found)] for key in keys]],
        is_long=True,
    )


def score_section(runs: Sequence[RecordedRun]) -> Section:
    """Return SCORE's metrics for each dataset: a table by perturbation, and accuracy by variant."""
    rows = [[row for row in run.last.rows if row.kind == 'perturbation'] for run in runs]
    charts, tables = [], []
    perturbations = list(dict.fromkeys(row.name for of_run in rows for row in of_run))
    for name in perturbations:
        data = [
            datum(replace(row, name=(row.part or '').rpartition(':')[2]), run.name)
            for run, of_run in zip(runs, rows, strict=True)
            for row in of_run
            if (row.name, row.metric) == (name, BY_VARIANT) and row.value is not None
        ]
        if data:
            title = f'{name.replace("/", ": accuracy by ")}'
            charts.append((title, finished(points(labelled(data), domain=(-MARGIN, 1 + MARGIN)))))
    found = [{(row.name, row.metric): row for row in of_run if row.part is None} for of_run in rows]
    for dataset in dict.fromkeys(name.partition('/')[0] for name in perturbations):
        names = [name for name in perturbations if name.startswith(f'{dataset}/')]
        pairs = [(name, place) for name in names for place in range(len(runs))]
        heads = [f'{name.partition("/")[2]}{f" {runs[place].name}" if len(runs) > 1 else ""}' for name, place in pairs]
        cells: list[list[Cell]] = []
        for metric in SCORE_METRICS:  # the reason of a perturbation that did not run stands for all of them
            known = [found[place].get((name, metric)) or found[place].get((name, None)) for name, place in pairs]
            cells.append([metric, *(row or NOT_ASKED for row in known)])
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
    charts: list[Chart] = []
    tables: list[Table] = []
    for one, other, *compared in pairs:
        title = f'{other} {MINUS} {one}'
        try:
            found = compare(*compared)
        except RecordError as error:
            notes.append(f'{title} cannot be compared: {"; ".join(error.problems)}')
            continue
        notes += [f'{title}: {warning}' for warning in found.warnings]
        charts += difference_charts(found, title)
        table = difference_table(found)
        columns = [Column('Score'), *table.columns[1:]]
        tables.append(replace(table, title=title, columns=columns, is_long=True))
    if tables:
        notes.insert(0, f'Items are paired; {LEGEND}.')
    return Section(name='comparison', title='Comparison', notes=notes, charts=charts, tables=tables)


def difference_charts(found: Comparison, title: str) -> list[Chart]:
    """Return the differences of composites, SCORE and tasks, each from the largest to the smallest."""
    charts = []
    for kind in ('composites', 'score', 'tasks'):
        known = [(name, one) for name, one in found.groups[kind].items() if one.difference.value is not None]
        known.sort(key=lambda pair: -(pair[1].difference.value or 0))
        names = [f'{"* " if is_clear(one) else ""}{name}' for name, one in known]
        measures = [one.difference for _, one in known]
        data = [mark(name, '', m.value, m.standard_error) for name, m in zip(names, measures, strict=True)]
        if data:
            head = f'{title}: {"SCORE" if kind == "score" else kind}'
            charts.append((head, finished(points(labelled(data), zero=True))))
    return charts


def evaluations_section(runs: Sequence[RecordedRun]) -> Section:
    """Return time, size and environment of each evaluation, and the settings of the last ones."""
    rows: list[list[Cell]] = []
    for run in runs:
        for one in run.evaluations:
            timing, environment = one.record['timing'], one.record.get('environment') or {}
            name = one.name if len(runs) == 1 else f'{run.name} {one.name}'
            numbers = [(one.record.get('metrics') or {}).get(ITEMS)]
            numbers += [timing.get(key) for key in ('model_tokens', 'batches', 'reused_items')]
            words = [environment.get(key) for key in ('device', 'precision', 'num_ranks')]
            words += [timing.get('scoring'), timing.get('generation', timing.get('replies'))]  # its name in 0.1
            counts = [None if number is None else int(number) for number in numbers]
            rows.append([name, timing['seconds'], *counts, *('' if word is None else str(word) for word in words)])
    columns = [Column('Evaluation'), Column('Seconds')]
    columns += map(count_column, ('Items', 'Tokens', 'Batches', 'Reused items'))
    columns += map(Column, ('Device', 'Precision', 'Ranks', 'Scoring', 'Generation'))
    records = {run.name: {key: run.last.record.get(key) for key in KEPT} for run in runs}
    return Section(
        name='evaluations',
        title='Evaluations and settings',
        tables=[Table(title='Evaluations', columns=columns, groups=[rows])],
        texts=[(f'Settings of {name}', json.dumps(one, indent=2, default=str)) for name, one in records.items()],
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


def intervals(runs: Sequence[RecordedRun], line: Line) -> list[Cell]:
    """Return the 95 % interval of a single run's score, empty if unknown."""
    if len(runs) > 1:
        return []
    row = runs[0].last.headline[line]
    found = interval(row.value, row.standard_error)
    return ['' if found is None else '{:.3f} to {:.3f}'.format(*found).replace('-', MINUS)]


def last_data(runs: Sequence[RecordedRun], lines: Iterable[Line]) -> list[Datum]:
    """Return the points of scores of the last evaluations, without those that have no value."""
    rows = [(run.name, run.last.headline.get(line)) for line in lines for run in runs]
    return labelled([datum(row, label) for label, row in rows if row is not None and row.value is not None])


def curve_data(runs: Sequence[RecordedRun], line: Line) -> list[Datum]:
    """Return the points of a number of all evaluations in training."""
    rows = [(run.name, evaluation.headline.get(line)) for run in runs for evaluation in run.evaluations]
    known = [(label, row) for label, row in rows if row is not None and row.value is not None]
    return labelled([datum(row, label) for label, row in known if row.batch is not None])


def labelled(data: Sequence[Datum]) -> list[Datum]:
    """Return marks with names and runs as labels for charts."""
    found = list(data)
    for key in ('name', 'run'):
        names = list(dict.fromkeys(one[key] for one in found))
        labels = dict(zip(names, unique_labels(names), strict=True))
        found = [{**one, key: labels[one[key]]} for one in found]
    return found


def finished(chart: Any) -> Any:
    """Return the specification of a chart as wide as its container, without the parts that all charts share."""
    spec = chart.properties(width='container').to_dict()
    return {key: value for key, value in spec.items() if key not in ('$schema', 'config')}


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
    charts = [spec for section in sections for _, spec in section.charts]
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
