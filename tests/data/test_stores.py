"""Folders on a disk and in a real S3 server behave the same; errors of a store say what to do."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import object_store
import pytest
from object_store import S3Server

from llmfoundry_gauntlet.data.stores import Store, StoredFile
from llmfoundry_gauntlet.errors import StoreError

s3_server = object_store.s3_server


@pytest.fixture(params=['disk', 's3'])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == 'disk':
        return Store(str(tmp_path / 'deep/folder'))
    server: S3Server = request.getfixturevalue('s3_server')
    return Store(server.uri('deep/folder/'))


def files_in(store: Store, prefix: str = '') -> list[StoredFile]:
    """Return the files of a store, but for locks on a disk."""
    return [file for file in store.files(prefix) if not file.name.endswith('.lock')]


def winners(action: Callable[[bytes], bool], *, num_threads: int = 6) -> list[bytes]:
    """Return the contents with which an action succeeded that several threads ran at once."""
    start, won = threading.Barrier(num_threads), []

    def run(content: bytes) -> None:
        start.wait()
        if action(content):
            won.append(content)

    threads = [threading.Thread(target=run, args=(b'thread %d' % number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_a_store_holds_what_was_written_and_nothing_before(store: Store, tmp_path: Path):
    assert store.files() == []
    assert not store.uri.endswith('/')
    for name, content in (('b/two', b'22'), ('b.txt', b'1'), ('a', b'')):
        assert store.create(name, content)
    assert [(file.name, file.size) for file in files_in(store)] == [('a', 0), ('b.txt', 1), ('b/two', 2)]
    assert [file.name for file in files_in(store, 'b/')] == ['b/two']
    assert store.read('b/two') == b'22' and store.read('a') == b''
    store.download(['b/two', 'a'], tmp_path / 'here')
    assert {path.name: path.read_bytes() for path in (tmp_path / 'here').iterdir()} == {'two': b'22', 'a': b''}
    store.delete('b/two')
    assert [file.name for file in files_in(store)] == ['a', 'b.txt']


def test_a_file_is_created_once_whoever_tries_at_the_same_time(store: Store):
    """Mutation: `mode='create'` left out, or `open(path, 'xb')` of s3fs 2025.3.0, which overwrites."""
    for turn in range(5):
        (content,) = winners(lambda content, turn=turn: store.create(f'claim{turn}', content))
        assert store.read(f'claim{turn}') == content
        assert not store.create(f'claim{turn}', b'later')
        assert store.read(f'claim{turn}') == content
    assert len(files_in(store)) == 5


def test_a_file_is_replaced_only_by_one_of_those_who_know_its_content(store: Store):
    """Mutation: no `IfMatch` in S3, no lock on a disk."""
    assert not store.replace('claim', b'', b'new')
    assert store.create('claim', b'first')
    for _ in range(5):
        before = store.read('claim')
        (earlier,) = files_in(store)
        (content,) = winners(lambda content, before=before: store.replace('claim', before, content + before[:40]))
        assert store.read('claim') == content + before[:40]
        (later,) = files_in(store)
        assert later.version != earlier.version
        assert not store.replace('claim', before, b'later')


def test_links_on_a_disk_are_left_out(tmp_path: Path):
    (tmp_path / 'sharded').mkdir()
    (tmp_path / 'sharded/.metadata').write_bytes(b'meta')
    (tmp_path / 'latest').symlink_to('sharded')
    (tmp_path / 'latest.pt').symlink_to('sharded/.metadata')
    (tmp_path / 'gone').symlink_to('nowhere')
    assert [file.name for file in Store(str(tmp_path)).files()] == ['sharded/.metadata']


def problem_of(action: Callable[[], object]) -> str:
    with pytest.raises(StoreError) as caught:
        action()
    return str(caught.value)


def test_a_file_that_is_not_there_is_named(store: Store, tmp_path: Path):
    store.create('other', b'')
    assert problem_of(lambda: store.read('none')).startswith(f'{store.uri}/none')
    assert problem_of(lambda: store.download(['other', 'none'], tmp_path / 'x')).startswith(store.uri)


@pytest.mark.parametrize(
    ('uri', 'words'),
    [
        ('https://host/folder', ('unknown scheme', 's3://, gs://, az://')),
        ('s3://', ('names no bucket', 's3://bucket/path')),
        ('gs://bucket/folder', ('gcsfs', "pip install 'llmfoundry-gauntlet[gcs]'")),
        ('az://container/folder', ('adlfs', "pip install 'llmfoundry-gauntlet[azure]'")),
        ('s3://bucket/folder', ('s3fs', "pip install 'llmfoundry-gauntlet[s3]'")),
    ],
)
def test_a_store_that_cannot_be_used_says_what_is_allowed_or_missing(
    uri: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    for scheme, package in (('s3', 's3fs'), ('gs', 'gcsfs'), ('az', 'adlfs')):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules['fsspec.registry']._registry, scheme, raising=False)
    problem = problem_of(lambda: Store(uri))
    assert problem.startswith(f'{uri}: ') and all(word in problem for word in words), problem


def test_files_in_the_way_and_missing_permissions_are_named(tmp_path: Path):
    (tmp_path / 'file').write_text('')
    assert problem_of(Store(str(tmp_path / 'file')).files) == f'{tmp_path}/file: is a file; give a folder'
    assert problem_of(lambda: Store(str(tmp_path)).create('file/claim', b'')).startswith(f'{tmp_path}/file/claim: ')
    if os.geteuid():  # nothing is forbidden to root
        tmp_path.chmod(0o500)
        assert 'Permission denied' in problem_of(lambda: Store(str(tmp_path)).create('claim', b''))
        tmp_path.chmod(0o700)


def test_a_missing_bucket_is_named_with_the_endpoint(s3_server: S3Server):
    store = Store('s3://no-such-bucket/checkpoints')
    for action in (store.files, lambda: store.create('claim', b''), lambda: store.read('file')):
        problem = problem_of(action)
        assert 's3://no-such-bucket/checkpoints' in problem and s3_server.endpoint in problem
        assert 'there is no such bucket' in problem


def test_an_endpoint_that_does_not_answer_or_is_no_url_is_named(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('AWS_MAX_ATTEMPTS', '1')
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:9')
    problem = problem_of(Store('s3://a-bucket').files)
    assert problem.startswith('s3://a-bucket at http://127.0.0.1:9: ') and 'does not answer' in problem
    monkeypatch.setenv('S3_ENDPOINT_URL', 'nonsense')
    assert 'Invalid endpoint: nonsense' in problem_of(Store('s3://a-bucket').files)
    monkeypatch.delenv('S3_ENDPOINT_URL')
    monkeypatch.setenv('AWS_ENDPOINT_URL', s3_server.endpoint)
    assert Store(s3_server.uri('')).files() == []


def test_missing_wrong_and_weak_credentials_are_told_apart(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    import boto3

    for name in ('AWS_SHARED_CREDENTIALS_FILE', 'AWS_CONFIG_FILE'):
        monkeypatch.setenv(name, str(tmp_path / 'none'))
    iam = boto3.Session().client('iam', endpoint_url=s3_server.endpoint)
    user = f'weak-{s3_server.bucket}'
    iam.create_user(UserName=user)
    weak = iam.create_access_key(UserName=user)['AccessKey']
    try:
        s3_server.want_credentials(after=0)
        refused = problem_of(Store(s3_server.uri('x')).files)
        assert re.search(r'refused \(InvalidAccessKeyId\); set AWS_ACCESS_KEY_ID and ', refused)
        monkeypatch.setenv('AWS_ACCESS_KEY_ID', weak['AccessKeyId'])
        monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', weak['SecretAccessKey'])
        assert 'access denied' in problem_of(Store(s3_server.uri('x')).files)
        monkeypatch.delenv('AWS_ACCESS_KEY_ID')
        monkeypatch.delenv('AWS_SECRET_ACCESS_KEY')
        assert 'there are no credentials; set AWS_ACCESS_KEY_ID' in problem_of(Store(s3_server.uri('x')).files)
    finally:
        s3_server.want_credentials(after=float('inf'))
