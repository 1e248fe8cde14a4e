"""Consistency by hand, by invariants, by simulation, and compared with lm-eval 0.4.13's functions."""

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import FIXTURES

from llmfoundry_gauntlet.metrics.consistency import (
    PerturbationScore,
    VariantResult,
    perturbation_score,
    reference_consistency_rate,
)
from llmfoundry_gauntlet.metrics.statistics import interval
from llmfoundry_gauntlet.types import Measure

RECORDED = json.loads((FIXTURES / 'score' / 'functions.json').read_text(encoding='utf-8'))
LABELS = 'ABCDEFGHIJ'
REFERENCE_LABELS = {'mmlu_pro': LABELS, 'agieval': 'ABCD', 'math': ''}


def result(row: int, variant: str, score: float | None, answer: str | None = 'x', **changes) -> VariantResult:
    values = {'question': (None, row), 'category': None, 'gold': '', 'reference_answer': answer, **changes}
    return VariantResult(variant=variant, score=score, answer=answer, **values)


def prompts(row: int, scores: str, answers: str = '', category: str | None = None) -> list[VariantResult]:
    """Return a question's variants from a digit of `scores` and a letter of `answers` each; '-' is None."""
    results = []
    for number, (digit, letter) in enumerate(itertools.zip_longest(scores, answers, fillvalue='x')):
        score = None if digit == '-' else float(digit)
        answer = None if letter == '-' else letter
        results.append(result(row, f'prompt:{number}', score, answer, category=category))
    return results


def always(letter: str, num_options: int, gold: str, row: int = 0, **changes) -> list[VariantResult]:
    """Return the option orders of a question with texts tA, tB, ... by a model that always gives one letter."""
    place_of_gold, place_of_answer = LABELS.index(gold), LABELS.index(letter)
    results = []
    for place, label in enumerate(LABELS[:num_options]):
        options = list(LABELS[:num_options])
        options[place_of_gold], options[place] = options[place], options[place_of_gold]
        is_right = float(letter == label)
        keys = {'gold': label, 'reference_answer': letter, 'options': ''.join(options), **changes}
        results.append(result(row, f'option_order:{label}', is_right, f't{options[place_of_answer]}', **keys))
    return results


def score(results, **settings):
    not_computed = Measure(value=None, reason='is tested by itself')
    return perturbation_score(results, **{'macro': False, 'reference_consistency': not_computed, **settings})


def test_accuracy_and_consistency_are_means_over_questions():
    scored = score(prompts(0, '110', 'xxy') + prompts(1, '00', 'zz'))
    assert scored.accuracy.value == pytest.approx((2 / 3 + 0) / 2)
    assert scored.accuracy.standard_error == pytest.approx(1 / 3)  # (2/3 / sqrt 2) / sqrt 2
    assert scored.consistency_rate.value == pytest.approx((1 / 3 + 1) / 2)  # pooled it were 2 of 4 pairs
    assert scored.consistency_rate.standard_error == pytest.approx(1 / 3)
    assert (scored.num_questions, scored.num_incomplete) == (2, 0)


@pytest.fixture
def two_categories() -> list[VariantResult]:
    """Return questions of two prompts: of a one right and one wrong, of b four right and one half."""
    of_a = [*prompts(0, '11', category='a'), *prompts(1, '00', category='a')]
    of_b = [variant for row in range(2, 6) for variant in prompts(row, '11', category='b')]
    return [*of_a, *of_b, *prompts(6, '10', category='b')]


def test_macro_accuracy_is_over_categories(two_categories):
    scored = score(two_categories, macro=True)

    # a: 0.5 with an error of 0.5; b: 0.9, deviation sqrt(0.05), error sqrt(0.05 / 5) = 0.1
    assert scored.accuracy == scored.accuracy_macro
    assert scored.accuracy.value == pytest.approx(0.7)
    assert scored.accuracy.standard_error == pytest.approx(math.sqrt(0.25 + 0.01) / 2)
    assert scored.accuracy_by_variant['prompt:1'].value == pytest.approx((0.5 + 0.8) / 2)


def test_micro_accuracy_is_over_questions(two_categories):
    scored = score(two_categories)

    assert scored.accuracy == scored.accuracy_micro == score(two_categories, macro=True).accuracy_micro
    assert scored.accuracy_micro.value == pytest.approx(5.5 / 7)


