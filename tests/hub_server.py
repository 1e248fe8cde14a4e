"""A local server that answers as the Hugging Face hub for datasets of a few small files."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import flask
import pytest
from werkzeug.serving import make_server

COMMIT = '0123456789abcdef0123456789abcdef01234567'
Hub = dict[str, dict[str, bytes]]  # the files of each dataset


def hub_app(served: Hub) -> flask.Flask:
    app = flask.Flask(__name__)
    of_dataset = '/api/datasets/<path:name>'

    @app.errorhandler(KeyError)
    def absent(error: KeyError) -> Any:
        code = 'RepoNotFound' if '/' in error.args[0] else 'EntryNotFound'
        return '', 404, {'X-Error-Code': code, 'X-Repo-Commit': COMMIT}

    @app.get(of_dataset)
    @app.get(f'{of_dataset}/revision/<revision>')
    def information(name: str, revision: str = COMMIT) -> Any:
        del revision
        return {'id': name, 'sha': COMMIT, 'siblings': [{'rfilename': file} for file in served[name]]}

    @app.post(f'{of_dataset}/paths-info/<revision>')
    @app.get(f'{of_dataset}/tree/<revision>')
    @app.get(f'{of_dataset}/tree/<revision>/<path:folder>')
    def listing(name: str, revision: str, folder: str = '') -> Any:
        del revision
        asked = flask.request.form.getlist('paths') or (flask.request.get_json(silent=True) or {}).get('paths')
        return [
            {'type': 'file', 'path': file, 'size': len(content), 'oid': hashlib.sha1(content).hexdigest()}
            for file, content in served[name].items()
            if (asked is None or file in asked) and not folder
        ]

    @app.get('/datasets/<path:name>/resolve/<revision>/<path:file>')
    def content(name: str, revision: str, file: str) -> Any:
        del revision
        etag = hashlib.sha1(served[name][file]).hexdigest()
        return served[name][file], 200, {'X-Repo-Commit': COMMIT, 'ETag': f'"{etag}"'}

    return app


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Return the datasets, none yet, of a hub that `datasets` and `huggingface_hub` use instead of the real one."""
    import datasets
    from huggingface_hub import constants, file_download, utils

    # The second since huggingface-hub 1.
    reset_sessions = getattr(utils, 'reset_sessions', None) or utils.close_session

    served: Hub = {}
    server = make_server('127.0.0.1', 0, hub_app(served), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    endpoint = f'http://127.0.0.1:{server.server_port}'
    monkeypatch.setattr(datasets.config, 'HF_ENDPOINT', endpoint)
    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', endpoint)
    template = endpoint + '/{repo_id}/resolve/{revision}/{filename}'
    for module in (constants, file_download):  # the first since huggingface-hub 1
        monkeypatch.setattr(module, 'HUGGINGFACE_CO_URL_TEMPLATE', template, raising=False)
    reset_sessions()  # one that an earlier test made while offline refuses every request
    yield served
    reset_sessions()
    server.shutdown()
    server.server_close()
