"""Print scores, comparisons, trends and estimates: as a table for the terminal, in Markdown, CSV or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from llmfoundry_gauntlet.errors import UnwrittenError, duration, listed, plural
from llmfoundry_gauntlet.evaluation.estimate import Estimate
from llmfoundry_gauntlet.metrics.comparison import LEVEL, Difference, p_value
from llmfoundry_gauntlet.metrics.keys import GOLD_BITS
from llmfoundry_gauntlet.metrics.metrics import GOLD_BITS_PER_BYTE, LOSSES
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
    ABSENT,
    MINUS,
    Cell,
    Column,
    Table,
    TableRow,
    ends_of,
    print_tables,
)
from llmfoundry_gauntlet.results.runs import ItemSource, Run, find_evaluations, recorded_run
from llmfoundry_gauntlet.tasks.generation import NO_DELIMITER_SHARE
from llmfoundry_gauntlet.types import Measure

CLEAR = LEVEL  # a corrected p-value below it is marked, and a trend with one is shown with its signal to noise
SHOWN_SHARES = 3  # of an average's variance, the largest
BATCHES = 1000  # of training, the unit of printed slopes over at least as many
TITLE = 'Eval Gauntlet'
SAMPLE_DATA = 'sample data, not the benchmark'
SHORTENED = '\u2020'  # marks tasks with shortened prompts
MANY_AT_LIMIT = 0.1  # of a task's generations; with more a note names the limit
SHOWN_AT_LIMIT = 5  # tasks named of those with the same limit
MANY_WITHOUT_DELIMITER = 0.1  # of a task's generations; with more a note names the task
WITHOUT_DELIMITER = 'generations without the cot_delimiter before their answer, so that all of the text is compared'
OTHER_TASKS = 'tasks outside the gauntlet'
LEGEND = (
    f'*: a clear difference, p below {CLEAR} after correction for the number of all comparisons shown (Holm)',
    'MDE: minimum detectable effect, the true difference that gets a star in 8 of 10 cases (for scores near 0 and 1 '
    'it is larger)',
    'scores are over the items that have the same prompt in both runs',
)
TREND_LEGEND = (
    'noise: variation between checkpoints',
    f'signal/noise: change over the run divided by the noise, where the slope is clear (p below {CLEAR}); its sign '
    'says whether the score rises or falls, not whether that is an improvement',
)
CONSTANT_LETTER = (
    'constant: the highest value of one letter as the answer in every variant; a model may have a consistency_rate '
    'near it without reading the questions'
)
# Columns of baselines, and of the numbers of items.
CHANCE, MAJORITY_CLASS, CONSTANT, NUM_ITEMS = 'chance', 'majority', 'constant', 'n'
NUMBERS_OF_ITEMS = (
    'n: the number of items of each run, in the order of the columns, where these differ; composites are over these '
    'items too; gauntlet compare takes those that two runs have in common'
)
OTHER_ROWS = 'as many items in all runs, but others, as the rows of the data files or the choice of subsets differ'
ERRORS_OVER_PROMPTS = 'standard errors over questions and prompts'
NO_ERROR = 'no standard error, which takes two questions scored independently'
ALIKE = 'no standard error, as all items have the same value'
NO_COMPOSITE = 'composites over tasks without a score are absent'
GOLD_BITS_HEADING = f'{GOLD_BITS} (lower is better)'
BITS_PER_BYTE = 'bits/byte'
NO_GOLD_BITS = f'{GOLD_BITS} over tasks without {GOLD_BITS_PER_BYTE} is absent'
NO_DIFFERENCE = 'no error, as every item changed alike or not at all'
SIGNED = '{:+.3f}'.format
TARGETS_LEGEND = (
    'error: standard error of the average, at most so much above that of all items',
    'MDE: the smallest difference that two runs will show (80 % power), if they agree by chance only; paired runs of '
    'similar models show smaller ones',
)
DIFFERENCE_KEYS = ('p_value', 'p_holm', 'detectable', 'num_items')
SIDES = ('first', 'second')  # of a comparison
OVER_PROMPTS = 'over_prompts'  # the error of a difference of SCORE with those of prompts
COLUMNS_OVER_PROMPTS = (f'standard_error_{OVER_PROMPTS}', f'p_value_{OVER_PROMPTS}')


def print_runs(folder: Path) -> None:
    """Print the scores of every evaluation at or below a folder, and where its files are."""
    print_scores(find_evaluations([folder]))


def print_unwritten(error: UnwrittenError, form: str = 'table') -> None:
    """Print the scores that could not be written."""
    print_scores([recorded_run(error.folder, error.record)], form, with_paths=False)


def print_scores(evaluations: Sequence[Run], form: str = 'table', *, with_paths: bool = True) -> None:
    """Print the scores of evaluations as a 'table' with the paths of their files, or as 'markdown', 'csv' or 'json'."""
    table = scores_table(evaluations, with_errors=form == 'markdown' or len(evaluations) == 1)
    rows = [asdict(row) for evaluation in evaluations for row in evaluation.rows]
    print_tables(form, [table], rows)
    if form == 'table' and with_paths:
        for evaluation in evaluations:
            print(f'{evaluation.folder / RESULTS}: {totals(evaluation)}')


def totals(evaluation: Run) -> str:
    """Return what an evaluation has run, the time it took, and the tasks that have no score."""
    record = evaluation.scores
    datasets = list((record.score or {}).values())
    tasks = [task for task in record.tasks.values() if task.metrics is not None]
    counts = [plural(len(tasks), 'task')] if tasks or not datasets else []
    if datasets:
        counts.append(plural(len(datasets), 'SCORE dataset'))
    num_items = sum(task.num_items for task in tasks) + sum(dataset.num_items for dataset in datasets)
    done = f'{", ".join(counts)}, {plural(num_items, "item")}, {duration(record.timing.seconds)}'

    without_score = [name for (kind, name), row in evaluation.headline.items() if kind == 'task' and row.value is None]
    if not without_score:
        return done
    have = 'has' if len(without_score) == 1 else 'have'
    return f'{done}; {plural(len(without_score), "task")} {have} no score: {listed(without_score)}'


def scores_table(evaluations: Sequence[Run], names: Sequence[str] | None = None, *, with_errors: bool) -> Table:
    """Return the tasks by category, then averages, their gold answers' bits and SCORE, with a column per evaluation.

    The accuracy of guessing is shown beside accuracies, for a single evaluation that of the majority class beside
    tasks, and the best constant letter beside SCORE. Numbers of items are shown where evaluations differ in them.
    Scores that no evaluation has are not in the table but in its notes.
    """
    names = names or short_names([evaluation.folder for evaluation in evaluations])
    columns = [Column(name, with_error=with_errors) for name in names]
    columns += [Column(name, absent='') for name in names_of_other_columns(evaluations)]

    def heading(name: str) -> TableRow:
        return TableRow(name=name, cells=[''] * len(columns), is_bold=True)

    rows = rows_by_kind(evaluations)
    category_of_task = first_categories(evaluations)
    tasks: list[TableRow] = []
    for category in dict.fromkeys([*rows['category'], OTHER_TASKS]):
        names_of_tasks = [name for name in rows['task'] if category_of_task.get(name, OTHER_TASKS) == category]
        members = [row for row in map(rows['task'].get, names_of_tasks) if row is not None]
        # Without a gauntlet no task is below a category, so none needs a heading.
        if members and category_of_task:
            tasks.append(rows['category'].get(category) or heading(category))
        tasks += members
    averages = [row for row in rows['average'].values() if row is not None]
    gold_bits = gold_bits_rows(rows)
    score = [row for row in rows['perturbation'].values() if row is not None]

    banner = origin_banner(evaluations)
    # They are a line of one run; `compare` has those of a difference.
    over_prompts = errors_over_prompts(evaluations[0]) if len(evaluations) == 1 else []
    return Table(
        title=f'{TITLE} ({banner})' if banner else TITLE,
        columns=columns,
        parts=[
            tasks,
            averages,
            [heading(GOLD_BITS_HEADING), *gold_bits] if gold_bits else [],
            [heading('SCORE'), *score] if score else [],
        ],
        notes=[
            *score_notes(evaluations),
            *constant_letter_notes(evaluations),
            *item_notes(evaluations),
            *over_prompts,
            *absences(headline_cells(evaluations)),
        ],
    )


def names_of_other_columns(evaluations: Sequence[Run]) -> list[str]:
    """Return the names of the columns of baselines and of numbers of items that a table of scores needs."""
    names = [CHANCE]
    # An evaluation of SCORE alone has no task with it.
    if len(evaluations) == 1 and any(row.metric == MAJORITY for row in evaluations[0].rows):
        names.append(MAJORITY_CLASS)
    if constant_letter_notes(evaluations):
        names.append(CONSTANT)
    if any(numbers_of_items(scores) for scores in scores_by_name(evaluations).values()):
        names.append(NUM_ITEMS)
    return names


def scores_by_name(evaluations: Sequence[Run]) -> dict[tuple[str, str], list[ScoreRow | None]]:
    """Return the headline score of each evaluation by kind and name; None for one that does not have it."""
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.headline)
    return {name: [evaluation.headline.get(name) for evaluation in evaluations] for name in names}


def numbers_of_items(scores: Sequence[ScoreRow | None]) -> str:
    """Return the number of items of each run's score, in order; '' where all that have one have as many."""
    counts = [None if score is None or score.value is None else score.num_items for score in scores]
    if len(set(counts) - {None}) < 2:
        return ''
    return ' / '.join(ABSENT if count is None else f'{count:,}' for count in counts)


