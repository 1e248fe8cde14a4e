"""Read the rows of data files: JSON lines, checked, with their line numbers."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.resources import shipped
from llmfoundry_gauntlet.config.tasks import TaskSpec
from llmfoundry_gauntlet.data.hugging_face import HUGGING_FACE, hugging_face_rows
from llmfoundry_gauntlet.data.stores import explained, is_remote, open_file
from llmfoundry_gauntlet.errors import DataError, MissingFileError, StoreError, describe, named, suggestion

MOST_NAME, MOST_NAMES = 40, 20  # characters of a key, and number of keys, in a message
MOST_TEXT = 200  # characters at each end of a message
UPSTREAM_DATA_FOLDERS = ('eval/local_data/', 'scripts/eval/local_data/')
GZIP = b'\x1f\x8b'
GIT_LFS = b'version https://git-lfs.github.com/'
MOST_HEAD = 64  # bytes at the beginning of a file that show its format
# Bytes at which JSON lines may begin: JSON values, white space (Unicode's included) and byte order marks.
BEGINNING = re.compile(rb'[\s{\["\-0-9tfn\xef\xc2\xe2\xe3]')
BYTE_ORDER_MARK = '\ufeff'

NumberedRow = tuple[int, Any]  # 0-based line number, parsed JSON


class RowError(ValueError):
    """A malformed row; the reader adds file and line."""

    def at(self, place: str) -> str:
        """Return the problem with the row's place, shortened to one printable line."""
        text = str(self)
        if len(text) > 2 * MOST_TEXT:
            text = f'{text[:MOST_TEXT]} [...] {text[-MOST_TEXT:]}'
        return f'{place}: {"".join(char if char.isprintable() else repr(char)[1:-1] for char in text)}'


def text_field(row: Mapping[str, Any], key: str, *, allow_empty: bool = True) -> str:
    """Return the string at `key`."""
    value = field_value(row, key)
    if not isinstance(value, str):
        raise RowError(f'{key} is {describe(value)}; allowed: text')
    if not value and not allow_empty:
        raise RowError(f'{key} is empty; allowed: text')
    return value


