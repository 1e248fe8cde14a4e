"""Metrics of item results by hand, and which of them each task type has."""

import math
from collections.abc import Sequence
from typing import Any

import clustered_items
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.keys import metric_stream
from llmfoundry_gauntlet.metrics.metrics import (
    accuracy,
    choice_metrics,
    compute_metric,
    gold_bits_per_byte,
    task_score,
)
from llmfoundry_gauntlet.types import ItemResult, TaskScore

ACCURACY = 'InContextLearningLMAccuracy'
OURS = {metric.name: metric for metric in choice_metrics()}


def score_of(*entries: tuple[float | None, str | None], shortened: bool = False) -> TaskScore:
    """Return the score of a task over items with these scores and categories."""
    results = [
        clustered_items.item(row, score, task='t/3-shot', category=category, prompt_shortened=shortened)
        for row, (score, category) in enumerate(entries)
    ]
    return task_score('t/3-shot', [accuracy(ACCURACY)], results)


# Accuracy.


def test_accuracy_is_the_mean_score():
    score = score_of((1.0, None), (0.0, None), (0.25, None), shortened=True)

    assert score.accuracy.value == pytest.approx(1.25 / 3)
    assert (score.num_items, score.num_unscored, score.num_shortened) == (3, 0, 3)


def test_accuracy_of_categories_is_the_mean_over_them():
    score = score_of((1.0, 'b'), (0.0, 'a'), (0.0, 'a'), (1.0, 'a'))

    assert score.accuracy.value == pytest.approx((1 / 3 + 1) / 2)
    assert list(score.categories) == ['a', 'b']
    assert score.num_shortened == 0


def test_an_unscored_item_makes_accuracy_absent():
    assert score_of((1.0, None), (None, None)).accuracy.value is None


def test_an_unscored_item_of_a_category_makes_accuracy_absent_also_from_the_stream():
    score = score_of((1.0, 'a'), (None, 'b'))

    assert score.accuracy.value is None
    assert score.accuracy.reason == '1 of 2 items unscored: nan'
    assert score.categories['a'].accuracy.value == 1
    assert metric_stream({'t/3-shot': score}, None, {}, {'t/3-shot': 1.5}) == {
        f'metrics/t/3-shot/a/{ACCURACY}': 1.0,
        'gauntlet/seconds': 1.5,
        'gauntlet/seconds/t/3-shot': 1.5,
        'gauntlet/items': 2,
        'gauntlet/shortened_items': 0,
        'gauntlet/unscored_items': 1,
    }


@pytest.mark.parametrize(
    ('entries', 'reason'),
    [
        ([(None, None)], '1 of 1 item unscored: nan'),
        ([(None, None), (1.0, None)], '1 of 2 items unscored: nan'),
    ],
)
def test_a_reason_about_a_single_item_is_singular(entries, reason):
    assert score_of(*entries).accuracy.reason == reason


# Metrics of likelihoods.


@pytest.mark.parametrize(
    ('kind', 'expected'),
    [
        ('multiple_choice', ['InContextLearningMultipleChoiceAccuracy', *OURS]),
        ('schema', ['InContextLearningMultipleChoiceAccuracy', *OURS]),
        ('language_modeling', [ACCURACY, 'GoldBitsPerByte']),
    ],
)
def test_each_task_type_has_its_likelihood_metrics(kind: str, expected: list[str]):
    upstream = f'InContextLearning{"LM" if kind == "language_modeling" else "MC"}ExpectedCalibrationError'
    keys = {'icl_task_type': kind, 'metric_names': [upstream]}

    suite = load_suite([{'label': 'copa', 'dataset_uri': 'x', 'num_fewshot': [0], **keys}])

    assert [metric.name for metric in suite.tasks[0].metrics()] == expected
    assert suite.warnings == (f'copa: metric_names: {upstream} is not supported by this version; it is left out',)


def test_the_metrics_of_choices():
    assert [*OURS] == [
        'GoldBitsPerByte',
        'GoldProbability',
        'CharacterNormalizedMatch',
        'ByteNormalizedMatch',
        'TokenNormalizedMatch',
        'CalibrationError',
        'CalibrationBias',
        'BrierScore',
        'MajorityClass',
    ]


def item(row: int, logprobs: Sequence[float] | None, gold: int = 0, **changes: Any) -> ItemResult:
    """Return an item whose score no metric here uses; choices have two bytes, two characters and one token."""
    number = 0 if logprobs is None else len(logprobs)
    values = {
        'logprobs': None if logprobs is None else tuple(logprobs),
        'cluster': f'{row:016x}',
        **dict.fromkeys(('num_characters', 'num_bytes'), None if logprobs is None else (2,) * number),
        'num_tokens': None if logprobs is None else (1,) * number,
    }
    return clustered_items.item(row, 0.0, gold=gold, **{**values, **changes})


