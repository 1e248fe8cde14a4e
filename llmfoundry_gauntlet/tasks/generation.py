"""Generation with answers: the model generates an answer, with or without a chain of thought.

The accuracy is llm-foundry's: the normalised answer begins with a gold answer. Further metrics: StrictMatch, the answer
equals a gold answer; NumericMatch, the same with numbers compared by value; TruncatedShare, the share of generations
that reached the token limit; NoDelimiterShare, the share without the delimiter between a chain of thought and its
answer; GoldBitsPerByte, of the chain of thought and the preferred answer, scored by likelihood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llmfoundry_gauntlet.data.readers import RowError, optional_text_field, optional_texts_field, text_field
from llmfoundry_gauntlet.metrics.metrics import Metric, accuracy, gold_bits_of_generations, item_metric
from llmfoundry_gauntlet.metrics.statistics import SHARE
from llmfoundry_gauntlet.scoring.signs import bare_answer
from llmfoundry_gauntlet.scoring.text import (
    NON_FINITE_GENERATION,
    answer_in,
    has_prefix_of,
    is_numeric_match,
    is_strict_match,
)
from llmfoundry_gauntlet.tasks.base import TRUNCATED_REASON, TRUNCATED_SHARE, Task
from llmfoundry_gauntlet.types import Generation, Prompt, Score, StopRule

STRICT_MATCH, NUMERIC_MATCH, NO_DELIMITER_SHARE = 'StrictMatch', 'NumericMatch', 'NoDelimiterShare'
NO_DELIMITER_REASON = 'no delimiter found, so all of it is compared'
EXTRA_TOKENS_AFTER_THOUGHT = 10


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A row: `{"context": ..., "answer": ...}`, optionally with `aliases` and `chain_of_thought`.

    `golds` are the gold answers, the preferred one first.
    """

    context: str
    golds: tuple[str, ...]
    chain_of_thought: str | None

    @property
    def gold(self) -> str:
        """Return the preferred answer."""
        return self.golds[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTask(Task):
    """Generate an answer and compare it with the right ones.

    `cot_delimiter` separates a chain of thought from its answer, in any white space unless as the reference does;
    `early_stopping_criteria` are stop strings.
    """

    type_name: ClassVar[str] = 'generation_task_with_answers'
    older_metrics: ClassVar[tuple[str, ...]] = ('InContextLearningQAAccuracy',)
    generates: ClassVar[bool] = True

    cot_delimiter: str = ''
    early_stopping_criteria: tuple[str, ...] | None = None
    do_normalization: bool = True

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        yield from Task.problems(self)
        for index, text in enumerate(self.early_stopping_criteria or ()):
            if not text:
                yield f'early_stopping_criteria[{index}]: is empty; allowed: a text that ends a generation'

    def metrics(self) -> tuple[Metric, ...]:
        """Return the accuracy, the other shares of generations, and GoldBitsPerByte."""
        shares = [STRICT_MATCH, NUMERIC_MATCH, TRUNCATED_SHARE]
        if self.cot_delimiter:
            shares.append(NO_DELIMITER_SHARE)
        further = [item_metric(name, bounds=SHARE) for name in shares]
        return accuracy('InContextLearningGenerationExactMatchAccuracy'), *further, gold_bits_of_generations()

    def parse(self, row: Mapping[str, Any]) -> OpenQuestion:
        """Return the content of a row. Raise RowError."""
        key = self.answer_key or 'answer'
        answer = text_field(row, key, allow_empty=False)
        if not answer.strip():
            raise RowError(f'{key} is white space; allowed: text')
        aliases = optional_texts_field(row, 'aliases')
        return OpenQuestion(
            context=text_field(row, self.context_key or 'context'),
            golds=tuple(dict.fromkeys((answer, *aliases))),
            chain_of_thought=optional_text_field(row, 'chain_of_thought'),
        )

    def response(self, content: OpenQuestion, gold: str) -> str:
        """Return the whole generation that ends in this answer."""
        if content.chain_of_thought is None:
            return gold
        return f'{content.chain_of_thought}{self.cot_delimiter}{gold}'

    def responses(self, content: OpenQuestion) -> tuple[str, ...]:
        """Return a generation for each gold answer."""
        return tuple(self.response(content, gold) for gold in content.golds)

    def gold_text(self, content: OpenQuestion) -> str:
        """Return the generation with the preferred answer, after the white space that a shot has before it.

        Its end is not scored, as that of a choice is not: it ends with the answer, without what separates shots.
        """
        question = self.part(content.context, False)
        space_of_shot = question[len(self.strip_end(question)) :]
        return space_of_shot + self.response(content, content.gold)

    def shot(self, content: OpenQuestion, first: bool) -> str:
        """Return the problem and the generation with the preferred answer."""
        return self.part(content.context, first) + self.response(content, content.gold)

    def ask(self, content: OpenQuestion, first: bool) -> Prompt:
        """Return the problem."""
        return Prompt(contexts=(self.strip_end(self.part(content.context, first)),))

    def stops(self, contents: Sequence[OpenQuestion]) -> StopRule:
        """Return the task's own stop strings.

        Without any, a generation ends before the next question and at the end of its answer: at the delimiter between
        examples, unless a gold answer contains it. llm-foundry has no such default.
        """
        if self.reference:
            return StopRule(strings=self.early_stopping_criteria or (), as_pattern=True)
        if self.early_stopping_criteria is not None:
            return StopRule(strings=self.early_stopping_criteria)
        delimiter = self.example_delimiter
        next_problem = delimiter + self.prelimiter
        ends_answer = bool(delimiter) and not any(delimiter in gold for content in contents for gold in content.golds)
        return StopRule(
            strings=(next_problem,) if self.prelimiter.strip() else (),
            answer_delimiter=self.cot_delimiter,
            answer_end=delimiter if ends_answer else '',
        )

    @property
    def extra_tokens(self) -> int:
        """Return the margin of llm-foundry 0.22 (`_get_max_answer_length`)."""
        return EXTRA_TOKENS_AFTER_THOUGHT if self.cot_delimiter else 0

    def score(self, output: Generation, content: OpenQuestion) -> Score:
        """Score 1 if the normalised answer begins with a gold answer; without a delimiter, if the generation does."""
        if not output.is_finite and not self.reference:
            return Score.unscored(NON_FINITE_GENERATION)
        after_delimiter = None
        if self.cot_delimiter:
            after_delimiter = answer_in(output.text, self.cot_delimiter, reference=self.reference)
        answer = output.text if after_delimiter is None else after_delimiter
        lacks_delimiter = bool(self.cot_delimiter) and after_delimiter is None
        if not self.reference:
            answer = bare_answer(answer, content.golds)
        normalize = self.do_normalization
        right = has_prefix_of(answer, content.golds, normalize=normalize, reference=self.reference)
        reasons = [] if answer.strip() else ['empty answer' if output.text.strip() else 'empty generation']
        if lacks_delimiter and answer.strip():
            reasons.append(NO_DELIMITER_REASON)
        if output.is_truncated:
            reasons.append(TRUNCATED_REASON)
        metrics = {
            STRICT_MATCH: float(is_strict_match(answer, content.golds, normalize=normalize)),
            NUMERIC_MATCH: float(is_numeric_match(answer, content.golds, normalize=normalize)),
        }
        if output.is_truncated is not None:
            metrics[TRUNCATED_SHARE] = float(output.is_truncated)
        if self.cot_delimiter:
            metrics[NO_DELIMITER_SHARE] = float(lacks_delimiter)
        return Score(value=float(right), answer=answer.strip(), reason='; '.join(reasons) or None, metrics=metrics)
