"""What SCORE's own implementation reports, in lm-eval 0.4.13, computed from our item results.

Its tasks are `lm_eval/tasks/score`; `non_greedy_summarizer.py` there joins the five runs of different seeds.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from llmfoundry_gauntlet.scores.consistency import (
    QuestionKey,
    VariantResult,
    by_question,
    missing_reason,
    variant_order,
)
from llmfoundry_gauntlet.values import Measure

OPTION_ORDER = 'option_order:'
DECIMALS = 4

Equal = Callable[[str, str | None], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceAccuracy:
    """The accuracies that the reference logs, by variant.

    `by_file` is of AGIEval's subsets and MATH's subjects, each rounded to 4 places as its task logs it; MMLU-Pro's one
    task has the file None. `overall` is the group's: the mean of these weighted by questions, not rounded again.
    `micro` is the plain mean over all questions, not rounded: what its summariser says of the non-greedy runs, of
    MMLU-Pro too.
    """

    by_file: Mapping[str | None, Mapping[str, float]]
    overall: Mapping[str, float]
    micro: Mapping[str, float]


def reference_consistency_rate(
    results: Sequence[VariantResult],
    *,
    labels: Sequence[str] = (),
    own_labels: Mapping[QuestionKey, str] | None = None,
    equal: Equal = operator.eq,
) -> Measure:
    """Pairs of variants with equal answers over all pairs, both summed over questions. `equal` gets (earlier, later).

    An earlier reply without an answer (None) equals nothing; a later one is `equal`'s to judge. Of option order it
    wants the labels that the reference puts the gold option at, and the gold's label in the question as it is; see
    `unswapped`. Questions with an unscored variant are left out.
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
    """The answers to one question by label, in the letters of the question as it is, as far as the reference does so.

    It takes the letter of the gold option back to the gold's own label, but leaves the option that the gold changed
    places with where the swap put it: two `if`s follow each other and the second undoes the first. A label that the
    question does not have repeats the answer to the question as it is.
    """
    given = answers_by_label(group)
    answers = [given[label] if label in given else given[own] for label in labels]
    return [own if answer == label else answer for label, answer in zip(labels, answers, strict=True)]


def reference_accuracy(
    results: Sequence[VariantResult],
    *,
    macro: bool,
    labels: Sequence[str] = (),
    own_labels: Mapping[QuestionKey, str] | None = None,
) -> ReferenceAccuracy:
    """The reference's accuracies. MMLU-Pro's are `macro`, by category; of option order as `reference_consistency_rate`.

    A letter is right where it is equal to the gold's; where there are no letters the credit says so. Raises ValueError
    where a variant is unscored.
    """
    if reason := missing_reason(results):
        raise ValueError(f'the reference has no accuracy: {reason}')
    files: dict[str | None, dict[str, list[tuple[str | None, bool]]]] = {}
    for question, group in sorted(by_question(results).items(), key=lambda item: (item[0][0] or '', item[0][1])):
        variants = files.setdefault(question[0], {})
        for variant, right in marks(group, labels, question, own_labels).items():
            variants.setdefault(variant, []).append((group[0].category, right))
    names = sorted({variant for variants in files.values() for variant in variants}, key=variant_order)
    by_file = {
        file: {name: rounded_accuracy(variants[name], macro=macro) for name in names if name in variants}
        for file, variants in files.items()
    }
    sizes = {name: {file: len(files[file].get(name, ())) for file in files} for name in names}
    totals = {name: sum(sizes[name].values()) for name in names}
    return ReferenceAccuracy(
        by_file=by_file,
        overall={
            name: sum(by_file[file].get(name, 0.0) * size for file, size in sizes[name].items()) / totals[name]
            for name in names
        },
        micro={
            name: sum(right for variants in files.values() for _, right in variants.get(name, ())) / totals[name]
            for name in names
        },
    )


def marks(
    group: Sequence[VariantResult],
    labels: Sequence[str],
    question: QuestionKey,
    own_labels: Mapping[QuestionKey, str] | None,
) -> dict[str, bool]:
    """Whether each variant of a question is right, in the reference's variants."""
    if not group[0].variant.startswith(OPTION_ORDER):
        return {result.variant: is_right(result) for result in group}
    given = answers_by_label(group)
    own = own_label_of(question, own_labels)
    return {
        f'{OPTION_ORDER}{label}': given[label] == label if label in given else given[own] == own for label in labels
    }


def is_right(result: VariantResult) -> bool:
    """Whether the reference's answer is right, by its letter; that of a problem by its credit."""
    return result.reference_answer == result.gold if result.gold else result.credit == 1


def rounded_accuracy(right: Sequence[tuple[str | None, bool]], *, macro: bool) -> float:
    """The share of right ones (macro: of a category, then over categories), rounded as NumPy rounds."""
    categories: dict[str | None, list[bool]] = {}
    for category, is_right in right:
        categories.setdefault(category if macro else None, []).append(is_right)
    return float(np.round(np.mean([sum(values) / len(values) for values in categories.values()]), DECIMALS))


def answers_by_label(group: Sequence[VariantResult]) -> dict[str, str | None]:
    """What the reference takes from each reply, by the label that the gold option was moved to."""
    return {result.variant.removeprefix(OPTION_ORDER): result.reference_answer for result in group}


def own_label_of(question: QuestionKey, own_labels: Mapping[QuestionKey, str] | None) -> str:
    """The gold's label in the question as it is. Raises ValueError where it was not given."""
    if own_labels is None or question not in own_labels:
        raise ValueError(f'question {question}: option order needs the label of its gold option')
    return own_labels[question]


def equal_pairs(answers: Sequence[str | None], equal: Equal) -> int:
    """How many pairs of answers are equal, the earlier one first."""
    if equal is operator.eq:
        counts = Counter(answer for answer in answers if answer is not None)
        return sum(math.comb(count, 2) for count in counts.values())
    pairs = Counter((earlier, later) for earlier, later in combinations(answers, 2) if earlier is not None)
    return sum(count for (earlier, later), count in pairs.items() if equal(earlier, later))
