"""Probe which layouts a model supports: run a few sequences in each and use the first that gives the right numbers.

A model is defined by its eager attention, which is also what llm-foundry loads. If the implementation it was loaded
with differs, as transformers' sdpa does for Gemma 2, where it ignores the cap on attention scores, evaluation uses
eager attention or the engine's own.

Some models silently accept masks, positions or windows that they do not support and return wrong numbers. So scoring is
compared with padded rows, and generation with whole sequences without a cache, both of which work with every model. A
model whose outputs hardly depend on the context, as at the first training steps, would agree in any layout: it is
scored in padded rows and probed again at the next evaluation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmfoundry_gauntlet.engine.attention import (
    EAGER,
    Unsupported,
    changed,
    eager_changes,
    implementation_of,
)
from llmfoundry_gauntlet.engine.continuous import ContinuousBatch
from llmfoundry_gauntlet.engine.decoding import CACHE, FORKED_PROMPTS, GENERATION_LAYOUTS, NO_CACHE, PROMPT_STREAM
from llmfoundry_gauntlet.engine.generate import Slot, TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import (
    FORKED,
    LAYOUTS,
    PADDED_ROWS,
    STREAM,
    Batch,
    batch_of_forks,
    make_batch,
    plan,
)
from llmfoundry_gauntlet.engine.rounding import (
    CANNOT,
    FLOAT32_ROUNDING,
    TOLERANCE,
    Tolerance,
    difference_in_float64,
    nudged_embeddings,
)
from llmfoundry_gauntlet.engine.trees import Tree, count_prefixes
from llmfoundry_gauntlet.errors import plural
from llmfoundry_gauntlet.types import Floats, GenerateRequest, Ids, ItemKey, ScoreOutput, ScoreRequest

log = logging.getLogger(__name__)

NAMES = {
    STREAM: 'token stream',
    FORKED: 'forked prefixes',
    PADDED_ROWS: 'padded rows',
    PROMPT_STREAM: 'key-value cache, prompts in a token stream',
    FORKED_PROMPTS: 'key-value cache, forked prompts',
    CACHE: 'key-value cache',
    NO_CACHE: 'no cache, whole rows at every token',
}
NOT_FINITE = "probe: the model's numbers are not finite"

# The least difference that counts.
HALF_TOLERANCE = 2  # in half precision, of summed log-probabilities, in rounding errors of the largest logit
NUDGED_TOLERANCE = 1.5  # the same, in differences of padded rows that are rounded otherwise
HALF_TOLERANCE_OF_LOGITS = 8  # the same for logits of generations
LEAST_CONTRAST = 2  # least change of the outputs with other contexts, in tolerances
LONGEST_SCAN = 600  # tokens: more than two chunks of any model
MAX_EAGER_SCORES = 1 << 27  # attention scores per layer that eager attention may hold at once

# The rows to score, and the prompts.
NUM_SHARED = 8  # tokens of the prefix that the probe's contexts share
MAX_SHORT = 128  # tokens per request of short rows

# The generations.
LENGTHS = (14, 3, 11, 3, 20, 1)  # of the prompts in tokens
SHARED_BY_PROMPTS = 9  # tokens of the first and the third: enough to run once
SAME_LAST_TOKEN = (1, 3)  # prompts that end with the same token
NEW_TOKENS = (4, 6, 2, 5, 7, 3)
LONG_NEW_TOKENS = 3  # after the long prompt, so that most of its logits come from decoding steps
NUM_SLOTS = 3

Steps = dict[ItemKey, dict[int, npt.NDArray[np.float32]]]  # logits by request and step


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The layout to run a model with, and the reason. If `certain`, it also holds for later weights."""

    layout: str
    reason: str
    certain: bool = True

    def __str__(self) -> str:
        return f'{NAMES[self.layout]} ({self.reason})'


