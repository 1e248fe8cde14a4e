"""Composites and their standard errors by hand, both in the metric stream."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from clustered_items import METRIC, credits_of, item, usual_error

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.composites import compute_composites, compute_gold_bits
from llmfoundry_gauntlet.metrics.keys import metric_stream
from llmfoundry_gauntlet.metrics.metrics import accuracy, gold_bits_of_generations, item_metric, task_score
from llmfoundry_gauntlet.types import Composites, Measure

CREDITS = {
    'a/0-shot': [1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0, 1.0],
    'b/3-shot': [0.0, 1.0, 0.0, 0.0],
    'c/0-shot': [1.0, 1.0, 0.0, 1.0, 0.0],
}
SIZES = {'a/0-shot': 300, 'b/3-shot': 100, 'c/0-shot': 1}
A, B, C = (usual_error(credits) for credits in CREDITS.values())
SCORED = {task: credits_of(task, credits) for task, credits in CREDITS.items()}
VALUES = {task: Measure(value=value) for task, value in zip(CREDITS, (0.4, 0.1, 0.4), strict=True)}
UNSCORED = Measure(value=None, reason='2 of 9 items unscored: nan')


def benchmark(name: str, baseline: float = 0.0) -> dict[str, Any]:
    return {'name': name, 'num_fewshot': 3 if name == 'b' else 0, 'random_baseline': baseline}


def gauntlet(knowledge: list[dict[str, Any]], safety: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    categories = [{'name': 'knowledge', 'benchmarks': knowledge}, {'name': 'safety', 'benchmarks': safety}]
    return {'categories': categories, 'averages': {'core': ['knowledge', 'safety'], 'half': ['knowledge']}, **keys}


def composites(measures: Mapping[str, Measure], *, reference: bool = False, **keys: Any) -> Composites:
    block = gauntlet([benchmark('a', 0.25), benchmark('b')], [benchmark('c', 0.5)])
    return compute_composites(load_suite(None, {**block, **keys}).gauntlet, measures, SIZES, reference=reference)


def errors_of(computed: Composites) -> dict[str, float | None]:
    return {name: measure.standard_error for name, measure in computed.by_name.items()}


WEIGHTINGS = [
    # The weights of a, of 300 items, and b, of 100.
    ('EQUAL', 1, 1),
    ('SAMPLE_SZ', 300, 100),
    ('LOG_SAMPLE_SZ', math.log2(300), math.log2(100)),
]


@pytest.mark.parametrize('reference', [False, True])
@pytest.mark.parametrize(('weighting', 'a', 'b'), WEIGHTINGS)
def test_a_category_is_the_weighted_mean_of_accuracies_above_chance(weighting, a, b, reference: bool):
    computed = composites(VALUES, weighting=weighting, reference=reference)

    knowledge = (0.2 * a + 0.1 * b) / (a + b)  # (0.4 - 0.25) / 0.75 = 0.2
    assert {name: measure.value for name, measure in computed.by_name.items()} == pytest.approx(
        {'knowledge': knowledge, 'safety': -0.2, 'core': (knowledge - 0.2) / 2, 'half': knowledge}
    )


@pytest.mark.parametrize('reference', [False, True])
@pytest.mark.parametrize(('weighting', 'a', 'b'), WEIGHTINGS)
def test_errors_of_tasks_add_in_quadrature_with_their_weights(weighting, a, b, reference: bool):
    computed = composites(SCORED, weighting=weighting, reference=reference)

    knowledge = math.hypot(a * A / 0.75, b * B) / (a + b)
    safety = C / 0.5
    assert errors_of(computed) == pytest.approx(
        {'knowledge': knowledge, 'safety': safety, 'core': math.hypot(knowledge, safety) / 2, 'half': knowledge},
        rel=1e-14,
    )


@pytest.mark.parametrize(
    ('subtract', 'knowledge'),
    [
        (True, (0.15 + 0.1) / 2),  # 0.4 - 0.25 = 0.15
        (False, (0.4 + 0.1) / 2),
    ],
)
def test_without_rescaling_a_category_is_the_mean_with_or_without_chance(subtract: bool, knowledge: float):
    computed = composites(VALUES, rescale_accuracy=False, subtract_random_baseline=subtract)

    assert computed.categories['knowledge'].value == pytest.approx(knowledge)


@pytest.mark.parametrize('subtract', [True, False])
def test_without_rescaling_errors_are_those_of_accuracies(subtract: bool):
    errors = errors_of(composites(SCORED, rescale_accuracy=False, subtract_random_baseline=subtract))

    assert errors['knowledge'] == pytest.approx(math.hypot(A, B) / 2, rel=1e-14)
    assert errors['safety'] == pytest.approx(C, rel=1e-14)


# Bits per byte of gold answers: a loss.

BITS = {
    'a/0-shot': [1.0, 2.0, 3.0],
    'b/3-shot': [0.5, 0.75],
    'c/0-shot': [4.0, 4.0, 5.0, 7.0],
}


def bits_of(task: str, bits: list[float]) -> Measure:
    """Return the measure of a task that generates."""
    results = [item(row, 0.0, task=task, metrics={'GoldBitsPerByte': value}) for row, value in enumerate(bits)]
    return task_score(task, [gold_bits_of_generations()], results).accuracy


def gold_bits(measures: Mapping[str, Measure], **keys: Any) -> dict[str, Measure]:
    block = gauntlet([benchmark('a', 0.25), benchmark('b')], [benchmark('c', 0.5)])
    return compute_gold_bits(load_suite(None, {**block, **keys}).gauntlet, measures, SIZES)


@pytest.mark.parametrize(('weighting', 'a', 'b'), WEIGHTINGS)
def test_gold_bits_are_weighted_means_without_chance(weighting, a, b):
    """Mutation: chance is subtracted, or the sign is turned."""
    computed = gold_bits({task: bits_of(task, bits) for task, bits in BITS.items()}, weighting=weighting)

    knowledge = (2.0 * a + 0.625 * b) / (a + b)
    expected = {'knowledge': knowledge, 'safety': 5.0, 'core': (knowledge + 5.0) / 2, 'half': knowledge}
    assert {name: measure.value for name, measure in computed.items()} == pytest.approx(expected)
    # The error of a mean is s / sqrt(n): 1 / sqrt(3), sqrt(1 / 32) / sqrt(2) and sqrt(2) / 2.
    of_knowledge = math.hypot(a / math.sqrt(3), b / 8) / (a + b)
    errors = {name: measure.standard_error for name, measure in computed.items()}
    assert errors['knowledge'] == pytest.approx(of_knowledge)
    assert errors['safety'] == pytest.approx(math.sqrt(2) / 2)
    assert errors['core'] == pytest.approx(math.hypot(of_knowledge, math.sqrt(2) / 2) / 2)


def test_gold_bits_over_a_task_that_lacks_them_have_a_reason():
    measures = {task: bits_of(task, bits) for task, bits in BITS.items()}

    computed = gold_bits({**measures, 'b/3-shot': Measure(value=None, reason='its type has no GoldBitsPerByte')})

    reason = 'benchmarks without a score: b/3-shot (its type has no GoldBitsPerByte)'
    assert computed['knowledge'].reason == reason
    assert computed['core'].reason == 'categories without a score: knowledge'
    assert computed['safety'].value == pytest.approx(5.0)


def test_gold_bits_have_keys_of_their_own_in_the_metric_stream():
    measures = {task: bits_of(task, bits) for task, bits in BITS.items()}
    of_accuracies = composites(SCORED)
    both = replace(of_accuracies, gold_bits=gold_bits(measures))

    stream = metric_stream({}, both, {}, {}, ['composites', 'errors'])

    prefix = 'icl/metrics/eval_gauntlet'
    assert stream[f'{prefix}/safety/gold_bits_per_byte'] == pytest.approx(5.0)
    assert stream[f'{prefix}/safety/gold_bits_per_byte/standard_error'] == pytest.approx(math.sqrt(2) / 2)
    # The other keys are as without them.
    others = {key: value for key, value in stream.items() if 'gold_bits_per_byte' not in key}
    assert others == metric_stream({}, of_accuracies, {}, {}, ['composites', 'errors'])


def test_averages_are_over_all_categories_by_default():
    computed = composites(VALUES, averages=None)

    assert computed.averages['default_average'].value == pytest.approx((0.15 - 0.2) / 2)


WITH_AN_UNKNOWN_CATEGORY = {'core': ['knowledge', 'programming']}


def test_averages_need_each_of_their_categories():
    computed = composites(VALUES, averages=WITH_AN_UNKNOWN_CATEGORY)

    assert computed.averages['core'].reason == 'the gauntlet has no category programming'


def test_averages_of_the_reference_ignore_an_unknown_category():
    computed = composites(VALUES, averages=WITH_AN_UNKNOWN_CATEGORY, reference=True)

    assert computed.averages['core'].value == pytest.approx(0.15)


def test_composites_over_a_task_with_unscored_items_have_a_reason():
    """Fix 8: the reference drops the category and averages the others."""
    computed = composites({**VALUES, 'b/3-shot': UNSCORED})

    knowledge = computed.categories['knowledge']
    assert knowledge.reason == 'benchmarks without a score: b/3-shot (2 of 9 items unscored: nan)'
    assert computed.categories['safety'].value == pytest.approx(-0.2)
    assert computed.averages['core'].value is None
    assert computed.averages['core'].reason == 'categories without a score: knowledge'


def test_composites_over_tasks_that_did_not_run_have_a_reason():
    computed = composites({'c/0-shot': VALUES['c/0-shot']})

    assert computed.categories['knowledge'].reason == 'benchmarks without a score: a/0-shot, b/3-shot (did not run)'


def test_the_reference_averages_over_the_remaining_categories():
    without_b = {task: SCORED[task] for task in ('a/0-shot', 'c/0-shot')}

    computed = composites(without_b, reference=True)

    assert computed.categories['knowledge'].reason == 'benchmarks without a score: b/3-shot (did not run)'
    assert computed.averages['core'].value == pytest.approx((0.6 - 0.5) / 0.5)
    assert errors_of(computed) == {
        'knowledge': None,
        'safety': pytest.approx(2 * C),
        'core': pytest.approx(2 * C),
        'half': None,
    }
    assert computed.averages['half'].value == 0


def test_a_benchmark_in_two_categories_contributes_to_both_errors():
    block = gauntlet([benchmark('a', 0.5), benchmark('b')], [benchmark('a'), benchmark('c')])

    errors = errors_of(composites(SCORED, categories=block['categories']))

    knowledge = math.hypot(2 * A, B) / 2
    safety = math.hypot(A, C) / 2
    # Var((k + s) / 2) with the covariance of k and s, which is that of A.
    covariance = (2 * A / 2) * (A / 2)
    core = math.sqrt(knowledge**2 + safety**2 + 2 * covariance) / 2
    assert errors['knowledge'] == pytest.approx(knowledge, rel=1e-14)
    assert errors['safety'] == pytest.approx(safety, rel=1e-14)
    assert errors['core'] == pytest.approx(core, rel=1e-14)
    assert core > math.hypot(knowledge, safety) / 2


def test_the_metric_stream_has_errors_beside_values():
    results = [
        item(0, 1.0, category='law', metrics={'StrictMatch': 1.0}),
        item(1, 0.0, category='law', metrics={'StrictMatch': 0.0}),
        item(2, 0.0, category='law', metrics={'StrictMatch': 1.0}),
        item(3, 1.0, category='physics', metrics={'StrictMatch': 0.0}),
        item(4, 0.0, category='physics', metrics={'StrictMatch': 0.0}),
    ]
    score = task_score('a/0-shot', [accuracy(METRIC), item_metric('StrictMatch')], results)

    stream = metric_stream({'a/0-shot': score}, composites(SCORED), {}, {})

    law = usual_error([1, 0, 0])
    physics = usual_error([1, 0])
    strict_law = usual_error([1, 0, 1])
    knowledge = math.hypot(A / 0.75, B) / 2
    safety = C / 0.5
    errors = {
        'metrics/a/0-shot/law/StandardError': law,
        'metrics/a/0-shot/law/StrictMatchStandardError': strict_law,
        'metrics/a/0-shot/physics/StandardError': physics,
        'metrics/a/0-shot/physics/StrictMatchStandardError': 0,
        'metrics/a/0-shot/StandardError': math.hypot(law, physics) / 2,
        'metrics/a/0-shot/StrictMatchStandardError': strict_law / 2,
        'icl/metrics/eval_gauntlet/knowledge/standard_error': knowledge,
        'icl/metrics/eval_gauntlet/safety/standard_error': safety,
        'icl/metrics/eval_gauntlet/core/standard_error': math.hypot(knowledge, safety) / 2,
        'icl/metrics/eval_gauntlet/half/standard_error': knowledge,
    }
    assert {key: value for key, value in stream.items() if 'rror' in key} == pytest.approx(errors, rel=1e-14)
    assert stream['metrics/a/0-shot/law/Accuracy'] == pytest.approx(1 / 3)
    assert stream['metrics/a/0-shot/StrictMatch'] == pytest.approx(1 / 3)
    assert 'icl/metrics/eval_gauntlet/core' in stream


def test_the_error_of_a_single_item_is_absent_from_the_stream():
    results = [
        item(0, 1.0, category='law'),
        item(1, 1.0, category='law'),
        item(2, 1.0, category='physics'),
    ]
    score = task_score('a/0-shot', [accuracy(METRIC)], results)
    with_a_single_item = {**SCORED, 'a/0-shot': credits_of('a/0-shot', [1.0])}

    stream = metric_stream({'a/0-shot': score}, composites(with_a_single_item), {}, {})

    assert stream['metrics/a/0-shot/physics/Accuracy'] == 1
    assert stream['metrics/a/0-shot/Accuracy'] == 1
    assert {key for key in stream if 'rror' in key} == {
        'metrics/a/0-shot/law/StandardError',
        'metrics/a/0-shot/StandardError',
        'icl/metrics/eval_gauntlet/safety/standard_error',
    }
