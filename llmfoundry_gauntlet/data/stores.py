"""Read and write files on disk, also atomically, and in object stores through fsspec, whose errors are explained."""

from __future__ import annotations

import errno
import io
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.errors import StoreError

UNFINISHED = '.unfinished'  # suffix of files being written, or left behind by a killed writer
# Downloads of parts of a file.
MAX_GAP_BYTES = 1 << 20  # between two parts that are downloaded as one
MAX_BLOCK_BYTES = 1 << 26
REQUESTS_AT_ONCE = 8
CONNECT_SECONDS = 5  # short, so that a wrong endpoint fails soon
EXTRAS = {'s3': 's3', 'gs': 'gcs', 'az': 'azure'}  # this package's extras by scheme
ALIASES = {'gcs': 'gs', 'azure': 'az'}
CREDENTIALS = {
    's3': 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE',
    'gs': 'set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`',
    'az': 'set AZURE_STORAGE_CONNECTION_STRING, or AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_ACCESS_KEY',
}
SCHEMES = ', '.join(f'{scheme}://' for scheme in EXTRAS)
CLIENTS = ('botocore', 'gcsfs', 'google', 'aiohttp', 'azure')  # packages whose errors are not OSErrors
CONFLICTS = ('PreconditionFailed', 'ConditionalRequestConflict', '412', '409')  # another writer came first


def is_remote(source: str) -> bool:
    """Return whether a source is a URI rather than a local path."""
    return '://' in source


def scheme_of(uri: str) -> str:
    """Return the scheme of a URI, with aliases resolved, or '' for a local path."""
    scheme = uri.partition('://')[0] if is_remote(uri) else ''
    return ALIASES.get(scheme, scheme)