def probe(language_model: CausalLanguageModel, *, vocabulary: int, longest: int) -> Probe:
    """Return the layout for scoring. Every rank makes the same forwards; the first sets the model's `dtype` and `tail`.

    `vocabulary` is the number of tokens to draw from, `longest` the length of the longest row to be scored: one row of
    the probe is as long, to reveal shorter attention windows.
    """
    check_attention(language_model, vocabulary=vocabulary, longest=longest)
    check_scans(language_model, vocabulary=vocabulary, longest=longest)
    short, long = rows_to_score(vocabulary, longest, language_model.hidden_token_id)
    floor = plan(short, tokens_per_batch=MAX_SHORT * len(short), layout=PADDED_ROWS)
    tolerance = tolerance_of(language_model, short, longest)
    expected = sums(language_model, floor, longest)
    if not np.isfinite(expected).all():
        return Probe(layout=PADDED_ROWS, reason=NOT_FINITE, certain=False)

    # Outputs that hardly depend on the context agree in any layout.
    others = plan(with_other_contexts(short, vocabulary), tokens_per_batch=longest, layout=PADDED_ROWS)
    contrast = np.median(np.abs(sums(language_model, others, longest) - expected))
    if not contrast >= LEAST_CONTRAST * tolerance.nominal:
        reason = f'probe: other contexts change {contrast:.1g} nats only, too little to tell'
        return Probe(layout=PADDED_ROWS, reason=reason, certain=False)

    of_long = plan(long, tokens_per_batch=longest, layout=PADDED_ROWS)
    expected_of_long = sums(language_model, of_long, longest)
    if not np.isfinite(expected_of_long).all():
        return Probe(layout=PADDED_ROWS, reason=NOT_FINITE, certain=False)

    # Forks take one to three forwards a batch, but ranks of a sharded model must make equally many.
    layouts = [layout for layout in LAYOUTS if layout != FORKED or not language_model.in_step]

    def difference(layout: str) -> float:
        off = furthest_sums(language_model, trials_of(layout, short), expected, longest)
        if not tolerance.covers(off):  # the long row only if it decides
            return off
        off_of_long = furthest_sums(language_model, trials_of_long(layout, long), expected_of_long, longest)
        return float(np.maximum(off, off_of_long))

    def exact_difference(layout: str) -> float:
        language_model.learn([one_row_of(short)])
        exact = sums(language_model, floor, longest)
        exact_of_long = sums(language_model, of_long, longest)
        off = furthest_sums(language_model, trials_of(layout, short), exact, longest)
        off_of_long = furthest_sums(language_model, trials_of_long(layout, long), exact_of_long, longest)
        return float(np.maximum(off, off_of_long))

    def in_float64(layout: str) -> float | None:
        return difference_in_float64(language_model, partial(exact_difference, layout))

    num_rows = len(expected) + len(expected_of_long)
    agreed = first_that_agrees(layouts, difference, in_float64, tolerance, what=plural(num_rows, 'row'), unit=' nats')
    if agreed.layout == FORKED:
        language_model.row_states = language_model.measure_states()
    return agreed


