"""Probe which layout a model allows: score a few rows in each, and trust only a layout that agrees.

A model is defined by its eager attention, which is also what llm-foundry loads. Where the implementation that it was
loaded with gives other numbers, as transformers' sdpa does for Gemma 2, whose cap on attention scores it leaves out,
evaluation uses eager attention or our own.

Some models take tree masks, positions or windows without a word and give wrong numbers. So padded rows, which every
model can run, are the measure, and a way of running is taken where it agrees with them. A model whose numbers hardly
depend on the context, as some do at their first step, would agree whatever it does: it runs padded rows for now, and
is probed again at the next evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from llmfoundry_gauntlet.engine.eager import changed, eager_changes
from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel
from llmfoundry_gauntlet.engine.layout import Tree, count_prefixes
from llmfoundry_gauntlet.engine.plan import LAYOUTS, MASKED_ROWS, PADDED_ROWS, STREAM, Batch, make_batch, plan
from llmfoundry_gauntlet.types import Floats, Ids, ItemKey, ScoreRequest

TOLERANCE = 1e-4  # nats between summed log-probabilities, where the model computes in float32
HALF_TOLERANCE = 2  # roundings of the largest logit, where it computes in less
MAX_EAGER_SCORES = 1 << 27  # attention scores of a layer that eager attention may hold at once for the check
LEAST_CONTRAST = 3  # times the tolerance: what other contexts must change
NUM_SHARED = 8  # tokens that the probe's contexts begin with
MAX_SHORT = 128  # tokens of a request's short rows together
NAMES = {STREAM: 'token stream', MASKED_ROWS: 'masked rows', PADDED_ROWS: 'padded rows'}
CANNOT = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, AssertionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The layout to run a model with, and why. It holds for later weights as well where it is `certain`."""

    layout: str
    reason: str
    certain: bool = True

    def __str__(self) -> str:
        return f'{NAMES[self.layout]} ({self.reason})'


def probe(language_model: CausalLanguageModel, *, vocabulary: int, longest: int) -> Probe:
    """Finds the layout for a model, with the same forwards on every rank, and lets it learn from its first forward.

    `vocabulary` counts the tokens that may occur, `longest` the tokens of the longest row to come: one row is as long,
    so that attention windows show that are shorter.
    """
    check_attention(language_model, vocabulary=vocabulary, longest=longest)
    short, long = rows_to_score(vocabulary, longest, language_model.hidden_token_id)
    floor = plan(short, tokens_per_batch=MAX_SHORT * len(short), layout=PADDED_ROWS)
    largest, rounding = learn(language_model, short[0])
    measure = sums(language_model, floor, longest)
    if not np.isfinite(measure).all():
        return Probe(layout=PADDED_ROWS, reason="probe: the model's numbers are not finite", certain=False)
    tolerance = max(TOLERANCE, HALF_TOLERANCE * largest * rounding)
    others = plan(with_other_contexts(short, vocabulary), tokens_per_batch=longest, layout=PADDED_ROWS)
    contrast = np.median(np.abs(sums(language_model, others, longest) - measure))
    if not contrast >= LEAST_CONTRAST * tolerance:
        reason = f'probe: other contexts change {contrast:.1g} nats only, too little to tell'
        return Probe(layout=PADDED_ROWS, reason=reason, certain=False)
    measure_of_long = sums(language_model, plan(long, tokens_per_batch=longest, layout=PADDED_ROWS), longest)
    if not np.isfinite(measure_of_long).all():
        return Probe(layout=PADDED_ROWS, reason="probe: the model's numbers are not finite", certain=False)
    num_rows = len(measure) + len(measure_of_long)
    failures: list[str] = []
    for layout in LAYOUTS[:-1]:
        try:
            off = np.max([np.abs(sums(language_model, batches, longest) - measure) for batches in ways(short, layout)])
            if off <= tolerance:
                found = sums(language_model, plan(long, tokens_per_batch=longest, layout=layout), longest)
                off = np.max([off, *np.abs(found - measure_of_long)])
        except torch.OutOfMemoryError:
            raise
        except CANNOT as error:
            failures.append(f'{NAMES[layout]}: {type(error).__name__}')
            continue
        if off <= tolerance:
            agreement = f'probe: {num_rows} rows within {off:.0e}'.replace('e-0', 'e-')
            return Probe(layout=layout, reason='; '.join([agreement, *failures]))
        failures.append(f'{NAMES[layout]} {off:.1g} nats off')
    return Probe(layout=PADDED_ROWS, reason=f'probe: {"; ".join(failures)}')