def open_filesystem(uri: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a local path or URI, and the path in it, without accessing it.

    Raise StoreError for an unknown scheme or a package that is not installed.
    """
    import fsspec

    scheme = scheme_of(uri)
    if not scheme:
        return fsspec.filesystem('file', auto_mkdir=True), Path(uri).expanduser().absolute().as_posix()
    if scheme in EXTRAS and not uri.partition('://')[2].strip('/'):
        raise StoreError(f'{uri}: names no bucket; allowed: {scheme}://bucket/path')
    options: dict[str, Any] = {}  # settings that fsspec does not read from Composer's environment variables
    if scheme == 's3':
        options = {'endpoint_url': s3_endpoint(), 'config_kwargs': {'connect_timeout': CONNECT_SECONDS}}
    elif scheme == 'az':
        variables = {'account_name': 'AZURE_ACCOUNT_NAME', 'account_key': 'AZURE_ACCOUNT_ACCESS_KEY'}
        options = {option: os.environ[name] for option, name in variables.items() if os.environ.get(name)}
    try:
        fs = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as error:
        advice = f": pip install 'llmfoundry-gauntlet[{EXTRAS[scheme]}]'" if scheme in EXTRAS else ''
        raise StoreError(f'{uri}: {error}{advice}') from error
    except ValueError as error:
        raise StoreError(f'{uri}: unknown scheme; allowed: {SCHEMES}, or any other that fsspec supports') from error
    return fs, fs._strip_protocol(uri)


def open_file(uri: str) -> io.BufferedReader:
    """Open the file of a URI for reading bytes, inside `explained`. Raise StoreError."""
    fs, path = open_filesystem(uri)
    return io.BufferedReader(fs.open(path, 'rb'))


def s3_endpoint() -> str | None:
    """Return the S3 endpoint: S3_ENDPOINT_URL, as in Composer, else AWS_ENDPOINT_URL, else `None` for Amazon's."""
    return os.environ.get('S3_ENDPOINT_URL') or os.environ.get('AWS_ENDPOINT_URL')


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Convert errors of filesystems and object stores to a StoreError with the URI, the endpoint and the reason."""
    try:
        yield
    except Exception as error:
        is_of_client = type(error).__module__.partition('.')[0] in CLIENTS
        if not is_of_client and not isinstance(error, (OSError, ValueError, NotImplementedError)):
            raise
        scheme = scheme_of(uri)
        text = ' '.join(str(error).split()).rstrip('.')
        reason = getattr(error, 'strerror', None) or text or type(error).__name__
        if isinstance(error, FileNotFoundError) and error_code(error) != 'NoSuchBucket':
            reason = 'there is no such file'
        elif isinstance(error, PermissionError) or 'Credentials' in type(error).__name__:
            reason += f'; {CREDENTIALS[scheme]}' if scheme in CREDENTIALS else ''
        endpoint = f' at {s3_endpoint()}' if scheme == 's3' and s3_endpoint() else ''
        raise StoreError(f'{uri}{endpoint}: {reason}') from error


def error_code(error: BaseException) -> str:
    """Return the S3 error code, from the cause of s3fs's own error, or ''."""
    response = getattr(error.__cause__ or error, 'response', None)
    return str(response['Error'].get('Code', '')) if isinstance(response, dict) and 'Error' in response else ''


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, named relative to its store. `version` changes whenever the content does."""

    name: str
    size: int  # bytes
    version: str  # the entity tag of an object, or the time, size and inode of a file


def version_of(info: Mapping[str, Any]) -> str:
    """Return the version of a file from fsspec's information about it."""
    tag = info.get('ETag') or info.get('etag')
    if tag:
        return str(tag).strip('"')
    return f'{info.get("mtime")}-{info["size"]}-{info.get("ino")}'


class Store:
    """A folder on disk or in an object store, given by local path or URI. All methods raise StoreError."""

    def __init__(self, uri: str) -> None:
        if scheme_of(uri) not in ('', *EXTRAS):
            raise StoreError(f'{uri}: unknown scheme; allowed: {SCHEMES}, or a local path')
        self.fs, self._root = open_filesystem(uri)
        self.is_local = not scheme_of(uri)
        self.uri = self._root if self.is_local else uri.rstrip('/')

    def files(self, prefix: str = '') -> list[StoredFile]:
        """Return all files whose names start with `prefix`, sorted; none if the folder does not exist.

        Symbolic links on disk are skipped and not followed.
        """
        options = {'on_error': 'raise'} if self.is_local else {'prefix': prefix}
        with explained(self.uri):
            try:
                info_by_path = self.fs.find(self._root, detail=True, **options)
            except FileNotFoundError:
                if not self.is_local:  # a bucket must exist
                    raise
                return []
        if self._root in info_by_path:
            raise StoreError(f'{self.uri}: is a file; give a folder')

        files = []
        for path, info in sorted(info_by_path.items()):
            name = path[len(self._root) + 1 :]
            is_folder = not name or name.endswith('/')  # stores may have empty objects for folders
            if name.startswith(prefix) and not is_folder and not info.get('islink'):
                files.append(StoredFile(name, info['size'], version_of(info)))
        return files

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with explained(f'{self.uri}/{name}'):
            content: bytes = self.fs.cat_file(f'{self._root}/{name}')
        return content

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Copy files into a local folder, each under the last part of its name."""
        pairs = {f'{self._root}/{name}': str(folder / name.rpartition('/')[2]) for name in names}
        with explained(self.uri):
            self.fs.get(list(pairs), list(pairs.values()))

    def download_parts(self, file: StoredFile, path: Path, parts: Sequence[tuple[int, int]]) -> None:
        """Copy parts of a file, each (start, end) in bytes, to the same places of a local file of its size."""
        from fsspec.utils import merge_offset_ranges

        remote = f'{self._root}/{file.name}'
        starts = [min(start, file.size) for start, _ in parts]
        ends = [min(end, file.size) for _, end in parts]
        _, starts, ends = merge_offset_ranges([remote] * len(parts), starts, ends, MAX_GAP_BYTES, MAX_BLOCK_BYTES)
        with explained(f'{self.uri}/{file.name}'), path.open('wb') as local:
            local.truncate(file.size)
            for first in range(0, len(starts), REQUESTS_AT_ONCE):
                starts_now = starts[first : first + REQUESTS_AT_ONCE]
                ends_now = ends[first : first + REQUESTS_AT_ONCE]
                contents = self.fs.cat_ranges([remote] * len(starts_now), starts_now, ends_now)
                for start, content in zip(starts_now, contents, strict=True):
                    if isinstance(content, Exception):
                        raise content
                    local.seek(start)
                    local.write(content)

    def create(self, name: str, content: bytes) -> bool:
        """Create a file unless it exists; return whether it was created. Of concurrent calls exactly one succeeds.

        On disk, readers may see the file before its content.
        """
        path = f'{self._root}/{name}'
        with explained(f'{self.uri}/{name}'):
            # Which of two ways is exclusive depends on the store: `pipe_file` in docs/compatibility.md.
            try:
                if not self.is_local:  # s3fs 2025.3.0 ignores 'xb', and fsspec's pipe_file is not exclusive on disk
                    self.fs.pipe_file(path, content, mode='create')
                    return True
                self.fs.makedirs(self.fs._parent(path), exist_ok=True)
                with self.fs.open(path, 'xb') as file:
                    file.write(content)
            except OSError as error:
                if not isinstance(error, FileExistsError) and error_code(error) not in CONFLICTS:
                    raise
                return self.read(name) == content  # the response to a first attempt may have been lost
        return True

    def write(self, name: str, content: bytes) -> None:
        """Write or overwrite a file that has no other writers."""
        with explained(f'{self.uri}/{name}'):
            self.fs.pipe_file(f'{self._root}/{name}', content)


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write or replace a file atomically, creating missing folders. Raise OSError.

    If interrupted, the path has either its old content or all of the new.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unfinished_path(path.parent)
    with ExitStack() as on_failure:
        on_failure.callback(remove, unfinished)
        write_synced(unfinished, chunks)
        os.replace(unfinished, path)
        on_failure.pop_all()
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file if that is possible."""
    with suppress(OSError):
        os.unlink(path)


def unfinished_path(folder: Path) -> Path:
    """Return a new hidden name in a folder."""
    return folder / f'.{uuid.uuid4().hex}{UNFINISHED}'


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a new file and sync it to disk. Raise OSError."""
    with path.open('xb') as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk. Raise OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(handle)
