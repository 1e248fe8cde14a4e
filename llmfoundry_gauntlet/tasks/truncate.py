"""Truncate prompts to the model's length: drop whole shots, or tokens from the left as llm-foundry does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from llmfoundry_gauntlet.tasks.encode import EncodedPrompt, Encoder, Parts
from llmfoundry_gauntlet.types import Ids, Prompt

CERTAIN = 64  # tokens; a prompt whose estimated length exceeds the limit by more is not tokenized
NO_CONTEXT = 'no context token is left to predict the continuation from'


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedItem:
    """The token ids of an item, truncated to the model's length; equal contexts are the same array.

    `num_shots` is the number of shots left after truncation; a partly truncated shot counts as a fraction. `unscorable`
    is the reason if the item cannot be scored. `max_new_tokens` is 0 unless the model generates, `ending` are then the
    prompt's last characters, and `gold` is the right generation, None if there is none.
    """

    contexts: Parts
    continuations: Parts
    prompt_sha256: str
    num_shots: float = 0
    prompt_shortened: bool = False
    unscorable: str | None = None
    max_new_tokens: int = 0
    ending: str = ''
    gold: Ids | None = None


def truncated_item(
    encoded: EncodedPrompt, *, num_shots: int = 0, max_tokens: int, max_new_tokens: int = 0, reference: bool
) -> EncodedItem:
    """Return a prompt whose contexts and continuations have at most `max_tokens`, truncated from the left.

    `num_shots` is its number of shots before any were dropped. With `reference` each choice is truncated separately,
    special tokens and instruction included. Otherwise all choices are truncated alike, and the preamble only once the
    item's own context is used up. After a prompt without continuations the model generates `max_new_tokens`.
    """
    prompt, preamble = encoded.prompt, encoded.preamble
    num_of_continuations = [len(ids) for ids in encoded.continuations] or [0]
    contexts = aligned(encoded.contexts, len(num_of_continuations))
    if reference:
        kept: Sequence[Ids] = [
            cut_reference(np.concatenate([preamble, context]), num_continuation, max_tokens)
            for context, num_continuation in zip(contexts, num_of_continuations, strict=True)
        ]
    else:
        most = max_tokens - max(num_of_continuations)
        cut = [cut_question(preamble, context, most) for context in encoded.contexts]
        kept = aligned(cut, len(num_of_continuations))
    num_dropped = max(len(preamble) + len(context) - len(ids) for ids, context in zip(kept, contexts, strict=True))
    # Equal contexts become the same array, so that each is stored once.
    distinct: dict[bytes, Ids] = {}
    return EncodedItem(
        contexts=tuple(distinct.setdefault(ids.tobytes(), ids) for ids in kept),
        continuations=encoded.continuations,
        prompt_sha256=prompt.sha256,
        num_shots=shots_left(prompt, len(preamble) or max(map(len, contexts)), num_dropped),
        prompt_shortened=prompt.num_shots < num_shots or num_dropped > 0,
        unscorable=unscorable(encoded.continuations, kept, max_tokens),
        max_new_tokens=max_new_tokens,
        ending=encoded.ending,
    )


def shots_left(prompt: Prompt, num_tokens: int, num_dropped: int) -> float:
    """Return the number of shots left after truncation from the left, a partly truncated one as a fraction.

    `num_tokens` is the number of tokens that may be shots: those of the preamble, or in chat, where it is part of the
    message, those of the whole context.
    """
    if not prompt.num_shots or not num_dropped:
        return prompt.num_shots
    return prompt.num_shots * max(0, num_tokens - num_dropped) / num_tokens


def aligned(contexts: Sequence[Ids], num_continuations: int) -> Sequence[Ids]:
    """Return one context per continuation."""
    return [contexts[0]] * num_continuations if len(contexts) == 1 else contexts


def cut_question(preamble: Ids, context: Ids, length: int) -> Ids:
    """Return at most `length` tokens: the preamble and the context's end, or the end of both if that is too short."""
    num_of_context = length - len(preamble)
    if num_of_context > 0:
        return np.concatenate([preamble, context[-num_of_context:]])
    # `[-0:]` would keep everything.
    if length <= 0:
        return context[:0]
    return np.concatenate([preamble, context])[-length:]


