"""The rounds of the first evaluation under a time budget: more and more items, which show what a task costs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llmfoundry_gauntlet.runtime.distributed import gather
from llmfoundry_gauntlet.runtime.step_clock import StepClock
from llmfoundry_gauntlet.runtime.time_budget import Measured, TimeBudget
from llmfoundry_gauntlet.types import ItemKey, ItemResult


class BudgetRounds:
    """The rounds of a time budget on this rank. All ranks must call `begin` and `end`, in turns."""

    def __init__(self, budget: TimeBudget, clock: StepClock) -> None:
        self.budget = budget
        self.clock = clock
        self._measured: dict[str, Measured] = {}  # by task, in the current round
        self._busy_before: dict[str, float] = {}  # seconds of each task before the current round
        self._started = 0.0

    def begin(self) -> set[ItemKey]:
        """Begin the next round and return its items; the empty set once the budget is used up.

        Raise ConfigError if the minimum of every task takes longer than the budget.
        """
        # Ranks have clocks of their own, but must choose the same items.
        spent_seconds = max(gather(self.clock.wall_seconds))
        items = self.budget.next_round(spent_seconds)
        self._started = time.perf_counter()
        self._busy_before = dict(self.clock.busy_seconds)
        self._measured = {task: Measured() for task in self.clock.tasks}
        return items

    def count(self, result: ItemResult) -> None:
        """Count an item of the current round."""
        measured = self._measured[result.key.task]
        measured.num_items += 1
        measured.num_right += result.score or 0.0

    def end(self) -> None:
        """Tell the budget what the round took, on all ranks."""
        for task, measured in self._measured.items():
            measured.busy_seconds = self.clock.busy_seconds[task] - self._busy_before[task]
        of_all_ranks = gather((self._measured, time.perf_counter() - self._started))
        measured_by_task = {
            task: summed([measured_by_rank[task] for measured_by_rank, _ in of_all_ranks]) for task in self._measured
        }
        slowest_seconds = max(seconds for _, seconds in of_all_ranks)
        self.budget.learn(measured_by_task, slowest_seconds)


def summed(parts: Sequence[Measured]) -> Measured:
    """Return the sum of the ranks' measurements of a task."""
    return Measured(
        num_items=sum(part.num_items for part in parts),
        num_right=sum(part.num_right for part in parts),
        busy_seconds=sum(part.busy_seconds for part in parts),
    )
