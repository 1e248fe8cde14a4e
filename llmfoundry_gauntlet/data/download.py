"""Download, import and verify the data files. Only verified files are written to a data root."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from llmfoundry_gauntlet.config.yaml import describe
from llmfoundry_gauntlet.data.atomic import write_atomically
from llmfoundry_gauntlet.data.manifest import DataFile
from llmfoundry_gauntlet.data.readers import RowError, field_value, text_field, texts_field
from llmfoundry_gauntlet.data.stores import explained, is_remote, open_filesystem
from llmfoundry_gauntlet.errors import ConfigError, DataError, RecordError, StoreError

Row = Mapping[str, Any]

MMLU_PRO_KEYS = ('question_id', 'question', 'options', 'answer', 'answer_index', 'cot_content', 'category', 'src')
LETTERS = 'ABCDEFGHIJ'
NO_OPTION = 'N/A'  # pads the options to ten in early revisions of MMLU-Pro
MATH_KEYS = ('problem', 'level', 'type', 'solution')
SUBJECTS = {
    'algebra': 'Algebra',
    'counting_and_probability': 'Counting & Probability',
    'geometry': 'Geometry',
    'intermediate_algebra': 'Intermediate Algebra',
    'number_theory': 'Number Theory',
    'prealgebra': 'Prealgebra',
    'precalculus': 'Precalculus',
}
RIGHT, NO_HASH, OTHER, MISSING = 'right', 'no hash', 'other bytes', 'missing'
FETCHED, IMPORTED, THERE, FAILED = 'fetched', 'imported', 'there already', 'failed'

CHUNK_BYTES = 1 << 16
TEMPORARY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)  # among the statuses 400 to 499


def convert(content: bytes, file: DataFile, source: str) -> bytes:
    """Return the content of a data file, JSON lines, converted from the published parquet file.

    `source` is its path or URL, for messages. Raise DataError with every malformed row.
    """
    keys, parse = CONVERTERS[file.converter or '']
    lines, problems = [], []
    for number, row in enumerate(parquet_rows(content, keys, source), start=1):
        try:
            lines.append(f'{json.dumps(parse(row, file), ensure_ascii=False)}\n')
        except RowError as error:
            problems.append(error.at(f'{source}: row {number}'))
    if problems:
        raise DataError(problems)
    return ''.join(lines).encode()


def parquet_rows(content: bytes, columns: Sequence[str], source: str) -> Iterator[Row]:
    """Yield these columns of each row of a parquet file. Raise DataError."""
    from pyarrow import BufferReader, parquet  # type: ignore[import-untyped]

    try:
        with parquet.ParquetFile(BufferReader(content)) as table:
            found = table.schema_arrow.names
            missing = [column for column in columns if column not in found]
            if missing:
                raise DataError(f'{source}: the columns {", ".join(missing)} are missing; found: {", ".join(found)}')
            for batch in table.iter_batches(columns=list(columns)):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f'{source}: cannot be read as parquet: {error}') from error


def mmlu_pro_row(row: Row, file: DataFile) -> Row:
    """Return a row of MMLU-Pro without filler options, with `answer` and `answer_index` adjusted."""
    number = field_value(row, 'question_id')
    if not isinstance(number, int):
        raise RowError(f'question_id is {describe(number)}; allowed: a whole number')
    for key in ('question', 'category', 'src'):
        text_field(row, key, allow_empty=False)
    text_field(row, 'cot_content')
    options = texts_field(row, 'options')
    kept = [place for place, option in enumerate(options) if option != NO_OPTION]
    letter, index = text_field(row, 'answer'), field_value(row, 'answer_index')
    allowed = {LETTERS[place]: place for place in kept if place < len(LETTERS)}
    if letter not in allowed or index not in kept:
        raise RowError(f'answer is {letter!r}, answer_index {describe(index)}; allowed: {", ".join(allowed)}')
    changed = {
        'options': [options[place] for place in kept],
        'answer': LETTERS[kept.index(allowed[letter])],
        'answer_index': kept.index(index),
    }
    return {key: changed.get(key, row[key]) for key in MMLU_PRO_KEYS}


def math_row(row: Row, file: DataFile) -> Row:
    """Return a row of MATH unchanged. Raise RowError unless it belongs to the subject of the file."""
    for key in MATH_KEYS:
        text_field(row, key, allow_empty=False)
    subject = SUBJECTS[PurePosixPath(file.path).stem]
    if row['type'] != subject:
        raise RowError(f'type is {row["type"]!r}; allowed: {subject!r}')
    return {key: row[key] for key in MATH_KEYS}


CONVERTERS: Mapping[str, tuple[Sequence[str], Callable[[Row, DataFile], Row]]] = {
    'mmlu_pro': (MMLU_PRO_KEYS, mmlu_pro_row),
    'math': (MATH_KEYS, math_row),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The state of a data file, or the result of fetching it. `place` is the path or URL that `detail` refers to."""

    file: DataFile
    status: str
    place: str = ''
    detail: str = ''


