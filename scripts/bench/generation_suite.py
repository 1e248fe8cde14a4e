"""What the benchmark of replies times, and what it is to reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from materials import task_entry
from suite import VOCABULARIES, Effort, Group, Row

REPLIES = ('ours', 'llm_foundry', 'lm_eval')  # the contenders, in the order of a round
VARY, LIMIT, STOP, SAMPLES = 'vary', 'limit', 'stop', 'samples'  # what ends replies; samples run to their limit
WRITING = Group('replies', (1, 1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRow(Row):
    """One task whose replies are written.

    `end_scale` says how often the model ends a reply itself (see `materials.lively_folder`), `max_new_tokens` is the
    limit, None for the task's own: that of its longest right answer. The targets are least values of
    llm-foundry / ours and lm-eval / ours.
    """

    lengths: str
    group: Group = WRITING
    end_scale: float = 0.0
    stops: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    targets: tuple[float, float] = (1, 1)

    @property
    def name(self) -> str:
        """'{label}/{n}-shot/{lengths}'."""
        return f'{self.label}/{self.num_shots}-shot/{self.lengths}'

    @property
    def foundry_batch_size(self) -> int:
        """Prompts in a batch of llm-foundry."""
        return 8

    def entry(self, token_limit: Callable[[dict[str, Any]], int]) -> dict[str, Any]:
        """The YAML keys of the task. `token_limit` says how long its longest right answer is."""
        entry = {**task_entry(self), 'early_stopping_criteria': list(self.stops)}
        return {**entry, 'generation_kwargs': {'max_new_tokens': self.max_new_tokens or token_limit(entry)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow(ReplyRow):
    """Ours alone: `num_samples` replies drawn to each of few prompts, and a reply each to as many prompts.

    Its items are prompts, all cut to `length` tokens.
    """

    num_samples: int = 8
    length: int = 512


ROWS = (
    ReplyRow(
        label='gsm8k',
        num_shots=3,
        lengths=VARY,
        end_scale=0.4,
        items=(24, 12),
        foundry_items=(8, 8),
        targets=(1, 1.5),
    ),
    ReplyRow(label='gsm8k', num_shots=3, lengths=LIMIT, max_new_tokens=64, items=(24, 8), foundry_items=(8, 8)),
    ReplyRow(
        label='triviaqa_sm_sub',
        num_shots=3,
        lengths=STOP,
        stops=('m',),
        items=(48, 16),
        foundry_items=(8, 8),
        targets=(5, 1),
    ),
)
SAMPLED = SampleRow(label='gsm8k', num_shots=3, lengths=SAMPLES, max_new_tokens=64, items=(3, 2), foundry_items=(0, 0))

FULL = Effort(quick=False, vocabularies=VOCABULARIES[:1], rounds={'ours': 3, 'llm_foundry': 1, 'lm_eval': 2})
QUICK = Effort(quick=True, vocabularies=VOCABULARIES[:1], rounds={'ours': 1, 'llm_foundry': 1, 'lm_eval': 1})
