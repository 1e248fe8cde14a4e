"""The subset of a time budget, chosen once before the first evaluation from the time of a sample of its work."""

from __future__ import annotations

from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation, share_seconds
from llmfoundry_gauntlet.evaluation.subsets import sizes_in_time
from llmfoundry_gauntlet.runtime.distributed import gather
from llmfoundry_gauntlet.runtime.runner import ModelRunner
from llmfoundry_gauntlet.runtime.timed_sample import estimated_seconds

NUM_GENERATIONS = 3  # of each task that are timed: a choice that takes long uses the time of training


def sizes_within_budget(prepared: PreparedEvaluation, runner: ModelRunner, budget_seconds: float) -> dict[str, int]:
    """Return the number of questions of each task that fit in the time, the same on all ranks, which must call this.

    The model is probed. Raise ConfigError if the least of every task takes longer.
    """
    estimated = estimated_seconds(runner.planned(prepared), runner, num_generations=NUM_GENERATIONS)
    # Ranks that choose different items would wait for each other for ever.
    seconds_by_task, *_ = gather(share_seconds(estimated.total, estimated.busy_by_task))
    return sizes_in_time(
        {key: prepared.data.asked(key) for key in prepared.tasks},
        prepared.data.suite.gauntlet,
        seconds_by_task=seconds_by_task,
        budget_seconds=budget_seconds,
    )
