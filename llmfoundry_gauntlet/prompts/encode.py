"""Prompts in token ids, fitted to the model's length.

Instruction and shots, the item's own context, and each continuation are tokenised apart and joined, as in
llm-foundry 0.22 (`eval/datasets/in_context_learning_evaluation.py:tokenize_example`): only the first part gets the
tokenizer's special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.values import ItemKey, Prompt, ScoreRequest

Ids = list[int]
MAX_SHOWN = 200  # characters of a text in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt's parts in token ids; `contexts` without the preamble, one for all continuations or one each."""

    preamble: Ids
    contexts: tuple[Ids, ...]
    continuations: tuple[Ids, ...]

    @property
    def length(self) -> int:
        """Tokens of the longest context and the longest continuation together."""
        return len(self.preamble) + max(map(len, self.contexts)) + max(map(len, self.continuations))


class Encoder:
    """A Hugging Face tokenizer as the prompts need it. Raises ModelError where it cannot encode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.prefix_space = len(self.encode([' a'], special=False)[' a']) == 1

    def encode(self, texts: Iterable[str], *, special: bool) -> dict[str, Ids]:
        """Token ids by text, each distinct text tokenised once."""
        distinct = list(dict.fromkeys(texts))
        return dict(zip(distinct, self._ids(distinct, special), strict=True)) if distinct else {}

    def _ids(self, texts: list[str], special: bool) -> list[Ids]:
        try:
            return self.tokenizer(
                texts,
                add_special_tokens=special,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )['input_ids']
        except Exception as error:  # the tokenizers library raises plain Exception
            if len(texts) > 1:  # which of them was it?
                half = len(texts) // 2
                return self._ids(texts[:half], special) + self._ids(texts[half:], special)
            name = type(self.tokenizer).__name__
            shown = texts[0] if len(texts[0]) <= MAX_SHOWN else f'{texts[0][:MAX_SHOWN]}...'
            raise ModelError(f'the tokenizer ({name}) cannot encode {shown!r}: {error}') from error

    def preambles(self, texts: Iterable[str]) -> dict[str, Ids]:
        """Instructions and shots with special tokens, without an eos at the end (OPT's tokenizer adds one)."""
        encoded = self.encode(texts, special=True)
        return {text: self._without_eos(ids) for text, ids in encoded.items()}

    def _without_eos(self, ids: Ids) -> Ids:
        ends = self.eos_token_id is not None and len(ids) > 1 and ids[-1] == self.eos_token_id
        return ids[:-1] if ends else ids

    def continuation_text(self, text: str) -> str:
        """The continuation with the leading space that byte-pair tokenizers want, if it has none."""
        return f' {text}' if self.prefix_space and not text.startswith(' ') else text

    def prompts(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        """All prompts in token ids, in order."""
        preambles = self.preambles(prompt.preamble for prompt in prompts)
        texts = [
            (prompt.question.contexts, tuple(map(self.continuation_text, prompt.question.continuations)))
            for prompt in prompts
        ]
        plain = self.encode((text for parts in texts for part in parts for text in part), special=False)
        return [
            EncodedPrompt(
                preamble=preambles[prompt.preamble],
                contexts=tuple(plain[text] for text in contexts),
                continuations=tuple(plain[text] for text in continuations),
            )
            for prompt, (contexts, continuations) in zip(prompts, texts, strict=True)
        ]


def drop_shots(
    prompt: Prompt, build: Callable[[int], Prompt], encoder: Encoder, max_seq_len: int
) -> tuple[Prompt, EncodedPrompt]:
    """The prompt with the most shots that fits, down to none; `build(n)` gives it with its last n shots."""
    low, high = 0, prompt.num_shots - 1  # the answer lies in low..high
    while low < high:
        middle = (low + high + 1) // 2
        (encoded,) = encoder.prompts([build(middle)])
        if encoded.length <= max_seq_len:
            low = middle
        else:
            high = middle - 1
    shorter = build(low)
    return shorter, encoder.prompts([shorter])[0]


def score_request(
    key: ItemKey, encoded: EncodedPrompt, *, max_seq_len: int, truncated: bool, reference: bool
) -> ScoreRequest:
    """The request of a prompt, its contexts cut where they do not fit.

    Cut from the left: with `reference` each choice by itself, through special tokens and instruction; else all
    choices alike, the preamble (special tokens and instruction) staying while there is room for it.
    """
    contexts = aligned(encoded)
    if reference:
        lengths = map(len, encoded.continuations)
        kept = [
            cut_reference(encoded.preamble + context, length, max_seq_len)
            for context, length in zip(contexts, lengths, strict=True)
        ]
    else:
        room = max_seq_len - max(map(len, encoded.continuations))
        kept = [cut_question(encoded.preamble, context, room) for context in contexts]
    whole_lengths = [len(encoded.preamble) + len(context) for context in contexts]
    arrays = {ids: np.asarray(ids, dtype=np.int32) for ids in set(map(tuple, kept))}
    return ScoreRequest(
        key=key,
        contexts=tuple(arrays[tuple(ids)] for ids in kept),
        continuations=tuple(np.asarray(ids, dtype=np.int32) for ids in encoded.continuations),
        truncated=truncated or any(len(ids) < length for ids, length in zip(kept, whole_lengths, strict=True)),
        unscorable=unscorable(encoded, kept, max_seq_len),
    )


def aligned(encoded: EncodedPrompt) -> Sequence[Ids]:
    """One context per continuation."""
    if len(encoded.contexts) == 1:
        return encoded.contexts * len(encoded.continuations)
    return encoded.contexts


def cut_question(preamble: Ids, context: Ids, room: int) -> Ids:
    """At most `room` tokens: the preamble and the end of the context, or the end of both where that leaves nothing."""
    left = room - len(preamble)
    if left > 0:
        return preamble + context[-left:]
    return (preamble + context)[-room:] if room > 0 else []


def cut_reference(whole: Ids, num_continuation: int, max_seq_len: int) -> Ids:
    """llm-foundry 0.22's `trim_context`, whose `[-0:]` keeps everything when the continuation fills the length."""
    if len(whole) + num_continuation <= max_seq_len:
        return whole
    return whole[-(max_seq_len - num_continuation) :]


def unscorable(encoded: EncodedPrompt, contexts: Sequence[Ids], max_seq_len: int) -> str | None:
    """Why a request cannot be scored, if it cannot."""
    longest = max(map(len, encoded.continuations))
    if longest > max_seq_len:
        return f'a continuation has {longest} tokens, more than max_seq_len {max_seq_len}'
    if min(map(len, encoded.continuations)) == 0:
        return 'the tokenizer gives no tokens for a continuation'
    if min(map(len, contexts)) == 0:
        return 'no context token is left to predict the continuation from'
    return None
