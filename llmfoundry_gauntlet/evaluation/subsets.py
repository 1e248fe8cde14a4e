"""Choose the questions that an evaluation asks: all of them, or a subset.

A subset takes the first questions of each task in an order that depends on nothing but the rows (`in_turns`), so a
smaller subset is part of a larger one. There are three ways to choose how many:

* `subset_items`: at most a given number of each task.
* `precision_target`: the fewest with which an average meets a target. A target of 5 % allows a standard error 5 % above
  that over all questions, both for a model near chance and for one halfway between chance and perfect, so that it
  holds throughout a training. It depends only on files, tasks and gauntlet.
* `time_budget`: as many as fit in a time, from the seconds that a question of each task takes on this machine.

The last two give each task its part in the same way (`allocate`). No choice looks at scores, so every evaluation of
every model asks the same questions (within a time budget, every model of the same cost). Questions are assumed to be
independent; if those of a passage are correlated, a subset is more precise than its target, as it takes one of each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import NormalDist, fmean

from llmfoundry_gauntlet.config.settings import EvaluationSettings, PrecisionTarget
from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.data.examples import in_turns, least_items, subset
from llmfoundry_gauntlet.errors import ConfigError, named
from llmfoundry_gauntlet.evaluation.estimate import TargetEstimate
from llmfoundry_gauntlet.metrics.comparison import POWER
from llmfoundry_gauntlet.metrics.composites import slopes
from llmfoundry_gauntlet.metrics.statistics import NORMAL_QUANTILE
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.types import Example

# The allocation.
STEPS = 60  # of a bisection
LARGEST = 1e18  # scale of an allocation

# Precision targets.
SHARES = (0.02, 0.05, 0.1, 0.2)  # targets shown by a dry run
DEFAULT_AVERAGE = 'gauntlet_average'
NUM_SAMPLED = 32  # prompts per task used to estimate its cost
CHARACTERS_PER_TOKEN = 4
COST_OF_GENERATING = 5  # cost of generating one character, relative to reading one character of a prompt

# Time budgets.
DEVIATION = 0.5  # of a question's score: that of a model which has half of them right

ExamplesByTask = Mapping[str, Sequence[Example]]
Sizes = Mapping[str, int]  # number of questions by task


def subsets_of(
    tasks: Sequence[Task], gauntlet: GauntletSpec | None, examples: ExamplesByTask, settings: EvaluationSettings
) -> dict[str, list[Example]]:
    """Return the rows to evaluate of each task that has more, by the settings alone. Raise ConfigError.

    SCORE's subsets of questions are chosen on loading, that of a time budget when the first evaluation begins.
    """
    if settings.precision is not None:
        subsets = precise_subsets(tasks, examples, gauntlet, settings.precision)
    else:
        keys = [task.key for task in tasks if not task.asks_variants]
        subsets = {key: subset(examples[key], settings.subset_items) for key in keys}
    return {key: rows for key, rows in subsets.items() if len(rows) < len(examples[key])}


# How many questions of each task: the allocation for a precision or a time.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCosts:
    """The cost of a task's questions and their effect on the error of composites.

    `cost` of a question is in seconds or any other unit, `deviation` the standard deviation that a single question
    gives a composite. At least `least` and at most `most` questions are taken.
    """

    cost: float
    deviation: float
    least: int
    most: int


def allocate(tasks: Mapping[str, TaskCosts], goes_on: Callable[[Sizes], bool]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the last of a series of growing allocations with `goes_on` true, and the first with it false.

    If it is false for all, both have the minimum of every task; if it is true for all, the maximum. A composite gains
    most precision for its cost if the number of questions is proportional to the deviation divided by the square root
    of the cost (Neyman allocation with costs), within the limits.
    """

    def sizes(scale: float) -> dict[str, int]:
        return {
            key: min(task.most, max(task.least, int(scale * task.deviation / math.sqrt(task.cost + 1e-9))))
            for key, task in tasks.items()
        }

    least = sizes(0.0)
    most = {key: task.most for key, task in tasks.items()}
    if not goes_on(least):
        return least, least
    if goes_on(most):
        return most, most

    # Find a scale that is too large, and halve the distance to it.
    low, high = 0.0, 1.0
    while goes_on(sizes(high)) and high < LARGEST:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if goes_on(sizes(middle)) else (low, middle)
    return sizes(low), sizes(high)


