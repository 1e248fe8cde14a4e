"""Data files behind URLs: fsspec's file system in memory, and a real S3 server where s3fs is installed."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Iterator

import fsspec
import object_store
import pytest
from object_store import S3Server

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.data.files import read_rows, read_task_rows
from llmfoundry_gauntlet.errors import DataError

s3_server = object_store.s3_server
ROWS = [{'context': 'two and two are', 'continuation': 'four'}, {'context': 'Stra\u00dfe', 'continuation': '\u6771'}]
LINES = ''.join(f'{json.dumps(row, ensure_ascii=False)}\n' for row in ROWS).encode()


@pytest.fixture
def memory() -> Iterator[str]:
    """Return the URL of an empty folder in memory."""
    file_system = fsspec.filesystem('memory')
    file_system.mkdir('/bucket')
    yield 'memory://bucket'
    file_system.rm('/bucket', recursive=True)


def put(url: str, content: bytes) -> str:
    with fsspec.open(url, 'wb') as file:
        file.write(content)
    return url


def problem_of(url: str) -> str:
    with pytest.raises(DataError) as raised:
        read_rows(url)
    (problem,) = raised.value.problems
    return problem


def test_rows_come_out_of_an_object_store_with_their_line_numbers(memory: str):
    url = put(f'{memory}/a/rows.jsonl', LINES.replace(b'\n', b'\n\n', 1))
    task = TaskSpec(label='t', dataset_uri=url, icl_task_type='language_modeling', num_fewshot=(0,))
    assert read_task_rows(task, 'no/such/folder') == (url, [(0, ROWS[0]), (2, ROWS[1])])
    assert read_rows(put(f'{memory}/rows.gz', gzip.compress(LINES, mtime=0))) == [(0, ROWS[0]), (1, ROWS[1])]


def test_a_malformed_row_of_an_object_is_named_by_its_url_and_line(memory: str):
    bad = put(f'{memory}/bad.jsonl', LINES + b'{"context": \n')
    assert problem_of(bad) == f'{bad}:3: malformed JSON: Expecting value at column 12'
    assert problem_of(put(f'{memory}/bad.gz', gzip.compress(LINES)[:-4])).startswith(f'{memory}/bad.gz: is a damaged')


def test_an_object_that_is_not_there_is_an_error_with_its_url(memory: str):
    assert problem_of(f'{memory}/no.jsonl') == f'{memory}/no.jsonl: there is no such file'


@pytest.mark.parametrize('url', ['s3://bucket', 's3://bucket/', 's3:///rows.jsonl', 'gs://bucket', 'azure://bucket'])
def test_a_url_that_names_no_object_is_an_error(url: str):
    assert re.fullmatch(rf'{url}: names no \w+; allowed: \w+://bucket/path.*', problem_of(url))


@pytest.mark.parametrize(
    ('scheme', 'package', 'extra'), [('s3', 's3fs', 's3'), ('gs', 'gcsfs', 'gcs'), ('azure', 'adlfs', 'azure')]
)
def test_a_store_without_its_package_says_which_extra_it_needs(monkeypatch, scheme: str, package: str, extra: str):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules['fsspec.registry']._registry, 'az' if scheme == 'azure' else scheme, raising=False)
    problem = problem_of(f'{scheme}://bucket/rows.jsonl')
    assert problem.startswith(f'{scheme}://bucket/rows.jsonl: ')
    assert package in problem and f'llmfoundry-gauntlet[{extra}]' in problem


def test_an_s3_bucket_is_read_at_the_endpoint_that_the_environment_names(s3_server: S3Server):
    s3_server.client.put_object(Bucket=s3_server.bucket, Key='a/rows.jsonl', Body=LINES)
    assert read_rows(s3_server.uri('a/rows.jsonl')) == [(0, ROWS[0]), (1, ROWS[1])]
    missing = problem_of(s3_server.uri('no.jsonl'))
    assert missing == f'{s3_server.uri("no.jsonl")} at {os.environ["S3_ENDPOINT_URL"]}: there is no such file'


def test_refused_credentials_and_a_silent_endpoint_of_s3_are_errors(s3_server: S3Server, monkeypatch):
    s3_server.client.put_object(Bucket=s3_server.bucket, Key='rows.jsonl', Body=LINES)
    url = s3_server.uri('rows.jsonl')
    s3_server.want_credentials(after=0)
    try:
        assert problem_of(url).startswith(f'{url} at {os.environ["S3_ENDPOINT_URL"]}: access')
    finally:
        s3_server.want_credentials(after=float('inf'))
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:9')
    monkeypatch.setenv('AWS_MAX_ATTEMPTS', '1')
    assert problem_of(url).startswith(f'{url} at http://127.0.0.1:9: the endpoint does not answer')
