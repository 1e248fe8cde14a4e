"""The estimated cost of an evaluation, as a dry run prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEstimate:
    """The work of one task.

    `num_tokens` are the model's input tokens for contexts, choices and prompts, each distinct prefix once; a prefix of
    several tasks counts for the first. `generation_tokens` are the most that can be generated.
    """

    task: str
    num_items: int
    num_tokens: int
    generation_tokens: int
    num_shortened: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEstimate:
    """The cost and the error of a precision target.

    `share` is the fraction by which the error of the average may exceed its error with all items (0: all items).
    `standard_error` is the larger of that of a model near chance and that of one halfway to 1. `detectable` is the
    minimum detectable effect between two models, with 80 % power at a level of 5 %, if they agree by chance only; it is
    smaller for models that agree more.
    """

    share: float
    num_items: int
    seconds: float
    standard_error: float
    detectable: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated cost of an evaluation. The `seconds` by part add up to those of the tasks.

    `preparing_seconds` is the measured time to read data and load the model, which a real run also needs. `notes` say
    how the rest was estimated. `targets` are subsets for the precision of the gauntlet's `average`, if there is one.
    """

    tasks: tuple[TaskEstimate, ...]
    seconds: Mapping[str, float]
    preparing_seconds: float
    num_ranks: int
    notes: tuple[str, ...]
    average: str | None = None
    targets: tuple[TargetEstimate, ...] = ()

    @property
    def total_seconds(self) -> float:
        """Return the seconds of the evaluation itself."""
        return sum(self.seconds.values())
