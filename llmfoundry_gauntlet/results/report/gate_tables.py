"""Print the verdict on a run and the rows that it follows from: as a table, in Markdown, CSV or JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.errors import COMMAND_LINE, listed
from llmfoundry_gauntlet.metrics.gate import (
    AVERAGES,
    CATEGORIES,
    OK,
    SCORE,
    TASKS,
    UNCLEAR,
    WORSE,
    GateRow,
)
from llmfoundry_gauntlet.results.files import measure_record
from llmfoundry_gauntlet.results.report.gate import Gate
from llmfoundry_gauntlet.results.report.printing import SIGNED, absences
from llmfoundry_gauntlet.results.report.scores import short_names
from llmfoundry_gauntlet.results.report.tables import MINUS, Cell, Column, Table, TableRow, print_tables
from llmfoundry_gauntlet.types import Measure

REQUIRED = '\u2020'  # marks rows that must be ok
ORDER = (WORSE, OK, UNCLEAR, None)  # of verdicts in a table
SHOWN_DIGITS = 16  # of a digest
MORE_ITEMS = 'more items, or a larger margin'
NOT_COVERED = 'the error is over items; another seed of training {second} is not covered'
LEGEND = (
    f'{REQUIRED}: required to be ok; any row that is worse blocks too',
    'worse, ok: shown to be lower, or not to be lower, by more than the margin; with a margin of 0 no row can be ok',
    'p worse: how probable it is that an equal run is this low on any such row (Holm); p ok: how probable it is that a '
    'run that is lower by the margin is this high',
    'power: how often an equal run is ok; margin 80 %: the margin with which it is in 80 % of cases',
)


def print_gate(gate: Gate, form: str = 'table') -> None:
    """Print a verdict with all rows; the last line of a table and of Markdown is what the verdict does not cover."""
    print_tables(form, [gate_table(gate)], [flat_row(row) for row in gate.rows], gate_record(gate))
    if form in ('table', 'markdown'):
        for line in closing_lines(gate):
            print(line)


def gate_table(gate: Gate) -> Table:
    """Return a row for each score, what is worse first and then the largest differences; averages come last."""
    names = short_names([Path(gate.first), Path(gate.second)])
    confidence = 100 * (1 - 2 * gate.settings.alpha)
    parts = []
    for family in (TASKS, SCORE, CATEGORIES, AVERAGES):
        of_family = [row for row in gate.rows if row.family == family and row.compared.difference.value is not None]
        of_family.sort(key=lambda row: (ORDER.index(row.verdict), -abs(row.compared.difference.value or 0.0)))
        parts.append([table_row(row) for row in of_family])
    return Table(
        title=f'gate: {names[1]} {MINUS} {names[0]}',
        columns=[
            Column('diff', SIGNED),
            Column(f'{confidence:g} % interval'),
            Column('margin', '{:.3g}'.format),
            Column('verdict'),
            Column('p worse', probability),
            Column('p ok', probability),
            Column('power', '{:.2f}'.format),
            Column('margin 80 %'),
        ],
        parts=parts,
        legend=LEGEND,
        notes=[*notes_on_power(gate), *absences(absent_rows(gate))],
        warnings=gate.warnings,
    )


def table_row(row: GateRow) -> TableRow:
    """Return a row of the table."""
    shown = row.evidence
    cells: list[Cell] = [row.compared.difference.value]
    if shown is None:
        cells += [None, row.margin, None, None, None, None, None]
    else:
        ends = f'[{shown.low:+.3f}, {shown.high:+.3f}]'
        cells += [ends, row.margin, row.verdict, row.p_holm, shown.p_ok, shown.power, shown.margin_needed]
    return TableRow(
        name=row.name,
        cells=cells,
        is_bold=row.family in (CATEGORIES, AVERAGES),
        mark=REQUIRED if row.is_required else '',
    )


def probability(value: float) -> str:
    """Return a probability with three digits."""
    return '<0.001' if value < 0.001 else f'{value:.3f}'


def notes_on_power(gate: Gate) -> list[str]:
    """Return which unclear rows would be unclear in most cases, were both models equally good."""
    names = [row.name for row in gate.rows if row.is_underpowered]
    return [f'{MORE_ITEMS}, as the power is below 0.5: {listed(names)}'] if names else []


def absent_rows(gate: Gate) -> list[tuple[str, Measure]]:
    """Return the differences without a standard error, with the names of their rows."""
    return [(row.name, row.compared.difference) for row in gate.rows if row.evidence is None]


def closing_lines(gate: Gate) -> list[str]:
    """Return the verdict with its reason, the policy, and what it does not cover."""
    source = 'the options' if gate.settings.source == COMMAND_LINE else gate.settings.source
    digest = '' if gate.settings.sha256 is None else f' (sha256 {gate.settings.sha256[:SHOWN_DIGITS]})'
    return [
        f'{gate.second} against {gate.first}: {gate.verdict}: {reason_of(gate)}',
        f'margins of {source}{digest}; alpha {gate.settings.alpha:g}',
        NOT_COVERED.format(second=gate.second),
    ]


def reason_of(gate: Gate) -> str:
    """Return why the verdict is what it is."""
    worse = [row.name for row in gate.rows if row.verdict == WORSE]
    if worse:
        return f'shown to be worse: {listed(worse)}'
    nothing_worse = 'no row is shown to be worse'
    if not gate.required:
        return f'{nothing_worse}, and nothing is required'
    unclear = [row for row in gate.required if row.verdict != OK]
    rows = listed(f'{row.name} (margin {row.margin:.3g})' for row in unclear or gate.required)
    if not unclear:
        return f'{nothing_worse}, and these are shown not to be: {rows}'
    hint = f'; {MORE_ITEMS}' if any(row.is_underpowered for row in unclear) else ''
    return f'{nothing_worse}, but these may be: {rows}{hint}'


def gate_record(gate: Gate) -> dict[str, Any]:
    """Return a verdict for JSON."""
    settings = gate.settings
    rows: dict[str, dict[str, Any]] = {}
    for row in gate.rows:
        rows.setdefault(row.family, {})[row.name] = row_record(row)
    policy = None
    if settings.source != COMMAND_LINE:
        policy = {'path': settings.source, 'sha256': settings.sha256, **asdict(settings.policy)}
    return {
        'verdict': gate.verdict,
        'reason': reason_of(gate),
        'first': {'folder': gate.first, 'sha256': gate.digests[0]},
        'second': {'folder': gate.second, 'sha256': gate.digests[1]},
        'policy': policy,
        'alpha': settings.alpha,
        'allow_different': settings.allow_different,
        'required': [row.name for row in gate.required],
        'rows': rows,
        'warnings': list(gate.warnings),
        'not_covered': NOT_COVERED.format(second=gate.second),
    }


def row_record(row: GateRow) -> dict[str, Any]:
    """Return a row for JSON: both scores, the difference, the evidence and the verdict."""
    compared = row.compared
    record: dict[str, Any] = {
        'verdict': row.verdict,
        'required': row.is_required,
        'margin': row.margin,
        'difference': compared.difference.value,
        'first': measure_record(compared.first),
        'second': measure_record(compared.second),
        'num_items': compared.num_items,
    }
    if row.evidence is None:
        return {**record, 'reason': compared.difference.reason or 'no standard error'}
    shown = row.evidence
    return {
        **record,
        'standard_error': shown.standard_error,
        'interval': [shown.low, shown.high],
        'p_worse': shown.p_worse,
        'p_worse_holm': row.p_holm,
        'p_ok': shown.p_ok,
        'power': shown.power,
        'margin_needed': shown.margin_needed,
        'hint': MORE_ITEMS if row.is_underpowered else None,
    }


CSV_COLUMNS = (  # of a row with a standard error; others lack some
    'verdict',
    'required',
    'margin',
    'difference',
    'standard_error',
    'p_worse',
    'p_worse_holm',
    'p_ok',
    'power',
    'margin_needed',
    'num_items',
    'reason',
)


def flat_row(row: GateRow) -> dict[str, Any]:
    """Return a row for CSV."""
    record = row_record(row)
    low, high = record.get('interval', (None, None))
    columns = {name: record.get(name) for name in CSV_COLUMNS}
    return {'family': row.family, 'name': row.name, **columns, 'low': low, 'high': high}
