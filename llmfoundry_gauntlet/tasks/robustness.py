"""SCORE's numbers: item results of a data set in several variants as accuracy and consistency. Free of torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from llmfoundry_gauntlet.config.score import AGIEVAL, MMLU_PRO, PERTURBATIONS, REFERENCE, ScoreTask
from llmfoundry_gauntlet.data.score_rows import LETTERS
from llmfoundry_gauntlet.judging.letters import reference_letter
from llmfoundry_gauntlet.judging.mathematics import reference_answer_of, shared_comparer
from llmfoundry_gauntlet.prompts.perturbations import perturbation_of
from llmfoundry_gauntlet.scores.consistency import (
    PerturbationScore,
    QuestionKey,
    VariantResult,
    by_question,
    perturbation_score,
    variant_order,
)
from llmfoundry_gauntlet.scores.reference_consistency import reference_consistency_rate
from llmfoundry_gauntlet.values import ItemResult

REFERENCE_LABELS = {MMLU_PRO: 'ABCDEFGHIJ', AGIEVAL: 'ABCD'}  # that the paper's reference moves the right option to


# Facts of an item of a lettered question: the chosen option's text, the right one's label in the question as it is in
# the data, and how many options there are.
OPTION, OWN_GOLD, NUM_OPTIONS = 'option', 'own_gold', 'num_options'


def robustness(
    task: ScoreTask, results: Sequence[ItemResult], *, allow_missing: bool = False
) -> dict[str, PerturbationScore]:
    """The metrics of each perturbation of a data set, from the results of all its variants."""
    by_perturbation: dict[str, list[ItemResult]] = {name: [] for name in task.score.applied}
    for result in results:
        by_perturbation[perturbation_of(result.key.variant or '')].append(result)
    scores = {name: score_of(task, name, found, allow_missing=allow_missing) for name, found in by_perturbation.items()}
    if task.score.is_math:
        shared_comparer().close()  # nothing is left running between evaluations
    return scores


def score_of(
    task: ScoreTask, perturbation: str, results: Sequence[ItemResult], *, allow_missing: bool
) -> PerturbationScore:
    """The metrics of one perturbation; the paper's reference has numbers of its own three alone."""
    variants = [variant_result(result, is_math=task.score.is_math) for result in results]
    if task.score.is_math:
        compare_all(task, variants)
    spec = task.score
    own_labels: dict[QuestionKey, str] = {
        (result.key.file, result.key.row): str(result.facts[OWN_GOLD]) for result in results if OWN_GOLD in result.facts
    }
    longest = max((int(result.facts.get(NUM_OPTIONS, 0)) for result in results), default=0)
    reference = reference_consistency_rate(
        variants,
        labels=REFERENCE_LABELS.get(spec.dataset, LETTERS[:longest]),
        own_labels=own_labels,
        equal=equality(task, reference=spec.answer_extraction == REFERENCE),
    )
    return perturbation_score(
        variants,
        macro=spec.dataset == MMLU_PRO,
        equal=equality(task, reference=False),
        reference_consistency=reference if perturbation in PERTURBATIONS else None,
        allow_missing=allow_missing,
    )


def compare_all(task: ScoreTask, variants: Sequence[VariantResult]) -> None:
    """Has all answers to a question compared that will be; many at once take less time than one by one."""
    pairs: dict[tuple[str, str], None] = {}
    earlier_and_later: dict[tuple[str | None, str | None], None] = {}
    for group in by_question(variants).values():
        answers = sorted({result.answer for result in group if result.answer is not None})
        pairs.update(dict.fromkeys(combinations(answers, 2)))
        in_order = sorted(group, key=lambda result: variant_order(result.variant))
        earlier_and_later.update(dict.fromkeys(combinations([result.reference_answer for result in in_order], 2)))
    shared_comparer().equal_many(pairs)
    if task.score.answer_extraction == REFERENCE:
        shared_comparer().equal_reference_many(earlier_and_later)
    else:
        shared_comparer().equal_many(pair for pair in earlier_and_later if None not in pair)


def variant_result(result: ItemResult, *, is_math: bool) -> VariantResult:
    """What is compared of one item."""
    shared: dict[str, Any] = {
        'question': (result.key.file, result.key.row),
        'category': result.category,
        'variant': result.key.variant,
        'credit': result.credit,
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


def equality(task: ScoreTask, *, reference: bool) -> Callable[[str, str | None], bool]:
    """Whether an earlier answer and a later one are the same; the later one may be absent."""
    if not task.score.is_math:
        return operator.eq
    if reference:
        return shared_comparer().equal_reference
    return lambda one, other: one == other or (other is not None and shared_comparer().equal(one, other))
