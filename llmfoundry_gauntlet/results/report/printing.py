"""Print scores, comparisons, trends and estimates: as a table for the terminal, in Markdown, CSV or JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.engine.ranks import Estimate
from llmfoundry_gauntlet.metrics.comparison import Course, Difference
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
    ABSENT,
    MINUS,
    Cell,
    Column,
    Table,
    as_csv,
    as_json,
    as_markdown,
    plain,
    print_table,
    print_warnings,
)
from llmfoundry_gauntlet.types import Measure

CLEAR = 0.05  # a corrected p-value below it is marked
BATCHES = 1000  # of training, the unit of printed slopes
LEGEND = (
    f'* p below {CLEAR} after correction for the number of comparisons (Holm); detectable: the smallest difference '
    'seen in 80 % of cases; scores are over the items that both were asked in the same words'
)
COMPOSITE_KINDS = ('category', 'average')
SIGNED = '{:+.3f}'.format
KEYS = {  # of JSON and CSV
    Difference: ('first', 'second', 'difference', 'p_value', 'p_holm', 'detectable', 'num_items'),
    Course: ('slope', 'noise', 'signal_to_noise'),
}


def print_runs(folder: Path) -> None:
    """Print the scores of every evaluation at or below a folder, and where its files are."""
    print_scores(find_evaluations([folder]))


def print_scores(evaluations: Sequence[RecordedEvaluation], form: str = 'table') -> None:
    """Print the scores of evaluations as a 'table' with the paths of their files, or as 'markdown', 'csv' or 'json'."""
    if form == 'json':
        sys.stdout.write(as_json([asdict(row) for one in evaluations for row in one.rows]))
    elif form == 'csv':
        names = [field.name for field in fields(ScoreRow)]
        sys.stdout.write(as_csv([asdict(row) for one in evaluations for row in one.rows], names))
    elif form == 'markdown':
        sys.stdout.write(as_markdown(scores_table(evaluations, with_errors=True)))
    else:
        print_table(timed_table(evaluations, with_errors=len(evaluations) == 1))
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
    composites = frozenset(name for kind, name in headlines(evaluations) if kind in COMPOSITE_KINDS)
    notes = absences(evaluations[-1].rows)
    return Table(
        title='Eval Gauntlet', columns=columns, groups=list(groups.values()), composites=composites, notes=notes
    )


def timed_table(
    evaluations: Sequence[RecordedEvaluation], names: Sequence[str] | None = None, *, with_errors: bool
) -> Table:
    """Return the same table with the seconds of each evaluation as its last row."""
    table = scores_table(evaluations, names, with_errors=with_errors)
    seconds: list[Cell] = [f'{one.record["timing"]["seconds"]:.1f}' for one in evaluations]
    empty = [''] * (len(table.columns) - len(seconds) - 1)
    return replace(table, groups=[*table.groups, [['seconds', *seconds, *empty]]])


def absences(rows: Iterable[ScoreRow]) -> list[str]:
    """Return why scores are absent: a line per reason, one for all composites."""
    by_reason: dict[str, dict[str, None]] = {}
    composites: list[str] = []
    for row in rows:
        if row.reason is None or row.part is not None:
            continue
        if row.kind in COMPOSITE_KINDS:
            composites.append(row.name)
        elif row.kind == 'task' or row.metric in ('accuracy', None):
            name = row.name if row.kind == 'task' else score_name(row)
            by_reason.setdefault(row.reason, {})[name] = None
    lines = [f'{reason}: {", ".join(names)}' for reason, names in by_reason.items()]
    if composites:
        lines.append(f'composites over tasks without a score are absent: {", ".join(composites)}')
    return lines


def print_comparisons(compared: Sequence[Comparison], metric: str | None = None, form: str = 'table') -> None:
    """Print two runs as a table, or the differences of several from the first; or 'markdown', 'csv', 'json'.

    With CSV, warnings go to standard error.
    """
    warnings = list(dict.fromkeys(warning for comparison in compared for warning in comparison.warnings))
    tables = [difference_table(comparison, metric) for comparison in compared]
    if form == 'json':
        sys.stdout.write(as_json([comparison_record(comparison) for comparison in compared]))
    elif form == 'csv':
        columns = ['first_run', 'second_run', 'kind', 'name', 'first', 'first_standard_error', 'second']
        columns += ['second_standard_error', 'difference', 'standard_error', 'reason']
        columns += ['p_value', 'p_holm', 'detectable', 'num_items']
        rows = [
            {
                'first_run': one.first,
                'second_run': one.second,
                'kind': kind,
                'name': name,
                **row_of(found, 'difference'),
            }
            for one in compared
            for kind, group in one.groups.items()
            for name, found in group.items()
        ]
        sys.stdout.write(as_csv(rows, columns))
        print_warnings(warnings)
    elif form == 'markdown':
        sys.stdout.write('\n'.join(f'{plain(table.title)}\n\n{as_markdown(table)}' for table in tables))
    elif len(tables) == 1:
        print_table(tables[0])
    else:
        notes = list(dict.fromkeys(note for table in tables for note in table.notes))
        print_table(replace(several_table(compared, metric), notes=notes, warnings=warnings))


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
    """Return why differences are absent, one line per reason."""
    names: dict[str, list[str]] = {}
    for group in comparison.groups.values():
        for name, one in group.items():
            if one.difference.reason is not None:
                names.setdefault(one.difference.reason, []).append(name)
    return [f'{reason}: {", ".join(found)}' for reason, found in names.items()]


def several_table(compared: Sequence[Comparison], metric: str | None) -> Table:
    """Return the first run's scores, which are over the items of each pair, and the differences of the others."""
    groups: list[list[list[Cell]]] = []
    for kind in compared[0].groups:
        parts = [comparison.groups[kind] for comparison in compared]
        groups.append([])
        for name in dict.fromkeys(name for part in parts for name in part):
            found = [part.get(name) for part in parts]
            firsts = [f'{one.first.value:.3f}' for one in found if one is not None and one.first.value is not None]
            cells = [ABSENT if one is None else difference_text(one) for one in found]
            groups[-1].append([name, ' / '.join(dict.fromkeys(firsts)) or ABSENT, *cells])
    first = compared[0].first
    return Table(
        title=f'{metric or "accuracy"}: differences from {first}',
        columns=[Column(name) for name in ('', first, *(comparison.second for comparison in compared))],
        groups=groups,
        composites=frozenset(name for comparison in compared for name in comparison.groups['composites']),
        legend=LEGEND,
    )


