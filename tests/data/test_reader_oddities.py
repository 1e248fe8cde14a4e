"""Oddities of real data files that are accepted, and faults that are errors."""

from __future__ import annotations

import functools
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.data.readers import locate, read_rows
from llmfoundry_gauntlet.errors import DataError

FIRST = {'query': 'Sky?', 'choices': ['blue', 'green'], 'gold': 0}
SECOND = {'query': 'Tea?', 'choices': ['a', 'b'], 'gold': 1}
A = json.dumps(FIRST).encode()
B = json.dumps(SECOND).encode()
zipped = functools.partial(gzip.compress, mtime=0)
CONTROL = 'malformed JSON: Invalid control character at at column 13'


def rows_of(path: Path, content: bytes) -> list[tuple[int, Any]]:
    path.write_bytes(content)
    problems: list[str] = []
    rows = read_rows(str(path), problems)
    if problems:
        raise DataError(problems)
    return rows


def problems_of(path: Path, content: bytes) -> list[str]:
    with pytest.raises(DataError) as raised:
        rows_of(path, content)
    return [problem.replace(f'{path}', path.name) for problem in raised.value.problems]


ODD = '\u00a0\u200b\ufeff\ufffd\u00ad\x7f\x85\u2028\u2029\U0001f642e\u0301\u202e\ue000\uffff'
STRANGE = {'query': ODD.join('ab'), 'choices': [f'{char}a' for char in ODD], 'gold': 0}
CONTROLS = {'query': ''.join(map(chr, range(32))), 'choices': ['\0', '\r\n'], 'gold': [[[[]]]]}


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        pytest.param(A + b'\n' + B + b'\n', [(0, FIRST), (1, SECOND)], id='plain'),
        pytest.param(A + b'\n' + B, [(0, FIRST), (1, SECOND)], id='no newline at the end'),
        pytest.param(A + b'\r\n' + B + b'\r\n', [(0, FIRST), (1, SECOND)], id='CRLF'),
        pytest.param(b'\xef\xbb\xbf' + A + b'\n\xef\xbb\xbf' + B, [(0, FIRST), (1, SECOND)], id='byte order marks'),
        pytest.param(b'\n' + A + b'\n\n \t\r\n' + B + b'\n\n', [(1, FIRST), (4, SECOND)], id='blank lines'),
        pytest.param(b'  ' + A + b' \t \n\t' + B + b'  \n', [(0, FIRST), (1, SECOND)], id='white space'),
        pytest.param(
            A + '\u00a0\n\u00a0'.encode() + B + '\u2003\n'.encode(), [(0, FIRST), (1, SECOND)], id='spaces of Unicode'
        ),
        pytest.param(json.dumps(STRANGE).encode() + b'\n' + A, [(0, STRANGE), (1, FIRST)], id='escapes'),
        pytest.param(
            json.dumps(STRANGE, ensure_ascii=False).encode() + b'\n' + A, [(0, STRANGE), (1, FIRST)], id='raw'
        ),
        pytest.param(json.dumps(CONTROLS).encode(), [(0, CONTROLS)], id='escaped control characters'),
        pytest.param(b'{"a": ' + b'9' * 4300 + b'}', [(0, {'a': 10**4300 - 1})], id='a number of 4300 digits'),
        pytest.param(b'', [], id='empty'),
    ],
)
def test_rows_are_read_unchanged_and_white_space_around_them_is_ignored(tmp_path, content: bytes, expected: list[Any]):
    """Also compressed, in one member or several, whatever the file's name."""
    assert rows_of(tmp_path / 'rows.jsonl', content) == expected
    assert rows_of(tmp_path / 'rows', zipped(content)) == expected
    assert rows_of(tmp_path / 'rows.jsonl', zipped(content[:9]) + zipped(content[9:])) == expected