def test_consistency_is_never_by_category():
    inconsistent = prompts(0, '00', 'xy', 'a')
    consistent = [*prompts(1, '00', 'xx', 'b'), *prompts(2, '00', 'xx', 'b')]

    assert score([*inconsistent, *consistent], macro=True).consistency_rate.value == pytest.approx(2 / 3)


def test_an_unparsed_answer_agrees_with_nothing():
    scored = score(prompts(0, '1000', 'x---') + prompts(1, '11', 'xx'))
    assert scored.consistency_rate.value == pytest.approx(0.5)
    assert scored.unparsed_rate.value == pytest.approx(3 / 6)


def are_neighbors(letter: str, other: str) -> bool:
    return abs(ord(letter) - ord(other)) == 1


@pytest.mark.parametrize(
    ('answers', 'settings', 'expected'),
    [
        ('aAb', {}, 0),
        ('aAb', {'equal': lambda answer, other: answer.lower() == other.lower()}, 1 / 3),
        ('aabc', {'equal': are_neighbors}, (1 + 2 + 1) / 6),  # aa, ab twice, bc; a and c are not equal
    ],
)
def test_answers_are_compared_by_the_function_given(answers, settings, expected):
    scored = score(prompts(0, '0' * len(answers), answers), **settings)

    assert scored.consistency_rate.value == pytest.approx(expected)


@pytest.fixture
def always_a() -> PerturbationScore:
    """Return the score of a model that always answers A, of two questions with 4 and 3 options."""
    return score([*always('A', 4, 'A', 0), *always('A', 3, 'B', 1)])


def test_variants_have_accuracies(always_a):
    by_variant = {variant: measure.value for variant, measure in always_a.accuracy_by_variant.items()}

    assert by_variant == {'option_order:A': 1, 'option_order:B': 0, 'option_order:C': 0, 'option_order:D': 0}
    assert always_a.accuracy_worst.value == 0
    assert always_a.accuracy_mean.value == 0.25
    assert always_a.accuracy_best.value == 1


def test_the_mean_over_variants_has_the_error_of_the_accuracy_where_all_questions_have_all_variants():
    """Mutation: variants are taken to be independent, which divides the error by the root of their number."""
    scored = score(prompts(0, '110') + prompts(1, '000') + prompts(2, '111') + prompts(3, '010'))

    assert scored.accuracy_mean.value == pytest.approx(scored.accuracy.value)
    assert scored.accuracy_mean.standard_error == pytest.approx(scored.accuracy.standard_error)
    assert interval(scored.accuracy_mean) == pytest.approx(interval(scored.accuracy))


def test_the_mean_over_variants_counts_each_with_its_questions():
    # All four questions have A, with a mean of 1/2, and the last two have B, with a mean of 1/2.
    of_a = [result(row, 'option_order:A', score_of_a) for row, score_of_a in enumerate([1.0, 1.0, 0.0, 0.0])]
    of_b = [result(2, 'option_order:B', 0.0), result(3, 'option_order:B', 1.0)]

    mean = score([*of_a, *of_b]).accuracy_mean

    # Without a question, the mean of A changes by 1/2 / 3, and that of B by 1/2 / 1: a jackknife over 4 and 2.
    by_a, by_b = 1 / 6 * math.sqrt(3 / 4), 1 / 2 * math.sqrt(1 / 2)
    changes = [by_a / 2, by_a / 2, (by_a + by_b) / 2, (by_a - by_b) / 2]
    assert mean.value == pytest.approx(1 / 2)
    assert mean.standard_error == pytest.approx(math.sqrt(sum(change**2 for change in changes)))


def test_the_mean_over_variants_with_nothing_right_is_as_uncertain_as_the_accuracy():
    """Mutation: the intervals of variants are combined as if each asked other questions."""
    scored = score([variant for row in range(20) for variant in prompts(row, '0' * 10)])

    assert interval(scored.accuracy_mean) == interval(scored.accuracy)


def test_the_worst_and_the_best_variant_have_no_error():
    scored = score(prompts(0, '110') + prompts(1, '000'))

    assert (scored.accuracy_worst.standard_error, scored.accuracy_best.standard_error) == (None, None)


