"""Allocation of items to tasks within a time budget."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.config.yaml import Problems, decode
from llmfoundry_gauntlet.metrics.composites import TaskCosts, allocate, influences

TASKS = st.dictionaries(
    st.sampled_from('abcdef'),
    st.builds(
        TaskCosts,
        seconds=st.floats(0.001, 1),
        share_right=st.floats(0, 1),
        num_measured=st.integers(0, 500),
        least=st.integers(1, 5),
        most=st.integers(5, 400),
        weight=st.floats(0.05, 2),
    ),
    min_size=1,
)


def task(**changes) -> TaskCosts:
    values = {'seconds': 0.1, 'share_right': 0.5, 'num_measured': 1000, 'least': 1, 'most': 10**6, 'weight': 1.0}
    return TaskCosts(**{**values, **changes})


def variance(tasks: dict[str, TaskCosts], sizes: dict[str, int]) -> float:
    """Return the variance of the weighted sum of accuracies."""
    return sum((one.weight * one.deviation) ** 2 / sizes[key] for key, one in tasks.items())


@given(TASKS, st.floats(0.1, 100))
def test_allocations_keep_the_time_and_the_bounds_of_tasks(tasks, seconds):
    sizes = allocate(tasks, seconds)
    assert all(one.least <= sizes[key] <= one.most for key, one in tasks.items())
    taken = sum(tasks[key].seconds * number for key, number in sizes.items())
    least = sum(one.seconds * one.least for one in tasks.values())
    assert taken <= max(seconds, least) + 1e-9
    more = [one for key, one in tasks.items() if sizes[key] < one.most]
    if more and least < seconds:  # nothing is left over that would buy an item of every task
        assert taken + sum(one.seconds for one in more) * 1.01 > seconds - 1e-9


@given(TASKS, st.floats(1, 20), st.floats(1, 3))
def test_more_time_never_removes_items(tasks, seconds, factor):
    less, more = allocate(tasks, seconds), allocate(tasks, seconds * factor)
    assert all(more[key] >= less[key] for key in tasks)


def test_allocations_are_optimal():
    tasks = {
        'dear': task(seconds=0.4),
        'sure': task(share_right=0.02),
        'heavy': task(weight=3.0),
        'plain': task(),
    }
    sizes = allocate(tasks, 400.0)
    best = variance(tasks, sizes)
    for gains, loses in itertools.permutations(tasks, 2):
        moved = dict(sizes)
        for step in (5, 50):
            moved[loses] = sizes[loses] - step
            moved[gains] = sizes[gains] + int(step * tasks[loses].seconds / tasks[gains].seconds)
            assert variance(tasks, moved) > best * (1 - 1e-4)
    assert sizes['heavy'] > sizes['plain'] > max(sizes['dear'], sizes['sure'])
    assert sizes['heavy'] / sizes['plain'] == pytest.approx(3, rel=0.01)
    assert sizes['plain'] / sizes['dear'] == pytest.approx(2, rel=0.01)  # the root of four times the time


def test_few_measurements_do_not_imply_low_variance():
    assert task(share_right=0.0, num_measured=0).deviation == 0.5
    assert task(share_right=0.0, num_measured=8).deviation == pytest.approx(math.sqrt(0.25 * 0.75))
    assert task(share_right=0.0, num_measured=10**6).deviation < 0.01


def test_everything_is_allocated_if_it_fits():
    tasks = {'a': task(most=30), 'b': task(most=50, share_right=0.0)}
    assert allocate(tasks, 8.1) == {'a': 30, 'b': 50}


def gauntlet(**keys) -> GauntletSpec:
    categories = [
        {
            'name': 'one',
            'benchmarks': [
                {'name': 'a', 'num_fewshot': 0, 'random_baseline': 0.5},
                {'name': 'b', 'num_fewshot': 0, 'random_baseline': 0.0},
            ],
        },
        {'name': 'two', 'benchmarks': [{'name': 'b', 'num_fewshot': 0, 'random_baseline': 0.0}]},
    ]
    return decode(GauntletSpec, {'categories': categories, **keys}, '', Problems('test'))


def test_influence_sums_over_composites():
    sizes = {'a/0-shot': 100, 'b/0-shot': 300, 'c/0-shot': 7}
    found = influences(gauntlet(), sizes)
    assert found['a/0-shot'] == pytest.approx(math.hypot(1, 1 / 2))  # in category one, rescaled, and in the average
    assert found['b/0-shot'] == pytest.approx(math.hypot(1 / 2, 1, 3 / 4))  # in one, in two, and in the average
    mean = math.sqrt((found['a/0-shot'] ** 2 + found['b/0-shot'] ** 2) / 2)
    assert found['c/0-shot'] == pytest.approx(mean)
    weighted = influences(gauntlet(weighting='SAMPLE_SZ'), sizes)
    assert weighted['a/0-shot'] == pytest.approx(math.hypot(1 / 2, 1 / 4))
    assert influences(None, sizes) == dict.fromkeys(sizes, 1.0)
