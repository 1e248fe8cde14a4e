"""Multiple choice: the prediction is the choice with the highest mean log-probability per token after the query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmfoundry_gauntlet.config.tasks import MULTIPLE_CHOICE
from llmfoundry_gauntlet.data.readers import gold_field, text_field, texts_field
from llmfoundry_gauntlet.metrics.metrics import Metric, accuracy, choice_metrics
from llmfoundry_gauntlet.scoring.likelihood import score_choice
from llmfoundry_gauntlet.scoring.text import score_named
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.types import Prompt, Score, ScoreOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesTask(Task):
    """Score several choices and compare them. `choices_key` is the field of a row that holds their texts."""

    older_metrics: ClassVar[tuple[str, ...]] = ('InContextLearningMCExpectedCalibrationError',)

    choices_key: str | None = None

    def metrics(self) -> tuple[Metric, ...]:
        """Return the accuracy and the metrics of the choices' log-probabilities."""
        return accuracy('InContextLearningMultipleChoiceAccuracy'), *choice_metrics()

    def score(self, output: ScoreOutput, content: Any) -> Score:
        """Score 1 if the preferred choice is the gold one."""
        return score_choice(output, content.gold, reference=self.reference)


@dataclass(frozen=True, slots=True)
class Choices:
    """A row: `{"query": ..., "choices": [...], "gold": index}`."""

    query: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipleChoiceTask(ChoicesTask):
    """Score choices after a query."""

    type_name: ClassVar[str] = MULTIPLE_CHOICE

    def parse(self, row: Mapping[str, Any]) -> Choices:
        """Return the content of a row. Raise RowError."""
        choices = texts_field(row, self.choices_key or 'choices')
        query = text_field(row, self.context_key or 'query')
        return Choices(query=query, choices=choices, gold=gold_field(row, len(choices)))

    def shot(self, content: Choices, first: bool) -> str:
        """Return the query and its right choice."""
        return self.part(content.query, first) + content.choices[content.gold]

    def ask(self, content: Choices, first: bool) -> Prompt:
        """Return the query; every choice is scored."""
        context = self.strip_end(self.part(content.query, first))
        return Prompt(contexts=(context,), continuations=content.choices)

    def score_text(self, text: str, content: Choices) -> Score:
        """Score the choice that a generation begins with."""
        return score_named(text, content.choices, content.gold)
