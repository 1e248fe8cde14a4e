"""Print scores, comparisons, trends and estimates: as a table for the terminal, in Markdown, CSV or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.engine.ranks import Estimate
from llmfoundry_gauntlet.metrics.comparison import Difference, Trend
from llmfoundry_gauntlet.metrics.statistics import weighted_sum
from llmfoundry_gauntlet.results.files import RESULTS, measure_record
from llmfoundry_gauntlet.results.report.comparison import Comparison, Trends
from llmfoundry_gauntlet.results.report.scores import (
    RecordedEvaluation,
    ScoreRow,
    find_evaluations,
    headlines,
    score_name,
)
from llmfoundry_gauntlet.results.report.tables import (
    MINUS,
    Cell,
    Column,
    Table,
    as_markdown,
    plain,
    print_records,
    print_table,
)
from llmfoundry_gauntlet.types import Measure

CLEAR = 0.05  # a corrected p-value below it is marked
BATCHES = 1000  # of training, the unit of printed slopes
LEGEND = (
    f'* p below {CLEAR} after correction for the number of comparisons (Holm); detectable: minimum detectable effect '
    'at 80 % power; scores are over items with the same prompt in both runs'
)
COMPOSITE_KINDS = ('category', 'average')
SIGNED = '{:+.3f}'.format
DIFFERENCE_KEYS = ('p_value', 'p_holm', 'detectable', 'num_items', 'is_of_file')
OF_FILE = 'the same subset in both runs, so error, p and detectable are of the whole files, not of other items'
TREND_KEYS = ('noise', 'signal_to_noise')
RECORDS = ('csv', 'json')


def print_runs(folder: Path) -> None:
    """Print the scores of every evaluation at or below a folder, and where its files are."""
    print_scores(find_evaluations([folder]))


def print_scores(evaluations: Sequence[RecordedEvaluation], form: str = 'table') -> None:
    """Print the scores of evaluations as a 'table' with the paths of their files, or as 'markdown', 'csv' or 'json'."""
    if form in RECORDS:
        print_records(form, [asdict(row) for one in evaluations for row in one.rows])
    elif form == 'markdown':
        sys.stdout.write(as_markdown(scores_table(evaluations, with_errors=True)))
    else:
        print_table(with_seconds(scores_table(evaluations, with_errors=len(evaluations) == 1), evaluations))
        for one in evaluations:
            print(one.folder / RESULTS)


def scores_table(
    evaluations: Sequence[RecordedEvaluation], names: Sequence[str] | None = None, *, with_errors: bool
) -> Table:
    """Return a row per task and composite and a column per evaluation, named by batch or folder.

    For a single evaluation, the accuracies of guessing and of the majority class are shown beside tasks.
    """
    names = names or [one.name for one in evaluations]
    if len(set(names)) < len(names):
        names = [str(one.folder) for one in evaluations]
    columns = [Column(''), *(Column(name, with_error=with_errors) for name in names)]
    majority = evaluations[0].majorities
    is_single = len(evaluations) == 1
    if is_single:
        columns += [Column(name, absent='') for name in ('chance', 'majority')]
    groups: dict[str, list[list[Cell]]] = {}
    for kind, name in headlines(evaluations):
        cells: list[Cell] = [one.headline.get((kind, name)) for one in evaluations]
        chance = cells[0].chance if isinstance(cells[0], ScoreRow) else None
        beside = [chance, majority.get(name) if kind == 'task' else None] if is_single else []
        groups.setdefault(kind, []).append([name, *cells, *beside])
    return Table(
        title='Eval Gauntlet',
        columns=columns,
        groups=list(groups.values()),
        composites=frozenset(name for kind, name in headlines(evaluations) if kind in COMPOSITE_KINDS),
        notes=absences(evaluations),
    )


def with_seconds(table: Table, evaluations: Sequence[RecordedEvaluation]) -> Table:
    """Return the table with the seconds of each evaluation as its last row."""
    seconds = [f'{one.record["timing"]["seconds"]:.1f}' for one in evaluations]
    empty = [''] * (len(table.columns) - len(seconds) - 1)
    return replace(table, groups=[*table.groups, [['seconds', *seconds, *empty]]])


def absences(evaluations: Sequence[RecordedEvaluation]) -> list[str]:
    """Return why scores in the table are absent: a line per reason, one for all composites."""
    names: dict[str, dict[str, None]] = {}
    composites: dict[str, None] = {}
    for row in (row for one in evaluations for row in one.headline.values()):
        if row.reason is not None and row.kind in COMPOSITE_KINDS:
            composites[row.name] = None
        elif row.reason is not None:
            names.setdefault(row.reason, {})[row.name if row.kind == 'task' else score_name(row)] = None
    lines = [f'{reason}: {", ".join(of_reason)}' for reason, of_reason in names.items()]
    if composites:
        lines.append(f'composites over tasks without a score are absent: {", ".join(composites)}')
    return lines


def print_comparisons(compared: Sequence[Comparison], metric: str | None = None, form: str = 'table') -> None:
    """Print each comparison as a table, or all of them as 'markdown', 'csv' or 'json'.

    With CSV, warnings go to standard error.
    """
    if form == 'json':
        print_records(form, [comparison_record(comparison) for comparison in compared])
    elif form == 'csv':
        rows = [
            {'first_run': one.first, 'second_run': one.second, 'kind': kind, 'name': name}
            | {key: value for part in ('first', 'second', 'difference') for key, value in flat(found, part).items()}
            | {'reason': found.difference.reason}
            | {key: getattr(found, key) for key in DIFFERENCE_KEYS}
            for one in compared
            for kind, group in one.groups.items()
            for name, found in group.items()
        ]
        warnings = list(dict.fromkeys(warning for comparison in compared for warning in comparison.warnings))
        print_records(form, rows, warnings=warnings)
    else:
        tables = [difference_table(comparison, metric) for comparison in compared]
        if form == 'markdown':
            sys.stdout.write('\n'.join(f'{plain(table.title)}\n\n{as_markdown(table)}' for table in tables))
        else:
            for table in tables:
                print_table(table)


def flat(found: Difference | Trend, part: str) -> dict[str, float | None]:
    """Return one of the measures of a row of CSV, and its standard error."""
    measure: Measure = getattr(found, part)
    error = f'{part}_standard_error' if part in ('first', 'second') else 'standard_error'
    return {part: measure.value, error: measure.standard_error}


def difference_table(comparison: Comparison, metric: str | None = None) -> Table:
    """Return two runs with a row per task and composite."""
    columns = [Column(''), Column('first'), Column('second'), Column('difference', SIGNED, with_error=True)]
    columns += [Column('p', p_text), Column('p (Holm)', starred), Column('detectable'), Column('items', str)]
    return Table(
        title=f'{metric or "accuracy"}: {comparison.second} {MINUS} {comparison.first}',
        columns=columns,
        groups=[
            [
                [name, one.first, one.second, one.difference, one.p_value, one.p_holm, one.detectable, one.num_items]
                for name, one in group.items()
            ]
            for group in comparison.groups.values()
        ],
        composites=frozenset(comparison.groups['composites']),
        legend=LEGEND,
        notes=by_reason(comparison),
        warnings=comparison.warnings,
    )


def by_reason(comparison: Comparison) -> list[str]:
    """Return why differences are absent, one line per reason, and which errors are those of whole files."""
    names: dict[str, list[str]] = {}
    for group in comparison.groups.values():
        for name, one in group.items():
            if one.difference.reason is not None:
                names.setdefault(one.difference.reason, []).append(name)
    of_file = [name for group in comparison.groups.values() for name, one in group.items() if one.is_of_file]
    notes = [f'{reason}: {", ".join(found)}' for reason, found in names.items()]
    return [*notes, f'{OF_FILE}: {", ".join(of_file)}'] if of_file else notes


def p_text(value: float) -> str:
    """Return a p-value."""
    return '<0.0001' if value < 0.0001 else f'{value:.4f}'


def starred(value: float) -> str:
    """Return a corrected p-value, with a star below the significance level."""
    return p_text(value) + ('*' if value < CLEAR else ' ')


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison for JSON."""
    groups = {
        kind: {
            name: {part: measure_record(getattr(found, part)) for part in ('first', 'second', 'difference')}
            | {key: getattr(found, key) for key in DIFFERENCE_KEYS}
            for name, found in group.items()
        }
        for kind, group in comparison.groups.items()
    }
    left_out = {
        key: {
            'num_items': list(items.num_items),
            'num_common': items.num_shared,
            'num_same_words': len(items.keys),
            'settings': list(items.settings),
        }
        for key, items in comparison.common.items()
        if len(items.keys) < max(items.num_items)
    }
    runs = {'first': comparison.first, 'second': comparison.second}
    return {**runs, **groups, 'left_out': left_out, 'warnings': list(comparison.warnings)}


