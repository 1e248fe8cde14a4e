"""The published data files: the manifest, their state in a data root, and downloading or copying them.

Only verified files are written to a data root.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha1, sha256
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from llmfoundry_gauntlet.config.resources import PACKAGE
from llmfoundry_gauntlet.config.score import MATH, MMLU_PRO
from llmfoundry_gauntlet.data.readers import RowError, open_source
from llmfoundry_gauntlet.data.score_rows import PARSERS
from llmfoundry_gauntlet.data.stores import explained, is_remote, open_filesystem, write_atomically
from llmfoundry_gauntlet.errors import ConfigError, DataError, RecordError, suggestion

PATH = PACKAGE / 'eval_data' / 'manifest.tsv'
SAMPLE, UNOFFICIAL, OWN, PUBLISHED = 'sample', 'unofficial', 'own', 'published'  # where rows come from
HUGGING_FACE_ENDPOINT = 'HF_ENDPOINT'  # the environment variable that names a mirror of the Hugging Face hub
COLUMNS = {  # of the published parquet files that are converted
    MMLU_PRO: ['question_id', 'question', 'options', 'answer', 'answer_index', 'cot_content', 'category', 'src'],
    MATH: ['problem', 'level', 'type', 'solution'],
}
NO_OPTION = 'N/A'  # pads the options to ten in early revisions of MMLU-Pro
# States of a file compared with the manifest, beside PUBLISHED and SAMPLE, and results of fetching it.
NO_HASH, OTHER, MISSING = 'no hash', 'other bytes', 'missing'
FETCHED, COPIED, THERE, FAILED = 'fetched', 'copied', 'there already', 'failed'


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A data file: its path below a data root, the task it belongs to, and the published file.

    `repository` is 'github:owner/name' or 'huggingface:owner/name', `revision` a commit, `source` the path in it. Size,
    git blob id and sha256 are those of the published file, None if unknown. `converter` names the conversion from the
    published file to the data file, None if they are the same.
    """

    path: str
    task: str
    num_rows: int
    num_bytes: int | None
    git_blob: str | None
    sha256: str | None
    repository: str
    revision: str
    source: str
    licence: str
    converter: str | None

    @property
    def category(self) -> str:
        """Return the folder below the data root."""
        return self.path.partition('/')[0]

    @property
    def url(self) -> str:
        """Return the address of the published file."""
        host, _, name = self.repository.partition(':')
        path = quote(self.source)
        if host == 'github':
            return f'https://raw.githubusercontent.com/{name}/{self.revision}/{path}'
        hub = os.environ.get(HUGGING_FACE_ENDPOINT, '').rstrip('/') or 'https://huggingface.co'
        return f'{hub}/datasets/{name}/resolve/{self.revision}/{path}'

    def difference(self, content: bytes) -> str | None:
        """Return how the content differs from the published file; None if it does not, or if no hash is known."""
        if self.sha256 is not None:
            kind, expected, found = 'sha256', self.sha256, sha256(content).hexdigest()
        elif self.git_blob is not None:
            kind, expected, found = 'git blob id', self.git_blob, git_blob_id(content)
        else:
            return None
        if found == expected:
            return None
        size = '' if self.num_bytes is None else f', {self.num_bytes:,} bytes'
        return f'{kind} is {found}, {len(content):,} bytes; expected {expected}{size}'


def git_blob_id(content: bytes) -> str:
    """Return git's id of a file with these bytes, 40 hex digits."""
    return sha1(b'blob %d\0' % len(content) + content, usedforsecurity=False).hexdigest()


@cache
def read_manifest(path: Path = PATH) -> tuple[DataFile, ...]:
    """Return all files in the order of the manifest; empty fields are unknown."""
    with path.open(encoding='utf-8', newline='') as lines:
        rows = list(csv.DictReader(lines, dialect='excel-tab'))
    return tuple(
        DataFile(
            path=row['path'],
            task=row['task'],
            num_rows=int(row['rows']),
            num_bytes=int(row['bytes']) if row['bytes'] else None,
            git_blob=row['git_blob'] or None,
            sha256=row['sha256'] or None,
            repository=row['repository'],
            revision=row['revision'],
            source=row['source'],
            licence=row['licence'],
            converter=row['converter'] or None,
        )
        for row in rows
    )


