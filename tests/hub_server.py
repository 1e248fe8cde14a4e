"""A local server that answers as the Hugging Face hub for datasets of a few small files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = '0123456789abcdef0123456789abcdef01234567'
Hub = dict[str, dict[str, bytes]]  # the files of each dataset


def respond(files: Mapping[str, bytes] | None, rest: list[str], asked: Any) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a response about a dataset; `rest` is what follows its name in the path."""
    if files is None:
        return 404, {'X-Error-Code': 'RepoNotFound'}, b''
    file = '/'.join(rest[2:])
    if rest and rest[0] == 'resolve':
        if file not in files:
            return 404, {'X-Error-Code': 'EntryNotFound', 'X-Repo-Commit': COMMIT}, b''
        etag = hashlib.sha1(files[file]).hexdigest()
        return 200, {'X-Repo-Commit': COMMIT, 'ETag': f'"{etag}"'}, files[file]
    if not rest or rest[0] == 'revision':
        found: Any = {'id': 'org/name', 'sha': COMMIT, 'siblings': [{'rfilename': name} for name in files]}
    else:  # paths-info with `paths`, or tree
        wanted = asked.get('paths', []) if rest[0] == 'paths-info' else () if file else files
        found = [
            {'type': 'file', 'path': name, 'size': len(content), 'oid': hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
            if name in wanted
        ]
    return 200, {'Content-Type': 'application/json'}, json.dumps(found).encode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Return the datasets, none yet, of a hub that `datasets` and `huggingface_hub` use instead of the real one."""
    import datasets
    from huggingface_hub.utils import reset_sessions

    served: Hub = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
            address = urlsplit(self.path)
            asked: Any = parse_qs(address.query) | (parse_qs(body.decode()) if body else {})
            with contextlib.suppress(ValueError):
                asked |= json.loads(body)
            organisation, name, *rest = unquote(address.path).removeprefix('/api').removeprefix('/datasets/').split('/')
            status, headers, content = respond(served.get(f'{organisation}/{name}'), rest, asked)
            self.send_response(status)
            for key, value in {**headers, 'Content-Length': str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != 'HEAD':
                self.wfile.write(content)

        do_HEAD = do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    endpoint = f'http://127.0.0.1:{server.server_port}'
    monkeypatch.setattr(datasets.config, 'HF_ENDPOINT', endpoint)
    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(datasets.config, 'USE_PARQUET_EXPORT', False)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', endpoint)
    template = endpoint + '/{repo_id}/resolve/{revision}/{filename}'
    monkeypatch.setattr('huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE', template)
    reset_sessions()  # one that an earlier test made while offline refuses every request
    yield served
    reset_sessions()
    server.shutdown()
    server.server_close()