def item_notes(evaluations: Sequence[Run]) -> list[str]:
    """Return an explanation of numbers of items, if any are shown, and the tasks with as many items, but others."""
    notes = []
    if NUM_ITEMS in names_of_other_columns(evaluations):
        notes.append(NUMBERS_OF_ITEMS)
    sources_by_task: dict[str, list[ItemSource]] = {}
    for evaluation in evaluations:
        for task, source in evaluation.sources_of_items.items():
            sources_by_task.setdefault(task, []).append(source)
    differing = []
    for task, sources in sources_by_task.items():
        counts = {source.num_items for source in sources}
        choices = {(source.rows_sha256, source.subset_version) for source in sources}
        if len(counts) == 1 and len(choices) > 1:
            differing.append(task)
    if differing:
        notes.append(f'{OTHER_ROWS}: {", ".join(differing)}')
    return notes


def gold_bits_rows(rows: Mapping[str, Mapping[str, TableRow | None]]) -> list[TableRow]:
    """Return the rows of gold answers' bits per byte, under names that no score has."""
    return [replace(row, name=f'{name} {BITS_PER_BYTE}') for name, row in rows[GOLD_BITS].items() if row is not None]


def gold_bits_table(evaluations: Sequence[Run], names: Sequence[str]) -> Table | None:
    """Return the bits per byte of gold answers with a column per evaluation, for which there are names; None without.

    It has an axis of its own, from 0 to the highest end of an interval.
    """
    rows = gold_bits_rows(rows_by_kind(evaluations))
    if not rows:
        return None
    shown = [replace(row, cells=row.cells[: len(evaluations)], is_indented=False) for row in rows]
    columns = [Column(name, with_error=True) for name in names]
    scores = [cell for row in shown for cell in row.cells if isinstance(cell, ScoreRow)]
    highest = max(score.high or score.value or 0.0 for score in scores)
    return Table(title=GOLD_BITS_HEADING, columns=columns, parts=[shown], domain=(0.0, highest))


