"""Choose the smallest subset of items with which an average meets a precision target.

A target of 5 % allows a standard error of the average 5 % above that over all items, both for a model near chance and
for one halfway between chance and perfect, so that it holds throughout a training. The subset depends only on the
files, the tasks and the gauntlet, so every evaluation of every model uses the same items. Items are assumed to be
independent; if items of a passage are correlated, the subset is more precise than its target, as it takes one of each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import NormalDist, fmean

from llmfoundry_gauntlet.config.settings import PrecisionTarget
from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.data.examples import in_turns, least_items
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.metrics.comparison import POWER
from llmfoundry_gauntlet.metrics.composites import Sizes, TargetEstimate, TaskCosts, allocate, influences, slopes
from llmfoundry_gauntlet.metrics.statistics import NORMAL_QUANTILE
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.types import Example

SHARES = (0.02, 0.05, 0.1, 0.2)  # targets shown by a dry run
DEFAULT_AVERAGE = 'gauntlet_average'
NUM_SAMPLED = 32  # prompts per task used to estimate its cost
CHARACTERS_PER_TOKEN = 4
COST_OF_GENERATING = 5  # cost of generating one character, relative to reading one character of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions of a task; a subset of n takes the first n of `order`.

    `factors[n]` is the variance of the score over the first n questions, relative to that of one question; `cost` is
    per question, in characters of prompts. `variances` are those of one question near chance and halfway between chance
    and 1.
    """

    examples: Sequence[Example]
    order: Sequence[int]
    factors: Sequence[float]
    cost: float
    variances: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPlan:
    """The questions of all tasks except SCORE's, and the average whose error is limited."""

    gauntlet: GauntletSpec
    average: str
    tasks: Mapping[str, Questions]

    @property
    def whole(self) -> dict[str, int]:
        """Return the number of questions of each task."""
        return {key: len(task.order) for key, task in self.tasks.items()}

    @property
    def has_tasks(self) -> bool:
        """Return whether any task is in the average."""
        return bool(slopes(self.gauntlet, self.whole)[self.average])

    def variances(self, sizes: Sizes) -> list[float]:
        """Return the average's variance with subsets of these sizes, near chance and halfway between chance and 1."""
        weights = slopes(self.gauntlet, sizes)[self.average]
        return [
            math.fsum(
                weights[key] ** 2 * self.tasks[key].variances[case] * self.tasks[key].factors[sizes[key]]
                for key in weights
            )
            for case in (0, 1)
        ]

    def sizes(self, share: float) -> dict[str, int]:
        """Return the number of questions per task that keeps the error at most this share above that over all."""
        whole = self.variances(self.whole)
        influence = influences(self.gauntlet, self.whole, self.average)
        costs = {
            key: TaskCosts(
                cost=task.cost,
                deviation=influence[key]
                * math.sqrt(
                    math.fsum(one / of_all for one, of_all in zip(task.variances, whole, strict=True) if of_all)
                    * (task.factors[-1] * len(task.order))
                ),
                least=least_items(task.examples, task.order),
                most=len(task.order),
            )
            for key, task in self.tasks.items()
        }

        def is_too_imprecise(sizes: Sizes) -> bool:
            pairs = zip(self.variances(sizes), whole, strict=True)
            return any(variance > of_all * (1 + share) ** 2 for variance, of_all in pairs)

        return allocate(costs, is_too_imprecise)[1]

    def subsets(self, share: float) -> dict[str, list[Example]]:
        """Return the rows of each task to evaluate for this target, in file order."""
        return {
            key: [self.tasks[key].examples[place] for place in sorted(self.tasks[key].order[:number])]
            for key, number in self.sizes(share).items()
        }

    def estimates(self, seconds: Mapping[str, float]) -> tuple[TargetEstimate, ...]:
        """Return estimates for each target in SHARES and for all items, from each task's seconds per question."""
        found = []
        for share in (*SHARES, 0.0):
            sizes = self.sizes(share) if share else self.whole
            error = math.sqrt(max(self.variances(sizes)))
            found.append(
                TargetEstimate(
                    share=share,
                    num_items=sum(sizes.values()),
                    seconds=math.fsum(seconds.get(key, 0.0) * number for key, number in sizes.items()),
                    standard_error=error,
                    detectable=(NORMAL_QUANTILE + NormalDist().inv_cdf(POWER)) * math.sqrt(2) * error,
                )
            )
        return tuple(found)


