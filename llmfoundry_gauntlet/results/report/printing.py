"""Print scores, comparisons, trends and estimates: as a table for the terminal, in Markdown, CSV or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from llmfoundry_gauntlet.engine.ranks import Estimate
from llmfoundry_gauntlet.errors import UnwrittenError, plural
from llmfoundry_gauntlet.metrics.comparison import p_value
from llmfoundry_gauntlet.metrics.statistics import variance_shares, weighted_sum
from llmfoundry_gauntlet.results.files import RESULTS, composite_record, measure_record
from llmfoundry_gauntlet.results.report.comparison import Comparison, Trends
from llmfoundry_gauntlet.results.report.scores import (
    KINDS,
    MAJORITY,
    ScoreRow,
    score_name,
    short_names,
)
from llmfoundry_gauntlet.results.report.tables import (
    MINUS,
    Cell,
    Column,
    Table,
    TableRow,
    ends_of,
    print_tables,
)
from llmfoundry_gauntlet.results.runs import Run, find_evaluations, recorded_run
from llmfoundry_gauntlet.types import Measure

CLEAR = 0.05  # a corrected p-value below it is marked, and a trend with one is shown with its signal to noise
SHOWN_SHARES = 3  # of an average's variance, the largest
BATCHES = 1000  # of training, the unit of printed slopes over at least as many
TITLE = 'Eval Gauntlet'
SAMPLE_DATA = 'sample data, not the benchmark'
SHORTENED = '\u2020'  # marks tasks with shortened prompts
MANY_AT_LIMIT = 0.1  # of a task's generations; with more a note names the limit
SHOWN_AT_LIMIT = 5  # tasks named of those with the same limit
OTHER_TASKS = 'tasks outside the gauntlet'
LEGEND = (
    f'* p below {CLEAR} after correction for the number of comparisons (Holm); MDE: minimum detectable effect '
    'at 80 % power; scores are over items with the same prompt in both runs'
)
TREND_LEGEND = (
    'noise: variation between checkpoints; signal/noise: change over the run divided by it, where the slope is not '
    f'within its error (p below {CLEAR})'
)
NO_ERROR = 'no standard error, which takes two questions scored independently'
ALIKE = 'no standard error, as all items have the same value'
NO_COMPOSITE = 'composites over tasks without a score are absent'
NO_DIFFERENCE = 'no error, as every item changed alike or not at all'
SIGNED = '{:+.3f}'.format
TARGETS_LEGEND = (
    'error: standard error of the average, at most so much above that of all items. MDE: the '
    'smallest difference that two runs will show (80 % power), if they agree by chance only; paired runs of similar '
    'models show smaller ones'
)
DIFFERENCE_KEYS = ('p_value', 'p_holm', 'detectable', 'num_items')
SIDES = ('first', 'second')  # of a comparison


def print_runs(folder: Path) -> None:
    """Print the scores of every evaluation at or below a folder, and where its files are."""
    print_scores(find_evaluations([folder]))


def print_unwritten(error: UnwrittenError, form: str = 'table') -> None:
    """Print the scores that could not be written."""
    print_scores([recorded_run(error.folder, error.record)], form, with_paths=False)


def print_scores(evaluations: Sequence[Run], form: str = 'table', *, with_paths: bool = True) -> None:
    """Print the scores of evaluations as a 'table' with the paths of their files, or as 'markdown', 'csv' or 'json'."""
    table = scores_table(evaluations, with_errors=form == 'markdown' or len(evaluations) == 1)
    if form == 'table':
        seconds = [f'{one.scores.timing.seconds:.1f}' for one in evaluations]
        empty = [''] * (len(table.columns) - len(seconds))
        table = replace(table, parts=[*table.parts, [TableRow(name='seconds', cells=[*seconds, *empty])]])
    print_tables(form, [table], [asdict(row) for one in evaluations for row in one.rows])
    for one in evaluations if form == 'table' and with_paths else ():
        print(one.folder / RESULTS)


def scores_table(evaluations: Sequence[Run], names: Sequence[str] | None = None, *, with_errors: bool) -> Table:
    """Return the tasks by category, then averages and SCORE, with a column per evaluation.

    For a single evaluation, the accuracies of guessing and of the majority class are shown beside tasks. Scores that
    no evaluation has are not in the table but in its notes.
    """
    names = names or short_names([one.folder for one in evaluations])
    columns = [Column(name, with_error=with_errors) for name in names]
    majority = {row.name: row.value for row in evaluations[0].rows if row.metric == MAJORITY and row.part is None}
    is_single = len(evaluations) == 1
    if is_single:
        columns += [Column(name, absent='') for name in ('chance', 'majority')]
    shortened = {
        key: '' if task.effective_shots is None else f'{task.effective_shots:.1f} shots on average'
        for one in evaluations
        for key, task in one.scores.tasks.items()
        if task.num_shortened
    }

    def heading(name: str) -> TableRow:
        return TableRow(name=name, cells=[''] * len(columns), is_bold=True)

    def rows(kind: str, names: Iterable[str]) -> Iterator[TableRow]:
        for name in names:
            found = [one.headline.get((kind, name)) for one in evaluations]
            if all(row is None or row.value is None for row in found):
                continue
            chance = None if found[0] is None else found[0].chance
            beside = [chance, majority.get(name) if kind == 'task' else None] if is_single else []
            yield TableRow(
                name=name,
                cells=[*found, *beside],
                is_bold=kind in ('category', 'average'),
                is_indented=kind == 'perturbation' or (kind == 'task' and bool(categories)),
                mark=SHORTENED if kind == 'task' and name in shortened else '',
                note=shortened.get(name, '') if kind == 'task' else '',
            )

    lines: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for kind, name in dict.fromkeys(name for one in evaluations for name in one.headline):
        lines[kind].append(name)
    categories = {task: name for one in reversed(evaluations) for task, name in one.task_categories.items()}
    tasks: list[TableRow] = []
    for category in dict.fromkeys([*lines['category'], OTHER_TASKS]):
        members = list(rows('task', [name for name in lines['task'] if categories.get(name, OTHER_TASKS) == category]))
        if members and categories:
            tasks += list(rows('category', [category])) or [heading(category)]
        tasks += members
    score = list(rows('perturbation', lines['perturbation']))
    return Table(
        title=' '.join([TITLE, *(f'({text})' for text in [origin_banner(evaluations)] if text)]),
        columns=columns,
        parts=[tasks, list(rows('average', lines['average'])), [heading('SCORE'), *score] if score else []],
        notes=[*score_notes(evaluations), *absences(headline_cells(evaluations))],
    )


def origin_banner(evaluations: Sequence[Run]) -> str:
    """Return how many tasks were run on sample data, '' if none were."""
    origins = {key: origin for one in evaluations for key, origin in one.origins.items()}
    sampled = [key for key, origin in origins.items() if origin == 'sample']
    if not sampled:
        return ''
    share = '' if len(sampled) == len(origins) else f'{len(sampled)} of {plural(len(origins), "task")}: '
    return f'{share}{SAMPLE_DATA}'


def shortened_banner(evaluations: Sequence[Run]) -> str:
    """Return how many tasks of the last evaluation had shortened prompts and the shots these had left, '' if none."""
    last = evaluations[-1]
    ran = {key: task for key, task in last.scores.tasks.items() if task.metrics is not None}
    tasks = {key: task for key, task in ran.items() if task.num_shortened}
    if not tasks:
        return ''
    shots: dict[str, list[float]] = {}
    for key, task in tasks.items():
        if task.effective_shots is not None and not key.endswith('/0-shot'):
            shots.setdefault(key.rpartition('/')[2], []).append(task.effective_shots)
    means = [f'{name} is {mean(found):.1f} on average' for name, found in shots.items()]
    length = (last.scores.config or {}).get('max_seq_len')
    fitting = f' to fit {length} tokens' if length else ''
    return f'prompts of {len(tasks)} of {plural(len(ran), "task")} are shortened{fitting}{"; ".join(["", *means])}'


def score_notes(evaluations: Sequence[Run]) -> list[str]:
    """Return notes on prompts and data: the marks of tasks, and data that are not the published ones."""
    notes = [f'{SHORTENED} {text}' for text in [shortened_banner(evaluations)] if text]
    notes += limit_notes(evaluations[-1])
    unscored = {
        key: f'{key} {task.num_unscored} of {task.num_items}'
        for one in evaluations
        for key, task in one.scores.tasks.items()
        if task.num_unscored
    }
    if unscored:
        notes.append(f'unscored items: {", ".join(unscored.values())}')
    origins = {key: origin for one in evaluations for key, origin in one.origins.items()}
    for origin, text in (('sample', SAMPLE_DATA), ('unofficial', 'unofficial copies of the data')):
        found = [key for key, one in origins.items() if one == origin]
        if found and (origin != 'sample' or len(found) < len(origins)):
            notes.append(f'{text}: {", ".join(found)}')
    return notes


def limit_notes(evaluation: Run) -> list[str]:
    """Return a line for each token limit that ended many generations of a task, with the tasks it ended most of."""
    found = {key: task.ended_at_limit for key, task in evaluation.scores.tasks.items()}
    found.update({entry.task or name: entry.ended_at_limit for name, entry in (evaluation.scores.score or {}).items()})
    many = [(key, one) for key, one in found.items() if one is not None and one.share >= MANY_AT_LIMIT]
    tasks_by_limit: dict[str, list[str]] = {}
    for key, one in sorted(many, key=lambda pair: -pair[1].share):
        limit = f'the limit of {plural(one.tokens, "token")} ({one.setting})'
        of = 'of ' if limit in tasks_by_limit else 'of generations of '
        tasks_by_limit.setdefault(limit, []).append(f'{100 * one.share:.0f} % {of}{key}')
    notes = []
    for limit, tasks in tasks_by_limit.items():
        num_more = len(tasks) - SHOWN_AT_LIMIT
        more = f' and {plural(num_more, "more task")}' if num_more > 0 else ''
        notes.append(f'{", ".join(tasks[:SHOWN_AT_LIMIT])}{more} ended at {limit}')
    return notes


def headline_cells(evaluations: Sequence[Run]) -> Iterator[tuple[str, ScoreRow]]:
    """Yield names and scores in the order of `KINDS`; composites without a value all have the same reason."""
    rows = [(key, row) for one in evaluations for key, row in one.headline.items()]
    for (kind, name), row in sorted(rows, key=lambda pair: KINDS.index(pair[0][0])):
        if row.reason is None:
            yield name, row
        elif kind in ('category', 'average'):
            yield name, replace(row, reason=NO_COMPOSITE)
        else:
            yield (score_name(row) if kind == 'perturbation' else name), row


def absences(cells: Iterable[tuple[str, Measure | ScoreRow]]) -> list[str]:
    """Return why values and errors are absent, one line per reason, from named scores."""
    names: dict[str, dict[str, None]] = {}
    for name, one in cells:
        if ends_of(one) is None:
            alike = NO_DIFFERENCE if isinstance(one, Measure) else ALIKE
            reason = one.reason or (NO_ERROR if one.standard_error is None else alike)
            names.setdefault(reason, {})[name] = None
    return [f'{reason}: {", ".join(found)}' for reason, found in names.items()]


def by_size(rows: Iterable[TableRow], place: int) -> list[TableRow]:
    """Return the rows whose measure in this place has a value, the largest first."""
    values = [(row, cell.value) for row in rows if isinstance(cell := row.cells[place], Measure)]
    known = [(row, value) for row, value in values if value is not None]
    return [row for row, _ in sorted(known, key=lambda pair: -abs(pair[1]))]


def flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of JSON as columns of CSV: numbers, and each measure with its error and, of results, a reason."""
    row: dict[str, Any] = {}
    for name, value in entry.items():
        if not isinstance(value, Mapping):
            row[name] = value
        elif name in SIDES:
            row |= {name: value.get('value'), f'{name}_standard_error': value.get('standard_error')}
        else:
            row |= {name: value.get('value')} | {key: value.get(key) for key in ('standard_error', 'reason')}
    return row


