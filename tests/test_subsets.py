"""How many questions of each task a subset takes: the allocation, and the questions that fit in a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.subsets import TaskCosts, allocate, first_questions, influences, sizes_in_time
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.types import Example

# The allocation: within a cost, or up to a precision.

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


def task(**changes: Any) -> TaskCosts:
    return TaskCosts(**{'cost': 0.1, 'deviation': 0.5, 'least': 1, 'most': 10**6, **changes})


def cost_of(tasks: Mapping[str, TaskCosts], sizes: Mapping[str, int]) -> float:
    return math.fsum(tasks[key].cost * number for key, number in sizes.items())


def variance(tasks: Mapping[str, TaskCosts], sizes: Mapping[str, int]) -> float:
    """Return the variance of the sum of scores."""
    return sum(costs.deviation**2 / sizes[key] for key, costs in tasks.items())


def within(tasks: Mapping[str, TaskCosts], cost: float) -> dict[str, int]:
    return allocate(tasks, lambda sizes: cost_of(tasks, sizes) <= cost)[0]


@given(TASKS, st.floats(0.1, 100))
def test_allocations_keep_the_cost_and_the_bounds_of_tasks(tasks, cost):
    sizes = within(tasks, cost)

    assert all(costs.least <= sizes[key] <= costs.most for key, costs in tasks.items())
    least_cost = sum(costs.cost * costs.least for costs in tasks.values())
    assert cost_of(tasks, sizes) <= max(cost, least_cost) + 1e-9


@given(TASKS, st.floats(0.1, 100))
def test_nothing_is_left_over_that_would_buy_an_item_of_every_task(tasks, cost):
    sizes = within(tasks, cost)

    tasks_with_more = [costs for key, costs in tasks.items() if sizes[key] < costs.most]
    least_cost = sum(costs.cost * costs.least for costs in tasks.values())
    if tasks_with_more and least_cost < cost:
        cost_of_an_item_each = sum(costs.cost for costs in tasks_with_more)
        assert cost_of(tasks, sizes) + cost_of_an_item_each * 1.01 > cost - 1e-9


@given(TASKS, st.floats(1, 20), st.floats(1, 3))
def test_a_higher_cost_never_removes_items(tasks, cost, factor):
    less = within(tasks, cost)
    more = within(tasks, cost * factor)

    assert all(more[key] >= less[key] for key in tasks)


@given(TASKS, st.floats(1, 1.5))
def test_a_precision_is_reached_by_no_more_than_is_needed(tasks, factor):
    all_items = {key: costs.most for key, costs in tasks.items()}
    limit = variance(tasks, all_items) * factor

    too_few, enough = allocate(tasks, lambda sizes: variance(tasks, sizes) > limit)

    assert variance(tasks, enough) <= limit * (1 + 1e-12)
    assert too_few == enough or variance(tasks, too_few) > limit
    assert all(0 <= enough[key] - too_few[key] <= 1 for key in tasks)  # neighbours in the series


DIFFERENT_TASKS = {
    'dear': task(cost=0.4),
    'sure': task(deviation=0.14),
    'heavy': task(deviation=1.5),
    'plain': task(),
}


@pytest.mark.parametrize('num_moved', [5, 50])
@pytest.mark.parametrize(('gains', 'loses'), list(itertools.permutations(DIFFERENT_TASKS, 2)))
def test_questions_of_another_task_at_the_same_cost_make_the_sum_less_precise(gains: str, loses: str, num_moved: int):
    sizes = within(DIFFERENT_TASKS, 400.0)

    num_bought = int(num_moved * DIFFERENT_TASKS[loses].cost / DIFFERENT_TASKS[gains].cost)
    moved = {**sizes, loses: sizes[loses] - num_moved, gains: sizes[gains] + num_bought}
    assert variance(DIFFERENT_TASKS, moved) > variance(DIFFERENT_TASKS, sizes) * (1 - 1e-4)


def test_uncertain_tasks_get_more_questions_and_dear_ones_fewer():
    sizes = within(DIFFERENT_TASKS, 400.0)

    assert sizes['heavy'] > sizes['plain'] > max(sizes['dear'], sizes['sure'])
    assert sizes['heavy'] / sizes['plain'] == pytest.approx(3, rel=0.01)
    assert sizes['plain'] / sizes['dear'] == pytest.approx(2, rel=0.01)  # the root of four times the cost


@pytest.mark.parametrize(
    ('cost', 'expected'),
    [
        (8.1, {'a': 30, 'b': 50}),  # everything fits
        (0.3, {'a': 1, 'b': 3}),  # nothing fits, which leaves the least
    ],
)
def test_everything_is_allocated_if_it_fits_and_the_least_if_nothing_does(cost: float, expected: dict[str, int]):
    tasks = {'a': task(most=30), 'b': task(most=50, least=3, deviation=0.0)}

    assert within(tasks, cost) == expected


def test_a_task_without_deviation_gets_the_least():
    tasks = {'a': task(most=30), 'b': task(most=50, least=3, deviation=0.0)}

    _, enough = allocate(tasks, lambda sizes: sizes['a'] < 10)

    assert enough == {'a': 10, 'b': 3}


# The effect of a task on composites.

NUM_QUESTIONS = {'a/0-shot': 100, 'b/3-shot': 300, 'c/0-shot': 7}  # c is in no category
A = {'name': 'a', 'num_fewshot': 0, 'random_baseline': 0.5}
B = {'name': 'b', 'num_fewshot': 3}


def gauntlet_of_two_categories(**keys: Any) -> GauntletSpec:
    categories = [{'name': 'one', 'benchmarks': [A, B]}, {'name': 'two', 'benchmarks': [B]}]
    return load_suite(None, {'categories': categories, **keys}).gauntlet


def test_influence_is_that_on_all_composites():
    of_a = math.hypot(1, 1 / 2)  # in category one, rescaled, and in the average
    of_b = math.hypot(1 / 2, 1, 3 / 4)  # in one, in two, and in the average
    mean = math.hypot(of_a, of_b) / math.sqrt(2)

    influence = influences(gauntlet_of_two_categories(), NUM_QUESTIONS)

    assert influence == pytest.approx({'a/0-shot': of_a, 'b/3-shot': of_b, 'c/0-shot': mean})


def test_influence_is_that_on_one_average():
    of_a, of_b = 1 / 2, 3 / 4
    mean = math.hypot(of_a, of_b) / math.sqrt(2)

    influence = influences(gauntlet_of_two_categories(), NUM_QUESTIONS, 'default_average')

    assert influence == pytest.approx({'a/0-shot': of_a, 'b/3-shot': of_b, 'c/0-shot': mean})


def test_influence_follows_the_weighting():
    influence = influences(gauntlet_of_two_categories(weighting='SAMPLE_SZ'), NUM_QUESTIONS)

    assert influence['a/0-shot'] == pytest.approx(math.hypot(1 / 2, 1 / 4))  # 100 of 400 questions, rescaled


def test_without_a_gauntlet_all_tasks_have_the_same_influence():
    assert influences(None, NUM_QUESTIONS) == dict.fromkeys(NUM_QUESTIONS, 1.0)


# The questions that fit in a time.

SECONDS_OF_QUESTION = {'short': 0.01, 'long': 0.04, 'few': 0.02}


def examples_of(num_rows: int, **fields: Any) -> list[Example]:
    return [Example(row=row, content=None, digest=f'{7 * row % num_rows:04}', **fields) for row in range(num_rows)]


def passages(num_rows: int) -> list[Example]:
    """Return rows in two categories, with passages of three rows of a category."""
    return [
        Example(row=row, content=None, category='ab'[row % 2], cluster=f'{row // 6}{row % 2}', digest=f'{row:04}')
        for row in range(num_rows)
    ]


ASKED = {'short': examples_of(3000), 'long': passages(3000), 'few': examples_of(12)}


def sizes_in(seconds: float, asked: Mapping[str, Sequence[Example]] = ASKED) -> dict[str, int]:
    seconds_by_task = {key: SECONDS_OF_QUESTION[key] * len(examples) for key, examples in asked.items()}
    return sizes_in_time(asked, None, seconds_by_task=seconds_by_task, budget_seconds=seconds)


def seconds_of(sizes: Mapping[str, int]) -> float:
    return sum(SECONDS_OF_QUESTION[key] * number for key, number in sizes.items())


@pytest.mark.parametrize('seconds', [2.0, 6.0, 15.0])
def test_the_subset_takes_the_given_time(seconds: float):
    assert seconds - 0.1 < seconds_of(sizes_in(seconds)) <= seconds


def test_all_questions_are_asked_if_they_fit():
    assert sizes_in(1000.0) == {'short': 3000, 'long': 3000, 'few': 12}


def test_expensive_questions_are_fewer():
    sizes = sizes_in(10.0)

    assert sizes['few'] == 12
    assert sizes['short'] / sizes['long'] == pytest.approx(2, rel=0.02)  # the root of four times the cost


def test_a_task_of_which_nothing_can_be_run_takes_no_time():
    sizes = sizes_in_time(ASKED, None, seconds_by_task={'short': 30.0, 'long': 120.0}, budget_seconds=10.0)

    assert sizes['few'] == 12


def test_too_little_time_is_an_error_with_the_time_needed():
    # Two questions of each task, at 0.01, 0.04 and 0.02 s.
    with pytest.raises(ConfigError, match=r'time_budget: is 0.1s, .* takes about 0\.14s here: 6 items of 3 tasks'):
        sizes_in(0.1)


def test_the_first_questions_are_of_many_passages_and_all_categories():
    (chosen,) = first_questions({'long': ASKED['long']}, {'long': 200}).values()

    assert len(chosen) == 200
    assert len({(example.category, example.cluster) for example in chosen}) == 200
    assert {example.category for example in chosen} == {'a', 'b'}
    rows = [example.row for example in chosen]
    assert rows == sorted(rows)


def rows_asked_in(seconds: float) -> dict[str, set[int]]:
    chosen = first_questions(ASKED, sizes_in(seconds))
    return {task_key: {example.row for example in examples} for task_key, examples in chosen.items()}


def test_more_time_keeps_the_questions_of_less():
    rows_of_less = rows_asked_in(5.0)
    rows_of_more = rows_asked_in(12.0)

    for task_key in ASKED:
        assert rows_of_less[task_key] <= rows_of_more[task_key]
    assert sum(map(len, rows_of_less.values())) < sum(map(len, rows_of_more.values()))


def test_a_question_is_asked_in_all_its_variants():
    variants = [
        Example(row=row, content=None, variant=variant, digest=f'{row:04}') for row in range(6) for variant in 'xyz'
    ]

    sizes = sizes_in_time({'score': variants}, None, seconds_by_task={'score': 6.0}, budget_seconds=2.5)
    (chosen,) = first_questions({'score': variants}, sizes).values()

    assert sizes == {'score': 2}
    assert [(example.row, example.variant) for example in chosen] == [
        (row, variant) for row in (0, 1) for variant in 'xyz'
    ]


@pytest.mark.parametrize(
    ('value', 'problem'),
    [
        ('120', "is '120'"),
        ('0s', "is '0s'"),
        ('-3s', "is '-3s'"),
        (120, 'is 120; allowed: text'),
    ],
)
def test_a_budget_must_be_a_duration(value, problem):
    with pytest.raises(ConfigError, match=f'time_budget: {problem}'):
        decode_settings({'tasks': 'tasks.yaml', 'time_budget': value})


def test_a_budget_is_in_seconds():
    assert decode_settings({'tasks': 'tasks.yaml', 'time_budget': '1.5m'}).budget_seconds == 90
