"""Find a task's data file and read its rows as plain mappings."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.resources import shipped
from llmfoundry_gauntlet.config.tasks import TaskSpec
from llmfoundry_gauntlet.data.fields import RowError
from llmfoundry_gauntlet.data.hugging_face import HUGGING_FACE, hugging_face_rows
from llmfoundry_gauntlet.data.stores import explained, is_remote, open_file
from llmfoundry_gauntlet.errors import DataError, StoreError

UPSTREAM_DATA_FOLDERS = ('eval/local_data/', 'scripts/eval/local_data/')
GZIP = b'\x1f\x8b'
FOREIGN = {  # how files begin that are no JSON lines: what they are, and what to do
    b'\xff\xfe': 'UTF-16 or UTF-32 text; allowed: UTF-8',
    b'\xfe\xff': 'UTF-16 text; allowed: UTF-8',
    b'\0\0\xfe\xff': 'UTF-32 text; allowed: UTF-8',
    b'\xfd7zXZ': 'compressed with xz; allowed: plain text or gzip',
    b'BZh': 'compressed with bzip2; allowed: plain text or gzip',
    b'\x28\xb5\x2f\xfd': 'compressed with zstd; allowed: plain text or gzip',
    b'PK\x03\x04': 'a zip archive; allowed: plain text or gzip',
    b'PAR1': 'a parquet file; allowed: JSON lines here, parquet as hf://parquet with hf_loading_vars.data_files',
    b'version https://git-lfs': 'the Git LFS pointer of a data file; get the file with git lfs pull',
    b'<': 'a web page or XML; allowed: one JSON object a line',
}
MAX_DEPTH = 64  # of lists and mappings in each other
BYTE_ORDER_MARK = '\ufeff'

NumberedRow = tuple[int, Any]  # 0-based line number, parsed JSON


def locate(uri: str, data_root: str | Path) -> Path:
    """The file that a `dataset_uri` names: below `data_root`, else from the working directory.

    Upstream's prefixes are dropped first. Raises DataError naming every place that was looked at.
    """
    name = next((uri[len(prefix) :] for prefix in UPSTREAM_DATA_FOLDERS if uri.startswith(prefix)), uri)
    candidates = list(dict.fromkeys((shipped(data_root) / name, shipped(name))))
    try:
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        other = next((candidate for candidate in candidates if candidate.exists()), None)
    except OSError as error:  # of a folder that may not be entered
        raise DataError(f'{uri}: cannot be looked for: {error.strerror}: {error.filename}') from error
    if other is not None:
        raise DataError(f'{other}: is {"a folder" if other.is_dir() else "no regular file"}; allowed: a data file')
    looked = ', '.join(map(str, candidates))
    raise DataError(f'{uri}: there is no such data file (looked for {looked}); set data_root to its folder')


def read_task_rows(task: TaskSpec, data_root: str | Path) -> tuple[str, list[NumberedRow]]:
    """Return how the task's data are called in messages, and all rows with their 0-based line numbers."""
    uri = task.dataset_uri
    if uri.startswith(HUGGING_FACE):
        source, rows = uri, list(enumerate(hugging_face_rows(task, data_root)))
    else:
        source = uri if is_remote(uri) else str(locate(uri, data_root))
        rows = read_rows(source)
    if not rows:
        raise DataError(f'{source}: has no rows; allowed: one JSON object a line')
    return source, rows


def read_rows(source: str) -> list[NumberedRow]:
    """All rows of a file of JSON lines in UTF-8, which may be compressed with gzip, whatever its name.

    `source` is a path or a URL that fsspec knows, such as s3:// or https://. Raises DataError with all malformed lines.
    """
    try:
        with explained(source), opened(source) as file:
            return list(decompressed_lines(file, source))
    except StoreError as error:
        raise DataError(error.problems) from error


