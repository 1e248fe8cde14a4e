"""The tables of the benchmark of SCORE."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from generation_summary import Agreement
from score_suite import ScoreRow
from summary import Measurement, median_seconds, table_line

LIKELIHOOD_COLUMNS = {  # the head and width of each
    'vocab': 7,
    'questions': 11,
    'prompts': 9,
    'alone': 9,
    'separate': 10,
    'together': 10,
    'together/alone': 23,
    'together/separate': 19,
    'unique': 8,
    'run': 7,
    'run apart': 11,
    'same': 11,
}
REPLY_COLUMNS = {
    'vocab': 7,
    'questions': 11,
    'prompts': 9,
    'lm-eval': 10,
    'ours': 10,
    'lm-eval/ours': 24,
    'batch': 7,
    'mean/longest': 14,
    'prompt tokens run': 19,
    'same texts': 12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """A row with one vocabulary, and its rounds by contender, whose items are questions."""

    row: ScoreRow
    vocabulary: int
    rounds: dict[str, list[Measurement]]

    def said(self, contender: str) -> dict[str, Any]:
        """What a contender said of its first round."""
        return self.rounds[contender][0].details

    def quotient(self, first: str, second: str) -> float:
        """One contender's processor seconds by another's."""
        return median_seconds(self.rounds[first]) / median_seconds(self.rounds[second])

    def shared_json(self) -> dict[str, Any]:
        """What a line of score.json has for both ways to answer: processor seconds per question."""
        return {
            'answers': self.row.answers,
            'perturbation': self.row.perturbation,
            'vocab': self.vocabulary,
            'questions': next(iter(self.rounds.values()))[0].num_items,
            **{name: median_seconds(measured) for name, measured in self.rounds.items()},
            'wall_seconds': {name: median_seconds(measured, 'wall_seconds') for name, measured in self.rounds.items()},
            'rounds': {name: [one.cpu_seconds / one.num_items for one in self.rounds[name]] for name in self.rounds},
            'target': self.row.target,
        }

    def cells(self, num_prompts: int, contenders: Iterable[str]) -> list[str]:
        """What both tables begin with."""
        seconds = {name: median_seconds(measured) for name, measured in self.rounds.items()}
        num_questions = next(iter(self.rounds.values()))[0].num_items
        return [
            f'{self.vocabulary}',
            f'{num_questions}',
            f'{num_prompts}',
            *(f'{seconds[name]:.3f}' for name in contenders),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceResult(ScoreResult):
    """By likelihood: all variants in one evaluation against an evaluation of each. `num_same` choices are equal."""

    num_choices: int
    num_same: int

    @property
    def ratio(self) -> float:
        """Together / alone."""
        return self.quotient('together', 'alone')

    @property
    def is_met(self) -> bool:
        """Whether the target is kept."""
        return self.ratio <= self.row.target

    @property
    def shares(self) -> dict[str, float]:
        """Of all prompts' tokens: the fewest that would do, those run together, and those run apart."""
        together, separate = self.said('together')['tokens'], self.said('separate')['tokens']
        return {
            'unique': together['unique'] / together['all'],
            'run_together': together['run'] / together['all'],
            'run_apart': separate['run'] / separate['all'],
        }

    def as_json(self) -> dict[str, Any]:
        """A line of score.json."""
        return {
            **self.shared_json(),
            'prompts': self.num_choices,
            'together/alone': self.ratio,
            'together/separate': self.quotient('together', 'separate'),
            'is_met': self.is_met,
            'tokens': self.said('together')['tokens']['all'],
            'shares_of_tokens': self.shares,
            'same_choices': [self.num_same, self.num_choices],
        }

    def line(self) -> str:
        """A row of the table."""
        return table_line(
            self.row.name,
            [
                *self.cells(self.num_choices, ('alone', 'separate', 'together')),
                f'{self.ratio:.3f} (<= {self.row.target:g}) {"met" if self.is_met else "MISSED"}',
                f'{self.quotient("together", "separate"):.3f}',
                *(f'{share:.3f}' for share in self.shares.values()),
                f'{self.num_same}/{self.num_choices}',
            ],
            LIKELIHOOD_COLUMNS.values(),
        )

    def remarks(self) -> list[str]:
        """Nothing."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyResult(ScoreResult):
    """By generation: ours against lm-eval's own task, and how many of the texts are the same."""

    agreement: Agreement

    @property
    def ratio(self) -> float:
        """lm-eval / ours."""
        return self.quotient('lm_eval', 'ours')

    @property
    def is_met(self) -> bool:
        """Whether the target is kept."""
        return self.ratio >= self.row.target

    @property
    def num_prompts(self) -> int:
        """How many replies lm-eval writes, which also asks for labels that a question has not."""
        return len(self.said('lm_eval')['prompts'])

    def as_json(self) -> dict[str, Any]:
        """A line of score.json."""
        ours, lm_eval = self.said('ours'), self.said('lm_eval')
        return {
            **self.shared_json(),
            'max_new_tokens': self.row.max_new_tokens,
            'prompts': {'ours': len(ours['prompts']), 'lm_eval': self.num_prompts},
            'lm-eval/ours': self.ratio,
            'is_met': self.is_met,
            'mean_new_tokens': mean(ours['lengths']),
            'longest_new_tokens': max(ours['lengths']),
            'prompt_tokens': sum(ours['prompt_lengths']),
            'prompt_tokens_run': ours['prompt_tokens'],
            'mean_rows': ours['mean_rows'],
            'lm_eval_batch_size': lm_eval['batch_size'],
            'lm_eval_tried_cpu_seconds': lm_eval['tried_cpu_seconds'],
            'same_texts': [self.agreement.same, self.agreement.compared],
        }

    def line(self) -> str:
        """A row of the table."""
        ours = self.said('ours')
        return table_line(
            self.row.name,
            [
                *self.cells(len(ours['prompts']), ('lm_eval', 'ours')),
                f'{self.ratio:.2f} (>= {self.row.target:g}) {"met" if self.is_met else "MISSED"}',
                str(self.said('lm_eval')['batch_size']),
                f'{mean(ours["lengths"]):.0f}/{max(ours["lengths"])}',
                f'{ours["prompt_tokens"] / sum(ours["prompt_lengths"]):.3f}',
                str(self.agreement),
            ],
            REPLY_COLUMNS.values(),
        )

    def remarks(self) -> list[str]:
        """What is to be said besides: further prompts of lm-eval's, and why texts differ."""
        further = self.num_prompts - len(self.said('ours')['prompts'])
        lines = (
            [f'    lm-eval also asks {further} prompts again, for labels that the question has not'] if further else []
        )
        return lines + ([f'    texts: {self.agreement.reasons}'] if self.agreement.reasons else [])
