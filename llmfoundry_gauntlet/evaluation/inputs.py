"""Load and validate settings, tasks and data, before any model is loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.score import ScoreSpec, check_labels, read_score
from llmfoundry_gauntlet.config.settings import EvaluationSettings
from llmfoundry_gauntlet.config.tasks import SETTINGS, GauntletSpec, task_key
from llmfoundry_gauntlet.config.yaml import Problems, decode, describe, read_key, source_name, suggestion
from llmfoundry_gauntlet.data.examples import file_sizes, subset
from llmfoundry_gauntlet.data.manifest import origin_of
from llmfoundry_gauntlet.errors import ConfigError, DataError, GauntletError
from llmfoundry_gauntlet.evaluation.data_warnings import origin_warnings, row_warnings
from llmfoundry_gauntlet.evaluation.precision import precise_subsets
from llmfoundry_gauntlet.metrics.keys import check_names
from llmfoundry_gauntlet.metrics.metrics import RENAMED
from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox
from llmfoundry_gauntlet.tasks import Task, metrics_of, task_types
from llmfoundry_gauntlet.tasks.programs import check_programs
from llmfoundry_gauntlet.tasks.score import ScoreTask
from llmfoundry_gauntlet.types import Example, FileSizes

OLDER_NAMES = {'question_answering': 'generation_task_with_answers'}  # of task types
TASKS_KEY = 'icl_tasks'
GAUNTLET_KEY = 'eval_gauntlet'

TasksSource = str | Path | Sequence[Any]
GauntletSource = str | Path | Mapping[str, Any]
ScoreSource = str | Path | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The checked tasks of an evaluation, each with one number of shots, and the gauntlet over them, if any.

    SCORE's tasks come last.
    """

    tasks: tuple[Task, ...]
    gauntlet: GauntletSpec | None
    warnings: tuple[str, ...]


def load_suite(
    tasks: TasksSource | None,
    gauntlet: GauntletSource | None = None,
    score: ScoreSource | None = None,
    *,
    is_partial: bool = False,
) -> Suite:
    """Load tasks, gauntlet and SCORE from YAML files or plain values; raise one ConfigError with all problems.

    `tasks` is a path, a list of paths, or the list of tasks itself; `gauntlet` a path or the mapping itself; `score` a
    path, a mapping or a list of them. If both are given, a benchmark without a task is a problem. An average over an
    unknown category is a warning; with `is_partial`, so is SCORE on a task that is not given.
    """
    problems: list[str] = []
    broken: set[str] = set()
    specs = () if tasks is None else read_tasks(tasks, problems, broken)
    spec = None if gauntlet is None else read_gauntlet(gauntlet, problems)
    score_specs = {} if score is None else read_score(score, problems)
    unknown_labels = [] if broken else check_labels(score_specs, specs, score)
    problems.extend([] if is_partial else unknown_labels)
    if specs and spec:
        missing = missing_benchmarks(specs, spec, source_name(gauntlet, GAUNTLET_KEY))
        problems.extend(text for label, text in missing if label not in broken)
    if problems:
        raise ConfigError(problems)
    warnings = metrics_left_out(specs) + unknown_labels
    if spec is not None:
        warnings += unknown_averages(spec, source_name(gauntlet, GAUNTLET_KEY))
    each = tuple(task.at(num_shots) for task in specs for num_shots in task.num_fewshot)
    return Suite(tasks=(*each, *score_tasks(score_specs, specs)), gauntlet=spec, warnings=tuple(warnings))


def read_tasks(source: TasksSource, found: list[str], broken: set[str]) -> tuple[Task, ...]:
    """Return the tasks of all sources; problems are added to `found`, labels of invalid tasks to `broken`."""
    parts: list[Any] = [source]
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, (str, Path)) for item in source):
        parts = list(source)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for part in parts:
        problems = Problems(source_name(part, TASKS_KEY))
        node = part if not isinstance(part, (str, Path)) else read_key(Path(part), TASKS_KEY, problems)
        if node is not None:
            tasks.extend(decode_tasks(node, problems, seen, broken))
        found.extend(problems.found)
    return tuple(tasks)


