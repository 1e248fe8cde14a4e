import math

import numpy as np
import pytest

from llmfoundry_gauntlet.scoring.likelihood import score_argmax, score_choice
from llmfoundry_gauntlet.types import ItemKey, ScoreOutput

NAN = math.nan


def choices(*logprobs: list[float]) -> ScoreOutput:
    zeros = tuple(np.zeros(len(values), dtype=int) for values in logprobs)
    return ScoreOutput(
        key=ItemKey('t/0-shot', 0),
        logprobs=tuple(np.array(values) for values in logprobs),
        is_argmax=tuple(z.astype(bool) for z in zeros),
        num_top=zeros,
    )


def continuation(logprobs: list[float], num_top: list[int], is_argmax: list[bool] | None = None) -> ScoreOutput:
    flags = [count > 0 for count in num_top] if is_argmax is None else is_argmax
    return ScoreOutput(
        key=ItemKey('t/0-shot', 0),
        logprobs=(np.array(logprobs),),
        is_argmax=(np.array(flags),),
        num_top=(np.array(num_top),),
    )


@pytest.mark.parametrize('reference', [False, True])
def test_the_highest_mean_per_token_wins(reference: bool):
    output = choices([-3.0], [-2.0, -2.0, -2.0])  # sums -3 and -6, means -3 and -2
    assert score_choice(output, 1, reference=reference).value == 1
    assert score_choice(output, 0, reference=reference).value == 0


@pytest.mark.parametrize(
    ('output', 'gold', 'credit'),
    [
        (choices([-1.0], [-1.0]), 0, 1 / 2),
        (choices([-1.0], [-1.0]), 1, 1 / 2),
        (choices([-1.0], [-1.0], [-2.0]), 2, 0),
        (choices([-1.0], [-1.0, -1.0], [-1.0], [-1.0]), 3, 1 / 4),
    ],
)
def test_a_tie_with_the_gold_scores_its_share(output: ScoreOutput, gold: int, credit: float):
    """Fix 1: the reference gives a tie to choice 0."""
    score = score_choice(output, gold, reference=False)
    assert score.value == credit and 'tie' in score.reason
    assert score_choice(output, gold, reference=True).value == float(gold == 0)


@pytest.mark.parametrize(('apart', 'ties'), [(1e-7, True), (1e-5, False), (1e-4, False)])
def test_ties_are_within_rounding(apart: float, ties: bool):
    score = score_choice(choices([-1.0], [-1.0 - apart]), 0, reference=False)
    assert score.value == (1 / 2 if ties else 1) and (score.reason is not None) == ties


def test_equal_probabilities_tie_for_any_number_of_tokens():
    uniform = -math.log(50257)
    output = choices([uniform], [uniform] * 3, [uniform] * 7)
    assert score_choice(output, 2, reference=False).value == pytest.approx(1 / 3)


@pytest.mark.parametrize('bad', [NAN, math.inf, -math.inf])
def test_non_finite_values_make_an_item_unscored(bad: float):
    """Fix 1: a NaN model scores 1.0 in the reference if gold is 0."""
    output = choices([-1.0], [bad])
    score = score_choice(output, 0, reference=False)
    assert score.value is None and score.predicted is None and 'not a finite number' in score.reason
    assert score_argmax(continuation([-1.0, bad], [1, 1]), reference=False).value is None


def test_the_reference_predicts_the_first_choice_for_nan():
    assert score_choice(choices([NAN], [NAN]), 0, reference=True).value == 1
    assert score_choice(choices([-2.0], [NAN], [-1.0]), 2, reference=True).value == 1


@pytest.mark.parametrize('reference', [False, True])
def test_language_modeling_requires_every_token(reference: bool):
    assert score_argmax(continuation([-0.1, -0.2], [1, 1]), reference=reference).value == 1
    assert score_argmax(continuation([-0.1, -0.2], [1, 0]), reference=reference).value == 0


def test_a_tied_token_scores_its_share():
    tied_first = continuation([-0.7, -0.1], [2, 1], [True, True])
    tied_second = continuation([-0.7, -0.1], [2, 1], [False, True])
    assert score_argmax(tied_first, reference=False).value == 1 / 2
    assert score_argmax(tied_second, reference=False).value == 1 / 2
    assert score_argmax(tied_first, reference=True).value == 1
    assert score_argmax(tied_second, reference=True).value == 0


def test_very_unlikely_choices_are_distinguished():
    output = choices([-95.0], [-90.0])  # exp(89) is beyond float32
    assert score_choice(output, 1, reference=False).value == 1
    assert score_choice(output, 1, reference=True).value == 0
