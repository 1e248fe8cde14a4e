"""Allocation of questions to tasks: within a cost, or up to a precision."""

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
        cost=st.floats(0.001, 1),
        deviation=st.floats(0.01, 1),
        least=st.integers(1, 5),
        most=st.integers(5, 400),
    ),
    min_size=1,
)


def task(**changes) -> TaskCosts:
    return TaskCosts(**{'cost': 0.1, 'deviation': 0.5, 'least': 1, 'most': 10**6, **changes})


def cost_of(tasks: dict[str, TaskCosts], sizes: dict[str, int]) -> float:
    return math.fsum(tasks[key].cost * number for key, number in sizes.items())


def variance(tasks: dict[str, TaskCosts], sizes: dict[str, int]) -> float:
    """Return the variance of the sum of scores."""
    return sum(one.deviation**2 / sizes[key] for key, one in tasks.items())


def within(tasks: dict[str, TaskCosts], cost: float) -> dict[str, int]:
    return allocate(tasks, lambda sizes: cost_of(tasks, sizes) <= cost)[0]


@given(TASKS, st.floats(0.1, 100))
def test_allocations_keep_the_cost_and_the_bounds_of_tasks(tasks, cost):
    sizes = within(tasks, cost)
    assert all(one.least <= sizes[key] <= one.most for key, one in tasks.items())
    taken = cost_of(tasks, sizes)
    least = sum(one.cost * one.least for one in tasks.values())
    assert taken <= max(cost, least) + 1e-9
    more = [one for key, one in tasks.items() if sizes[key] < one.most]
    if more and least < cost:  # nothing is left over that would buy an item of every task
        assert taken + sum(one.cost for one in more) * 1.01 > cost - 1e-9


@given(TASKS, st.floats(1, 20), st.floats(1, 3))
def test_a_higher_cost_never_removes_items(tasks, cost, factor):
    less, more = within(tasks, cost), within(tasks, cost * factor)
    assert all(more[key] >= less[key] for key in tasks)


@given(TASKS, st.floats(1, 1.5))
def test_a_precision_is_reached_by_no_more_than_is_needed(tasks, factor):
    limit = variance(tasks, {key: one.most for key, one in tasks.items()}) * factor
    before, found = allocate(tasks, lambda sizes: variance(tasks, sizes) > limit)
    assert variance(tasks, found) <= limit * (1 + 1e-12)
    assert before == found or variance(tasks, before) > limit
    assert all(0 <= found[key] - before[key] <= 1 for key in tasks)  # neighbours in the series


def test_allocations_are_optimal():
    tasks = {'dear': task(cost=0.4), 'sure': task(deviation=0.14), 'heavy': task(deviation=1.5), 'plain': task()}
    sizes = within(tasks, 400.0)
    best = variance(tasks, sizes)
    for gains, loses in itertools.permutations(tasks, 2):
        moved = dict(sizes)
        for step in (5, 50):
            moved[loses] = sizes[loses] - step
            moved[gains] = sizes[gains] + int(step * tasks[loses].cost / tasks[gains].cost)
            assert variance(tasks, moved) > best * (1 - 1e-4)
    assert sizes['heavy'] > sizes['plain'] > max(sizes['dear'], sizes['sure'])
    assert sizes['heavy'] / sizes['plain'] == pytest.approx(3, rel=0.01)
    assert sizes['plain'] / sizes['dear'] == pytest.approx(2, rel=0.01)  # the root of four times the cost


def test_everything_is_allocated_if_it_fits_and_the_least_if_nothing_does():
    tasks = {'a': task(most=30), 'b': task(most=50, least=3, deviation=0.0)}
    assert within(tasks, 8.1) == {'a': 30, 'b': 50}
    assert within(tasks, 0.3) == {'a': 1, 'b': 3}
    assert allocate(tasks, lambda sizes: sizes['a'] < 10)[1] == {'a': 10, 'b': 3}


def gauntlet(**keys) -> GauntletSpec:
    a, b = ({'name': name, 'num_fewshot': 0, 'random_baseline': chance} for name, chance in (('a', 0.5), ('b', 0.0)))
    categories = [{'name': 'one', 'benchmarks': [a, b]}, {'name': 'two', 'benchmarks': [b]}]
    return decode(GauntletSpec, {'categories': categories, **keys}, '', Problems('test'))


FILE_SIZES = {'a/0-shot': 100, 'b/0-shot': 300, 'c/0-shot': 7}


def test_influence_sums_over_composites():
    found = influences(gauntlet(), FILE_SIZES)
    a = math.hypot(1, 1 / 2)  # in category one, rescaled, and in the average
    b = math.hypot(1 / 2, 1, 3 / 4)  # in one, in two, and in the average
    assert found == pytest.approx({'a/0-shot': a, 'b/0-shot': b, 'c/0-shot': math.hypot(a, b) / math.sqrt(2)})
    weighted = influences(gauntlet(weighting='SAMPLE_SZ'), FILE_SIZES)
    assert weighted['a/0-shot'] == pytest.approx(math.hypot(1 / 2, 1 / 4))
    assert influences(None, FILE_SIZES) == dict.fromkeys(FILE_SIZES, 1.0)


def test_influence_on_one_average_is_its_slope():
    expected = {'a/0-shot': 1 / 2, 'b/0-shot': 3 / 4, 'c/0-shot': math.hypot(1 / 2, 3 / 4) / math.sqrt(2)}
    assert influences(gauntlet(), FILE_SIZES, 'default_average') == pytest.approx(expected)