def first_categories(evaluations: Sequence[Run]) -> dict[str, str]:
    """Return the category of each task that is in one; the first evaluation that has the task decides."""
    category_of_task: dict[str, str] = {}
    for evaluation in evaluations:
        for task, category in evaluation.task_categories.items():
            category_of_task.setdefault(task, category)
    return category_of_task


def rows_by_kind(evaluations: Sequence[Run]) -> dict[str, dict[str, TableRow | None]]:
    """Return the row of each headline score by kind and name; None for a score that no evaluation has."""
    other_columns = names_of_other_columns(evaluations)
    has_categories = bool(first_categories(evaluations))
    majority = {row.name: row.value for row in evaluations[0].rows if row.metric == MAJORITY and row.part is None}
    shortened = notes_on_shortened(evaluations)

    rows: dict[str, dict[str, TableRow | None]] = {kind: {} for kind in KINDS}
    for (kind, name), scores in scores_by_name(evaluations).items():
        if all(score is None or score.value is None for score in scores):
            rows[kind][name] = None
            continue
        is_task = kind == 'task'
        other_cells: dict[str, Cell] = {
            CHANCE: common([score.chance for score in scores if score is not None]),
            MAJORITY_CLASS: majority.get(name) if is_task else None,
            CONSTANT: common([score.constant_letter for score in scores if score is not None]),
            NUM_ITEMS: numbers_of_items(scores),
        }
        rows[kind][name] = TableRow(
            name=name,
            cells=[*scores, *(other_cells[column] for column in other_columns)],
            is_bold=kind in ('category', 'average'),
            is_indented=kind in ('perturbation', GOLD_BITS) or (is_task and has_categories),
            mark=SHORTENED if is_task and name in shortened else '',
            note=shortened.get(name, '') if is_task else '',
        )
    return rows


