"""Load an evaluation's tasks, gauntlet and SCORE datasets from YAML files or plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.score import check_labels, read_score
from llmfoundry_gauntlet.config.settings import AVERAGES, ERROR, SKIP, GauntletSource, ScoreSource, TasksSource
from llmfoundry_gauntlet.config.tasks import GENERATION_KEYS, MULTIPLE_CHOICE, SETTINGS, GauntletSpec, task_key
from llmfoundry_gauntlet.config.yaml import YamlProblems, decode_partly, read_key, source_name
from llmfoundry_gauntlet.errors import ConfigError, Problems, as_given, closest, describe, listed, naming, suggestion
from llmfoundry_gauntlet.metrics.metrics import RENAMED
from llmfoundry_gauntlet.tasks import Task, task_types

OLDER_NAMES = {'question_answering': 'generation_task_with_answers'}  # former names of task types
# Keys of tasks that earlier versions had. Their records hold them as null, which is read.
REMOVED_KEYS = {
    'pmi_context': 'went with the metric PMINormalizedMatch; leave it out: CharacterNormalizedMatch and '
    'ByteNormalizedMatch also account for the form of choices, and need no key'
}
TASKS_KEY = 'icl_tasks'
GAUNTLET_KEY = 'eval_gauntlet'


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The validated tasks of an evaluation, each with one number of shots, and the gauntlet over them, if any.

    SCORE's tasks come last. `missing` has the reason for each benchmark of the gauntlet that no task provides.
    """

    tasks: tuple[Task, ...]
    gauntlet: GauntletSpec | None
    warnings: tuple[str, ...]
    missing: Mapping[str, str] = field(default_factory=dict)


def load_suite(
    tasks: TasksSource | None,
    gauntlet: GauntletSource | None = None,
    score: ScoreSource | None = None,
    *,
    is_partial: bool = False,
    missing: str = ERROR,
) -> Suite:
    """Load tasks, gauntlet and SCORE from YAML files or plain values; raise one ConfigError with all problems.

    The arguments are those of `read_suite`.
    """
    suite, problems = read_suite(tasks, gauntlet, score, is_partial=is_partial, missing=missing)
    if problems:
        raise ConfigError(problems)
    return suite


def read_suite(
    tasks: TasksSource | None,
    gauntlet: GauntletSource | None = None,
    score: ScoreSource | None = None,
    *,
    is_partial: bool = False,
    missing: str = ERROR,
) -> tuple[Suite, list[str]]:
    """Return tasks, gauntlet and SCORE from YAML files or plain values, as far as they are valid, and all problems.

    `tasks` is a path, a list of paths, or the list of tasks itself; `gauntlet` a path or the mapping itself; `score` a
    path, a mapping or a list of them. A benchmark without a task is a problem unless `missing` is SKIP. An average over
    an unknown category gives a warning; with `is_partial`, so does SCORE on a task that is not given.
    """
    problems: list[str] = []
    broken: set[str] = set()
    specs = () if tasks is None else read_tasks(tasks, problems, broken)
    spec = None if gauntlet is None else read_gauntlet(gauntlet, problems)
    score_specs = {} if score is None else read_score(score, problems)
    unknown_labels = [] if broken else check_labels(score_specs, specs, score)
    problems.extend([] if is_partial else unknown_labels)
    lacking = missing_benchmarks(specs, spec, broken) if specs and spec else {}
    if spec and lacking and missing != SKIP:
        num_benchmarks = sum(len(category.benchmarks) for category in spec.categories)
        problems.append(
            f'{source_name(gauntlet, GAUNTLET_KEY)}: no task provides {len(lacking)} of {num_benchmarks} benchmarks: '
            f'{listed(lacking.values())}; add their tasks, or give {as_given("missing", SKIP)} to leave out '
            'the composites over them'
        )
    warnings = metrics_left_out(specs) + unknown_labels
    if spec is not None:
        warnings += unknown_averages(spec, source_name(gauntlet, GAUNTLET_KEY))
    every_task = [task.at(num_shots) for task in specs for num_shots in task.num_fewshot]
    if score_specs:
        from llmfoundry_gauntlet.tasks.score import score_task  # late: other tasks do not need its scorers

        sources = {task.label for task in specs if task.icl_task_type == MULTIPLE_CHOICE}
        every_task += [
            score_task(spec, specs)
            for spec in score_specs.values()
            if is_partial or spec.task_label is None or spec.task_label in sources
        ]
    suite = Suite(
        tasks=tuple(every_task),
        gauntlet=spec,
        warnings=tuple(warnings),
        missing=dict.fromkeys(lacking, 'no task provides it'),
    )
    return suite, problems


