"""Read and write files on disk and in object stores through fsspec, and explain its errors."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.errors import StoreError

CONNECT_SECONDS = 5  # short, so that a wrong endpoint fails soon
EXTRAS = {'s3': 's3', 'gs': 'gcs', 'az': 'azure'}  # this package's extras by scheme
ALIASES = {'gcs': 'gs', 'azure': 'az'}
CREDENTIALS = {
    's3': 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE',
    'gs': 'set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`',
    'az': 'set AZURE_STORAGE_CONNECTION_STRING, or AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_ACCESS_KEY',
}
SCHEMES = ', '.join(f'{scheme}://' for scheme in EXTRAS)
CONFLICTS = ('PreconditionFailed', 'ConditionalRequestConflict', '412', '409')
MEANINGS = (  # by S3 error code or exception name
    (
        ('InvalidAccessKeyId', 'SignatureDoesNotMatch', 'ExpiredToken', 'InvalidToken', 'AuthFailure'),
        'the credentials are refused ({code}); {credentials}',
    ),
    (('AccessDenied', '403'), 'access denied; allow listing, reading and, for claims, writing'),
    (('NoSuchBucket',), 'there is no such bucket; create it, or correct the name or the endpoint'),
    (('NoCredentialsError', 'PartialCredentialsError'), 'there are no credentials; {credentials}'),
    (
        ('EndpointConnectionError', 'ConnectTimeoutError', 'ReadTimeoutError', 'ConnectionClosedError'),
        'the endpoint does not answer; check the network and S3_ENDPOINT_URL',
    ),
    (('FileNotFoundError',), 'there is no such file'),
)
CLIENT_ERRORS = (  # of the clients; not OSErrors
    'botocore.exceptions.BotoCoreError',
    'botocore.exceptions.ClientError',
    'gcsfs.retry.HttpError',
    'google.auth.exceptions.GoogleAuthError',
    'aiohttp.ClientError',
    'azure.core.exceptions.AzureError',
)


def is_remote(source: str) -> bool:
    """Return whether a source is a URI rather than a local path."""
    return '://' in source


def scheme_of(uri: str) -> str:
    """Return the scheme of a URI, with aliases resolved, or '' for a local path."""
    scheme = uri.partition('://')[0] if is_remote(uri) else ''
    return ALIASES.get(scheme, scheme)


def open_filesystem(uri: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a local path or URI, and the path in it, without accessing it.

    The S3 endpoint is S3_ENDPOINT_URL, as in Composer, else AWS_ENDPOINT_URL, else Amazon's. Raise StoreError for an
    unknown scheme or a package that is not installed.
    """
    import fsspec

    scheme = scheme_of(uri)
    if not scheme:
        return fsspec.filesystem('file', auto_mkdir=True), Path(uri).expanduser().absolute().as_posix()
    if scheme in EXTRAS and not uri.partition('://')[2].strip('/'):
        raise StoreError(f'{uri}: names no bucket; allowed: {scheme}://bucket/path')
    try:
        fs = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options_of(scheme))
    except ImportError as error:
        advice = f": pip install 'llmfoundry-gauntlet[{EXTRAS[scheme]}]'" if scheme in EXTRAS else ''
        raise StoreError(f'{uri}: {error}{advice}') from error
    except ValueError as error:
        raise StoreError(f'{uri}: unknown scheme; allowed: {SCHEMES}, or any other that fsspec supports') from error
    return fs, fs._strip_protocol(uri)


def options_of(scheme: str) -> dict[str, Any]:
    """Return the options that fsspec does not take from Composer's environment variables by itself."""
    if scheme == 's3':
        return {'endpoint_url': s3_endpoint(), 'config_kwargs': {'connect_timeout': CONNECT_SECONDS}}
    if scheme == 'az':
        variables = {'account_name': 'AZURE_ACCOUNT_NAME', 'account_key': 'AZURE_ACCOUNT_ACCESS_KEY'}
        return {option: os.environ[name] for option, name in variables.items() if os.environ.get(name)}
    return {}


