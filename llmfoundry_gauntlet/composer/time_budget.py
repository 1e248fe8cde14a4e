"""A time for an evaluation: in the first one it is found out which items fit, and later ones run the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmfoundry_gauntlet.data.subsets import in_turns
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation
from llmfoundry_gauntlet.metrics.allocation import TaskCosts, allocate, influences
from llmfoundry_gauntlet.types import Example, ItemKey

log = logging.getLogger(__name__)

ROUNDS = (0.3, 0.7, 1.0)  # shares of the time that the items of a round and those before are expected to take
LEAST_CLUSTERS = 2  # of a task, so that its error is known
CLOSE = 0.97  # of the time; what is left is not worth a round of its own
FIRST = 1.1  # of the time, that the first evaluation may take: its rounds are dearer than what is settled

Row = tuple[str | None, int]  # a file's stem and a row


@dataclass(slots=True)
class Measured:
    """Seconds, number and right answers of some items of a task, all ranks together."""

    num_items: int = 0
    num_right: float = 0.0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class TimeBudget:
    """The items of an evaluation that fit into `seconds`.

    The first evaluation runs in rounds: the least of every task, then as many as are expected to take a share of the
    time, by what those before took. `sizes` are the questions of each task once that is settled; they, and so the
    items, stay the same. All ranks have to be told the same.
    """

    prepared: PreparedEvaluation
    seconds: float
    sizes: dict[str, int] | None = None
    order: dict[str, list[list[Row]]] = field(default_factory=dict)  # a task's questions by cluster, as they are taken
    num_asked: dict[str, dict[Row, int]] = field(default_factory=dict)  # items of a question: variants and samples
    least: dict[str, int] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)  # of the largest round of each task
    right: dict[str, Measured] = field(default_factory=dict)  # of all rounds
    taken: dict[str, int] = field(default_factory=dict)  # questions of each task that have been run
    busy_seconds: float = 0.0  # of the largest round, all ranks together
    factor: float = 1.0  # of wall time over these

    def __post_init__(self) -> None:
        for key, task_rows in rows_of(self.prepared).items():
            self.order[key] = [[row_of(task_rows[place]) for place in group] for group in in_turns(task_rows)]
            self.least[key] = least_of(task_rows)
            self.measured[key], self.right[key] = Measured(), Measured()
            self.taken[key] = 0
            self.num_asked[key] = {}
        for item in self.prepared.items:
            asked = self.num_asked[item.task]
            asked[item.file, item.row] = asked.get((item.file, item.row), 0) + 1

    @property
    def is_settled(self) -> bool:
        """Return whether it is known which items are run."""
        return self.sizes is not None

    def items(self, sizes: Mapping[str, int]) -> set[ItemKey]:
        """The items of so many questions of each task."""
        rows = {key: {row for group in self._groups(key, sizes[key]) for row in group} for key in self.order}
        return {key for key in self.prepared.items if (key.file, key.row) in rows[key.task]}

    def chosen(self) -> PreparedEvaluation:
        """The evaluation of the items that fit."""
        if self.sizes is None:
            raise RuntimeError('it is not known yet which items fit into the time')
        return self.prepared.only(self.items(self.sizes))

    def next_round(self, spent: float) -> set[ItemKey]:
        """The items to be run next, none where the time is used up, of which so many seconds are `spent`.

        Raises ConfigError where the least of every task takes longer than there is time.
        """
        if not any(self.taken.values()):
            self.taken = self._whole_clusters(self.least)
            return self.items(self.taken)
        costs = self.costs()
        least = sum(costs[key].seconds * number for key, number in self.least.items())
        if least > self.seconds:
            raise ConfigError(
                f'time_budget: is {self.seconds:g}s, but here it takes about {least:.2g}s to run the least of each '
                f'task, {sum(self.least.values())} items of {len(self.order)} tasks (two clusters, and one item of '
                'each category); give more time, or fewer tasks'
            )
        expected = self._expected(costs)
        left = FIRST * self.seconds - spent
        for share in ROUNDS if left > 0 else ():
            if expected >= CLOSE * share * self.seconds:
                continue
            wanted = self._whole_clusters(allocate(costs, min(share * self.seconds, expected + left)))
            wanted = {key: max(number, self.taken[key]) for key, number in wanted.items()}
            if wanted != self.taken:
                items = self.items(wanted) - self.items(self.taken)
                self.taken = wanted
                return items
        return set()

    def _expected(self, costs: Mapping[str, TaskCosts]) -> float:
        """Seconds that the items which have been run would take."""
        return sum(costs[key].seconds * number for key, number in self.taken.items())

    def learn(self, measured: Mapping[str, Measured], wall_seconds: float) -> None:
        """Notes what a round took: items and busy seconds by task, of all ranks together, and wall time."""
        for key, one in measured.items():
            if one.num_items and one.num_items >= self.measured[key].num_items:
                self.measured[key] = one
            self.right[key].num_items += one.num_items
            self.right[key].num_right += one.num_right
        busy = sum(one.busy_seconds for one in measured.values())
        if busy > self.busy_seconds:  # in small rounds ranks wait for each other more than they will
            self.busy_seconds, self.factor = busy, wall_seconds / busy

    def settle(self) -> None:
        """Decides which items are run from now on, among those that have been run."""
        sizes = self._whole_clusters(allocate(self.costs(), self.seconds))
        self.sizes = {key: min(self.taken[key], number) for key, number in sizes.items()}
        log.info(
            'time_budget %gs: %d of %d items, the same at every evaluation',
            self.seconds,
            len(self.items(self.sizes)),
            len(self.prepared.items),
        )

    def restore(self, sizes: Mapping[str, int]) -> None:
        """Take the numbers of questions of an earlier job with the same tasks."""
        self.sizes = self._whole_clusters(sizes)

    def costs(self) -> dict[str, TaskCosts]:
        """Return what is known of each task by now."""
        weights = influences(self.prepared.data.suite.gauntlet, {key: self.num_questions(key) for key in self.order})
        return {
            key: TaskCosts(
                seconds=self.factor * one.busy_seconds / max(one.num_items, 1) * self._items_per_question(key),
                share_right=self.right[key].num_right / max(self.right[key].num_items, 1),
                num_measured=self.right[key].num_items,
                least=self.least[key],
                most=self.num_questions(key),
                weight=weights[key],
            )
            for key, one in self.measured.items()
        }

    def num_questions(self, key: str) -> int:
        """All questions of a task."""
        return sum(map(len, self.order[key]))

    def _items_per_question(self, key: str) -> float:
        return sum(self.num_asked[key].values()) / max(len(self.num_asked[key]), 1)

    def _groups(self, key: str, number: int) -> list[list[Row]]:
        """The clusters of a task that hold so many questions at most, but those that are taken in any case."""
        found: list[list[Row]] = []
        count = 0
        for group in self.order[key]:
            if count + len(group) > max(number, self.least[key]):
                break
            found.append(group)
            count += len(group)
        return found

    def _whole_clusters(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {key: sum(map(len, self._groups(key, number))) for key, number in sizes.items()}


def summed(parts: Sequence[Measured]) -> Measured:
    """Return what all ranks together have measured of a task."""
    return Measured(
        num_items=sum(part.num_items for part in parts),
        num_right=sum(part.num_right for part in parts),
        busy_seconds=sum(part.busy_seconds for part in parts),
    )


def rows_of(prepared: PreparedEvaluation) -> dict[str, list[Example]]:
    """One example for each question of each task, whatever its variants."""
    return {
        key: list({row_of(example): example for example in prepared.data.asked(key)}.values()) for key in prepared.tasks
    }


def row_of(example: Example) -> Row:
    """Return where a question stands."""
    return example.file, example.row


def least_of(examples: list[Example]) -> int:
    """The fewest questions of a task that are two clusters, and one of each category."""
    categories = {example.category for example in examples}
    seen: set[str | None] = set()
    count = 0
    for number, group in enumerate(in_turns(examples), 1):
        count += len(group)
        seen.update(examples[place].category for place in group)
        if number >= LEAST_CLUSTERS and seen == categories:
            break
    return count