def print_trends(found: Trends, form: str = 'table') -> None:
    """Print the trend of each score over the checkpoints of a run, as a table or as 'markdown', 'csv' or 'json'.

    With CSV and JSON, slopes are per batch, and warnings go to standard error.
    """
    noise = {name: {key: getattr(one, key) for key in TREND_KEYS} for name, one in found.trends.items()}
    if form == 'json':
        content = {name: {'slope': measure_record(one.slope), **noise[name]} for name, one in found.trends.items()}
        print_records(form, [], content, found.warnings)
    elif form == 'csv':
        rows = [
            {'name': name, **flat(one, 'slope'), 'reason': one.slope.reason, **noise[name]}
            for name, one in found.trends.items()
        ]
        print_records(form, rows, warnings=found.warnings)
    elif form == 'markdown':
        sys.stdout.write(as_markdown(trends_table(found)))
    else:
        print_table(trends_table(found))


def trends_table(found: Trends) -> Table:
    """Return a row for each score."""
    columns = [Column(''), Column(f'slope per {BATCHES} batches', SIGNED, with_error=True)]
    columns += [Column('noise from step to step'), Column('signal to noise', '{:.1f}'.format)]
    rows: list[list[Cell]] = [
        [
            name,
            one.slope if one.slope.value is None else weighted_sum([one.slope], [BATCHES]),
            one.noise,
            one.signal_to_noise,
        ]
        for name, one in found.trends.items()
    ]
    return Table(
        title=f'{len(found.batches)} checkpoints, ba{found.batches[0]} to ba{found.batches[-1]}',
        columns=columns,
        groups=[[row for row in rows if (row[0] in found.composites) == is_last] for is_last in (False, True)],
        composites=found.composites,
        notes=[f'{one.slope.reason}: {name}' for name, one in found.trends.items() if one.slope.reason is not None],
        warnings=found.warnings,
    )


