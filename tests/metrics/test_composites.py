import math

import pytest

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.composites import compute_composites
from llmfoundry_gauntlet.types import Measure


def gauntlet(**keys):
    block = {
        'categories': [
            {
                'name': 'knowledge',
                'benchmarks': [
                    {'name': 'a', 'num_fewshot': 0, 'random_baseline': 0.25},
                    {'name': 'b', 'num_fewshot': 3, 'random_baseline': 0.0},
                ],
            },
            {'name': 'safety', 'benchmarks': [{'name': 'c', 'num_fewshot': 0, 'random_baseline': 0.5}]},
        ],
        'averages': {'core': ['knowledge', 'safety'], 'half': ['knowledge']},
        **keys,
    }
    return load_suite(None, block).gauntlet


def values(**accuracies: float) -> dict[str, Measure]:
    names = {'a': 'a/0-shot', 'b': 'b/3-shot', 'c': 'c/0-shot'}
    return {names[name]: Measure(value=value) for name, value in accuracies.items()}


SIZES = {'a/0-shot': 300, 'b/3-shot': 100, 'c/0-shot': 1}


@pytest.mark.parametrize(
    ('weighting', 'expected'),
    [
        ('EQUAL', (0.2 + 0.1) / 2),
        ('SAMPLE_SZ', (0.2 * 300 + 0.1 * 100) / 400),
        ('LOG_SAMPLE_SZ', (0.2 * math.log2(300) + 0.1 * math.log2(100)) / (math.log2(300) + math.log2(100))),
    ],
)
def test_a_category_is_the_weighted_mean_of_accuracies_above_chance(weighting: str, expected: float):
    # (0.4 - 0.25) / 0.75 = 0.2
    found = compute_composites(gauntlet(weighting=weighting), values(a=0.4, b=0.1, c=0.4), SIZES, reference=False)
    assert found.categories['knowledge'].value == pytest.approx(expected)
    assert found.categories['safety'].value == pytest.approx(-0.2)
    assert found.averages['core'].value == pytest.approx((expected - 0.2) / 2)
    assert found.averages['half'].value == pytest.approx(expected)


@pytest.mark.parametrize(
    ('keys', 'expected'),
    [
        ({'rescale_accuracy': False}, (0.15 + 0.1) / 2),
        ({'rescale_accuracy': False, 'subtract_random_baseline': False}, (0.4 + 0.1) / 2),
    ],
)
def test_without_baseline_and_rescaling(keys: dict, expected: float):
    found = compute_composites(gauntlet(**keys), values(a=0.4, b=0.1, c=0.4), SIZES, reference=False)
    assert found.categories['knowledge'].value == pytest.approx(expected)


def test_the_default_average_is_over_all_categories():
    found = compute_composites(gauntlet(averages=None), values(a=0.4, b=0.1, c=0.4), SIZES, reference=False)
    assert found.averages['default_average'].value == pytest.approx((0.15 - 0.2) / 2)


def test_composites_that_cannot_be_computed_have_a_reason():
    """Fix 8: the reference drops the category and averages the others."""
    accuracies = {**values(a=0.4, c=0.4), 'b/3-shot': Measure(value=None, reason='2 of 9 items unscored: nan')}
    found = compute_composites(gauntlet(), accuracies, SIZES, reference=False)
    assert found.categories['knowledge'].reason == 'benchmarks without a score: b/3-shot (2 of 9 items unscored: nan)'
    assert found.averages['core'].reason == 'categories without a score: knowledge'
    assert found.categories['safety'].value == pytest.approx(-0.2)
    assert found.averages['core'].value is None


def test_the_reference_averages_over_the_remaining_categories():
    found = compute_composites(gauntlet(), values(a=0.4, c=0.4), SIZES, reference=True)
    assert found.categories['knowledge'].reason == 'benchmarks without a score: b/3-shot (did not run)'
    assert found.averages['core'].value == pytest.approx(-0.2)
    assert found.averages['half'].value == 0


def test_an_average_over_an_unknown_category():
    spec = gauntlet(averages={'core': ['knowledge', 'programming']})
    accuracies = values(a=0.4, b=0.1, c=0.4)
    corrected = compute_composites(spec, accuracies, SIZES, reference=False).averages['core']
    assert corrected.reason == 'the gauntlet has no category programming'
    assert compute_composites(spec, accuracies, SIZES, reference=True).averages['core'].value == pytest.approx(0.15)


def test_absent_benchmarks_are_grouped_by_reason():
    found = compute_composites(gauntlet(), values(c=0.4), SIZES, reference=False)
    assert found.categories['knowledge'].reason == 'benchmarks without a score: a/0-shot, b/3-shot (did not run)'
