"""Make journals of a few items, for tests that damage and read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.results.journal import Identity, Journal, read_journal
from llmfoundry_gauntlet.types import ItemKey, ItemResult

IDENTITY = {'model': '0f3a', 'precision': 'fp32', 'max_seq_len': 2048, 'layout': None}
DAMAGED = 'is damaged: its length or checksum does not fit; repair_journal: true drops it and keeps all else'


def item(row: int, **changes: Any) -> ItemResult:
    """Return the result of a choice; its log-probabilities and cluster depend on its row."""
    values = {
        'category': 'Größe',
        'cluster': f'{row:016x}',
        'prompt_sha256': '5e7f',
        'prompt_shortened': False,
        'gold': 1,
        'predicted': None,
        'score': 0.5,
        'reason': None,
        'text': None,
        'logprobs': (-1.5, -0.25 - row),
        'num_tokens': (2, 3),
    }
    return ItemResult(key=ItemKey('sums/2-shot', row), **{**values, **changes})


def write(
    folder: Path,
    results: Iterable[ItemResult] = (),
    *,
    suspects: Iterable[ItemResult] = (),
    identity: Identity = IDENTITY,
    attempt: int = 0,
    rank: int = 0,
) -> Path:
    """Write one rank's file of one attempt."""
    with closing(Journal(folder, identity, attempt=attempt, rank=rank)) as journal:
        for result in results:
            journal.add([result])
        for result in suspects:
            journal.add([result], suspect=True)
    return journal.path


def kept(folder: Path, *, repair: bool = False) -> tuple[set[int], set[int]]:
    """Return the rows of the items and suspects that are read."""
    journal = read_journal(folder, repair=repair)
    assert journal is not None
    rows = {key.row for key in journal.results}
    rows_of_suspects = {key.row for key in journal.suspects}
    return rows, rows_of_suspects


def problems_of(folder: Path, *, repair: bool = False) -> list[str]:
    """Return why a journal cannot be read."""
    with pytest.raises(RecordError) as raised:
        read_journal(folder, repair=repair)
    return list(raised.value.problems)


def lines_of(path: Path) -> list[bytes]:
    """Return the lines as they were written; no payload here has a raw line feed."""
    return [line + b'\n' for line in path.read_bytes().split(b'\n')[:-1]]


def put(path: Path, lines: Sequence[bytes]) -> None:
    path.write_bytes(b''.join(lines))
