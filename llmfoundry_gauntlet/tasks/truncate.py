"""Truncate prompts to the model's length: drop whole shots, or tokens from the left as llm-foundry does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from llmfoundry_gauntlet.tasks.encode import EncodedPrompt, Encoder, Parts
from llmfoundry_gauntlet.types import Ids, Prompt

NO_CONTEXT = 'no context token is left to predict the continuation from'
MANY_CHARACTERS = 3  # per token; longer prompts probably do not fit, so they are not tokenized with all shots
CERTAIN = 64  # tokens; a prompt whose estimated length exceeds the limit by more is not tokenized


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedItem:
    """The token ids of an item, truncated to the model's length; equal contexts are the same array.

    `num_shots` is the number of shots left after truncation; a partly truncated shot counts as a fraction. `unscorable`
    is the reason if the item cannot be scored. `max_new_tokens` is 0 unless the model generates.
    """

    contexts: Parts
    continuations: Parts
    prompt_sha256: str
    num_shots: float = 0
    truncated: bool = False
    unscorable: str | None = None
    max_new_tokens: int = 0


def truncated_item(fitted: FittedPrompt, *, max_tokens: int, max_new_tokens: int = 0, reference: bool) -> EncodedItem:
    """Return a prompt whose contexts and continuations have at most `max_tokens`, truncated from the left.

    With `reference` each choice is truncated separately, special tokens and instruction included. Otherwise all choices
    are truncated alike, and the preamble only once the item's own context is used up. After a prompt without
    continuations the model generates `max_new_tokens`.
    """
    prompt, encoded = fitted.prompt, fitted.encoded
    preamble, lengths = encoded.preamble, [len(ids) for ids in encoded.continuations] or [0]
    wholes = aligned(encoded.contexts, len(lengths))
    if reference:
        kept: Sequence[Ids] = [
            cut_reference(np.concatenate([preamble, whole]), length, max_tokens)
            for whole, length in zip(wholes, lengths, strict=True)
        ]
    else:
        length = max_tokens - max(lengths)
        kept = aligned([cut_question(preamble, context, length) for context in encoded.contexts], len(lengths))
    num_dropped = max(len(preamble) + len(whole) - len(ids) for ids, whole in zip(kept, wholes, strict=True))
    distinct: dict[bytes, Ids] = {}
    return EncodedItem(
        contexts=tuple(distinct.setdefault(ids.tobytes(), ids) for ids in kept),
        continuations=encoded.continuations,
        prompt_sha256=prompt.sha256,
        num_shots=shots_left(prompt, preamble, num_dropped),
        truncated=fitted.too_long or num_dropped > 0,
        unscorable=unscorable(encoded.continuations, kept, max_tokens),
        max_new_tokens=max_new_tokens,
    )


def shots_left(prompt: Prompt, preamble: Ids, num_dropped: int) -> float:
    """Return the number of shots left after truncation from the left, a partly truncated one as a fraction."""
    if not prompt.num_shots or not num_dropped:
        return prompt.num_shots
    return prompt.num_shots * max(0, len(preamble) - num_dropped) / len(preamble)


def aligned(contexts: Sequence[Ids], num_continuations: int) -> Sequence[Ids]:
    """Return one context per continuation."""
    return [contexts[0]] * num_continuations if len(contexts) == 1 else contexts


def cut_question(preamble: Ids, context: Ids, length: int) -> Ids:
    """Return at most `length` tokens: the preamble and the context's end, or the end of both if that is too short."""
    left = length - len(preamble)
    if left > 0:
        return np.concatenate([preamble, context[-left:]])
    return np.concatenate([preamble, context])[-length:] if length > 0 else context[:0]


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

    instruction: str
    shots: tuple[str, ...]
    build: Callable[[int], Prompt]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompt:
    """A prompt with as many shots as fit; `too_long` if it does not fit with all shots."""

    prompt: Prompt
    encoded: EncodedPrompt
    too_long: bool


