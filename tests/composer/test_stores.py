"""Folders on a disk and in a real S3 server behave the same; what is wrong with a store is said, and soon."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import object_store
import pytest
from object_store import S3Server

from llmfoundry_gauntlet.composer.stores import Folder, NoSuchFileError, open_folder
from llmfoundry_gauntlet.errors import ModelError

s3_server = object_store.s3_server


@pytest.fixture(params=['disk', 's3'])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == 'disk':
        return open_folder(str(tmp_path / 'deep/folder'))
    server: S3Server = request.getfixturevalue('s3_server')
    return open_folder(server.uri('deep/folder/'))


def names(folder: Folder, prefix: str = '') -> list[str]:
    return [file.name for file in folder.files(prefix)]


def test_a_folder_holds_what_was_written_and_nothing_before(folder: Folder, tmp_path: Path):
    assert folder.files() == []
    assert not folder.uri.endswith('/')
    folder.write('b/two', b'22')
    folder.write('b.txt', b'1')
    folder.write('a', b'')
    assert [(file.name, file.size) for file in folder.files()] == [('a', 0), ('b.txt', 1), ('b/two', 2)]
    assert names(folder, 'b') == ['b.txt', 'b/two'] and names(folder, 'b/') == ['b/two']
    assert folder.read('b/two') == b'22' and folder.read('a') == b''
    folder.download('b/two', tmp_path / 'here/copy')
    assert (tmp_path / 'here/copy').read_bytes() == b'22'
    assert [path.name for path in (tmp_path / 'here').iterdir()] == ['copy']
    folder.delete('b/two')
    folder.delete('b/two')
    assert names(folder) == ['a', 'b.txt']


def test_a_part_of_a_file_is_read_without_the_rest(folder: Folder):
    folder.write('file', b'0123456789')
    folder.write('empty', b'')
    assert folder.read_part('file', 0, 4) == b'0123'
    assert folder.read_part('file', 6, 400) == b'6789'
    assert folder.read_part('file', 10, 4) == folder.read_part('empty', 0, 4) == b''


def test_a_version_changes_with_the_content_and_only_then(folder: Folder):
    folder.write('file', b'one')
    (first,) = folder.files()
    assert folder.files() == [first]
    folder.write('file', b'two')
    (second,) = folder.files()
    assert second.version != first.version and second.size == first.size


def test_a_file_is_created_once_and_keeps_its_first_content(folder: Folder):
    assert folder.create('claim', b'first')
    assert not folder.create('claim', b'second')
    assert folder.read('claim') == b'first'
    folder.delete('claim')
    assert folder.create('claim', b'third')
    assert names(folder) == ['claim']  # nothing temporary stays


def test_of_many_that_create_at_once_one_does(folder: Folder):
    for turn in range(5):
        start, made = threading.Barrier(6), []

        def create(number: int, turn: int = turn, start=start, made=made) -> None:
            start.wait()
            if folder.create(f'claim{turn}', b'%d' % number):
                made.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1 and folder.read(f'claim{turn}') == b'%d' % made[0]
    assert len(names(folder)) == 5


def test_a_file_that_is_not_there_is_named(folder: Folder, tmp_path: Path):
    folder.write('other', b'')
    for call in (
        lambda: folder.read('none'),
        lambda: folder.read_part('none', 0, 3),
        lambda: folder.download('none', tmp_path / 'x'),
    ):
        with pytest.raises(NoSuchFileError, match=re.escape(f'{folder.uri}/none')):
            call()
    assert not (tmp_path / 'x').exists()


def test_links_are_followed_and_marked(tmp_path: Path):
    (tmp_path / 'sharded').mkdir()
    (tmp_path / 'sharded/.metadata').write_bytes(b'meta')
    (tmp_path / 'ep0-ba1-rank0.pt').write_bytes(b'12345')
    (tmp_path / 'latest-rank0.pt').symlink_to('ep0-ba1-rank0.pt')
    (tmp_path / 'latest').symlink_to('sharded')
    (tmp_path / 'gone').symlink_to('nowhere')
    files = {file.name: file for file in open_folder(str(tmp_path)).files()}
    assert sorted(files) == ['ep0-ba1-rank0.pt', 'latest', 'latest-rank0.pt', 'sharded/.metadata']
    assert [name for name, file in files.items() if file.is_link] == ['latest', 'latest-rank0.pt']
    assert files['latest-rank0.pt'].version == files['ep0-ba1-rank0.pt'].version
    assert files['latest-rank0.pt'].size == 5


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, s3_server: S3Server):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ModelError, match='file: is a file; give a folder'):
        open_folder(str(tmp_path / 'file'))
    with pytest.raises(ModelError, match=r'gs://bucket/x: is in a store that is not known; allowed: '):
        open_folder('gs://bucket/x')
    with pytest.raises(ModelError, match='s3://: names no bucket'):
        open_folder('s3://')


@pytest.mark.skipif(os.geteuid() == 0, reason='nothing is forbidden to root')
def test_a_folder_without_permission_is_named(tmp_path: Path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ModelError, match=r'claim: cannot be written: Permission denied'):
            open_folder(str(tmp_path)).create('claim', b'')
    finally:
        tmp_path.chmod(0o700)


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path):
    (tmp_path / 'claims').write_text('')
    with pytest.raises(ModelError, match=r'claims/one: cannot be written: '):
        open_folder(str(tmp_path)).create('claims/one', b'')


def test_a_bucket_that_is_not_there_is_named_with_the_endpoint(s3_server: S3Server):
    folder = open_folder('s3://no-such-bucket/checkpoints')
    for call in (folder.files, lambda: folder.create('claim', b''), lambda: folder.read('file')):
        with pytest.raises(ModelError) as caught:
            call()
        message = str(caught.value)
        assert 's3://no-such-bucket/checkpoints' in message and s3_server.endpoint in message
        assert 'there is no such bucket; make it, or correct the name or S3_ENDPOINT_URL' in message


def test_an_endpoint_where_nobody_listens_is_named(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:9')
    with pytest.raises(ModelError, match=r's3://a-bucket at http://127.0.0.1:9: the endpoint does not answer'):
        open_folder('s3://a-bucket').files()
    monkeypatch.setenv('S3_ENDPOINT_URL', 'nonsense')
    with pytest.raises(ModelError, match='nonsense; correct S3_ENDPOINT_URL'):
        open_folder('s3://a-bucket')


def test_the_endpoint_of_boto3_is_used_where_composer_has_none(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv('S3_ENDPOINT_URL')
    monkeypatch.setenv('AWS_ENDPOINT_URL', s3_server.endpoint)
    folder = open_folder(s3_server.uri(''))
    folder.write('file', b'x')
    assert s3_server.names() == ['file']


def test_credentials_that_are_absent_wrong_or_too_weak_are_told_apart(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    import boto3

    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(tmp_path / 'none'))
    iam = boto3.Session().client('iam', endpoint_url=s3_server.endpoint)
    iam.create_user(UserName='weak')
    weak = iam.create_access_key(UserName='weak')['AccessKey']
    try:
        s3_server.want_credentials(after=0)
        with pytest.raises(ModelError, match=r'the credentials are refused \(InvalidAccessKeyId\); set AWS_ACCESS_KEY'):
            open_folder(s3_server.uri('x')).files()
        monkeypatch.setenv('AWS_ACCESS_KEY_ID', weak['AccessKeyId'])
        monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', weak['SecretAccessKey'])
        with pytest.raises(ModelError, match=r'access is denied; the credentials want the permission to list'):
            open_folder(s3_server.uri('x')).files()
        monkeypatch.delenv('AWS_ACCESS_KEY_ID')
        monkeypatch.delenv('AWS_SECRET_ACCESS_KEY')
        with pytest.raises(ModelError, match=r'there are no credentials; set AWS_ACCESS_KEY_ID'):
            open_folder(s3_server.uri('x')).files()
    finally:
        s3_server.want_credentials(after=float('inf'))