def cut_reference(whole: Ids, num_continuation: int, max_seq_len: int) -> Ids:
    """Truncate as llm-foundry 0.22's `trim_context`, whose `[-0:]` keeps all if the continuation fills the length."""
    if len(whole) + num_continuation <= max_seq_len:
        return whole
    return whole[-(max_seq_len - num_continuation) :]


def unscorable(continuations: Sequence[Ids], contexts: Sequence[Ids], max_seq_len: int) -> str | None:
    """Return why an item cannot be scored, None if it can."""
    longest = max(map(len, continuations), default=0)
    if longest > max_seq_len:
        return f'a continuation has {longest} tokens, more than max_seq_len {max_seq_len}'
    if not all(map(len, continuations)):
        return 'the tokenizer gives no tokens for a continuation'
    if min(map(len, contexts)) == 0:
        return NO_CONTEXT
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortenable:
    """A prompt that can drop shots: `build(n)` returns it with its last n shots. `shots` are the texts of all shots.

    `max_tokens` is the limit, continuation included.
    """

    shots: tuple[str, ...]
    build: Callable[[int], Prompt]
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class ShotSearch:
    """The search for the largest number of shots of one prompt that fits.

    `longest` is the longest prompt known to fit, or the one without shots; `too_many` is the smallest number of shots
    known not to fit; `num_shots` is the number to try next.
    """

    source: Shortenable
    longest: EncodedPrompt
    too_many: int
    num_shots: int

    @property
    def is_open(self) -> bool:
        """Return whether it is unknown if `num_shots` fit."""
        return self.longest.prompt.num_shots < self.num_shots < self.too_many

    def take(self, encoded: EncodedPrompt) -> None:
        """Take the prompt with `num_shots` in token ids, and try one shot more or less next."""
        if encoded.length <= self.source.max_tokens:
            self.longest = encoded
            self.num_shots += 1
        else:
            self.too_many = self.num_shots
            self.num_shots -= 1


def fit_shots(
    encoder: Encoder, sources: Sequence[Shortenable], num_tokens: dict[str, int] | None = None
) -> list[EncodedPrompt]:
    """Return all prompts in token ids, in order, each with as many of its last shots as fit, or without shots.

    The first number tried is estimated from the tokens of each shot alone, which `num_tokens` caches across calls. Each
    round of all searches calls the tokenizer once.
    """
    num_tokens = {} if num_tokens is None else num_tokens
    uncounted = {shot for source in sources for shot in source.shots} - num_tokens.keys()
    for shot, ids in encoder.encode(uncounted, special=False).items():
        num_tokens[shot] = len(ids)
    known: dict[str, Ids] = {}
    without_shots = encoder.prompts([source.build(0) for source in sources], known)
    searches = [
        search_from_estimate(source, encoded, num_tokens)
        for source, encoded in zip(sources, without_shots, strict=True)
    ]
    while unfinished := [search for search in searches if search.is_open]:
        prompts = [search.source.build(search.num_shots) for search in unfinished]
        for search, encoded in zip(unfinished, encoder.prompts(prompts, known), strict=True):
            search.take(encoded)
    return [search.longest for search in searches]


def search_from_estimate(source: Shortenable, without_shots: EncodedPrompt, num_tokens: dict[str, int]) -> ShotSearch:
    """Return the search that begins with as many shots as fit if each has the number of tokens that it has alone."""
    of_last_shots = (num_tokens[shot] for shot in reversed(source.shots))
    estimates = list(accumulate(of_last_shots, initial=without_shots.length))  # with 0, 1, ... shots
    estimated = bisect_right(estimates, source.max_tokens) - 1
    return ShotSearch(
        source=source,
        longest=without_shots,
        too_many=bisect_right(estimates, source.max_tokens + CERTAIN),
        num_shots=max(1, estimated),
    )
