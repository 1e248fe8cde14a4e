"""A cacheable slow tokenizer for tests: a token per character, and a note of every task that it tokenizes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Characters:
    """Return code points, after `bos` if special tokens are wanted.

    Texts with the name of a task in them, such as 'task7', are noted in `notes` with the process, and take `seconds`.
    """

    eos_token_id = None
    all_special_tokens = ()

    def __init__(self, *, bos: int = 1, notes: Path | None = None, seconds: float = 0.0) -> None:
        self._bos = [bos]  # not a plain setting: it shows in the ids alone
        self.init_kwargs: dict[str, Any] = {}
        self.added_tokens_decoder: dict[int, Any] = {}
        self._notes = notes
        self._seconds = (seconds,)

    def save_vocabulary(self, folder: str) -> tuple[str, ...]:
        """Return no files: there is no vocabulary."""
        return ()

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        tasks = sorted({name for text in texts for name in re.findall(r'task\d+', text)})
        if self._notes is not None and tasks:
            with self._notes.open('a') as notes:
                notes.write(''.join(f'{name} {os.getpid()}\n' for name in tasks))
            time.sleep(*self._seconds)
        special = self._bos if add_special_tokens else []
        return {'input_ids': [special + [ord(character) for character in text] for text in texts]}
