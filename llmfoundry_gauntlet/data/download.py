"""Download, import and verify the data files. Only verified files are written to a data root."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from llmfoundry_gauntlet.config.score import MATH, MMLU_PRO
from llmfoundry_gauntlet.data.manifest import DataFile
from llmfoundry_gauntlet.data.readers import RowError, opened
from llmfoundry_gauntlet.data.score_rows import PARSERS
from llmfoundry_gauntlet.data.stores import explained, is_remote, open_filesystem, write_atomically
from llmfoundry_gauntlet.errors import ConfigError, DataError, RecordError

COLUMNS = {  # of the published parquet files that are converted
    MMLU_PRO: ['question_id', 'question', 'options', 'answer', 'answer_index', 'cot_content', 'category', 'src'],
    MATH: ['problem', 'level', 'type', 'solution'],
}
NO_OPTION = 'N/A'  # pads the options to ten in early revisions of MMLU-Pro
RIGHT, NO_HASH, OTHER, MISSING = 'right', 'no hash', 'other bytes', 'missing'
FETCHED, IMPORTED, THERE, FAILED = 'fetched', 'imported', 'there already', 'failed'


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The state of a data file, or the result of fetching it. `place` is the path or URL that `detail` refers to."""

    file: DataFile
    status: str
    place: str = ''
    detail: str = ''


def check(content: bytes, file: DataFile, place: str) -> Outcome:
    """Compare content with the manifest: RIGHT, OTHER, or NO_HASH if only the number of rows can be compared."""
    state = partial(Outcome, file=file, place=place)
    if file.converter is None and (file.sha256 or file.git_blob):
        problem = file.difference(content)
        return state(status=OTHER, detail=problem) if problem else state(status=RIGHT)
    num_rows = sum(1 for line in content.split(b'\n') if line.strip())
    if num_rows != file.num_rows:
        return state(status=OTHER, detail=f'{num_rows:,} rows; expected {file.num_rows:,}')
    return state(status=NO_HASH, detail=f'{num_rows:,} rows as published; no hash is known to compare with')


def find(file: DataFile, places: Sequence[str]) -> tuple[Outcome, bytes]:
    """Return the state of a file at the first of these paths or URLs that is RIGHT or NO_HASH, and its content.

    If none is, return the state at the first. Published parquet files are converted.
    """
    first = None
    for place in places:
        content = b''
        try:
            with opened(place) as copy:
                content = copy.read()
            if PurePosixPath(place).name != PurePosixPath(file.path).name:
                content = convert(content, file, place)
            found = check(content, file, place)
        except DataError as error:
            found = Outcome(file=file, status=OTHER, place=place, detail=error.problems[0].removeprefix(f'{place}: '))
        if found.status != OTHER:
            return found, content
        first = first or found
    return first or Outcome(file=file, status=MISSING), b''


def look(file: DataFile, data_root: Path) -> Outcome:
    """Return the state of a file in a data root."""
    path = str(data_root / file.path)
    return find(file, [path] if os.path.exists(path) else [])[0]


def list_copies(files: Sequence[DataFile], url: str) -> Mapping[str, Sequence[str]]:
    """Return, by the path of each file, the paths or URLs of the files with its name below a folder or fsspec URL.

    The shallowest come first, published parquet files that can be converted last; hidden files are left out. Raise
    ConfigError if there is no such folder.
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
        if file.converter is not None:
            sources = places[PurePosixPath(file.source).name]
            found += [place for place in sources if place.endswith(f'/{file.source}')]
        copies[file.path] = found
    return copies


def fetch_file(file: DataFile, data_root: Path, *, overwrite: bool = False, num_retries: int = 3) -> Outcome:
    """Download a file into a data root unless it is there. Return FETCHED, THERE or FAILED. Raise RecordError."""
    return put(file, data_root, FETCHED, partial(download, file, num_retries), overwrite=overwrite)


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


def download(file: DataFile, num_retries: int) -> tuple[Outcome, bytes]:
    """Download a published file and convert it if necessary; return OTHER if no attempt yields the expected bytes."""
    import pooch
    import requests

    pooch.get_logger().setLevel('WARNING')
    name = PurePosixPath(file.source).name
    with tempfile.TemporaryDirectory(prefix='gauntlet-data-') as folder:
        downloads = pooch.Pooch(
            folder, '', registry={name: file.sha256}, urls={name: file.url}, retry_if_failed=num_retries
        )
        downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty())
        try:
            content = Path(downloads.fetch(name, downloader=downloader)).read_bytes()
            content = convert(content, file, file.url) if file.converter else content
        except (DataError, requests.RequestException, ValueError) as error:
            return Outcome(file=file, status=OTHER, place=file.url, detail=' '.join(str(error).split())), b''
    return check(content, file, file.url), content


def convert(published: bytes, file: DataFile, source: str) -> bytes:
    """Return the content of a data file, converted to JSON lines from the published parquet file.

    `source` is its path or URL, for messages. Raise DataError.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    problem = file.difference(published)
    if problem:
        raise DataError(f'{source}: {problem}')
    dataset, stem, lines = file.converter or '', PurePosixPath(file.path).stem, []
    try:
        rows = parquet.read_table(pa.BufferReader(published)).select(COLUMNS[dataset]).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f'{source}: cannot be read as the published parquet file: {error}') from error
    for number, row in enumerate(rows, start=1):
        if dataset == MMLU_PRO:
            options = [option for option in row['options'] if option != NO_OPTION]
            if options != row['options'][: len(options)]:
                raise DataError(f'{source}: row {number}: {NO_OPTION} is before another option; allowed: last')
            row['options'] = options
        try:
            PARSERS[dataset](row, stem)
        except RowError as error:
            raise DataError(error.at(f'{source}: row {number}')) from error
        lines.append(f'{json.dumps(row, ensure_ascii=False)}\n')
    return ''.join(lines).encode()