def precision_plan(
    tasks: Sequence[Task], examples: Mapping[str, Sequence[Example]], gauntlet: GauntletSpec, average: str | None = None
) -> PrecisionPlan:
    """Return the plan for an average, over all tasks that have rows. Raise ConfigError if there is no such average.

    The default average is gauntlet_average, else the first one.
    """
    names = [*gauntlet.named_averages]
    if average is None:
        average = DEFAULT_AVERAGE if DEFAULT_AVERAGE in names else names[0]
    if average not in names:
        raise ConfigError(f'precision_target: the gauntlet has no average {average!r}; allowed: {", ".join(names)}')
    baselines = {one.key: one.random_baseline for category in gauntlet.categories for one in category.benchmarks}
    known = [task for task in tasks if task.key in examples and not task.asks_variants]
    return PrecisionPlan(
        gauntlet=gauntlet,
        average=average,
        tasks={task.key: questions(task, examples[task.key], baselines.get(task.key, 0.0)) for task in known},
    )


def questions(task: Task, examples: Sequence[Example], chance: float) -> Questions:
    """Return the questions of a task, given the probability of a correct guess."""
    order = in_turns(examples)
    halfway = (1 + chance) / 2
    return Questions(
        examples=examples,
        order=order,
        factors=variance_factors([examples[place].category for place in order]),
        cost=mean_cost(task, [examples[place] for place in order[:NUM_SAMPLED]]),
        variances=(chance * (1 - chance), halfway * (1 - halfway)),
    )


def variance_factors(categories: Sequence[str | None]) -> list[float]:
    """Return the variance of the first n questions' mean over categories, relative to that of one, for n from 0."""
    num_categories, counts, total = len(set(categories)), Counter[str | None](), 0.0
    factors = [math.inf]
    for category in categories:
        number = counts[category]
        total += 1 / (number + 1) - (1 / number if number else 0.0)
        counts[category] += 1
        factors.append(total / num_categories**2 if len(counts) == num_categories else math.inf)
    return factors


def mean_cost(task: Task, examples: Sequence[Example]) -> float:
    """Return the mean cost of some rows, in characters of prompts; shots are drawn from the same rows."""
    (num_shots,) = task.num_fewshot
    tokens = (task.generation_kwargs or {}).get('max_new_tokens') or task.default_max_new_tokens
    costs = []
    for place, example in enumerate(examples):
        others = [*examples[place + 1 :], *examples[:place]]
        prompt = task.prompt(example, list(islice(others, num_shots)))
        read = 0 if task.fewshot == 'fixed' else len(prompt.preamble)  # fixed shots are a shared prefix, run once
        read += sum(map(len, (*prompt.own_texts, *prompt.continuations)))
        written = 0
        if task.generates:
            longest = max((len(text) for text in task.responses(example.content)), default=0)
            written = tokens * CHARACTERS_PER_TOKEN if tokens else longest
        costs.append((read + COST_OF_GENERATING * written) * task.num_samples)
    return fmean(costs)


def precise_subsets(
    tasks: Sequence[Task],
    examples: Mapping[str, Sequence[Example]],
    gauntlet: GauntletSpec | None,
    target: PrecisionTarget,
) -> dict[str, list[Example]]:
    """Return the rows to evaluate by task so that an average meets the target. Raise ConfigError."""
    if gauntlet is None:
        raise ConfigError('precision_target: is about the error of an average; give a gauntlet, which defines it')
    plan = precision_plan(tasks, examples, gauntlet, target.average)
    if not plan.has_tasks:
        raise ConfigError(f'precision_target: no task of the average {plan.average!r} is evaluated; give its tasks')
    return plan.subsets(target.share)
