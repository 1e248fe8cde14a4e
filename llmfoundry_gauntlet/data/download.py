"""Download, import and verify the data files. Only verified files are written to a data root."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from llmfoundry_gauntlet.config.score import MATH, MMLU_PRO
from llmfoundry_gauntlet.config.yaml import describe
from llmfoundry_gauntlet.data.atomic import write_atomically
from llmfoundry_gauntlet.data.manifest import DataFile
from llmfoundry_gauntlet.data.readers import RowError, opened
from llmfoundry_gauntlet.data.score_rows import LETTERS, PARSERS
from llmfoundry_gauntlet.data.stores import explained, is_remote, open_filesystem
from llmfoundry_gauntlet.errors import ConfigError, DataError, RecordError

Row = Mapping[str, Any]

COLUMNS = {  # of the published parquet files that are converted
    MMLU_PRO: ('question_id', 'question', 'options', 'answer', 'answer_index', 'cot_content', 'category', 'src'),
    MATH: ('problem', 'level', 'type', 'solution'),
}
NO_OPTION = 'N/A'  # pads the options to ten in early revisions of MMLU-Pro
RIGHT, NO_HASH, OTHER, MISSING = 'right', 'no hash', 'other bytes', 'missing'
FETCHED, IMPORTED, THERE, FAILED = 'fetched', 'imported', 'there already', 'failed'

CHUNK_BYTES = 1 << 16
TEMPORARY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)  # among the statuses 400 to 499


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The state of a data file, or the result of fetching it. `place` is the path or URL that `detail` refers to."""

    file: DataFile
    status: str
    place: str = ''
    detail: str = ''


def check(content: bytes, file: DataFile, place: str) -> Outcome:
    """Compare content with the manifest: RIGHT, OTHER, or NO_HASH if only the number of rows can be compared."""
    if file.converter is None and (file.sha256 or file.git_blob):
        problem = file.difference(content)
        return Outcome(file=file, status=OTHER if problem else RIGHT, place=place, detail=problem or '')
    num_rows = sum(1 for line in content.split(b'\n') if line.strip())
    if num_rows != file.num_rows:
        detail = f'{num_rows:,} rows; expected {file.num_rows:,}'
        return Outcome(file=file, status=OTHER, place=place, detail=detail)
    detail = f'{num_rows:,} rows as published; no hash is known to compare with'
    return Outcome(file=file, status=NO_HASH, place=place, detail=detail)


def unreadable(error: DataError, file: DataFile, place: str) -> Outcome:
    """Return OTHER with the first problem of an error, without its leading path or URL, and the number of others."""
    more = f' (and {len(error.problems) - 1:,} more)' if len(error.problems) > 1 else ''
    return Outcome(file=file, status=OTHER, place=place, detail=error.problems[0].removeprefix(f'{place}: ') + more)


def find(file: DataFile, places: Sequence[str]) -> tuple[Outcome, bytes]:
    """Return the state of a file at the first of these paths or URLs that is RIGHT or NO_HASH, and its content.

    If none is, return the state at the first. Published parquet files are converted.
    """
    others = []
    for place in places:
        try:
            with opened(place) as copy:
                content = copy.read()
            if PurePosixPath(place).name != PurePosixPath(file.path).name:
                content = convert(content, file, place)
            found = check(content, file, place)
        except DataError as error:
            found = unreadable(error, file, place)
        if found.status != OTHER:
            return found, content
        others.append(found)
    return (others[0] if others else Outcome(file=file, status=MISSING)), b''


def look(file: DataFile, data_root: Path) -> Outcome:
    """Return the state of a file in a data root."""
    path = str(data_root / file.path)
    return find(file, [path] if os.path.exists(path) else [])[0]


def list_copies(files: Sequence[DataFile], url: str, *, published: bool = False) -> Mapping[str, Sequence[str]]:
    """Return the paths or URLs of all files with the names of these files below a folder or fsspec URL, by their path.

    The shallowest are first; hidden files are left out. `published` adds the parquet files that can be converted.
    Raise ConfigError if there is no such folder.
    """
    if not is_remote(url) and not Path(url).is_dir():
        kind = 'is a file; give its folder' if Path(url).exists() else 'there is no such folder'
        raise ConfigError(f'{url}: {kind}')
    with explained(url):
        file_system, root = open_filesystem(url.rstrip('/'))
        paths = [path for path in file_system.find(root) if '/.' not in path.removeprefix(root)]
    if is_remote(url) and not paths:
        raise ConfigError(f'{url}: there is no such folder, or nothing in it')
    scheme = url[: url.find('://') + 3] if is_remote(url) else ''  # as given: fsspec's own may be an alias
    places = defaultdict(list)
    for path in sorted(paths, key=lambda path: (path.count('/'), path)):
        places[PurePosixPath(path).name].append(path if is_remote(path) else f'{scheme}{path}')
    copies = {}
    for file in files:
        found = list(places[PurePosixPath(file.path).name])
        exact = os.path.join(url, file.path)
        if not found and os.path.isfile(exact):  # below a symlink to a folder, which `find` does not follow
            found = [exact]
        if published and file.converter is not None:
            sources = places[PurePosixPath(file.source).name]
            found += [place for place in sources if place.endswith(f'/{file.source}')]
        copies[file.path] = found
    return copies