def check_attention(language_model: CausalLanguageModel, *, vocabulary: int, longest: int) -> None:
    """Compare the model's attention with its eager one in padded rows; make it use eager where they differ.

    In half precision the median row must agree within the tolerance, as rounding may send a token to other experts.
    There, and in weights that are hardly trained, a cap that is left out might not show, so that it counts by itself.
    Long rows are cut to what eager attention has memory for.
    """
    model = language_model.model
    changes = eager_changes(model)
    if language_model.eager or not changes:
        return
    config = model.config.get_text_config()
    own = config._attn_implementation
    if own == 'sdpa' and getattr(config, 'attn_logit_softcapping', None):
        language_model.use_eager_attention('sdpa leaves out attn_logit_softcapping')
        return
    affordable = math.isqrt(MAX_EAGER_SCORES // getattr(config, 'num_attention_heads', 1))
    short, long = rows_to_score(vocabulary, min(longest, affordable), language_model.hidden_token_id)
    batches = plan([*short, *long], tokens_per_batch=MAX_SHORT * len(short), layout=PADDED_ROWS)
    found = sums(language_model, batches, longest)
    with changed(changes):
        measure = sums(language_model, batches, longest)
    largest, rounding = learn(language_model, short[0])
    off = np.abs(found - measure)
    typical = float(np.median(off) if rounding else off.max())
    if np.isfinite(measure).all() and not typical <= max(TOLERANCE, HALF_TOLERANCE * largest * rounding):
        language_model.use_eager_attention(
            f'{own} is {typical:.1g} nats off the eager attention that defines the model'
        )


def learn(language_model: CausalLanguageModel, request: ScoreRequest) -> tuple[float, float]:
    """Let the model learn from a single row; return its largest logit and the relative rounding of its precision."""
    single = replace(request, contexts=request.contexts[:1], continuations=request.continuations[:1])
    return language_model.learn(make_batch([Tree(requests=(single,), num_tokens=0)], PADDED_ROWS, None))


def rows_to_score(
    vocabulary: int, longest: int, hidden_token_id: int | None
) -> tuple[list[ScoreRequest], list[ScoreRequest]]:
    """Requests of eleven short rows in three trees, and of one as long as can be; random tokens, the same each time."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> Ids:
        tokens = rng.integers(0, vocabulary, size=count, dtype=np.int32)
        return np.where(tokens == hidden_token_id, (tokens + 1) % vocabulary, tokens).astype(np.int32)

    def request(row: int, context: Ids, *lengths: int) -> ScoreRequest:
        cut = context[: max(1, longest - max(lengths) + 1)]
        choices = tuple(map(draw, lengths))
        return ScoreRequest(key=ItemKey('probe', row), contexts=(cut,) * len(choices), continuations=choices)

    shared = draw(NUM_SHARED + 12)
    short = [  # all begin alike; the second goes on from the first, the third leaves it early
        request(0, shared, 1, 3, 4, 2, 2),
        request(1, np.concatenate([shared, draw(7)]), 3, 4, 1),
        request(2, np.concatenate([shared[: NUM_SHARED + 1], draw(9)]), 3, 4, 1),
    ]
    return short, [request(3, draw(longest), 4)]


def with_other_contexts(requests: Sequence[ScoreRequest], vocabulary: int) -> list[ScoreRequest]:
    """The same choices after contexts of the same length in which all tokens but the last are others."""
    changed = []
    for request in requests:
        context = request.contexts[0]
        other = np.append((context[:-1] + 1) % vocabulary, context[-1]).astype(np.int32)
        changed.append(replace(request, contexts=(other,) * len(request.contexts)))
    return changed


def ways(requests: Sequence[ScoreRequest], layout: str) -> Iterator[list[Batch]]:
    """The batches of a layout to be tried: in trees of the planner's and in one tree; a stream also after a prefix."""
    yield plan(requests, tokens_per_batch=sum(map(longest_sequences, requests)), layout=layout)
    tree = Tree(requests=tuple(requests), num_tokens=count_prefixes(requests))
    yield [make_batch([tree], layout, None)]
    kept = min(NUM_SHARED, min(len(request.contexts[0]) for request in requests) - 1)
    if layout == STREAM and kept > 0:
        prefix = requests[0].contexts[0][:kept].copy()
        trees = [Tree(requests=(request,), num_tokens=count_prefixes((request,)) - kept) for request in requests]
        yield [make_batch(trees, layout, prefix)]


def longest_sequences(request: ScoreRequest) -> int:
    """Tokens of all sequences together."""
    return sum(len(a) + len(b) for a, b in zip(request.contexts, request.continuations, strict=True))


def sums(language_model: CausalLanguageModel, batches: Sequence[Batch], rope_length: int) -> Floats:
    """Summed log-probability of each row, in the order of the requests, with the rotary frequencies of a length."""
    alike = [replace(batch, rope_length=rope_length + 1) for batch in batches]  # no row is longer
    outputs = {output.key: output for batch in alike for output in language_model.run(batch)}
    language_model.forget()
    return np.array([float(values.sum()) for _, output in sorted(outputs.items()) for values in output.logprobs])