@dataclass(slots=True, kw_only=True)
class Search:
    """A binary search for the number of shots that fit: `low` shots do (0 is not checked), `high` do not."""

    source: Shortenable
    low: int
    high: int
    best: tuple[Prompt, EncodedPrompt] | None = None  # with `low` shots, once tokenized
    lengths: list[int] | None = None  # estimated tokens by number of shots

    @property
    def is_open(self) -> bool:
        """Return whether a number of shots between `low` and `high` remains to be tried."""
        return self.low + 1 < self.high


class ShotFitter:
    """Drop the first shots of a task's prompts until prompt and continuation fit."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._num_tokens: dict[str, int] = {}  # of each shot alone

    def fit(self, sources: Sequence[Shortenable]) -> list[FittedPrompt]:
        """Return all prompts in token ids, in order; each round of the searches calls the tokenizer once."""
        known: dict[str, Ids] = {}
        searches = [Search(source=source, low=0, high=len(source.shots) + 1) for source in sources]
        waiting = searches
        while steps := self._next_steps(waiting, known):
            tried = [search.source.build(num_shots) for search, num_shots in steps]
            for (search, num_shots), prompt, encoded in zip(
                steps, tried, self.encoder.prompts(tried, known), strict=True
            ):
                if encoded.length <= search.source.max_tokens:
                    search.low, search.best = num_shots, (prompt, encoded)
                else:
                    search.high = num_shots
            waiting = [search for search, _ in steps]
        without = [search for search in searches if search.best is None]
        bare = [search.source.build(0) for search in without]
        for search, prompt, encoded in zip(without, bare, self.encoder.prompts(bare, known), strict=True):
            search.best = (prompt, encoded)
        return [self._fitted(search, *search.best) for search in searches if search.best is not None]

    def _fitted(self, search: Search, prompt: Prompt, encoded: EncodedPrompt) -> FittedPrompt:
        too_long = search.low < len(search.source.shots) or encoded.length > search.source.max_tokens
        return FittedPrompt(prompt=prompt, encoded=encoded, too_long=too_long)

    def _next_steps(self, searches: Sequence[Search], known: dict[str, Ids]) -> list[tuple[Search, int]]:
        """Return the searches that are not finished, each with the number of shots to try next."""
        waiting = [search for search in searches if search.is_open]
        self._estimate([search for search in waiting if search.lengths is None and not self._try_whole(search)], known)
        steps = [(search, self._next_number(search)) for search in waiting]
        return [(search, num_shots) for search, num_shots in steps if num_shots > search.low]

    def _try_whole(self, search: Search) -> bool:
        """Return whether to try all shots: at the first step, if the text is short."""
        num_characters = sum(map(len, search.source.shots))
        return search.high > len(search.source.shots) and num_characters <= MANY_CHARACTERS * search.source.max_tokens

    def _next_number(self, search: Search) -> int:
        """Return the largest number of shots expected to fit; `low` if no more can."""
        lengths, most = search.lengths, search.source.max_tokens
        if lengths is None:
            return len(search.source.shots)
        within = [n for n in range(search.low + 1, search.high) if lengths[n] <= most]
        if within:
            return within[-1]
        return search.low + 1 if lengths[search.low + 1] <= most + CERTAIN else search.low

    def _estimate(self, searches: Sequence[Search], known: dict[str, Ids]) -> None:
        """Set the estimated lengths of the searches, the sums of the lengths of their parts."""
        texts = {text for search in searches for text in (search.source.instruction, *search.source.shots)}
        counted = self.encoder.encode(texts - self._num_tokens.keys(), special=False)
        self._num_tokens.update((text, len(ids)) for text, ids in counted.items())
        bare = [replace(search.source.build(1), preamble='') for search in searches]
        own_parts = self.encoder.own_parts(bare, known)
        for search, parts in zip(searches, own_parts, strict=True):
            own = self._num_tokens[search.source.instruction] + sum(max(map(len, part), default=0) for part in parts)
            shots = [self._num_tokens[text] for text in reversed(search.source.shots)]
            search.lengths = [own + length for length in accumulate(shots, initial=0)]