def print_comparisons(compared: Sequence[Comparison], metric: str | None = None, form: str = 'table') -> None:
    """Print each comparison as a table, or all of them as 'markdown', 'csv' or 'json'."""
    records = [comparison_record(comparison) for comparison in compared]
    rows = [
        {'first_run': record['first'], 'second_run': record['second'], 'kind': kind, 'name': name, **flat(entry)}
        for record in records
        for kind in ('tasks', 'composites', 'score')
        for name, entry in record[kind].items()
    ]
    print_tables(form, [difference_table(comparison, metric) for comparison in compared], rows, records)


def difference_table(
    comparison: Comparison,
    metric: str | None = None,
    *,
    names: Sequence[str] | None = None,
    difference_first: bool = False,
) -> Table:
    """Return two runs with a row per task and composite, the largest differences first.

    `names` are those of the two runs, by default the ends of their paths. On a narrow screen only the first columns are
    seen: `difference_first` begins with the difference.
    """
    names = names or short_names([Path(comparison.first), Path(comparison.second)])
    of_runs = [Column(name) for name in names]
    of_difference = [Column('diff', SIGNED, with_error=True), Column('p (Holm)', starred), Column('MDE')]
    columns = [*of_difference, *of_runs] if difference_first else [*of_runs, *of_difference]
    parts = []
    for kind, group in comparison.groups.items():
        rows = []
        for name, one in group.items():
            scores: list[Cell] = [one.first, one.second]
            difference: list[Cell] = [one.difference, one.p_holm, one.detectable]
            cells = [*difference, *scores] if difference_first else [*scores, *difference]
            rows.append(TableRow(name=name, cells=cells, is_bold=kind == 'composites'))
        parts.append(by_size(rows, 0 if difference_first else 2))
    every = {name: one for group in comparison.groups.values() for name, one in group.items()}
    notes = absences((name, one.difference) for name, one in every.items())
    composites = comparison.groups['composites']
    shares = {name: variance_shares(composites[name].difference) for name in comparison.averages if name in composites}
    return Table(
        title=f'{metric or "accuracy"}: {names[1]} {MINUS} {names[0]}',
        columns=columns,
        parts=parts,
        legend=LEGEND,
        notes=[*notes, *share_notes(shares)],
        warnings=comparison.warnings,
    )