def texts_field(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of two or more non-empty strings at `key`."""
    value = field_value(row, key)
    if not isinstance(value, list) or len(value) < 2:
        raise RowError(f'{key} is {describe(value)}; allowed: a list of two or more texts')
    for index, item in enumerate(value):
        if not isinstance(item, str) or not item:
            raise RowError(f'{key}[{index}] is {describe(item)}; allowed: a non-empty text')
    return tuple(value)


def optional_text_field(row: Mapping[str, Any], key: str) -> str | None:
    """Return the string at `key`; None if it is absent or null."""
    return None if row.get(key) is None else text_field(row, key)


def optional_texts_field(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of strings at `key`; empty if it is absent or null."""
    value = [] if row.get(key) is None else row[key]
    if not isinstance(value, list):
        raise RowError(f'{key} is {describe(value)}; allowed: a list of texts')
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise RowError(f'{key}[{index}] is {describe(item)}; allowed: text')
    return tuple(value)


def gold_field(row: Mapping[str, Any], num_choices: int, key: str = 'gold') -> int:
    """Return the index of the right choice at `key`."""
    value = field_value(row, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise RowError(f'{key} is {describe(value)}; allowed: a whole number 0..{num_choices - 1}')
    if not 0 <= value < num_choices:
        raise RowError(f'{key} is {describe(value)} but there are {num_choices} choices (0..{num_choices - 1})')
    return value


def field_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value at `key`. Raise RowError if the key is missing."""
    if key not in row:
        shown_keys = [name for name in row if name.isprintable() and len(name) <= MOST_NAME][:MOST_NAMES]
        advice = suggestion(key, shown_keys).replace('; allowed:', '; found:')
        raise RowError(f"the key '{key}' is missing{advice}")
    return row[key]


def locate(uri: str, data_root: str | Path) -> Path:
    """Return the path of a `dataset_uri`, relative to `data_root` or else the working directory.

    Upstream's prefixes are dropped first. Raise DataError with every path tried.
    """
    name = uri
    for prefix in UPSTREAM_DATA_FOLDERS:
        if uri.startswith(prefix):
            name = uri.removeprefix(prefix)
            break
    candidates = list(dict.fromkeys((shipped(data_root) / name, shipped(name))))
    try:
        for candidate in candidates:
            if candidate.is_file():
                return candidate
    except OSError as error:  # no permission to enter a folder
        raise DataError(f'{uri}: cannot be looked for: {error.strerror}: {error.filename}') from error
    looked = ', '.join(map(str, candidates))
    raise MissingFileError(
        f'{uri}: there is no such data file (looked for {looked}); set {named("data_root")} to its folder'
    )


def read_task_rows(task: TaskSpec, data_root: str | Path, problems: list[str]) -> tuple[str, list[NumberedRow]]:
    """Return the source of a task's data, for messages, and all rows with their 0-based line numbers.

    Malformed lines are added to `problems`.
    """
    uri = task.dataset_uri
    if uri.startswith(HUGGING_FACE):
        source, rows = uri, list(enumerate(hugging_face_rows(task, data_root)))
    else:
        source = uri if is_remote(uri) else str(locate(uri, data_root))
        rows = read_rows(source, problems)
    if not rows and not problems:
        raise DataError(f'{source}: has no rows; allowed: one JSON object per line')
    return source, rows


def read_rows(source: str, problems: list[str]) -> list[NumberedRow]:
    """Return all rows of `stream_rows`."""
    return list(stream_rows(source, problems))


def stream_rows(
    source: str, problems: list[str], *, decoder: json.JSONDecoder | None = None, are_answers: bool = False
) -> Iterator[NumberedRow]:
    """Yield the rows of a UTF-8 file of JSON lines, gzip-compressed or not, whatever its name.

    `source` is a path or an fsspec URL, such as s3:// or https://. Malformed lines are added to `problems`. Answers of
    a model may come through a pipe and hold half a surrogate pair, which data may not. Raise DataError for any other
    file.
    """
    decoder = decoder or DECODER
    parse = partial(json_value, decoder=decoder, allow_surrogates=are_answers)
    with open_source(source, allow_pipes=are_answers) as file:
        head = file.peek(MOST_HEAD)[:MOST_HEAD]
        if head.startswith(GZIP):
            try:
                with gzip.open(file) as content:
                    yield from json_lines(content, source, problems, parse)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f'{source}: is a damaged gzip file: {error}; fetch it again') from error
            return
        check_beginning(head, source)
        yield from json_lines(file, source, problems, parse)


def check_beginning(head: bytes, source: str) -> None:
    """Raise DataError if a file that begins with these bytes cannot be JSON lines."""
    if head.startswith(GIT_LFS):
        raise DataError(
            f'{source}: is a Git LFS pointer, which a clone has in place of the file; fetch the file with git lfs pull'
        )
    if head and (not BEGINNING.match(head) or b'\0' in head):
        raise DataError(
            f'{source}: begins with {head[:4]!r}, so it is not JSON lines; allowed: one JSON object per line, in '
            'UTF-8, plain or gzip; parquet files are read as hf://parquet with hf_loading_vars.data_files'
        )


@contextlib.contextmanager
def open_source(source: str, *, allow_pipes: bool = False) -> Iterator[io.BufferedReader]:
    """Open a path or URL for reading bytes. Raise DataError, also for errors while reading.

    Opening a pipe may block, so it is an error unless `allow_pipes`.
    """
    try:
        with explained(source):
            if not is_remote(source):
                check_is_file(Path(source), allow_pipes=allow_pipes)
            with open_file(source) if is_remote(source) else Path(source).open('rb') as file:
                yield file
    except StoreError as error:
        raise DataError(error.problems) from error


def check_is_file(path: Path, *, allow_pipes: bool) -> None:
    """Raise DataError unless the path is a regular file or, if allowed, a pipe."""
    if path.is_file() or (allow_pipes and path.is_fifo()):
        return
    if not path.exists() and not path.is_symlink():
        raise MissingFileError(f'{path}: there is no such file')
    raise DataError(f'{path}: is not a regular file; allowed: a data file')


def json_lines(
    lines: Iterable[bytes], source: str, problems: list[str], parse: Callable[[bytes], Any]
) -> Iterator[NumberedRow]:
    """Yield the JSON value of each line that is not blank; add malformed lines to `problems`."""
    for number, line in enumerate(lines):
        if line.isspace():
            continue
        try:
            yield number, parse(line)
        except RowError as error:
            problems.append(error.at(f'{source}:{number + 1}'))


def json_value(line: bytes, decoder: json.JSONDecoder, *, allow_surrogates: bool = False) -> Any:
    """Parse one line, ignoring surrounding white space (Unicode's included) and byte order marks.

    Raise RowError for malformed JSON, and for JSON that parsers read differently: duplicate keys in one object,
    numbers out of range, lone surrogates (unless allowed), excessive nesting.
    """
    try:
        value = decoder.decode(line.decode().strip().removeprefix(BYTE_ORDER_MARK).strip())
        if not allow_surrogates and (b'\\ud' in line or b'\\uD' in line):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RowError(f'is not UTF-8 text: {error.reason} at byte {error.start + 1}; allowed: UTF-8') from error
    except UnicodeEncodeError as error:
        raise RowError('lone surrogate (\\ud800 to \\udfff); allowed: whole characters') from error
    except json.JSONDecodeError as error:
        raise RowError(f'malformed JSON: {error.msg} at column {error.colno}') from error
    except RecursionError as error:
        raise RowError('lists or objects are nested too deeply') from error
    except RowError:
        raise
    except ValueError as error:  # an integer beyond Python's limit of digits
        raise RowError('a number has too many digits; allowed: 4300') from error
    return value


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raise RowError for duplicate keys."""
    value_by_key = dict(pairs)
    if len(value_by_key) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicates = [key for key, count in counts.items() if count > 1]
        raise RowError(f'duplicate key {duplicates[0][:60]!r}; allowed: once per object')
    return value_by_key


def finite(text: str) -> float:
    """Parse a number with a fraction or an exponent. Raise RowError if it overflows."""
    value = float(text)
    if not math.isfinite(value):
        raise RowError(f'the number {text[:60]} is too large')
    return value


def refuse_constant(text: str) -> float:
    """Raise RowError for NaN, Infinity or -Infinity, which Python's parser accepts."""
    raise RowError(f'malformed JSON: {text} is not a JSON value; allowed: a number or null')


DECODER = json.JSONDecoder(object_pairs_hook=unique_keys, parse_float=finite, parse_constant=refuse_constant)