def reason(error: DataError | StoreError, place: str) -> str:
    """Return the first problem of an error, without its leading path or URL, and the number of others."""
    more = f' (and {len(error.problems) - 1:,} more)' if len(error.problems) > 1 else ''
    return error.problems[0].removeprefix(f'{place}: ') + more


def check(content: bytes, file: DataFile, place: str) -> Outcome:
    """Compare content with the manifest: RIGHT, OTHER, or NO_HASH if only the number of rows can be compared."""
    if file.has_hash and file.converter is None:
        problem = file.difference(content)
        return Outcome(file=file, status=OTHER if problem else RIGHT, place=place, detail=problem or '')
    num_rows = sum(1 for line in content.split(b'\n') if line.strip())
    if num_rows != file.num_rows:
        detail = f'{num_rows:,} rows; expected {file.num_rows:,}'
        return Outcome(file=file, status=OTHER, place=place, detail=detail)
    detail = f'{num_rows:,} rows as published; no hash is known to compare with'
    return Outcome(file=file, status=NO_HASH, place=place, detail=detail)


def look(file: DataFile, data_root: Path) -> Outcome:
    """Return the state of a file in a data root."""
    path = data_root / file.path
    try:
        return check(path.read_bytes(), file, str(path))
    except FileNotFoundError:
        return Outcome(file=file, status=MISSING)
    except OSError as error:
        detail = f'cannot be read: {error.strerror or error}'
        return Outcome(file=file, status=OTHER, place=str(path), detail=detail)


def kept(file: DataFile, data_root: Path, *, overwrite: bool) -> Outcome | None:
    """Return THERE if a data root has the file, FAILED if it has another that must stay, None if one is needed."""
    there = look(file, data_root)
    if there.status in (RIGHT, NO_HASH):
        return replace(there, status=THERE, detail='')
    if there.status == OTHER and not overwrite:
        return replace(there, status=FAILED, detail=f'{there.detail}; --overwrite replaces it')
    return None


# Downloading.


def fetch_file(file: DataFile, data_root: Path, *, overwrite: bool = False, num_retries: int = 3) -> Outcome:
    """Download a file into a data root unless it is there. Return FETCHED, THERE or FAILED. Raise RecordError."""
    outcome = kept(file, data_root, overwrite=overwrite)
    if outcome is not None:
        return outcome
    try:
        content = received(download(file, num_retries=num_retries), file, file.url)
    except DataError as error:
        return Outcome(file=file, status=FAILED, place=file.url, detail=reason(error, file.url))
    put(data_root / file.path, content)
    return Outcome(file=file, status=FETCHED, place=file.url)


def download(file: DataFile, *, num_retries: int) -> bytes:
    """Return the published file. Raise DataError if no attempt yields the right bytes."""
    import pooch
    import requests

    pooch.get_logger().setLevel('WARNING')
    name = PurePosixPath(file.source).name
    with tempfile.TemporaryDirectory(prefix='gauntlet-data-') as folder:
        downloads = pooch.Pooch(
            path=folder, base_url='', registry={name: None}, urls={name: file.url}, retry_if_failed=num_retries
        )
        try:
            return Path(downloads.fetch(name, downloader=partial(download_once, file=file))).read_bytes()
        except (requests.RequestException, ValueError) as error:
            tries = f' ({num_retries + 1} tries)' if num_retries else ''
            raise DataError(f'{file.url}: {error}{tries}') from error


def download_once(url: str, output_file: str, pooch: Any, *, file: DataFile) -> None:
    """Download a file for pooch, which retries after RequestException and ValueError; other errors are final."""
    import requests
    from pooch import HTTPDownloader
    from tqdm import tqdm

    name = PurePosixPath(file.path).name
    with tqdm(total=file.num_bytes or 1, desc=name, unit='B', unit_scale=True, leave=False, disable=None) as bar:
        try:
            HTTPDownloader(progressbar=bar, chunk_size=CHUNK_BYTES)(url, output_file, pooch)
        except requests.HTTPError as error:
            response = error.response
            if response is not None and 400 <= response.status_code < 500 and response.status_code not in TEMPORARY:
                raise DataError(f'{url}: the server responded {response.status_code} {response.reason}') from error
            raise
    problem = file.difference(Path(output_file).read_bytes())
    if problem:
        raise ValueError(problem)


