"""Judge a run against another: the rows of a comparison, the margins that a policy gives them, and the verdict."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from llmfoundry_gauntlet.config.gate import MARGINS, GateSettings
from llmfoundry_gauntlet.errors import COMMAND_LINE, ConfigError, Problems, RecordError, closest, join, listed
from llmfoundry_gauntlet.metrics.comparison import Difference
from llmfoundry_gauntlet.metrics.gate import (
    AVERAGES,
    CATEGORIES,
    FAMILIES,
    SCORE,
    TASKS,
    GateRow,
    evidence,
    judged,
    verdict_of,
)
from llmfoundry_gauntlet.results.files import RESULTS
from llmfoundry_gauntlet.results.report.comparison import Comparison, compare_runs
from llmfoundry_gauntlet.results.report.scores import tasks_of_composites
from llmfoundry_gauntlet.results.runs import Run
from llmfoundry_gauntlet.results.samples import SAMPLES

GAUNTLET_AVERAGE = 'gauntlet_average'  # required unless something else is
MOST_LOST = 0.01  # share of a required task's items that may have other prompts
HOW_TO_ALLOW = 'evaluate both alike, or give --allow-different to judge by the items in common'

Differences = Mapping[str, Mapping[str, Difference]]  # by family and name


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The verdict on the second of two runs, and each row that it follows from.

    `digests` are the SHA-256 of the results and samples of both runs. `warnings` say what else differs between them.
    """

    first: str
    second: str
    digests: tuple[str, str]
    settings: GateSettings
    rows: tuple[GateRow, ...]
    warnings: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """Return 'worse', 'ok' or 'unclear'."""
        return verdict_of(self.rows)

    @property
    def required(self) -> list[GateRow]:
        """Return the rows that must be ok."""
        return [row for row in self.rows if row.is_required]


def gate_runs(first: Run, second: Run, settings: GateSettings) -> Gate:
    """Return the verdict on the second run.

    Raise ConfigError for a policy that these runs cannot be judged by, with every problem found. Raise RecordError if
    they were not asked the same items, unless that is allowed, or if a required row has no difference.
    """
    comparison = compare_runs(first, second)
    differences = without_losses(by_family(comparison), first)
    ignored, required = selected_names(differences, settings)
    margins = margins_of(differences, settings)
    differences = {
        family: {name: compared for name, compared in group.items() if name not in ignored}
        for family, group in differences.items()
    }
    check_required(required, margins)

    tasks_of_required = {name: tasks_of(first, name) for name in required}
    obstacles = list(different_items(first, second, comparison, tasks_of_required))
    if obstacles and not settings.allow_different:
        raise RecordError([f'not comparable: {obstacle}; {HOW_TO_ALLOW}' for obstacle in obstacles])
    check_compared(differences, tasks_of_required)

    rows = []
    for family, group in differences.items():
        for name, compared in group.items():
            margin = margins[name]
            shown = evidence(compared.difference, margin, alpha=settings.alpha, is_task=family == TASKS)
            rows.append(
                GateRow(
                    name=name,
                    family=family,
                    compared=compared,
                    margin=margin,
                    is_required=name in required,
                    evidence=shown,
                )
            )
    return Gate(
        first=comparison.first,
        second=comparison.second,
        digests=(run_digest(first.folder), run_digest(second.folder)),
        settings=settings,
        rows=tuple(judged(rows, settings.alpha)),
        warnings=comparison.warnings,
    )


def by_family(comparison: Comparison) -> dict[str, dict[str, Difference]]:
    """Return the differences by family and name."""
    of_composites = comparison.groups['composites']
    averages = {name: compared for name, compared in of_composites.items() if name in comparison.averages}
    categories = {name: compared for name, compared in of_composites.items() if name not in comparison.averages}
    of_family = {
        TASKS: comparison.groups['tasks'],
        CATEGORIES: categories,
        AVERAGES: averages,
        SCORE: comparison.groups['score'],
    }
    return {family: dict(of_family[family]) for family in FAMILIES}


def without_losses(differences: Differences, run: Run) -> Differences:
    """Return the differences without tasks whose first metric is the better the lower it is: a fall is no harm."""
    losses = set()
    for key, task in run.tasks.items():
        if any(metric.is_loss for metric in task.metrics()[:1]):
            losses.add(key)
    of_tasks = {name: compared for name, compared in differences[TASKS].items() if name not in losses}
    return {**differences, TASKS: of_tasks}


# The rows that a policy names


def rows_named(name: str, differences: Differences) -> list[str]:
    """Return the rows of this name, or the tasks with this label at all their numbers of shots."""
    names = [row for group in differences.values() for row in group]
    if name in names:
        return [name]
    return [task for task in differences[TASKS] if task.rpartition('/')[0] == name]


def checked_rows(name: str, path: str, differences: Differences, problems: Problems) -> list[str]:
    """Return the rows of a name, and add a problem if there are none."""
    rows = rows_named(name, differences)
    if not rows:
        names = [row for group in differences.values() for row in group]
        similar = closest(name, [*names, *(task.rpartition('/')[0] for task in differences[TASKS])])
        meant = '`gauntlet compare` lists them' if similar is None else f"did you mean '{similar}'?"
        problems.add(path, f'the runs have no {name!r} in common; {meant}')
    return rows