def of_texts(row: int, texts: Sequence[str], logprobs: Sequence[float], gold: int, tokens: Sequence[int]) -> ItemResult:
    return item(
        row,
        logprobs,
        gold,
        num_characters=tuple(map(len, texts)),
        num_bytes=tuple(len(text.encode()) for text in texts),
        num_tokens=tuple(tokens),
    )


def of_shares(row: int, shares: Sequence[float], gold: int) -> ItemResult:
    """Return an item whose choices have these relative probabilities."""
    return item(row, [math.log(share) - 40 for share in shares], gold)


def value(name: str, *results: ItemResult) -> float:
    measure = compute_metric(OURS[name], results)
    assert measure.value is not None, measure.reason
    return measure.value


# 'né' has 3 bytes, '猫の木' 9: with -3 ln 2 and -4.5 ln 2 nats that are 1 and 0.5 bits per byte.
ONE_BIT = of_texts(0, ['na', 'né'], [-1.0, -3 * math.log(2)], gold=1, tokens=[1, 1])
HALF_A_BIT = of_texts(1, ['猫の木', 'cat'], [-4.5 * math.log(2), -9.0], gold=0, tokens=[5, 1])


@pytest.mark.parametrize(
    ('results', 'expected'),
    [
        ([ONE_BIT], 1.0),
        ([HALF_A_BIT], 0.5),
        ([ONE_BIT, HALF_A_BIT], 0.75),  # the mean over items; pooled it were 7.5 / 12
    ],
)
def test_bits_per_byte_use_bytes_of_the_gold_choice(results, expected):
    assert value('GoldBitsPerByte', *results) == pytest.approx(expected, rel=1e-14)


def test_bits_per_byte_of_a_single_continuation():
    one_bit = of_texts(0, ['Zürich'], [-7 * math.log(2)], gold=0, tokens=[2])  # of 7 bytes
    no_bit = of_texts(1, ['Bern'], [0.0], gold=0, tokens=[1])

    measure = task_score('t/0-shot', [gold_bits_per_byte()], [one_bit, no_bit]).accuracy

    assert measure.value == pytest.approx(0.5, rel=1e-14)
    assert measure.standard_error == pytest.approx(0.5, rel=1e-14)


LIKELY = of_shares(0, [0.2, 0.7, 0.1], gold=1)
UNLIKELY = of_shares(1, [0.2, 0.7, 0.1], gold=2)


@pytest.mark.parametrize(
    ('results', 'expected'),
    [
        ([LIKELY], 0.7),
        ([LIKELY, UNLIKELY], 0.4),
    ],
)
def test_gold_probability_is_relative_to_all_choices(results, expected):
    assert value('GoldProbability', *results) == pytest.approx(expected, rel=1e-12)


def test_probabilities_that_are_0_by_themselves_are_still_relative():
    assert value('GoldProbability', item(0, [-2000.0, -2000.0, -3000.0])) == 0.5


# With the same log-probability the longest is best: 8, 5 and 4 characters; 8, 10 and 4 bytes; 1, 2 and 4 tokens.
TEXTS, TOKENS = ['abcdefgh', 'ééééé', '1234'], [1, 2, 4]


@pytest.mark.parametrize(
    ('name', 'logprobs', 'shares'),
    [
        ('CharacterNormalizedMatch', [-6.0, -6.0, -6.0], (1.0, 0.0, 0.0)),
        ('ByteNormalizedMatch', [-6.0, -6.0, -6.0], (0.0, 1.0, 0.0)),
        ('TokenNormalizedMatch', [-6.0, -6.0, -6.0], (0.0, 0.0, 1.0)),
        ('CharacterNormalizedMatch', [-8.0, -5.0, -4.5], (0.5, 0.5, 0.0)),  # -1, -1, -1.125
        ('ByteNormalizedMatch', [-4.0, -5.0, -2.0], (1 / 3, 1 / 3, 1 / 3)),  # -0.5 thrice
        ('TokenNormalizedMatch', [-4.0, -6.0, -12.0], (0.0, 0.5, 0.5)),  # -4, -3, -3
        ('TokenNormalizedMatch', [-4.0, -6.0, -12.000001], (0.0, 0.5, 0.5)),  # but for rounding
        ('TokenNormalizedMatch', [-4.0, -6.0, -12.001], (0.0, 1.0, 0.0)),
    ],
)
def test_the_best_choice_by_length_is_the_prediction_and_a_tie_scores_its_share(
    name: str, logprobs: list[float], shares: tuple[float, ...]
):
    results = [of_texts(gold, TEXTS, logprobs, gold, TOKENS) for gold in range(3)]
    assert tuple(value(name, result) for result in results) == shares
    assert value(name, *results) == pytest.approx(1 / 3)


