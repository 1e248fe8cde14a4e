"""The consistency rates of SCORE's own implementation in lm-eval 0.4.13, computed from our item results.

Its tasks are `lm_eval/tasks/score`; `non_greedy_summarizer.py` there joins the runs of five seeds.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from llmfoundry_gauntlet.metrics.consistency import (
    QuestionKey,
    VariantResult,
    by_question,
    missing_reason,
    variant_order,
)
from llmfoundry_gauntlet.types import Measure

OPTION_ORDER = 'option_order:'

Equal = Callable[[str, str | None], bool]


def reference_consistency_rate(
    results: Sequence[VariantResult],
    *,
    labels: Sequence[str] = (),
    own_labels: Mapping[QuestionKey, str] | None = None,
    equal: Equal = operator.eq,
) -> Measure:
    """Return pairs of variants with equal answers over all pairs, both summed over questions.

    `equal` gets (earlier, later). An earlier generation without an answer (None) equals nothing; a later one is passed
    to `equal`. Option order needs the labels to which the reference moves the gold option, and the gold's label in the
    data; see `unswapped`. Questions with an unscored variant are left out.
    """
    agreeing = pairs = 0
    for question, group in by_question(results).items():
        if missing_reason(group):
            continue
        if group[0].variant.startswith(OPTION_ORDER):
            answers = unswapped(group, labels, own_label_of(question, own_labels))
        else:
            group = sorted(group, key=lambda result: variant_order(result.variant))
            answers = [result.reference_answer for result in group]
        agreeing += equal_pairs(answers, equal)
        pairs += math.comb(len(answers), 2)
    if not pairs:
        return Measure(value=None, reason=missing_reason(results) or 'no question has more than one variant')
    return Measure(value=agreeing / pairs)


def unswapped(group: Sequence[VariantResult], labels: Sequence[str], own: str) -> list[str | None]:
    """Return the answers to a question by label, in the letters of the original question, as the reference does.

    It maps the letter of the gold option back to the gold's own label, but leaves the option that was swapped with the
    gold where the swap put it: of two consecutive `if`s the second undoes the first. A label that the question does not
    have repeats the answer to the original question.
    """
    given = answers_by_label(group)
    answers = [given[label] if label in given else given[own] for label in labels]
    return [own if answer == label else answer for label, answer in zip(labels, answers, strict=True)]


def answers_by_label(group: Sequence[VariantResult]) -> dict[str, str | None]:
    """Return what the reference takes from each generation, by the label that the gold option was moved to."""
    return {result.variant.removeprefix(OPTION_ORDER): result.reference_answer for result in group}


def own_label_of(question: QuestionKey, own_labels: Mapping[QuestionKey, str] | None) -> str:
    """Return the gold's label in the original question. Raise ValueError if it is unknown."""
    if own_labels is None or question not in own_labels:
        raise ValueError(f'question {question}: option order needs the label of its gold option')
    return own_labels[question]


def equal_pairs(answers: Sequence[str | None], equal: Equal) -> int:
    """Return the number of pairs of equal answers, the earlier one first."""
    if equal is operator.eq:
        counts = Counter(answer for answer in answers if answer is not None)
        return sum(math.comb(count, 2) for count in counts.values())
    pairs = Counter((earlier, later) for earlier, later in combinations(answers, 2) if earlier is not None)
    return sum(count for (earlier, later), count in pairs.items() if equal(earlier, later))