@pytest.mark.parametrize(
    ('line', 'problem'),
    [
        # Characters and numbers that JSON does not allow.
        (b'{"query": "a\tb"}', CONTROL),
        (b'{"query": "a\0b"}', CONTROL),
        (b'{"gold": NaN}', 'malformed JSON: NaN is not a JSON value; allowed: a number or null'),
        (b'{"gold": -Infinity}', 'malformed JSON: -Infinity is not a JSON value; allowed: a number or null'),
        (b'{"gold": 1e999}', 'the number 1e999 is too large'),
        (b'{"gold": ' + b'9' * 5000 + b'}', 'a number has too many digits; allowed: 4300'),
        # JSON that has no clear meaning, or cannot be read.
        (b'{"gold": 0, "gold": 1}', "duplicate key 'gold'; allowed: once"),
        (b'{"a": {"b": 0, "c": 1, "b": 0}}', "duplicate key 'b'; allowed: once"),
        (b'[' * 100_000, 'lists or objects are nested too deeply'),
        # Text that is not Unicode.
        (b'"\\ud83d\\ude42 \\ud800"', 'lone surrogate (\\ud800 to \\udfff); allowed: whole characters'),
        (b'{"\\uDC00": 1}', 'lone surrogate (\\ud800 to \\udfff); allowed: whole characters'),
        (b'{"query": "\xed\xa0\x80"}', 'is not UTF-8 text: invalid continuation byte at byte 12; allowed: UTF-8'),
        # Lines that are not one JSON value.
        (A + b' ' + B, f'malformed JSON: Extra data at column {len(A) + 2}'),
        (b'\x1b[0m', 'malformed JSON: Expecting value at column 1'),
    ],
)
def test_malformed_lines_are_named_with_file_and_line(tmp_path, line: bytes, problem: str):
    content = b'\n'.join([A, b'', line, B])

    (message,) = problems_of(tmp_path / 'rows.jsonl', content)

    assert message.startswith(f'rows.jsonl:3: {problem}')
    assert len(message) < 200
    assert message.isprintable()


LFS_POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:' + b'4d7a' * 16 + b'\nsize 12345\n'
BEGINNINGS_OF_OTHER_FORMATS = (
    # Other encodings.
    '{"query": 1}\n'.encode('utf-16'),
    '{"query": 1}\n'.encode('utf-16-be'),
    '{"query": 1}\n'.encode('utf-16-le'),
    '{"query": 1}\n'.encode('utf-32'),
    b'\xfe\xff\0{',
    # Other formats.
    b'PK\x03\x04...',
    b'PAR1...',
    b'version 2\n',
    b'<!DOCTYPE html>\n<html>',
)


@pytest.mark.parametrize(
    ('content', 'problem'),
    [
        (LFS_POINTER, 'rows.jsonl: is a Git LFS pointer, which a clone has'),
        # Damaged gzip files.
        (zipped(A * 99)[:-9], 'rows.jsonl: is a damaged gzip file: Compressed file ended before'),
        (zipped(A) + b'rubbish', 'rows.jsonl: is a damaged gzip file: Not a gzipped file'),
        (zipped(A)[:-8] + b'\0' * 8, 'rows.jsonl: is a damaged gzip file: CRC check failed'),
        (zipped(A)[:10] + b'\xff' * 30, 'rows.jsonl: is a damaged gzip file: Error -3'),
        # A gzip file that is whole, with a malformed line.
        (zipped(A + b'\n{"a":'), 'rows.jsonl:2: malformed JSON: Expecting value at column 6'),
    ],
)
def test_pointers_and_damaged_gzip_files_are_recognized(tmp_path, content: bytes, problem: str):
    (message,) = problems_of(tmp_path / 'rows.jsonl', content)

    assert message.startswith(problem)


@pytest.mark.parametrize('content', BEGINNINGS_OF_OTHER_FORMATS)
def test_other_file_formats_are_recognized(tmp_path, content: bytes):
    (message,) = problems_of(tmp_path / 'rows.jsonl', content)

    assert message.startswith('rows.jsonl: begins with ')


@pytest.fixture
def folder_of_oddities(tmp_path: Path) -> Path:
    """Return a folder with a folder, a pipe and a broken link."""
    (tmp_path / 'folder.jsonl').mkdir()
    os.mkfifo(tmp_path / 'pipe.jsonl')
    (tmp_path / 'link.jsonl').symlink_to('nowhere')
    return tmp_path


@pytest.mark.parametrize('name', ['folder.jsonl', 'pipe.jsonl', 'link.jsonl', 'a\0b', 'x' * 5000])
def test_names_that_are_no_data_files_are_not_located(folder_of_oddities: Path, name: str):
    problem = f'^{name}: (there is no such data file|cannot be looked for: File name too)'
    with pytest.raises(DataError, match=problem):
        locate(name, folder_of_oddities)


@pytest.mark.parametrize(
    ('name', 'problem'),
    [
        # Files that would block, or have no content.
        ('folder.jsonl', 'is not a regular file'),
        ('pipe.jsonl', 'is not a regular file'),
        ('link.jsonl', 'is not a regular file'),
        # Nothing of that name.
        ('none.jsonl', 'there is no such file'),
        ('x' * 5000, 'File name too long'),
    ],
)
def test_folders_pipes_and_broken_links_are_errors_without_blocking(folder_of_oddities: Path, name: str, problem: str):
    with pytest.raises(DataError, match=problem):
        read_rows(str(folder_of_oddities / name), [])
