"""A truncated, damaged or unwritable journal: no whole line is lost, and no damaged line is used."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import DAMAGED, IDENTITY, item, kept, lines_of, problems_of, put, write

from llmfoundry_gauntlet.results.journal import JOURNAL, Journal, line_of, next_attempt, read_journal
from llmfoundry_gauntlet.results.samples import sample_line


def write_several(folder: Path) -> Path:
    """Write three files and return the second, with an identity, the items 10 to 15, and a suspect after 12."""
    write(folder, [item(row) for row in range(3)], suspects=[item(3)])
    with closing(Journal(folder, IDENTITY, attempt=0, rank=1)) as journal:
        journal.add([item(row, text='猫\n') for row in (10, 11, 12)])
        journal.add([item(20)], suspect=True)
        journal.add([item(row) for row in (13, 14, 15)])
    write(folder, [item(30)], attempt=1)
    return journal.path


ROWS = [10, 11, 12, 20, 13, 14, 15]  # of the second file's lines from the second
ITEMS = {0, 1, 2, 10, 11, 12, 13, 14, 15, 30}
SUSPECTS = {3, 20}


def without(*rows: int) -> tuple[set[int], set[int]]:
    return ITEMS - {*rows}, SUSPECTS - {*rows}


@pytest.fixture
def several(tmp_path: Path) -> Path:
    return write_several(tmp_path)


@pytest.fixture(scope='module')
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_several(tmp_path_factory.mktemp('lasting'))


@settings(max_examples=200)
@given(data=st.data())
def test_a_damaged_line_is_named_and_repair_drops_only_it(lasting: Path, data):
    lines = lines_of(lasting)
    place = data.draw(st.integers(1, len(lines) - 2), label='line')
    offset = data.draw(st.integers(0, len(lines[place]) - 2), label='byte')  # for the line feed see below
    change = data.draw(st.integers(0, 255), label='change')  # 0 removes the byte
    put_in = bytes([lines[place][offset] ^ change]) if change else b''
    wrong = lines[place][:offset] + put_in + lines[place][offset + 1 :]
    try:
        put(lasting, [*lines[:place], wrong, *lines[place + 1 :]])
        problems = problems_of(lasting.parent.parent)
        assert kept(lasting.parent.parent, repair=True) == without(ROWS[place - 1])
    finally:
        put(lasting, lines)
    named = [f'{lasting}:{place + 1}: {DAMAGED}']
    if put_in and put_in in b'\r\n':  # then it is two lines, but where there was only the line feed after it
        named += [f'{lasting}:{place + 2}: {DAMAGED}'] * (len(problems) > 1)
    assert problems == named


@pytest.mark.parametrize(
    'line',
    [
        b'\n',
        b' \n',
        b'0  \n',
        b'-1 e3b0c44298fc1c14 \n',
        b'\xd9\xa0 e3b0c44298fc1c14 \n',  # a digit, but none of ours
        pytest.param(b'9' * 5000 + b' e3b0c44298fc1c14 \n', id='more digits than Python makes a number of'),
        b'{"identity": {}}\n',
    ],
)
def test_what_is_no_line_is_named_and_repair_drops_only_it(several: Path, line: bytes):
    lines = lines_of(several)
    put(several, [*lines[:3], line, *lines[3:]])
    assert problems_of(several.parent.parent) == [f'{several}:4: {DAMAGED}']
    assert kept(several.parent.parent, repair=True) == without()


@pytest.mark.parametrize('place', [1, 6])  # of the line; 6 is the last but one
@pytest.mark.parametrize('byte', [b'\r', b'*', b' '])
def test_a_wrong_line_feed_is_named_and_repair_drops_only_its_line(several: Path, byte: bytes, place: int):
    lines = lines_of(several)
    lines[place] = lines[place][:-1] + byte
    put(several, lines)
    assert problems_of(several.parent.parent) == [f'{several}:{place + 1}: {DAMAGED}']
    assert kept(several.parent.parent, repair=True) == without(ROWS[place - 1])


def test_every_damaged_line_is_named(several: Path, caplog):
    folder = several.parent.parent
    first = several.with_name('000-rank0.jsonl')
    for path, places in ((first, [1]), (several, [2, 4])):
        lines = lines_of(path)
        for place in places:
            lines[place] = lines[place].replace(b'0.5', b'1.0')  # a better score
        put(path, lines)
    places = [f'{first}:2', f'{several}:3', f'{several}:5']
    assert problems_of(folder) == [f'{place}: {DAMAGED}' for place in places]
    assert not caplog.records
    assert kept(folder, repair=True) == without(0, 11, 20)
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [f'{place}: is damaged: its length or checksum does not fit: dropped' for place in places]


def test_a_truncated_file_keeps_its_whole_lines(several: Path, caplog):
    folder = several.parent.parent
    whole = several.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord('\n')]
    assert len(ends) == 1 + len(ROWS)
    for size in {*range(0, len(whole), 40), *(end + offset for end in ends for offset in (-2, -1, 0, 1, 2))}:
        several.write_bytes(whole[:size])
        num_whole = sum(end <= size for end in ends)
        assert kept(folder) == without(*ROWS[max(num_whole - 1, 0) :]), size
    assert {record.levelno for record in caplog.records} <= {logging.INFO}  # a kill is nothing to warn of


def lose_identity(path: Path) -> None:
    """Damage the first line of a file."""
    path.write_bytes(path.read_bytes().replace(b'fp32', b'fp16', 1))


def test_other_ranks_identify_an_attempt(several: Path):
    lose_identity(several)
    assert problems_of(several.parent.parent) == [f'{several}:1: {DAMAGED}']
    assert kept(several.parent.parent, repair=True) == (ITEMS, SUSPECTS)


def test_items_of_an_unidentified_attempt_are_not_used(tmp_path):
    path = write(tmp_path, [item(0), item(1)])
    lose_identity(path)
    assert problems_of(tmp_path) == [f'{path}:1: {DAMAGED}']
    assert read_journal(tmp_path, repair=True) is None  # so that what follows may be of any model
    write(tmp_path, [item(2)], attempt=next_attempt(tmp_path), identity={**IDENTITY, 'model': 'another'})
    assert kept(tmp_path, repair=True) == ({2}, set())


@pytest.mark.parametrize(
    'content',
    [
        '{"task": "t"}',
        json.dumps({'identity': IDENTITY}),  # as 0.1.0 wrote it, without the time at which the attempt started
        f'{{"task": "t", "item": {sample_line(item(0))}}}',  # as 0.1.0 wrote it, without its seconds
        '{"task": "t", "item": {}}',
        '{"task": "t", "item": null}',
        '{"task": "t", "suspect": {"row": 0}}',
        f'{{"item": {sample_line(item(0))}}}',
        f'{{"task": "t", "item": {json.dumps({**json.loads(sample_line(item(0))), "logprobs": 7})}}}',
        '{}',
        '[]',
        '7',
        'null',
        'no JSON',
        '',
    ],
)
@pytest.mark.parametrize('repair', [False, True])
def test_a_line_of_another_version_is_named(tmp_path, content: str, repair: bool):
    path = write(tmp_path, [item(0)])
    with path.open('ab') as file:
        file.write(line_of(content))
    (problem,) = problems_of(tmp_path, repair=repair)
    assert problem.startswith(f'{path}:3: is no line of this version: ')


def test_an_unreadable_file_is_named(tmp_path):
    write(tmp_path)
    path = tmp_path / JOURNAL / '000-rank1.jsonl'
    path.mkdir()
    (problem,) = problems_of(tmp_path)
    assert problem.startswith(f'{path}: cannot be read: ')


# A journal that cannot be written gives a reason, and the evaluation continues.


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
