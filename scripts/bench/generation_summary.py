"""The table of the benchmark of replies."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from generation_suite import REPLIES, ReplyRow, SampleRow
from summary import Measurement, median_seconds, table_line

NEAR = 1e-3  # logits no further apart are equal but for rounding
COLUMNS = {  # the head and width of each
    'vocab': 7,
    'items': 7,
    'mean/longest': 14,
    'ours': 9,
    'llm-foundry': 13,
    'lm-eval': 9,
    'foundry/ours': 20,
    'lm-eval/ours': 20,
    'batch': 7,
    'tok/s': 7,
    'padding': 9,
    'idle': 7,
    'rows': 6,
    'same as lm-eval': 17,
    'as llm-foundry': 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How many of the compared replies are ours too, and why others are not.

    `near` are those that differ from a token on at which the two best logits are no further apart than NEAR, `cut`
    those to a prompt that llm-foundry cut shorter, `others` the rest.
    """

    compared: int
    same: int
    near: int = 0
    cut: int = 0
    others: int = 0

    def __str__(self) -> str:
        return f'{self.same}/{self.compared}'

    @property
    def reasons(self) -> str:
        """Why others differ."""
        named = {
            f'from a token on whose logit is within {NEAR:g} of the next best': self.near,
            'as llm-foundry has cut the prompt': self.cut,
            'for no known reason': self.others,
        }
        return ', '.join(f'{count} {reason}' for reason, count in named.items() if count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyResult:
    """A row with one vocabulary: its rounds by contender, and how far their replies agree with ours."""

    row: ReplyRow
    vocabulary: int
    max_new_tokens: int
    rounds: dict[str, list[Measurement]]
    agreements: dict[str, Agreement]

    @property
    def ours(self) -> dict[str, Any]:
        """What ours said of its first round."""
        return self.rounds['ours'][0].details

    @property
    def ratios(self) -> tuple[float, float]:
        """llm-foundry / ours and lm-eval / ours, in processor seconds per item."""
        ours, foundry, lm_eval = (median_seconds(self.rounds[name]) for name in REPLIES)
        return foundry / ours, lm_eval / ours

    @property
    def tokens_per_second(self) -> float:
        """New tokens a wall second of ours, from the rows to the marked replies."""
        return mean(self.ours['lengths']) / median_seconds(self.rounds['ours'], 'wall_seconds')

    def as_json(self) -> dict[str, Any]:
        """A line of generation.json: processor seconds per item."""
        return {
            'task': self.row.label,
            'num_shots': self.row.num_shots,
            'vocab': self.vocabulary,
            'max_seq_len': self.row.max_seq_len,
            'lengths': self.row.lengths,
            'max_new_tokens': self.max_new_tokens,
            'items': {name: self.rounds[name][0].num_items for name in REPLIES},
            'mean_prompt_tokens': mean(self.ours['prompt_lengths']),
            'mean_new_tokens': mean(self.ours['lengths']),
            'longest_new_tokens': max(self.ours['lengths']),
            **{name: median_seconds(self.rounds[name]) for name in REPLIES},
            'wall_seconds': {name: median_seconds(self.rounds[name], 'wall_seconds') for name in REPLIES},
            'rounds': {name: [one.cpu_seconds / one.num_items for one in self.rounds[name]] for name in REPLIES},
            'ratios': dict(zip(('foundry/ours', 'lm-eval/ours'), self.ratios, strict=True)),
            'targets': self.row.targets,
            'lm_eval_batch_size': self.rounds['lm_eval'][0].details['batch_size'],
            'lm_eval_tried_cpu_seconds': self.rounds['lm_eval'][0].details['tried_cpu_seconds'],
            'tokens_per_second': self.tokens_per_second,
            'wasted_slots': self.ours['wasted'],
            'idle_rows': self.ours['idle'],
            'mean_rows': self.ours['mean_rows'],
            'same_texts': {name: [one.same, one.compared] for name, one in self.agreements.items()},
        }

    def line(self) -> str:
        """A row of the table."""
        compared = [
            f'{ratio:.2f} (>= {target:g}) {"met" if ratio >= target else "MISSED"}'
            for ratio, target in zip(self.ratios, self.row.targets, strict=True)
        ]
        cells = [
            str(self.vocabulary),
            '/'.join(str(self.rounds[name][0].num_items) for name in ('ours', 'llm_foundry')),
            f'{mean(self.ours["lengths"]):.1f}/{max(self.ours["lengths"])}',
            *(f'{median_seconds(self.rounds[name]):.4f}' for name in REPLIES),
            *compared,
            str(self.rounds['lm_eval'][0].details['batch_size']),
            f'{self.tokens_per_second:.0f}',
            f'{self.ours["wasted"]:.3f}',
            f'{self.ours["idle"]:.3f}',
            f'{self.ours["mean_rows"]:.1f}',
            str(self.agreements['lm_eval']),
            str(self.agreements['llm_foundry']),
        ]
        return table_line(self.row.name, cells, COLUMNS.values())

    def reasons(self) -> list[str]:
        """A line for each contender some of whose replies are not ours."""
        return [f'    {name}: {one.reasons}' for name, one in self.agreements.items() if one.reasons]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """The rounds of several replies to one prompt: each the answers 'together' and 'apart'."""

    row: SampleRow
    vocabulary: int
    num_prompts: int
    rounds: list[dict[str, dict[str, Any]]]

    def seconds(self, which: str, clock: str = 'cpu_seconds') -> float:
        """Seconds per reply, the median over rounds."""
        return median(one[which][clock] for one in self.rounds) / (self.num_prompts * self.row.num_samples)

    def as_json(self) -> dict[str, Any]:
        """A line of generation.json: processor seconds per reply."""
        first = self.rounds[0]
        return {
            'task': self.row.label,
            'num_shots': self.row.num_shots,
            'vocab': self.vocabulary,
            'max_seq_len': self.row.length + self.row.max_new_tokens,
            'lengths': self.row.lengths,
            'max_new_tokens': self.row.max_new_tokens,
            'items': {'ours': self.num_prompts * self.row.num_samples},
            'samples': self.row.num_samples,
            'ours': self.seconds('together'),
            'apart': self.seconds('apart'),
            'prompt_tokens': {which: first[which]['prompt_tokens'] for which in first},
            'tokens_per_second': first['together']['num_new']
            / (self.num_prompts * self.row.num_samples)
            / self.seconds('together', 'wall_seconds'),
        }

    def lines(self) -> list[str]:
        """Both ways, and their ratio."""
        first, each = self.rounds[0], self.row.num_samples
        drawn = f'replies of {self.row.max_new_tokens} tokens'
        kinds = {
            'together': f'{each} {drawn} to each of {self.num_prompts} prompts of {self.row.length}',
            'apart': f'{drawn} to {self.num_prompts * each} prompts of {self.row.length}',
        }
        lines = [
            f'    {text}: {first[which]["prompt_tokens"]:,} prompt tokens run, {self.seconds(which):.4f} s a reply, '
            f'{first[which]["mean_rows"]:.1f} rows'
            for which, text in kinds.items()
        ]
        return [
            f'{self.row.name}: {self.seconds("apart") / self.seconds("together"):.2f} times faster than without',
            *lines,
        ]