def share_notes(shares: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line per average with the tasks that contribute most to its variance, where that is known."""
    notes = []
    for name, of_tasks in shares.items():
        parts = [f'{share * 100:.0f} % {task}' for task, share in list(of_tasks.items())[:SHOWN_SHARES]]
        if others := list(of_tasks.values())[SHOWN_SHARES:]:
            parts.append(f'{sum(others) * 100:.0f} % {plural(len(others), "other task")}')
        if parts:
            notes.append(f'error of {name}, by share of its variance: {", ".join(parts)}')
    return notes


def starred(value: float) -> str:
    """Return a corrected p-value, with a star below the significance level."""
    return ('<0.001' if value < 0.001 else f'{value:.3f}') + ('*' if value < CLEAR else ' ')


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison for JSON."""
    groups = {
        kind: {
            name: {
                part: (composite_record if kind == 'composites' else measure_record)(getattr(found, part))
                for part in (*SIDES, 'difference')
            }
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

    With CSV and JSON, slopes are per batch.
    """
    records = {
        name: {'slope': measure_record(one.slope), 'noise': one.noise, 'signal_to_noise': one.signal_to_noise}
        for name, one in found.trends.items()
    }
    print_tables(form, [trends_table(found)], [{'name': name, **flat(one)} for name, one in records.items()], records)


def trends_table(found: Trends) -> Table:
    """Return a row for each score, the steepest first."""
    columns = [Column('slope', SIGNED, with_error=True), Column('noise')]
    columns += [Column('signal/noise', '{:.1f}'.format, absent='')]
    unit = min(BATCHES, found.batches[-1] - found.batches[0])  # no slope beyond the batches that were seen
    parts: list[list[TableRow]] = [[], []]
    for name, one in found.trends.items():
        p = p_value(one.slope)
        ratio = None if p is None or p >= CLEAR else one.signal_to_noise
        slope = one.slope if one.slope.value is None else weighted_sum([one.slope], [unit])
        cells: list[Cell] = [slope, one.noise, ratio]
        is_composite = name in found.composites
        parts[is_composite].append(TableRow(name=name, cells=cells, is_bold=is_composite))
    return Table(
        title=f'slope per {unit} batches over {len(found.batches)} checkpoints, ba{found.batches[0]} to '
        f'ba{found.batches[-1]}',
        columns=columns,
        parts=[by_size(part, 0) for part in parts],
        legend=TREND_LEGEND,
        notes=absences((name, one.slope) for name, one in found.trends.items()),
        warnings=found.warnings,
    )


def print_estimate(estimate: Estimate, form: str = 'table') -> None:
    """Print what each task and all together would take: a table, or 'markdown', 'csv' or 'json'."""
    rows = [asdict(task) for task in estimate.tasks]
    names = [name for name in (rows[0] if rows else ()) if name != 'task']
    rows.append({'task': 'all', **{name: sum(row[name] for row in rows) for name in names}})
    counts = ('items', 'tokens', 'generated tokens at most', 'shortened')
    columns = [*(Column(name, count_cell) for name in counts), Column('seconds', '{:.1f}'.format)]
    cells = [TableRow(name=row['task'], cells=[row[name] for name in names]) for row in rows]
    tables = [Table(title='Dry run', columns=columns, parts=[cells[:-1], cells[-1:]], notes=estimate_lines(estimate))]
    tables += [targets_table(estimate)] if estimate.targets else []
    print_tables(form, tables, rows, {**asdict(estimate), 'total_seconds': estimate.total_seconds})


def targets_table(estimate: Estimate) -> Table:
    """Return what subsets by precision target take and give."""
    columns = [Column('items', count_cell), Column('seconds', '{:.1f}'.format)]
    columns += [Column(name, '{:.4f}'.format) for name in ('error', 'MDE')]
    rows = [
        TableRow(
            name=f'{100 * one.share:g}%' if one.share else 'all items',
            cells=[one.num_items, one.seconds, one.standard_error, one.detectable],
        )
        for one in estimate.targets
    ]
    title = f'Subsets by --precision-target, for {estimate.average}'
    return Table(title=title, columns=columns, parts=[rows], name='target', legend=TARGETS_LEGEND)


def count_cell(value: int) -> str:
    """Return a count, '' for 0."""
    return f'{value:,}' if value else ''


def estimate_lines(estimate: Estimate) -> list[str]:
    """Return the total time, its parts, and how it was estimated."""
    parts = ', '.join(f'{name} {seconds:.1f} s' for name, seconds in estimate.seconds.items())
    ranks = f' on {estimate.num_ranks} ranks' if estimate.num_ranks > 1 else ''
    return [
        f'about {estimate.total_seconds:.1f} s{ranks}: {parts}',
        f'before it, reading data and loading the model: {estimate.preparing_seconds:.1f} s here',
        *estimate.notes,
    ]
