"""Language modelling: right when every token of the continuation is the model's most probable one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.data.fields import text_field
from llmfoundry_gauntlet.judging.likelihood import judge_argmax
from llmfoundry_gauntlet.scores.likelihood import gold_bits_per_byte
from llmfoundry_gauntlet.scores.metrics import accuracy
from llmfoundry_gauntlet.tasks.base import TaskType, part, rows_by, strip_end
from llmfoundry_gauntlet.values import Judgement, Question, ScoreOutput


@dataclass(frozen=True, slots=True)
class Passage:
    """A row: `{"context": ..., "continuation": ...}`."""

    context: str
    continuation: str

    gold = 0  # the only continuation


def parse(row: Mapping[str, Any], task: TaskSpec) -> Passage:
    """A checked row."""
    return Passage(
        context=text_field(row, task.context_key or 'context'),
        continuation=text_field(row, task.answer_key or 'continuation', allow_empty=False),
    )


def shot(content: Passage, task: TaskSpec, first: bool) -> str:
    """Context and continuation."""
    return part(task, content.context, first) + content.continuation


def ask(content: Passage, task: TaskSpec, first: bool) -> Question:
    """The context alone; the continuation is to be scored."""
    context = strip_end(part(task, content.context, first), task)
    return Question(contexts=(context,), continuations=(content.continuation,))


def judge(output: ScoreOutput, content: Passage, task: TaskSpec, reference: bool) -> Judgement:
    """All tokens the most probable ones, or not."""
    return judge_argmax(output, reference=reference)


def judge_text(text: str, content: Passage) -> Judgement:
    """Whether a reply, which must have been written greedily, begins with the continuation."""
    right = text.lstrip().startswith(content.continuation.strip())
    return Judgement(credit=float(right), predicted=0 if right else None, answer=text.strip())


TASK_TYPE = TaskType(
    name='language_modeling',
    keys=TaskSpec,
    metrics=lambda task: (accuracy('InContextLearningLMAccuracy'), gold_bits_per_byte()),
    older_metrics=('InContextLearningLMExpectedCalibrationError',),
    read=rows_by(parse),
    shot=shot,
    ask=ask,
    judge=judge,
    judge_text=judge_text,
)