def probe_generation(generator: TextGenerator, *, vocabulary: int, longest: int) -> Probe:
    """Return the layout for generation. Every rank makes the same forwards.

    The logits of every step are compared, for prompts of different lengths that enter and leave while others are
    decoded and for one of the greatest length. `vocabulary` and `longest` are as for `probe`.
    """
    check_attention(generator.language_model, vocabulary=vocabulary, longest=longest)
    batch = batch_to_generate(vocabulary, longest, generator.language_model.hidden_token_id)
    expected = logits_of_whole_rows(generator, batch, vocabulary)
    largest = largest_of(expected)
    if not np.isfinite(largest):
        return Probe(layout=NO_CACHE, reason=NOT_FINITE, certain=False)
    of_half = HALF_TOLERANCE_OF_LOGITS * largest * generator.rounding  # 0 in float32
    of_rounding = partial(rounding_in_steps, generator, batch, vocabulary, expected)
    tolerance = Tolerance(max(TOLERANCE, of_half), of_rounding)

    def difference(layout: str) -> float:
        return furthest(expected, step_logits(generator, layout, batch, vocabulary), generator.rounding)

    def exact_difference(layout: str) -> float:
        before = generator.cached_bytes, generator.rounding
        try:
            exact = logits_of_whole_rows(generator, batch, vocabulary)
            return furthest(exact, step_logits(generator, layout, batch, vocabulary), rounding=0)
        finally:
            generator.cached_bytes, generator.rounding = before

    def in_float64(layout: str) -> float | None:
        return difference_in_float64(generator.language_model, partial(exact_difference, layout))

    num_generations = plural(len(batch.requests), 'generation')
    # Forked prompts take several forwards, of which ranks of a sharded model must make equally many.
    in_step = generator.language_model.in_step
    layouts = [layout for layout in GENERATION_LAYOUTS if layout != FORKED_PROMPTS or not in_step]
    agreed = first_that_agrees(layouts, difference, in_float64, tolerance, what=num_generations)

    # After two contexts with the same last token: equal logits would not depend on the context.
    first_logits = [expected[ItemKey('probe', row)][0] for row in SAME_LAST_TOKEN]
    contrast = np.abs(first_logits[0] - first_logits[1]).max()
    return replace(agreed, certain=bool(contrast >= LEAST_CONTRAST * tolerance.nominal))


def first_that_agrees(
    layouts: Sequence[str],
    difference: Callable[[str], float],
    in_float64: Callable[[str], float | None],
    tolerance: Tolerance,
    *,
    what: str,
    unit: str = '',
) -> Probe:
    """Return the first layout whose difference rounding explains, else the last, which needs no test.

    `in_float64` returns the difference of a layout in float64, None if it cannot be computed: a layout that is a little
    too far off is not rejected before it was run in it.
    """
    failures: list[str] = []
    for layout in layouts[:-1]:
        try:
            off = difference(layout)
        except torch.OutOfMemoryError:
            raise
        except CANNOT as error:
            reason = f'{error} is not supported' if isinstance(error, Unsupported) else type(error).__name__
            failures.append(f'{NAMES[layout]}: {reason}')
            continue
        agreement = f'probe: {what} within {shown(off)}'
        if tolerance.covers(off):
            return Probe(layout=layout, reason='; '.join([agreement, *failures]))

        failure = f'{NAMES[layout]} {off:.1g}{unit} off'
        exact = in_float64(layout) if tolerance.is_told_by_float64(off) else None
        if exact is not None:
            if exact <= TOLERANCE:
                return Probe(layout=layout, reason='; '.join([f'{agreement}, {shown(exact)} in float64', *failures]))
            failure += f' ({exact:.1g} in float64)'
        failures.append(failure)
    return Probe(layout=layouts[-1], reason=f'probe: {"; ".join(failures)}')


def shown(difference: float) -> str:
    """Return a difference with one digit."""
    return f'{difference:.0e}'.replace('e-0', 'e-')