def decode_tasks(node: Any, problems: Problems, seen: dict[str, str], broken: set[str]) -> list[Task]:
    """Return the tasks of one list; `seen` maps every '{label}/{n}-shot' so far to its place."""
    if not isinstance(node, (list, tuple)) or not node:
        problems.add(TASKS_KEY, f'is {describe(node)}; allowed: a list of tasks, or a path to a file with one')
        return []
    tasks = []
    for index, entry in enumerate(node):
        path = f'{TASKS_KEY}[{index}]'
        task = decode_task(entry, path, problems)
        if task is None:
            if isinstance(entry, Mapping):
                broken.add(str(entry.get('label')))
            continue
        tasks.append(task)
        for num_shots in task.num_fewshot:
            key = task_key(task.label, num_shots)
            if key in seen:
                problems.add(path, f'duplicate {key}, first at {seen[key]}; give each number of shots of a label once')
            seen.setdefault(key, f'{problems.source}: {path}')
    return tasks


def decode_task(entry: Any, path: str, problems: Problems) -> Task | None:
    """Return one task; old names of keys and task types are accepted."""
    if not isinstance(entry, Mapping):
        problems.add(path, f'is {describe(entry)}; allowed: a mapping')
        return None
    entry = dict(entry)
    if 'question_prelimiter' in entry:
        if 'prelimiter' in entry:
            problems.add(path, "'question_prelimiter' is the old name of 'prelimiter': give one of them")
        entry['prelimiter'] = entry.pop('question_prelimiter')
    if isinstance(entry.get('num_fewshot'), int) and not isinstance(entry['num_fewshot'], bool):
        entry['num_fewshot'] = [entry['num_fewshot']]
    kind: type[Task] = Task
    name = entry.get('icl_task_type')
    if isinstance(name, str):
        name = entry['icl_task_type'] = OLDER_NAMES.get(name, name)
        if name not in task_types():
            problems.add(f'{path}.icl_task_type', f'unknown task type {name!r}{suggestion(name, task_types())}')
            return None
        kind = task_types()[name]
    known = keys_of(kind)
    for key in [key for key in entry if key not in known]:
        owners = [owner for owner, other in task_types().items() if key in keys_of(other)]
        if owners and isinstance(name, str):
            problems.add(f'{path}.{key}', f'has no meaning in {name}; it belongs to {", ".join(owners)}')
        if key in SETTINGS:
            problems.add(f'{path}.{key}', f"unknown key '{key}'{suggestion(key, known)}")
        if owners or key in SETTINGS:
            del entry[key]
    task: Task | None = decode(kind, entry, path, problems)
    if task is not None:
        check_metric_names(task, path, problems)
        if any(task.num_fewshot) and not task.has_shots:
            problems.add(
                f'{path}.num_fewshot',
                f'is {list(task.num_fewshot)}; allowed: [0], as {task.icl_task_type} has no shots',
            )
    return task


def keys_of(kind: type[Task]) -> set[str]:
    """Return the YAML keys of a type of task."""
    return {item.name for item in fields(kind)} - set(SETTINGS)


