"""The length that decides a request's rotary frequencies. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from llmfoundry_gauntlet.types import GenerateRequest, ScoreRequest

Asked = TypeVar('Asked', ScoreRequest, GenerateRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryLengths:
    """The rule of a model whose rotary frequencies depend on a length.

    Up to `base` tokens all rows have the same frequencies. Beyond, they are those of each length where the model
    `scales_by_length` (dynamic NTK), else one further set (longrope). `padded_to` has the length of rows by task where
    they count as padded, as llm-foundry pads what it scores.
    """

    base: int
    scales_by_length: bool
    padded_to: Mapping[str, int] = field(default_factory=dict)

    def of(self, request: ScoreRequest | GenerateRequest) -> int:
        """Return the length that decides for all rows of a request, the same for all that have equal frequencies.

        That is its longest row: a context and all of its continuation, or a prompt and as many tokens as it may get.
        """
        if isinstance(request, GenerateRequest):
            length = request.length
        else:
            rows = zip(request.contexts, request.continuations, strict=True)
            length = max(self.padded_to.get(request.key.task, 0), *(len(a) + len(b) for a, b in rows))
        if length <= self.base:
            return self.base
        return length if self.scales_by_length else self.base + 1

    def groups(self, requests: Iterable[Asked]) -> list[tuple[int, list[Asked]]]:
        """Return the requests of equal frequencies together, with the length that decides, the longest first."""
        found: dict[int, list[Asked]] = {}
        for request in requests:
            found.setdefault(self.of(request), []).append(request)
        return sorted(found.items(), reverse=True, key=lambda group: group[0])
