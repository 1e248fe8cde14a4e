"""Score log-probabilities: the choice that a model prefers, and whether a continuation is the most probable one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmfoundry_gauntlet.types import Score, ScoreOutput

NON_FINITE = 'the model returned a log-probability that is not a finite number'

# Relative. Closer mean log-probabilities count as equal: float32 rounding makes a smaller difference than this.
TIE_TOLERANCE = 1e-6


def score_choice(output: ScoreOutput, gold: int, *, reference: bool) -> Score:
    """Score the choice with the highest mean log-probability per token; a k-way tie that includes the gold scores 1/k.

    With `reference`, llm-foundry 0.22's rule (`eval/metrics/nlp.py:InContextLearningMultipleChoiceAccuracy`): the first
    of the lowest perplexities in float32, so ties and NaN go to the first choice.
    """
    means = [float(logprobs.mean()) for logprobs in output.logprobs]
    if reference:
        import numpy as np

        with np.errstate(over='ignore'):  # inf beyond float32, as in llm-foundry
            predicted = first_lowest([float(np.exp(np.float32(-mean))) for mean in means])
        return Score(value=float(predicted == gold), predicted=predicted)
    if not all(map(math.isfinite, means)):
        return Score.unscored(NON_FINITE)
    tied = best_of(means)
    if len(tied) == 1:
        return Score(value=float(tied[0] == gold), predicted=tied[0])
    return Score(
        value=1 / len(tied) if gold in tied else 0.0,
        predicted=tied[0],
        reason=f'tie of the choices {", ".join(map(str, tied))}',
    )


def score_argmax(output: ScoreOutput, *, reference: bool) -> Score:
    """Score 1 if every token of the only continuation is the most probable one; predicted is then 0, else None.

    A token that ties with k - 1 others at the top counts 1/k; with `reference` only the first of them counts
    (llm-foundry 0.22, `eval/metrics/nlp.py:InContextLearningLMAccuracy`).
    """
    import numpy as np

    (logprobs,), (is_argmax,), (num_top,) = output.logprobs, output.is_argmax, output.num_top
    if reference:
        right = bool(is_argmax.all())
        return Score(value=float(right), predicted=0 if right else None)
    if not np.isfinite(logprobs).all():
        return Score.unscored(NON_FINITE)
    if not num_top.all():
        return Score(value=0.0)
    ties = int((num_top > 1).sum())
    return Score(
        value=float(np.prod(1.0 / num_top)),
        predicted=0,
        reason=f'tie for the most probable token at {ties} of {len(num_top)} tokens' if ties else None,
    )


def best_of(scores: Sequence[float]) -> list[int]:
    """Return the indices of the highest score and of scores equal to it up to rounding."""
    best = max(scores)
    return [place for place, score in enumerate(scores) if math.isclose(score, best, rel_tol=TIE_TOLERANCE)]


def first_lowest(values: Sequence[float]) -> int:
    """Return the index of the first lowest value as Python's `min` does: a NaN never wins unless it comes first."""
    return min(range(len(values)), key=values.__getitem__)
