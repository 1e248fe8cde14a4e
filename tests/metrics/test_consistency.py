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

from llmfoundry_gauntlet.metrics.consistency import VariantResult, perturbation_score, reference_consistency_rate
from llmfoundry_gauntlet.types import Measure

RECORDED = json.loads((FIXTURES / 'score' / 'functions.json').read_text(encoding='utf-8'))
LABELS = 'ABCDEFGHIJ'
REFERENCE_LABELS = {'mmlu_pro': LABELS, 'agieval': 'ABCD', 'math': ''}


def result(row: int, variant: str, credit: float | None, answer: str | None = 'x', **changes) -> VariantResult:
    values = {'question': (None, row), 'category': None, 'gold': '', 'reference_answer': answer, **changes}
    return VariantResult(variant=variant, score=credit, answer=answer, **values)


def prompts(row: int, credits: str, answers: str = '', category: str | None = None) -> list[VariantResult]:
    """Return a question's variants from a digit of `credits` and a letter of `answers` each; '-' is None."""
    pairs = itertools.zip_longest(credits, answers, fillvalue='x')
    values = [(None if c == '-' else float(c), None if a == '-' else a) for c, a in pairs]
    return [result(row, f'prompt:{place}', *value, category=category) for place, value in enumerate(values)]


def always(letter: str, num_options: int, gold: str, row: int = 0) -> list[VariantResult]:
    """Return the option orders of a question with texts t0, t1, ... by a model that always gives one letter."""
    own, place = LABELS.index(gold), LABELS.index(letter)
    results = []
    for moved_to, label in enumerate(LABELS[:num_options]):
        texts = [f't{index}' for index in range(num_options)]
        texts[own], texts[moved_to] = texts[moved_to], texts[own]
        keys = {'gold': label, 'reference_answer': letter}
        results.append(result(row, f'option_order:{label}', float(letter == label), texts[place], **keys))
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


def test_macro_accuracy_is_over_categories():
    results = prompts(0, '11', category='a') + prompts(1, '00', category='a')
    results += [entry for row in range(2, 6) for entry in prompts(row, '11', category='b')]
    results += prompts(6, '10', category='b')
    scored = score(results, macro=True)
    # a: 0.5 with an error of 0.5; b: 0.9, deviation sqrt(0.05), error sqrt(0.05 / 5) = 0.1
    assert scored.accuracy == scored.accuracy_macro
    assert scored.accuracy.value == pytest.approx(0.7)
    assert scored.accuracy.standard_error == pytest.approx(math.sqrt(0.25 + 0.01) / 2)
    assert scored.accuracy_micro.value == pytest.approx(5.5 / 7)
    assert score(results).accuracy == scored.accuracy_micro
    assert scored.accuracy_by_variant['prompt:1'].value == pytest.approx((0.5 + 0.8) / 2)
    results = prompts(0, '00', 'xy', 'a') + prompts(1, '00', 'xx', 'b') + prompts(2, '00', 'xx', 'b')
    assert score(results, macro=True).consistency_rate.value == pytest.approx(2 / 3)  # never by category


def test_an_unparsed_answer_agrees_with_nothing():
    scored = score(prompts(0, '1000', 'x---') + prompts(1, '11', 'xx'))
    assert scored.consistency_rate.value == pytest.approx(0.5)
    assert scored.unparsed_rate.value == pytest.approx(3 / 6)


def test_answers_are_compared_by_the_function_given():
    results = prompts(0, '000', 'aAb')
    assert score(results).consistency_rate.value == 0
    assert score(
        results, equal=lambda one, other: one.lower() == other.lower()
    ).consistency_rate.value == pytest.approx(1 / 3)
    near = score(prompts(0, '0000', 'aabc'), equal=lambda one, other: abs(ord(one) - ord(other)) == 1)
    assert near.consistency_rate.value == pytest.approx((1 + 2 + 1) / 6)  # aa, ab twice, bc; a and c are not equal