def received(published: bytes, file: DataFile, place: str) -> bytes:
    """Verify published bytes and convert them if the file has a converter. Raise DataError."""

    problem = file.difference(published)
    if problem:
        raise DataError(f'{place}: {problem}')
    content = convert(published, file, place) if file.converter else published
    found = check(content, file, place)
    if found.status == OTHER:
        raise DataError(f'{place}: {found.detail}')
    return content


def put(path: Path, content: bytes) -> None:
    """Write a file into a data root. Raise RecordError."""
    try:
        write_atomically(path, [content])
    except OSError as error:
        raise RecordError(f'{path}: cannot be written: {error.strerror or error}') from error


# Files in a local or remote folder.


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The files anywhere below a folder or URL, except hidden ones: paths by file name, shallowest first."""

    root: str
    file_system: Any
    paths: Mapping[str, Sequence[str]]

    def copies(self, path: str) -> list[str]:
        """Return the files with the same name as `path`; names are unique in the manifest."""
        exact = f'{self.root}/{path}'
        found = list(self.paths.get(PurePosixPath(path).name, ()))
        return found or (
            [exact] if self.file_system.isfile(exact) else []
        )  # below a symlink to a folder, which `find` does not follow

    def sources(self, source: str) -> list[str]:
        """Return the files whose path ends in a published path."""
        paths = self.paths.get(PurePosixPath(source).name, ())
        return [path for path in paths if f'/{path}'.endswith(f'/{source}')]

    def place(self, path: str) -> str:
        """Return the path of a local file or the URL of a remote one."""
        url: str = self.file_system.unstrip_protocol(path)
        return url.removeprefix('file://')

    def read(self, path: str) -> bytes:
        """Return the bytes of a file. Raise StoreError."""
        with explained(self.place(path)):
            content: bytes = self.file_system.cat_file(path)
        return content


def open_folder(url: str) -> Folder:
    """List the files below a folder or an fsspec URL. Raise ConfigError if there is no such folder."""
    if not is_remote(url) and not Path(url).is_dir():
        kind = 'is a file; give its folder' if Path(url).exists() else 'there is no such folder'
        raise ConfigError(f'{url}: {kind}')
    with explained(url):
        file_system, root = open_filesystem(url.rstrip('/'))
        found = file_system.find(root)
    paths = defaultdict(list)
    for path in sorted(found, key=lambda path: (path.count('/'), path)):
        parts = path.removeprefix(root).split('/')
        if not any(part.startswith('.') for part in parts):
            paths[parts[-1]].append(path)
    if is_remote(url) and not paths:
        raise ConfigError(f'{url}: there is no such folder, or nothing in it')
    return Folder(root=root, file_system=file_system, paths=paths)


def find(file: DataFile, folder: Folder) -> tuple[Outcome, bytes]:
    """Return the state of a file in a folder and its content: the first copy that is RIGHT or NO_HASH, if any."""
    others = []
    for path in folder.copies(file.path):
        place = folder.place(path)
        try:
            content = folder.read(path)
        except StoreError as error:
            others.append((Outcome(file=file, status=OTHER, place=place, detail=reason(error, place)), b''))
            continue
        found = check(content, file, place)
        if found.status != OTHER:
            return found, content
        others.append((found, content))
    return others[0] if others else (Outcome(file=file, status=MISSING), b'')


def import_file(file: DataFile, folder: Folder, data_root: Path, *, overwrite: bool = False) -> Outcome:
    """Copy a file from a folder into a data root unless it is there, or convert it from the published parquet file.

    Return IMPORTED, THERE, MISSING or FAILED. Raise RecordError.
    """
    outcome = kept(file, data_root, overwrite=overwrite)
    if outcome is not None:
        return outcome
    found, content = find(file, folder)
    if found.status in (OTHER, MISSING) and file.converter is not None:
        for path in folder.sources(file.source):
            place = folder.place(path)
            try:
                content = received(folder.read(path), file, place)
            except (DataError, StoreError) as error:
                found = Outcome(file=file, status=OTHER, place=place, detail=reason(error, place))
            else:
                found = Outcome(file=file, status=RIGHT, place=place)
                break
    if found.status == MISSING:
        return found
    if found.status == OTHER:
        return replace(found, status=FAILED)
    put(data_root / file.path, content)
    return replace(found, status=IMPORTED)
