"""Prompts in token ids, fitted to the model's length.

Instruction and shots, the item's own context, and each continuation are tokenised apart and joined, as in
llm-foundry 0.22 (`eval/datasets/in_context_learning_evaluation.py:tokenize_example`): only the first part gets the
tokenizer's special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llmfoundry_gauntlet.arrays import Ids
from llmfoundry_gauntlet.errors import Caught, ModelError
from llmfoundry_gauntlet.prompts.fingerprint import tokenizer_fingerprint, tokenizer_name
from llmfoundry_gauntlet.values import GenerateRequest, ItemKey, Prompt, Question, Sampling, ScoreRequest, StopRule

# Raise it where texts or token ids of prompts change: requests that were kept on disk are then made anew.
PROMPTS_VERSION = 2

Parts = tuple[Ids, ...]
MAX_SHOWN = 200  # characters of a text in an error
NO_IDS = np.zeros(0, np.int32)
CALL_METHODS = ('__call__', '_call_one', 'batch_encode_plus', '_batch_encode_plus', 'set_truncation_and_padding')


NO_CONTEXT = 'no context token is left to predict the continuation from'


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyTerms:
    """What all replies of a task are held to. `sampling` says how those to a variant are drawn."""

    stops: StopRule
    sampling: Callable[[str | None], Sampling]
    verbatim: bool = False
    restores_space: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLimit:
    """The most tokens that a generation and the prompt before it may have."""

    max_new_tokens: int
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt's parts in token ids; `contexts` without the preamble, one for all continuations or one each."""

    preamble: Ids
    contexts: Parts
    continuations: Parts

    @property
    def length(self) -> int:
        """Tokens of the longest context and the longest continuation together."""
        return len(self.preamble) + max(map(len, self.contexts)) + max(map(len, self.continuations), default=0)


