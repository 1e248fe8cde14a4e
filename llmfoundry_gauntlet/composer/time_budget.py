"""The time budget of an evaluation: the first one finds which items fit, and later ones run the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmfoundry_gauntlet.data.examples import in_turns
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation
from llmfoundry_gauntlet.metrics.composites import TaskCosts, allocate, influences
from llmfoundry_gauntlet.types import Example, ItemKey

log = logging.getLogger(__name__)

ROUNDS = (0.3, 0.7, 1.0)  # share of the budget that the items of a round and those before are expected to take
LEAST_CLUSTERS = 2  # of a task, so that it has a standard error
CLOSE = 0.97  # share of the budget; the rest is not worth another round
FIRST = 1.1  # share of the budget that the first evaluation may take: its rounds cost more than later evaluations

Row = tuple[str | None, int]  # a file's stem and a row


@dataclass(slots=True)
class Measured:
    """The number of items of a task that were run, their right answers and their time, over all ranks."""

    num_items: int = 0
    num_right: float = 0.0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class TimeBudget:
    """The items of an evaluation that fit in `seconds`.

    The first evaluation runs in rounds: the minimum of every task, then as many items as are expected to take a share
    of the budget, judging by the time of earlier rounds. `sizes` are then the numbers of questions of each task, fixed
    from there on. All ranks must call the methods with the same values.
    """

    prepared: PreparedEvaluation
    seconds: float
    sizes: dict[str, int] | None = None
    order: dict[str, list[Row]] = field(default_factory=dict)  # a task's questions in the order taken
    num_asked: dict[str, dict[Row, int]] = field(default_factory=dict)  # items per question: variants and samples
    least: dict[str, int] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)  # of the largest round of each task
    right: dict[str, Measured] = field(default_factory=dict)  # of all rounds
    taken: dict[str, int] = field(default_factory=dict)  # questions of each task that were run
    busy_seconds: float = 0.0  # of the largest round, over all ranks
    factor: float = 1.0  # wall time / busy seconds

    def __post_init__(self) -> None:
        for key, task_rows in rows_of(self.prepared).items():
            self.order[key] = [row_of(task_rows[place]) for place in in_turns(task_rows)]
            self.least[key] = least_of(task_rows)
            self.measured[key], self.right[key] = Measured(), Measured()
            self.taken[key] = 0
            self.num_asked[key] = {}
        for item in self.prepared.items:
            asked = self.num_asked[item.task]
            asked[item.file, item.row] = asked.get((item.file, item.row), 0) + 1

    @property
    def is_settled(self) -> bool:
        """Return whether the subset is known."""
        return self.sizes is not None

    def items(self, sizes: Mapping[str, int]) -> set[ItemKey]:
        """Return the items of the first questions of each task, given their numbers."""
        rows = {key: set(order[: sizes[key]]) for key, order in self.order.items()}
        return {key for key in self.prepared.items if (key.file, key.row) in rows[key.task]}

    def chosen(self) -> PreparedEvaluation:
        """Return the evaluation of the subset. Raise RuntimeError if it is not known yet."""
        if self.sizes is None:
            raise RuntimeError('the subset for the time budget is not known yet')
        return self.prepared.only(self.items(self.sizes))

    def next_round(self, spent: float) -> set[ItemKey]:
        """Return the items to run next after `spent` seconds; none once the budget is used up.

        Raise ConfigError if the minimum of every task takes longer than the budget.
        """
        if not any(self.taken.values()):
            self.taken = dict(self.least)
            return self.items(self.taken)
        costs = self.costs()
        least = sum(costs[key].seconds * number for key, number in self.least.items())
        if least > self.seconds:
            raise ConfigError(
                f'time_budget: is {self.seconds:g}s, but the minimum of each task takes about {least:.2g}s here: '
                f'{sum(self.least.values())} items of {len(self.order)} tasks (two clusters, and one item of each '
                'category); give more time, or fewer tasks'
            )
        expected = self._expected(costs)
        left = FIRST * self.seconds - spent
        for share in ROUNDS if left > 0 else ():
            if expected >= CLOSE * share * self.seconds:
                continue
            wanted = allocate(costs, min(share * self.seconds, expected + left))
            wanted = {key: max(number, self.taken[key]) for key, number in wanted.items()}
            if wanted != self.taken:
                items = self.items(wanted) - self.items(self.taken)
                self.taken = wanted
                return items
        return set()

    def _expected(self, costs: Mapping[str, TaskCosts]) -> float:
        """Return the seconds that the items run so far would take together."""
        return sum(costs[key].seconds * number for key, number in self.taken.items())

    def learn(self, measured: Mapping[str, Measured], wall_seconds: float) -> None:
        """Update the costs with a round: its items and busy seconds by task over all ranks, and its wall time."""
        for key, one in measured.items():
            if one.num_items and one.num_items >= self.measured[key].num_items:
                self.measured[key] = one
            self.right[key].num_items += one.num_items
            self.right[key].num_right += one.num_right
        busy = sum(one.busy_seconds for one in measured.values())
        if busy > self.busy_seconds:  # in smaller rounds ranks wait longer for each other
            self.busy_seconds, self.factor = busy, wall_seconds / busy

    def settle(self) -> None:
        """Choose the subset for all later evaluations among the items that were run."""
        sizes = allocate(self.costs(), self.seconds)
        self.sizes = {key: min(self.taken[key], number) for key, number in sizes.items()}
        log.info(
            'time_budget %gs: %d of %d items, the same at every evaluation',
            self.seconds,
            len(self.items(self.sizes)),
            len(self.prepared.items),
        )

    def restore(self, sizes: Mapping[str, int]) -> None:
        """Use the subset of an earlier job with the same tasks."""
        self.sizes = dict(sizes)

    def costs(self) -> dict[str, TaskCosts]:
        """Return the measured costs of each task."""
        weights = influences(self.prepared.data.suite.gauntlet, {key: len(order) for key, order in self.order.items()})
        return {
            key: TaskCosts(
                seconds=self.factor * one.busy_seconds / max(one.num_items, 1) * self._items_per_question(key),
                share_right=self.right[key].num_right / max(self.right[key].num_items, 1),
                num_measured=self.right[key].num_items,
                least=self.least[key],
                most=len(self.order[key]),
                weight=weights[key],
            )
            for key, one in self.measured.items()
        }

    def _items_per_question(self, key: str) -> float:
        return sum(self.num_asked[key].values()) / max(len(self.num_asked[key]), 1)


def summed(parts: Sequence[Measured]) -> Measured:
    """Return the sum of what all ranks measured of a task."""
    return Measured(
        num_items=sum(part.num_items for part in parts),
        num_right=sum(part.num_right for part in parts),
        busy_seconds=sum(part.busy_seconds for part in parts),
    )


def rows_of(prepared: PreparedEvaluation) -> dict[str, list[Example]]:
    """Return one example for each question of each task, whatever its variants."""
    return {
        key: list({row_of(example): example for example in prepared.data.asked(key)}.values()) for key in prepared.tasks
    }


def row_of(example: Example) -> Row:
    """Return the file and the row of a question."""
    return example.file, example.row


def least_of(examples: list[Example]) -> int:
    """Return the minimum of a task: the first questions of two clusters, with at least one of each category."""
    categories = {example.category for example in examples}
    num_clusters = len({example.cluster or row_of(example) for example in examples})
    seen: set[str | None] = set()
    found: set[object] = set()
    for place in (order := in_turns(examples)):
        seen.add(examples[place].category)
        found.add(examples[place].cluster or row_of(examples[place]))
        if len(found) >= min(LEAST_CLUSTERS, num_clusters) and seen == categories:
            return order.index(place) + 1
    return len(order)
