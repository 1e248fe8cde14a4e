"""Probe how a model can generate: a few generations in each way, and only a way that agrees is trusted.

Whole rows, which every model can run, are the measure: logits of every step are compared, of prompts of different
lengths that enter and leave while others are written, and of one as long as can be, so that windows show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmfoundry_gauntlet.engine.generation import CACHE, NO_CACHE, STREAM, TUPLES, WAYS, ReplyWriter
from llmfoundry_gauntlet.engine.pool_run import Row
from llmfoundry_gauntlet.engine.pools import Pool
from llmfoundry_gauntlet.engine.probe import CANNOT, LEAST_CONTRAST, TOLERANCE, check_attention
from llmfoundry_gauntlet.types import GenerateRequest, ItemKey

HALF_TOLERANCE = 8  # roundings of the largest logit, where the model computes in less than float32
LENGTHS = (14, 3, 11, 3, 20, 1)  # tokens of the prompts; the second and the fourth end with the same
NEW_TOKENS = (4, 6, 2, 5, 7, 3)
LONG_NEW_TOKENS = 3  # so that most of its logits are those of steps
NUM_ROWS = 3
NUM_SHARED = 8  # tokens
NAMES = {
    STREAM: 'key-value cache, prompts in a token stream',
    CACHE: 'key-value cache',
    TUPLES: 'key-value tuples',
    NO_CACHE: 'no cache, whole rows at every token',
}

Steps = dict[ItemKey, dict[int, npt.NDArray[np.float32]]]  # logits by request and step


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyProbe:
    """The way to write replies with a model, and why. It holds for later weights as well where it is `certain`."""

    way: str
    reason: str
    certain: bool = True

    def __str__(self) -> str:
        return f'{NAMES[self.way]} ({self.reason})'


def probe_replies(writer: ReplyWriter, *, vocabulary: int, longest: int) -> ReplyProbe:
    """Finds the way for a model, with the same forwards on every rank.

    `vocabulary` counts the tokens that may occur, `longest` the tokens of the longest row to come.
    """
    check_attention(writer.language_model, vocabulary=vocabulary, longest=longest)
    pool = pool_to_write(vocabulary, longest, writer.language_model.hidden_token_id)
    measure = logits_of(writer, NO_CACHE, pool, vocabulary)
    largest = largest_of(measure)
    if not np.isfinite(largest):
        return ReplyProbe(way=NO_CACHE, reason="probe: the model's numbers are not finite", certain=False)
    tolerance = max(TOLERANCE, HALF_TOLERANCE * largest * writer.rounding)
    contrast = np.abs(measure[ItemKey('probe', 1)][0] - measure[ItemKey('probe', 3)][0]).max()
    certain = bool(contrast >= LEAST_CONTRAST * tolerance)
    failures: list[str] = []
    for way in WAYS[:-1]:
        try:
            off = furthest(measure, logits_of(writer, way, pool, vocabulary), writer.rounding)
        except torch.OutOfMemoryError:
            raise
        except CANNOT as error:
            failures.append(f'{NAMES[way]}: {type(error).__name__}')
            continue
        if off <= tolerance:
            agreement = f'probe: {len(pool.requests)} replies within {off:.0e}'.replace('e-0', 'e-')
            return ReplyProbe(way=way, reason='; '.join([agreement, *failures]), certain=certain)
        failures.append(f'{NAMES[way]} {off:.1g} off')
    return ReplyProbe(way=NO_CACHE, reason=f'probe: {"; ".join(failures)}', certain=certain)


def pool_to_write(vocabulary: int, longest: int, hidden: int | None = None) -> Pool:
    """A few short prompts, two of them equal, and a long one; random tokens, the same each time, none hidden."""
    rng = np.random.default_rng(0)
    shapes = [*zip(LENGTHS, NEW_TOKENS, strict=True), (longest - LONG_NEW_TOKENS, LONG_NEW_TOKENS)]
    requests: list[GenerateRequest] = []
    for row, (length, num_new) in enumerate(shapes):
        num_new = max(1, min(num_new, longest - 1))
        length = max(1, min(length, longest - num_new))
        context = rng.integers(0, vocabulary, size=length, dtype=np.int32)
        if hidden is not None:
            context[context == hidden] = (hidden + 1) % vocabulary
        if row == 2:  # runs together with the first, and begins like it
            shared = min(NUM_SHARED, length - 1, len(requests[0].context) - 1)
            context[:shared] = requests[0].context[:shared]
        if row == 3:
            context[-1] = requests[1].context[-1]
        requests.append(GenerateRequest(key=ItemKey('probe', row), context=context, max_new_tokens=num_new))
    twin = GenerateRequest(key=ItemKey('probe', len(shapes)), context=requests[1].context, max_new_tokens=5)
    ordered = [requests[-1], requests[0], requests[2], requests[1], twin, *requests[3:-1]]
    return Pool(
        requests=tuple(ordered), num_rows=NUM_ROWS, tokens_per_batch=max(longest, 64), rope_length=max(longest, 2)
    )


def logits_of(writer: ReplyWriter, way: str, pool: Pool, vocabulary: int) -> Steps:
    """The logits after each token of a pool's replies, written in a way; the tokens are the same in every way."""
    found: Steps = {}

    def choose(rows: Sequence[Row], logits: torch.Tensor) -> list[int]:
        tokens = []
        for row, values in zip(rows, logits, strict=True):
            key, step = row.reply.request.key, len(row.reply.ids)
            found.setdefault(key, {})[step] = values.cpu().numpy()
            tokens.append((31 * key.row + 17 * step + 7) % vocabulary)
        return tokens

    with writer.trying(way, choose):
        writer.run(pool)
    return found


def largest_of(steps: Steps) -> float:
    """The largest logit, NaN where one is."""
    return float(np.max([np.abs(logits).max() for of_reply in steps.values() for logits in of_reply.values()]))


def furthest(measure: Steps, found: Steps, rounding: float) -> float:
    """The largest difference of two ways' logits, NaN where one of those found is.

    In half precision the largest of the replies' medians: rounding may send single tokens to other experts.
    """
    if not np.isfinite(largest_of(found)):
        return np.nan
    worst = 0.0
    for key, steps in measure.items():
        off = sorted(float(np.abs(logits - found[key][step]).max()) for step, logits in steps.items())
        worst = max(worst, off[(len(off) - 1) // 2] if rounding else off[-1])
    return worst
