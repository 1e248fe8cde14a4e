"""Load and validate settings, tasks and data, before any model is loaded; warn about what makes scores differ."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from llmfoundry_gauntlet.config.settings import ERROR, SKIP, EvaluationSettings, decode_settings
from llmfoundry_gauntlet.data.examples import TaskRows
from llmfoundry_gauntlet.data.published import PUBLISHED, SAMPLE, UNOFFICIAL, origin_of, read_manifest
from llmfoundry_gauntlet.errors import (
    Collected,
    ConfigError,
    DataError,
    GauntletError,
    MissingFileError,
    as_given,
    listed,
    named,
    plural,
)
from llmfoundry_gauntlet.evaluation.subsets import subsets_of
from llmfoundry_gauntlet.evaluation.suite import Suite, at_shots, only, read_suite, watched_scores
from llmfoundry_gauntlet.metrics.keys import check_key_names
from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.code import sandbox_of
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.multiple_choice import MultipleChoiceTask
from llmfoundry_gauntlet.types import ChatFormat, Example, Item

MAX_NAMES = 5  # names of files to fetch in one message
# Settings that name files, and the one that says what to do if some are missing.
FILES = ('tasks', 'gauntlet', 'score', 'data_root', 'missing')

# Fields of EvaluationData with an entry for each task that can run.
BY_TASK = ('examples', 'subsets', 'subset_sizes', 'num_rows', 'digests', 'origins')

RowsByTask = Mapping[str, Sequence[Example]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Validated settings, tasks and rows. All mappings are by task key.

    `examples` has all rows, from which shots are drawn. For tasks with a subset, `subsets` has the rows to evaluate
    and `subset_sizes` their number; `num_rows` has the number of rows in the whole file. `absent` lists optional data
    files that are absent, `digests` has the SHA-256 of the rows, and `origins` their origin: sample, published,
    unofficial or own. `unsupported` has the reason for each missing task or benchmark and, after
    `with_programs`, for tasks whose programs cannot run here; `with_programs` also sets `sandbox`.
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
    num_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def tasks(self) -> dict[str, Task]:
        """Return the tasks that have rows and can run here, by key."""
        return {task.key: task for task in self.suite.tasks if task.key in self.examples}

    def asked(self, key: str) -> list[Example]:
        """Return the rows of a task to evaluate."""
        return self.subsets.get(key, self.examples[key])


def load_inputs(values: Mapping[str, Any], source: str = 'eval_gauntlet') -> EvaluationData:
    """Decode the settings of an evaluation, and load its tasks, gauntlet and rows.

    `source` is the name of the settings in messages. Raise ConfigError or DataError with every problem found; the files
    that the settings name are checked even if other settings are invalid.
    """
    collected = Collected()
    with collected:
        return load_data(decode_settings(values, source))
    with collected:
        check_named_files(values)
    raise collected.error()


def check_named_files(values: Mapping[str, Any]) -> None:
    """Load the files that settings name. Raise ConfigError or DataError, but none for the settings themselves."""
    try:
        settings = decode_settings({key: values[key] for key in FILES if key in values})
    except ConfigError:
        return
    load_data(settings)


def load_data(settings: EvaluationSettings) -> EvaluationData:
    """Load tasks, gauntlet and rows. Raise ConfigError or DataError with every problem found."""
    collected = Collected()
    suite, problems = read_suite(settings.tasks, settings.gauntlet, settings.score, missing=settings.missing)
    if problems:
        collected.add(ConfigError(problems))
    else:
        with collected:
            suite = selected(suite, settings)
    rows: dict[str, TaskRows] = {}
    missing: dict[str, str] = {}
    with collected:
        rows, missing = read_data(suite, settings.data_root, missing=settings.missing)
    suite = with_what_rows_tell(suite, rows)
    examples = {key: list(task_rows.examples) for key, task_rows in rows.items()}
    tasks = [task for task in suite.tasks if task.key in rows]
    if settings.reference:
        with collected:
            check_patterns(tasks, examples)
    with collected:
        check_metric_keys(suite, examples)
    with collected:
        watched_scores(suite, settings.alert_on)
    with collected:
        check_shares(suite)
    collected.raise_all()
    subsets = subsets_of(tasks, suite.gauntlet, examples, settings)
    origins = {task.key: origin_of(files_of(task, settings.data_root)) for task in tasks}
    warnings_of_rows = [warning for task_rows in rows.values() for warning in task_rows.warnings]
    data = EvaluationData(
        settings=settings,
        suite=suite,
        examples=examples,
        unsupported={**suite.missing, **missing},
        absent={key: task_rows.absent for key, task_rows in rows.items()},
        warnings=(
            *origin_warnings(origins, settings.data_root),
            *suite.warnings,
            *warnings_of_rows,
            *row_warnings(tasks, examples, subsets, origins),
        ),
        origins=origins,
        digests={key: digest_of_rows(of_task) for key, of_task in examples.items()},
        num_rows={key: len(of_task) for key, of_task in examples.items()},
    )
    return with_subsets(data, subsets)


def selected(suite: Suite, settings: EvaluationSettings) -> Suite:
    """Return the suite with the chosen tasks at the chosen number of shots, and their settings. Raise ConfigError."""
    if settings.only is not None:
        suite = only(suite, settings.only)
    if settings.num_fewshot is not None:
        suite = at_shots(suite, settings.num_fewshot)
    return replace(suite, tasks=tuple(task.with_settings(settings) for task in suite.tasks))


def with_programs(data: EvaluationData) -> EvaluationData:
    """Return the data with a sandbox and without tasks whose programs cannot run here. Raise ConfigError.

    Tests the sandbox and the compilers, so call it only when an evaluation starts.
    """
    sandbox, unsupported = sandbox_of(list(data.tasks.values()), data.examples, data.settings.sandbox)

    changes: dict[str, Any] = {'unsupported': {**data.unsupported, **unsupported}}
    for name in BY_TASK:
        by_task = getattr(data, name)
        changes[name] = {key: value for key, value in by_task.items() if key not in unsupported}
    if not changes['examples']:
        reasons = [f'{key}: {reason}' for key, reason in unsupported.items()]
        raise ConfigError([*reasons, 'nothing is left to run'])
    return replace(data, sandbox=sandbox, **changes)


def with_subsets(data: EvaluationData, subsets: Mapping[str, list[Example]]) -> EvaluationData:
    """Return the data with evaluation limited to these rows, by task."""
    fewer = {key: rows for key, rows in subsets.items() if len(rows) < len(data.examples[key])}
    return replace(data, subsets=fewer, subset_sizes={key: len(rows) for key, rows in fewer.items()})


def check_metric_keys(suite: Suite, examples: Mapping[str, Sequence[Example]]) -> None:
    """Raise ConfigError if two names would give the same metric key."""
    categories = {}
    for key, rows in examples.items():
        names = {row.category for row in rows if row.category is not None}
        categories[key] = sorted(names)
    composites: list[str] = []
    if suite.gauntlet is not None:
        composites += [category.name for category in suite.gauntlet.categories]
        composites += suite.gauntlet.averages or ()
    check_key_names(categories, composites)


def check_shares(suite: Suite) -> None:
    """Raise ConfigError for each benchmark of the gauntlet whose metric is no share, the higher the better."""
    if suite.gauntlet is None:
        return
    tasks = {task.key: task for task in suite.tasks}
    problems = []
    for category in suite.gauntlet.categories:
        for benchmark in category.benchmarks:
            task = tasks.get(benchmark.key)
            if task is not None and not task.has_share:
                first = task.metrics()[0].name
                problems.append(
                    f'{category.name}: {benchmark.key}: its metric {first} is no share, the higher the better, as '
                    'composites need it; name another one with metric in its task, or leave it out of the gauntlet'
                )
    if problems:
        raise ConfigError(problems)


def digest_of_rows(examples: Sequence[Example]) -> str:
    """Return the SHA-256 of a task's rows in order, independent of file format and key order."""
    rows = dict.fromkeys((example.file, example.row, example.digest) for example in examples)
    return hashlib.sha256(repr(list(rows)).encode()).hexdigest()


