"""Folders of files, on a disk or in an object store, behind the same few calls."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmfoundry_gauntlet.errors import ModelError

S3 = 's3://'
CONNECT_SECONDS = 5  # a wrong endpoint must show soon; how often is tried is botocore's to say
CREDENTIALS = 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE'
REFUSED = ('InvalidAccessKeyId', 'SignatureDoesNotMatch', 'ExpiredToken', 'InvalidToken', 'AuthFailure')
DENIED = ('AccessDenied', '403')
NO_BUCKET = ('NoSuchBucket',)
NO_OBJECT = ('NoSuchKey', '404')
EXISTS = ('PreconditionFailed', 'ConditionalRequestConflict', '412', '409')


class StoreError(ModelError):
    """A folder, bucket or endpoint that cannot be used now; what lies in it may be all right."""


class NoSuchFileError(StoreError):
    """A file that is not there, or no longer."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a folder, by its name relative to the folder, with '/' between parts.

    `version` changes whenever the content does. `is_link`: a link on a disk, whose size and version are those of what
    it leads to; a link to a folder is one file and what is in it is not listed.
    """

    name: str
    size: int  # bytes
    version: str
    is_link: bool = False


class Folder(Protocol):
    """What can be done with a folder. Every call raises StoreError, which names the place and what to do."""

    @property
    def uri(self) -> str:
        """What the user calls it, without a '/' at its end."""
        ...

    def files(self, prefix: str = '') -> list[StoredFile]:
        """All files below whose name starts with `prefix`, by name; none where there is no such folder."""
        ...

    def read(self, name: str) -> bytes:
        """A file's content. NoSuchFileError where there is none."""
        ...

    def read_part(self, name: str, start: int, num_bytes: int) -> bytes:
        """So many bytes of a file, or as many as there are after `start`. NoSuchFileError where there is no file."""
        ...

    def download(self, name: str, path: Path) -> None:
        """Copies a file to a path on this machine, where it appears whole. NoSuchFileError where there is none."""
        ...

    def create(self, name: str, content: bytes) -> bool:
        """Writes a whole file if there is none; whether it did. Of several that try at once, one does."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Writes a whole file, in place of one that may be there."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file, if it is there."""
        ...


def open_folder(uri: str) -> Folder:
    """A folder on a disk, or `s3://bucket/prefix`, which nobody has looked for yet. Raises ModelError.

    The endpoint of an object store is S3_ENDPOINT_URL as for Composer, else AWS_ENDPOINT_URL, else Amazon's.
    """
    if uri.startswith(S3):
        return open_s3(uri)
    if '://' in uri:
        raise ModelError(f'{uri}: is in a store that is not known; allowed: a folder on a disk, or s3://bucket/prefix')
    path = Path(uri).expanduser()
    if path.exists() and not path.is_dir():
        raise ModelError(f'{uri}: is a file; give a folder')
    return LocalFolder(path)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder on a disk."""

    path: Path

    @property
    def uri(self) -> str:
        """What the user calls it."""
        return str(self.path)

    def files(self, prefix: str = '') -> list[StoredFile]:
        """All files below whose name starts with `prefix`, by name."""
        with self._explained(self.uri, 'listed'):
            return sorted(self._walk(prefix), key=lambda file: file.name)

    def _walk(self, prefix: str) -> Iterator[StoredFile]:
        for parent, folders, names in os.walk(self.path, onerror=raise_unless_gone):
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            for name in [*names, *links]:
                path = os.path.join(parent, name)
                relative = os.path.relpath(path, self.path).replace(os.sep, '/')
                if not relative.startswith(prefix):
                    continue
                try:
                    found = os.stat(path)
                except FileNotFoundError:  # deleted since, or a link to nothing
                    continue
                version = f'{found.st_mtime_ns}-{found.st_size}-{found.st_ino}'
                yield StoredFile(relative, found.st_size, version, os.path.islink(path))

    def read(self, name: str) -> bytes:
        """A file's content."""
        with self._explained(name, 'read'):
            return (self.path / name).read_bytes()

    def read_part(self, name: str, start: int, num_bytes: int) -> bytes:
        """So many bytes of a file."""
        with self._explained(name, 'read'), (self.path / name).open('rb') as file:
            file.seek(start)
            return file.read(num_bytes)

    def download(self, name: str, path: Path) -> None:
        """Copies a file to a path."""
        with self._explained(name, 'copied'):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f'.{path.name}.partial')
            shutil.copyfile(self.path / name, partial)
            os.replace(partial, path)

    def create(self, name: str, content: bytes) -> bool:
        """Writes a whole file if there is none; whether it did."""
        return self._put(name, content, os.link)  # which refuses a name that is there, on network disks too

    def write(self, name: str, content: bytes) -> None:
        """Writes a whole file, in place of one that may be there."""
        self._put(name, content, os.replace)

    def _put(self, name: str, content: bytes, put: Callable[[str, Path], None]) -> bool:
        """Writes under a name of its own, then has `put` give it the right one; whether that could be."""
        target = self.path / name
        with self._explained(name, 'written'):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix='.writing-')
            try:
                with os.fdopen(handle, 'wb') as file:
                    file.write(content)
                os.chmod(temporary, 0o644)
                put(temporary, target)
            except FileExistsError:
                return False
            finally:
                Path(temporary).unlink(missing_ok=True)
        return True

    def delete(self, name: str) -> None:
        """Removes a file, if it is there."""
        with self._explained(name, 'deleted'):
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def _explained(self, name: str, done: str) -> Iterator[None]:
        place = self.path / name if name != self.uri else self.path
        try:
            yield
        except FileNotFoundError as error:
            raise NoSuchFileError(f'{place}: there is no such file') from error
        except OSError as error:
            raise StoreError(f'{place}: cannot be {done}: {error.strerror or error}') from error


