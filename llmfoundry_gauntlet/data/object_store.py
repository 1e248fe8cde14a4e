"""Data files in object stores, by Composer's clients. A machine downloads an object once, and again when it changed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.caches import cache_folder
from llmfoundry_gauntlet.errors import DataError

log = logging.getLogger(__name__)

OBJECTS = 'objects'
CONNECT_SECONDS = 5  # a wrong endpoint must show soon; how often is tried is botocore's to say
MOST_TEXT = 300  # characters of an error of another library
MLFLOW = 'databricks/mlflow-tracking/'

STORES = {  # by the beginning of a URI: where credentials come from
    's3': 'credentials are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, the endpoint S3_ENDPOINT_URL',
    'gs': 'credentials are GCS_KEY and GCS_SECRET, or the application default credentials of Google Cloud',
    'oci': 'credentials are in the file that OCI_CONFIG_FILE names, or in ~/.oci/config',
    'azure': 'credentials are AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_ACCESS_KEY',
    'dbfs': 'credentials are DATABRICKS_HOST and DATABRICKS_TOKEN; allowed: dbfs:/Volumes/catalog/schema/volume/file',
}
ERRORS = (  # of the clients
    'builtins.RuntimeError',
    *('boto3.exceptions.Boto3Error', 'botocore.exceptions.BotoCoreError', 'botocore.exceptions.ClientError'),
    *('google.api_core.exceptions.GoogleAPIError', 'google.auth.exceptions.GoogleAuthError'),
    *('oci.exceptions.ClientError', 'oci.exceptions.ServiceError', 'libcloud.common.types.LibcloudError'),
)
NO_OBJECT = 'there is no such object'
MEANINGS = {  # of S3's codes and of botocore's exceptions
    'NoSuchKey': NO_OBJECT,
    'NoSuchBucket': 'there is no such bucket',
    **dict.fromkeys(
        ('AccessDenied', '403'), 'access is denied: the credentials lack the permission to read the object'
    ),
    **dict.fromkeys(('NoCredentialsError', 'PartialCredentialsError'), 'there are no credentials'),
    **dict.fromkeys(
        ('InvalidAccessKeyId', 'SignatureDoesNotMatch', 'ExpiredToken', 'InvalidToken', 'AuthFailure'),
        'the credentials are refused',
    ),
    **dict.fromkeys(
        (
            'EndpointConnectionError',
            'ConnectTimeoutError',
            'ReadTimeoutError',
            'ConnectionClosedError',
            'ProxyConnectionError',
        ),
        'the endpoint does not answer',
    ),
}


@dataclass(frozen=True, slots=True)
class Version:
    """What an object is now. `place` is its URI with the endpoint, `tag` changes whenever its content does."""

    place: str
    tag: str
    size: int  # bytes


def is_object(uri: str) -> bool:
    """Whether a `dataset_uri` is of an object store that Composer knows."""
    scheme, _, rest = uri.partition(':')
    return scheme in STORES and rest.startswith('/')


def open_object(uri: str) -> io.BufferedReader:
    """An object's content, as the cache folder has it or downloaded into it. Raises DataError.

    Of several processes one downloads. Without a cache folder, and where the store does not say whether an object has
    changed, each downloads its own copy, which is gone when it is closed.
    """
    with explained(uri), contextlib.ExitStack() as stack:
        store, name = connect(uri)
        version = version_of(store, name, uri)
        folder = None if version is None else stack.enter_context(locked_folder(version))
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='gauntlet-data-')))
        path = folder / ('object' if version is None else digest(version.tag))
        if version is None or not path.is_file() or path.stat().st_size != version.size:
            store.download_object(name, path, overwrite=True)  # which renames it when it is whole
            for older in folder.iterdir():
                if older != path:
                    older.unlink()
        return path.open('rb')


def connect(uri: str) -> tuple[Any, str]:
    """Composer's client and the object's name there. Raises DataError, or what the client raises."""
    from composer.utils import maybe_create_object_store_from_uri
    from composer.utils.object_store import S3ObjectStore

    scheme, _, rest = uri.partition(':')
    bucket, _, name = rest.removeprefix('//').partition('/')
    if not rest.startswith('//'):
        bucket, name = scheme, rest.lstrip('/')
    if not bucket or not name or name.endswith('/'):
        raise DataError(f'{uri}: names no object; allowed: {scheme}://bucket/path/file.jsonl')
    if scheme == 'dbfs' and name.startswith(MLFLOW):
        raise DataError(f'{uri}: is an artifact of MLflow; {STORES["dbfs"]}')
    if scheme == 's3':
        return S3ObjectStore(bucket, client_config={'connect_timeout': CONNECT_SECONDS}), name
    return maybe_create_object_store_from_uri(uri), name


def version_of(store: Any, name: str, uri: str) -> Version | None:
    """What an object is now, None where its store does not say. Raises what the client raises."""
    from composer.utils.object_store import S3ObjectStore

    client = getattr(store, 's3_object_store', None) or store  # Google's, with keys for its S3 interface
    if not isinstance(client, S3ObjectStore):
        return None
    answer = client.client.get_object(Bucket=client.bucket, Key=client.get_key(name))
    answer['Body'].close()
    return Version(f'{client.client.meta.endpoint_url} {uri}', answer['ETag'], answer['ContentLength'])


@contextlib.contextmanager
def locked_folder(version: Version) -> Iterator[Path | None]:
    """The cache's folder of an object, for this process alone; None where there is no cache, or it cannot be used."""
    from filelock import FileLock

    base = cache_folder(OBJECTS)
    with contextlib.ExitStack() as stack:
        folder = None
        if base is not None:
            try:
                folder = base / digest(version.place)
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(f'{folder}.lock'))
            except (OSError, NotImplementedError) as error:
                log.warning('%s: cannot be used, so objects are downloaded by each process: %s', base, error)
                folder = None
        yield folder


def digest(text: str) -> str:
    """A file name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@contextlib.contextmanager
def explained(uri: str) -> Iterator[None]:
    """Makes DataError of what goes wrong within."""
    try:
        yield
    except errors_of(*ERRORS) as error:
        raise DataError(f'{uri}: {meaning(error)}; {STORES[uri.partition(":")[0]]}') from error


def meaning(error: BaseException) -> str:
    """What went wrong, in few words."""
    if isinstance(error, FileNotFoundError) and error.filename is None:  # Composer's word
        return NO_OBJECT
    code = getattr(error, 'response', {}).get('Error', {}).get('Code', '')
    text = textwrap.shorten(getattr(error, 'strerror', None) or str(error) or type(error).__name__, MOST_TEXT)
    return MEANINGS.get(code) or MEANINGS.get(type(error).__name__) or f'cannot be downloaded: {text}'


def errors_of(*names: str) -> tuple[type[BaseException], ...]:
    """What another library may raise: Python's own errors, and those of these full names.

    Of the latter those of libraries that are loaded: no other can have raised its own.
    """
    places = [name.rpartition('.') for name in names]
    own = [getattr(sys.modules[module], name) for module, _, name in places if module in sys.modules]
    return (OSError, ValueError, ImportError, *own)
