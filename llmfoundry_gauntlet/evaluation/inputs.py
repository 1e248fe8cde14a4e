"""Load and validate settings, tasks and data, before any model is loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmfoundry_gauntlet.config.settings import EvaluationSettings
from llmfoundry_gauntlet.data.subsets import subset
from llmfoundry_gauntlet.errors import ConfigError, DataError, GauntletError
from llmfoundry_gauntlet.evaluation.suite import Suite, load_suite
from llmfoundry_gauntlet.metrics.keys import check_names
from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.programs import check_programs
from llmfoundry_gauntlet.tasks.score import ScoreTask
from llmfoundry_gauntlet.types import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Checked settings, tasks and rows.

    `examples` are all rows by task, from which shots are drawn; `subsets` has the rows to evaluate of tasks with a
    subset, `subset_sizes` their number. `absent` lists optional data files that are absent, by task; `digests` has a
    SHA-256 of the rows by task. `sandbox` and `unsupported`, the tasks whose programs cannot run here with the reason,
    are set when the evaluation starts (`with_programs`).
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
    subset_sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def tasks(self) -> dict[str, Task]:
        """Return the tasks that have rows and can run here, by key."""
        return {task.key: task for task in self.suite.tasks if task.key in self.examples}

    def asked(self, key: str) -> list[Example]:
        """Return the rows of a task to evaluate."""
        return self.subsets.get(key, self.examples[key])


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
    subsets = subsets_of(suite, rows.examples, settings.subset_items)
    data = EvaluationData(
        settings=settings,
        suite=suite,
        examples=rows.examples,
        absent=rows.absent,
        warnings=(*suite.warnings, *rows.warnings, *lost_categories(rows.examples, subsets)),
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
        digests=supported(data.digests),
    )


def with_subsets(data: EvaluationData, subsets: Mapping[str, list[Example]]) -> EvaluationData:
    """Return the data with only these rows evaluated, by task."""
    fewer = {key: rows for key, rows in subsets.items() if len(rows) < len(data.examples[key])}
    return replace(data, subsets=fewer, subset_sizes={key: len(rows) for key, rows in fewer.items()})


def with_fewer_questions(suite: Suite, num_items: int) -> Suite:
    """Return the suite with this `subset_items` for SCORE datasets without one of their own."""
    tasks = [
        replace(task, spec=replace(task.spec, subset_items=task.spec.subset_items or num_items))
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


def subsets_of(suite: Suite, examples: Mapping[str, list[Example]], num_items: int | None) -> dict[str, list[Example]]:
    """Return the rows to evaluate of each task with more; SCORE's subsets are chosen by question when read."""
    return {
        task.key: subset(examples[task.key], num_items)
        for task in suite.tasks
        if num_items is not None
        and not isinstance(task, ScoreTask)
        and task.key in examples
        and len(examples[task.key]) > num_items
    }


def lost_categories(examples: Mapping[str, list[Example]], subsets: Mapping[str, list[Example]]) -> list[str]:
    """Return a warning for each task whose subset lacks some categories."""
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
