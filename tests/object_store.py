"""Run moto's S3 server in this process, for tests with object stores.

A test module that uses it defines `s3_server = object_store.s3_server`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import urllib.request
from dataclasses import dataclass
from typing import Any

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server with an empty bucket for one test; `client` is boto3's."""

    endpoint: str
    bucket: str
    client: Any

    def uri(self, name: str) -> str:
        """Return the URI of an object or prefix in the bucket."""
        return f's3://{self.bucket}/{name}'

    def names(self, prefix: str = '') -> list[str]:
        """Return the keys in the bucket."""
        pages = self.client.get_paginator('list_objects_v2').paginate(Bucket=self.bucket, Prefix=prefix)
        return [entry['Key'] for page in pages for entry in page.get('Contents', ())]

    def want_credentials(self, *, after: float) -> None:
        """Require valid credentials after this many more calls."""
        request = urllib.request.Request(
            f'{self.endpoint}/moto-api/reset-auth', str(after).encode(), {'Content-Type': 'text/plain'}
        )
        urllib.request.urlopen(request).close()


@functools.cache
def endpoint() -> str:
    """Start the server, once in a process, on a free port, and return its address.

    It serves one request at a time: moto checks `If-None-Match` and writes in two steps, where S3 is atomic.
    """
    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server('127.0.0.1', 0, app, threaded=False, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f'http://127.0.0.1:{server.server_port}'


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Return the server with a new bucket, and set the environment so that Composer and boto3 use it."""
    environment = {
        'S3_ENDPOINT_URL': endpoint(),
        'AWS_ACCESS_KEY_ID': 'testing',
        'AWS_SECRET_ACCESS_KEY': 'testing',
        'AWS_DEFAULT_REGION': 'us-east-1',
        'AWS_EC2_METADATA_DISABLED': 'true',
        'NO_PROXY': '127.0.0.1',
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in ('AWS_ENDPOINT_URL', 'AWS_ENDPOINT_URL_S3', 'AWS_PROFILE', 'AWS_SESSION_TOKEN'):
        monkeypatch.delenv(name, raising=False)
    client = boto3.Session().client('s3', endpoint_url=endpoint())
    bucket = f'bucket-{next(NUMBERS)}'
    client.create_bucket(Bucket=bucket)
    return S3Server(endpoint(), bucket, client)
