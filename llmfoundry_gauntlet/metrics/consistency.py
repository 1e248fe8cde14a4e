"""Accuracy and consistency of one dataset under one perturbation, as pure functions of the results of each variant.

A question is asked in several variants: its gold option at every label, ten prompts, or five seeds. Accuracy is the
mean over a question's variants, then over questions; consistency is the share of pairs of variants with the same
answer. Sums are exact (`math.fsum`), so metrics do not depend on the order of results.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from llmfoundry_gauntlet.errors import plural
from llmfoundry_gauntlet.metrics.prompt_effects import (
    PromptEffects,
    effects_on_agreement,
    over_prompts,
    prompt_effects,
)
from llmfoundry_gauntlet.metrics.statistics import (
    SHARE,
    mean,
    mean_over_categories,
    mean_over_clusters,
    weighted_sum,
)
from llmfoundry_gauntlet.types import Measure

OPTION_ORDER = 'option_order:'
PROMPT = 'prompt:'

Equal = Callable[[str, str | None], bool]
QuestionKey = tuple[str | None, int]
NO_ITEMS = 'there are no items'


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
    num_agreeing = num_pairs = 0
    for question, group in by_question(results).items():
        if missing_reason(group):
            continue
        if group[0].variant.startswith(OPTION_ORDER):
            if own_labels is None or question not in own_labels:
                raise ValueError(f'question {question}: option order needs the label of its gold option')
            answers = unswapped(group, labels, own_labels[question])
        else:
            in_order = sorted(group, key=lambda result: variant_order(result.variant))
            answers = [result.reference_answer for result in in_order]
        num_agreeing += equal_pairs(answers, equal)
        num_pairs += math.comb(len(answers), 2)
    if not num_pairs:
        return Measure(value=None, reason=missing_reason(results) or 'no question has more than one variant')
    return Measure(value=num_agreeing / num_pairs)


def unswapped(group: Sequence[VariantResult], labels: Sequence[str], own: str) -> list[str | None]:
    """Return the answers to a question by label, in the letters of the original question, as the reference does.

    It maps the letter of the gold option back to the gold's own label, but leaves the option that was swapped with the
    gold where the swap put it: of two consecutive `if`s the second undoes the first. A label that the question does not
    have repeats the answer to the original question.
    """
    given = {result.variant.removeprefix(OPTION_ORDER): result.reference_answer for result in group}
    answers = [given[label] if label in given else given[own] for label in labels]
    return [own if answer == label else answer for label, answer in zip(labels, answers, strict=True)]


def equal_pairs(answers: Sequence[str | None], equal: Equal) -> int:
    """Return the number of pairs of equal answers, the earlier one first."""
    if equal is operator.eq:
        counts = Counter(answer for answer in answers if answer is not None)
        return sum(math.comb(count, 2) for count in counts.values())
    # Comparing may be slow: each distinct pair is compared once.
    counts_of_pairs = Counter((earlier, later) for earlier, later in combinations(answers, 2) if earlier is not None)
    return sum(count for (earlier, later), count in counts_of_pairs.items() if equal(earlier, later))


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """The result of one variant of a question.

    `question` is the file's stem and the row, `variant` such as 'option_order:B', 'prompt:3' or 'non_greedy:2', and
    `gold` the gold option's label in the variant, '' without options. `score` is None if unscored. `answer` is
    compared: the text of the chosen option or the answer of a problem; None is unparsed and agrees with nothing.
    `reference_answer` is extracted by the reference's rule. `cluster` is the number of the question's cluster, such as
    a passage; None without one. `options` has a character for each option in the order of the variant, the same for
    options with the same text; '' without options, or if they are unknown.
    """

    question: QuestionKey
    category: str | None
    variant: str
    gold: str
    score: float | None
    answer: str | None
    reference_answer: str | None
    cluster: int | None = None
    options: str = ''


@dataclass(frozen=True, slots=True, kw_only=True)
class PerturbationScore:
    """The metrics of a dataset under one perturbation, shares from 0 to 1.

    `accuracy` is either `accuracy_micro` or `accuracy_macro`, as are those by variant and by gold label.
    `accuracy_mean` is the plain mean over variants. Means over questions have a standard error; the worst and the best
    of several accuracies have none, as each is partly an extreme of chance. `num_questions` counts
    all questions, `num_incomplete` those with an unscored variant, which consistency leaves out. `over_prompts` is of
    the prompt perturbation alone. Those by constant letter are of an answer that is the same letter in every variant:
    a property of the questions, without an error, and {} without options.
    """

    accuracy: Measure
    accuracy_micro: Measure
    accuracy_macro: Measure
    accuracy_by_variant: Mapping[str, Measure]
    accuracy_by_gold: Mapping[str, Measure]
    accuracy_worst: Measure
    accuracy_mean: Measure
    accuracy_best: Measure
    all_variants_right: Measure
    consistency_rate: Measure
    consistency_rate_reference: Measure
    accuracy_by_constant_letter: Mapping[str, Measure]
    consistency_rate_by_constant_letter: Mapping[str, Measure]
    unparsed_rate: Measure
    num_questions: int
    num_incomplete: int
    over_prompts: OverPrompts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverPrompts:
    """Accuracy and consistency with their errors over prompts and questions, for any prompts that could be asked.

    `prompt_deviation` is the standard deviation of the accuracy between prompts. `effects` are those of the two
    metrics, by name, from which the error of a difference is made.
    """

    accuracy: Measure
    consistency_rate: Measure
    prompt_deviation: Measure
    effects: Mapping[str, PromptEffects] = field(compare=False, repr=False)


def perturbation_score(
    results: Sequence[VariantResult],
    *,
    macro: bool,
    reference_consistency: Measure,
    equal: Callable[[str, str], bool] = operator.eq,
    allow_missing: bool = False,
) -> PerturbationScore:
    """Return all metrics of one perturbation; with `macro` accuracies are plain means over categories.

    `equal` is symmetric and is not called for equal strings, which agree. If any variant is unscored only consistency
    has a value, over complete questions; with `allow_missing` the others are taken over the scored variants.
    """
    questions = by_question(results)
    complete = [group for group in questions.values() if all(result.score is not None for result in group)]
    scored = [result for result in results if result.score is not None]
    incomplete = missing_reason(results)
    missing = None if allow_missing and scored else incomplete
    if missing is not None:
        scored = []

    # Accuracies.
    micro = accuracy_of(scored, macro=False, missing=missing)
    by_category = accuracy_of(scored, macro=True, missing=missing)
    by_variant = split_accuracy(results, operator.attrgetter('variant'), macro=macro, missing=missing)
    by_gold = split_accuracy(results, operator.attrgetter('gold'), macro=macro, missing=missing)
    of_variants = [accuracy.value for accuracy in by_variant.values() if accuracy.value is not None]

    # Of complete questions.
    all_right = []
    if missing is None:
        all_right = [
            (float(all(result.score == 1 for result in group)), cluster_of_question(group[0])) for group in complete
        ]
    no_rates = 'no question has more than one variant' if complete else incomplete
    accuracy = by_category if macro else micro
    consistency_rate = mean_share(agreements(complete, equal), no_rates)
    constant_accuracy, constant_rate = scores_by_constant_letter(questions.values(), macro=macro)
    return PerturbationScore(
        accuracy=accuracy,
        accuracy_micro=micro,
        accuracy_macro=by_category,
        accuracy_by_variant=by_variant,
        accuracy_by_gold=by_gold,
        accuracy_worst=summary_measure(min, of_variants, missing),
        accuracy_mean=mean_over_variants(by_variant, accuracy, missing),
        accuracy_best=summary_measure(max, of_variants, missing),
        all_variants_right=mean_share(all_right, incomplete),
        consistency_rate=consistency_rate,
        consistency_rate_reference=reference_consistency,
        accuracy_by_constant_letter=constant_accuracy,
        consistency_rate_by_constant_letter=constant_rate,
        unparsed_rate=unparsed_rate(scored, missing),
        num_questions=len(questions),
        num_incomplete=len(questions) - len(complete),
        over_prompts=scores_over_prompts(accuracy, consistency_rate, complete, macro=macro, equal=equal),
    )


def scores_by_constant_letter(
    questions: Iterable[Sequence[VariantResult]], *, macro: bool
) -> tuple[dict[str, Measure], dict[str, Measure]]:
    """Return accuracy and consistency rate of an answer that is the same letter in every variant, by letter.

    A letter that a question does not have is no answer: it is wrong, and agrees with nothing. As of the answers given,
    unscored variants are left out of the accuracy, and questions that have any out of the consistency rate.
    """
    all_variants = list(questions)
    with_options = [[result for result in group if result.options] for group in all_variants]
    most_options = max((len(result.options) for group in with_options for result in group), default=0)

    accuracies: dict[str, Measure] = {}
    rates: dict[str, Measure] = {}
    for place, letter in enumerate(string.ascii_uppercase[:most_options]):
        shares_right: dict[str, list[float]] = {}  # of each question, by category
        shares_agreeing: list[float] = []
        for group, whole_group in zip(with_options, all_variants, strict=True):
            if not group:
                continue
            category = str(group[0].category if macro else None)
            num_right = sum(result.gold == letter for result in group)
            shares_right.setdefault(category, []).append(num_right / len(group))

            answers = [result.options[place] if place < len(result.options) else None for result in group]
            share_agreeing = agreement(answers)
            if share_agreeing is not None and len(group) == len(whole_group):
                shares_agreeing.append(share_agreeing)
        accuracies[letter] = Measure(value=mean([mean(of_category) for of_category in shares_right.values()]))
        if shares_agreeing:
            rates[letter] = Measure(value=mean(shares_agreeing))
    return accuracies, rates


def unparsed_rate(scored: Sequence[VariantResult], missing: str | None) -> Measure:
    """Return the share of variants without an answer, with its error over questions."""
    shares = []
    for group in by_question(scored).values():
        num_unparsed = sum(result.answer is None for result in group)
        shares.append((num_unparsed / len(group), cluster_of_question(group[0])))
    over_questions = mean_share(shares, missing)
    if over_questions.value is None:
        return over_questions
    # Of questions with several numbers of variants, as of options, each variant counts alike.
    return replace(over_questions, value=mean([result.answer is None for result in scored]))


def scores_over_prompts(
    accuracy: Measure,
    consistency_rate: Measure,
    complete: Sequence[Sequence[VariantResult]],
    *,
    macro: bool,
    equal: Callable[[str, str], bool],
) -> OverPrompts | None:
    """Return scores with the errors over prompts; None for other perturbations, and for fewer than three prompts."""
    prompts = sorted({result.variant for group in complete for result in group}, key=variant_order)
    if len(prompts) < 3 or not all(prompt.startswith(PROMPT) for prompt in prompts):
        return None
    import numpy as np

    # Questions asked with all prompts, in an order that does not depend on that of the results.
    asked_with_all = [group for group in complete if len(group) == len(prompts)]
    asked_with_all.sort(key=lambda group: question_number(group[0].question))
    in_order = [sorted(group, key=lambda result: variant_order(result.variant)) for group in asked_with_all]
    if len(in_order) < 2:
        return None
    clusters = np.array([cluster_of_question(group[0]) for group in in_order], np.uint64)
    categories = [str(group[0].category if macro else None) for group in in_order]

    rights = np.array([[result.score for result in group] for group in in_order], np.float64)
    agreeing = np.array([agreements_of_variants(group, equal) for group in in_order])
    effects = {
        'accuracy': prompt_effects(rights, clusters, categories, prompts),
        'consistency_rate': effects_on_agreement(agreeing, clusters, prompts),
    }
    deviation = accuracy
    if accuracy.value is not None:
        deviation = Measure(value=effects['accuracy'].deviation_between_prompts)
    return OverPrompts(
        accuracy=over_prompts(accuracy, effects['accuracy']),
        consistency_rate=over_prompts(consistency_rate, effects['consistency_rate']),
        prompt_deviation=deviation,
        effects=effects,
    )


def agreements_of_variants(group: Sequence[VariantResult], equal: Callable[[str, str], bool]) -> list[float]:
    """Return, for each variant of a question, the share of its other variants with the same answer."""
    given = [result.answer for result in group if result.answer is not None]
    counts = Counter(given)
    num_agreeing = {answer: count - 1 for answer, count in counts.items()}
    if equal is not operator.eq:
        for answer, other in combinations(counts, 2):
            if equal(answer, other):
                num_agreeing[answer] += counts[other]
                num_agreeing[other] += counts[answer]
    return [0.0 if result.answer is None else num_agreeing[result.answer] / (len(group) - 1) for result in group]


def agreements(groups: Iterable[Sequence[VariantResult]], equal: Callable[[str, str], bool]) -> list[tuple[float, int]]:
    """Return the agreement and the cluster of each question that has pairs of variants."""
    rates = []
    for group in groups:
        rate = agreement([result.answer for result in group], equal)
        if rate is not None:
            rates.append((rate, cluster_of_question(group[0])))
    return rates


def by_question(results: Iterable[VariantResult]) -> dict[QuestionKey, list[VariantResult]]:
    """Return the results of each question."""
    questions: dict[QuestionKey, list[VariantResult]] = {}
    for result in results:
        questions.setdefault(result.question, []).append(result)
    return questions


def agreement(answers: Sequence[str | None], equal: Callable[[str, str], bool] = operator.eq) -> float | None:
    """Return the share of unordered pairs of variants with the same answer, from all to a question; None without pairs.

    None is no answer, and agrees with nothing.
    """
    if len(answers) < 2:
        return None
    given = [answer for answer in answers if answer is not None]
    counts = Counter(given)
    agreeing = sum(math.comb(count, 2) for count in counts.values())
    if equal is not operator.eq:
        agreeing += sum(
            counts[answer] * counts[other] for answer, other in combinations(counts, 2) if equal(answer, other)
        )
    return agreeing / math.comb(len(answers), 2)


def accuracy_of(scored: Sequence[VariantResult], *, macro: bool, missing: str | None = None) -> Measure:
    """Return the mean score over a question's variants, then over questions (macro: of a category, then categories).

    The standard error is that of the mean of the questions' means, as in arXiv 2411.00640 for questions answered
    several times; questions of one cluster vary together.
    """
    scores: dict[QuestionKey, list[float]] = {}
    first_variant: dict[QuestionKey, VariantResult] = {}
    for result in scored:
        if result.score is None:
            raise ValueError(f'{result.question}, {result.variant}: is unscored')
        scores.setdefault(result.question, []).append(result.score)
        first_variant.setdefault(result.question, result)

    # Each question's mean and cluster, by category.
    questions: dict[str, list[tuple[float, int]]] = {}
    for question, of_variants in scores.items():
        first = first_variant[question]
        category = str(first.category if macro else None)
        questions.setdefault(category, []).append((mean(of_variants), cluster_of_question(first)))
    if not questions:
        return Measure(value=None, reason=missing or NO_ITEMS)
    measures = {name: mean_share(values, missing, stratum=name) for name, values in questions.items()}
    clusters = {name: values[0][1] for name, values in questions.items()}
    return mean_over_categories(measures, clusters, bounds=SHARE)


def cluster_of_question(result: VariantResult) -> int:
    """Return the number of a question's cluster."""
    return question_number(result.question) if result.cluster is None else result.cluster


