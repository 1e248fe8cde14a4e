"""Generations that ended at their token limit: how many, at what limit, and which setting it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.base import TRUNCATED_REASON, TRUNCATED_SHARE
from llmfoundry_gauntlet.types import ItemResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimitRecord:
    """The generations of a task that ended at their token limit, in results.json; `tokens` is the highest limit."""

    ignore_unknown_keys: ClassVar = True
    share: float
    tokens: int
    setting: str

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f'share: is {self.share}; allowed: 0 to 1')


def ended_at_limit(result: ItemResult) -> bool:
    """Return whether a generation ended at its token limit; False for other items, and if it is unknown."""
    return TRUNCATED_REASON in (result.reason or '') or result.metrics.get(TRUNCATED_SHARE) == 1


def token_limit_record(task: Task, results: Sequence[ItemResult]) -> dict[str, Any] | None:
    """Return the share of a task's generations that ended at their token limit, the limit and its setting.

    None if no generation did, or if it is unknown, as of answers from another engine.
    """
    generations = [result for result in results if result.text is not None]
    ended = [result for result in generations if ended_at_limit(result)]
    lengths = [result.num_tokens[0] for result in ended if result.num_tokens]
    if not lengths or max(lengths) == 0:
        return None
    limit = max(lengths)
    return {'share': len(ended) / len(generations), 'tokens': limit, 'setting': setting_of_limit(task, limit)}


def setting_of_limit(task: Task, tokens: int) -> str:
    """Return the setting that limits a task's generations to this many tokens."""
    if 'max_new_tokens' in (task.generation_kwargs or {}):
        return 'generation_kwargs.max_new_tokens'
    default = task.default_max_new_tokens
    if default is None and task.builds_requests:
        return task.setting_of_default_limit
    if default is None:
        return 'the longest right answer; generation_kwargs.max_new_tokens sets another'
    if tokens < default:
        return 'half of max_seq_len'
    return task.setting_of_default_limit