def test_variants_and_gold_labels_have_accuracies():
    results = always('A', 4, 'A', 0) + always('A', 3, 'B', 1)
    scored = score(results)
    by_variant = {variant: measure.value for variant, measure in scored.accuracy_by_variant.items()}
    assert by_variant == {'option_order:A': 1, 'option_order:B': 0, 'option_order:C': 0, 'option_order:D': 0}
    by_gold = {label: measure.value for label, measure in scored.accuracy_by_gold.items()}
    assert by_gold == {'A': 1, 'B': 0, 'C': 0, 'D': 0}
    assert scored.accuracy.value == pytest.approx((1 / 4 + 1 / 3) / 2)
    assert (scored.accuracy_worst.value, scored.accuracy_mean.value, scored.accuracy_best.value) == (0, 0.25, 1)
    assert scored.all_variants_right.value == 0
    assert score(prompts(0, '11') + prompts(1, '10')).all_variants_right.value == 0.5
    assert score(prompts(0, '11')).accuracy_by_gold == {}
    assert list(score(prompts(0, '1' * 11)).accuracy_by_variant)[-2:] == ['prompt:9', 'prompt:10']


def test_an_unscored_variant_makes_accuracy_absent():
    results = prompts(0, '1-', 'xx') + prompts(1, '11', 'xy') + prompts(2, '01', 'zz')
    scored = score(results)
    absent = Measure(value=None, reason='1 of 6 items unscored')
    names = 'accuracy accuracy_macro unparsed_rate accuracy_worst accuracy_mean accuracy_best all_variants_right'
    assert {name: getattr(scored, name) for name in names.split()} == dict.fromkeys(names.split(), absent)
    assert scored.accuracy_by_variant['prompt:0'] == absent
    assert scored.consistency_rate.value == 0.5
    assert scored.num_incomplete == 1


def test_missing_items_may_be_allowed():
    results = prompts(0, '1-', 'xx') + prompts(1, '11', 'xy') + prompts(2, '01', 'zz') + prompts(3, '--', 'xx')
    scored = score(results, allow_missing=True)
    assert scored.accuracy.value == pytest.approx((1 + 1 + 0.5) / 3)
    assert scored.accuracy_by_variant['prompt:1'].value == 1
    assert scored.all_variants_right.value == 0.5
    assert scored.consistency_rate.value == 0.5
    nothing = score(prompts(3, '--'), allow_missing=True)
    assert nothing.accuracy.reason == nothing.consistency_rate.reason == '2 of 2 items unscored'


def test_absent_measures_have_reasons():
    single = score(prompts(0, '10'))
    assert single.accuracy.value == 0.5
    assert single.accuracy.standard_error is single.consistency_rate.standard_error is None  # of a single question
    lone = prompts(0, '1', category='a') + prompts(1, '1', category='b') + prompts(2, '0', category='b')
    # category a is a half from the mean of b
    assert score(lone, macro=True).accuracy.standard_error == pytest.approx(math.hypot(0.5, 0.5) / 2)
    assert score(lone).consistency_rate == Measure(value=None, reason='no question has more than one variant')
    assert score(prompts(0, '1', 'x') + prompts(1, '11', 'xx')).consistency_rate.value == 1
    nothing = score([])
    assert nothing.accuracy == nothing.consistency_rate == Measure(value=None, reason='there are no items')
    assert nothing.unparsed_rate == nothing.accuracy
    assert (nothing.accuracy_by_variant, nothing.num_questions) == ({}, 0)


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
def test_always_giving_one_letter_is_not_consistent(letter, num_options, gold, ours, reference):
    results = always(letter, num_options, gold)
    assert score(results).consistency_rate.value == pytest.approx(ours)
    labels = 'ABCD' if num_options in (4, 5) else LABELS
    rate = reference_consistency_rate(results, labels=labels, own_labels={(None, 0): gold})
    assert rate.value == pytest.approx(reference)


def test_the_reference_pools_pairs_of_earlier_and_later_answers_unparsed_ones_too():
    asked = []
    results = [
        result(0, f'prompt:{number}', 0.0, answer) for number, answer in ((10, 'c'), (2, 'b'), (0, 'a'), (1, None))
    ]
    rate = reference_consistency_rate(results, equal=lambda *pair: asked.append(pair) or pair == ('b', 'c'))
    assert asked == [('a', None), ('a', 'b'), ('a', 'c'), ('b', 'c')]
    assert rate.value == pytest.approx(1 / 6)
    results = prompts(0, '000', 'xxy') + prompts(1, '00', '??')
    assert reference_consistency_rate(results).value == pytest.approx(2 / 4)


def test_the_reference_rate_is_absent_with_unscored_questions():
    assert reference_consistency_rate(prompts(0, '1-', 'xx') + prompts(1, '11', 'xy')).value == 0
    assert reference_consistency_rate(prompts(0, '1-', 'xx')).reason == '1 of 2 items unscored'
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