def common(baselines: Iterable[float | None]) -> float | None:
    """Return the baseline of scores; None if there is none, or if it differs, as between subsets of questions."""
    distinct = set(baselines)
    return distinct.pop() if len(distinct) == 1 else None


def notes_on_shortened(evaluations: Sequence[Run]) -> dict[str, str]:
    """Return how many shots the prompts of each task with shortened prompts had left, '' if that is unknown."""
    notes = {}
    for evaluation in evaluations:
        for key, task in evaluation.scores.tasks.items():
            if task.num_shortened:
                shots = task.effective_shots
                notes[key] = '' if shots is None else f'{shots:.1f} shots on average'
    return notes


def origins_of(evaluations: Sequence[Run]) -> dict[str, str | None]:
    """Return where the rows of each task come from."""
    return {key: origin for evaluation in evaluations for key, origin in evaluation.origins.items()}


def origin_banner(evaluations: Sequence[Run]) -> str:
    """Return how many tasks were run on sample data, '' if none were."""
    origins = origins_of(evaluations)
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
    # Shots that were left, by the number that was asked for: '10-shot'.
    shots: dict[str, list[float]] = {}
    for key, task in tasks.items():
        if task.effective_shots is not None and not key.endswith('/0-shot'):
            shots.setdefault(key.rpartition('/')[2], []).append(task.effective_shots)
    means = [f'{name} is {mean(effective):.1f} on average' for name, effective in shots.items()]
    length = (last.scores.config or {}).get('max_seq_len')
    fitting = f' to fit {length} tokens' if length else ''
    share = f'prompts of {len(tasks)} of {plural(len(ran), "task")} are shortened{fitting}'
    return '; '.join([share, *means])


def score_notes(evaluations: Sequence[Run]) -> list[str]:
    """Return notes on prompts and data: the marks of tasks, and data that are not the published ones."""
    notes = [f'{SHORTENED} {text}' for text in [shortened_banner(evaluations)] if text]
    notes += limit_notes(evaluations[-1])
    notes += delimiter_notes(evaluations)
    unscored = {}
    for evaluation in evaluations:
        for key, task in evaluation.scores.tasks.items():
            if task.num_unscored:
                unscored[key] = f'{key} {task.num_unscored} of {task.num_items}'
    if unscored:
        notes.append(f'unscored items: {", ".join(unscored.values())}')

    origins = origins_of(evaluations)
    sampled = [key for key, origin in origins.items() if origin == 'sample']
    if sampled and len(sampled) < len(origins):  # else the title says so of all tasks
        notes.append(f'{SAMPLE_DATA}: {", ".join(sampled)}')
    unofficial = [key for key, origin in origins.items() if origin == 'unofficial']
    if unofficial:
        notes.append(f'unofficial copies of the data: {", ".join(unofficial)}')
    return notes


def constant_letter_notes(evaluations: Sequence[Run]) -> list[str]:
    """Return an explanation of the column of constant letters, where any score has one."""
    shown = [row for evaluation in evaluations for row in evaluation.headline.values()]
    return [CONSTANT_LETTER] if any(row.constant_letter is not None for row in shown) else []