@functools.lru_cache(maxsize=100_000)
def question_number(question: QuestionKey) -> int:
    """Return the cluster number of a question that shares its cluster with no other."""
    return int.from_bytes(hashlib.sha256(repr(question).encode()).digest()[:8], 'big')


def mean_share(values: Sequence[tuple[float, int]], missing: str | None, *, stratum: str = '') -> Measure:
    """Return the mean of shares, given as pairs of value and cluster number, or the reason why there is none."""
    if not values:
        return Measure(value=None, reason=missing or NO_ITEMS)
    import numpy as np

    shares = [share for share, _ in values]
    clusters = np.array([cluster for _, cluster in values], np.uint64)
    return mean_over_clusters(shares, clusters, stratum=stratum, bounds=SHARE)


def split_accuracy(
    results: Sequence[VariantResult],
    part: Callable[[VariantResult], str],
    *,
    macro: bool,
    missing: str | None,
) -> dict[str, Measure]:
    """Return the accuracy of each part of the results, in natural order; results with part '' are left out."""
    parts: dict[str, list[VariantResult]] = {}
    for result in results:
        name = part(result)
        if name:
            parts.setdefault(name, []).append(result)
    accuracies = {}
    for name in sorted(parts, key=variant_order):
        scored = [result for result in parts[name] if result.score is not None]
        accuracies[name] = accuracy_of(
            scored if missing is None else [], macro=macro, missing=missing or missing_reason(parts[name])
        )
    return accuracies