class Encoder:
    """A Hugging Face tokenizer as the prompts need it. Raises ModelError where it cannot encode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.uses_backend = has_plain_backend(tokenizer)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.prefix_space = len(self.encode([' a'], special=False)[' a']) == 1

    @cached_property
    def fingerprint(self) -> str | None:
        """A digest of all that its ids depend on, None where that cannot be known."""
        probed = tokenizer_fingerprint(self.tokenizer, self._probe)
        return probed and f'{probed} {self.eos_token_id} {self.prefix_space}'

    @cached_property
    def name(self) -> str:
        """The tokenizer's class, size and digest, for records."""
        return tokenizer_name(self.tokenizer)

    def _probe(self, text: str, special: bool) -> list[int] | None:
        try:
            ids: list[int] = self.encode([text], special=special)[text].tolist()
        except ModelError:
            return None
        return ids

    def encode(self, texts: Iterable[str], *, special: bool) -> dict[str, Ids]:
        """Token ids by text, each distinct text tokenised once."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return {}
        return dict(zip(distinct, self._ids(distinct, special), strict=True))

    def _ids(self, texts: list[str], special: bool) -> list[Ids]:
        with tokenizer_errors() as caught:
            if self.uses_backend and len(texts) > 1:
                return self._backend_ids(texts, special)
            return self._called(texts, special)
        if len(texts) > 1:  # which of them was it?
            half = len(texts) // 2
            return self._ids(texts[:half], special) + self._ids(texts[half:], special)
        name = type(self.tokenizer).__name__
        shown = texts[0] if len(texts[0]) <= MAX_SHOWN else f'{texts[0][:MAX_SHOWN]}...'
        raise ModelError(f'the tokenizer ({name}) cannot encode {shown!r}: {caught.error}') from caught.error

    def _called(self, texts: list[str], special: bool) -> list[Ids]:
        """By the tokenizer's own call."""
        encoded = self.tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [as_ids(ids) for ids in encoded['input_ids']]

    def _backend_ids(self, texts: list[str], special: bool) -> list[Ids]:
        """Without the places in the text that the tokenizer's own call keeps count of, which takes a quarter less time.

        The first text goes both ways: the call sets the backend up (no truncation, no padding, special tokens in
        texts), and what it gives tells whether the backend does the same.
        """
        (first,) = self._called(texts[:1], special)
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        arrays = [as_ids(encoding.ids) for encoding in encodings]
        if np.array_equal(arrays[0], first):
            return arrays
        self.uses_backend = False
        return self._called(texts, special)

    def preambles(self, texts: Iterable[str]) -> dict[str, Ids]:
        """Instructions and shots with special tokens, without an eos at the end (OPT's tokenizer adds one)."""
        encoded = self.encode(texts, special=True)
        return {text: self._without_eos(ids) for text, ids in encoded.items()}

    def _without_eos(self, ids: Ids) -> Ids:
        ends = self.eos_token_id is not None and len(ids) > 1 and ids[-1] == self.eos_token_id
        return ids[:-1] if ends else ids

    def longest(self, texts: Iterable[str]) -> int:
        """Tokens of the longest of these texts, each with special tokens."""
        return max((len(ids) for ids in self.encode(texts, special=True).values()), default=0)

    def continuation_text(self, text: str) -> str:
        """The continuation with the leading space that byte-pair tokenizers want, if it has none."""
        return spaced(text) if self.prefix_space else text

    @cached_property
    def adds_space(self) -> bool:
        """Whether texts that are tokenised apart have a space between them, as with SentencePiece."""
        (ids,) = self.encode(['a'], special=False).values()
        return bool(self.tokenizer.decode([*ids, *ids]) == 'a a')

    def word_after(self, text: str) -> str:
        """A word that follows another, with its space, unless the tokenizer puts that there by itself."""
        return text.lstrip(' ') if self.adds_space else spaced(text)

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's, if it has one."""
        template = getattr(self.tokenizer, 'chat_template', None)
        return None if template is None else repr(template)

    def in_chat(self, question: Question) -> bool:
        """Whether a question is put as a user's message. Raises ModelError where it must be and cannot."""
        if question.chat_template is True and self.chat_template is None:
            name = type(self.tokenizer).__name__
            raise ModelError(
                f'chat_template: true, but the tokenizer ({name}) has no chat template; allowed: false, or auto'
            )
        return bool(question.chat_template) and self.chat_template is not None

    def contexts(self, question: Question) -> tuple[str, ...]:
        """The contexts as the model reads them; a chat template has its own special tokens in it."""
        if not self.in_chat(question):
            return question.texts
        return tuple(self._message(context) + question.lead for context in question.contexts)

    def _message(self, text: str) -> str:
        from jinja2 import TemplateError

        message = [{'role': 'user', 'content': text}]
        try:
            return str(self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ModelError(f"the tokenizer's chat template cannot be applied: {error}") from error

    def questions(self, questions: Sequence[Question], known: dict[str, Ids]) -> list[tuple[Parts, Parts]]:
        """Contexts and continuations of each question. `known` holds those of earlier calls, and gets the new ones."""
        texts = [
            (
                self.contexts(question),
                tuple(map(self.word_after if question.lead else self.continuation_text, question.continuations)),
            )
            for question in questions
        ]
        needed = (text for parts in texts for part in parts for text in part)
        known.update(self.encode((text for text in needed if text not in known), special=False))
        return [
            (tuple(known[text] for text in contexts), tuple(known[text] for text in continuations))
            for contexts, continuations in texts
        ]

    def prompts(self, prompts: Sequence[Prompt], known: dict[str, Ids] | None = None) -> list[EncodedPrompt]:
        """All prompts in token ids, in order. `known` is as `questions` takes it."""
        preambles = self.preambles(prompt.preamble for prompt in prompts)
        questions = self.questions([prompt.question for prompt in prompts], {} if known is None else known)
        return [
            EncodedPrompt(
                preamble=NO_IDS if self.in_chat(prompt.question) else preambles[prompt.preamble],
                contexts=contexts,
                continuations=continuations,
            )
            for prompt, (contexts, continuations) in zip(prompts, questions, strict=True)
        ]


def tokenizer_errors() -> Caught:
    """Return a context for what a tokenizer raises; the tokenizers library, in Rust, raises Exception itself."""
    return Caught(packages=('pyo3_runtime',), bare=True)


def spaced(text: str) -> str:
    """The text with a space before it, if it has none."""
    return text if text.startswith(' ') else f' {text}'


def as_ids(ids: Sequence[int]) -> Ids:
    """Token ids as an array."""
    return np.asarray(ids, dtype=np.int32)


def has_plain_backend(tokenizer: Any) -> bool:
    """Whether a call of `tokenizer` runs a Rust tokenizer and no foreign code; transformers' own classes add checks."""
    methods = [getattr(type(tokenizer), name, None) for name in CALL_METHODS]
    plain = all(method is None or method.__module__.startswith('transformers.') for method in methods)
    return plain and hasattr(getattr(tokenizer, 'backend_tokenizer', None), 'encode_batch_fast')


def score_request(
    key: ItemKey, encoded: EncodedPrompt, *, max_seq_len: int, truncated: bool, reference: bool
) -> ScoreRequest:
    """The request of a prompt, its contexts cut where they do not fit.

    Cut from the left: with `reference` each choice by itself, through special tokens and instruction; else all
    choices alike, the preamble (special tokens and instruction) staying while there is room for it.
    """
    preamble, continuations = encoded.preamble, encoded.continuations
    if reference:
        lengths = map(len, continuations)
        kept: Sequence[Ids] = [
            cut_reference(np.concatenate([preamble, context]), length, max_seq_len)
            for context, length in zip(aligned(encoded.contexts, len(continuations)), lengths, strict=True)
        ]
    else:
        room = max_seq_len - max(map(len, continuations))
        kept = aligned([cut_question(preamble, context, room) for context in encoded.contexts], len(continuations))
    whole_lengths = [len(preamble) + len(context) for context in aligned(encoded.contexts, len(continuations))]
    distinct: dict[bytes, Ids] = {}
    return ScoreRequest(
        key=key,
        contexts=tuple(distinct.setdefault(ids.tobytes(), ids) for ids in kept),
        continuations=continuations,
        truncated=truncated or any(len(ids) < length for ids, length in zip(kept, whole_lengths, strict=True)),
        unscorable=unscorable(continuations, kept, max_seq_len),
    )


def generate_request(
    key: ItemKey, encoded: EncodedPrompt, *, terms: ReplyTerms, limit: ReplyLimit, truncated: bool, reference: bool
) -> GenerateRequest:
    """Return the request for a generation after a prompt, which is truncated from the left to its limit.

    With `reference` through special tokens and instruction; else these stay while there is room for them.
    """
    room = limit.max_prompt_tokens
    (context,) = encoded.contexts
    whole_length = len(encoded.preamble) + len(context)
    if reference:
        kept = np.concatenate([encoded.preamble, context])[-room:]
    else:
        kept = cut_question(encoded.preamble, context, room)
    return GenerateRequest(
        key=key,
        context=kept,
        max_new_tokens=limit.max_new_tokens,
        stops=terms.stops,
        sampling=terms.sampling(key.variant),
        verbatim=terms.verbatim,
        restores_space=terms.restores_space,
        truncated=truncated or len(kept) < whole_length,
        unscorable=None if len(kept) else NO_CONTEXT,
    )


def aligned(contexts: Sequence[Ids], num_continuations: int) -> Sequence[Ids]:
    """One context per continuation."""
    return [contexts[0]] * num_continuations if len(contexts) == 1 else contexts


def cut_question(preamble: Ids, context: Ids, room: int) -> Ids:
    """At most `room` tokens: the preamble and the end of the context, or the end of both where that leaves nothing."""
    left = room - len(preamble)
    if left > 0:
        return np.concatenate([preamble, context[-left:]])
    return np.concatenate([preamble, context])[-room:] if room > 0 else context[:0]


def cut_reference(whole: Ids, num_continuation: int, max_seq_len: int) -> Ids:
    """llm-foundry 0.22's `trim_context`, whose `[-0:]` keeps everything when the continuation fills the length."""
    if len(whole) + num_continuation <= max_seq_len:
        return whole
    return whole[-(max_seq_len - num_continuation) :]


def unscorable(continuations: Sequence[Ids], contexts: Sequence[Ids], max_seq_len: int) -> str | None:
    """Why a request cannot be scored, if it cannot."""
    longest = max(map(len, continuations))
    if longest > max_seq_len:
        return f'a continuation has {longest} tokens, more than max_seq_len {max_seq_len}'
    if min(map(len, continuations)) == 0:
        return 'the tokenizer gives no tokens for a continuation'
    if min(map(len, contexts)) == 0:
        return NO_CONTEXT
    return None
