"""A tokenizer whose ids can be counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CharacterTokenizer:
    """A tokenizer with a token per character, its code point, after bos 1 if special tokens are wanted."""

    eos_token_id = 2
    pad_token_id = 0

    def __init__(self, *, bos: bool = True) -> None:
        self.special = [1] if bos else []

    def __len__(self) -> int:
        return 0x110000

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        special = self.special if add_special_tokens else []
        return {'input_ids': [special + [ord(character) for character in text] for text in texts]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return the characters of the ids."""
        return ''.join(map(chr, ids))
