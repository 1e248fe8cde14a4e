"""A task's items as texts alone, for whoever answers them elsewhere: no tokenizer and no limit of length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.tasks import type_of
from llmfoundry_gauntlet.tasks.base import Replies
from llmfoundry_gauntlet.tasks.items import ALONE, build_prompt, examples_with_shots, item_key, prompt_alone
from llmfoundry_gauntlet.values import Example, ItemKey, Prompt, StopRule


@dataclass(frozen=True, slots=True, kw_only=True)
class TextItem:
    """One item before it is tokenised, with all its shots."""

    key: ItemKey
    example: Example
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTask:
    """A task at one number of shots, and what its items are asked and held to.

    Of `examples`, all rows, those in `subset` become items, where there is one.
    `fewshot` and `reference` are as for Preparation.
    """

    task: TaskSpec
    examples: Sequence[Example]
    subset: Sequence[Example] | None = None
    fewshot: str = 'reference'
    reference: bool = False

    @property
    def asked(self) -> Sequence[Example]:
        """The rows that become items."""
        return self.examples if self.subset is None else self.subset

    def items(self) -> Iterator[TextItem]:
        """All items, one at a time: by category where there are any, and in row order."""
        pairs = examples_with_shots(self.task, self.examples, self.fewshot, self.asked)
        for example, shots in pairs:
            prompt = build_prompt(self.task, example, shots)
            for sample in range(self.task.num_samples):
                yield TextItem(key=item_key(self.task, example, sample), example=example, prompt=prompt)
            if alone := prompt_alone(self.task, example):
                key = replace(item_key(self.task, example), variant=ALONE)
                yield TextItem(key=key, example=example, prompt=alone)

    @property
    def replies(self) -> Replies[Any, Any] | None:
        """What the task's type says of replies, if it wants them."""
        return type_of(self.task).replies

    def stops(self) -> StopRule:
        """Where replies end; nowhere, where none are wanted."""
        if self.replies is None:
            return StopRule()
        return self.replies.stops(self.task, [example.content for example in self.examples], self.reference)
