"""Prompts with as many of their shots as fit in the model's length.

The length of a prompt is known only once it is tokenised. To tokenise few prompts, every shot is tokenised by itself
once, the number of shots that fit is estimated from their lengths, and then checked by tokenising the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from llmfoundry_gauntlet.tasks.encode import EncodedPrompt, Encoder
from llmfoundry_gauntlet.types import Ids, Prompt

MANY_CHARACTERS = 3  # per token: prompts with more are probably too long and are not tokenised with all shots
CERTAIN = 64  # tokens: a prompt whose estimate is too long by more than this is not tokenised


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortenable:
    """A prompt that can be shortened: `build(n)` returns it with its last n shots. `shots` are the texts of all.

    `max_tokens` is the limit, continuation included.
    """

    instruction: str
    shots: tuple[str, ...]
    build: Callable[[int], Prompt]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompt:
    """A prompt with as many shots as fit. `too_long`: with all shots it would not fit."""

    prompt: Prompt
    encoded: EncodedPrompt
    too_long: bool


@dataclass(slots=True, kw_only=True)
class Search:
    """The search for the number of shots that fit: `low` shots do (0 is not checked), `high` do not."""

    source: Shortenable
    low: int
    high: int
    best: tuple[Prompt, EncodedPrompt] | None = None  # with `low` shots, once it is tokenised
    lengths: list[int] | None = None  # estimated tokens by number of shots

    @property
    def is_open(self) -> bool:
        """Return whether a number of shots between `low` and `high` remains to be tried."""
        return self.low + 1 < self.high


class ShotFitter:
    """Drops the first shots of a task's prompts until prompt and continuation fit."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._num_tokens: dict[str, int] = {}  # of a shot by itself

    def fit(self, sources: Sequence[Shortenable]) -> list[FittedPrompt]:
        """Return all prompts in token ids, in order; each round of the searches is one call of the tokenizer."""
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
        own_parts = self.encoder.own_parts([search.source.build(1) for search in searches], known)
        for search, parts in zip(searches, own_parts, strict=True):
            own = self._num_tokens[search.source.instruction] + sum(max(map(len, part), default=0) for part in parts)
            shots = [self._num_tokens[text] for text in reversed(search.source.shots)]
            search.lengths = [own + length for length in accumulate(shots, initial=0)]
