"""The tables of the benchmark: its rows, and the geometric means of its groups beside their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from parts import FOUNDRY, LM_EVAL, OURS, Group, Part, Row
from tabulate import tabulate

SMALLEST_METRIC = 1e-12  # a metric of 0 is equal to nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """The rounds of a row with one vocabulary, by contender: its answers, with `num_items` and their seconds."""

    row: Row
    vocabulary: int
    rounds: dict[str, list[dict[str, Any]]]
    clock: str = 'cpu_seconds'  # or wall_seconds on a GPU

    def seconds(self, contender: str, clock: str | None = None) -> float:
        """Return seconds per item, the median over rounds."""
        return median(one[clock or self.clock] / one['num_items'] for one in self.rounds[contender])

    @property
    def ratios(self) -> dict[str, float]:
        """The ratios that the row's group has targets for, in seconds per item, of the contenders that ran."""
        pairs = {ratio: ratio.split('/') for ratio in self.row.group.targets}
        return {
            ratio: self.seconds(first) / self.seconds(second)
            for ratio, (first, second) in pairs.items()
            if {first, second} <= self.rounds.keys()
        }

    @property
    def same(self) -> dict[str, tuple[int, int]]:
        """Return the number of each other contender's predictions that equal ours, and the number it made, if any."""
        ours, found = self.rounds[OURS][0], {}
        for name, (first, *_) in self.rounds.items():
            theirs = first['predictions']
            if name == OURS or not theirs:
                continue
            if 'prompts' in ours and 'prompts' in first:  # lm-eval has its own order of SCORE's variants
                by_prompt = dict(zip(first['prompts'], theirs, strict=True))
                theirs = [by_prompt.get(prompt) for prompt in ours['prompts']]
            found[name] = (sum(a == b for a, b in zip(ours['predictions'], theirs, strict=False)), len(theirs))
        return found

    @property
    def largest_difference(self) -> float | None:
        """Return the largest difference of a choice's log-probability to ours, None if no other contender has them."""
        ours = self.rounds[OURS][0].get('logprobs')
        others = [first for name, (first, *_) in self.rounds.items() if name != OURS]
        theirs = [first['logprobs'] for first in others if first.get('logprobs')]
        differences = [
            abs(logprob - other)
            for rows in theirs
            for our_row, their_row in zip(ours, rows, strict=True)
            for logprob, other in zip(our_row, their_row, strict=True)
        ]
        return max(differences, default=None)

    @property
    def largest_metric_difference(self) -> float | None:
        """Return the largest relative difference of a metric to ours, None if the contenders return no metrics."""
        first_rounds = [first for first, *_ in self.rounds.values() if 'metrics' in first]
        if not first_rounds:
            return None
        ours = self.rounds[OURS][0]['metrics']
        differences = [0.0]
        for first in first_rounds:
            assert first['metrics'].keys() == ours.keys()
            for name, value in first['metrics'].items():
                differences.append(abs(value - ours[name]) / max(abs(ours[name]), SMALLEST_METRIC))
        return max(differences)

    @property
    def notes(self) -> dict[str, str]:
        """Return the contenders' notes on their work."""
        notes: dict[str, str] = {}
        for rounds in self.rounds.values():
            notes |= {name: note for name, note in rounds[0].get('notes', {}).items() if name not in notes}
        return notes

    @property
    def lm_eval_batch_size(self) -> int | None:
        """lm-eval's fastest batch size."""
        return self.rounds[LM_EVAL][0]['batch_size'] if LM_EVAL in self.rounds else None

    def as_json(self) -> dict[str, Any]:
        """Return the row's entry in the results file: seconds are per item, processor time unless it says wall."""
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
            'same': self.same,
            'largest_difference': self.largest_difference,
            'largest_metric_difference': self.largest_metric_difference,
            'notes': self.notes,
        }


def rows_table(results: Sequence[RowResult]) -> str:
    """Return seconds per item, ratios, lm-eval's best batch size, and predictions equal to ours.

    Items are those of ours and of llm-foundry. Rows need not have the same contenders.
    """
    contenders = dict.fromkeys(name for result in results for name in result.rounds)
    ratios = dict.fromkeys(ratio for result in results for ratio in result.ratios)
    has_logprobs = any(result.largest_difference is not None for result in results)
    has_metrics = any(result.largest_metric_difference is not None for result in results)
    rows = []
    for result in results:
        counted = [result.rounds[name][0]['num_items'] for name in (OURS, FOUNDRY) if name in result.rounds]
        difference, of_metrics = result.largest_difference, result.largest_metric_difference
        rows.append({
            'row': result.row.name,
            'vocabulary': result.vocabulary,
            'items': '/'.join(map(str, counted)),
            **{name: result.seconds(name) if name in result.rounds else None for name in contenders},
            **{ratio: result.ratios.get(ratio) for ratio in ratios},
            'batch': result.lm_eval_batch_size,
            'same': ', '.join(f'{name} {same} of {made}' for name, (same, made) in result.same.items()),
            **({'nats off': None if difference is None else f'{difference:.0e}'} if has_logprobs else {}),
            **({'metrics off': None if of_metrics is None else f'{of_metrics:.0e}'} if has_metrics else {}),
            'notes': '; '.join(f'{name} {value}' for name, value in result.notes.items()),
        })  # fmt: skip
    return tabulate(rows, headers='keys', floatfmt='.4g', missingval='-')


def groups_table(part: Part, results: Sequence[RowResult]) -> str:
    """Return the geometric mean of each group's ratios beside its target."""
    rows = []
    for group, means in group_means(part, results):
        cells = {'geometric means (targets)': group.name}
        for ratio, mean in means.items():
            sign = '<=' if ratio.startswith(f'{OURS}/') else '>='
            met = 'met' if group.is_met(ratio, mean) else 'MISSED'
            cells[ratio] = f'{mean:.2f} ({sign} {group.targets[ratio]:g}) {met}'
        rows.append(cells)
    return tabulate(rows, headers='keys', missingval='-')


def group_means(part: Part, results: Sequence[RowResult]) -> list[tuple[Group, dict[str, float]]]:
    """Return the geometric means of the ratios of each group with rows, and of all rows if the part has targets."""
    results_by_group: list[tuple[Group, Sequence[RowResult]]] = []
    for group in {row.group.name: row.group for row in part.rows}.values():
        results_by_group.append((group, [result for result in results if result.row.group.name == group.name]))
    if part.total:
        results_by_group.append((part.total, results))

    means = []
    for group, results_of_group in results_by_group:
        if not results_of_group:
            continue
        measured = [ratio for ratio in group.targets if ratio in results_of_group[0].ratios]
        mean_by_ratio = {
            ratio: geometric_mean(result.ratios[ratio] for result in results_of_group) for ratio in measured
        }
        means.append((group, mean_by_ratio))
    return means
