"""A task's items as texts alone, for whoever answers them elsewhere: no tokenizer and no limit of length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.tasks.base import TaskType
from llmfoundry_gauntlet.tasks.items import build_prompt, examples_with_shots, item_key
from llmfoundry_gauntlet.values import Example, ItemKey, Prompt, Sampling, StopRule


@dataclass(frozen=True, slots=True, kw_only=True)
class TextItem:
    """One item before it is tokenised, with all its shots."""

    key: ItemKey
    example: Example
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTask:
    """A task at one number of shots, and what its items are asked and held to.

    `fewshot` and `reference` are as for Preparation.
    """

    task: TaskSpec
    task_type: TaskType
    examples: Sequence[Example]
    fewshot: str = 'reference'
    reference: bool = False

    def items(self) -> Iterator[TextItem]:
        """All items, one at a time: by category where there are any, and in row order."""
        pairs = examples_with_shots(self.task, self.task_type, self.examples, self.fewshot)
        for example, shots in pairs:
            prompt = build_prompt(self.task, self.task_type, example, shots)
            for sample in range(self.task.num_samples):
                yield TextItem(key=item_key(self.task, example, sample), example=example, prompt=prompt)

    def stops(self) -> StopRule:
        """Where replies end, for a type that wants them."""
        return self.task_type.stops(self.task, [example.content for example in self.examples], self.reference)

    def sampling(self, variant: str | None) -> Sampling:
        """How replies to a variant are to be drawn."""
        return self.task_type.sampling(self.task, variant)

    def responses(self) -> Iterator[str]:
        """Every right reply, in full."""
        for example in self.examples:
            yield from self.task_type.responses(example.content, self.task)