def at_shots(suite: Suite, num_shots: int) -> Suite:
    """Return the suite with every task at this number of shots; task types without shots are unchanged."""
    at_number = [task.at(num_shots) if task.has_shots else task for task in suite.tasks]
    # A label that was asked at several numbers of shots is asked once.
    by_key = {task.key: task for task in at_number}
    return with_tasks(suite, by_key.values())


def only(suite: Suite, names: Iterable[str]) -> Suite:
    """Return the suite restricted to these labels, keys or categories. Raise ConfigError."""
    with naming('only'):
        keys = keys_named(suite, names)
    return with_tasks(suite, [task for task in suite.tasks if task.key in keys])


def keys_named(suite: Suite, names: Iterable[str]) -> set[str]:
    """Return the keys of the tasks with these labels, keys or categories. Raise ConfigError with every unknown name."""
    keys_by_name: dict[str, set[str]] = {}
    for task in suite.tasks:
        for name in (task.label, task.key):
            keys_by_name.setdefault(name, set()).add(task.key)
    categories = () if suite.gauntlet is None else suite.gauntlet.categories
    for category in categories:
        keys_by_name.setdefault(category.name, set()).update(benchmark.key for benchmark in category.benchmarks)

    names = list(names)
    unknown = [
        f'{name or repr(name)}: no such task or category{suggestion(name, keys_by_name)}'
        for name in names
        if name not in keys_by_name
    ]
    if unknown:
        raise ConfigError(unknown)
    return {key for name in names for key in keys_by_name[name]}


def watched_scores(suite: Suite, names: Iterable[str]) -> tuple[str, ...]:
    """Return the averages, categories and keys of tasks with these names or labels; AVERAGES is all averages.

    Raise ConfigError with every unknown name.
    """
    gauntlet = suite.gauntlet
    averages = [] if gauntlet is None else list(gauntlet.named_averages)
    categories = [] if gauntlet is None else [category.name for category in gauntlet.categories]
    names_of_scores = {AVERAGES: averages, **{name: [name] for name in (*averages, *categories)}}
    for task in suite.tasks:
        if not task.asks_variants:
            for name in dict.fromkeys((task.label, task.key)):
                names_of_scores.setdefault(name, []).append(task.key)

    unknown = [name for name in names if name not in names_of_scores]
    if unknown:
        raise ConfigError(
            [
                f'alert_on: {name or repr(name)}: no such average, category or task{suggestion(name, names_of_scores)}'
                for name in unknown
            ]
        )
    watched = tuple(dict.fromkeys(score for name in names for score in names_of_scores[name]))
    losses = [task.key for task in suite.tasks if task.key in watched and is_loss(task)]
    if losses:
        raise ConfigError(
            f'alert_on: {listed(losses)}: has a metric that is better the lower it is; allowed: scores that are worse'
        )
    return watched


def is_loss(task: Task) -> bool:
    """Return whether a task's first metric is the better the lower it is."""
    return any(metric.is_loss for metric in task.metrics()[:1])


