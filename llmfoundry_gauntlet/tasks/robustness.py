"""SCORE's metrics: accuracy and consistency from the item results of a dataset in several variants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from llmfoundry_gauntlet.config.score import AGIEVAL, MMLU_PRO, PERTURBATIONS, REFERENCE, ScoreSpec
from llmfoundry_gauntlet.data.score_rows import LETTERS
from llmfoundry_gauntlet.metrics.consistency import (
    PerturbationScore,
    QuestionKey,
    VariantResult,
    by_question,
    perturbation_score,
    variant_order,
)
from llmfoundry_gauntlet.metrics.reference_consistency import reference_consistency_rate
from llmfoundry_gauntlet.scoring.letters import reference_letter
from llmfoundry_gauntlet.scoring.mathematics import reference_answer_of, shared_comparer
from llmfoundry_gauntlet.tasks.perturbations import perturbation_of
from llmfoundry_gauntlet.types import ItemResult

REFERENCE_LABELS = {MMLU_PRO: 'ABCDEFGHIJ', AGIEVAL: 'ABCD'}  # to which the paper's reference moves the right option

# Facts of an item of a lettered question: the chosen option's text, the label of the right one in the data, and the
# number of options.
OPTION, OWN_GOLD, NUM_OPTIONS = 'option', 'own_gold', 'num_options'


def robustness(
    spec: ScoreSpec, results: Sequence[ItemResult], *, allow_missing: bool = False
) -> dict[str, PerturbationScore]:
    """Return the metrics of each perturbation of a data set from the results of all its variants."""
    by_perturbation: dict[str, list[ItemResult]] = {name: [] for name in spec.applied}
    for result in results:
        by_perturbation[perturbation_of(result.key.variant or '')].append(result)
    scores = {name: score_of(spec, name, found, allow_missing=allow_missing) for name, found in by_perturbation.items()}
    if spec.is_math:
        shared_comparer().close()  # no process stays between evaluations
    return scores


def score_of(
    spec: ScoreSpec, perturbation: str, results: Sequence[ItemResult], *, allow_missing: bool
) -> PerturbationScore:
    """Return the metrics of one perturbation; the paper's reference rate exists for its own three only."""
    variants = [variant_result(result, is_math=spec.is_math) for result in results]
    if spec.is_math:
        compare_all(spec, variants)
    own_labels: dict[QuestionKey, str] = {
        (result.key.file, result.key.row): str(result.facts[OWN_GOLD]) for result in results if OWN_GOLD in result.facts
    }
    longest = max((int(result.facts.get(NUM_OPTIONS, 0)) for result in results), default=0)
    reference = reference_consistency_rate(
        variants,
        labels=REFERENCE_LABELS.get(spec.dataset, LETTERS[:longest]),
        own_labels=own_labels,
        equal=equality(spec, reference=spec.answer_extraction == REFERENCE),
    )
    return perturbation_score(
        variants,
        macro=spec.dataset == MMLU_PRO,
        equal=equality(spec, reference=False),
        reference_consistency=reference if perturbation in PERTURBATIONS else None,
        allow_missing=allow_missing,
    )


def compare_all(spec: ScoreSpec, variants: Sequence[VariantResult]) -> None:
    """Compare all answers that will be compared later, in batches, which takes less time than one by one."""
    pairs: dict[tuple[str, str], None] = {}
    earlier_and_later: dict[tuple[str | None, str | None], None] = {}
    for group in by_question(variants).values():
        answers = sorted({result.answer for result in group if result.answer is not None})
        pairs.update(dict.fromkeys(combinations(answers, 2)))
        in_order = sorted(group, key=lambda result: variant_order(result.variant))
        earlier_and_later.update(dict.fromkeys(combinations([result.reference_answer for result in in_order], 2)))
    shared_comparer().equal_many(pairs)
    if spec.answer_extraction == REFERENCE:
        shared_comparer().equal_reference_many(earlier_and_later)
    else:
        shared_comparer().equal_many(pair for pair in earlier_and_later if None not in pair)


def variant_result(result: ItemResult, *, is_math: bool) -> VariantResult:
    """Return the part of an item that is compared with other variants."""
    shared: dict[str, Any] = {
        'question': (result.key.file, result.key.row),
        'category': result.category,
        'variant': result.key.variant,
        'score': result.score,
        'cluster': int(result.cluster, 16) if result.cluster else None,
    }
    if is_math:
        reference = None if result.text is None else reference_answer_of(result.text)
        answer = result.answer or None  # an empty box is none
        return VariantResult(**shared, gold='', answer=answer, reference_answer=reference)
    assert isinstance(result.gold, int)  # a lettered question's
    letter = None if result.predicted is None else LETTERS[result.predicted]
    chosen = result.facts.get(OPTION)
    return VariantResult(
        **shared,
        gold=LETTERS[result.gold],
        answer=None if chosen is None else str(chosen),
        reference_answer=letter if result.text is None else reference_letter(result.text),
    )


def equality(spec: ScoreSpec, *, reference: bool) -> Callable[[str, str | None], bool]:
    """Return the function that compares an earlier with a later answer; the later one may be None."""
    if not spec.is_math:
        return operator.eq
    if reference:
        return shared_comparer().equal_reference
    return lambda one, other: one == other or (other is not None and shared_comparer().equal(one, other))
