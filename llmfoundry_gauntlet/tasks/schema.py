"""Schemas (Winograd): one continuation scored after each of several contexts (partial evaluation, arXiv 1806.02847)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.data.fields import gold_field, text_field, texts_field
from llmfoundry_gauntlet.judging.likelihood import judge_choice
from llmfoundry_gauntlet.tasks.base import TaskType, rows_by, strip_end
from llmfoundry_gauntlet.tasks.multiple_choice import OLDER_METRICS, ChoicesTask, choice_metrics
from llmfoundry_gauntlet.values import Judgement, Question, ScoreOutput


@dataclass(frozen=True, slots=True)
class Schema:
    """A row: `{"context_options": [...], "continuation": ..., "gold": index}`."""

    context_options: tuple[str, ...]
    continuation: str
    gold: int

    @property
    def num_choices(self) -> int:
        """The same in every row of a file."""
        return len(self.context_options)


def parse(row: Mapping[str, Any], task: ChoicesTask) -> Schema:
    """A checked row."""
    options = texts_field(row, task.choices_key or 'context_options')
    continuation = text_field(row, 'continuation', allow_empty=False)
    return Schema(context_options=options, continuation=continuation, gold=gold_field(row, len(options)))


def shot(content: Schema, task: TaskSpec, first: bool) -> str:
    """The right context and the continuation. As upstream, the prelimiter stands before the example delimiter."""
    delimiter = '' if first else task.example_delimiter
    context = content.context_options[content.gold]
    return task.prelimiter + delimiter + context + task.continuation_delimiter + content.continuation


def ask(content: Schema, task: TaskSpec, first: bool) -> Question:
    """Every context, with the continuation to be scored after each.

    As upstream, a context that nothing precedes carries no continuation delimiter.
    """
    delimiter = '' if first else task.example_delimiter
    end = '' if first else strip_end(task.continuation_delimiter, task)
    contexts = tuple(task.prelimiter + delimiter + option + end for option in content.context_options)
    return Question(contexts=contexts, continuations=(content.continuation,) * len(contexts))


def judge(output: ScoreOutput, content: Schema, task: TaskSpec, reference: bool) -> Judgement:
    """The preferred context against the gold one."""
    return judge_choice(output, content.gold, reference=reference)


TASK_TYPE = TaskType(
    name='schema',
    keys=ChoicesTask,
    metrics=choice_metrics,
    older_metrics=OLDER_METRICS,
    read=rows_by(parse),
    shot=shot,
    ask=ask,
    judge=judge,
)
