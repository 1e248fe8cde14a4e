"""The table of the benchmark: a line for each row, then the geometric means of the groups beside their targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from parts import FOUNDRY, LM_EVAL, OURS, Group, Part, Row

NAME_WIDTH, WIDTH, MEAN_WIDTH = 40, 13, 28


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """The rounds of a row with one vocabulary, by contender: its answers, with `num_items` and their seconds."""

    row: Row
    vocabulary: int
    rounds: dict[str, list[dict[str, Any]]]

    def seconds(self, contender: str, clock: str = 'cpu_seconds') -> float:
        """Return seconds per item, the median over rounds."""
        return median(one[clock] / one['num_items'] for one in self.rounds[contender])

    @property
    def ratios(self) -> dict[str, float]:
        """The ratios that the row's group has targets for, in processor seconds per item."""
        pairs = {ratio: ratio.split('/') for ratio in self.row.group.targets}
        return {ratio: self.seconds(first) / self.seconds(second) for ratio, (first, second) in pairs.items()}

    def num_same(self, contender: str) -> tuple[int, int]:
        """Return how many of a contender's predictions, or texts, are ours, and how many it made."""
        ours, others = self.rounds[OURS][0], self.rounds[contender][0]
        if 'prompts' in ours and 'prompts' in others:  # lm-eval has its own order of SCORE's variants
            by_prompt = dict(zip(others['prompts'], others['predictions'], strict=True))
            theirs = [by_prompt.get(prompt) for prompt in ours['prompts']]
        else:
            theirs = others['predictions']
        return sum(a == b for a, b in zip(ours['predictions'], theirs, strict=False)), len(theirs)

    def as_json(self) -> dict[str, Any]:
        """Return the row's entry in the results file: seconds are per item, of the processor unless it says wall."""
        return {
            'row': self.row.name,
            'group': self.row.group.name,
            'vocabulary': self.vocabulary,
            'max_seq_len': self.row.max_seq_len,
            'items': {name: rounds[0]['num_items'] for name, rounds in self.rounds.items()},
            'seconds': {name: self.seconds(name) for name in self.rounds},
            'wall_seconds': {name: self.seconds(name, 'wall_seconds') for name in self.rounds},
            'rounds': {
                name: [one['cpu_seconds'] / one['num_items'] for one in rounds] for name, rounds in self.rounds.items()
            },
            'ratios': self.ratios,
            'lm_eval_batch_size': self.lm_eval_batch_size,
            'same': {name: self.num_same(name) for name in self.others},
            'notes': self.notes,
        }

    @property
    def others(self) -> list[str]:
        """The contenders that predict something, without ours."""
        return [name for name, rounds in self.rounds.items() if name != OURS and rounds[0]['predictions']]

    @property
    def notes(self) -> dict[str, str]:
        """Return what ours says about its work."""
        return self.rounds[OURS][0]['notes']

    @property
    def lm_eval_batch_size(self) -> int | None:
        """Lm-eval's best batch size."""
        return self.rounds[LM_EVAL][0]['batch_size'] if LM_EVAL in self.rounds else None


def ratios_of(part: Part) -> list[str]:
    """Return the names of all ratios of a part."""
    return list(dict.fromkeys(ratio for row in part.rows for ratio in row.group.targets))


def line(name: str, cells: Iterable[str], width: int = WIDTH) -> str:
    """Return a line of a table."""
    return f'{name:<{NAME_WIDTH}}' + ''.join(f'{cell:>{width}}' for cell in cells)


def head_line(part: Part) -> str:
    """Return the head of the rows."""
    ratios = [ratio.replace(FOUNDRY, 'foundry').replace('bare_forward', 'bare') for ratio in ratios_of(part)]
    return line('', ['vocabulary', 'items', *part.contenders, *ratios, 'batch']) + '  same; notes'


def row_line(part: Part, result: RowResult) -> str:
    """Return a row: items are ours and llm-foundry's, batch is lm-eval's best, same are predictions equal to ours."""
    ratios = result.ratios
    counted = [result.rounds[name][0]['num_items'] for name in (OURS, FOUNDRY) if name in result.rounds]
    cells = [
        f'{result.vocabulary:,}',
        '/'.join(map(str, counted)),
        *(f'{result.seconds(name):.4f}' if name in result.rounds else '-' for name in part.contenders),
        *(f'{ratios[ratio]:.2f}' if ratio in ratios else '-' for ratio in ratios_of(part)),
        str(result.lm_eval_batch_size or '-'),
    ]
    same = [f'{name} {"/".join(map(str, result.num_same(name)))}' for name in result.others]
    notes = [f'{name} {value}' for name, value in result.notes.items()]
    return f'{line(result.row.name, cells)}  {"; ".join([*same, *notes])}'


def group_lines(part: Part, results: Sequence[RowResult]) -> list[str]:
    """Return the geometric mean of each group's ratios beside its target."""
    lines = [line('geometric means (targets)', ratios_of(part), MEAN_WIDTH)]
    for group, means in group_means(part, results):
        cells = []
        for ratio in ratios_of(part):
            if ratio not in means:
                cells.append('-')
                continue
            sign = '<=' if ratio.startswith(f'{OURS}/') else '>='
            met = 'met' if group.is_met(ratio, means[ratio]) else 'MISSED'
            cells.append(f'{means[ratio]:.2f} ({sign} {group.targets[ratio]:g}) {met}')
        lines.append(line(group.name, cells, MEAN_WIDTH))
    return lines


def group_means(part: Part, results: Sequence[RowResult]) -> list[tuple[Group, dict[str, float]]]:
    """Return the geometric means of the ratios of each group with rows, and of all rows if the part has targets."""
    groups = list({row.group.name: row.group for row in part.rows}.values())
    means = []
    for group in [*groups, *([part.total] if part.total else [])]:
        ratios = [result.ratios for result in results if group.name == result.row.group.name or group is part.total]
        if ratios:
            means.append((group, {ratio: geometric_mean([one[ratio] for one in ratios]) for ratio in group.targets}))
    return means


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))