def score_tasks(specs: Mapping[int, ScoreSpec], tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return the tasks of SCORE's datasets."""
    if not specs:
        return ()
    from llmfoundry_gauntlet.tasks.score import score_task  # late: other tasks do not need its scorers

    return tuple(score_task(spec, tasks) for spec in specs.values())


def check_metric_names(task: Task, path: str, problems: Problems) -> None:
    """Add a problem for each metric that the task type has under neither a current nor an old name."""
    allowed = [*(metric.name for metric in metrics_of(task)), *task.older_metrics]
    for name in task.metric_names or ():
        if RENAMED.get(name, name) not in allowed:
            problems.add(
                path, f'metric_names: {name!r} is not a metric of {task.icl_task_type}; allowed: {", ".join(allowed)}'
            )


def read_gauntlet(source: GauntletSource, found: list[str]) -> GauntletSpec | None:
    """Return the gauntlet of a source; problems are appended to `found`."""
    problems = Problems(source_name(source, GAUNTLET_KEY))
    node = read_key(Path(source), GAUNTLET_KEY, problems) if isinstance(source, (str, Path)) else source
    spec = None if node is None else decode(GauntletSpec, node, GAUNTLET_KEY, problems)
    found.extend(problems.found)
    return spec


def load_gauntlet(source: GauntletSource) -> GauntletSpec:
    """Load only a gauntlet. Raise ConfigError."""
    found: list[str] = []
    spec = read_gauntlet(source, found)
    if spec is None:
        raise ConfigError(found)
    return spec


def missing_benchmarks(tasks: Sequence[Task], gauntlet: GauntletSpec, source: str) -> list[tuple[str, str]]:
    """Return label and problem of each benchmark that no task provides at its number of shots."""
    shots: dict[str, list[int]] = {}
    for task in tasks:
        shots.setdefault(task.label, []).extend(task.num_fewshot)
    problems = []
    for c, category in enumerate(gauntlet.categories):
        for b, benchmark in enumerate(category.benchmarks):
            if benchmark.num_fewshot in shots.get(benchmark.name, []):
                continue
            if benchmark.name in shots:
                have = ', '.join(map(str, shots[benchmark.name]))
                hint = f'the task {benchmark.name} has {have} shots'
            else:
                hint = 'no task has that label' + suggestion(benchmark.name, shots).partition(';')[0]
            path = f'{GAUNTLET_KEY}.categories[{c}].benchmarks[{b}]'
            text = f'{source}: {path}: no task provides {benchmark.key} ({category.name}): {hint}'
            problems.append((benchmark.name, text))
    return problems


def metrics_left_out(tasks: Sequence[Task]) -> list[str]:
    """Return a warning for each metric of a task that this version does not compute."""
    return [
        f'{task.label}: metric_names: {name} is not supported by this version; it is left out'
        for task in tasks
        for name in task.metric_names or ()
        if name in task.older_metrics
    ]


def unknown_averages(gauntlet: GauntletSpec, source: str) -> list[str]:
    """Return a warning for each category of an average that the gauntlet does not have."""
    names = [category.name for category in gauntlet.categories]
    return [
        f'{source}: {GAUNTLET_KEY}.averages.{average}: the gauntlet has no category {member!r}; the average is absent'
        for average, members in gauntlet.named_averages.items()
        for member in members
        if member not in names
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Checked settings, tasks and rows.

    `examples` are all rows by task, from which shots are drawn; `subsets` has the rows to evaluate of tasks with a
    subset, `subset_sizes` their number, `file_sizes` the number of rows of each cluster in the whole file. `absent`
    lists optional data files that are absent, by task; `digests` has a SHA-256 of the rows by task, `origins` where
    they come from: sample, published, unofficial or own. `sandbox` and
    `unsupported`, the tasks whose programs cannot run here with the reason, are set when the evaluation starts
    (`with_programs`).
    """

    settings: EvaluationSettings
    suite: Suite
    examples: Mapping[str, list[Example]]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    subsets: Mapping[str, list[Example]] = field(default_factory=dict)
    sandbox: Sandbox | None = None
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    subset_sizes: Mapping[str, int] = field(default_factory=dict)
    file_sizes: Mapping[str, FileSizes] = field(default_factory=dict)

    @property
    def tasks(self) -> dict[str, Task]:
        """Return the tasks that have rows and can run here, by key."""
        return {task.key: task for task in self.suite.tasks if task.key in self.examples}

    def asked(self, key: str) -> list[Example]:
        """Return the rows of a task to evaluate."""
        return self.subsets.get(key, self.examples[key])

    def file_sizes_of(self, task: Task) -> FileSizes | None:
        """Return the number of items of each cluster in a task's file; {} without a subset, None if unknown."""
        if task.key not in self.subset_sizes:
            return {}
        sizes = self.file_sizes.get(task.key)
        return sizes and {category: found * task.num_samples for category, found in sizes.items()}


def load_data(settings: EvaluationSettings) -> EvaluationData:
    """Load tasks, gauntlet and rows. Raise ConfigError or DataError with every problem found."""
    suite = load_suite(settings.tasks, settings.gauntlet, settings.score)
    suite = replace(suite, tasks=tuple(task.with_settings(settings) for task in suite.tasks))
    if settings.subset_items is not None:
        suite = with_fewer_questions(suite, settings.subset_items)
    rows = read_data(suite, settings.data_root)
    if settings.reference:
        check_patterns(suite, rows)
    check_keys(suite, rows.examples)
    subsets = subsets_of(suite, rows.examples, settings)
    origins = {task.key: origin_of(task.files(settings.data_root)) for task in suite.tasks}
    data = EvaluationData(
        settings=settings,
        suite=suite,
        examples=rows.examples,
        absent=rows.absent,
        warnings=(
            *origin_warnings(origins, settings.data_root),
            *suite.warnings,
            *rows.warnings,
            *row_warnings(suite.tasks, rows.examples, subsets),
        ),
        origins=origins,
        digests={key: digest_of_rows(found) for key, found in rows.examples.items()},
    )
    return with_subsets(data, subsets)


def with_programs(data: EvaluationData) -> EvaluationData:
    """Return the data with a sandbox, and without the tasks whose programs cannot run here. Raise ConfigError.

    It tests the sandbox and the compilers, so call it when an evaluation starts.
    """
    sandbox, unsupported = check_programs(list(data.tasks.values()), data.examples, data.settings.sandbox)

    def supported(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in unsupported}

    examples = supported(data.examples)
    if not examples:
        raise ConfigError([f'{key}: {reason}' for key, reason in unsupported.items()] + ['nothing is left to run'])
    return replace(
        data,
        sandbox=sandbox,
        unsupported={**data.unsupported, **unsupported},
        examples=examples,
        subsets=supported(data.subsets),
        subset_sizes=supported(data.subset_sizes),
        file_sizes=supported(data.file_sizes),
        digests=supported(data.digests),
        origins=supported(data.origins),
    )


def with_subsets(data: EvaluationData, subsets: Mapping[str, list[Example]]) -> EvaluationData:
    """Return the data with only these rows evaluated, by task."""
    fewer = {key: rows for key, rows in subsets.items() if len(rows) < len(data.examples[key])}
    return replace(
        data,
        subsets=fewer,
        subset_sizes={key: len(rows) for key, rows in fewer.items()},
        file_sizes={key: file_sizes(data.examples[key]) for key in fewer},
    )


def with_fewer_questions(suite: Suite, num_items: int) -> Suite:
    """Return the suite with at most this many questions of each SCORE dataset."""
    tasks = [
        replace(task, spec=replace(task.spec, subset_items=min(task.spec.subset_items or num_items, num_items)))
        if isinstance(task, ScoreTask)
        else task
        for task in suite.tasks
    ]
    return replace(suite, tasks=tuple(tasks))


def check_keys(suite: Suite, examples: Mapping[str, Sequence[Example]]) -> None:
    """Raise ConfigError if two names would be the same key in the metric stream."""
    categories = {
        key: sorted({row.category for row in rows if row.category is not None}) for key, rows in examples.items()
    }
    gauntlet = suite.gauntlet
    composites = () if gauntlet is None else (*(part.name for part in gauntlet.categories), *(gauntlet.averages or ()))
    check_names(categories, composites)


def subsets_of(
    suite: Suite, examples: Mapping[str, list[Example]], settings: EvaluationSettings
) -> dict[str, list[Example]]:
    """Return the rows to evaluate of each task with more; SCORE's subsets are chosen by question when read."""
    if settings.precision is not None:
        subsets = precise_subsets(suite.tasks, examples, suite.gauntlet, settings.precision)
    else:
        tasks = [task.key for task in suite.tasks if not isinstance(task, ScoreTask) and task.key in examples]
        subsets = {key: subset(examples[key], settings.subset_items) for key in tasks}
    return {key: rows for key, rows in subsets.items() if len(rows) < len(examples[key])}


def digest_of_rows(examples: Sequence[Example]) -> str:
    """Return the SHA-256 of a task's rows in order; it does not depend on file format or key order."""
    rows = dict.fromkeys((example.file, example.row, example.digest) for example in examples)
    return hashlib.sha256(repr(list(rows)).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of all tasks, as in EvaluationData."""

    examples: Mapping[str, list[Example]]
    absent: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]


def check_patterns(suite: Suite, rows: Rows) -> None:
    """Raise ConfigError for stop strings that are invalid regular expressions, as which llm-foundry uses them."""
    problems = []
    for task in suite.tasks:
        rule = task.stops([example.content for example in rows.examples[task.key]])
        try:
            re.compile('|'.join(rule.strings) if rule.as_pattern else '')
        except re.error as error:
            problems.append(
                f'{task.key}: early_stopping_criteria: {list(rule.strings)} is no regular expression, as which '
                f'semantics: reference reads it ({error}); escape it, or leave semantics: corrected'
            )
    if problems:
        raise ConfigError(problems)


def read_data(suite: Suite, data_root: str) -> Rows:
    """Return the rows by task. Raise DataError or ConfigError with every problem found."""
    examples: dict[str, list[Example]] = {}
    absent: dict[str, tuple[str, ...]] = {}
    warnings: list[str] = []
    errors: list[GauntletError] = []
    for task in suite.tasks:
        try:
            found = task.read(data_root)
        except (ConfigError, DataError) as error:
            errors.append(error)
        else:
            examples[task.key], absent[task.key] = list(found.examples), found.absent
            warnings.extend(found.warnings)
    if errors:
        raise type(errors[0])(list(dict.fromkeys(problem for error in errors for problem in error.problems)))
    return Rows(examples=examples, absent=absent, warnings=tuple(warnings))