def select_files(names: Sequence[str]) -> tuple[DataFile, ...]:
    """Return the files with these names: labels of tasks, categories (folders), paths or their stems; all by default.

    Raise ConfigError with every unknown name.
    """
    files = read_manifest()
    if not names:
        return files
    known = {name for file in files for name in names_of_file(file)}
    problems = [f'{name}: no such task or file{suggestion(name, known)}' for name in names if name not in known]
    if problems:
        raise ConfigError(problems)
    return tuple(file for file in files if not names_of_file(file).isdisjoint(names))


def names_of_file(file: DataFile) -> set[str]:
    """Return the names by which a file can be selected."""
    stem = file.path.removesuffix('.jsonl')
    return {file.task, file.category, file.path, stem, stem.rpartition('/')[2]}


def origin_of(paths: Sequence[Path]) -> str:
    """Return where the rows of a task come from.

    SAMPLE if a file is the package's sample data, UNOFFICIAL if a file has a published file's name but is not known to
    be identical (MMLU-Pro and MATH are converted, so no hash is known), OWN for any other file or none, else PUBLISHED.
    """
    origins = {origin_of_file(path) for path in paths}
    for origin in (SAMPLE, UNOFFICIAL, OWN, PUBLISHED):
        if origin in origins:
            return origin
    return OWN


def origin_of_file(path: Path) -> str:
    """Return where a file comes from, by its content and by its path below a data root."""
    samples_folder = PATH.parent
    if path.resolve().is_relative_to(samples_folder.resolve()):
        return SAMPLE

    content = path.read_bytes()
    hashes = {git_blob_id(content), sha256(content).hexdigest()}
    unconverted = [file for file in read_manifest() if file.converter is None]
    if any(file.git_blob in hashes or file.sha256 in hashes for file in unconverted):
        return PUBLISHED

    place = path.resolve().as_posix()
    files_of_that_name = [file for file in read_manifest() if place.endswith(f'/{file.path}')]
    for file in files_of_that_name:
        sample = samples_folder / file.path
        if sample.is_file() and sample.read_bytes() == content:
            return SAMPLE
    return UNOFFICIAL if files_of_that_name else OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """The state of a data file, or the result of fetching it. `place` is the path or URL that `detail` refers to."""

    file: DataFile
    status: str
    place: str = ''
    detail: str = ''


def compare_with_manifest(content: bytes, file: DataFile, place: str) -> FileState:
    """Compare content with the manifest: PUBLISHED, OTHER, or NO_HASH if only the number of rows can be compared."""
    state = partial(FileState, file=file, place=place)
    has_hash = file.sha256 is not None or file.git_blob is not None
    if has_hash and file.converter is None:  # else the hash is of the file that is converted
        difference = file.difference(content)
        return state(status=PUBLISHED) if difference is None else state(status=OTHER, detail=difference)
    num_rows = sum(1 for line in content.split(b'\n') if line.strip())
    if num_rows != file.num_rows:
        return state(status=OTHER, detail=f'{num_rows:,} rows; expected {file.num_rows:,}')
    return state(status=NO_HASH, detail=f'{num_rows:,} rows as published; no hash is known to compare with')


def find(file: DataFile, places: Sequence[str]) -> tuple[FileState, bytes]:
    """Return the state of a file at the first of these paths or URLs that is PUBLISHED or NO_HASH, and its content.

    If none is, return the state at the first. Published parquet files are converted.
    """
    states = []
    for place in places:
        content = b''
        try:
            with open_source(place) as copy:
                content = copy.read()
            if PurePosixPath(place).name != PurePosixPath(file.path).name:
                content = convert(content, file, place)
            state = compare_with_manifest(content, file, place)
        except DataError as error:
            reason = error.problems[0].removeprefix(f'{place}: ')
            state = FileState(file=file, status=OTHER, place=place, detail=reason)
        if state.status != OTHER:
            return state, content
        states.append(state)
    return (states[0] if states else FileState(file=file, status=MISSING)), b''


def look(file: DataFile, data_root: Path) -> FileState:
    """Return the state of a file in a data root."""
    path = str(data_root / file.path)
    return find(file, [path] if os.path.exists(path) else [])[0]


