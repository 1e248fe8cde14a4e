"""Read tasks' files as the rows that data checks compare, the same for all task types."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from llmfoundry_gauntlet.data.checks import CheckedRow, TaskFile
from llmfoundry_gauntlet.data.readers import locate
from llmfoundry_gauntlet.data.score_rows import LetteredQuestion, find_files, read_score_rows
from llmfoundry_gauntlet.data.stores import is_remote
from llmfoundry_gauntlet.errors import ConfigError, DataError
from llmfoundry_gauntlet.scoring.mathematics import gold_of
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.tasks.generation import Problem
from llmfoundry_gauntlet.tasks.score import ScoreTask
from llmfoundry_gauntlet.types import Example


def read_files(tasks: Sequence[Task], data_root: str, problems: list[str]) -> Iterator[TaskFile]:
    """Yield the files of each task once, whatever its numbers of shots; add unreadable rows to `problems`."""
    for task in {task.label: task for task in tasks}.values():
        try:
            yield from files_of(task, data_root)
        except (ConfigError, DataError) as error:
            problems.extend(error.problems)


def files_of(task: Task, data_root: str) -> Iterator[TaskFile]:
    """Yield the file of a task of a YAML, or those of one of SCORE's datasets; SCORE on such a task has none."""
    if not isinstance(task, ScoreTask):
        rows = tuple(task_row(example, task) for example in task.read(data_root).examples)
        uri = task.dataset_uri
        yield TaskFile(name=task.label, source=uri if is_remote(uri) else str(locate(uri, data_root)), rows=rows)
    elif task.source is None and task.has_rows:
        by_file: dict[str | None, list[CheckedRow]] = defaultdict(list)
        for example in read_score_rows(task.spec, data_root).examples:
            by_file[example.file].append(score_row(example))
        for (stem, found), path in zip(by_file.items(), find_files(task.spec, data_root)[0], strict=True):
            name = task.label if stem is None else f'{task.label}/{stem}'
            yield TaskFile(name=name, source=str(path), rows=tuple(found))


def task_row(example: Example, task: Task) -> CheckedRow:
    """Return a row of a task of a YAML, of any type."""
    content = example.content
    asked = task.ask(content, True)
    row = bare_row(example, asked.contexts[0])
    if task.generates:
        golds = content.golds if isinstance(content, Problem) else task.responses(content)
        return replace(row, golds=tuple(golds))
    if len(asked.continuations) == 1:
        return replace(row, golds=asked.continuations)
    row = replace(row, question=(asked.contexts, tuple(sorted(asked.continuations))), choices=asked.continuations)
    if len(asked.contexts) > 1:  # of a schema: several contexts before one ending
        row = replace(row, prompt='\n'.join(asked.contexts), choices=asked.contexts)
    if not isinstance(content.gold, int):  # a task type of another package may have another gold
        return row
    return replace(row, gold=content.gold, golds=(row.choices[content.gold],))


def bare_row(example: Example, prompt: str) -> CheckedRow:
    """Return a row without its answers."""
    return CheckedRow(
        line=example.row + 1,
        digest=example.digest,
        source=example.cluster,
        prompt=prompt,
        question=prompt,
        golds=(),
    )


def score_row(example: Example) -> CheckedRow:
    """Return a row of one of SCORE's datasets; without a gold if a problem of MATH has no boxed answer."""
    content = example.content
    row = bare_row(example, content.text)
    if isinstance(content, LetteredQuestion):
        question = (content.text, tuple(sorted(content.options)))
        golds = (content.options[content.gold],)
        return replace(row, question=question, choices=content.options, gold=content.gold, golds=golds)
    try:
        return replace(row, golds=(gold_of(content.text, content.solution, None),))
    except ValueError:
        return row
