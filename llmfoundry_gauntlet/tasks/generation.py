"""Generation with answers: the model writes a reply, after a chain of thought or at once, and its answer is marked.

The accuracy is llm-foundry's: the normalised answer begins with a right one. Beside it stand StrictMatch, nothing more
than a right answer; NumericMatch, the same but numbers compared by value; and CutShare, replies that the token limit
ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.data.fields import RowError, optional_text_field, optional_texts_field, text_field
from llmfoundry_gauntlet.judging.text import (
    NON_FINITE_REPLY,
    answer_in,
    has_prefix_of,
    is_numeric_match,
    is_strict_match,
)
from llmfoundry_gauntlet.scores.metrics import accuracy, mark
from llmfoundry_gauntlet.tasks.base import CUT, CUT_SHARE, Replies, TaskType, part, rows_by, strip_end
from llmfoundry_gauntlet.values import Generation, Judgement, Question, StopRule

GENERATION = 'generation_task_with_answers'
STRICT_MATCH, NUMERIC_MATCH = 'StrictMatch', 'NumericMatch'
MARGIN_AFTER_THOUGHT = 10  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTask(TaskSpec):
    """`cot_delimiter` stands between a chain of thought and its answer, `early_stopping_criteria` end a reply."""

    cot_delimiter: str = ''
    early_stopping_criteria: tuple[str, ...] | None = None
    do_normalization: bool = True

    def __post_init__(self) -> None:
        TaskSpec.__post_init__(self)
        for index, text in enumerate(self.early_stopping_criteria or ()):
            if not text:
                raise ValueError(f'early_stopping_criteria[{index}]: is empty; allowed: a text that ends a reply')


@dataclass(frozen=True, slots=True)
class Problem:
    """A row: `{"context": ..., "answer": ...}`, with `aliases` and `chain_of_thought` where there are any.

    `golds` are the right answers, the preferred one first.
    """

    context: str
    golds: tuple[str, ...]
    chain_of_thought: str | None

    @property
    def gold(self) -> str:
        """The preferred answer."""
        return self.golds[0]


def parse(row: Mapping[str, Any], task: GenerationTask) -> Problem:
    """A checked row."""
    answer = text_field(row, task.answer_key or 'answer', allow_empty=False)
    if not answer.strip():
        raise RowError(f'{task.answer_key or "answer"} is white space; allowed: text')
    aliases = optional_texts_field(row, 'aliases')
    return Problem(
        context=text_field(row, task.context_key or 'context'),
        golds=tuple(dict.fromkeys((answer, *aliases))),
        chain_of_thought=optional_text_field(row, 'chain_of_thought'),
    )


def response(content: Problem, task: GenerationTask, gold: str) -> str:
    """A whole reply that ends in this answer."""
    if content.chain_of_thought is None:
        return gold
    return f'{content.chain_of_thought}{task.cot_delimiter}{gold}'


def responses(content: Problem, task: GenerationTask) -> tuple[str, ...]:
    """A reply for each right answer."""
    return tuple(response(content, task, gold) for gold in content.golds)


def shot(content: Problem, task: GenerationTask, first: bool) -> str:
    """The problem and the reply with the preferred answer."""
    return part(task, content.context, first) + response(content, task, content.gold)


def ask(content: Problem, task: GenerationTask, first: bool) -> Question:
    """The problem alone."""
    return Question(contexts=(strip_end(part(task, content.context, first), task),), continuations=())


def stops(task: GenerationTask, contents: Sequence[Problem], reference: bool) -> StopRule:
    """The task's own stop strings.

    Without any a reply ends where the next problem would begin, and where its answer does: at the delimiter between
    examples, once there is an answer, unless right answers have it in them. llm-foundry lets it run on.
    """
    if reference:
        return StopRule(strings=task.early_stopping_criteria or (), as_pattern=True)
    if task.early_stopping_criteria is not None:
        return StopRule(strings=task.early_stopping_criteria)
    delimiter = task.example_delimiter
    next_problem = delimiter + task.prelimiter
    ends_answer = bool(delimiter) and not any(delimiter in gold for content in contents for gold in content.golds)
    return StopRule(
        strings=(next_problem,) if task.prelimiter.strip() else (),
        answer_delimiter=task.cot_delimiter,
        answer_end=delimiter if ends_answer else '',
    )


def judge(output: Generation, content: Problem, task: GenerationTask, reference: bool) -> Judgement:
    """The answer of a reply against the right ones."""
    if not output.is_finite and not reference:
        return Judgement.unscored(NON_FINITE_REPLY)
    answer = answer_in(output.text, task.cot_delimiter)
    normalize = task.do_normalization
    right = has_prefix_of(answer, content.golds, normalize=normalize, reference=reference)
    reasons = [] if answer.strip() else ['empty answer' if output.text.strip() else 'empty reply']
    if output.is_cut:
        reasons.append(CUT)
    marks = {
        STRICT_MATCH: float(is_strict_match(answer, content.golds, normalize=normalize)),
        NUMERIC_MATCH: float(is_numeric_match(answer, content.golds, normalize=normalize)),
    }
    if output.is_cut is not None:
        marks[CUT_SHARE] = float(output.is_cut)
    return Judgement(credit=float(right), answer=answer.strip(), reason='; '.join(reasons) or None, marks=marks)


def margin(task: GenerationTask) -> int:
    """Tokens besides those of the longest right reply, as in llm-foundry 0.22 (`_get_max_answer_length`)."""
    return MARGIN_AFTER_THOUGHT if task.cot_delimiter else 0


TASK_TYPE = TaskType(
    name=GENERATION,
    keys=GenerationTask,
    metrics=lambda task: (
        accuracy('InContextLearningGenerationExactMatchAccuracy'),
        *map(mark, (STRICT_MATCH, NUMERIC_MATCH, CUT_SHARE)),
    ),
    older_metrics=('InContextLearningQAAccuracy',),
    read=rows_by(parse),
    shot=shot,
    ask=ask,
    judge=judge,
    replies=Replies(responses=responses, stops=stops, margin=margin),
)