def test_the_mean_over_variants_has_no_error_if_a_variant_has_one_question():
    of_a = [result(row, 'option_order:A', float(row)) for row in range(2)]

    mean = score([*of_a, result(0, 'option_order:B', 1.0)]).accuracy_mean

    assert (mean.value, mean.standard_error) == (pytest.approx(3 / 4), None)


def test_gold_labels_have_accuracies(always_a):
    by_gold = {label: measure.value for label, measure in always_a.accuracy_by_gold.items()}

    assert by_gold == {'A': 1, 'B': 0, 'C': 0, 'D': 0}


def test_accuracy_of_option_orders_is_over_questions_of_any_number_of_options(always_a):
    assert always_a.accuracy.value == pytest.approx((1 / 4 + 1 / 3) / 2)
    assert always_a.all_variants_right.value == 0


def test_questions_with_all_variants_right_are_counted():
    assert score(prompts(0, '11') + prompts(1, '10')).all_variants_right.value == 0.5


def test_without_options_there_is_no_accuracy_by_gold():
    assert score(prompts(0, '11')).accuracy_by_gold == {}


def test_prompts_are_in_natural_order():
    assert list(score(prompts(0, '1' * 11)).accuracy_by_variant)[-2:] == ['prompt:9', 'prompt:10']


NEED_ALL_ITEMS = [
    'accuracy',
    'accuracy_macro',
    'accuracy_worst',
    'accuracy_mean',
    'accuracy_best',
    'all_variants_right',
    'unparsed_rate',
]


def test_an_unscored_variant_makes_all_but_consistency_absent():
    scored = score([*prompts(0, '1-', 'xx'), *prompts(1, '11', 'xy'), *prompts(2, '01', 'zz')])

    absent = Measure(value=None, reason='1 of 6 items unscored')
    assert {name: getattr(scored, name) for name in NEED_ALL_ITEMS} == dict.fromkeys(NEED_ALL_ITEMS, absent)
    assert scored.accuracy_by_variant['prompt:0'] == absent
    assert scored.consistency_rate.value == 0.5  # of the complete questions
    assert scored.num_incomplete == 1


def test_missing_items_may_be_allowed():
    results = [*prompts(0, '1-', 'xx'), *prompts(1, '11', 'xy'), *prompts(2, '01', 'zz'), *prompts(3, '--', 'xx')]

    scored = score(results, allow_missing=True)

    assert scored.accuracy.value == pytest.approx((1 + 1 + 0.5) / 3)
    assert scored.accuracy_by_variant['prompt:1'].value == 1
    assert scored.all_variants_right.value == 0.5
    assert scored.consistency_rate.value == 0.5


def test_without_any_scored_item_all_is_absent_also_where_missing_ones_are_allowed():
    scored = score(prompts(3, '--'), allow_missing=True)

    assert scored.accuracy.reason == '2 of 2 items unscored'
    assert scored.consistency_rate.reason == '2 of 2 items unscored'


def test_measures_of_a_single_question_have_no_error():
    scored = score(prompts(0, '10'))

    assert scored.accuracy.value == 0.5
    assert scored.accuracy.standard_error is None
    assert scored.consistency_rate.standard_error is None


def test_a_category_of_one_question_borrows_its_error():
    results = [*prompts(0, '1', category='a'), *prompts(1, '1', category='b'), *prompts(2, '0', category='b')]

    # Category a is a half from the mean of b.
    assert score(results, macro=True).accuracy.standard_error == pytest.approx(math.hypot(0.5, 0.5) / 2)


def test_questions_of_one_variant_have_no_consistency():
    scored = score([*prompts(0, '1'), *prompts(1, '0')])

    assert scored.consistency_rate == Measure(value=None, reason='no question has more than one variant')


def test_a_question_of_one_variant_does_not_count_for_consistency():
    assert score([*prompts(0, '1', 'x'), *prompts(1, '11', 'xx')]).consistency_rate.value == 1


def test_measures_without_items_have_a_reason():
    scored = score([])

    no_items = Measure(value=None, reason='there are no items')
    assert (scored.accuracy, scored.consistency_rate, scored.unparsed_rate) == (no_items, no_items, no_items)
    assert scored.accuracy_by_variant == {}
    assert scored.num_questions == 0