def check_attention(language_model: CausalLanguageModel, *, vocabulary: int, longest: int) -> None:
    """Compare the model's attention with its eager attention in whole rows; use eager if they differ.

    Rows without padding are compared for themselves: for them transformers may leave out the mask, as for rows within
    an attention window, and an attention that needs one sees later tokens then, as sdpa does for Doge.

    In half precision only the median row must agree, as rounding may route a token to other experts. An ignored cap on
    attention scores always counts as a difference: with hardly trained weights it might not show. Long rows are
    shortened to what eager attention has memory for.
    """
    if language_model.eager or longest <= language_model.attention_compared:
        return
    model = language_model.model
    changes = eager_changes(model)
    config = model.config.get_text_config()
    own = implementation_of(config)
    if not changes:
        if own not in (None, EAGER):
            warn_of_fixed_attention(language_model, own)
        return
    if own == 'sdpa' and getattr(config, 'attn_logit_softcapping', None):
        use_eager_attention(language_model, 'sdpa leaves out attn_logit_softcapping')
        return

    affordable = math.isqrt(MAX_EAGER_SCORES // getattr(config, 'num_attention_heads', 1))
    short, long = rows_to_score(vocabulary, min(longest, affordable), language_model.hidden_token_id)
    of_one_length = rows_of_one_length(vocabulary, longest, language_model.hidden_token_id)
    groups = [
        plan([*short, *long], tokens_per_batch=MAX_SHORT * len(short), layout=PADDED_ROWS),
        plan([of_one_length], tokens_per_batch=MAX_SHORT, layout=PADDED_ROWS),
    ]

    def sums_of_groups() -> list[Floats]:
        return [sums(language_model, batches, longest) for batches in groups]

    language_model.attention_compared = longest
    by_own_attention = sums_of_groups()
    with changed(changes):
        expected = sums_of_groups()
    tolerance = tolerance_of(language_model, short, longest)
    difference = furthest_of_groups(by_own_attention, expected, np.median if tolerance.is_half else np.max)
    if not all(np.isfinite(of_group).all() for of_group in expected) or tolerance.covers(difference):
        return

    def exact_difference() -> float:
        language_model.learn([one_row_of(short)])
        exact = sums_of_groups()
        with changed(changes):
            return furthest_of_groups(exact, sums_of_groups(), np.max)

    is_told = tolerance.is_told_by_float64(difference)
    in_float64 = difference_in_float64(language_model, exact_difference) if is_told else None
    if in_float64 is None or not in_float64 <= TOLERANCE:
        use_eager_attention(
            language_model, f'{own} is {difference:.1g} nats off the eager attention that defines the model'
        )


def check_scans(language_model: CausalLanguageModel, *, vocabulary: int, longest: int) -> None:
    """Compare padded rows whose recurrent layers scan in short chunks with the model's own; use them if they agree."""
    if language_model.shortens_scans or not language_model.scans:
        return
    short, long = rows_to_score(vocabulary, min(longest, LONGEST_SCAN), language_model.hidden_token_id)
    tolerance = tolerance_of(language_model, short, longest)
    batches = plan([*short, *long], tokens_per_batch=MAX_SHORT * len(short), layout=PADDED_ROWS)
    expected = sums(language_model, batches, longest)
    language_model.shortens_scans = True
    difference = np.abs(sums(language_model, batches, longest) - expected).max()
    language_model.shortens_scans = False
    language_model.shortens_scans = tolerance.covers(difference)


def use_eager_attention(language_model: CausalLanguageModel, reason: str) -> None:
    """Run the model's own attention as eager from now on; log the reason once."""
    if not language_model.eager:
        language_model.eager = eager_changes(language_model.model)
        log.warning('attention: %s; evaluation follows eager attention', reason)


def warn_of_fixed_attention(language_model: CausalLanguageModel, implementation: str) -> None:
    """Log once that the model cannot be switched to eager attention, so that nothing was compared."""
    if not language_model.has_fixed_attention:
        language_model.has_fixed_attention = True
        log.warning(
            'attention: the model was loaded with %s and cannot be switched to the eager attention that defines the '
            "scores, so they were not compared; load it with attn_implementation='eager' to get its scores",
            implementation,
        )


def tolerance_of(language_model: CausalLanguageModel, requests: Sequence[ScoreRequest], longest: int) -> Tolerance:
    """Return the largest difference of summed log-probabilities that rounding explains, in nats. Calls `learn`.

    In half precision it grows with the number of layers, so it is measured.
    """
    largest, rounding = language_model.learn([one_row_of(requests)])
    of_rounding = partial(rounding_in_sums, language_model, requests, longest)
    if not rounding:
        return Tolerance(TOLERANCE, of_rounding)
    measured = NUDGED_TOLERANCE * rounding_in_sums(language_model, requests, longest, rounding)
    return Tolerance(float(np.max([TOLERANCE, HALF_TOLERANCE * largest * rounding, measured])), of_rounding)


def rounding_in_sums(
    language_model: CausalLanguageModel,
    requests: Sequence[ScoreRequest],
    longest: int,
    rounding: float = FLOAT32_ROUNDING,
) -> float:
    """Return the largest difference that rounding makes to sums, in nats.

    Padded rows are scored in batches of another shape, after embeddings that are rounded otherwise.
    """
    together = plan(requests, tokens_per_batch=MAX_SHORT * len(requests), layout=PADDED_ROWS)
    one_by_one: list[Batch] = []
    for request in requests:
        one_by_one += plan([request], tokens_per_batch=MAX_SHORT, layout=PADDED_ROWS)
    expected = sums(language_model, together, longest)
    with nudged_embeddings(language_model.model, rounding):
        return float(np.abs(sums(language_model, one_by_one, longest) - expected).max())


def rounding_in_steps(generator: TextGenerator, batch: ContinuousBatch, vocabulary: int, expected: Steps) -> float:
    """Return the largest difference that rounding makes to the logits of generations, after other embeddings."""
    with nudged_embeddings(generator.language_model.model, FLOAT32_ROUNDING):
        nudged = logits_of_whole_rows(generator, batch, vocabulary)
    return furthest(expected, nudged, generator.rounding)


def draw(rng: np.random.Generator, count: int, vocabulary: int, hidden: int | None) -> Ids:
    """Return random tokens other than the hidden one."""
    tokens = rng.integers(0, vocabulary, size=count, dtype=np.int32)
    return np.where(tokens == hidden, (tokens + 1) % vocabulary, tokens).astype(np.int32)


def rows_to_score(vocabulary: int, longest: int, hidden: int | None) -> tuple[list[ScoreRequest], list[ScoreRequest]]:
    """Return requests of eleven short rows in three trees, and one of the greatest length; always the same."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> Ids:
        return draw(rng, count, vocabulary, hidden)

    def request(row: int, context: Ids, *lengths: int) -> ScoreRequest:
        """Return a request with drawn choices of these lengths, its context cut so that no row is too long."""
        fitting = context[: max(1, longest - max(lengths) + 1)]
        choices = tuple(tokens(length) for length in lengths)
        return ScoreRequest(key=ItemKey('probe', row), contexts=(fitting,) * len(choices), continuations=choices)

    # All share a prefix; the second continues the first, the third leaves it early.
    shared = tokens(NUM_SHARED + 12)
    short = [
        request(0, shared, 1, 3, 4, 2, 2),
        request(1, np.concatenate([shared, tokens(7)]), 3, 4, 1),
        request(2, np.concatenate([shared[: NUM_SHARED + 1], tokens(9)]), 3, 4, 1),
    ]
    long = [request(3, tokens(longest), 4)]
    return short, long


def rows_of_one_length(vocabulary: int, longest: int, hidden: int | None) -> ScoreRequest:
    """Return a request of five rows of four tokens, which need no padding beside each other; always the same."""
    rng = np.random.default_rng(1)
    context = draw(rng, 3, vocabulary, hidden)[: max(1, longest - 1)]
    choices = tuple(draw(rng, 2, vocabulary, hidden) for _ in range(5))
    return ScoreRequest(key=ItemKey('probe', 0), contexts=(context,) * len(choices), continuations=choices)


def with_other_contexts(requests: Sequence[ScoreRequest], vocabulary: int) -> list[ScoreRequest]:
    """Return the same choices after contexts that differ in all tokens but the last."""
    others = []
    for request in requests:
        context = request.contexts[0]
        other = np.append((context[:-1] + 1) % vocabulary, context[-1]).astype(np.int32)
        others.append(replace(request, contexts=(other,) * len(request.contexts)))
    return others


def trials_of(layout: str, requests: Sequence[ScoreRequest]) -> Iterator[list[Batch]]:
    """Yield the short rows in a layout, in several ways."""
    return trial_forks(requests) if layout == FORKED else trial_batches(requests)


def trials_of_long(layout: str, requests: Sequence[ScoreRequest]) -> Iterator[list[Batch]]:
    """Yield the long row in a layout."""
    (request,) = requests
    context = request.contexts[0]
    if layout == FORKED:
        yield [batch_of_forks([fork_of(requests, len(context))])]
    else:
        yield plan(requests, tokens_per_batch=len(context))


def trial_batches(requests: Sequence[ScoreRequest]) -> Iterator[list[Batch]]:
    """Yield batches in the stream layout: in the planner's trees, in one tree, and after a cached prefix."""
    num_tokens = sum(len(ids) for request in requests for ids in (*request.contexts, *request.continuations))
    yield plan(requests, tokens_per_batch=num_tokens)

    tree = Tree(requests=tuple(requests), num_tokens=count_prefixes(requests))
    yield [make_batch([tree])]

    shortest = min(len(request.contexts[0]) for request in requests)
    num_cached = min(NUM_SHARED, shortest - 1)  # each context keeps a token to read logits from
    if num_cached > 0:
        prefix = requests[0].contexts[0][:num_cached].copy()
        trees = [Tree(requests=(request,), num_tokens=count_prefixes((request,)) - num_cached) for request in requests]
        yield [make_batch(trees, prefix)]


def trial_forks(requests: Sequence[ScoreRequest]) -> Iterator[list[Batch]]:
    """Yield forks after contexts of unequal length, and after a cached prefix whole rows and forks.

    Of the latter, the first are of contexts that are cut, and then of all requests after what they share.
    """
    alone = [fork_of([request], len(request.contexts[0])) for request in requests]
    yield [batch_of_forks(alone)]

    shortest = min(len(request.contexts[0]) for request in requests)
    num_cached = min(NUM_SHARED // 2, shortest - 1)  # each context keeps a token to read logits from
    if num_cached > 0:
        prefix = requests[0].contexts[0][:num_cached].copy()
        yield [batch_of_forks([fork_of([request], 0) for request in requests], prefix)]
        after_prefix = [replace(tree, fork=tree.fork - num_cached) for tree in alone]
        # Two batches, so that a prefix that the first one changes shows.
        yield [batch_of_forks(after_prefix[:2], prefix), batch_of_forks(after_prefix[2:], prefix)]
        shared = min(NUM_SHARED, shortest) - num_cached
        yield [batch_of_forks([fork_of(requests, shared)], prefix)]


def fork_of(requests: Sequence[ScoreRequest], fork: int) -> Tree:
    """Return requests whose rows share their first `fork` tokens."""
    return Tree(requests=tuple(requests), num_tokens=0, fork=fork)


def one_row_of(requests: Sequence[ScoreRequest]) -> ScoreRequest:
    """Return the first choice of the first request."""
    first = requests[0]
    return replace(first, contexts=first.contexts[:1], continuations=first.continuations[:1])


def furthest_sums(
    language_model: CausalLanguageModel, trials: Iterable[Sequence[Batch]], expected: Floats, rope_length: int
) -> float:
    """Return the largest difference of the sums of these batches from the expected ones; NaN if any is NaN."""
    differences = [np.abs(sums(language_model, batches, rope_length) - expected).max() for batches in trials]
    return float(np.max(differences))


def furthest_of_groups(groups: list[Floats], others: list[Floats], of_rows: Callable[[Floats], Any]) -> float:
    """Return the largest difference of any two groups of sums, of each `of_rows`; NaN if any is NaN."""
    differences = [of_rows(np.abs(group - other)) for group, other in zip(groups, others, strict=True)]
    return float(np.max(differences))


def sums(language_model: CausalLanguageModel, batches: Sequence[Batch], rope_length: int) -> Floats:
    """Return the summed log-probability of each row, in the order of the requests, all with the same `rope_length`."""
    outputs: dict[ItemKey, ScoreOutput] = {}
    for batch in batches:
        alike = replace(batch, rope_length=rope_length + 1)  # no row is longer
        outputs |= {output.key: output for output in language_model.run(alike)}
    language_model.forget()
    in_order = [outputs[key] for key in sorted(outputs)]
    return np.array([float(logprobs.sum()) for output in in_order for logprobs in output.logprobs])


def batch_to_generate(vocabulary: int, longest: int, hidden: int | None = None) -> ContinuousBatch:
    """Return a few short prompts, two of them equal, and a long one; always the same."""
    rng = np.random.default_rng(0)
    shapes = [*zip(LENGTHS, NEW_TOKENS, strict=True), (longest - LONG_NEW_TOKENS, LONG_NEW_TOKENS)]
    requests: list[GenerateRequest] = []
    for row, (length, num_new) in enumerate(shapes):
        # Models may be shorter than the probe's prompts.
        num_new = max(1, min(num_new, longest - 1))
        length = max(1, min(length, longest - num_new))
        context = draw(rng, length, vocabulary, hidden)
        if row == 2:  # runs together with the first, and shares a prefix with it
            shared = min(SHARED_BY_PROMPTS, length - 1, len(requests[0].context) - 1)
            context[:shared] = requests[0].context[:shared]
        if row == SAME_LAST_TOKEN[1]:
            context[-1] = requests[SAME_LAST_TOKEN[0]].context[-1]
        requests.append(GenerateRequest(key=ItemKey('probe', row), context=context, max_new_tokens=num_new))

    first, second, third, *others, long = requests
    twin = GenerateRequest(key=ItemKey('probe', len(shapes)), context=second.context, max_new_tokens=5)
    return ContinuousBatch(
        # The long prompt is there from the start, so that the short ones enter and leave beside it.
        requests=(long, first, third, second, twin, *others),
        num_slots=NUM_SLOTS,
        tokens_per_batch=max(longest, 64),
        rope_length=max(longest, 2),
    )


def step_logits(generator: TextGenerator, layout: str, batch: ContinuousBatch, vocabulary: int) -> Steps:
    """Return the logits after each token of a batch's generations in a layout; every layout gets the same tokens."""
    steps: Steps = {}

    def choose(slots: Sequence[Slot], logits: torch.Tensor) -> list[int]:
        tokens = []
        for slot, values in zip(slots, logits, strict=True):
            key = slot.generation.request.key
            step = len(slot.generation.ids)
            steps.setdefault(key, {})[step] = values.cpu().numpy()
            tokens.append(given_token(key, step, vocabulary))  # not by the logits, which may differ
        return tokens

    with generator.trying(layout, choose):
        generator.run(batch)
    return steps


@torch.no_grad()
def logits_of_whole_rows(generator: TextGenerator, batch: ContinuousBatch, vocabulary: int) -> Steps:
    """Return the logits after the same tokens without a cache; each row runs once, alone, with all its tokens."""
    steps: Steps = {}
    whole_rows = generator.trying(NO_CACHE, generator.choose)
    with whole_rows, generator.language_model.rotary_length(batch.rope_length):
        for request in batch.requests:
            num_new = request.max_new_tokens
            tokens = [given_token(request.key, step, vocabulary) for step in range(num_new - 1)]
            logits = generator.run_whole([request.context], [tokens], num_last=num_new)[0]
            steps[request.key] = dict(enumerate(logits.cpu().numpy()))
    return steps


def given_token(key: ItemKey, step: int, vocabulary: int) -> int:
    """Return the token that every layout gets at a step of a generation."""
    return (31 * key.row + 17 * step + 7) % vocabulary


def largest_of(steps: Steps) -> float:
    """Return the largest absolute logit, NaN if any is NaN."""
    return float(np.max([np.abs(logits).max() for of_request in steps.values() for logits in of_request.values()]))


def furthest(expected: Steps, steps: Steps, rounding: float) -> float:
    """Return the largest difference of logits, NaN if any in `steps` is NaN.

    In half precision it is the largest median of a generation, as rounding may route single tokens to other experts.
    """
    if not np.isfinite(largest_of(steps)):
        return np.nan
    furthest_of_all = 0.0
    for key, expected_steps in expected.items():
        differences = [float(np.abs(logits - steps[key][step]).max()) for step, logits in expected_steps.items()]
        differences.sort()
        of_generation = differences[(len(differences) - 1) // 2] if rounding else differences[-1]
        furthest_of_all = max(furthest_of_all, of_generation)
    return furthest_of_all
