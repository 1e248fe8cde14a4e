"""Prompts of recorded items, rebuilt from the data files; each must have the recorded digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmfoundry_gauntlet.errors import ConfigError, DataError
from llmfoundry_gauntlet.records.runs import Run
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.score import ScoreTask, score_task
from llmfoundry_gauntlet.values import Example, ItemKey, ItemResult, Prompt

CHANGED = 'rebuilt from the data file it differs: data, shots or settings have changed since the evaluation'
NO_ROW = 'the data file no longer has this row'

PromptOrReason = Prompt | str


def find_prompts(run: Run, wanted: Sequence[ItemResult], data_root: str | None) -> dict[ItemKey, PromptOrReason]:
    """Return the prompt of each item exactly as it was sent, or why it is not known.

    `data_root` replaces the recorded one. Only files on this machine are read.
    """
    by_task: dict[str, list[ItemResult]] = {}
    for result in wanted:
        by_task.setdefault(result.key.task, []).append(result)
    found: dict[ItemKey, PromptOrReason] = {}
    for key, results in by_task.items():
        task = run.tasks[key]
        if isinstance(task, ScoreTask):
            task = score_task(task.spec, run.data.suite.tasks)
        examples = read_examples(task, data_root or run.data.settings.data_root)
        if isinstance(examples, str):
            found |= dict.fromkeys((result.key for result in results), examples)
        else:
            found |= dict.fromkeys((result.key for result in results), NO_ROW)
            found |= prompts_of(task, examples, results)
    return found


def read_examples(task: Task, data_root: str) -> Sequence[Example] | str:
    """Return a task's examples from local files, or why they cannot be read."""
    source = task.source or task if isinstance(task, ScoreTask) else task
    if '://' in source.dataset_uri:
        return f'its rows are at {source.dataset_uri}, which a report does not read'
    if not task.has_rows:
        return f'{source.dataset_uri} is not among the tasks of the run'
    try:
        return task.read(data_root).examples
    except (ConfigError, DataError) as error:
        return f'its data cannot be read: {error.problems[0]}'


def prompts_of(
    task: Task, examples: Sequence[Example], results: Sequence[ItemResult]
) -> Iterator[tuple[ItemKey, PromptOrReason]]:
    """Yield each item whose row exists with its prompt."""
    wanted: dict[ItemKey, list[ItemResult]] = {}
    for result in results:  # all generations of a prompt under the name of the first
        key = result.key
        name = ItemKey(task=key.task, row=key.row, file=key.file, variant=key.variant)
        wanted.setdefault(name, []).append(result)
    asked = [example for example in examples if task.item_key(example) in wanted]
    for example, shots in task.examples_with_shots(examples, asked):
        candidates = dict(candidate_prompts(task, example, shots))
        for result in wanted.get(task.item_key(example), ()):
            yield result.key, candidates.get(result.prompt_sha256, CHANGED)


def candidate_prompts(task: Task, example: Example, shots: Sequence[Example]) -> Iterator[tuple[str, Prompt]]:
    """Yield digest and prompt with all shots, then with ever fewer, as for prompts that would be too long."""
    for num_dropped in range(len(shots) + 1):
        prompt = task.prompt(example, shots[num_dropped:])
        try:
            yield prompt.sha256, prompt
        except UnicodeEncodeError:  # half a surrogate pair, which no prompt that was sent has
            return