def limit_notes(evaluation: Run) -> list[str]:
    """Return a line for each token limit that ended many generations of a task, with the tasks it ended most of."""
    limits = {key: task.ended_at_limit for key, task in evaluation.scores.tasks.items()}
    for dataset in (evaluation.scores.score or {}).values():
        limits[dataset.task] = dataset.ended_at_limit
    many = [(key, ended) for key, ended in limits.items() if ended is not None and ended.share >= MANY_AT_LIMIT]
    many.sort(key=lambda pair: -pair[1].share)

    tasks_by_limit: dict[str, list[str]] = {}
    for key, ended in many:
        limit = f'the limit of {plural(ended.tokens, "token")} ({ended.setting})'
        of = 'of ' if limit in tasks_by_limit else 'of generations of '  # said once in a line
        tasks_by_limit.setdefault(limit, []).append(f'{100 * ended.share:.0f} % {of}{key}')
    notes = []
    for limit, tasks in tasks_by_limit.items():
        num_more = len(tasks) - SHOWN_AT_LIMIT
        more = f' and {plural(num_more, "more task")}' if num_more > 0 else ''
        notes.append(f'{", ".join(tasks[:SHOWN_AT_LIMIT])}{more} ended at {limit}')
    return notes


def delimiter_notes(evaluations: Sequence[Run]) -> list[str]:
    """Return a line with the tasks of which many generations have no delimiter, with the share in each evaluation."""
    shares_by_task: dict[str, list[float | None]] = {}
    for place, evaluation in enumerate(evaluations):
        for key, task in evaluation.scores.tasks.items():
            measured = (task.metrics or {}).get(NO_DELIMITER_SHARE)
            shares = shares_by_task.setdefault(key, [None] * len(evaluations))
            shares[place] = None if measured is None else measured.value

    tasks = []
    for key, shares in shares_by_task.items():
        if max(share or 0.0 for share in shares) >= MANY_WITHOUT_DELIMITER:
            shown = ['unknown' if share is None else f'{100 * share:.0f} %' for share in shares]
            is_same = len(set(shown)) == 1
            tasks.append(f'{key} {shown[0] if is_same else " and ".join(shown)}')
    return [f'{WITHOUT_DELIMITER}: {listed(tasks)}'] if tasks else []


def headline_cells(evaluations: Sequence[Run]) -> Iterator[tuple[str, ScoreRow]]:
    """Yield names and scores in the order of `KINDS`; composites without a value all have the same reason."""
    rows = [(key, row) for evaluation in evaluations for key, row in evaluation.headline.items()]
    rows.sort(key=lambda pair: KINDS.index(pair[0][0]))
    for (kind, name), row in rows:
        if row.reason is None:
            yield name, row
        elif kind in ('category', 'average'):
            yield name, replace(row, reason=NO_COMPOSITE)
        elif kind == GOLD_BITS:
            yield name, replace(row, reason=NO_GOLD_BITS)
        elif kind == 'perturbation':
            yield score_name(row), row
        else:
            yield name, row


def absences(cells: Iterable[tuple[str, Measure | ScoreRow]]) -> list[str]:
    """Return why values and errors are absent, one line per reason, from named scores."""
    names_by_reason: dict[str, dict[str, None]] = {}  # dictionaries, so that each name is given once
    for name, cell in cells:
        if ends_of(cell) is None:
            if cell.reason:
                reason = cell.reason
            elif cell.standard_error is None:
                reason = f'no standard error, as {cell.no_error}' if cell.no_error else NO_ERROR
            else:
                reason = NO_DIFFERENCE if isinstance(cell, Measure) else ALIKE
            names_by_reason.setdefault(reason, {})[name] = None
    return [f'{reason}: {", ".join(names)}' for reason, names in names_by_reason.items()]


def by_size(rows: Iterable[TableRow], column: int) -> list[TableRow]:
    """Return the rows whose measure in this column has a value, the largest first."""
    rows_and_sizes = []
    for row in rows:
        cell = row.cells[column]
        if isinstance(cell, Measure) and cell.value is not None:
            rows_and_sizes.append((row, abs(cell.value)))
    rows_and_sizes.sort(key=lambda pair: -pair[1])
    return [row for row, _ in rows_and_sizes]


def flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of JSON as columns of CSV: numbers, and each measure with its error and, of results, a reason."""
    row: dict[str, Any] = {}
    for name, value in entry.items():
        if not isinstance(value, Mapping):
            row[name] = value
            continue
        if name == OVER_PROMPTS:
            for column in COLUMNS_OVER_PROMPTS:
                row[column] = value.get(column.removesuffix(f'_{name}'))
            continue
        row[name] = value.get('value')
        if name in SIDES:
            row[f'{name}_standard_error'] = value.get('standard_error')
        else:
            row['standard_error'] = value.get('standard_error')
            row['reason'] = value.get('reason')
    return row


def print_comparisons(compared: Sequence[Comparison], metric: str | None = None, form: str = 'table') -> None:
    """Print each comparison as a table, or all of them as 'markdown', 'csv' or 'json'."""
    records = [comparison_record(comparison) for comparison in compared]
    rows = []
    for record in records:
        runs = {'first_run': record['first'], 'second_run': record['second']}
        for kind in ('tasks', 'composites', 'score'):
            for name, entry in record[kind].items():
                row = {**runs, 'kind': kind, 'name': name, **flat(entry)}
                for column in COLUMNS_OVER_PROMPTS:
                    row.setdefault(column, None)
                rows.append(row)
    print_tables(form, [difference_table(comparison, metric) for comparison in compared], rows, records)
    if form == 'table':
        for comparison in compared:
            print(clear_differences(comparison))


def clear_differences(comparison: Comparison) -> str:
    """Return how many tasks were compared and which of them, and which composites, differ clearly."""
    clear = {
        kind: [name for name, compared in group.items() if compared.p_holm is not None and compared.p_holm < CLEAR]
        for kind, group in comparison.groups.items()
    }
    of_tasks = comparison.groups['tasks'].values()
    num_tasks = sum(compared.difference.value is not None for compared in of_tasks)
    differing = [name for names in clear.values() for name in names]
    found = listed(differing) if differing else 'no clear difference'
    runs = f'{comparison.second} against {comparison.first}'
    return f'{runs}: {plural(num_tasks, "task")} compared; {f"clearly different: {found}" if differing else found}'


def difference_table(
    comparison: Comparison,
    metric: str | None = None,
    *,
    names: Sequence[str] | None = None,
    difference_first: bool = False,
) -> Table:
    """Return two runs with a row per task and composite, the largest differences first.

    `names` are those of the two runs, by default the ends of their paths. On a narrow screen only the first columns are
    seen: `difference_first` begins with the difference, followed by the scores.
    """
    names = names or short_names([Path(comparison.first), Path(comparison.second)])
    of_runs = [Column(name) for name in names]
    of_difference = Column('diff', SIGNED, with_error=True)
    of_error = [Column('p (Holm)', starred), Column('MDE')]
    columns = [of_difference, *of_runs, *of_error] if difference_first else [*of_runs, of_difference, *of_error]
    parts = []
    for kind, group in comparison.groups.items():
        rows = []
        for name, compared in group.items():
            scores: list[Cell] = [compared.first, compared.second]
            difference = compared.difference
            error: list[Cell] = [compared.p_holm, compared.detectable]
            cells = [difference, *scores, *error] if difference_first else [*scores, difference, *error]
            rows.append(TableRow(name=name, cells=cells, is_bold=kind == 'composites'))
        parts.append(by_size(rows, 0 if difference_first else 2))
    differences = {
        name: compared.difference for group in comparison.groups.values() for name, compared in group.items()
    }
    notes = absences(differences.items())
    composites = comparison.groups['composites']
    shares = {name: variance_shares(composites[name].difference) for name in comparison.averages if name in composites}
    return Table(
        title=f'{metric or "accuracy"}: {names[1]} {MINUS} {names[0]}',
        columns=columns,
        parts=parts,
        legend=[*losses_in_legend(metric), *LEGEND],
        notes=[*notes, *share_notes(shares), *differences_over_prompts(comparison)],
        warnings=comparison.warnings,
    )


def losses_in_legend(metric: str | None) -> list[str]:
    """Return a line that says which differences are improvements, if the metric is a loss."""
    return [f'{metric} is a loss: a negative difference is an improvement'] if metric in LOSSES else []


def share_notes(shares: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line per average with the tasks that contribute most to its variance, where that is known."""
    notes = []
    for name, of_tasks in shares.items():
        shown = list(of_tasks.items())[:SHOWN_SHARES]
        others = list(of_tasks.values())[SHOWN_SHARES:]
        parts = [f'{share * 100:.0f} % {task}' for task, share in shown]
        if others:
            parts.append(f'{sum(others) * 100:.0f} % {plural(len(others), "other task")}')
        if parts:
            notes.append(f'error of {name}, by share of its variance: {", ".join(parts)}')
    return notes


