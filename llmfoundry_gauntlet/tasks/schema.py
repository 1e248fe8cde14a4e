"""Schemas (Winograd): one continuation scored after each of several contexts (partial evaluation, arXiv 1806.02847)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmfoundry_gauntlet.data.readers import gold_field, text_field, texts_field
from llmfoundry_gauntlet.tasks.multiple_choice import ChoicesTask
from llmfoundry_gauntlet.types import Prompt


@dataclass(frozen=True, slots=True)
class Schema:
    """A row: `{"context_options": [...], "continuation": ..., "gold": index}`."""

    context_options: tuple[str, ...]
    continuation: str
    gold: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaTask(ChoicesTask):
    """Score one continuation after several contexts."""

    type_name: ClassVar[str] = 'schema'

    def parse(self, row: Mapping[str, Any]) -> Schema:
        """Return the content of a row. Raise RowError."""
        options = texts_field(row, self.choices_key or 'context_options')
        continuation = text_field(row, 'continuation', allow_empty=False)
        return Schema(context_options=options, continuation=continuation, gold=gold_field(row, len(options)))

    def shot(self, content: Schema, first: bool) -> str:
        """Return the gold context and the continuation. As upstream, the prelimiter precedes the example delimiter."""
        delimiter = '' if first else self.example_delimiter
        context = content.context_options[content.gold]
        return self.prelimiter + delimiter + context + self.continuation_delimiter + content.continuation

    def question(self, content: Schema) -> str:
        """Return the contexts and the continuation: rows of a pair share the contexts and differ in their answers."""
        return '\0'.join([*content.context_options, content.continuation])

    def ask(self, content: Schema, first: bool) -> Prompt:
        """Return every context; the continuation is scored after each.

        As upstream, a context that nothing precedes carries no continuation delimiter.
        """
        before = self.prelimiter + ('' if first else self.example_delimiter)
        after = '' if first else self.strip_end(self.continuation_delimiter)
        contexts = tuple(before + option + after for option in content.context_options)
        return Prompt(contexts=contexts, continuations=(content.continuation,) * len(contexts))
