"""Tokenize prompts and truncate them to the model's length.

The preamble (instruction and shots), the item's own context and each continuation are tokenized separately and joined,
as in llm-foundry 0.22 (`eval/datasets/in_context_learning_evaluation.py:tokenize_example`): only the preamble gets the
tokenizer's special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from llmfoundry_gauntlet.errors import Caught, ModelError
from llmfoundry_gauntlet.tasks.fingerprint import tokenizer_fingerprint, tokenizer_name
from llmfoundry_gauntlet.types import Ids, Prompt

# Increment it if texts or token ids of prompts change, so that cached requests are recomputed.
PROMPTS_VERSION = 2

Parts = tuple[Ids, ...]
MAX_SHOWN = 200  # characters of a text in an error
NO_IDS = np.zeros(0, np.int32)
CALL_METHODS = ('__call__', '_call_one', 'batch_encode_plus', '_batch_encode_plus', 'set_truncation_and_padding')


NO_CONTEXT = 'no context token is left to predict the continuation from'
MANY_CHARACTERS = 3  # per token; longer prompts probably do not fit, so they are not tokenized with all shots
CERTAIN = 64  # tokens; a prompt whose estimated length exceeds the limit by more is not tokenized


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt's parts in token ids. `contexts` exclude the preamble: one for all continuations, or one each."""

    preamble: Ids
    contexts: Parts
    continuations: Parts

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest context and the longest continuation together."""
        return len(self.preamble) + max(map(len, self.contexts)) + max(map(len, self.continuations), default=0)


class Encoder:
    """Encode prompts with a Hugging Face tokenizer. Raise ModelError for text that it cannot encode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.uses_backend = has_plain_backend(tokenizer)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.prefix_space = len(self.encode([' a'], special=False)[' a']) == 1

    @cached_property
    def fingerprint(self) -> str | None:
        """Return a digest of everything that token ids depend on; None if unknown."""
        probed = tokenizer_fingerprint(self.tokenizer, self._probe)
        return probed and f'{probed} {self.eos_token_id} {self.prefix_space}'

    @cached_property
    def name(self) -> str:
        """Return the tokenizer's class, size and digest, for records."""
        return tokenizer_name(self.tokenizer)

    def _probe(self, text: str, special: bool) -> list[int] | None:
        try:
            ids: list[int] = self.encode([text], special=special)[text].tolist()
        except ModelError:
            return None
        return ids

    def encode(self, texts: Iterable[str], *, special: bool) -> dict[str, Ids]:
        """Return token ids by text; each distinct text is tokenized once."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return {}
        return dict(zip(distinct, self._ids(distinct, special), strict=True))

    def _ids(self, texts: list[str], special: bool) -> list[Ids]:
        with tokenizer_errors() as caught:
            if self.uses_backend and len(texts) > 1:
                return self._backend_ids(texts, special)
            return self._called(texts, special)
        if len(texts) > 1:  # find the text that failed
            half = len(texts) // 2
            return self._ids(texts[:half], special) + self._ids(texts[half:], special)
        name = type(self.tokenizer).__name__
        shown = texts[0] if len(texts[0]) <= MAX_SHOWN else f'{texts[0][:MAX_SHOWN]}...'
        raise ModelError(f'the tokenizer ({name}) cannot encode {shown!r}: {caught.error}') from caught.error

    def _called(self, texts: list[str], special: bool) -> list[Ids]:
        """Encode by calling the tokenizer."""
        encoded = self.tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [as_ids(ids) for ids in encoded['input_ids']]

    def _backend_ids(self, texts: list[str], special: bool) -> list[Ids]:
        """Encode with the Rust backend without offsets, which takes a quarter less time than calling the tokenizer.

        The first text is encoded both ways: the call sets up the backend (no truncation, no padding, special tokens in
        texts), and its result confirms that the backend gives the same ids.
        """
        (first,) = self._called(texts[:1], special)
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        arrays = [as_ids(encoding.ids) for encoding in encodings]
        if np.array_equal(arrays[0], first):
            return arrays
        self.uses_backend = False
        return self._called(texts, special)

    def preambles(self, texts: Iterable[str]) -> dict[str, Ids]:
        """Return ids of preambles with special tokens, but without a final eos, which some tokenizers add."""
        encoded = self.encode(texts, special=True)
        return {text: self._without_eos(ids) for text, ids in encoded.items()}

    def _without_eos(self, ids: Ids) -> Ids:
        ends = self.eos_token_id is not None and len(ids) > 1 and ids[-1] == self.eos_token_id
        return ids[:-1] if ends else ids

    def longest(self, texts: Iterable[str]) -> int:
        """Return the number of tokens of the longest text, special tokens included."""
        return max((len(ids) for ids in self.encode(texts, special=True).values()), default=0)

    def continuation_text(self, text: str) -> str:
        """Return a continuation with the leading space that byte-pair tokenizers expect."""
        return spaced(text) if self.prefix_space else text

    @cached_property
    def adds_space(self) -> bool:
        """Return whether separately tokenized texts are joined with a space, as in SentencePiece."""
        (ids,) = self.encode(['a'], special=False).values()
        return bool(self.tokenizer.decode([*ids, *ids]) == 'a a')

    def word_after(self, text: str) -> str:
        """Return a word that follows another, with a leading space unless the tokenizer adds one."""
        return text.lstrip(' ') if self.adds_space else spaced(text)

    @property
    def chat_template(self) -> str | None:
        """Return the tokenizer's chat template, if it has one."""
        template = getattr(self.tokenizer, 'chat_template', None)
        return None if template is None else repr(template)

    def in_chat(self, prompt: Prompt) -> bool:
        """Return whether a prompt is sent as a chat message. Raise ModelError if the tokenizer lacks a template."""
        if prompt.chat_template is True and self.chat_template is None:
            name = type(self.tokenizer).__name__
            raise ModelError(
                f'the tokenizer ({name}) has no chat template; leave out apply_chat_template (of SCORE: chat_template: '
                'true), or give a tokenizer that has one'
            )
        return bool(prompt.chat_template) and self.chat_template is not None

    def contexts(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the contexts, in the chat template if they are sent in chat; it has its own special tokens."""
        if not self.in_chat(prompt):
            return prompt.own_texts
        return tuple(self._message(prompt.preamble + context) + prompt.lead for context in prompt.contexts)

    def _message(self, text: str) -> str:
        from jinja2 import TemplateError

        message = [{'role': 'user', 'content': text}]
        try:
            return str(self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ModelError(f"the tokenizer's chat template cannot be applied: {error}") from error

    def own_parts(self, prompts: Sequence[Prompt], known: dict[str, Ids]) -> list[tuple[Parts, Parts]]:
        """Return contexts and continuations of each prompt. `known` caches ids by text across calls."""
        texts = [
            (self.contexts(prompt), tuple(map(self._continuing(prompt), prompt.continuations))) for prompt in prompts
        ]
        needed = (text for parts in texts for part in parts for text in part)
        known.update(self.encode((text for text in needed if text not in known), special=False))
        return [
            (tuple(known[text] for text in contexts), tuple(known[text] for text in continuations))
            for contexts, continuations in texts
        ]

    def _continuing(self, prompt: Prompt) -> Callable[[str], str]:
        """Return a function from a continuation to its text after a prompt; an answer begins without a space."""
        if prompt.lead:
            return self.word_after
        return str.lstrip if self.in_chat(prompt) else self.continuation_text

    def prompts(self, prompts: Sequence[Prompt], known: dict[str, Ids] | None = None) -> list[EncodedPrompt]:
        """Return all prompts in token ids, in order. `known` is as for `own_parts`."""
        preambles = self.preambles(prompt.preamble for prompt in prompts)
        own = self.own_parts(prompts, {} if known is None else known)
        return [
            EncodedPrompt(
                preamble=NO_IDS if self.in_chat(prompt) else preambles[prompt.preamble],
                contexts=contexts,
                continuations=continuations,
            )
            for prompt, (contexts, continuations) in zip(prompts, own, strict=True)
        ]


def tokenizer_errors() -> Caught:
    """Return a context that catches a tokenizer's errors; the tokenizers library, in Rust, raises Exception itself."""
    return Caught(packages=('pyo3_runtime',), bare=True)


def spaced(text: str) -> str:
    """Return a text with a leading space."""
    return text if text.startswith(' ') else f' {text}'


def as_ids(ids: Sequence[int]) -> Ids:
    """Return token ids as an array."""
    return np.asarray(ids, dtype=np.int32)


def has_plain_backend(tokenizer: Any) -> bool:
    """Return whether `tokenizer` is a Rust tokenizer whose call runs no code from outside transformers."""
    methods = [getattr(type(tokenizer), name, None) for name in CALL_METHODS]
    plain = all(method is None or method.__module__.startswith('transformers.') for method in methods)
    return plain and hasattr(getattr(tokenizer, 'backend_tokenizer', None), 'encode_batch_fast')


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


def encode_scored(
    encoded: EncodedPrompt, *, prompt: Prompt, max_seq_len: int, truncated: bool, reference: bool
) -> EncodedItem:
    """Return an item whose continuations are scored, its contexts truncated from the left.

    With `reference` each choice is truncated separately, special tokens and instruction included. Otherwise all choices
    are truncated alike, and the preamble only once the item's own context is used up.
    """
    preamble, continuations = encoded.preamble, encoded.continuations
    if reference:
        lengths = map(len, continuations)
        kept: Sequence[Ids] = [
            cut_reference(np.concatenate([preamble, context]), length, max_seq_len)
            for context, length in zip(aligned(encoded.contexts, len(continuations)), lengths, strict=True)
        ]
    else:
        length = max_seq_len - max(map(len, continuations))
        kept = aligned([cut_question(preamble, context, length) for context in encoded.contexts], len(continuations))
    wholes = aligned(encoded.contexts, len(continuations))
    num_dropped = max(len(preamble) + len(whole) - len(ids) for ids, whole in zip(kept, wholes, strict=True))
    distinct: dict[bytes, Ids] = {}
    return EncodedItem(
        contexts=tuple(distinct.setdefault(ids.tobytes(), ids) for ids in kept),
        continuations=continuations,
        prompt_sha256=prompt.sha256,
        num_shots=shots_left(prompt, preamble, num_dropped),
        truncated=truncated or num_dropped > 0,
        unscorable=unscorable(continuations, kept, max_seq_len),
    )


def encode_generated(
    encoded: EncodedPrompt,
    *,
    prompt: Prompt,
    max_prompt_tokens: int,
    max_new_tokens: int,
    truncated: bool,
    reference: bool,
) -> EncodedItem:
    """Return an item after which the model generates, its prompt truncated from the left.

    With `reference` special tokens and instruction are truncated first; otherwise only once the item's own context is
    used up.
    """
    (context,) = encoded.contexts
    if reference:
        kept = np.concatenate([encoded.preamble, context])[-max_prompt_tokens:]
    else:
        kept = cut_question(encoded.preamble, context, max_prompt_tokens)
    num_dropped = len(encoded.preamble) + len(context) - len(kept)
    return EncodedItem(
        contexts=(kept,),
        continuations=(),
        prompt_sha256=prompt.sha256,
        num_shots=shots_left(prompt, encoded.preamble, num_dropped),
        truncated=truncated or num_dropped > 0,
        unscorable=None if len(kept) else NO_CONTEXT,
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
    longest = max(map(len, continuations))
    if longest > max_seq_len:
        return f'a continuation has {longest} tokens, more than max_seq_len {max_seq_len}'
    if min(map(len, continuations)) == 0:
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