def differences_over_prompts(comparison: Comparison) -> list[str]:
    """Return a line with the errors of differences over questions and prompts, where prompts add to them."""
    parts = []
    for name, compared in comparison.groups['score'].items():
        with_prompts = compared.over_prompts
        if with_prompts is None or with_prompts.spread == compared.difference.spread:
            continue
        p = p_value(with_prompts)
        parts.append(f'{name} {with_prompts.standard_error:.3f}{"" if p is None else f" (p = {p:.3f})"}')
    return [f'{ERRORS_OVER_PROMPTS}: {", ".join(parts)}'] if parts else []


def errors_over_prompts(evaluation: Run) -> list[str]:
    """Return a line with the errors of SCORE over questions and prompts, where prompts add to them."""
    rows = {(row.name, row.metric): row for row in evaluation.rows if row.kind == 'perturbation' and row.part is None}
    parts = []
    for (name, metric), row in rows.items():
        with_prompts = rows.get((name, f'{metric}_{OVER_PROMPTS}'))
        if with_prompts is None or with_prompts.standard_error in (None, row.standard_error):
            continue
        part = f'{score_name(row)} {metric} {with_prompts.standard_error:.3f}'
        deviation = rows.get((name, 'prompt_deviation'))
        if metric == 'accuracy' and deviation is not None and deviation.value is not None:
            part = f'{part} (of single prompts it deviates by {deviation.value:.3f})'
        parts.append(part)
    return [f'{ERRORS_OVER_PROMPTS}: {", ".join(parts)}'] if parts else []


