"""The next token of each row from its logits: the most probable one, or one drawn by probability."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from llmfoundry_gauntlet.types import Sampling


def next_tokens(logits: torch.Tensor, samplings: Sequence[Sampling], draws: Sequence[float | None]) -> list[int]:
    """A token for each row of logits, float32 [rows, V]. `draws` are numbers from 0 to 1 where one is to be drawn."""
    chosen = logits.argmax(dim=-1).tolist()
    drawn = {index: draw for index, draw in enumerate(draws) if draw is not None}

    def settings(index: int) -> tuple[float, float, int]:
        return samplings[index].temperature, samplings[index].top_p, samplings[index].top_k

    for _, group in groupby(sorted(drawn, key=settings), key=settings):
        rows = list(group)
        tokens = draw_tokens(logits[rows], samplings[rows[0]], [drawn[row] for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] = token
    return chosen


def draw_tokens(logits: torch.Tensor, sampling: Sampling, draws: Sequence[float]) -> list[int]:
    """A token drawn for each row: temperature, then the most probable `top_k`, then those that make up `top_p`.

    The order is that of transformers' logits processors. A number from 0 to 1 picks the token at whose place among the
    probabilities it falls: in float64, so that rounding in the model hardly ever moves it.
    """
    tokens = None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, tokens = logits.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1:
        logits, tokens = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = (logits.double() / sampling.temperature).softmax(dim=-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    numbers = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None]
    places = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    last = (probabilities > 0).long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)  # of those that count
    places = torch.minimum(places, last)
    return (places if tokens is None else tokens.gather(1, places)).squeeze(1).tolist()
