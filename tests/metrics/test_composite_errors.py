"""Standard errors of composites by hand, and in the metric stream."""

import itertools
import math

import pytest
from clustered_items import METRIC, credits_of, item, usual_error

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.composites import compute_composites
from llmfoundry_gauntlet.metrics.keys import metric_stream
from llmfoundry_gauntlet.metrics.metrics import accuracy, item_metric, task_score
from llmfoundry_gauntlet.types import Composites, Measure

CREDITS = {
    'a/0-shot': [1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0, 1.0],
    'b/3-shot': [0.0, 1.0, 0.0, 0.0],
    'c/0-shot': [1.0, 1.0, 0.0, 1.0, 0.0],
}
SIZES = {'a/0-shot': 300, 'b/3-shot': 100, 'c/0-shot': 1}
A, B, C = (usual_error(credits) for credits in CREDITS.values())


def composites(measures=None, *, reference: bool = False, **keys) -> Composites:
    block = {
        'categories': [
            {
                'name': 'knowledge',
                'benchmarks': [
                    {'name': 'a', 'num_fewshot': 0, 'random_baseline': 0.25},
                    {'name': 'b', 'num_fewshot': 3},
                ],
            },
            {'name': 'safety', 'benchmarks': [{'name': 'c', 'num_fewshot': 0, 'random_baseline': 0.5}]},
        ],
        'averages': {'core': ['knowledge', 'safety'], 'half': ['knowledge']},
        **keys,
    }
    measures = measures or {task: credits_of(task, credits) for task, credits in CREDITS.items()}
    return compute_composites(load_suite(None, block).gauntlet, measures, SIZES, reference=reference)


@pytest.mark.parametrize('reference', [False, True])
@pytest.mark.parametrize(
    ('weighting', 'a', 'b'),
    [('EQUAL', 1, 1), ('SAMPLE_SZ', 300, 100), ('LOG_SAMPLE_SZ', math.log2(300), math.log2(100))],
)
def test_the_error_of_a_category_by_hand(weighting: str, a: float, b: float, reference: bool):
    found = composites(weighting=weighting, reference=reference)
    knowledge = math.hypot(a * A / 0.75, b * B) / (a + b)
    safety = C / 0.5
    assert found.categories['knowledge'].standard_error == pytest.approx(knowledge, rel=1e-14)
    assert found.categories['safety'].standard_error == pytest.approx(safety, rel=1e-14)
    assert found.averages['core'].standard_error == pytest.approx(math.hypot(knowledge, safety) / 2, rel=1e-14)
    assert found.averages['half'].standard_error == pytest.approx(knowledge, rel=1e-14)


@pytest.mark.parametrize('subtract', [True, False])
def test_errors_without_rescaling(subtract: bool):
    found = composites(rescale_accuracy=False, subtract_random_baseline=subtract)
    assert found.categories['safety'].standard_error == pytest.approx(C, rel=1e-14)
    assert found.categories['knowledge'].standard_error == pytest.approx(math.hypot(A, B) / 2, rel=1e-14)


def test_a_benchmark_in_two_categories_contributes_to_both_errors():
    found = composites(
        categories=[
            {
                'name': 'knowledge',
                'benchmarks': [
                    {'name': 'a', 'num_fewshot': 0, 'random_baseline': 0.5},
                    {'name': 'b', 'num_fewshot': 3},
                ],
            },
            {'name': 'safety', 'benchmarks': [{'name': 'a', 'num_fewshot': 0}, {'name': 'c', 'num_fewshot': 0}]},
        ]
    )
    knowledge, safety = math.hypot(2 * A, B) / 2, math.hypot(A, C) / 2
    assert found.categories['knowledge'].standard_error == pytest.approx(knowledge, rel=1e-14)
    assert found.categories['safety'].standard_error == pytest.approx(safety, rel=1e-14)
    # Var((k + s) / 2) with the covariance of k and s, which is that of A: (2 A / 2) (A / 2)
    covariance = (2 * A / 2) * (A / 2)
    expected = math.sqrt(knowledge**2 + safety**2 + 2 * covariance) / 2
    assert found.averages['core'].standard_error == pytest.approx(expected, rel=1e-14)
    assert expected > math.hypot(knowledge, safety) / 2


def test_a_composite_with_an_unknown_error_has_no_error():
    measures = {task: credits_of(task, credits) for task, credits in CREDITS.items()}
    found = composites({**measures, 'b/3-shot': credits_of('b/3-shot', [1.0])})
    assert found.categories['knowledge'].value is not None
    assert found.categories['knowledge'].standard_error is None
    assert (found.averages['core'].value is None, found.averages['core'].standard_error) == (False, None)
    assert found.categories['safety'].standard_error == pytest.approx(2 * C)


def test_reference_averages_have_the_error_of_their_parts():
    absent = Measure(value=None, reason='did not run')
    measures = {task: credits_of(task, credits) for task, credits in CREDITS.items()}
    found = composites({**measures, 'a/0-shot': absent}, reference=True)
    assert found.categories['knowledge'].standard_error is None
    assert found.averages['core'].standard_error == pytest.approx(2 * C)
    assert (found.averages['half'].value, found.averages['half'].standard_error) == (0, None)


def test_the_metric_stream_has_errors_beside_values():
    rows = itertools.count()
    parts = {'law': [(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)], 'physics': [(1.0, 0.0), (0.0, 0.0)]}
    results = [
        item(next(rows), credit, category=name, metrics={'StrictMatch': strict})
        for name, pairs in parts.items()
        for credit, strict in pairs
    ]
    score = task_score('a/0-shot', [accuracy(METRIC), item_metric('StrictMatch')], results)
    stream = metric_stream({'a/0-shot': score}, composites(), {}, {})
    law, physics = usual_error([1, 0, 0]), usual_error([1, 0])
    strict_law = usual_error([1, 0, 1])
    knowledge, safety = math.hypot(A / 0.75, B) / 2, C / 0.5
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
    results = [item(0, 1.0, category='law'), item(1, 0.0, category='law'), item(2, 1.0, category='physics')]
    score = task_score('a/0-shot', [accuracy(METRIC), item_metric('StrictMatch')], results)
    lone = {'a/0-shot': credits_of('a/0-shot', [1.0]), 'b/3-shot': credits_of('b/3-shot', [0.0, 1.0])}
    found = composites({**lone, 'c/0-shot': credits_of('c/0-shot', [0.0, 1.0])})
    stream = metric_stream({'a/0-shot': score}, found, {}, {})
    assert stream['metrics/a/0-shot/physics/Accuracy'] == 1
    assert stream['metrics/a/0-shot/Accuracy'] == 0.75
    assert stream['icl/metrics/eval_gauntlet/half'] == pytest.approx(0.75)
    assert {key for key in stream if 'rror' in key} == {
        'metrics/a/0-shot/law/StandardError',
        'metrics/a/0-shot/StandardError',
        'icl/metrics/eval_gauntlet/safety/standard_error',
    }
