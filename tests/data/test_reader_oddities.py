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

ONE, TWO = (
    {'query': 'Sky?', 'choices': ['blue', 'green'], 'gold': 0},
    {'query': 'Tea?', 'choices': ['a', 'b'], 'gold': 1},
)
zipped = functools.partial(gzip.compress, mtime=0)
CONTROL = 'malformed JSON: Invalid control character at at column 13'
A, B = (json.dumps(row).encode() for row in (ONE, TWO))


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
        pytest.param(A + b'\n' + B + b'\n', [(0, ONE), (1, TWO)], id='plain'),
        pytest.param(A + b'\n' + B, [(0, ONE), (1, TWO)], id='no newline at the end'),
        pytest.param(A + b'\r\n' + B + b'\r\n', [(0, ONE), (1, TWO)], id='CRLF'),
        pytest.param(b'\xef\xbb\xbf' + A + b'\n\xef\xbb\xbf' + B, [(0, ONE), (1, TWO)], id='byte order marks'),
        pytest.param(b'\n' + A + b'\n\n \t\r\n' + B + b'\n\n', [(1, ONE), (4, TWO)], id='blank lines'),
        pytest.param(b'  ' + A + b' \t \n\t' + B + b'  \n', [(0, ONE), (1, TWO)], id='white space'),
        pytest.param(
            A + '\u00a0\n\u00a0'.encode() + B + '\u2003\n'.encode(), [(0, ONE), (1, TWO)], id='spaces of Unicode'
        ),
        pytest.param(json.dumps(STRANGE).encode() + b'\n' + A, [(0, STRANGE), (1, ONE)], id='escapes'),
        pytest.param(json.dumps(STRANGE, ensure_ascii=False).encode() + b'\n' + A, [(0, STRANGE), (1, ONE)], id='raw'),
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
        (b'{"query": "a\tb"}', CONTROL),
        (b'{"query": "a\0b"}', CONTROL),
        (b'{"gold": NaN}', 'malformed JSON: NaN is not a JSON value; allowed: a number or null'),
        (b'{"gold": -Infinity}', 'malformed JSON: -Infinity is not a JSON value; allowed: a number or null'),
        (b'{"gold": 1e999}', 'the number 1e999 is too large'),
        (b'{"gold": ' + b'9' * 5000 + b'}', 'a number has too many digits; allowed: 4300'),
        (b'{"gold": 0, "gold": 1}', "duplicate key 'gold'; allowed: once"),
        (b'{"a": {"b": 0, "c": 1, "b": 0}}', "duplicate key 'b'; allowed: once"),
        (b'[' * 100_000, 'lists or objects are nested too deeply'),
        (b'"\\ud83d\\ude42 \\ud800"', 'lone surrogate (\\ud800 to \\udfff); allowed: whole characters'),
        (b'{"\\uDC00": 1}', 'lone surrogate (\\ud800 to \\udfff); allowed: whole characters'),
        (b'{"query": "\xed\xa0\x80"}', 'is not UTF-8 text: invalid continuation byte at byte 12; allowed: UTF-8'),
        (A + b' ' + B, f'malformed JSON: Extra data at column {len(A) + 2}'),
        (b'\x1b[0m', 'malformed JSON: Expecting value at column 1'),
    ],
)
def test_malformed_lines_are_named_with_file_and_line(tmp_path, line: bytes, problem: str):
    found = problems_of(tmp_path / 'rows.jsonl', b'\n'.join([A, b'', line, B]))
    assert len(found) == 1 and found[0].startswith(f'rows.jsonl:3: {problem}')
    assert len(found[0]) < 200 and found[0].isprintable()


LFS_POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:' + b'4d7a' * 16 + b'\nsize 12345\n'
BEGINNINGS = (
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
        *((beginning, 'rows.jsonl: begins with ') for beginning in BEGINNINGS),
        (LFS_POINTER, 'rows.jsonl: is a Git LFS pointer, which a clone has'),
        (zipped(A * 99)[:-9], 'rows.jsonl: is a damaged gzip file: Compressed file ended before'),
        (zipped(A) + b'rubbish', 'rows.jsonl: is a damaged gzip file: Not a gzipped file'),
        (zipped(A)[:-8] + b'\0' * 8, 'rows.jsonl: is a damaged gzip file: CRC check failed'),
        (zipped(A)[:10] + b'\xff' * 30, 'rows.jsonl: is a damaged gzip file: Error -3'),
        (zipped(A + b'\n{"a":'), 'rows.jsonl:2: malformed JSON: Expecting value at column 6'),
    ],
)
def test_other_file_formats_are_recognized(tmp_path, content: bytes, problem: str):
    (found,) = problems_of(tmp_path / 'rows.jsonl', content)
    assert found.startswith(problem)


def test_folders_pipes_and_broken_links_are_errors_without_blocking(tmp_path):
    (tmp_path / 'folder.jsonl').mkdir()
    os.mkfifo(tmp_path / 'pipe.jsonl')
    (tmp_path / 'link.jsonl').symlink_to('nowhere')
    names = ('folder.jsonl', 'pipe.jsonl', 'link.jsonl')
    for name in (*names, 'a\0b', 'x' * 5000):
        with pytest.raises(
            DataError, match=f'^{name}: (there is no such data file|cannot be looked for: File name too)'
        ):
            locate(name, tmp_path)
    for name in names:
        with pytest.raises(DataError, match='is not a regular file'):
            read_rows(str(tmp_path / name), [])
    for name, problem in (('none.jsonl', 'there is no such file'), ('x' * 5000, 'File name too long')):
        with pytest.raises(DataError, match=problem):
            read_rows(str(tmp_path / name), [])
