"""Multiple choice: the choice with the highest mean log-probability per token after the query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.config.specs import MULTIPLE_CHOICE, TaskSpec
from llmfoundry_gauntlet.data.fields import gold_field, text_field, texts_field
from llmfoundry_gauntlet.judging.likelihood import judge_choice
from llmfoundry_gauntlet.judging.text import judge_named
from llmfoundry_gauntlet.scores import likelihood
from llmfoundry_gauntlet.scores.metrics import Metric, accuracy
from llmfoundry_gauntlet.tasks.base import TaskType, part, rows_by, strip_end
from llmfoundry_gauntlet.values import Judgement, Question, ScoreOutput

OLDER_METRICS = ('InContextLearningMCExpectedCalibrationError',)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesTask(TaskSpec):
    """`choices_key` is what a row calls the texts to choose from."""

    choices_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipleChoiceTask(ChoicesTask):
    """With `pmi_context`, such as 'Answer:', choices are also scored after that text alone, for PMINormalizedMatch."""

    pmi_context: str | None = None

    def __post_init__(self) -> None:
        TaskSpec.__post_init__(self)
        if self.pmi_context is not None and not self.pmi_context.strip():
            raise ValueError("pmi_context: is empty; allowed: a text such as 'Answer:', or leave it out")


@dataclass(frozen=True, slots=True)
class Choices:
    """A row: `{"query": ..., "choices": [...], "gold": index}`."""

    query: str
    choices: tuple[str, ...]
    gold: int

    @property
    def num_choices(self) -> int:
        """The same in every row of a file."""
        return len(self.choices)


def parse(row: Mapping[str, Any], task: ChoicesTask) -> Choices:
    """A checked row."""
    choices = texts_field(row, task.choices_key or 'choices')
    query = text_field(row, task.context_key or 'query')
    return Choices(query=query, choices=choices, gold=gold_field(row, len(choices)))


def shot(content: Choices, task: TaskSpec, first: bool) -> str:
    """The query and its right choice."""
    return part(task, content.query, first) + content.choices[content.gold]


def ask(content: Choices, task: TaskSpec, first: bool) -> Question:
    """The query alone; every choice is to be scored."""
    context = strip_end(part(task, content.query, first), task)
    return Question(contexts=(context,), continuations=content.choices)


def judge(output: ScoreOutput, content: Choices, task: TaskSpec, reference: bool) -> Judgement:
    """The preferred choice against the gold one."""
    return judge_choice(output, content.gold, reference=reference)


def judge_text(text: str, content: Choices) -> Judgement:
    """The choice that a reply begins with."""
    return judge_named(text, content.choices, content.gold)


def choice_metrics(task: ChoicesTask) -> tuple[Metric, ...]:
    """The accuracy, and what else log-probabilities of choices say."""
    metrics = [accuracy('InContextLearningMultipleChoiceAccuracy'), *likelihood.choice_metrics()]
    if isinstance(task, MultipleChoiceTask) and task.pmi_context is not None:
        metrics.append(likelihood.pmi())
    return tuple(metrics)


TASK_TYPE = TaskType(
    name=MULTIPLE_CHOICE,
    keys=MultipleChoiceTask,
    metrics=choice_metrics,
    older_metrics=OLDER_METRICS,
    read=rows_by(parse),
    shot=shot,
    ask=ask,
    judge=judge,
    judge_text=judge_text,
)
