"""Track generations token by token and detect where they end. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from llmfoundry_gauntlet.scoring.text import stop_position
from llmfoundry_gauntlet.types import GenerateRequest, Generation

UNFINISHED = '\ufffd'  # decoded from an incomplete UTF-8 character
LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens at most


class GenerationDecoder:
    """Decode generations with a tokenizer. The tokens `end_ids` end a generation; special tokens are not in its text.

    If the tokenizer drops a leading space, one is prepended, as in Composer 0.32
    (`models/huggingface.py:eval_forward`): a generation may start with a delimiter that begins with a space.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        keeps_space = len(tokenizer(' a', add_special_tokens=False)['input_ids']) == 1
        self.before = '' if keeps_space else ' '

    def text(self, ids: list[int], *, verbatim: bool = False, restores_space: bool = True) -> str:
        """Return the text of a whole generation, with the tokenizer's clean-up of spaces unless `verbatim`."""
        options = {'clean_up_tokenization_spaces': False} if verbatim else {}
        before = self.before if restores_space else ''
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=True, **options)
        return before + decoded

    def piece(self, ids: list[int]) -> str:
        """Return the text of some tokens without clean-up of spaces."""
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return decoded


class OngoingGeneration:
    """The generation for one request, token by token.

    Text is decoded incrementally, a few tokens at a time together with the previous one, as tokenizers join tokens by
    context. A stop found this way is confirmed in the decoded text of the whole generation.
    """

    def __init__(self, request: GenerateRequest, decoder: GenerationDecoder) -> None:
        self.request = request
        self.decoder = decoder
        self.ids: list[int] = []
        self.is_done = False
        self.is_truncated = False
        self.is_finite = True
        stops = request.stops
        self._watches = bool(stops.strings or stops.answer_end or stops.closes_block)
        self._lookback = max(map(len, stops.strings), default=0)
        self._known = decoder.before if request.restores_space else ''  # the text up to token `_read`
        self._start = self._read = 0  # tokens [_start, _read) are decoded with those that follow

    def add(self, token: int) -> None:
        """Append the next token."""
        self.ids.append(token)
        if token in self.decoder.end_ids or (self._watches and self._stops()):
            self.is_done = True
        elif len(self.ids) == self.request.max_new_tokens:
            self.is_done = self.is_truncated = True

    def fail(self) -> None:
        """End the generation because the model's logits are not finite."""
        self.is_finite = False
        self.is_done = True

    def result(self) -> Generation:
        """Return the generation."""
        return Generation(
            key=self.request.key,
            text=self._text() if self.ids else '',
            num_tokens=len(self.ids),
            is_truncated=self.is_truncated,
            is_finite=self.is_finite,
        )

    def _stops(self) -> bool:
        """Return whether the latest token completes a stop."""
        before = self.decoder.piece(self.ids[self._start : self._read]) if self._read else ''
        piece = self.decoder.piece(self.ids[self._start :])[len(before) :]
        if not piece:  # a special token, or a leading space that the tokenizer drops
            self._read = len(self.ids)
            return False
        rule, known, text = self.request.stops, len(self._known), self._known + piece
        if not piece.endswith(UNFINISHED) or len(self.ids) - self._read >= LONGEST_CHARACTER:
            self._known = text
            self._start, self._read = self._read, len(self.ids)
        if stop_position(text, rule, max(0, known - self._lookback)) is None:
            return False
        return stop_position(self._text(), rule) is not None

    def _text(self) -> str:
        request = self.request
        return self.decoder.text(self.ids, verbatim=request.verbatim, restores_space=request.restores_space)


def end_ids(tokenizer: Any, model: Any, *, reference: bool) -> set[int]:
    """Return the tokens that end a generation: the tokenizer's eos and those of the model's generation config.

    With `reference` only the tokenizer's eos, which llm-foundry passes to transformers.
    """
    ends = {tokenizer.eos_token_id}
    if not reference:
        own = getattr(getattr(model, 'generation_config', None), 'eos_token_id', None)
        ends.update(own if isinstance(own, (list, tuple)) else [own])
    return {end for end in ends if end is not None}
