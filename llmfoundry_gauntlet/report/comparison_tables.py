"""Differences between runs and learning curves of checkpoints, in the terminal and in Markdown, CSV and JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmfoundry_gauntlet.records.results import measure_record
from llmfoundry_gauntlet.records.runs import Run
from llmfoundry_gauntlet.report.common_items import CommonItems
from llmfoundry_gauntlet.report.comparison import Comparison, Courses
from llmfoundry_gauntlet.report.formats import as_csv, as_json, bold, markdown_list, markdown_table, plain
from llmfoundry_gauntlet.report.tables import ABSENT
from llmfoundry_gauntlet.scores.comparison import Course, Difference
from llmfoundry_gauntlet.values import Measure

CLEAR = 0.05  # a corrected p-value below it is marked
KINDS = ('tasks', 'composites', 'score')
STAR = f'\\* p below {CLEAR} after correction for the number of comparisons (Holm)'  # in Markdown
SAME_ITEMS = 'scores are over the items that both were asked in the same words'
BATCHES = 1000  # of training, the unit of printed slopes
MINUS = '\u2212'


def print_comparisons(
    compared: Sequence[Comparison], metric: str | None = None, form: str = 'table', console: Console | None = None
) -> None:
    """Print two runs as a table, or the differences of several from the first; or 'markdown', 'csv', 'json'.

    With CSV, warnings go to standard error.
    """
    if form != 'table':
        in_markdown = partial(comparison_markdown, metric=metric)
        writers: dict[str, Callable[[Any], str]] = {
            'markdown': in_markdown,
            'csv': comparison_csv,
            'json': comparison_json,
        }
        sys.stdout.write(writers[form](compared))
        if form == 'csv':
            print_warnings(all_warnings(compared))
        return
    console = console or Console(width=None if Console().is_terminal else 130)
    console.print(pair_table(compared[0], metric) if len(compared) == 1 else many_table(compared, metric))
    console.print(
        f'* p below {CLEAR} after correction for the number of comparisons (Holm); detectable: the smallest difference '
        f'seen in 80 % of cases; {SAME_ITEMS}',
        style='dim',
        highlight=False,
    )
    for comparison in compared:
        for name, reason in absences(comparison).items():
            console.print(f'{ABSENT} {reason}: {name}', style='dim', highlight=False, markup=False)
    for warning in all_warnings(compared):
        console.print(f'warning: {warning}', highlight=False, markup=False)


def all_warnings(compared: Sequence[Comparison]) -> list[str]:
    """Return each warning once."""
    return list(dict.fromkeys(warning for comparison in compared for warning in comparison.warnings))


def print_warnings(warnings: Sequence[str]) -> None:
    """Print warnings to standard error."""
    for warning in warnings:
        print(f'warning: {warning}', file=sys.stderr)


def pair_table(comparison: Comparison, metric: str | None) -> Table:
    """Return a table of two runs with a row per task and composite."""
    table = Table(title=title(metric, f'{comparison.second} {MINUS} {comparison.first}'), title_justify='left')
    for name in ('', 'first', 'second', 'difference', 'p', 'p (Holm)', 'detectable', 'items'):
        table.add_column(name, justify='right' if name else 'left')
    for group in groups(comparison):
        for name, found in group.items():
            cells = [number(found.first.value), number(found.second.value), with_error(found.difference)]
            cells += [p_cell(found.p_value), p_cell(found.p_holm) + mark(found), number(found.detectable)]
            table.add_row(escape(name), *cells, str(found.num_items))
        table.add_section()
    return table


def many_table(compared: Sequence[Comparison], metric: str | None) -> Table:
    """Return a table of the first run and the differences of the others from it."""
    table = Table(title=title(metric, f'differences from {compared[0].first}'), title_justify='left')
    table.add_column('')
    for name in (compared[0].first, *(comparison.second for comparison in compared)):
        table.add_column(escape(name), justify='right', overflow='fold')
    for place in range(len(groups(compared[0]))):
        parts = [groups(comparison)[place] for comparison in compared]
        for name in dict.fromkeys(name for part in parts for name in part):
            found = [part.get(name) for part in parts]
            values = [one.first.value for one in found if one is not None]  # each over the items of a pair
            firsts = [number(value) for value in values if value is not None] or [ABSENT]
            cells = [ABSENT if one is None else with_error(one.difference) + mark(one) for one in found]
            table.add_row(escape(name), ' / '.join(dict.fromkeys(firsts)), *cells)
        table.add_section()
    return table


def print_courses(runs: Sequence[Run], found: Courses, form: str = 'table', console: Console | None = None) -> None:
    """Print the trend of each score over the checkpoints, as a table or as 'markdown', 'csv' or 'json'.

    With CSV and JSON, warnings go to standard error.
    """
    courses = found.courses
    if form == 'markdown':
        notes = markdown_list([f'warning: {warning}' for warning in found.warnings])
        sys.stdout.write(courses_markdown(courses, runs[0].results) + notes)
        return
    if form != 'table':
        writers: dict[str, Callable[[Any], str]] = {'csv': courses_csv, 'json': courses_json}
        sys.stdout.write(writers[form](courses))
        print_warnings(found.warnings)
        return
    console = console or Console(width=None if Console().is_terminal else 130)
    table = Table(title=f'{len(runs)} checkpoints, ba{runs[0].batch} to ba{runs[-1].batch}', title_justify='left')
    for name in ('', f'slope per {BATCHES} batches', 'noise from step to step', 'signal to noise'):
        table.add_column(name, justify='right' if name else 'left')
    for name, one in courses.items():
        cells = [with_error(one.slope, BATCHES), number(one.noise), number(one.signal_to_noise, 1)]
        table.add_row(escape(name), *cells)
    console.print(table)
    for name, one in courses.items():
        if one.slope.reason is not None:
            console.print(f'{ABSENT} {one.slope.reason}: {name}', style='dim', highlight=False, markup=False)
    for warning in found.warnings:
        console.print(f'warning: {warning}', highlight=False, markup=False)


def comparison_markdown(compared: Sequence[Comparison], metric: str | None = None) -> str:
    """Return comparisons in Markdown, composites first; a table for each run but the first."""
    parts = []
    for comparison in compared:
        header = ['', 'first', 'second', 'difference', '±', 'p', 'p (Holm)', 'detectable', 'items']
        rows = [
            [
                bold(name) if group is comparison.composites else plain(name),
                *(number(measure.value) for measure in (found.first, found.second)),
                *value_and_error(found.difference),
                *(p_cell(found.p_value), p_cell(found.p_holm) + mark(found).replace('*', r'\*').rstrip()),
                *(number(found.detectable), str(found.num_items)),
            ]
            for group in (comparison.composites, comparison.tasks, comparison.score)
            for name, found in group.items()
        ]
        head = plain(f'{metric or "accuracy"}: {comparison.second} {MINUS} {comparison.first}')
        reasons = [f'{name}: {reason}' for name, reason in absences(comparison).items()]
        notes = markdown_list([*reasons, *(f'warning: {warning}' for warning in comparison.warnings)])
        parts.append(f'{head}\n\n{markdown_table(header, rows)}\n{STAR}\n{notes}')
    return '\n'.join(parts)


def courses_markdown(courses: Mapping[str, Course], tasks: Collection[str]) -> str:
    """Return learning curves in Markdown, composites first."""
    header = ['', f'slope per {BATCHES} batches', '±', 'noise from step to step', 'signal to noise']
    rows = [
        [
            plain(name) if name in tasks else bold(name),
            *value_and_error(found.slope, BATCHES),
            number(found.noise),
            number(found.signal_to_noise, 1),
        ]
        for name, found in sorted(courses.items(), key=lambda entry: entry[0] in tasks)
    ]
    reasons = [f'{name}: {found.slope.reason}' for name, found in courses.items() if found.slope.reason is not None]
    return markdown_table(header, rows) + markdown_list(reasons)


def comparison_csv(compared: Sequence[Comparison]) -> str:
    """Return a row for each difference, in full precision."""
    columns = ['first_run', 'second_run', 'kind', 'name', 'first', 'first_standard_error', 'second']
    columns += ['second_standard_error', 'difference', 'standard_error', 'reason']
    columns += ['p_value', 'p_holm', 'detectable', 'num_items']
    rows = []
    for comparison in compared:
        for kind, group in zip(KINDS, groups(comparison), strict=True):
            for name, found in group.items():
                measures = {'first': found.first, 'second': found.second, 'difference': found.difference}
                row: dict[str, Any] = {place: measure.value for place, measure in measures.items()}
                row.update({f'{place}_standard_error': measures[place].standard_error for place in ('first', 'second')})
                row.update(first_run=comparison.first, second_run=comparison.second, kind=kind, name=name)
                row.update(standard_error=found.difference.standard_error, reason=found.difference.reason)
                row.update({field: getattr(found, field) for field in columns[-4:]})
                rows.append(row)
    return as_csv(rows, columns)


def courses_csv(courses: Mapping[str, Course]) -> str:
    """Return a row for each score; slopes are per batch."""
    rows = [
        {
            'name': name,
            'slope': found.slope.value,
            'standard_error': found.slope.standard_error,
            'reason': found.slope.reason,
            'noise': found.noise,
            'signal_to_noise': found.signal_to_noise,
        }
        for name, found in courses.items()
    ]
    return as_csv(rows, ['name', 'slope', 'standard_error', 'reason', 'noise', 'signal_to_noise'])


def comparison_json(compared: Sequence[Comparison]) -> str:
    """Return all that was found as JSON."""
    return as_json(
        [
            {
                'first': comparison.first,
                'second': comparison.second,
                **{
                    kind: {name: difference_record(found) for name, found in group.items()}
                    for kind, group in zip(KINDS, groups(comparison), strict=True)
                },
                'left_out': {
                    key: left_out_record(items)
                    for key, items in comparison.common.items()
                    if len(items.keys) < max(items.num_items)
                },
                'warnings': list(comparison.warnings),
            }
            for comparison in compared
        ]
    )


def left_out_record(items: CommonItems) -> dict[str, Any]:
    """Return how many items of a task are compared, and why others are not, for JSON."""
    return {
        'num_items': list(items.num_items),
        'num_common': items.num_shared,
        'num_same_words': len(items.keys),
        'settings': list(items.settings),
    }


def courses_json(courses: Mapping[str, Course]) -> str:
    """Return learning curves as JSON; slopes are per batch."""
    return as_json(
        {
            name: {
                'slope': measure_record(found.slope),
                'noise': found.noise,
                'signal_to_noise': found.signal_to_noise,
            }
            for name, found in courses.items()
        }
    )


def difference_record(found: Difference) -> dict[str, Any]:
    """Return a difference for JSON."""
    return {
        'first': measure_record(found.first),
        'second': measure_record(found.second),
        'difference': measure_record(found.difference),
        'p_value': found.p_value,
        'p_holm': found.p_holm,
        'detectable': found.detectable,
        'num_items': found.num_items,
    }


def groups(comparison: Comparison) -> tuple[Mapping[str, Difference], ...]:
    """Return the groups of differences whose p-values are corrected together."""
    return comparison.tasks, comparison.composites, comparison.score


def absences(comparison: Comparison) -> dict[str, str]:
    """Return why differences are absent, by name."""
    return {
        name: found.difference.reason
        for group in groups(comparison)
        for name, found in group.items()
        if found.difference.reason is not None
    }


def title(metric: str | None, runs: str) -> str:
    """Return the title of a table."""
    return escape(f'{metric or "accuracy"}: {runs}')


def number(value: float | None, places: int = 3) -> str:
    """Return a number, a dash where there is none."""
    return ABSENT if value is None else f'{value:.{places}f}'


def with_error(measure: Measure, scale: float = 1.0) -> str:
    """Return a difference or slope with its standard error."""
    if measure.value is None:
        return ABSENT
    value = f'{scale * measure.value:+.3f}'
    return value if measure.standard_error is None else f'{value} ± {scale * measure.standard_error:.3f}'


def value_and_error(measure: Measure, scale: float = 1.0) -> tuple[str, str]:
    """Return the same in two cells."""
    value, _, error = with_error(measure, scale).partition(' ± ')
    return value, error


def p_cell(value: float | None) -> str:
    """Return a p-value, a dash where there is none."""
    if value is None:
        return ABSENT
    return '<0.0001' if value < 0.0001 else f'{value:.4f}'


def mark(found: Difference) -> str:
    """Return a star if the runs differ clearly."""
    return '*' if is_clear(found) else ' '


def is_clear(found: Difference) -> bool:
    """Return whether the corrected p-value is below the level of significance."""
    return found.p_holm is not None and found.p_holm < CLEAR