def print_estimate(estimate: Estimate, form: str = 'table') -> None:
    """Print what each task and all together would take: a table, or 'markdown', 'csv' or 'json'."""
    rows = [asdict(task) for task in estimate.tasks]
    names = [name for name in (rows[0] if rows else ()) if name != 'task']
    rows.append({'task': 'all', **{name: sum(row[name] for row in rows) for name in names}})
    if form in RECORDS:
        content = {**asdict(estimate), 'total_seconds': estimate.total_seconds}
        print_records(form, rows, content if form == 'json' else None)
    else:
        counts = ('items', 'tokens', 'generated tokens at most', 'truncated')
        columns = [Column(''), *(Column(name, counted) for name in counts), Column('seconds', '{:.1f}'.format)]
        cells = [list(row.values()) for row in rows]
        table = Table(title='Dry run', columns=columns, groups=[cells[:-1], cells[-1:]])
        if form == 'markdown':
            sys.stdout.write(as_markdown(replace(table, notes=summary(estimate))))
        else:
            print_table(table)
            print(*summary(estimate), sep='\n')


def counted(value: int) -> str:
    """Return a count, '' for 0."""
    return f'{value:,}' if value else ''


def summary(estimate: Estimate) -> list[str]:
    """Return the total time, its parts, and how it was estimated."""
    parts = ', '.join(f'{name} {seconds:.1f} s' for name, seconds in estimate.seconds.items())
    ranks = f' on {estimate.num_ranks} ranks' if estimate.num_ranks > 1 else ''
    return [
        f'about {estimate.total_seconds:.1f} s{ranks}: {parts}',
        f'before it, reading data and loading the model: {estimate.preparing_seconds:.1f} s here',
        *estimate.notes,
    ]