def fetch_file(file: DataFile, data_root: Path, *, overwrite: bool = False, num_retries: int = 3) -> Outcome:
    """Download a file into a data root unless it is there. Return FETCHED, THERE or FAILED. Raise RecordError."""
    return put(file, data_root, FETCHED, partial(download, file, num_retries=num_retries), overwrite=overwrite)


def import_file(file: DataFile, places: Sequence[str], data_root: Path, *, overwrite: bool = False) -> Outcome:
    """Copy a file from one of these paths or URLs into a data root unless it is there; convert published parquet files.

    Return IMPORTED, THERE, MISSING or FAILED. Raise RecordError.
    """
    return put(file, data_root, IMPORTED, partial(find, file, places), overwrite=overwrite)


def put(
    file: DataFile, data_root: Path, status: str, get: Callable[[], tuple[Outcome, bytes]], *, overwrite: bool
) -> Outcome:
    """Write the content that `get` returns into a data root and return `status`, unless the file is there."""
    there = look(file, data_root)
    if there.status in (RIGHT, NO_HASH):
        return replace(there, status=THERE, detail='')
    if there.status == OTHER and not overwrite:
        return replace(there, status=FAILED, detail=f'{there.detail}; --overwrite replaces it')
    outcome, content = get()
    if outcome.status == OTHER:
        return replace(outcome, status=FAILED)
    if outcome.status == MISSING:
        return outcome
    path = data_root / file.path
    try:
        write_atomically(path, [content])
    except OSError as error:
        raise RecordError(f'{path}: cannot be written: {error.strerror or error}') from error
    return replace(outcome, status=status)


def download(file: DataFile, *, num_retries: int) -> tuple[Outcome, bytes]:
    """Download a published file and convert it if it has a converter; OTHER if no attempt yields the right bytes."""
    import pooch
    import requests

    pooch.get_logger().setLevel('WARNING')
    name = PurePosixPath(file.source).name
    with tempfile.TemporaryDirectory(prefix='gauntlet-data-') as folder:
        downloads = pooch.Pooch(
            path=folder, base_url='', registry={name: None}, urls={name: file.url}, retry_if_failed=num_retries
        )
        try:
            content = Path(downloads.fetch(name, downloader=partial(download_once, file=file))).read_bytes()
            content = convert(content, file, file.url) if file.converter else content
        except DataError as error:
            return unreadable(error, file, file.url), b''
        except (requests.RequestException, ValueError) as error:
            tries = f' ({num_retries + 1} tries)' if num_retries else ''
            return Outcome(file=file, status=OTHER, place=file.url, detail=f'{error}{tries}'), b''
    return check(content, file, file.url), content


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


# Converting published parquet files to JSON lines.


def convert(published: bytes, file: DataFile, source: str) -> bytes:
    """Return the content of a data file, converted from the published parquet file.

    `source` is its path or URL, for messages. Raise DataError with every malformed row.
    """
    problem = file.difference(published)
    if problem:
        raise DataError(f'{source}: {problem}')
    dataset, stem = file.converter or '', PurePosixPath(file.path).stem
    change, lines, problems = CONVERTERS[dataset], [], []
    for number, row in enumerate(parquet_rows(published, COLUMNS[dataset], source), start=1):
        try:
            PARSERS[dataset](row, stem)
            lines.append(f'{json.dumps(change(row, stem), ensure_ascii=False)}\n')
        except RowError as error:
            problems.append(error.at(f'{source}: row {number}'))
    if problems:
        raise DataError(problems)
    return ''.join(lines).encode()


def parquet_rows(content: bytes, columns: Sequence[str], source: str) -> list[Row]:
    """Return these columns of the rows of a parquet file, in this order. Raise DataError."""
    from pyarrow import BufferReader, parquet  # type: ignore[import-untyped]

    try:
        table = parquet.read_table(BufferReader(content))
    except (OSError, ValueError) as error:
        raise DataError(f'{source}: cannot be read as parquet: {error}') from error
    found = table.column_names
    missing = [column for column in columns if column not in found]
    if missing:
        raise DataError(f'{source}: the columns {", ".join(missing)} are missing; found: {", ".join(found)}')
    rows: list[Row] = table.select(columns).to_pylist()
    return rows


def mmlu_pro_row(row: Row, stem: str) -> Row:
    """Return a row of MMLU-Pro without filler options, with `answer` and `answer_index` adjusted."""
    kept = [place for place, option in enumerate(row['options']) if option != NO_OPTION]
    letters = [LETTERS[place] for place in kept]
    if row['answer'] not in letters or row['answer_index'] not in kept:
        found = f'answer is {describe(row["answer"])}, answer_index {row["answer_index"]}'
        raise RowError(f'{found}; allowed: {", ".join(letters)}')
    return {
        **row,
        'options': [row['options'][place] for place in kept],
        'answer': LETTERS[letters.index(row['answer'])],
        'answer_index': kept.index(row['answer_index']),
    }


def math_row(row: Row, stem: str) -> Row:
    """Return a row of MATH unchanged. Raise RowError unless it belongs to the subject of the file."""
    subject = stem.replace('_and_', ' & ').replace('_', ' ').title()
    if row['type'] != subject:
        raise RowError(f'type is {describe(row["type"])}; allowed: {subject!r}')
    return row


CONVERTERS = {MMLU_PRO: mmlu_pro_row, MATH: math_row}