def check_patterns(tasks: Sequence[Task], examples: RowsByTask) -> None:
    """Raise ConfigError for invalid regular expressions: llm-foundry treats stop strings as such."""
    problems = []
    for task in tasks:
        rule = task.stops([example.content for example in examples[task.key]])
        try:
            re.compile('|'.join(rule.strings) if rule.as_pattern else '')
        except re.error as error:
            problems.append(
                f'{task.key}: early_stopping_criteria: {list(rule.strings)} is no regular expression, as which '
                f'{as_given("semantics", "reference")} reads it ({error}); escape it, or leave '
                f'{as_given("semantics", "corrected")}'
            )
    if problems:
        raise ConfigError(problems)


def read_data(suite: Suite, data_root: str, *, missing: str = ERROR) -> tuple[dict[str, TaskRows], dict[str, str]]:
    """Return the rows by task, and why others have none. Raise DataError or ConfigError with every problem found.

    If `missing` is SKIP, tasks without a data file are left out.
    """
    rows: dict[str, TaskRows] = {}
    errors: list[GauntletError] = []
    missing_by_task: dict[str, MissingFileError] = {}
    for task in suite.tasks:
        try:
            rows[task.key] = task.read(data_root)
        except MissingFileError as error:
            missing_by_task[task.key] = error
        except (ConfigError, DataError) as error:
            errors.append(error)
    if missing_by_task and (missing != SKIP or not rows):
        without_file = [task for task in suite.tasks if task.key in missing_by_task]
        errors.append(missing_files(without_file, suite, data_root, missing_by_task))
    if errors:
        # A file that several tasks use gives each of them the same problems.
        problems = dict.fromkeys(problem for error in errors for problem in error.problems)
        raise type(errors[0])(list(problems))
    return rows, dict.fromkeys(missing_by_task, 'its data file is missing')