def difference_text(found: Difference) -> str:
    """Return a difference with its error and a star if it is clear."""
    value, error = found.difference.value, found.difference.standard_error
    if value is None:
        return f'{ABSENT} '
    return f'{value:+.3f}{"" if error is None else f" ± {error:.3f}"}{"*" if is_clear(found) else " "}'


def is_clear(found: Difference) -> bool:
    """Return whether the corrected p-value is below the significance level."""
    return found.p_holm is not None and found.p_holm < CLEAR


def p_text(value: float) -> str:
    """Return a p-value."""
    return '<0.0001' if value < 0.0001 else f'{value:.4f}'


def starred(value: float) -> str:
    """Return a corrected p-value, with a star below the significance level."""
    return p_text(value) + ('*' if value < CLEAR else ' ')


def record_of(found: Difference | Course) -> dict[str, Any]:
    """Return a difference or a trend for JSON."""
    values = {name: getattr(found, name) for name in KEYS[type(found)]}
    return {name: measure_record(value) if isinstance(value, Measure) else value for name, value in values.items()}


def row_of(found: Difference | Course, main: str) -> dict[str, Any]:
    """Return the same for CSV; standard error and reason without a prefix are those of the `main` measure."""
    row = {name: getattr(found, name) for name in KEYS[type(found)]}
    for name, value in list(row.items()):
        if isinstance(value, Measure):
            error = 'standard_error' if name == main else f'{name}_standard_error'
            row.update({name: value.value, error: value.standard_error})
    return {**row, 'reason': getattr(found, main).reason}


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison for JSON."""
    return {
        'first': comparison.first,
        'second': comparison.second,
        **{kind: {name: record_of(one) for name, one in group.items()} for kind, group in comparison.groups.items()},
        'left_out': {
            key: {
                'num_items': list(items.num_items),
                'num_common': items.num_shared,
                'num_same_words': len(items.keys),
                'settings': list(items.settings),
            }
            for key, items in comparison.common.items()
            if len(items.keys) < max(items.num_items)
        },
        'warnings': list(comparison.warnings),
    }


def print_trends(found: Trends, form: str = 'table') -> None:
    """Print the trend of each score over the checkpoints of a run, as a table or as 'markdown', 'csv' or 'json'.

    With CSV and JSON, slopes are per batch, and warnings go to standard error.
    """
    if form == 'json':
        sys.stdout.write(as_json({name: record_of(one) for name, one in found.trends.items()}))
        print_warnings(found.warnings)
    elif form == 'csv':
        rows = [{'name': name, **row_of(one, 'slope')} for name, one in found.trends.items()]
        columns = ['name', 'slope', 'standard_error', 'reason', 'noise', 'signal_to_noise']
        sys.stdout.write(as_csv(rows, columns))
        print_warnings(found.warnings)
    elif form == 'markdown':
        sys.stdout.write(as_markdown(trends_table(found)))
    else:
        print_table(trends_table(found))


def trends_table(found: Trends) -> Table:
    """Return a row for each score."""
    columns = [Column(''), Column(f'slope per {BATCHES} batches', SIGNED, with_error=True)]
    columns += [Column('noise from step to step'), Column('signal to noise', '{:.1f}'.format)]
    rows: list[list[Cell]] = [
        [name, per_batches(one.slope), one.noise, one.signal_to_noise] for name, one in found.trends.items()
    ]
    return Table(
        title=f'{len(found.batches)} checkpoints, ba{found.batches[0]} to ba{found.batches[-1]}',
        columns=columns,
        groups=[[row for row in rows if (row[0] in found.composites) == is_last] for is_last in (False, True)],
        composites=found.composites,
        notes=[f'{one.slope.reason}: {name}' for name, one in found.trends.items() if one.slope.reason is not None],
        warnings=found.warnings,
    )


def per_batches(slope: Measure) -> Measure:
    """Return a slope per batch as one per `BATCHES`."""
    return slope if slope.value is None else weighted_sum([slope], [BATCHES])


def print_estimate(estimate: Estimate, form: str = 'table') -> None:
    """Print what each task and all together would take: a table, or 'markdown', 'csv' or 'json'."""
    rows = [asdict(task) for task in estimate.tasks]
    names = [name for name in (rows[0] if rows else ()) if name != 'task']
    rows.append({'task': 'all', **{name: sum(row[name] for row in rows) for name in names}})
    if form == 'csv':
        sys.stdout.write(as_csv(rows, list(rows[0])))
    elif form == 'json':
        sys.stdout.write(as_json({**asdict(estimate), 'total_seconds': estimate.total_seconds}))
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
