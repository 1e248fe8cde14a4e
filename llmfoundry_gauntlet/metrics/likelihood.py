"""Metrics of log-probabilities besides the accuracy: the probability of the right choice, and calibration.

Log-probabilities are sums over a choice's tokens, in nats. Probabilities of choices are normalised over the choices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from llmfoundry_gauntlet.metrics.metrics import Absent, Metric
from llmfoundry_gauntlet.scoring.likelihood import best_of
from llmfoundry_gauntlet.types import ItemResult

NUM_BINS = 10


def gold_bits_per_byte() -> Metric:
    """Return the metric of bits per byte of the right continuation: a mean over items."""
    return Metric('GoldBitsPerByte', bits_per_byte)


def choice_metrics() -> tuple[Metric, ...]:
    """Return the metrics of tasks in which one of several choices is right."""
    return (
        gold_bits_per_byte(),
        Metric('GoldProbability', gold_probabilities),
        Metric('CharacterNormalizedMatch', partial(matches, lambda result: result.num_characters)),
        Metric('ByteNormalizedMatch', partial(matches, lambda result: result.num_bytes)),
        Metric('TokenNormalizedMatch', partial(matches, lambda result: result.num_tokens)),
        Metric('CalibrationError', calibration_gaps),
        Metric('BrierScore', brier_scores),
        Metric('MajorityClass', majority),
    )


def pmi() -> Metric:
    """Return the metric of matches by how much the prompt raises each choice's probability (arXiv 2104.08315)."""
    return Metric('PMINormalizedMatch', pmi_matches)


def bits_per_byte(results: Sequence[ItemResult]) -> list[float]:
    """Yield -log2 of the right choice's probability per byte, item by item."""
    return [
        -logprobs[gold] / math.log(2) / lengths[gold]
        for (logprobs, gold), lengths in zip(scored(results), sizes(results, lambda r: r.num_bytes), strict=True)
    ]


def gold_probabilities(results: Sequence[ItemResult]) -> list[float]:
    """Yield the right choice's probability among the choices, item by item."""
    return [probabilities(logprobs)[gold] for logprobs, gold in scored(results)]


def matches(lengths_of: Callable[[ItemResult], tuple[int, ...] | None], results: Sequence[ItemResult]) -> list[float]:
    """Return whether the right choice has the highest log-probability per unit of length; a tie earns its share."""
    return [
        gold_share([logprob / length for logprob, length in zip(logprobs, lengths, strict=True)], gold)
        for (logprobs, gold), lengths in zip(scored(results), sizes(results, lengths_of), strict=True)
    ]


def pmi_matches(results: Sequence[ItemResult]) -> list[float]:
    """Return whether the right choice gains most by its prompt, against what it has after the task's `pmi_context`."""
    alone = [
        result.logprobs_alone
        for result in results
        if result.logprobs_alone is not None and all(map(math.isfinite, result.logprobs_alone))
    ]
    if len(alone) < len(results):
        raise Absent(f'{len(results) - len(alone)} of {len(results)} items have no log-probabilities of choices alone')
    return [
        gold_share(
            [one - other for one, other in zip(logprobs, without, strict=True)],
            gold,
            rounding_of=max(map(abs, logprobs)),
        )
        for (logprobs, gold), without in zip(scored(results), alone, strict=True)
    ]


def calibration_gaps(results: Sequence[ItemResult]) -> list[float]:
    """Return values whose mean is the expected calibration error over bins of equal width (arXiv 1706.04599).

    In a bin, confidence is the mean probability of the preferred choices; its gap is the confidence minus the accuracy.
    An item's value is its own part of its bin's gap, with the gap's sign, so that the mean of the values is the mean of
    the gaps' sizes, weighted by the number of items.
    """
    confidences, rights, bins = [], [], []
    for logprobs, gold in scored(results):
        confidence = max(probabilities(logprobs))
        bins.append(min(int(confidence * NUM_BINS), NUM_BINS - 1))
        confidences.append(confidence)
        rights.append(gold_share(logprobs, gold))
    gaps = [confidence - right for confidence, right in zip(confidences, rights, strict=True)]
    totals = [math.fsum(gap for gap, place in zip(gaps, bins, strict=True) if place == b) for b in range(NUM_BINS)]
    return [math.copysign(1.0, totals[place]) * gap for gap, place in zip(gaps, bins, strict=True)]


def brier_scores(results: Sequence[ItemResult]) -> list[float]:
    """Yield the squared distance of the choices' probabilities from certainty of the right one: 0 (best) to 2."""
    return [
        math.fsum((p - (place == gold)) ** 2 for place, p in enumerate(probabilities(logprobs)))
        for logprobs, gold in scored(results)
    ]


def majority(results: Sequence[ItemResult]) -> list[float]:
    """Return whether an item's right choice is the one that is right most often: what always giving that would earn."""
    counts = Counter(result.gold for result in results)
    most = min((gold for gold, count in counts.items() if count == max(counts.values())), key=str)
    return [float(result.gold == most) for result in results]


def scored(results: Sequence[ItemResult]) -> Iterator[tuple[tuple[float, ...], int]]:
    """Return log-probabilities and the right choice of each item. Raise Absent if an item has none that are finite."""
    known = [
        (result.logprobs, result.gold)
        for result in results
        if result.logprobs is not None and all(map(math.isfinite, result.logprobs))
    ]
    if len(known) < len(results):
        raise Absent(f'{len(results) - len(known)} of {len(results)} items have no finite log-probabilities')
    for logprobs, gold in known:
        assert isinstance(gold, int)  # the index of a choice, where choices are scored
        yield logprobs, gold


def sizes(
    results: Sequence[ItemResult], lengths_of: Callable[[ItemResult], tuple[int, ...] | None]
) -> list[tuple[int, ...]]:
    """Return the lengths of each item's choices, 1 at least. Raise Absent if some are unknown."""
    known = [tuple(max(length, 1) for length in found) for result in results if (found := lengths_of(result))]
    if len(known) < len(results):
        raise Absent(f'the lengths of choices are not known of {len(results) - len(known)} of {len(results)} items')
    return known


def probabilities(logprobs: Sequence[float]) -> list[float]:
    """Return probabilities normalised over the choices."""
    highest = max(logprobs)
    parts = [math.exp(logprob - highest) for logprob in logprobs]
    whole = math.fsum(parts)
    return [part / whole for part in parts]


def gold_share(scores: Sequence[float], gold: int, *, rounding_of: float = 0.0) -> float:
    """Return 1 if the right choice is the best, its share if it ties with others, else 0.

    Scores tie if they are equal up to the rounding error of numbers of their size, or of `rounding_of`.
    """
    best = best_of(scores, rounding_of=rounding_of)
    return 1 / len(best) if gold in best else 0.0