def selected_names(differences: Differences, settings: GateSettings) -> tuple[set[str], list[str]]:
    """Return the rows that are ignored, and those that are required. Raise ConfigError."""
    policy, problems, of_command = settings.policy, settings.problems, Problems(COMMAND_LINE)
    ignored: set[str] = set()
    for index, name in enumerate(policy.ignore):
        ignored.update(checked_rows(name, f'ignore[{index}]', differences, problems))

    averages = list(differences[AVERAGES])
    if policy.require is None:
        required = [GAUNTLET_AVERAGE] if GAUNTLET_AVERAGE in averages else averages[:1]
    else:
        required = []
        for index, name in enumerate(policy.require):
            required += checked_rows(name, f'require[{index}]', differences, problems)
    for name in settings.require:
        required += checked_rows(name, 'require', differences, of_command)
    if policy.require is None and not averages and not settings.require:
        of_command.add('', 'nothing is required, as the first run has no averages; give --require NAME')
    for name in required:
        if name in ignored:
            problems.add('ignore', f'{name} is required; leave it out here, or require something else')
    raise_both(problems, of_command)
    return ignored, list(dict.fromkeys(required))


def margins_of(differences: Differences, settings: GateSettings) -> dict[str, float]:
    """Return the margin of each row: its own, else that of its family. Raise ConfigError."""
    policy, problems = settings.policy, settings.problems
    own = {}
    for name, margin in policy.margins.items():
        if name not in FAMILIES:
            own.update(dict.fromkeys(checked_rows(name, join('margins', name), differences, problems), margin))
    compared = {name: difference for group in differences.values() for name, difference in group.items()}
    for name, share in policy.relative.items():
        path = join('relative', name)
        for row in checked_rows(name, path, differences, problems):
            score = compared[row].first.value
            if score is not None and score <= 0:
                problems.add(path, f"the first run's score is {score:.3f}, of which no share can be taken; use margins")
            else:
                own[row] = share * (score or 0.0)
    problems.raise_all()

    of_family = {**MARGINS, **{name: margin for name, margin in policy.margins.items() if name in FAMILIES}}
    return {name: own.get(name, of_family[family]) for family, group in differences.items() for name in group}


def check_required(required: Sequence[str], margins: Mapping[str, float]) -> None:
    """Raise ConfigError for a required row that can never be ok."""
    without_margin = [name for name in required if margins[name] == 0]
    if without_margin:
        raise ConfigError(
            [
                f'{name}: is required, but with a margin of 0 nothing can be shown to be ok; give it one with '
                '--task-margin, or under margins in a policy file'
                for name in without_margin
            ]
        )


def check_compared(differences: Differences, tasks_of_required: Mapping[str, Sequence[str]]) -> None:
    """Raise RecordError for a required row without a difference or a standard error, with the tasks that lack one."""
    compared = {name: difference for group in differences.values() for name, difference in group.items()}
    problems = []
    for name, tasks in tasks_of_required.items():
        measure = compared[name].difference
        if measure.spread is not None:
            continue
        reasons = [measure.reason or 'it has no standard error']
        for task in tasks:
            of_task = differences[TASKS].get(task)
            if task != name and of_task is not None and of_task.difference.value is None:
                reasons.append(f'{task}: {of_task.difference.reason}')
        problems.append(f'{name}: is required, but cannot be compared: {listed(reasons)}')
    if problems:
        raise RecordError(problems)


def raise_both(*collections: Problems) -> None:
    """Raise one ConfigError with the problems of several sources, if there are any."""
    messages = [message for problems in collections for message in problems.messages]
    if messages:
        raise ConfigError(messages)


# Are two runs asked the same?


def tasks_of(run: Run, row: str) -> list[str]:
    """Return the tasks that a row is a score of."""
    gauntlet = run.data.suite.gauntlet
    of_composites = {} if gauntlet is None else tasks_of_composites(gauntlet)
    if row in of_composites:
        return of_composites[row]
    of_dataset = [
        key for key, task in run.tasks.items() if task.asks_variants and row.startswith(f'{task.dataset_name} ')
    ]
    return of_dataset or [row]


def different_items(
    first: Run, second: Run, comparison: Comparison, tasks_of_required: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield each reason why a difference of the required rows would not be one of the models alone."""
    semantics = [run.data.settings.semantics for run in (first, second)]
    if semantics[0] != semantics[1]:
        yield f'semantics is {semantics[0]} and {semantics[1]}'
    versions = [(run.record['composites'] or {}).get('version') for run in (first, second)]
    if None not in versions and versions[0] != versions[1]:
        yield (
            f'the gauntlets differ in tasks, shots, rows, weights or settings (version {versions[0]} and {versions[1]})'
        )
    for task in dict.fromkeys(chain.from_iterable(tasks_of_required.values())):
        items = comparison.common.get(task)
        if items is None:
            continue  # without it there is no composite either, which says so
        if first.data.digests.get(task) != second.data.digests.get(task):
            yield f'{task}: the data files differ, in rows or their right answers'
        num_items = max(items.num_items)
        if len(items.keys) < (1 - MOST_LOST) * num_items:
            causes = f' ({items.causes})' if len(items.keys) < items.num_shared else ''
            yield f'{task}: {len(items.keys):,} of {num_items:,} items were asked with the same prompt{causes}'


def run_digest(folder: Path) -> str:
    """Return the SHA-256 of a run's results and samples, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in [folder / RESULTS, *sorted((folder / SAMPLES).glob('*.jsonl'))]:
        content = path.read_bytes()
        digest.update(f'{path.name} {len(content)}\n'.encode())
        digest.update(content)
    return digest.hexdigest()
