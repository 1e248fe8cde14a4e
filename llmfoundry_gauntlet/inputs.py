"""What an evaluation is made of before any model is there: checked settings, tasks and rows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmfoundry_gauntlet.config.score import ScoreTask
from llmfoundry_gauntlet.config.settings import EvaluationSettings
from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.data.subsets import subset
from llmfoundry_gauntlet.errors import ConfigError, DataError, GauntletError
from llmfoundry_gauntlet.judging.code.sandbox import Sandbox
from llmfoundry_gauntlet.scores.keys import check_names
from llmfoundry_gauntlet.suite import Suite, load_suite
from llmfoundry_gauntlet.tasks import type_of
from llmfoundry_gauntlet.tasks.means import find_means
from llmfoundry_gauntlet.tasks.texts import TextTask
from llmfoundry_gauntlet.values import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Checked settings, tasks and rows. `unsupported` maps tasks that cannot be run to the reason.

    `examples` are all rows, out of which shots are drawn; `subsets` has those that are asked, of tasks where that is a
    part. `sandbox` is where programs are run, where any are to be; `absent` names data files by task that may be
    absent, and are; `warnings` say what is odd in YAML files and data; `digests` has a SHA-256 of the rows by task,
    `subset_sizes` how many are asked where not all are.
    """

    settings: EvaluationSettings
    suite: Suite
    examples: Mapping[str, list[Example]]
    unsupported: Mapping[str, str]
    subsets: Mapping[str, list[Example]] = field(default_factory=dict)
    sandbox: Sandbox | None = None
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    subset_sizes: Mapping[str, int] = field(default_factory=dict)

    def asked(self, key: str) -> list[Example]:
        """The rows of a task that are asked."""
        return self.subsets.get(key, self.examples[key])


def load_data(settings: EvaluationSettings, *, runs_programs: bool = True) -> EvaluationData:
    """Tasks, gauntlet and rows, checked; and with `runs_programs` a sandbox, where there are programs to be run.

    Tasks whose programs cannot be run here are left out. Raises ConfigError or DataError with every problem found.
    """
    suite = load_suite(settings.tasks, settings.gauntlet, settings.score)
    if settings.subset_items is not None:
        suite = with_fewer_questions(suite, settings.subset_items)
    rows = read_data(suite, settings.data_root)
    if settings.reference:
        check_patterns(suite, rows)
    sandbox, unsupported = find_means(suite.tasks, rows.examples, settings.sandbox) if runs_programs else (None, {})
    examples = {key: found for key, found in rows.examples.items() if key not in unsupported}
    if not examples:
        raise ConfigError([f'{key}: {reason}' for key, reason in unsupported.items()] + ['nothing is left to run'])
    check_keys(suite, examples)
    subsets = subsets_of(suite, examples, settings.subset_items)
    data = EvaluationData(
        settings=settings,
        suite=suite,
        examples=examples,
        unsupported=unsupported,
        sandbox=sandbox,
        absent=rows.absent,
        warnings=(*suite.warnings, *rows.warnings, *lost_categories(examples, subsets)),
        digests={key: digest_of_rows(found) for key, found in examples.items()},
    )
    return with_subsets(data, subsets)


def with_subsets(data: EvaluationData, subsets: Mapping[str, list[Example]]) -> EvaluationData:
    """The same, of which these rows alone are asked, in tasks that have more."""
    fewer = {key: rows for key, rows in subsets.items() if len(rows) < len(data.examples[key])}
    return replace(data, subsets=fewer, subset_sizes={key: len(rows) for key, rows in fewer.items()})


def with_fewer_questions(suite: Suite, num_items: int) -> Suite:
    """The suite with at most so many questions of each of SCORE's data sets that does not say how many."""
    tasks = [
        replace(task, score=replace(task.score, subset_items=task.score.subset_items or num_items))
        if isinstance(task, ScoreTask)
        else task
        for task in suite.tasks
    ]
    return replace(suite, tasks=tuple(tasks))


def check_keys(suite: Suite, examples: Mapping[str, Sequence[Example]]) -> None:
    """Raises ConfigError where two names would be one key in the metric stream."""
    categories = {
        key: sorted({row.category for row in rows if row.category is not None}) for key, rows in examples.items()
    }
    gauntlet = suite.gauntlet
    composites = () if gauntlet is None else (*(part.name for part in gauntlet.categories), *(gauntlet.averages or ()))
    check_names(categories, composites)


def subsets_of(suite: Suite, examples: Mapping[str, list[Example]], num_items: int | None) -> dict[str, list[Example]]:
    """The rows that are asked of each task that has more; SCORE's have been chosen by question."""
    return {
        task.key: subset(examples[task.key], num_items)
        for task in suite.tasks
        if num_items is not None
        and not isinstance(task, ScoreTask)
        and task.key in examples
        and len(examples[task.key]) > num_items
    }


def lost_categories(examples: Mapping[str, list[Example]], subsets: Mapping[str, list[Example]]) -> list[str]:
    """A warning for each task whose subset has no row of some categories."""
    found = []
    for key, rows in subsets.items():
        categories = {example.category for example in examples[key]}
        lost = len(categories - {example.category for example in rows})
        if lost:
            found.append(
                f'{key}: {len(rows)} items leave out {lost} of {len(categories)} categories; its score is the mean '
                'over the others'
            )
    return found


def digest_of_rows(examples: Sequence[Example]) -> str:
    """The SHA-256 of a task's rows in their order, whatever their file's format and the order of their keys."""
    rows = dict.fromkeys((example.file, example.row, example.digest) for example in examples)
    return hashlib.sha256(repr(list(rows)).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of all tasks, as EvaluationData has them."""

    examples: Mapping[str, list[Example]]
    absent: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]


def check_patterns(suite: Suite, rows: Rows) -> None:
    """Raises ConfigError where llm-foundry's semantics make regular expressions of stop strings that are none."""
    problems = []
    for task in suite.tasks:
        replies = type_of(task).replies
        if replies is None:
            continue
        rule = replies.stops(task, [example.content for example in rows.examples[task.key]], True)
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
    """Rows by task. Raises DataError or ConfigError with every problem found."""
    examples: dict[str, list[Example]] = {}
    absent: dict[str, tuple[str, ...]] = {}
    warnings: list[str] = []
    errors: list[GauntletError] = []
    for task in suite.tasks:
        try:
            found = type_of(task).read(task, data_root)
        except (ConfigError, DataError) as error:
            errors.append(error)
        else:
            examples[task.key], absent[task.key] = list(found.examples), found.absent
            warnings.extend(found.warnings)
    if errors:
        raise type(errors[0])(list(dict.fromkeys(problem for error in errors for problem in error.problems)))
    return Rows(examples=examples, absent=absent, warnings=tuple(warnings))


def tasks_with_data(data: EvaluationData) -> dict[str, TaskSpec]:
    """The tasks that can be run, by key."""
    return {task.key: task for task in data.suite.tasks if task.key in data.examples}


def text_tasks(data: EvaluationData) -> dict[str, TextTask]:
    """The tasks that can be run as texts alone, by key."""
    return {
        key: TextTask(
            task=task,
            examples=data.examples[key],
            subset=data.subsets.get(key),
            fewshot=data.settings.fewshot,
            reference=data.settings.reference,
        )
        for key, task in tasks_with_data(data).items()
    }
