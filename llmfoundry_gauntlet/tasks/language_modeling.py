"""Language modelling: correct if every token of the continuation is the model's argmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmfoundry_gauntlet.data.readers import text_field
from llmfoundry_gauntlet.metrics.metrics import Metric, accuracy, gold_bits_per_byte
from llmfoundry_gauntlet.scoring.likelihood import score_argmax
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.types import Prompt, Score, ScoreOutput


@dataclass(frozen=True, slots=True)
class Passage:
    """A row: `{"context": ..., "continuation": ...}`."""

    context: str
    continuation: str

    gold = 0  # the only continuation


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelingTask(Task):
    """Score a continuation of a context."""

    type_name: ClassVar[str] = 'language_modeling'
    older_metrics: ClassVar[tuple[str, ...]] = ('InContextLearningLMExpectedCalibrationError',)

    def metrics(self) -> tuple[Metric, ...]:
        """Return the accuracy and GoldBitsPerByte."""
        return accuracy('InContextLearningLMAccuracy'), gold_bits_per_byte()

    def parse(self, row: Mapping[str, Any]) -> Passage:
        """Return the content of a row. Raise RowError."""
        return Passage(
            context=text_field(row, self.context_key or 'context'),
            continuation=text_field(row, self.answer_key or 'continuation', allow_empty=False),
        )

    def shot(self, content: Passage, first: bool) -> str:
        """Return the context and the continuation."""
        return self.part(content.context, first) + content.continuation

    def ask(self, content: Passage, first: bool) -> Prompt:
        """Return the context; the continuation is scored."""
        context = self.strip_end(self.part(content.context, first))
        return Prompt(contexts=(context,), continuations=(content.continuation,))

    def score(self, output: ScoreOutput, content: Passage) -> Score:
        """Score 1 if every token of the continuation is the argmax."""
        return score_argmax(output, reference=self.reference)

    def score_text(self, text: str, content: Passage) -> Score:
        """Score 1 if a greedy generation begins with the continuation."""
        right = text.lstrip().startswith(content.continuation.strip())
        return Score(value=float(right), predicted=0 if right else None, answer=text.strip())
