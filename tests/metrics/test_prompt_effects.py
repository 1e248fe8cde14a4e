"""The errors of SCORE over prompts and questions, by the two-way formulas, by leaving prompts out, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from test_consistency import always, prompts, score

from llmfoundry_gauntlet.metrics.comparison import difference
from llmfoundry_gauntlet.metrics.consistency import VariantResult
from llmfoundry_gauntlet.metrics.prompt_effects import effects_of_difference, over_prompts
from llmfoundry_gauntlet.metrics.statistics import interval

NUM_PROMPTS = 10


def rights_of(seed: int, num_questions: int = 30, *, effect: float = 0.0) -> np.ndarray:
    """Return which questions are right with which prompts; prompts differ with the effect."""
    random = np.random.default_rng(seed)
    ease = random.normal(size=(num_questions, 1)) + effect * random.normal(size=NUM_PROMPTS)
    return (ease + random.normal(size=(num_questions, NUM_PROMPTS)) > 0).astype(float)


def results_of(
    rights: np.ndarray, categories: Sequence[str] | None = None, clusters: Sequence[int] | None = None
) -> list[VariantResult]:
    """Return a result of each question with each prompt, whose answer is 'right' or 'wrong'."""
    results = []
    for row, of_question in enumerate(rights.tolist()):
        answers = ''.join('r' if right else 'w' for right in of_question)
        digits = ''.join(str(int(right)) for right in of_question)
        for result in prompts(row, digits, answers, category=None if categories is None else categories[row]):
            results.append(result if clusters is None else with_cluster(result, clusters[row]))
    return results


def with_cluster(result: VariantResult, cluster: int) -> VariantResult:
    values = {name: getattr(result, name) for name in VariantResult.__slots__}
    return VariantResult(**{**values, 'cluster': cluster})


def variance_over_prompts(values: np.ndarray) -> float:
    """Return the variance that prompts add to a mean: of the means of prompts, without that of questions in them."""
    num_questions, num_prompts = values.shape
    left = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    of_prompts = values.mean(0).var(ddof=1) / num_prompts
    of_both = (left**2).sum() / ((num_questions - 1) * (num_prompts - 1)) / (num_questions * num_prompts)
    return max(0.0, of_prompts - of_both)


@pytest.mark.parametrize('effect', [0.0, 0.5, 2.0])
def test_the_variances_over_questions_and_over_prompts_add_up(effect: float):
    """Mutations: only questions vary; the variance of questions with prompts is counted twice."""
    rights = rights_of(12, effect=effect)

    scored = score(results_of(rights))

    over_questions = rights.mean(1).var(ddof=1) / len(rights)
    added = variance_over_prompts(rights)
    assert (added > 0) == (effect > 0)
    assert scored.accuracy.standard_error == pytest.approx(math.sqrt(over_questions))
    assert scored.over_prompts.accuracy.value == scored.accuracy.value
    assert scored.over_prompts.accuracy.standard_error == pytest.approx(math.sqrt(over_questions + added))
    assert scored.over_prompts.prompt_deviation.value == pytest.approx(math.sqrt(NUM_PROMPTS * added))
    if added:
        # Satterthwaite's degrees of freedom, of 30 questions and ten prompts.
        freedom = (over_questions + added) ** 2 / (over_questions**2 / 29 + added**2 / 9)
        assert scored.over_prompts.accuracy.spread.freedom == pytest.approx(freedom)


def test_the_deviation_of_prompts_by_hand():
    """Each prompt is right on all questions or on none, so that questions explain nothing."""
    rights = np.tile([1.0] * 4 + [0.0] * 6, (5, 1))

    scored = score(results_of(rights))

    assert scored.accuracy.standard_error == 0
    deviation = math.sqrt((4 * 0.36 + 6 * 0.16) / 9)  # from 0.4
    assert scored.over_prompts.prompt_deviation.value == pytest.approx(deviation)
    assert scored.over_prompts.accuracy.standard_error == pytest.approx(deviation / math.sqrt(10))
    assert scored.over_prompts.accuracy.spread.freedom == pytest.approx(9)


def consistency_of(rights: np.ndarray) -> float:
    pairs = list(itertools.combinations(range(rights.shape[1]), 2))
    return float(np.mean([rights[:, first] == rights[:, second] for first, second in pairs]))


def test_the_effect_of_prompts_on_consistency_is_that_of_leaving_each_out():
    """A jackknife over prompts. Mutation: a prompt counts as in a mean, though it is in nine pairs of 45."""
    rights = rights_of(2, effect=1.0)

    effects = score(results_of(rights)).over_prompts.effects['consistency_rate']

    without_each = np.array([consistency_of(np.delete(rights, prompt, axis=1)) for prompt in range(NUM_PROMPTS)])
    jackknife = 9 / 10 * ((without_each - without_each.mean()) ** 2).sum()
    assert (effects.prompts.deviations**2).sum() == pytest.approx(jackknife)


def test_questions_weigh_as_in_a_mean_over_categories():
    """A question of a category with five counts four times as much as one of a category with twenty."""
    rights = rights_of(3, 25, effect=1.0)
    categories = ['a'] * 5 + ['b'] * 20

    scored = score(results_of(rights, categories), macro=True)

    accuracies = (rights[:5].mean(0) + rights[5:].mean(0)) / 2  # of prompts
    of_prompts = accuracies.var(ddof=1) / NUM_PROMPTS
    of_both = sum(part_of_both(rights[part]) for part in (slice(5), slice(5, 25))) / 4
    assert scored.over_prompts.prompt_deviation.value == pytest.approx(math.sqrt(NUM_PROMPTS * (of_prompts - of_both)))


def test_categories_of_one_question_are_taken_together():
    """They would leave all chance to the prompts: .105 between prompts from one right answer of 3 in ten prompts."""
    rights = rights_of(2, effect=1.0)
    of_one_each = [f'category {number}' for number in range(len(rights))]

    alone = score(results_of(rights, of_one_each), macro=True).over_prompts
    together = score(results_of(rights)).over_prompts

    assert alone.prompt_deviation.value == pytest.approx(together.prompt_deviation.value)
    by_chance = np.zeros((3, NUM_PROMPTS))
    by_chance[0, 0] = 1.0
    found = score(results_of(by_chance, ['a', 'b', 'c']), macro=True).over_prompts
    assert found.prompt_deviation.value == pytest.approx(0)


def part_of_both(values: np.ndarray) -> float:
    num_questions, num_prompts = values.shape
    left = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    return (left**2).sum() / ((num_questions - 1) * (num_prompts - 1)) / (num_questions * num_prompts)


def test_questions_on_one_passage_vary_together_with_each_prompt():
    """The passages are the questions of the formula, as each has two questions."""
    rights = rights_of(4, 30, effect=1.0)
    passages = np.repeat(np.arange(15), 2)

    scored = score(results_of(rights, clusters=passages.tolist()))

    of_passages = rights.reshape(15, 2, NUM_PROMPTS).mean(1)
    added = variance_over_prompts(of_passages)
    assert scored.over_prompts.prompt_deviation.value == pytest.approx(math.sqrt(NUM_PROMPTS * added))


def test_the_difference_of_two_runs_has_the_effects_of_its_values():
    first, second = rights_of(5, effect=1.0), rights_of(6, effect=1.0)
    scores = [score(results_of(rights)) for rights in (first, second)]
    compared = difference(scores[0].accuracy, scores[1].accuracy, 30).difference

    effects = effects_of_difference(*(scored.over_prompts.effects['accuracy'] for scored in scores))
    crossed = over_prompts(compared, effects)

    differences = second - first
    over_questions = differences.mean(1).var(ddof=1) / 30
    expected = math.sqrt(over_questions + variance_over_prompts(differences))
    assert crossed.standard_error == pytest.approx(expected)
    assert crossed.standard_error > compared.standard_error
    assert crossed.value == pytest.approx(differences.mean())


def test_prompts_that_are_as_hard_for_both_runs_cancel():
    """Mutation: the effects of two runs are added up as if they were independent."""
    first = rights_of(7, effect=2.0)
    first[:6] = 0.0
    second = first.copy()
    second[:6] = 1.0  # with every prompt
    scores = [score(results_of(rights)) for rights in (first, second)]
    compared = difference(scores[0].accuracy, scores[1].accuracy, 30).difference

    effects = effects_of_difference(*(scored.over_prompts.effects['accuracy'] for scored in scores))

    assert scores[0].over_prompts.effects['accuracy'].variance > 0
    assert effects.variance == 0
    assert over_prompts(compared, effects).standard_error == compared.standard_error > 0


def test_the_interval_over_prompts_is_wilsons():
    rights = rights_of(8, effect=2.0)

    measure = score(results_of(rights)).over_prompts.accuracy

    variance = measure.standard_error**2
    assert measure.spread.num_items == pytest.approx(measure.value * (1 - measure.value) / variance)
    low, high = interval(measure)
    assert 0 < low < measure.value < high < 1


def test_all_wrong_with_all_prompts_keeps_the_interval_over_questions():
    scored = score(results_of(np.zeros((12, NUM_PROMPTS))))

    assert interval(scored.over_prompts.accuracy) == interval(scored.accuracy)
    assert scored.over_prompts.prompt_deviation.value == 0


@pytest.mark.parametrize(
    'results',
    [
        always('A', 4, 'A', 0) + always('A', 4, 'B', 1),
        prompts(0, '10') + prompts(1, '11'),
        prompts(0, '1011'),
    ],
    ids=['option order', 'two prompts', 'one question'],
)
def test_other_perturbations_and_too_few_prompts_or_questions_have_no_error_over_prompts(results):
    assert score(results).over_prompts is None


def test_order_changes_no_bit_of_the_errors_over_prompts():
    results = results_of(rights_of(9, effect=1.0))

    first, second = score(results).over_prompts, score(results[::-1]).over_prompts

    for name in ('accuracy', 'consistency_rate'):
        assert getattr(first, name).standard_error == getattr(second, name).standard_error
    assert first.prompt_deviation == second.prompt_deviation


def test_a_question_without_one_of_its_prompts_does_not_count_for_their_effects():
    rights = rights_of(10, effect=1.0)
    results = results_of(rights)
    complete = score(results).over_prompts.effects['accuracy']

    scored = score([*results, *prompts(30, '1' * 9 + '-', 'r' * 10)], allow_missing=True)

    assert scored.over_prompts.effects['accuracy'].variance == complete.variance
    assert scored.over_prompts.accuracy.value == scored.accuracy.value
    assert score([*results, *prompts(30, '1' * 9 + '-')]).over_prompts.prompt_deviation.reason == (
        '1 of 310 items unscored'
    )
