"""The accuracies that SCORE's own implementation reports (lm-eval 0.4.13), computed from our item results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llmfoundry_gauntlet.metrics.consistency import (
    OPTION_ORDER,
    QuestionKey,
    VariantResult,
    by_question,
    missing_reason,
    variant_order,
)

DECIMALS = 4


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


def reference_accuracy(
    results: Sequence[VariantResult],
    *,
    macro: bool,
    labels: Sequence[str] = (),
    own_labels: Mapping[QuestionKey, str] = MappingProxyType({}),
) -> ReferenceAccuracy:
    """Return the reference's accuracies. MMLU-Pro's are `macro`; option order as in `reference_consistency_rate`.

    A letter is right if it equals the gold's; without letters the score decides. Raise ValueError if a variant is
    unscored.
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
    own_labels: Mapping[QuestionKey, str],
) -> dict[str, bool]:
    """Return whether each of the reference's variants of a question is right."""
    if not group[0].variant.startswith(OPTION_ORDER):
        return {result.variant: is_right(result) for result in group}
    given = {result.variant.removeprefix(OPTION_ORDER): result.reference_answer for result in group}
    own = own_labels[question]
    return {
        f'{OPTION_ORDER}{label}': given[label] == label if label in given else given[own] == own for label in labels
    }


def is_right(result: VariantResult) -> bool:
    """Return whether the reference's answer is right, by its letter; for a problem by its score."""
    return result.reference_answer == result.gold if result.gold else result.score == 1


def rounded_accuracy(right: Sequence[tuple[str | None, bool]], *, macro: bool) -> float:
    """Return the accuracy (macro: per category, then over categories), rounded as NumPy rounds."""
    categories: dict[str | None, list[bool]] = {}
    for category, is_right in right:
        categories.setdefault(category if macro else None, []).append(is_right)
    return float(np.round(np.mean([sum(values) / len(values) for values in categories.values()]), DECIMALS))