def influences(gauntlet: GauntletSpec | None, num_items: Sizes, average: str | None = None) -> dict[str, float]:
    """Return the effect of each task's accuracy on one average, or on all composites: the root of the sum of squares.

    Tasks without an effect get the root mean square of the others; without a gauntlet all tasks get 1.
    """
    if gauntlet is None:
        return dict.fromkeys(num_items, 1.0)
    slopes_by_composite = slopes(gauntlet, num_items)
    composites = list(slopes_by_composite) if average is None else [average]
    slopes_by_task: dict[str, list[float]] = {}
    for composite in composites:
        for key, slope in slopes_by_composite[composite].items():
            slopes_by_task.setdefault(key, []).append(slope)
    influence = {key: math.hypot(*of_task) for key, of_task in sorted(slopes_by_task.items())}
    root_mean_square = math.hypot(*influence.values()) / math.sqrt(len(influence)) if influence else 1.0
    return {key: influence.get(key, root_mean_square) for key in num_items}


# Precision targets.


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
        variances_of_all = self.variances(self.whole)
        influence = influences(self.gauntlet, self.whole, self.average)
        costs = {
            key: TaskCosts(
                cost=task.cost,
                deviation=influence[key] * deviation_of_question(task, variances_of_all),
                least=least_items(task.examples, task.order),
                most=len(task.order),
            )
            for key, task in self.tasks.items()
        }

        def is_too_imprecise(sizes: Sizes) -> bool:
            pairs = zip(self.variances(sizes), variances_of_all, strict=True)
            return any(variance > of_all * (1 + share) ** 2 for variance, of_all in pairs)

        _, precise_enough = allocate(costs, is_too_imprecise)
        return precise_enough

    def subsets(self, share: float) -> dict[str, list[Example]]:
        """Return the rows of each task to evaluate for this target, in file order."""
        return {
            key: [self.tasks[key].examples[place] for place in sorted(self.tasks[key].order[:number])]
            for key, number in self.sizes(share).items()
        }

    def estimates(self, seconds: Mapping[str, float]) -> tuple[TargetEstimate, ...]:
        """Return estimates for each target in SHARES and for all items, from each task's seconds per question."""
        return tuple(self._estimate(share, seconds) for share in (*SHARES, 0.0))

    def _estimate(self, share: float, seconds: Mapping[str, float]) -> TargetEstimate:
        sizes = self.sizes(share) if share else self.whole
        error = math.sqrt(max(self.variances(sizes)))
        error_of_difference = math.sqrt(2) * error
        return TargetEstimate(
            share=share,
            num_items=sum(sizes.values()),
            seconds=math.fsum(seconds.get(key, 0.0) * number for key, number in sizes.items()),
            standard_error=error,
            detectable=(NORMAL_QUANTILE + NormalDist().inv_cdf(POWER)) * error_of_difference,
        )


def deviation_of_question(task: Questions, variances_of_all: Sequence[float]) -> float:
    """Return the standard deviation of a question's score, in both cases relative to that of the average."""
    relative_variance = math.fsum(
        variance / of_all for variance, of_all in zip(task.variances, variances_of_all, strict=True) if of_all
    )
    # Above 1 if a task's categories have different numbers of questions.
    imbalance = task.factors[-1] * len(task.order)
    return math.sqrt(relative_variance * imbalance)


