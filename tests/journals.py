"""Make journals of a few items, for tests that damage and read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from llmfoundry_gauntlet.results.journal import Identity, Journal, read_journal
from llmfoundry_gauntlet.types import ItemKey, ItemResult

IDENTITY = {'model': '0f3a', 'precision': 'fp32', 'max_seq_len': 2048, 'layout': None}
DAMAGED = (
    'is damaged: its length or checksum does not fit; --repair-journal (repair_journal=True) drops it and keeps all '
    'else'
)


def item(row: int, **changes: Any) -> ItemResult:
    values = dict.fromkeys(('predicted', 'reason', 'text'))
    values |= {'category': 'Größe', 'gold': 1, 'score': 0.5, 'logprobs': (-1.5, -0.25 - row), 'num_tokens': (2, 3)}
    values |= {'prompt_sha256': '5e7f', 'truncated': False, 'cluster': f'{row:016x}', **changes}
    return ItemResult(key=ItemKey('sums/2-shot', row), **values)


def item_results(
    tasks: st.SearchStrategy[str], texts: st.SearchStrategy[str], logprobs: st.SearchStrategy[float]
) -> st.SearchStrategy[ItemResult]:
    """Return a strategy for results of any kind."""
    values = st.none() | st.lists(logprobs, min_size=1, max_size=4).map(tuple)
    counts = st.none() | st.lists(st.integers(0, 10**6), min_size=1, max_size=4).map(tuple)
    text = st.none() | texts
    finite = st.floats(allow_nan=False, allow_infinity=False)
    return st.builds(
        ItemResult,
        key=st.builds(
            ItemKey, task=tasks, row=st.integers(0, 2**40), file=text, variant=text, sample=st.integers(0, 200)
        ),
        category=text,
        gold=text | st.integers(0, 25),
        predicted=st.none() | st.integers(0, 25),
        score=st.none() | st.floats(0, 1),
        logprobs=values,
        num_tokens=counts,
        reason=text,
        prompt_sha256=texts,
        truncated=st.booleans(),
        text=text,
        answer=text,
        metrics=st.dictionaries(texts, finite, max_size=3),
        facts=st.dictionaries(texts, texts | st.integers(), max_size=3),
        num_characters=counts,
        num_bytes=counts,
        logprobs_alone=values,
        num_shots=st.none() | st.integers(0, 10) | st.floats(0, 10),
        cluster=st.just('') | st.integers(0, 2**64 - 1).map('{:016x}'.format),
    )


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
    found = read_journal(folder, repair=repair)
    assert found is not None
    return {key.row for key in found.results}, {key.row for key in found.suspects}


def lines_of(path: Path) -> list[bytes]:
    """Return the lines as they were written; no payload here has a raw line feed."""
    return [line + b'\n' for line in path.read_bytes().split(b'\n')[:-1]]


def put(path: Path, lines: Sequence[bytes]) -> None:
    path.write_bytes(b''.join(lines))