EMPTY_CHOICE = of_texts(0, ['', 'abcd'], [-1.0, -4.4], gold=0, tokens=[0, 4])


@pytest.mark.parametrize('name', ['CharacterNormalizedMatch', 'ByteNormalizedMatch', 'TokenNormalizedMatch'])
def test_a_choice_without_text_counts_as_one_character(name):
    assert value(name, EMPTY_CHOICE) == 1  # -1 against -1.1


def test_a_gold_choice_without_text_has_one_byte():
    assert value('GoldBitsPerByte', EMPTY_CHOICE) == pytest.approx(1 / math.log(2))


# Bins have a width of 0.1.
CALIBRATION = {
    'two bins': (
        [
            # From 0.8: mean confidence 0.835, one of two right.
            of_shares(0, [0.85, 0.15], 0),
            of_shares(1, [0.18, 0.82], 0),
            # From 0.5: mean confidence 0.53, both right.
            of_shares(2, [0.51, 0.27, 0.22], 0),
            of_shares(3, [0.25, 0.55, 0.2], 1),
        ],
        (2 * 0.335 + 2 * 0.47) / 4,
    ),
    'gaps that cancel in a bin': ([of_shares(row, [0.75, 0.25], int(row == 3)) for row in range(4)], 0),
    'gaps of -0.35 and 0.75 in two bins': ([of_shares(0, [0.65, 0.35], 0), of_shares(1, [0.75, 0.25], 1)], 0.55),
    # One bin, the last, in which half are right with a mean confidence of 0.98.
    'certain and nearly': ([item(0, [0.0, -1000.0], 0), of_shares(1, [0.96, 0.04], 1)], 0.48),
}


@pytest.mark.parametrize('name', CALIBRATION)
def test_the_calibration_error_by_hand(name):
    results, expected = CALIBRATION[name]

    assert value('CalibrationError', *results) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ('result', 'expected'),
    [
        (item(0, [-3.0, -3.0], 1), 0),  # tied choices: confidence 0.5, right by half
        (item(0, [0.0, -1000.0], 0), 0),  # certain and right
        (item(0, [0.0, -1000.0], 1), 1),  # certain and wrong
    ],
)
def test_the_calibration_error_of_a_tie_and_of_certainty_is_exact(result, expected):
    assert value('CalibrationError', result) == expected


@pytest.mark.parametrize(
    ('results', 'expected'),
    [
        ([item(0, [0.0, -1000.0, -1000.0], gold=0)], 0),  # right
        ([item(0, [0.0, -1000.0, -1000.0], gold=2)], 2),  # wrong
        ([item(0, [0.0, -1000.0], gold=0), item(1, [0.0, -1000.0], gold=1)], 1),  # one of each
    ],
)
def test_the_brier_score_of_a_certain_model_is_exactly_0_or_2(results, expected):
    assert value('BrierScore', *results) == expected


@pytest.mark.parametrize(
    ('result', 'expected'),
    [
        (item(0, [-7.0] * 4, gold=3), 0.75**2 + 3 * 0.25**2),  # four that are equally likely
        (of_shares(0, [0.6, 0.3, 0.1], gold=1), 0.36 + 0.49 + 0.01),
    ],
)
def test_the_brier_score_by_hand(result, expected):
    assert value('BrierScore', result) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ('golds', 'expected'),
    [
        ([1, 0, 1, 2], 1 / 2),
        ([0, 1, 0, 1], 1 / 2),  # two that are commonest: one of them
        ([2, 1, 0], 1 / 3),
        ([10, 9, 9, 10, 1], 2 / 5),
        ([3, 3, 3], 1.0),
    ],
)
def test_the_majority_class_scores_the_share_of_the_most_common_gold(golds: list[int], expected: float):
    results = [item(row, None, gold) for row, gold in enumerate(golds)]  # without log-probabilities
    assert value('MajorityClass', *results) == pytest.approx(expected)


