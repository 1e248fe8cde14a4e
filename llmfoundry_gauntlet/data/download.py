"""Download, import and verify the data files. Only verified files are written to a data root."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from llmfoundry_gauntlet.data.atomic import write_atomically
from llmfoundry_gauntlet.data.manifest import DataFile
from llmfoundry_gauntlet.data.stores import explained, is_remote, open_filesystem
from llmfoundry_gauntlet.errors import ConfigError, DataError, RecordError, StoreError

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
    from llmfoundry_gauntlet.data.converters import convert

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