def with_tasks(suite: Suite, tasks: Iterable[Task]) -> Suite:
    """Return the suite with other tasks, and only the categories and averages that are complete with them."""
    tasks = tuple(tasks)
    if suite.gauntlet is None:
        return replace(suite, tasks=tasks)
    # A missing task is no choice of the user: composites over it are absent with a reason, not left out.
    keys = {task.key for task in tasks} | suite.missing.keys()
    return replace(suite, tasks=tasks, gauntlet=with_complete_composites(suite.gauntlet, keys))


def with_complete_composites(gauntlet: GauntletSpec, keys: set[str]) -> GauntletSpec | None:
    """Return the gauntlet with the categories and averages that these tasks make complete; None without any."""
    complete = [
        category
        for category in gauntlet.categories
        if keys.issuperset(benchmark.key for benchmark in category.benchmarks)
    ]
    if not complete:
        return None
    names = {category.name for category in complete}
    averages = {name: members for name, members in gauntlet.named_averages.items() if names.issuperset(members)}
    return replace(gauntlet, categories=tuple(complete), averages=averages)


def read_tasks(source: TasksSource, problems: list[str], broken: set[str]) -> tuple[Task, ...]:
    """Return the tasks of all sources; append to `problems`, and add labels of invalid tasks to `broken`."""
    # A list of tasks is one source, a list of paths is several.
    sources: list[Any] = [source]
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, (str, Path)) for item in source):
        sources = list(source)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for part in sources:
        source_problems = YamlProblems(source_name(part, TASKS_KEY))
        node = read_key(Path(part), TASKS_KEY, source_problems) if isinstance(part, (str, Path)) else part
        if node is not None:
            tasks.extend(decode_tasks(node, source_problems, seen, broken))
        problems.extend(source_problems.messages)
    return tuple(tasks)


def decode_tasks(node: Any, problems: Problems, seen: dict[str, str], broken: set[str]) -> list[Task]:
    """Return the tasks of one list; `seen` maps each '{label}/{n}-shot' so far to its place."""
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
    """Return one task; accept former names of keys and task types."""
    if not isinstance(entry, Mapping):
        problems.add(path, f'is {describe(entry)}; allowed: a mapping')
        return None
    entry = dict(entry)
    if 'question_prelimiter' in entry:
        if 'prelimiter' in entry:
            problems.add(path, "'question_prelimiter' is the old name of 'prelimiter': give one of them")
        entry['prelimiter'] = entry.pop('question_prelimiter')
    for key in REMOVED_KEYS.keys() & entry.keys():
        if entry.pop(key) is not None:
            problems.add(f'{path}.{key}', REMOVED_KEYS[key])
    if isinstance(entry.get('num_fewshot'), int) and not isinstance(entry['num_fewshot'], bool):
        entry['num_fewshot'] = [entry['num_fewshot']]
    before = len(problems.messages)
    kind: type[Task] = Task
    name = entry.get('icl_task_type')
    if isinstance(name, str):
        name = entry['icl_task_type'] = OLDER_NAMES.get(name, name)
        if name not in task_types():
            problems.add(f'{path}.icl_task_type', f'unknown task type {name!r}{suggestion(name, task_types())}')
            meant = closest(name, task_types())
            if meant is None:
                known = set().union(*map(yaml_keys, task_types().values()))
                for key in entry.keys() - known:
                    problems.add(f'{path}.{key}', f"unknown key '{key}'{suggestion(str(key), known)}")
                return None
            name = entry['icl_task_type'] = meant  # for its other keys
        kind = task_types()[name]
    known = yaml_keys(kind)
    for key in [key for key in entry if key not in known]:
        owners = [owner for owner, other in task_types().items() if key in yaml_keys(other)]
        if owners and isinstance(name, str):
            problems.add(f'{path}.{key}', f'has no meaning in {name}; it belongs to {", ".join(owners)}')
        if key in SETTINGS:
            problems.add(f'{path}.{key}', f"unknown key '{key}'{suggestion(key, known)}")
        # Its nearest name is max_seq_len, which would change prompts.
        is_of_generation = kind.generates and key in GENERATION_KEYS and not owners
        if is_of_generation:
            problems.add(
                f'{path}.{key}', f'belongs to generation_kwargs; write generation_kwargs: {{{key}: {entry[key]}}}'
            )
        if owners or key in SETTINGS or is_of_generation:
            del entry[key]
    task: Task | None = decode_partly(kind, entry, path, problems)
    if task is not None:
        check_metrics(task, path, problems)
        if any(task.num_fewshot) and not task.has_shots:
            problems.add(
                f'{path}.num_fewshot',
                f'is {list(task.num_fewshot)}; allowed: [0], as {task.icl_task_type} has no shots',
            )
    return task if len(problems.messages) == before else None