@pytest.mark.parametrize(
    ('letter', 'num_options', 'gold', 'ours', 'reference'),
    [
        # Gold A: A shows each option's text once. Else A shows its own text but where the gold was moved there.
        ('A', 4, 'A', 0, 1),
        ('A', 4, 'C', 3 / 6, 3 / 6),
        ('D', 4, 'B', 3 / 6, 3 / 6),
        ('A', 10, 'B', 36 / 45, 36 / 45),
        # Seven labels are absent: nine times C and once A there, where three variants have one agreeing pair.
        ('C', 3, 'A', 1 / 3, 36 / 45),
        ('E', 5, 'E', 0, 1),
    ],
)
def test_always_giving_one_letter_is_as_consistent_as_orders_leave_it(letter, num_options, gold, ours, reference):
    results = always(letter, num_options, gold)
    assert score(results).consistency_rate.value == pytest.approx(ours)
    labels = 'ABCD' if num_options in (4, 5) else LABELS
    rate = reference_consistency_rate(results, labels=labels, own_labels={(None, 0): gold})
    assert rate.value == pytest.approx(reference)


def values_of(measures: Mapping[str, Measure]) -> dict[str, float | None]:
    return {letter: measure.value for letter, measure in measures.items()}


def test_constant_letters_have_the_scores_of_a_model_that_gives_one_letter():
    """Mutation: a letter without an option agrees with itself. The answers given do not count."""
    scored = score([*always('A', 4, 'A', 0), *always('B', 3, 'B', 1)])

    fourth, third = 1 / 4, 1 / 3
    accuracies = {'A': (fourth + third) / 2, 'B': (fourth + third) / 2, 'C': (fourth + third) / 2, 'D': fourth / 2}
    assert values_of(scored.accuracy_by_constant_letter) == pytest.approx(accuracies)
    # Pairs of 4 orders: 6, of which 3 show the same text at a label without the gold option, and 0 at that with it; of
    # 3 orders: 3, of which 1 does.
    rates = {'A': (0 + 1 / 3) / 2, 'B': (3 / 6 + 0) / 2, 'C': (3 / 6 + 1 / 3) / 2, 'D': (3 / 6 + 0) / 2}
    assert values_of(scored.consistency_rate_by_constant_letter) == pytest.approx(rates)


def test_constant_letters_are_averaged_like_the_scores_beside_them():
    """Mutation: the accuracy of constant letters over questions, where that beside it is over categories."""
    results = [
        *always('A', 2, 'A', 0, category='a'),
        *always('A', 4, 'A', 1, category='b'),
        *always('A', 4, 'A', 2, category='b'),
    ]

    over_questions = score(results).accuracy_by_constant_letter['A']
    over_categories = score(results, macro=True).accuracy_by_constant_letter['A']

    assert over_questions == Measure(value=pytest.approx((1 / 2 + 1 / 4 + 1 / 4) / 3))
    assert over_categories == Measure(value=pytest.approx((1 / 2 + 1 / 4) / 2))


def test_a_constant_letter_agrees_where_options_have_the_same_text():
    # The third option repeats the first, and the second is right.
    results = [
        result(0, 'option_order:A', 0.0, gold='A', options='BAA'),
        result(0, 'option_order:B', 0.0, gold='B', options='ABA'),
        result(0, 'option_order:C', 0.0, gold='C', options='AAB'),
    ]

    assert values_of(score(results).consistency_rate_by_constant_letter) == pytest.approx(dict.fromkeys('ABC', 1 / 3))


def test_constant_letters_leave_out_what_the_scores_beside_them_leave_out():
    """Mutation: a question with an unscored variant is left out of both."""
    (_, *others) = always('A', 4, 'A', 0)
    missing = result(0, 'option_order:A', None, None, gold='A')

    scored = score([missing, *others, *always('A', 2, 'A', 1)], allow_missing=True)

    assert scored.accuracy_by_constant_letter['B'].value == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert scored.consistency_rate_by_constant_letter['B'].value == 0  # of the second question alone