def precision_plan(
    tasks: Sequence[Task], examples: ExamplesByTask, gauntlet: GauntletSpec, average: str | None = None
) -> PrecisionPlan:
    """Return the plan for an average, over all tasks that have rows. Raise ConfigError if there is no such average.

    The default average is gauntlet_average, else the first one.
    """
    names = [*gauntlet.named_averages]
    if average is None:
        average = DEFAULT_AVERAGE if DEFAULT_AVERAGE in names else names[0]
    if average not in names:
        raise ConfigError(
            f'{named("precision_target")}: the gauntlet has no average {average!r}; allowed: {", ".join(names)}'
        )
    baselines = {
        benchmark.key: benchmark.random_baseline
        for category in gauntlet.categories
        for benchmark in category.benchmarks
    }
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
    num_categories = len(set(categories))
    counts = Counter[str | None]()
    sum_of_inverse_counts = 0.0
    factors = [math.inf]
    for category in categories:
        number = counts[category]
        sum_of_inverse_counts += 1 / (number + 1) - (1 / number if number else 0.0)
        counts[category] += 1
        factors.append(sum_of_inverse_counts / num_categories**2 if len(counts) == num_categories else math.inf)
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
        costs.append((read + COST_OF_GENERATING * written) * task.num_samples_of(example.content))
    return fmean(costs)


def precise_subsets(
    tasks: Sequence[Task], examples: ExamplesByTask, gauntlet: GauntletSpec | None, target: PrecisionTarget
) -> dict[str, list[Example]]:
    """Return the rows to evaluate by task so that an average meets the target. Raise ConfigError."""
    if gauntlet is None:
        raise ConfigError(
            f'{named("precision_target")}: is about the error of an average; give {named("gauntlet")}, which defines it'
        )
    plan = precision_plan(tasks, examples, gauntlet, target.average)
    if not plan.has_tasks:
        raise ConfigError(
            f'{named("precision_target")}: no task of the average {plan.average!r} is evaluated; give its tasks'
        )
    return plan.subsets(target.share)


# Time budgets.


def sizes_in_time(
    asked: ExamplesByTask,
    gauntlet: GauntletSpec | None,
    *,
    seconds_by_task: Mapping[str, float],
    budget_seconds: float,
) -> dict[str, int]:
    """Return the number of questions of each task that fit in a time, given the seconds that all of them take.

    Raise ConfigError if the least of every task takes longer.
    """
    costs = costs_in_seconds(asked, gauntlet, seconds_by_task)
    least = {key: task.least for key, task in costs.items()}
    least_seconds = cost_of(costs, least)
    if least_seconds > budget_seconds:
        raise ConfigError(
            f'{named("time_budget")}: is {budget_seconds:g}s, but the minimum of each task takes about '
            f'{least_seconds:.2g}s here: {sum(least.values())} items of {len(costs)} tasks (two clusters, and one '
            'item of each category); give more time, or fewer tasks'
        )
    that_fit, _ = allocate(costs, lambda sizes: cost_of(costs, sizes) <= budget_seconds)
    return that_fit


def costs_in_seconds(
    asked: ExamplesByTask, gauntlet: GauntletSpec | None, seconds_by_task: Mapping[str, float]
) -> dict[str, TaskCosts]:
    """Return the seconds of a question of each task, given those of all of them, and its effect on composites."""
    questions_by_task = {key: without_variants(examples) for key, examples in asked.items()}
    influence = influences(gauntlet, {key: len(examples) for key, examples in questions_by_task.items()})
    return {
        key: TaskCosts(
            cost=seconds_by_task.get(key, 0.0) / max(1, len(examples)),  # 0 if nothing of the task can be run
            deviation=influence[key] * DEVIATION,
            least=least_items(examples, in_turns(examples)),
            most=len(examples),
        )
        for key, examples in questions_by_task.items()
    }


def cost_of(costs: Mapping[str, TaskCosts], sizes: Sizes) -> float:
    """Return the cost of these numbers of questions."""
    return math.fsum(costs[key].cost * number for key, number in sizes.items())


def first_questions(asked: ExamplesByTask, sizes: Sizes) -> dict[str, list[Example]]:
    """Return the rows of each task's first questions with all their variants, in file order."""
    subsets = {}
    for key, examples in asked.items():
        one_each = without_variants(examples)
        chosen = {row_of(one_each[place]) for place in in_turns(one_each)[: sizes[key]]}
        subsets[key] = [example for example in examples if row_of(example) in chosen]
    return subsets


def without_variants(examples: Sequence[Example]) -> list[Example]:
    """Return one example of each question."""
    return list({row_of(example): example for example in examples}.values())


def row_of(example: Example) -> tuple[str | None, int]:
    """Return the file and the row of a question."""
    return example.file, example.row