def yaml_keys(kind: type[Task]) -> set[str]:
    """Return the YAML keys of a task type."""
    return {item.name for item in fields(kind)} - set(SETTINGS)


def check_metrics(task: Task, path: str, problems: Problems) -> None:
    """Add a problem for each metric that the task type has twice, or under neither its current nor a former name."""
    names = [metric.name for metric in task.metrics()]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.add(path, f'the task type {task.icl_task_type} has two metrics {name!r}; give each its own name')
    allowed = [*names, *task.older_metrics]
    for name in task.metric_names or ():
        if RENAMED.get(name, name) not in allowed:
            problems.add(
                path, f'metric_names: {name!r} is not a metric of {task.icl_task_type}; allowed: {", ".join(allowed)}'
            )


def read_gauntlet(source: GauntletSource, problems: list[str]) -> GauntletSpec | None:
    """Return the gauntlet of a source, as far as it is valid; append to `problems`."""
    source_problems = YamlProblems(source_name(source, GAUNTLET_KEY))
    node: Any = source
    if isinstance(source, (str, Path)):
        node = read_key(Path(source), GAUNTLET_KEY, source_problems)
    spec: GauntletSpec | None = None
    if node is not None:
        spec = decode_partly(GauntletSpec, node, GAUNTLET_KEY, source_problems)
    problems.extend(source_problems.messages)
    return spec


def missing_benchmarks(tasks: Sequence[Task], gauntlet: GauntletSpec, broken: Collection[str]) -> dict[str, str]:
    """Return a description, by key, of each benchmark that no task provides at its number of shots.

    Benchmarks whose label is in `broken`, the labels of invalid tasks, are left out.
    """
    shots_by_label: dict[str, list[int]] = {}
    for task in tasks:
        shots_by_label.setdefault(task.label, []).extend(task.num_fewshot)
    missing = {}
    for c, category in enumerate(gauntlet.categories):
        for b, benchmark in enumerate(category.benchmarks):
            name = benchmark.name
            shots = shots_by_label.get(name, [])
            if benchmark.num_fewshot in shots or name in broken:
                continue
            if shots:
                hint = f'the task {name} has {", ".join(map(str, shots))} shots'
            else:
                hint = 'no task has that label' + suggestion(name, shots_by_label).partition(';')[0]
            missing[benchmark.key] = f'{benchmark.key} (categories[{c}].benchmarks[{b}]: {hint})'
    return missing


def metrics_left_out(tasks: Sequence[Task]) -> list[str]:
    """Return a warning for each metric of a task that this version does not compute."""
    return [
        f'{task.label}: metric_names: {name} is not supported by this version; it is left out'
        for task in tasks
        for name in task.metric_names or ()
        if name in task.older_metrics
    ]


def unknown_averages(gauntlet: GauntletSpec, source: str) -> list[str]:
    """Return a warning for each category of an average that is not in the gauntlet."""
    names = [category.name for category in gauntlet.categories]
    return [
        f'{source}: {GAUNTLET_KEY}.averages.{average}: is left out, as the gauntlet has no category {member!r}'
        f'{suggestion(member, names)}'
        for average, members in gauntlet.named_averages.items()
        for member in members
        if member not in names
    ]
