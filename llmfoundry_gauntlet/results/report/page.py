"""The report page: one self-contained HTML file.

Jinja escapes texts from records, and scripts get them only as JSON. A Content-Security-Policy forbids every request,
and every script and style except those of the page, which it lists by digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.errors import ConfigError, RecordError
from llmfoundry_gauntlet.results.report.comparison import Comparison, compare, corrected
from llmfoundry_gauntlet.results.report.frames import LOSS, curves
from llmfoundry_gauntlet.results.report.printing import (
    OTHER_TASKS,
    TITLE,
    difference_table,
    origin_banner,
    scores_table,
    share_notes,
    truncation_banner,
)
from llmfoundry_gauntlet.results.report.samples import KINDS, deciding, kinds_of, make_samples
from llmfoundry_gauntlet.results.report.scores import RecordedEvaluation, RecordedRun, ScoreRow, find_runs
from llmfoundry_gauntlet.results.report.tables import MINUS, Cell, Column, Row, Table, ends_of, shortened, visible
from llmfoundry_gauntlet.results.runs import Run, read_run

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

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

Charts = Mapping[str, Any]  # Altair charts by title
PACKAGE = 'llmfoundry_gauntlet.results.report'
NEEDS = ('altair', 'jinja2', 'vl_convert')
EXTRA = "the report needs packages that are not installed ({}): pip install 'llmfoundry-gauntlet[report]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page under its own heading; `notes` are paragraphs, `charts` have a heading, `texts` a title."""

    name: str
    title: str
    notes: Sequence[str] = ()
    charts: Mapping[str, Charts] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


def make_sections(runs: Sequence[RecordedRun], results: Sequence[Run]) -> list[Section]:
    """Return the sections of a page without empty ones; `results` are the runs' last evaluations."""
    is_training = any(len(run.evaluations) > 1 for run in runs)
    sections = [
        *([curves_section(runs)] if is_training else []),
        changes_section(runs, results),
        *([tasks_section(runs)] if is_training else []),
        scores_section(runs),
        score_section(runs),
        evaluations_section(runs),
    ]
    return [one for one in sections if one.tables or one.charts or one.notes]


def curves_section(runs: Sequence[RecordedRun]) -> Section:
    """Return the learning curves of averages and categories, and the training loss, with one axis."""
    losses = [replace(row, run=run.name) for run in runs for one in run.evaluations for row in loss_rows(one)]
    rows = [*rows_of(runs, 'average'), *losses, *rows_of(runs, 'category')]
    charts = curves(rows, baseline=0.0 if is_rescaled(runs) else None)
    if not charts:
        return Section(name='curves', title='Learning curves')
    notes = [f'{composite_note(runs)} Bands are 95 % intervals over items.']
    if losses:
        notes.append('The training loss is that of the batch before each evaluation.')
    return Section(name='curves', title='Learning curves', notes=notes, charts={'': charts})


def tasks_section(runs: Sequence[RecordedRun]) -> Section:
    """Return the learning curves of tasks, by category."""
    categories = categories_of(runs)
    charts: dict[str, dict[str, Any]] = {name: {} for name in [*dict.fromkeys(categories.values()), OTHER_TASKS]}
    for name, chart in curves(rows_of(runs, 'task'), domain=(0, 1)).items():
        charts[categories.get(name, OTHER_TASKS)][name] = chart.properties(height=90)
    found = {name: group for name, group in charts.items() if group}
    notes = ['Accuracy with its 95 % interval; the dashed line is chance.']
    return Section(name='tasks', title='Tasks', notes=notes if found else (), charts=found)


def loss_rows(evaluation: RecordedEvaluation) -> list[ScoreRow]:
    """Return the training loss of the last batch before an evaluation, if it is known."""
    training = evaluation.results.training or {}
    if (loss := training.get('loss')) is None:
        return []
    batch, token = evaluation.batch, training.get('token')
    return [ScoreRow(run='', batch=batch, token=token, kind=LOSS, name='training loss', value=loss)]