def variant_order(variant: str) -> tuple[str, int, str]:
    """Return a sort key that puts 'prompt:9' before 'prompt:10'."""
    perturbation, _, name = variant.rpartition(':')
    return perturbation, int(name) if name.isdecimal() else -1, name


def summary_measure(
    summary: Callable[[Sequence[float]], float], values: Sequence[float], missing: str | None
) -> Measure:
    """Return a summary of values, or the reason why there are none."""
    if not values:
        return Measure(value=None, reason=missing or NO_ITEMS)
    return Measure(value=float(summary(values)))


def mean_over_variants(by_variant: Mapping[str, Measure], accuracy: Measure, missing: str | None) -> Measure:
    """Return the plain mean of the accuracies of variants, with its error over questions.

    Variants ask the same questions, so the deviations of a question in all its variants are added before they are
    squared. `accuracy` is over the same questions.
    """
    measures = [measure for measure in by_variant.values() if measure.value is not None]
    values = [measure.value for measure in measures if measure.value is not None]
    if not values:
        return Measure(value=None, reason=missing or NO_ITEMS)
    center = mean(values)
    spread = weighted_sum(measures, [1 / len(measures)] * len(measures)).spread
    if spread is None or any(stratum.is_borrowed for stratum in spread.strata):
        return Measure(value=center, spread=spread)
    if spread.standard_error == 0:
        # As none or all are right: added up, the sides of variants would count each question once for each variant.
        return Measure(value=center, spread=accuracy.spread)
    num_items = center * (1 - center) / spread.standard_error**2
    return Measure(value=center, spread=replace(spread, bounds=SHARE, num_items=num_items))


def missing_reason(results: Sequence[VariantResult]) -> str | None:
    """Return 'n of m items unscored', None if all items are scored."""
    if not results:
        return NO_ITEMS
    unscored = sum(result.score is None for result in results)
    return f'{unscored} of {plural(len(results), "item")} unscored' if unscored else None