def open_file(uri: str) -> io.BufferedReader:
    """Open the file of a URI for reading bytes, inside `explained`. Raise StoreError."""
    scheme = scheme_of(uri)
    bucket, _, name = uri.partition('://')[2].partition('/')
    if scheme in EXTRAS and not (bucket and name):
        raise StoreError(f'{uri}: names no file; allowed: {scheme}://bucket/path/file')
    fs, path = open_filesystem(uri)
    return io.BufferedReader(fs.open(path, 'rb'))


def s3_endpoint() -> str | None:
    """Return the S3 endpoint set in the environment, or `None` for Amazon's."""
    return os.environ.get('S3_ENDPOINT_URL') or os.environ.get('AWS_ENDPOINT_URL')


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Convert errors of filesystems and object stores to a StoreError that says what to do."""
    clients = [name.rpartition('.') for name in CLIENT_ERRORS]
    loaded = [getattr(sys.modules[module], name) for module, _, name in clients if module in sys.modules]
    try:
        yield
    except (OSError, ValueError, NotImplementedError, *loaded) as error:
        endpoint = s3_endpoint() if scheme_of(uri) == 's3' else None
        raise StoreError(f'{uri}{f" at {endpoint}" if endpoint else ""}: {meaning(uri, error)}') from error


def meaning(uri: str, error: BaseException) -> str:
    """Return the message for an error: the problem and, for known errors, the fix."""
    code, name = error_code(error), type(error).__name__
    for names, text in MEANINGS:
        if code in names or name in names:
            return text.format(code=code, credentials=CREDENTIALS.get(scheme_of(uri)))
    return getattr(error, 'strerror', None) or ' '.join(str(error).split()) or name


def error_code(error: BaseException) -> str:
    """Return the S3 error code, from the cause of s3fs's own error, or ''."""
    response = getattr(error.__cause__ or error, 'response', None)
    return str(response['Error'].get('Code', '')) if isinstance(response, dict) and 'Error' in response else ''


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, named relative to its store. `version` changes whenever the content does."""

    name: str
    size: int  # bytes
    version: str


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
                found = self.fs.find(self._root, detail=True, **options).values()
            except FileNotFoundError:
                if not self.is_local:  # a bucket must exist
                    raise
                return []
        if any(info['name'] == self._root for info in found):
            raise StoreError(f'{self.uri}: is a file; give a folder')
        infos = {info['name'][len(self._root) + 1 :]: info for info in found if not info.get('islink')}
        return [
            StoredFile(name, info['size'], version_of(info))
            for name, info in sorted(infos.items())
            if name.startswith(prefix) and name and not name.endswith('/')
        ]

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with self._at(name) as path:
            content: bytes = self.fs.cat_file(path)
        return content

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Copy files into a local folder, each under the last part of its name."""
        pairs = {f'{self._root}/{name}': str(folder / name.rpartition('/')[2]) for name in names}
        with explained(self.uri):
            self.fs.get(list(pairs), list(pairs.values()))

    def create(self, name: str, content: bytes) -> bool:
        """Create a file unless it exists; return whether it was created. Of concurrent calls exactly one succeeds.

        On disk, readers may see the file before its content.
        """
        with self._at(name) as path:
            try:
                if self.is_local:
                    self.fs.makedirs(self.fs._parent(path), exist_ok=True)
                    with self.fs.open(path, 'xb') as file:
                        file.write(content)
                else:  # s3fs 2025.3.0 ignores mode 'xb', and fsspec's pipe_file is not exclusive on disk
                    self.fs.pipe_file(path, content, mode='create')
            except OSError as error:
                if not isinstance(error, FileExistsError) and error_code(error) not in CONFLICTS:
                    raise
                return self.read(name) == content  # the response to a first attempt may have been lost
        return True

    def write(self, name: str, content: bytes) -> None:
        """Write or overwrite a file that has no other writers."""
        with self._at(name) as path:
            self.fs.pipe_file(path, content)

    @contextmanager
    def _at(self, name: str) -> Iterator[str]:
        """Yield the path of a file; errors name it and are explained."""
        with explained(f'{self.uri}/{name}'):
            yield f'{self._root}/{name}'


def version_of(info: dict[str, Any]) -> str:
    """Return the entity tag of an object, or the time, size and inode of a file."""
    tag = info.get('ETag') or info.get('etag')
    return str(tag).strip('"') if tag else f'{info.get("mtime")}-{info["size"]}-{info.get("ino")}'
