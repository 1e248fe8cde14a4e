"""The error of SCORE's means over prompts as well as questions: both could have been others.

The standard error of a mean over questions is over questions alone, and holds for the ten prompts that were asked. What
could have been any prompts adds the variance of the mean between prompts. The variances cross (Cameron, Gelbach and
Miller 2011; of balanced data the same as Owen's 2007): that over questions, plus that over prompts, minus that of both
together, which each of them contains already.

    V = V_questions + max(0, V_prompts - V_both)

All three are sums of squares of deviations that are linear in the values, so those of a difference of two runs are the
differences of theirs, and prompts that are hard for both runs cancel.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmfoundry_gauntlet.metrics.statistics import (
    merged,
    parts_of_variance,
    scaled,
    spread_of,
    sums_by_cluster,
    without_rounding,
)
from llmfoundry_gauntlet.types import Measure, Stratum

if TYPE_CHECKING:
    from llmfoundry_gauntlet.types import ClusterNumbers, Floats


TOGETHER = -1  # the group of all categories with a single cluster


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptEffects:
    """The deviation of a mean by each prompt, and by each cluster of questions with each prompt."""

    prompts: Stratum
    both: Stratum

    @property
    def variance(self) -> float:
        """Return the variance that the draw of prompts adds to that over questions."""
        _, of_prompts = parts_of_variance([self.prompts])
        _, of_both = parts_of_variance([self.both])
        return max(0.0, of_prompts - of_both)

    @property
    def deviation_between_prompts(self) -> float:
        """Return the standard deviation of the mean between prompts, without what questions add to it."""
        return math.sqrt(self.variance * len(self.prompts.clusters))


def prompt_effects(
    values: Floats, clusters: ClusterNumbers, categories: Sequence[str], prompts: Sequence[str]
) -> PromptEffects:
    """Return the effects of prompts on the plain mean over categories of the means over their questions.

    `values` are of each question with each of two or more prompts, float64 [Q, P]; `clusters` [Q] are the numbers of
    the questions' clusters.
    """
    import numpy as np

    _, category_of, num_questions = np.unique(np.array(categories), return_inverse=True, return_counts=True)
    weights = 1 / num_questions[category_of] / len(num_questions)

    # In a category of one cluster nothing tells its questions from its prompts: those are taken together, as in
    # `mean_over_categories`.
    group_of = category_of.copy()
    for category in range(len(num_questions)):
        members = category_of == category
        if len(np.unique(clusters[members])) == 1:
            group_of[members] = TOGETHER

    # The rest of each value without the effects of its question and, in its group, of its prompt.
    left = values - values.mean(axis=1, keepdims=True)
    for group in np.unique(group_of):
        members = group_of == group
        num_clusters = len(np.unique(clusters[members]))
        jackknife = math.sqrt(num_clusters / max(1, num_clusters - 1))  # a single cluster leaves nothing
        left[members] = (left[members] - left[members].mean(axis=0)) * jackknife

    num_prompts = len(prompts)
    scale = 1 / math.sqrt(num_prompts * (num_prompts - 1))
    means_of_prompts = weights @ values  # [P]
    magnitude = float(np.abs(values).max())
    of_prompts = without_rounding(means_of_prompts - means_of_prompts.mean(), magnitude) * scale
    of_both = without_rounding(left, magnitude) * weights[:, None] * scale  # [Q, P]

    numbers = np.array([prompt_number(prompt) for prompt in prompts], np.uint64)
    cells = clusters[:, None] ^ numbers[None, :]  # a number for each cluster with each prompt
    freedom = num_prompts - 1.0
    return PromptEffects(
        prompts=stratum_of('prompts', numbers, of_prompts, freedom),
        both=stratum_of('questions and prompts', cells.ravel(), of_both.ravel(), freedom),
    )


def stratum_of(name: str, clusters: ClusterNumbers, deviations: Floats, freedom: float) -> Stratum:
    """Return a stratum of these deviations, added up by cluster."""
    numbers, _, sums = sums_by_cluster(clusters, deviations)
    return Stratum(name=name, clusters=numbers, deviations=sums, freedom=freedom)


def effects_on_agreement(agreeing: Floats, clusters: ClusterNumbers, prompts: Sequence[str]) -> PromptEffects:
    """Return the effects of three or more prompts on the share of pairs of prompts with the same answer.

    `agreeing` has the share of a question's other prompts that agree with each, float64 [Q, P]. A prompt is in P - 1
    pairs: without it the rate changes by 2 / (P - 2) times the prompt's distance from the mean, where a mean over
    prompts changes by 1 / (P - 1) times it. This is the jackknife over prompts, which for pairs is slightly too large.
    """
    num_prompts = len(prompts)
    effects = prompt_effects(agreeing, clusters, [''] * len(agreeing), prompts)
    factor = 2 * (num_prompts - 1) / (num_prompts - 2)
    return PromptEffects(prompts=scaled(effects.prompts, factor), both=scaled(effects.both, factor))


def prompt_number(prompt: str) -> int:
    """Return the cluster number of a prompt, such as 'prompt:3', the same in every run."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], 'big')


def effects_of_difference(first: PromptEffects, second: PromptEffects) -> PromptEffects:
    """Return the effects on the second mean minus the first, over the same questions and prompts."""
    return PromptEffects(
        prompts=merged([second.prompts, scaled(first.prompts, -1.0)]),
        both=merged([second.both, scaled(first.both, -1.0)]),
    )


def over_prompts(measure: Measure, effects: PromptEffects) -> Measure:
    """Return a mean over questions, or a difference of two, with its error over questions and prompts.

    Satterthwaite's degrees of freedom are those of the questions and one less than prompts. The interval of a share is
    Wilson's, as that over questions.
    """
    spread = measure.spread
    if measure.value is None or spread is None or effects.variance == 0:
        return measure
    _, of_prompts = parts_of_variance([effects.prompts])
    added = scaled(effects.prompts, math.sqrt(effects.variance / of_prompts))
    crossed = spread_of([*spread.strata, added])
    of_item = measure.value * (1 - measure.value)
    if spread.num_items is None or of_item <= 0:
        return replace(measure, spread=replace(crossed, bounds=spread.bounds))
    return replace(
        measure, spread=replace(crossed, bounds=spread.bounds, num_items=of_item / crossed.standard_error**2)
    )
