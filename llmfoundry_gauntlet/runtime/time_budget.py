"""The time budget: the first evaluation finds the items that fit, and later evaluations run the same ones."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmfoundry_gauntlet.data.examples import in_turns, least_items
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation
from llmfoundry_gauntlet.metrics.composites import Sizes, TaskCosts, allocate, influences
from llmfoundry_gauntlet.types import Example, ItemKey

log = logging.getLogger(__name__)

ROUNDS = (0.3, 0.7, 1.0)  # share of the budget that all items up to and including each round are expected to take
PRIOR = 8.0  # pseudocount: items, half of them correct, that are added to the measured ones
CLOSE = 0.97  # share of the budget; beyond it another round is not worth the overhead
FIRST = 1.1  # share of the budget that the first evaluation may take: its rounds cost more than later evaluations

FileRow = tuple[str | None, int]  # stem of the file, and index of the row


@dataclass(slots=True)
class Measured:
    """The number of items of a task that were run, the sum of their scores and their time, on one or all ranks."""

    num_items: int = 0
    num_right: float = 0.0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class TimeBudget:
    """The items of an evaluation that fit in `seconds`.

    The first evaluation runs in rounds: the minimum of every task, then the items that are expected to take a given
    share of the budget, estimated from the time of earlier rounds. `sizes` is then the number of questions of each task
    and no longer changes. All ranks must call the methods with the same values.
    """

    prepared: PreparedEvaluation
    seconds: float
    sizes: dict[str, int] | None = None
    order: dict[str, list[FileRow]] = field(default_factory=dict)  # each task's questions, in the order they are added
    num_each: dict[str, float] = field(default_factory=dict)  # items per question: variants and samples
    least: dict[str, int] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)  # of the largest round of each task
    right: dict[str, Measured] = field(default_factory=dict)  # of all rounds
    taken: dict[str, int] = field(default_factory=dict)  # questions of each task that were run
    busy_seconds: float = 0.0  # of the largest round, over all ranks
    factor: float = 1.0  # wall time / busy seconds

    def __post_init__(self) -> None:
        num_items = Counter(item.task for item in self.prepared.items)
        for key, task_rows in rows_of(self.prepared).items():
            order = in_turns(task_rows)
            self.order[key] = [row_of(task_rows[place]) for place in order]
            self.least[key] = least_items(task_rows, order)
            self.num_each[key] = num_items[key] / max(len(order), 1)
            self.measured[key], self.right[key] = Measured(), Measured()
            self.taken[key] = 0

    @property
    def is_settled(self) -> bool:
        """Return whether the subset is known."""
        return self.sizes is not None

    def items(self, sizes: Sizes) -> set[ItemKey]:
        """Return the items of the first `sizes[task]` questions of each task."""
        rows = {key: set(order[: sizes[key]]) for key, order in self.order.items()}
        return {key for key in self.prepared.items if (key.file, key.row) in rows[key.task]}

    def chosen(self) -> PreparedEvaluation:
        """Return the evaluation of the subset. Raise RuntimeError if it is not known yet."""
        if self.sizes is None:
            raise RuntimeError('the subset for the time budget is not known yet')
        return self.prepared.only(self.items(self.sizes))

    def next_round(self, spent: float) -> set[ItemKey]:
        """Return the items to run next after `spent` seconds; the empty set once the budget is used up.

        Raise ConfigError if the minimum of every task takes longer than the budget.
        """
        if not any(self.taken.values()):
            self.taken = dict(self.least)
            return self.items(self.taken)
        costs = self.costs()
        least = cost_of(costs, self.least)
        if least > self.seconds:
            raise ConfigError(
                f'time_budget: is {self.seconds:g}s, but the minimum of each task takes about {least:.2g}s here: '
                f'{sum(self.least.values())} items of {len(self.order)} tasks (two clusters, and one item of each '
                'category); give more time, or fewer tasks'
            )
        expected = cost_of(costs, self.taken)
        left = FIRST * self.seconds - spent
        for share in ROUNDS if left > 0 else ():
            if expected >= CLOSE * share * self.seconds:
                continue
            wanted = fitting(costs, min(share * self.seconds, expected + left))
            wanted = {key: max(number, self.taken[key]) for key, number in wanted.items()}
            if wanted != self.taken:
                items = self.items(wanted) - self.items(self.taken)
                self.taken = wanted
                return items
        return set()

    def learn(self, measured: Mapping[str, Measured], wall_seconds: float) -> None:
        """Update the costs after a round, given its measurements by task, summed over ranks, and its wall time."""
        for key, one in measured.items():
            if one.num_items and one.num_items >= self.measured[key].num_items:
                self.measured[key] = one
            self.right[key].num_items += one.num_items
            self.right[key].num_right += one.num_right
        busy = sum(one.busy_seconds for one in measured.values())
        if busy > self.busy_seconds:  # in smaller rounds ranks wait longer for each other
            self.busy_seconds, self.factor = busy, wall_seconds / busy

    def settle(self) -> None:
        """Choose the subset for all later evaluations from the items that were run."""
        sizes = fitting(self.costs(), self.seconds)
        self.sizes = {key: min(self.taken[key], number) for key, number in sizes.items()}
        log.info(
            'time_budget %gs: %d of %d items, the same at every evaluation',
            self.seconds,
            len(self.items(self.sizes)),
            len(self.prepared.items),
        )

    def costs(self) -> dict[str, TaskCosts]:
        """Return the measured cost per question of each task, in seconds."""
        weights = influences(self.prepared.data.suite.gauntlet, {key: len(order) for key, order in self.order.items()})
        return {
            key: TaskCosts(
                cost=self.factor * one.busy_seconds / max(one.num_items, 1) * self.num_each[key],
                deviation=weights[key] * deviation(self.right[key]),
                least=self.least[key],
                most=len(self.order[key]),
            )
            for key, one in self.measured.items()
        }


def fitting(costs: Mapping[str, TaskCosts], seconds: float) -> dict[str, int]:
    """Return the number of questions of each task that fit in the time, or each task's minimum if that takes longer."""
    return allocate(costs, lambda sizes: cost_of(costs, sizes) <= seconds)[0]


def cost_of(costs: Mapping[str, TaskCosts], sizes: Sizes) -> float:
    """Return the total seconds for these numbers of questions."""
    return math.fsum(costs[key].cost * number for key, number in sizes.items())


def deviation(measured: Measured) -> float:
    """Return the standard deviation of an item's score, for few items shrunk towards that of a mean of 0.5."""
    right = (measured.num_right + PRIOR / 2) / (measured.num_items + PRIOR)
    return math.sqrt(right * (1 - right))


def rows_of(prepared: PreparedEvaluation) -> dict[str, list[Example]]:
    """Return one example per question of each task, regardless of variants."""
    return {
        key: list({row_of(example): example for example in prepared.data.asked(key)}.values()) for key in prepared.tasks
    }


def row_of(example: Example) -> FileRow:
    """Return the file and the row of a question."""
    return example.file, example.row