def look_for_sample(file: DataFile, data_root: Path) -> FileState:
    """Return the state of a file in a data root; SAMPLE if it is the package's sample data."""
    state = look(file, data_root)
    if state.status != OTHER:
        return state
    try:
        is_sample = origin_of_file(data_root / file.path) == SAMPLE
    except OSError:  # the state has the reason
        return state
    return FileState(file=file, status=SAMPLE, place=state.place) if is_sample else state


def list_copies(files: Sequence[DataFile], url: str) -> Mapping[str, Sequence[str]]:
    """Return, by the path of each file, the paths or URLs of the files with its name below a folder or fsspec URL.

    The shallowest come first, published parquet files that can be converted last; hidden files are left out. Raise
    ConfigError if there is no such folder.
    """
    places_by_name: dict[str, list[str]] = defaultdict(list)
    for place in visible_files(url):
        places_by_name[PurePosixPath(place).name].append(place)

    copies = {}
    for file in files:
        places = list(places_by_name[PurePosixPath(file.path).name])
        exact = os.path.join(url, file.path)
        if not places and os.path.isfile(exact):  # below a symlink to a folder, which `find` does not follow
            places = [exact]
        if file.converter is not None:
            of_that_name = places_by_name[PurePosixPath(file.source).name]
            places += [place for place in of_that_name if place.endswith(f'/{file.source}')]
        copies[file.path] = places
    return copies


def visible_files(url: str) -> list[str]:
    """Return the paths or URLs of all files below a folder or fsspec URL but hidden ones, the shallowest first.

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
    shallowest_first = sorted(paths, key=lambda path: (path.count('/'), path))
    scheme = url[: url.find('://') + 3] if is_remote(url) else ''  # as given: fsspec's own may be an alias
    return [path if is_remote(path) else f'{scheme}{path}' for path in shallowest_first]


def fetch_file(file: DataFile, data_root: Path, *, overwrite: bool = False, num_retries: int = 3) -> FileState:
    """Download a file into a data root unless it is there. Return FETCHED, THERE or FAILED. Raise RecordError."""
    return put(file, data_root, FETCHED, partial(download_file, file, num_retries), overwrite=overwrite)


def copy_file(file: DataFile, places: Sequence[str], data_root: Path, *, overwrite: bool = False) -> FileState:
    """Copy a file from one of these paths or URLs into a data root unless it is there; convert published parquet files.

    Return COPIED, THERE, MISSING or FAILED. Raise RecordError.
    """
    return put(file, data_root, COPIED, partial(find, file, places), overwrite=overwrite)


def put(
    file: DataFile, data_root: Path, status: str, get: Callable[[], tuple[FileState, bytes]], *, overwrite: bool
) -> FileState:
    """Write the content that `get` returns into a data root and return `status`, unless the file is there."""
    there = look(file, data_root)
    if there.status in (PUBLISHED, NO_HASH):
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


def download_file(file: DataFile, num_retries: int) -> tuple[FileState, bytes]:
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
            if file.converter is not None:
                content = convert(content, file, file.url)
        except (DataError, requests.RequestException, ValueError) as error:
            return FileState(file=file, status=OTHER, place=file.url, detail=' '.join(str(error).split())), b''
    return compare_with_manifest(content, file, file.url), content


def convert(published: bytes, file: DataFile, source: str) -> bytes:
    """Return the content of a data file, converted to JSON lines from the published parquet file.

    `source` is its path or URL, for messages. Raise DataError.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    problem = file.difference(published)
    if problem:
        raise DataError(f'{source}: {problem}')
    dataset = file.converter or ''
    stem = PurePosixPath(file.path).stem
    try:
        rows = parquet.read_table(pa.BufferReader(published)).select(COLUMNS[dataset]).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f'{source}: cannot be read as the published parquet file: {error}') from error
    lines = []
    for number, row in enumerate(rows, start=1):
        if dataset == MMLU_PRO:
            options = [option for option in row['options'] if option != NO_OPTION]
            if options != row['options'][: len(options)]:
                raise DataError(f'{source}: row {number}: {NO_OPTION} is before another option; allowed: last')
            row['options'] = options
        try:  # only to check the row, which is written as it is
            PARSERS[dataset](row, stem)
        except RowError as error:
            raise DataError(error.at(f'{source}: row {number}')) from error
        lines.append(f'{json.dumps(row, ensure_ascii=False)}\n')
    return ''.join(lines).encode()