def starred(value: float) -> str:
    """Return a corrected p-value, with a star below the significance level."""
    text = '<0.001' if value < 0.001 else f'{value:.3f}'
    star = '*' if value < CLEAR else ' '
    return f'{text}{star}'


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison for JSON."""
    groups: dict[str, dict[str, Any]] = {}
    for kind, group in comparison.groups.items():
        # Composites also have the share of each task in their variance.
        record_of = composite_record if kind == 'composites' else measure_record
        groups[kind] = {name: difference_record(compared, record_of) for name, compared in group.items()}

    left_out = {}
    for key, items in comparison.common.items():
        if len(items.keys) < max(items.num_items):
            left_out[key] = {
                'num_items': list(items.num_items),
                'num_common': items.num_shared,
                'num_same_words': len(items.keys),
                'settings': list(items.settings),
            }
    runs = {'first': comparison.first, 'second': comparison.second}
    return {**runs, **groups, 'left_out': left_out, 'warnings': list(comparison.warnings)}


def difference_record(compared: Difference, record_of: Callable[[Measure], dict[str, Any]]) -> dict[str, Any]:
    """Return a score of both runs and its difference for JSON, each measure as `record_of` returns it."""
    record = {name: record_of(getattr(compared, name)) for name in (*SIDES, 'difference')}
    if compared.over_prompts is not None:
        record[OVER_PROMPTS] = {**record_of(compared.over_prompts), 'p_value': p_value(compared.over_prompts)}
    return {**record, **{key: getattr(compared, key) for key in DIFFERENCE_KEYS}}


def print_trends(trends: Trends, metric: str | None = None, form: str = 'table') -> None:
    """Print the trend of each score over the checkpoints of a run, as a table or as 'markdown', 'csv' or 'json'.

    With CSV and JSON, slopes are per batch.
    """
    records = {}
    for name, trend in trends.trends.items():
        records[name] = {
            'slope': measure_record(trend.slope),
            'noise': trend.noise,
            'signal_to_noise': trend.signal_to_noise,
        }
    rows = [{'name': name, **flat(record)} for name, record in records.items()]
    print_tables(form, [trends_table(trends, metric)], rows, records)


def trends_table(trends: Trends, metric: str | None = None) -> Table:
    """Return a row for each score, the steepest first."""
    first, last = trends.batches[0], trends.batches[-1]
    unit = min(BATCHES, last - first)  # no slope beyond the batches that were seen
    tasks: list[TableRow] = []
    composites: list[TableRow] = []
    for name, trend in trends.trends.items():
        p = p_value(trend.slope)
        is_clear = p is not None and p < CLEAR
        slope = trend.slope if trend.slope.value is None else weighted_sum([trend.slope], [unit])
        cells: list[Cell] = [slope, trend.noise, trend.signal_to_noise if is_clear else None]
        if name in trends.composites:
            composites.append(TableRow(name=name, cells=cells, is_bold=True))
        else:
            tasks.append(TableRow(name=name, cells=cells))
    return Table(
        title=f'slope per {unit} batches over {len(trends.batches)} checkpoints, ba{first} to ba{last}',
        columns=[
            Column('slope', SIGNED, with_error=True),
            Column('noise'),
            Column('signal/noise', '{:+.1f}'.format, absent=''),
        ],
        parts=[by_size(tasks, 0), by_size(composites, 0)],
        legend=[*losses_in_legend(metric), *TREND_LEGEND],
        notes=absences((name, trend.slope) for name, trend in trends.trends.items()),
        warnings=trends.warnings,
    )


def print_estimate(estimate: Estimate, form: str = 'table') -> None:
    """Print what each task and all together would take: a table, or 'markdown', 'csv' or 'json'."""
    of_tasks = [asdict(task) for task in estimate.tasks]
    names = [name for name in (of_tasks[0] if of_tasks else ()) if name != 'task']
    of_all = {'task': 'all', **{name: sum(record[name] for record in of_tasks) for name in names}}

    def table_row(record: Mapping[str, Any]) -> TableRow:
        return TableRow(name=record['task'], cells=[record[name] for name in names])

    tables = [
        Table(
            title='Dry run',
            columns=[
                Column('items', count_cell),
                Column('tokens', count_cell),
                Column('generated', count_cell),
                Column('shortened', count_cell),
                Column('seconds', '{:.1f}'.format),
            ],
            parts=[list(map(table_row, of_tasks)), [table_row(of_all)]],
            notes=estimate_lines(estimate),
        )
    ]
    if estimate.targets:
        tables.append(targets_table(estimate))
    content = {**asdict(estimate), 'total_seconds': estimate.total_seconds}
    print_tables(form, tables, [*of_tasks, of_all], content)


def targets_table(estimate: Estimate) -> Table:
    """Return what subsets by precision target take and give."""
    columns = [Column('items', count_cell), Column('seconds', '{:.1f}'.format)]
    columns += [Column(name, '{:.4f}'.format) for name in ('error', 'MDE')]
    rows = [
        TableRow(
            name=f'{100 * target.share:g}%' if target.share else 'all items',
            cells=[target.num_items, target.seconds, target.standard_error, target.detectable],
        )
        for target in estimate.targets
    ]
    title = f'Subsets by --precision-target, for {estimate.average}'
    return Table(title=title, columns=columns, parts=[rows], name='target', legend=TARGETS_LEGEND)


def count_cell(value: int) -> str:
    """Return a count, '' for 0."""
    return f'{value:,}' if value else ''


def estimate_lines(estimate: Estimate) -> list[str]:
    """Return the total time, its parts, and how it was estimated."""
    parts = ', '.join(f'{name} {duration(seconds)}' for name, seconds in estimate.seconds.items())
    ranks = f' on {estimate.num_ranks} ranks' if estimate.num_ranks > 1 else ''
    return [
        'generated: the tokens that generations have at most; shortened: prompts that do not fit',
        f'the evaluation would take about {duration(estimate.total_seconds)}{ranks}: {parts}',
        f'reading data and loading the model take about {duration(estimate.preparing_seconds)} more, before it',
        *estimate.notes,
    ]
