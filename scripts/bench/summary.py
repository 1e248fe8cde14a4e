"""The table of the likelihood suite: a line a row, then the geometric means of the groups beside their targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from suite import CONTENDERS, GROUPS, WHOLE_SUITE, Group, Row

NAME_WIDTH, MEAN_WIDTH = 34, 24
COLUMNS = {  # the head and width of each
    'vocab': 7,
    'items': 8,
    'ours': 9,
    'llm-foundry': 13,
    'lm-eval': 9,
    'bare': 9,
    'foundry/ours': 14,
    'lm-eval/ours': 14,
    'ours/bare': 11,
    'batch': 7,
    'same': 6,
    'slower than lm-eval': 21,
}
SECONDS = ('ours', 'llm_foundry', 'lm_eval', 'bare_forward')
RATIOS = ('foundry/ours', 'lm-eval/ours', 'ours/bare')


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One round of one contender. `details` are what else it said."""

    num_items: int
    wall_seconds: float
    cpu_seconds: float
    details: dict[str, Any]


def median_seconds(rounds: Iterable[Measurement], clock: str = 'cpu_seconds') -> float:
    """Seconds per item by one of a measurement's clocks, the median over rounds."""
    return median(getattr(measured, clock) / measured.num_items for measured in rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """A row with one vocabulary: its rounds by contender, those of lm-eval at its best batch size."""

    row: Row
    vocabulary: int
    rounds: dict[str, list[Measurement]]
    lm_eval_batch_size: int
    num_same: int
    num_compared: int

    def seconds_per_item(self, contender: str, clock: str = 'cpu_seconds') -> float:
        """The median over rounds."""
        return median_seconds(self.rounds[contender], clock)

    @property
    def ratios(self) -> tuple[float, float, float]:
        """llm-foundry / ours, lm-eval / ours, ours / bare forward, in processor seconds per item."""
        ours, foundry, lm_eval, bare = map(self.seconds_per_item, SECONDS)
        return foundry / ours, lm_eval / ours, ours / bare

    @property
    def slower_than_lm_eval(self) -> bool:
        """Whether ours takes longer."""
        return self.ratios[1] < 1

    def as_json(self) -> dict[str, Any]:
        """The line of bench.json: processor seconds per item."""
        return {
            'task': self.row.label,
            'num_shots': self.row.num_shots,
            'vocab': self.vocabulary,
            'max_seq_len': self.row.max_seq_len,
            **{name: self.seconds_per_item(name) for name in SECONDS},
        }

    def details(self) -> dict[str, Any]:
        """All else that is known of the row."""
        return {
            'row': self.row.name,
            'group': self.row.group.name,
            'vocab': self.vocabulary,
            'items': {name: self.rounds[name][0].num_items for name in CONTENDERS},
            'rounds': {name: len(self.rounds[name]) for name in CONTENDERS},
            'wall_seconds_per_item': {name: self.seconds_per_item(name, 'wall_seconds') for name in CONTENDERS},
            'cpu_seconds': {name: [one.cpu_seconds for one in self.rounds[name]] for name in CONTENDERS},
            'shape': self.rounds['ours'][0].details['shape'],
            'bare_forward': self.rounds['bare_forward'][0].details,
            'lm_eval_batch_size': self.lm_eval_batch_size,
            'ratios': dict(zip(RATIOS, self.ratios, strict=True)),
            'slower_than_lm_eval': self.slower_than_lm_eval,
            'same_predictions_as_llm_foundry': [self.num_same, self.num_compared],
        }


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def group_means(results: Sequence[RowResult]) -> dict[Group, tuple[float, ...]]:
    """The geometric means of the three ratios, by group and for the whole suite; groups without rows are left out."""
    means = {}
    for group in (*GROUPS, WHOLE_SUITE):
        ratios = [result.ratios for result in results if group in (result.row.group, WHOLE_SUITE)]
        if ratios:
            means[group] = tuple(map(geometric_mean, zip(*ratios, strict=True)))
    return means


def reached(means: Sequence[float], targets: Sequence[float]) -> list[bool]:
    """Whether each ratio keeps its target: the last is the one that is to be small."""
    return [means[0] >= targets[0], means[1] >= targets[1], means[2] <= targets[2]]


def table_line(name: str, cells: Iterable[str], widths: Iterable[int]) -> str:
    """A name and cells of these widths."""
    return f'{name:<{NAME_WIDTH}}' + ''.join(f'{cell:>{width}}' for cell, width in zip(cells, widths, strict=True))


def head_line() -> str:
    return table_line('', COLUMNS, COLUMNS.values())


def row_line(result: RowResult) -> str:
    """A row of the table. `items` are ours and llm-foundry's, `batch` is lm-eval's best."""
    foundry, lm_eval, bare = result.ratios
    cells = [
        str(result.vocabulary),
        '/'.join(str(result.rounds[name][0].num_items) for name in ('ours', 'llm_foundry')),
        *(f'{result.seconds_per_item(name):.4f}' for name in SECONDS),
        f'{foundry:.1f}',
        f'{lm_eval:.2f}',
        f'{bare:.3f}',
        str(result.lm_eval_batch_size),
        f'{result.num_same}/{result.num_compared}',
        'YES' if result.slower_than_lm_eval else 'no',
    ]
    return table_line(result.row.name, cells, COLUMNS.values())


def group_lines(results: Sequence[RowResult]) -> list[str]:
    """Which rows are slower than lm-eval, and the geometric means beside their targets."""
    slower = [f'{result.row.name} at {result.vocabulary}' for result in results if result.slower_than_lm_eval]
    lines = [
        f'rows slower than lm-eval: {", ".join(slower) or "none"}',
        '',
        f'{"geometric means (targets)":<{NAME_WIDTH}}' + ''.join(f'{ratio:>{MEAN_WIDTH}}' for ratio in RATIOS),
    ]
    for group, means in group_means(results).items():
        shown = (f'{means[0]:.1f} (>=', f'{means[1]:.2f} (>=', f'{means[2]:.3f} (<=')
        cells = [
            f'{mean} {target:g}) {"met" if holds else "MISSED"}'
            for mean, target, holds in zip(shown, group.targets, reached(means, group.targets), strict=True)
        ]
        lines.append(f'{group.name:<{NAME_WIDTH}}' + ''.join(f'{cell:>{MEAN_WIDTH}}' for cell in cells))
    return lines