def test_without_options_there_are_no_constant_letters():
    scored = score(prompts(0, '11'))

    assert (scored.accuracy_by_constant_letter, scored.consistency_rate_by_constant_letter) == ({}, {})


def test_the_reference_compares_earlier_answers_with_later_ones():
    compared = []

    def is_b_then_c(*pair: str | None) -> bool:
        compared.append(pair)
        return pair == ('b', 'c')

    results = [
        result(0, 'prompt:10', 0.0, 'c'),
        result(0, 'prompt:2', 0.0, 'b'),
        result(0, 'prompt:0', 0.0, 'a'),
        result(0, 'prompt:1', 0.0, None),
    ]

    rate = reference_consistency_rate(results, equal=is_b_then_c)

    assert compared == [('a', None), ('a', 'b'), ('a', 'c'), ('b', 'c')]
    assert rate.value == pytest.approx(1 / 6)


def test_the_reference_pools_the_pairs_of_all_questions():
    results = [*prompts(0, '000', 'xxy'), *prompts(1, '00', '??')]

    assert reference_consistency_rate(results).value == pytest.approx(2 / 4)


def test_the_reference_rate_is_over_complete_questions():
    results = [*prompts(0, '1-', 'xx'), *prompts(1, '11', 'xy')]

    assert reference_consistency_rate(results).value == 0


def test_the_reference_rate_without_a_complete_question_has_a_reason():
    assert reference_consistency_rate(prompts(0, '1-', 'xx')).reason == '1 of 2 items unscored'


def test_the_reference_rate_of_option_orders_needs_the_gold_labels():
    with pytest.raises(ValueError, match='needs the label of its gold option'):
        reference_consistency_rate(always('A', 3, 'A'), labels=LABELS)


@pytest.mark.parametrize('case', RECORDED['cases'])
def test_reference_rates_equal_the_recording(case: Mapping[str, Any]):
    equal = {(one, other): bool(value) for one, other, value in RECORDED['math_equal']}
    own, results = {}, []
    for question in case['questions']:
        key = (question['file'], question['row'])
        own[key] = question['own']
        results += [result(0, variant, 0.0, answer, question=key) for variant, answer in question['answers'].items()]
    of_math = {'equal': lambda one, other: other is not None and equal[one, other]}
    keys = of_math if case['data_set'] == 'math' else {}
    rate = reference_consistency_rate(results, labels=REFERENCE_LABELS[case['data_set']], own_labels=own, **keys)
    assert rate.value == pytest.approx(case['consistency_rate'], abs=1e-12)


ANSWERS = st.sampled_from(['a', 'b', 'c', None])
ENTRIES = st.tuples(ANSWERS, st.sampled_from([0.0, 0.5, 1.0]))
QUESTIONS = st.lists(
    st.tuples(st.sampled_from('uvw'), st.lists(ENTRIES, min_size=1, max_size=6)), min_size=1, max_size=8
)


def results_of(questions) -> list[VariantResult]:
    return [
        result(row, f'prompt:{number}', credit, answer, category=category)
        for row, (category, entries) in enumerate(questions)
        for number, (answer, credit) in enumerate(entries)
    ]


@given(QUESTIONS, st.booleans(), st.randoms(use_true_random=False))
def test_order_changes_no_bit(questions, macro, random):
    results = results_of(questions)
    scored = score(results, macro=macro)
    shares = [scored.accuracy, scored.consistency_rate, scored.unparsed_rate, scored.all_variants_right]
    assert all(0 <= share.value <= 1 for share in shares if share.value is not None)
    assert scored.accuracy_worst.value <= scored.accuracy_mean.value + 1e-15
    assert scored.accuracy_mean.value <= scored.accuracy_best.value + 1e-15
    random.shuffle(results)
    assert score(results, macro=macro) == scored


@given(QUESTIONS)
def test_consistency_equals_counting_pairs(questions):
    shares = []
    for _, entries in questions:
        pairs = list(itertools.combinations([answer for answer, _ in entries], 2))
        if pairs:
            shares.append(sum(one is not None and one == other for one, other in pairs) / len(pairs))
    expected = sum(shares) / len(shares) if shares else None
    for equal in ({}, {'equal': lambda one, other: one == other}):
        assert score(results_of(questions), **equal).consistency_rate.value == pytest.approx(expected)