def with_what_rows_tell(suite: Suite, rows: Mapping[str, TaskRows]) -> Suite:
    """Return the suite with the tasks that are known better since their rows were read."""
    tasks = []
    for task in suite.tasks:
        read = rows.get(task.key)
        tasks.append(task if read is None or read.task is None else read.task)
    return replace(suite, tasks=tuple(tasks))


def missing_files(
    tasks: Sequence[Task], suite: Suite, data_root: str, errors: Mapping[str, MissingFileError]
) -> DataError:
    """Return one error for all missing files, with their number, the data root and how to get them."""
    missing = {task.dataset_name: task for task in tasks}
    num_files = len({task.dataset_name for task in suite.tasks})
    known = {file.task for file in read_manifest()} & {task.label for task in tasks}
    if len(missing) == 1 and not known:
        return errors[tasks[0].key]
    advice = f'set {named("data_root")} to their folder'
    if known:
        names = f' {" ".join(sorted(known))}' if len(known) <= MAX_NAMES else ''
        advice = f'`gauntlet data fetch{names} --to {data_root}` downloads the published files'
    return DataError(
        f'{len(missing)} of {num_files} data files are missing below {data_root}: {listed(missing)}; {advice}; '
        f'{as_given("missing", SKIP)} runs the other tasks'
    )


def files_of(task: Task, data_root: str) -> tuple[Path, ...]:
    """Return a task's data files; none if its type does not read its rows from files."""
    try:
        return task.files(data_root)
    except DataError:
        return ()


def origin_warnings(origins: Mapping[str, str], data_root: str) -> list[str]:
    """Return at most one warning that data is not the published data; the user's own data gives none."""
    parts = []
    for origin, what, advice in (
        (SAMPLE, 'sample data, not the benchmark', 'gauntlet data fetch --to data downloads the published data'),
        (UNOFFICIAL, 'not known to be the published data', f'gauntlet data ls --data-root {data_root} compares them'),
    ):
        tasks = [task for task, origin_of_task in origins.items() if origin_of_task == origin]
        if tasks:
            names = '' if len(tasks) == len(origins) else f' ({listed(tasks)})'
            parts.append(f'{what}, in {len(tasks)} of {plural(len(origins), "task")}{names}; {advice}')
    return ['; '.join(parts)] if parts else []


def row_warnings(
    tasks: Sequence[Task], examples: RowsByTask, subsets: RowsByTask, origins: Mapping[str, str]
) -> list[str]:
    """Return all warnings about rows, without duplicates for files that several tasks use."""
    warnings: list[str] = []
    for task in tasks:
        rows = examples[task.key]
        if not task.builds_requests:
            warnings += few_rows(task, rows)
            warnings += own_questions(task, rows, subsets.get(task.key, rows))
        # Nobody can mend the published files, whose faults docs/tasks.md lists: a warning at each run says nothing new.
        if isinstance(task, MultipleChoiceTask) and origins[task.key] != PUBLISHED:
            warnings += repeated_choices(task, rows)
        if task.key in subsets:
            warnings += lost_categories(task, rows, subsets[task.key])
    return list(dict.fromkeys(warnings))


def few_rows(task: Task, rows: Sequence[Example]) -> Iterator[str]:
    """Yield a warning if an item has fewer other rows to draw shots from, within its category, than shots."""
    (num_shots,) = task.num_fewshot
    sizes = Counter(row.category for row in rows)
    smallest, size = min(sizes.items(), key=lambda pair: pair[1])
    if size > num_shots:
        return
    of_category = ''
    if smallest is not None:
        num_small = sum(size <= num_shots for size in sizes.values())
        of_category = f' in category {smallest!r} ({num_small} of {len(sizes)} categories have too few)'
    available = plural(size, 'row')
    yield f'{task.key}: prompts have {size - 1} of {plural(num_shots, "shot")}, of {available} in all{of_category}'