def rows_of(runs: Sequence[RecordedRun], kind: str) -> list[ScoreRow]:
    """Return the headline numbers of a kind in all evaluations, under the names of the runs."""
    found = [(run.name, row) for run in runs for one in run.evaluations for row in one.headline.values()]
    return [replace(row, run=name) for name, row in found if row.kind == kind]


def categories_of(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Return the category of each task that is in one."""
    return {task: name for run in reversed(runs) for task, name in run.last.task_categories.items()}


def gauntlet_of(runs: Sequence[RecordedRun]) -> GauntletSpec | None:
    """Return the first gauntlet of the runs, `None` if none has one."""
    composites = [run.last.results.composites for run in runs]
    return next((found.gauntlet for found in composites if found is not None), None)


def is_rescaled(runs: Sequence[RecordedRun]) -> bool:
    """Return whether composites are 0 at chance."""
    gauntlet = gauntlet_of(runs)
    return gauntlet is not None and gauntlet.subtract_random_baseline


def composite_note(runs: Sequence[RecordedRun]) -> str:
    """Return the definition of composites in the first gauntlet."""
    gauntlet = gauntlet_of(runs)
    if gauntlet is None:
        return 'The runs have no gauntlet, so there are no composites.'
    if not gauntlet.subtract_random_baseline:
        return 'Composites are weighted means of accuracies.'
    if not gauntlet.rescale_accuracy:
        return f'Composites are weighted means of accuracy {MINUS} chance.'
    return 'Composites are weighted means of accuracies rescaled so that 0 is chance and 1 is perfect.'


def scores_section(runs: Sequence[RecordedRun]) -> Section:
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


def recorded_shares(evaluation: RecordedEvaluation) -> dict[str, dict[str, float]]:
    """Return the share of each task in the variance of each average; {} for averages of older records."""
    composites = evaluation.results.composites
    return {} if composites is None else {name: one.variance_shares for name, one in composites.averages.items()}


def with_counts(table: Table, evaluation: RecordedEvaluation) -> Table:
    """Return the table with the items and seconds of each task."""

    def counts(row: Row) -> list[Cell]:
        task = evaluation.results.tasks.get(row.name)
        return [task.num_items, evaluation.results.timing.tasks.get(row.name)] if task is not None else [None, None]

    columns = [Column('items', '{:,}'.format, absent=''), Column('seconds', '{:.1f}'.format, absent='')]
    parts = [[replace(row, cells=[*row.cells, *counts(row)]) for row in part] for part in table.parts]
    return replace(table, columns=[*table.columns, *columns], parts=parts)


def score_section(runs: Sequence[RecordedRun]) -> Section:
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
            [Row(name=part or name, cells=[found.get((*one, name, part)) for one in columns]) for name, part in lines]
            for lines in ([(name, None) for name in SCORE_METRICS], [(BY_VARIANT, part) for part in variants])
        ]
        heading = [Column(head, with_error=True, absent='') for head in heads]
        tables.append(Table(title=dataset, columns=heading, parts=parts))
    notes = ['The same questions asked in several ways: accuracy, and how often two answers to one question agree.']
    return Section(name='score', title='SCORE', notes=notes if tables else (), tables=tables)


def changes_section(runs: Sequence[RecordedRun], results: Sequence[Run]) -> Section:
    """Return each run compared with the first, or a single run's last evaluation with the one before."""
    pairs = [(runs[0].name, run.name, results[0], one) for run, one in zip(runs[1:], results[1:], strict=True)]
    title, is_training = 'Comparison', len(runs) == 1 and len(runs[0].evaluations) > 1
    if is_training:
        before, last = runs[0].evaluations[-2:]
        pairs = [(before.name, last.name, read_run(before.folder), results[0])]
        title = f'What changed since {before.name}'
    notes: list[str] = []
    found: dict[str, Comparison] = {}
    for one, other, *compared in pairs:
        name = f'{other} {MINUS} {one}'
        try:
            found[name] = compare(*compared)
        except RecordError as error:
            notes.append(f'{name} cannot be compared: {"; ".join(error.problems)}')
    tables: list[Table] = []
    for name, comparison in zip(found, corrected(list(found.values())), strict=True):
        table = replace(difference_table(comparison), title=name)
        tasks, *others = table.parts
        if is_training and len(tasks) > MOST_CHANGED:
            table = replace(table, parts=[tasks[:MOST_CHANGED], *others])
            notes.append(f'The {MOST_CHANGED} of {len(tasks)} tasks that changed most; gauntlet compare shows all.')
        tables.append(table)
    return Section(name='changes', title=title, notes=notes, tables=tables)


def evaluations_section(runs: Sequence[RecordedRun]) -> Section:
    """Return the cost of each evaluation, and the settings of the last ones."""
    rows: list[Row] = []
    for run in runs:
        for one in run.evaluations:
            timing, environment = one.record['timing'], one.record.get('environment') or {}
            counts = [timing.get(key) for key in ('model_tokens', 'batches', 'reused_items')]
            words = [str(environment.get(key) or '') for key in ('device', 'precision', 'num_ranks')]
            name = one.name if len(runs) == 1 else f'{run.name} {one.name}'
            rows.append(Row(name=name, cells=[timing['seconds'], *counts, *words]))
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
    last = [run.last for run in runs]
    banners = [origin_banner(last), *dict.fromkeys(truncation_banner([one]) for one in last)]
    shown = make_samples(results, samples, data_root=data_root, with_prompts=with_prompts)
    templates = resources.files(PACKAGE) / 'templates'
    style, script = ((templates / name).read_text(encoding='utf-8') for name in ('page.css', 'page.js'))
    scripts = [chart_library(), script]
    charts = []
    found = [chart for section in sections for group in section.charts.values() for chart in group.values()]
    for chart in found:  # without what all of them share
        spec = chart.properties(width='container').to_dict()
        charts.append({key: value for key, value in spec.items() if key not in ('$schema', 'config')})
    return (
        make_environment()
        .get_template('page.html')
        .render(
            title=title or default_title(runs),
            version=version('llmfoundry-gauntlet'),
            runs=runs,
            banners=[f'{text[:1].upper()}{text[1:]}.' for text in banners if text],
            sections=sections,
            samples=shown,
            kinds=KINDS,
            per_task=samples,
            sample_tasks=list(dict.fromkeys(sample.key.task for sample in shown)),
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
    environment.globals.update(kinds_of=kinds_of, deciding=deciding, bars=bars)
    return environment


def breakable(text: str) -> Markup:
    """Return a name, escaped, that a browser breaks after `_` and `/` rather than within a word or '10-shot'."""
    from markupsafe import Markup, escape

    broken = re.sub('[_/]', r'\g<0><wbr>', str(escape(visible(text))))
    return Markup(re.sub(r'(?<=<wbr>)\d+-shot$', r'<span class="shots">\g<0></span>', broken))


def typographic(number: str) -> str:
    """Return a number with a typographic minus sign, and 0 without any."""
    return re.sub(r'^-(?=[0.]+$)', '', number.strip()).replace('-', MINUS)


def bars(row: Row, domain: tuple[float, float]) -> tuple[str | None, list[tuple[int, list[str]]]]:
    """Return where the table draws chance, and the low end, value and high end of each run, on an axis of 100."""
    low, high = domain

    def places(*values: float) -> list[str]:
        return [f'{100 * (min(max(value, low), high) - low) / (high - low):.1f}' for value in values]

    scores = [(run, cell) for run, cell in enumerate(row.cells) if isinstance(cell, ScoreRow)]
    drawn = []
    for run, cell in scores:
        if cell.value is not None:
            ends = ends_of(cell) or (cell.value, cell.value)
            drawn.append((run, places(ends[0], cell.value, ends[1])))
    chances = [cell.chance for _, cell in scores if cell.chance is not None]
    return (places(chances[0])[0] if chances else None), drawn


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
