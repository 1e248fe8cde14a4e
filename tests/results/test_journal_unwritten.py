"""A journal that cannot be written gives a reason, and the evaluation continues."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from journals import IDENTITY, item, kept, lines_of

from llmfoundry_gauntlet.results.journal import JOURNAL, Journal, read_journal


def reason_of(journal: Journal) -> str:
    """Return why a journal cannot be written."""
    before, _, rest = (journal.problem or '').partition(' (')
    reason, _, after = rest.rpartition('): ')
    assert (before, after) == (f'{journal.path}: cannot be written', 'this evaluation could not be resumed')
    return reason


@pytest.mark.parametrize('occupied', ['out', 'out/journal', '.', 'out/journal/000-rank2.jsonl'])
def test_an_evaluation_continues_without_a_journal(tmp_path, occupied: str):
    """No file is overwritten."""
    folder, file = tmp_path / 'above' / 'out', tmp_path / 'above' / occupied
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('a file')
    with closing(Journal(folder, IDENTITY, attempt=0, rank=2)) as journal:
        journal.add([item(0)])
        journal.add([item(1)], suspect=True)
    assert journal.path == folder / JOURNAL / '000-rank2.jsonl'
    assert reason_of(journal)
    assert file.read_text() == 'a file'


def test_links_are_not_followed(tmp_path):
    target = tmp_path / 'target'
    path = tmp_path / JOURNAL / '000-rank0.jsonl'
    path.parent.mkdir()
    path.symlink_to(target)
    with closing(Journal(tmp_path, IDENTITY, attempt=0, rank=0)) as journal:
        journal.add([item(0)])
    assert 'File exists' in reason_of(journal)
    assert not target.exists()


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """Write as on a full disk: what fits is written, then OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize('room', [0, 1, 50, 1000])
def test_a_full_disk_is_reported_and_earlier_items_are_kept(tmp_path, room: int):
    journal = Journal(tmp_path, IDENTITY, attempt=0, rank=0)
    journal.add([item(0)])
    journal.add([item(1)], suspect=True)
    size = journal.path.stat().st_size
    with no_file_longer_than(size + room):
        for row in range(2, 9):
            journal.add([item(row)])
        journal.close()
    journal.add([item(9)])  # also once there is room again
    journal.close()
    assert 'File too large' in reason_of(journal)
    num_more = len(lines_of(journal.path)) - 3
    assert num_more * 300 <= room
    assert kept(tmp_path) == ({0, *range(2, 2 + num_more)}, {1})


@pytest.mark.parametrize('room', [0, 10])
def test_a_disk_that_was_always_full_has_no_journal(tmp_path, room: int):
    with no_file_longer_than(room):
        journal = Journal(tmp_path, IDENTITY, attempt=0, rank=0)
        journal.add([item(0)])
        journal.close()
    assert 'File too large' in reason_of(journal)
    assert read_journal(tmp_path) is None
