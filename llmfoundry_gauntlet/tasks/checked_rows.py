"""Read the data files of all task types as uniform rows for the data checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from llmfoundry_gauntlet.data.checks import CheckedRow, TaskFile
from llmfoundry_gauntlet.data.readers import locate
from llmfoundry_gauntlet.data.score_rows import LetteredQuestion, find_files, read_score_rows
from llmfoundry_gauntlet.data.stores import is_remote
from llmfoundry_gauntlet.errors import ConfigError, DataError
from llmfoundry_gauntlet.scoring.mathematics import gold_of
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.tasks.generation import OpenQuestion
from llmfoundry_gauntlet.tasks.score import ScoreTask
from llmfoundry_gauntlet.types import Example


def read_files(tasks: Sequence[Task], data_root: str, problems: list[str]) -> Iterator[TaskFile]:
    """Yield the files of each task once, whatever its numbers of shots; add unreadable rows to `problems`.

    A task of a YAML has one file, one of SCORE's datasets several; SCORE on a task of a YAML has none.
    """
    for task in {task.label: task for task in tasks}.values():
        try:
            if not isinstance(task, ScoreTask):
                rows = tuple(task_row(example, task) for example in task.read(data_root).examples)
                uri = task.dataset_uri
                yield TaskFile(
                    name=task.label, source=uri if is_remote(uri) else str(locate(uri, data_root)), rows=rows
                )
            elif task.source is None and task.has_rows:
                by_file: dict[str | None, list[CheckedRow]] = defaultdict(list)
                for example in read_score_rows(task.spec, data_root).examples:
                    by_file[example.file].append(score_row(example))
                for (stem, found), path in zip(by_file.items(), find_files(task.spec, data_root)[0], strict=True):
                    name = task.label if stem is None else f'{task.label}/{stem}'
                    yield TaskFile(name=name, source=str(path), rows=tuple(found))
        except (ConfigError, DataError) as error:
            problems.extend(error.problems)


def task_row(example: Example, task: Task) -> CheckedRow:
    """Return a row of a task of a YAML, of any type."""
    content = example.content
    asked = task.ask(content, True)
    if task.generates:
        golds = content.golds if isinstance(content, OpenQuestion) else task.responses(content)
        return checked_row(example, asked.contexts[0], next(iter(golds), None))
    if len(asked.continuations) == 1:
        return checked_row(example, asked.contexts[0], asked.continuations[0])
    # A schema has several contexts and one continuation.
    choices = asked.contexts if len(asked.contexts) > 1 else asked.continuations
    gold = content.gold if isinstance(content.gold, int) else None  # an installed task type may have no index
    question = (asked.contexts, tuple(sorted(asked.continuations)))
    answer = None if gold is None else choices[gold]
    return checked_row(example, '\n'.join(asked.contexts), answer, question=question, choices=choices, gold=gold)


def score_row(example: Example) -> CheckedRow:
    """Return a row of one of SCORE's datasets; without an answer if a problem of MATH has no boxed one."""
    content = example.content
    if isinstance(content, LetteredQuestion):
        question, answer = (content.text, tuple(sorted(content.options))), content.options[content.gold]
        return checked_row(example, content.text, answer, question=question, choices=content.options, gold=content.gold)
    try:
        return checked_row(example, content.text, gold_of(content.text, content.solution, None))
    except ValueError:
        return checked_row(example, content.text, None)


def checked_row(
    example: Example, prompt: str, answer: str | None, *, question: Hashable = None, **choices: Any
) -> CheckedRow:
    """Return a row; its question is the prompt unless it has choices."""
    return CheckedRow(
        line=example.row + 1,
        digest=example.digest,
        source=example.cluster,
        prompt=prompt,
        question=question or prompt,
        answer=answer,
        **choices,
    )