def test_the_majority_class_is_found_by_category():
    golds = [('law', 0), ('law', 0), ('law', 1), ('physics', 1), ('physics', 1)]
    results = [item(row, [-1.0, -1.0], gold, category=category) for row, (category, gold) in enumerate(golds)]

    score = task_score('t/0-shot', [OURS['MajorityClass']], results)

    assert score.accuracy.value == pytest.approx((2 / 3 + 1) / 2)  # of all items the second class were 3 of 5


VARIED = [
    of_texts(0, TEXTS, [-6.0, -6.0, -6.0], 0, TOKENS),
    of_texts(1, TEXTS, [-4.0, -5.0, -2.0], 1, TOKENS),
    of_texts(2, TEXTS, [-4.0, -6.0, -12.0], 2, TOKENS),
    of_texts(3, TEXTS, [-9.0, -5.0, -1.0], 0, TOKENS),
]
CALIBRATED = ('CalibrationError', 'CalibrationBias')  # whose values of items depend on each other


@pytest.mark.parametrize('name', sorted(OURS.keys() - {*CALIBRATED, 'MajorityClass'}))
def test_errors_are_those_of_the_values_of_items(name):
    measure = compute_metric(OURS[name], VARIED)

    values = [value(name, result) for result in VARIED]
    assert measure.standard_error == pytest.approx(clustered_items.usual_error(values), rel=1e-12)


@pytest.mark.parametrize('name', CALIBRATED)
def test_metrics_of_calibration_have_no_error(name):
    assert compute_metric(OURS[name], VARIED).standard_error is None


@pytest.mark.parametrize('name', sorted(OURS.keys() - {*CALIBRATED, 'MajorityClass'}))
def test_metrics_with_two_bounds_have_wilsons_interval(name):
    has_two_bounds = name.endswith('Match') or name in ('GoldProbability', 'BrierScore')

    assert (compute_metric(OURS[name], VARIED).spread.num_items is not None) == has_two_bounds


def absent(name: str, *results: ItemResult) -> str | None:
    """Return the reason why a metric is absent."""
    measure = compute_metric(OURS[name], results)
    assert (measure.value, measure.standard_error) == (None, None)
    return measure.reason


@pytest.mark.parametrize('broken', [None, [math.nan, -1.0], [-1.0, -math.inf]])
@pytest.mark.parametrize('name', sorted(OURS.keys() - {'MajorityClass'}))
def test_metrics_need_finite_log_probabilities_of_all_items(name: str, broken: list[float] | None):
    lengths = {'num_tokens': (1, 1), 'num_characters': (2, 2), 'num_bytes': (2, 2)}
    results = [item(0, [-1.0, -2.0], **lengths), item(1, broken, **lengths)]
    assert absent(name, *results) == '1 of 2 items have no finite log-probabilities'


@pytest.mark.parametrize(
    ('name', 'key'),
    [
        ('GoldBitsPerByte', 'num_bytes'),
        ('CharacterNormalizedMatch', 'num_characters'),
        ('ByteNormalizedMatch', 'num_bytes'),
        ('TokenNormalizedMatch', 'num_tokens'),
    ],
)
def test_normalizations_need_the_lengths_of_all_choices(name: str, key: str):
    results = [item(0, [-1.0, -2.0]), item(1, [-1.0, -2.0], **{key: None}), item(2, [-1.0, -2.0], **{key: None})]

    assert absent(name, *results) == 'the lengths of choices are not known of 2 of 3 items'
    for other in OURS.keys() - {'GoldBitsPerByte', 'ByteNormalizedMatch', name}:
        assert compute_metric(OURS[other], results).value is not None


LOGPROBS = st.lists(st.floats(-50, 0), min_size=3, max_size=3)
LENGTHS = st.lists(st.integers(0, 30), min_size=3, max_size=3)


@given(st.data())
def test_the_order_of_items_changes_no_bit_of_any_metric(data):
    rows = data.draw(st.lists(st.tuples(LOGPROBS, LENGTHS, st.integers(0, 2), st.integers(0, 3)), min_size=1))
    results = [
        item(
            row,
            logprobs,
            gold,
            num_characters=tuple(lengths),
            num_bytes=tuple(2 * length for length in lengths),
            cluster=f'{cluster:016x}',
        )
        for row, (logprobs, lengths, gold, cluster) in enumerate(rows)
    ]
    shuffled = data.draw(st.permutations(results))
    for metric in OURS.values():
        measure, of_shuffled = compute_metric(metric, results), compute_metric(metric, shuffled)
        assert measure.value is not None
        assert (measure.value, measure.standard_error) == (of_shuffled.value, of_shuffled.standard_error)