def own_questions(task: Task, rows: Sequence[Example], asked: Sequence[Example]) -> Iterator[str]:
    """Yield a warning if items have their own question among their shots, from duplicate rows."""
    if own := task.own_questions(rows, asked):
        what = 'which stay (semantics: reference)' if task.reference else 'which were drawn again'
        yield f'{task.key}: {len(own)} of {plural(len(asked), "item")} had their own question among their shots, {what}'


def repeated_choices(task: MultipleChoiceTask, rows: Sequence[Example]) -> Iterator[str]:
    """Yield a warning if rows have duplicate choices; of two equal correct ones only one counts as correct."""
    repeated = [row for row in rows if len(set(row.content.choices)) < len(row.content.choices)]
    if not repeated:
        return
    num_right = 0
    for row in repeated:
        choices = row.content.choices
        num_right += choices.count(choices[row.content.gold]) > 1
    yield (
        f'{task.label}: {len(repeated)} of {plural(len(rows), "row")} have a choice twice, {num_right} of them the '
        f'right one; gauntlet explain {task.label} --row {repeated[0].row} shows the first'
    )


def lost_categories(task: Task, rows: Sequence[Example], asked: Sequence[Example]) -> Iterator[str]:
    """Yield a warning if a subset contains no rows of some categories."""
    categories = {row.category for row in rows}
    num_lost = len(categories - {row.category for row in asked})
    if num_lost:
        yield (
            f'{task.key}: {len(asked)} items leave out {num_lost} of {len(categories)} categories; its score is the '
            'mean over the others'
        )


def prompt_warnings(tasks: Mapping[str, Task], items: Mapping[str, Sequence[Item]], max_seq_len: int) -> Iterator[str]:
    """Yield warnings about generations limited to fewer tokens than their task's default, and shortened prompts."""
    most_tokens = max_seq_len // 2  # the other half is reserved for the prompt
    limited = []
    for key, task in tasks.items():
        default = task.default_max_new_tokens
        is_given = 'max_new_tokens' in (task.generation_kwargs or {})
        if task.generates and default is not None and default > most_tokens and not is_given:
            limited.append(f'{key} ({default})')
    if limited:
        yield (
            f'{named("max_seq_len")} is {max_seq_len}, so generations get only {most_tokens} tokens: '
            f'{", ".join(limited)}'
        )
    shortened = [key for key, of_task in items.items() if any(item.request.prompt_shortened for item in of_task)]
    if shortened:
        shots_left: dict[int, list[float]] = {}  # means of tasks, by the number of shots that was asked for
        for key in shortened:
            (num_shots,) = tasks[key].num_fewshot
            shots_left.setdefault(num_shots, []).append(fmean(item.num_shots for item in items[key]))
        means = [
            f'{num_shots}-shot is {fmean(of_tasks):.1f}'
            for num_shots, of_tasks in sorted(shots_left.items())
            if num_shots
        ]
        left = f'; {", ".join(means)} on average' if means else ''
        yield f'{len(shortened)} of {plural(len(items), "task")}: prompts shortened to fit {max_seq_len} tokens{left}'


def chat_warnings(tasks: Mapping[str, Task], examples: RowsByTask, encoder: Encoder) -> Iterator[str]:
    """Yield warnings about choices scored where a model reasons, and arguments that a chat template does not know."""
    tasks = {key: task for key, task in tasks.items() if not task.builds_requests}
    in_chat = {
        key: task for key, task in tasks.items() if any(encoder.in_chat(task.prompt(row)) for row in examples[key][:1])
    }
    plain = [key for key, task in tasks.items() if key not in in_chat and task.chat_format != ChatFormat()]
    if plain:
        without_effect = f'{named("system_prompt")} and {named("chat_template_kwargs")}'
        yield f'{listed(plain)}: is sent in no chat template, so {without_effect} have no effect'
    if not in_chat:
        return
    chat = next(iter(in_chat.values())).chat_format
    if unused := encoder.unused_arguments(chat):
        yield (
            f"{named('chat_template_kwargs')}: {listed(unused)} is not in the tokenizer's chat template and has no "
            'effect'
        )
    scored = [key for key, task in in_chat.items() if not task.generates]
    if scored and encoder.reasons_first(chat):
        yield (
            f'{listed(scored)}: the chat template lets answers begin with reasoning, so choices are scored as the '
            'first words of the reasoning; if the template can switch it off, give chat_template_kwargs: '
            '{enable_thinking: false} (--chat-template-kwargs \'{"enable_thinking": false}\'), else generate '
            'answers, or leave out apply_chat_template'
        )
