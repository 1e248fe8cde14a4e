"""Stores on disk and on an S3 server behave the same, and so does reading data files; errors say what to do."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import object_store
import pytest
from object_store import S3Server

from llmfoundry_gauntlet.config.tasks import TaskSpec
from llmfoundry_gauntlet.data.readers import read_rows, read_task_rows
from llmfoundry_gauntlet.data.stores import Store, open_filesystem
from llmfoundry_gauntlet.errors import DataError, StoreError

s3_server = object_store.s3_server
ROWS = [{'context': 'two and two are', 'continuation': 'four'}, {'context': 'Stra\u00dfe', 'continuation': '\u6771'}]
rows_of = partial(read_rows, problems=[])
LINES = ''.join(f'{json.dumps(row, ensure_ascii=False)}\n' for row in ROWS).encode()


@pytest.fixture(params=['disk', 's3'])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == 'disk':
        return Store(str(tmp_path / 'deep/folder'))
    server: S3Server = request.getfixturevalue('s3_server')
    return Store(server.uri('deep/folder/'))


def problem_of(action: Callable[[], object]) -> str:
    with pytest.raises((StoreError, DataError)) as caught:
        action()
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def filled(store: Store) -> Store:
    """Return a store of three files."""
    for name, content in (('b/two', b'22'), ('b.txt', b'1'), ('a', b'')):
        assert store.create(name, content)
    return store


def test_a_new_store_has_no_files(store: Store):
    assert store.files() == []
    assert not store.uri.endswith('/')


def test_files_are_listed_by_name_and_by_prefix(filled: Store):
    assert [(file.name, file.size) for file in filled.files()] == [('a', 0), ('b.txt', 1), ('b/two', 2)]
    assert [file.name for file in filled.files('b/')] == ['b/two']


def test_files_can_be_read_and_downloaded(filled: Store, tmp_path: Path):
    assert filled.read('b/two') == b'22' and filled.read('a') == b''
    filled.download(['b/two', 'a'], tmp_path / 'here')
    assert {path.name: path.read_bytes() for path in (tmp_path / 'here').iterdir()} == {'two': b'22', 'a': b''}


def test_a_missing_file_is_an_error_that_names_it_or_its_store(filled: Store, tmp_path: Path):
    assert problem_of(lambda: filled.read('none')).startswith(f'{filled.uri}/none')
    assert problem_of(lambda: filled.download(['a', 'none'], tmp_path / 'x')).startswith(filled.uri)


def test_a_file_that_is_overwritten_has_another_version(filled: Store):
    (before,) = filled.files('b/')
    filled.write('b/two', b'33')
    (after,) = filled.files('b/')
    assert filled.read('b/two') == b'33'
    assert after.version != before.version


def test_only_one_of_several_concurrent_writers_creates_a_file(store: Store):
    """Mutation: `mode='create'` omitted, or mode 'wb' on disk."""
    start, contents = threading.Barrier(6), [b'thread %d' % number for number in range(6)]

    def create(name: str, content: bytes) -> bool:
        start.wait()
        return store.create(name, content)

    with ThreadPoolExecutor(6) as pool:
        for turn in range(5):
            created = list(pool.map(partial(create, f'claim{turn}'), contents))
            assert sum(created) == 1 and store.read(f'claim{turn}') == contents[created.index(True)]
    assert not store.create('claim0', b'later') and store.create('claim0', store.read('claim0'))


@pytest.mark.parametrize(
    ('action', 'uri', 'words'),
    [
        (Store, 'https://host/folder', ('unknown scheme', 's3://, gs://, az://')),
        (Store, 's3://', ('names no bucket', 's3://bucket/path')),
        (Store, 'gs://b/x', ('gcsfs', "install 'llmfoundry-gauntlet[gcs]'")),
        (Store, 'az://b/x', ('adlfs', "install 'llmfoundry-gauntlet[azure]'")),
        (Store, 's3://b/x', ('s3fs', "install 'llmfoundry-gauntlet[s3]'")),
        (rows_of, 'gs://b/x', ('gcsfs', "install 'llmfoundry-gauntlet[gcs]'")),
        (rows_of, 'az://b/x', ('adlfs', "install 'llmfoundry-gauntlet[azure]'")),
        (rows_of, 's3://b/x', ('s3fs', "install 'llmfoundry-gauntlet[s3]'")),
        (rows_of, 'azure://b/x', ('adlfs', "install 'llmfoundry-gauntlet[azure]'")),
    ],
)
def test_errors_name_the_allowed_schemes_or_the_missing_package(
    action: Callable[[str], object], uri: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    for scheme, package in (('s3', 's3fs'), ('gs', 'gcsfs'), ('az', 'adlfs')):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules['fsspec.registry']._registry, scheme, raising=False)
    problem = problem_of(lambda: action(uri))
    assert problem.startswith(f'{uri}: ') and all(word in problem for word in words), problem


def test_errors_name_files_used_as_folders_and_missing_permissions(tmp_path: Path):
    (tmp_path / 'file').write_text('')
    assert problem_of(Store(str(tmp_path / 'file')).files) == f'{tmp_path}/file: is a file; give a folder'
    assert problem_of(lambda: Store(str(tmp_path)).create('file/claim', b'')).startswith(f'{tmp_path}/file/claim: ')
    if os.geteuid():  # root may write anywhere
        tmp_path.chmod(0o500)
        assert 'Permission denied' in problem_of(lambda: Store(str(tmp_path)).create('claim', b''))
        tmp_path.chmod(0o700)


def test_errors_name_a_missing_bucket_and_a_wrong_endpoint(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    store = Store('s3://no-such-bucket/x')
    for action in (store.files, lambda: store.create('claim', b''), lambda: store.read('file')):
        problem = problem_of(action)
        assert problem.startswith('s3://no-such-bucket/x') and s3_server.endpoint in problem
        assert 'bucket does not exist' in problem
    monkeypatch.setenv('AWS_MAX_ATTEMPTS', '1')
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:9')
    for action in (Store('s3://a-bucket/x').files, lambda: rows_of('s3://a-bucket/x')):
        assert problem_of(action).startswith('s3://a-bucket/x at http://127.0.0.1:9: Could not connect')
    monkeypatch.setenv('S3_ENDPOINT_URL', 'nonsense')
    assert 'Invalid endpoint: nonsense' in problem_of(Store('s3://a-bucket').files)
    monkeypatch.delenv('S3_ENDPOINT_URL')
    monkeypatch.setenv('AWS_ENDPOINT_URL', s3_server.endpoint)
    assert Store(s3_server.uri('')).files() == []


def test_errors_of_missing_and_wrong_credentials_say_which_to_set(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in ('AWS_SHARED_CREDENTIALS_FILE', 'AWS_CONFIG_FILE'):
        monkeypatch.setenv(name, str(tmp_path / 'none'))
    try:
        s3_server.want_credentials(after=0)
        for action in (Store(s3_server.uri('x')).files, lambda: rows_of(s3_server.uri('x'))):
            assert problem_of(action).endswith('; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE')
        monkeypatch.delenv('AWS_ACCESS_KEY_ID')
        monkeypatch.delenv('AWS_SECRET_ACCESS_KEY')
        assert 'Unable to locate credentials; set AWS_ACCESS_KEY_ID' in problem_of(Store(s3_server.uri('x')).files)
    finally:
        s3_server.want_credentials(after=float('inf'))


def test_rows_are_read_from_a_store_with_line_numbers_and_errors_name_the_url(s3_server: S3Server):
    bucket = s3_server.uri('rows')

    def put(url: str, content: bytes) -> str:
        fs, path = open_filesystem(url)
        fs.pipe_file(path, content)
        return url

    url = put(f'{bucket}/a/rows.jsonl', LINES.replace(b'\n', b'\n\n', 1))
    task = TaskSpec(label='t', dataset_uri=url, icl_task_type='language_modeling', num_fewshot=(0,))
    assert read_task_rows(task, 'no/such/folder', []) == (url, [(0, ROWS[0]), (2, ROWS[1])])
    assert rows_of(put(f'{bucket}/rows.gz', gzip.compress(LINES, mtime=0))) == [(0, ROWS[0]), (1, ROWS[1])]
    bad = put(f'{bucket}/bad.jsonl', LINES + b'{"context": \n')
    problems: list[str] = []
    assert len(read_rows(bad, problems)) == 2
    assert problems == [f'{bad}:3: malformed JSON: Expecting value at column 12']
    cut = put(f'{bucket}/bad.gz', gzip.compress(LINES)[:-4])
    assert problem_of(lambda: rows_of(cut)).startswith(f'{cut}: is a damaged')
    missing = problem_of(lambda: rows_of(f'{bucket}/no.jsonl'))
    assert missing.startswith(f'{bucket}/no.jsonl') and missing.endswith(': there is no such file')