def raise_unless_gone(error: OSError) -> None:
    """A folder that is not there has no files; anything else is an error."""
    if not isinstance(error, FileNotFoundError):
        raise error


@dataclass(frozen=True, slots=True)
class S3Folder:
    """What lies under a prefix of an S3 bucket. `store` is Composer's, which is safe to use from several threads."""

    uri: str
    store: Any

    def files(self, prefix: str = '') -> list[StoredFile]:
        """All objects below whose name starts with `prefix`, by name."""
        with self._explained(self.uri):
            pages = self.store.client.get_paginator('list_objects_v2').paginate(
                Bucket=self.store.bucket, Prefix=self.store.get_key(prefix)
            )
            found = [entry for page in pages for entry in page.get('Contents', ())]
        start = len(self.store.prefix)
        files = [StoredFile(entry['Key'][start:], entry['Size'], entry['ETag'].strip('"')) for entry in found]
        return sorted((file for file in files if not file.name.endswith('/')), key=lambda file: file.name)

    def read(self, name: str) -> bytes:
        """An object's content."""
        with self._explained(self.store.get_uri(name)):
            content: bytes = self.store.client.get_object(**self._place(name))['Body'].read()
        return content

    def read_part(self, name: str, start: int, num_bytes: int) -> bytes:
        """So many bytes of an object."""
        from botocore.exceptions import ClientError

        part = f'bytes={start}-{start + num_bytes - 1}'
        with self._explained(self.store.get_uri(name)):
            try:
                content: bytes = self.store.client.get_object(**self._place(name), Range=part)['Body'].read()
            except ClientError as error:
                if error.response['Error']['Code'] != 'InvalidRange':
                    raise
                return b''  # there is nothing after `start`
        return content

    def download(self, name: str, path: Path) -> None:
        """Downloads an object to a path."""
        with self._explained(self.store.get_uri(name)):
            self.store.download_object(name, path, overwrite=True)

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object if there is none; whether it did."""
        from botocore.exceptions import ClientError

        with self._explained(self.store.get_uri(name)):
            try:
                self.store.client.put_object(**self._place(name), Body=content, IfNoneMatch='*')
            except ClientError as error:
                if error.response['Error']['Code'] not in EXISTS:
                    raise
                return False
        return True

    def write(self, name: str, content: bytes) -> None:
        """Writes an object, in place of one that may be there."""
        with self._explained(self.store.get_uri(name)):
            self.store.client.put_object(**self._place(name), Body=content)

    def delete(self, name: str) -> None:
        """Removes an object, if it is there."""
        with self._explained(self.store.get_uri(name)):
            self.store.client.delete_object(**self._place(name))

    def _place(self, name: str) -> dict[str, str]:
        return {'Bucket': self.store.bucket, 'Key': self.store.get_key(name)}

    @contextmanager
    def _explained(self, place: str) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except FileNotFoundError as error:  # Composer's word for several answers
            raise explain(place, self.store.client.meta.endpoint_url, error.__cause__ or error) from error
        except (ClientError, BotoCoreError, Boto3Error) as error:
            raise explain(place, self.store.client.meta.endpoint_url, error) from error
        except OSError as error:
            raise StoreError(f'{place}: cannot be downloaded: {error.strerror or error}') from error


def open_s3(uri: str) -> S3Folder:
    """The folder of an `s3://bucket/prefix`. Raises ModelError where it is no such name or boto3 is absent."""
    from composer.utils import MissingConditionalImportError
    from composer.utils.object_store import S3ObjectStore

    bucket, _, prefix = uri.removeprefix(S3).partition('/')
    if not bucket:
        raise ModelError(f'{uri}: names no bucket; allowed: s3://bucket/prefix')
    try:
        store = S3ObjectStore(bucket, prefix, client_config={'connect_timeout': CONNECT_SECONDS})
    except MissingConditionalImportError as error:
        raise ModelError(f"{uri}: needs boto3: pip install 'llmfoundry-gauntlet[s3]'") from error
    except ValueError as error:  # of an endpoint that is no URL
        raise ModelError(f'{uri}: {error}; correct S3_ENDPOINT_URL, such as https://host:port') from error
    return S3Folder(uri.rstrip('/'), store)


def explain(place: str, endpoint: str, error: BaseException) -> StoreError:
    """What a store's error means, and what to do about it."""
    from botocore import exceptions

    where = f'{place} at {endpoint}'
    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return StoreError(f'{where}: there are no credentials; {CREDENTIALS}')
    if isinstance(error, (exceptions.HTTPClientError, exceptions.ConnectionError)):
        return StoreError(
            f'{where}: the endpoint does not answer ({type(error).__name__}); check the network, and S3_ENDPOINT_URL'
        )
    if not isinstance(error, exceptions.ClientError):
        return StoreError(f'{where}: {" ".join(str(error).split()) or type(error).__name__}')
    code, message = error.response['Error'].get('Code', ''), error.response['Error'].get('Message', '')
    if code in NO_BUCKET:
        return StoreError(f'{where}: there is no such bucket; make it, or correct the name or S3_ENDPOINT_URL')
    if code in NO_OBJECT:
        return NoSuchFileError(f'{where}: there is no such object')
    if code in REFUSED:
        return StoreError(f'{where}: the credentials are refused ({code}); {CREDENTIALS}')
    if code in DENIED:
        return StoreError(
            f'{where}: access is denied; the credentials want the permission to list, read and, for claims, write'
        )
    return StoreError(f'{where}: {code}: {message}')