def decompressed_lines(file: io.BufferedReader, source: str) -> Iterator[NumberedRow]:
    """Yield the rows of an open file. Raise DataError."""
    head = file.peek(32)[:32]
    if not head.startswith(GZIP):
        check_format(head, source)
        yield from json_lines(file, source)
        return
    try:
        with gzip.open(file) as content:
            yield from json_lines(content, source)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f'{source}: is a damaged gzip file: {error}; fetch it again') from error


@contextlib.contextmanager
def opened(source: str) -> Iterator[io.BufferedReader]:
    """The bytes of a source."""
    if is_remote(source):
        with open_file(source) as file:
            yield file
    else:
        if not Path(source).is_file():  # a pipe would be waited for
            raise DataError(f'{source}: is no regular file; allowed: a data file')
        with open(source, 'rb') as file:
            yield file


def check_format(head: bytes, source: str) -> None:
    """Raises DataError where a file begins in a way that no JSON lines do."""
    for beginning, what in FOREIGN.items():
        if head.startswith(beginning):
            raise DataError(f'{source}: is {what}')
    if b'\0' in head[:4]:
        raise DataError(f'{source}: is UTF-16 or UTF-32 text, or no text; allowed: UTF-8')


def json_lines(lines: Iterable[bytes], source: str) -> Iterator[NumberedRow]:
    """The JSON value of each line that is not blank. Raises DataError with all malformed lines."""
    problems = []
    for number, line in enumerate(lines):
        if line.isspace():
            continue
        try:
            value = json_value(line)
        except RowError as error:
            problems.append(error.at(f'{source}:{number + 1}'))
        else:
            yield number, value
    if problems:
        raise DataError(problems)


def json_value(line: bytes) -> Any:
    """The value of one line. White space, also Unicode's, and byte order marks around it are of no meaning.

    Raises RowError where it is no JSON, and where another reader could take it for something else: a key twice in one
    object, numbers out of range, half of a character, lists in lists without end.
    """
    try:
        text = line.decode().rstrip()
        try:
            value = DECODER.decode(text)
        except json.JSONDecodeError:
            bare = text.strip().removeprefix(BYTE_ORDER_MARK).strip()
            if bare == text:
                raise
            value = DECODER.decode(bare)
    except UnicodeDecodeError as error:
        raise RowError(f'is no UTF-8 text: {error.reason} at byte {error.start + 1}; allowed: UTF-8') from error
    except json.JSONDecodeError as error:
        raise RowError(f'malformed JSON: {error.msg} at column {error.colno}') from error
    except RecursionError as error:
        raise RowError(TOO_DEEP) from error
    except RowError:
        raise
    except ValueError as error:  # of a whole number that Python does not read
        raise RowError('a number has too many digits; allowed: 4300') from error
    if line.count(b'[') + line.count(b'{') > MAX_DEPTH and is_deep(value):
        raise RowError(TOO_DEEP)
    if b'\\u' in line and (b'\\ud' in line or b'\\uD' in line) and has_half_characters(value):
        raise RowError('half of a surrogate pair (\\ud800 to \\udfff) stands alone; allowed: whole characters')
    return value


TOO_DEEP = f'lists or objects are nested too deeply; allowed: {MAX_DEPTH} levels'


def object_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise RowError(f'the key {twice[:60]!r} stands there twice; allowed: once')
    return found


def finite(text: str) -> float:
    """A number with a fraction or an exponent."""
    value = float(text)
    if not math.isfinite(value):
        raise RowError(f'the number {text[:60]} is too large')
    return value


def no_number(text: str) -> float:
    """NaN, Infinity or -Infinity, which Python would read."""
    raise RowError(f'malformed JSON: {text} is no JSON value; allowed: a number or null')


DECODER = json.JSONDecoder(object_pairs_hook=object_of, parse_float=finite, parse_constant=no_number)


def is_deep(value: Any) -> bool:
    """Return whether lists and mappings are nested more than MAX_DEPTH times."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(value, (list, dict)) for value in level)


def has_half_characters(value: Any) -> bool:
    """Return whether some text in it could not be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
