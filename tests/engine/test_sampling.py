"""Sampling of tokens, compared with transformers' processors on a fine grid of draws."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from llmfoundry_gauntlet.engine.logits import draw_tokens, next_tokens
from llmfoundry_gauntlet.types import Sampling

VOCABULARY = 50
GRID = 4000
SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=7.0),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=0.7, top_k=1),
    Sampling(temperature=1.5, top_k=VOCABULARY),
    Sampling(temperature=1.5, top_k=1000),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=2.0, top_p=0.5),
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(temperature=0.8, top_k=9, top_p=0.8),
    Sampling(temperature=3.0, top_k=20, top_p=0.3),
]


def random_logits(rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(rows, VOCABULARY, generator=generator)


def probabilities(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """Return the distribution transformers samples from, with processors in the order of its `generate`."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits.double())
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(dim=-1).numpy()


def shares(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """Return the share of numbers from 0 to 1 that select each token."""
    draws = ((np.arange(GRID) + 0.5) / GRID).tolist()
    tokens = draw_tokens(logits.expand(GRID, -1), sampling, draws).tolist()
    return np.bincount(tokens, minlength=logits.shape[-1]) / GRID


@pytest.mark.parametrize('sampling', SETTINGS, ids=str)
def test_tokens_are_drawn_with_their_probabilities(sampling: Sampling):
    """The grid is as fine as the tolerance, so nothing is left to chance.

    Mutations: the temperature after `top_p`; `top_p` before `top_k`; a token too few in `top_p`; no `gather`.
    """
    for logits in random_logits(3):
        expected = probabilities(logits[None], sampling)[0]
        found = shares(logits[None], sampling)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1.001 / GRID)
        assert (found[expected == 0] == 0).all()


def test_without_limits_tokens_keep_the_order_of_the_vocabulary():
    """Four equal tokens and draws at their bounds, each of which belongs to the next token; then 5/8, 1/8, 2/8.

    Mutation: `right=False`.
    """
    draws = [0.0, 0.2499, 0.25, 0.4999, 0.5, 0.75, 1 - 2**-53]
    assert draw_tokens(torch.zeros(7, 4), Sampling(temperature=1.0), draws).tolist() == [0, 0, 1, 1, 2, 3, 3]
    logits = torch.tensor([[5.0, 1.0, 2.0]]).log().expand(4, -1)
    assert draw_tokens(logits, Sampling(temperature=1.0), [0.624, 0.626, 0.749, 0.751]).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize('sampling', SETTINGS, ids=str)
def test_extreme_draws_pick_possible_tokens(sampling: Sampling):
    """Tokens of probability 0 are first, last and in between.

    Mutation: `right=False`, which picks the first token for 0.
    """
    logits = random_logits(20)
    logits[:, [0, 1, 7, VOCABULARY - 2, VOCABULARY - 1]] = -torch.inf
    expected = probabilities(logits, sampling)
    for draw in (0.0, 2**-53, 1 - 2**-53):
        tokens = draw_tokens(logits, sampling, [draw] * len(logits)).tolist()
        assert (expected[np.arange(len(logits)), tokens] > 0).all()


def test_top_k_keeps_exactly_k_tokens_with_ties():
    """Logits in half precision often tie; transformers keeps all that tie with the last."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    found = shares(logits, Sampling(temperature=1.0, top_k=3))
    assert (found > 0).sum() == 3
    top, tied = np.exp([3.0, 2.0]) / (np.exp(3) + 2 * np.exp(2))
    np.testing.assert_allclose(np.sort(found)[-3:], [tied, tied, top], atol=1.001 / GRID)


def test_top_p_keeps_the_first_of_equal_tokens():
    """1/8 four times and 1/2: the half and the first two equal ones make up 0.75; 0.76 needs three."""
    logits = torch.tensor([[1.0, 1.0, 4.0, 1.0, 1.0]]).log()
    found = shares(logits, Sampling(temperature=1.0, top_p=0.74))
    np.testing.assert_allclose(found, np.array([1, 1, 4, 0, 0]) / 6, atol=1.001 / GRID)
    found = shares(logits, Sampling(temperature=1.0, top_p=0.76))
    np.testing.assert_allclose(found, np.array([1, 1, 4, 1, 0]) / 7, atol=1.001 / GRID)


def test_greedy_picks_the_first_of_equal_tokens():
    """At temperature 0 with any other settings."""
    logits = torch.tensor([[1.0, 5.0, 5.0], [7.0, 7.0, 7.0], [0.0, 1.0, 2.0]])
    samplings = [Sampling(), Sampling(top_k=2), Sampling(top_p=0.1)]
    assert next_tokens(logits, samplings, [None, None, None]) == [1, 0, 2]


def test_rows_are_sampled_independently():
    """Mutations: draws by their place in the group; the first row's settings for all."""
    samplings = [Sampling(), *SETTINGS] * 4
    logits = random_logits(len(samplings))
    rng = np.random.default_rng(0)
    draws = [None if one.temperature == 0 else rng.random() for one in samplings]
    together = next_tokens(logits, samplings, draws)
    alone = [
        next_tokens(logits[row : row + 1], [sampling], [draw])[0]
        for row, (sampling, draw) in enumerate(zip(samplings, draws, strict=True))
    ]
    assert together == alone
    order = rng.permutation(len(samplings)).tolist()
    mixed = next_tokens(logits[order], [samplings[row] for row in order], [draws[row] for row in order])
    assert mixed == [alone[row] for row in order]
    assert len(set(together)) > 10


def test_rounding_rarely_changes_a_sampled_token():
    """Batches of other sizes round differently. Mutation: sum probabilities in half precision."""
    logits = random_logits(GRID)
    draws = np.random.default_rng(0).random(GRID).tolist()
    noise = 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=9, top_p=0.9)):
        one, other = (draw_tokens(values, sampling, draws).tolist() for values in (logits, logits + noise))
        assert sum(a != b for a, b in zip(one, other, strict=True)) <= 2


def test_global_random_state_is_not_used():
    """Mutation: `multinomial`."""
    logits, sampling = random_logits(8), Sampling(temperature=1.0, top_k=30, top_p=0.95)
    before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    next_tokens(logits, [sampling] * 8, np.random.default_rng(0).random(8).tolist())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (repr(np.random.get_state()), random.getstate())


def test_non_finite_logits_do_not_affect_other_rows():
    """Mutation: no `minimum`."""
    logits = random_logits(3)
    expected = next_tokens(logits, [SETTINGS[10]] * 3, [0.3, 0.4, 0.5])
    logits[1] = torch.nan
    found = next_tokens(logits, [SETTINGS[10]] * 3, [0.3, 0.4, 0.5])
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert 0 <= found[1] < VOCABULARY
