"""Files of the manifest: selection, origin of copies, and downloads from a failing server."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from paths import SHARED_DATA
from pyarrow import Table, parquet

from llmfoundry_gauntlet.data.published import (
    PATH,
    DataFile,
    convert,
    fetch_file,
    git_blob_id,
    origin_of,
    read_manifest,
    select_files,
)
from llmfoundry_gauntlet.errors import ConfigError, RecordError

ROWS = b'{"query": "one", "choices": ["no", "yes"], "gold": 1}\n' * 100
OTHERS = ROWS.replace(b'one', b'two')
BOOLQ = DataFile(
    **{'path': 'reading_comprehension/boolq.jsonl', 'task': 'boolq', 'num_rows': 100, 'num_bytes': len(ROWS)},
    **{'git_blob': None, 'sha256': hashlib.sha256(ROWS).hexdigest(), 'repository': 'huggingface:owner/name'},
    **{'revision': '1234567890' * 4, 'source': 'data/boolq.jsonl', 'licence': 'MIT', 'converter': None},
)
OF_GIT = replace(BOOLQ, sha256=None, git_blob=hashlib.sha1(b'blob 5400\0' + ROWS).hexdigest())
BLOB_OF_OTHERS = hashlib.sha1(b'blob 5400\0' + OTHERS).hexdigest()
WITHOUT_HASH = replace(BOOLQ, sha256=None, num_bytes=None)
PROBLEMS = [
    {'problem': f'${number} + 1$?', 'level': 'Level 1', 'type': 'Algebra', 'solution': f'$\\boxed{{{number}}}$'}
    for number in range(3)
]
ALGEBRA = replace(
    WITHOUT_HASH, path='score/hendrycks_math/algebra.jsonl', task='score_math', num_rows=3, converter='math'
)
HASHED = replace(ALGEBRA, sha256='0' * 64)
EMPTY = {**PROBLEMS[0], 'problem': ''}
PRO = replace(ALGEBRA, path='score/mmlu_pro_test.jsonl', task='score_mmlu_pro', converter='mmlu_pro')
QUESTION = {
    'question_id': 7,
    'question': 'Which of these floats?',
    'options': ['lead', 'cork', 'iron'],
    'answer': 'B',
    'answer_index': 1,
    'cot_content': '',
    'category': 'physics',
    'src': 'hand-written',
}
WRONG, PADDED = {**QUESTION, 'answer_index': 3}, {**QUESTION, 'options': ['cork', 'N/A', 'iron']}


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(Table.from_pylist(rows), sink)
    return sink.getvalue()


@dataclass(frozen=True, slots=True)
class Answer:
    """A response of the server, with at most `num_bytes` of the body."""

    body: bytes
    status: int = 200
    num_bytes: int | None = None


class Server(ThreadingHTTPServer):
    """A server that sends these responses in order and repeats the last one."""

    def give(self, *answers: Answer | bytes) -> None:
        self.answers = [answer if isinstance(answer, Answer) else Answer(answer) for answer in answers]
        self.paths: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        answer = self.server.answers[min(len(self.server.paths), len(self.server.answers)) - 1]
        self.send_response(answer.status)
        self.send_header('Content-Length', str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body[: answer.num_bytes])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Start a server in place of the Hugging Face hub. Pooch does not wait between tries."""
    for name in ('http_proxy', 'HTTP_PROXY', 'all_proxy', 'ALL_PROXY'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr('pooch.core.time.sleep', lambda seconds: None)
    with Server(('127.0.0.1', 0), Handler) as running:
        monkeypatch.setenv('HF_ENDPOINT', f'http://127.0.0.1:{running.server_port}/')
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def files_in(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


@pytest.mark.parametrize('file', [BOOLQ, OF_GIT, WITHOUT_HASH])
def test_a_file_is_downloaded_once(server: Server, tmp_path: Path, file: DataFile):
    server.give(ROWS)
    assert fetch_file(file, tmp_path).status == 'fetched'
    assert files_in(tmp_path) == {BOOLQ.path: ROWS}
    assert (tmp_path / BOOLQ.path).stat().st_mode & 0o777 == 0o644
    assert server.paths == [f'/datasets/owner/name/resolve/{BOOLQ.revision}/data/boolq.jsonl']
    assert fetch_file(file, tmp_path).status == 'there already'
    assert len(server.paths) == 1


@pytest.mark.parametrize(
    ('file', 'answer', 'words', 'num_requests'),
    [
        pytest.param(BOOLQ, OTHERS, (BOOLQ.sha256, hashlib.sha256(OTHERS).hexdigest()), 3, id='sha256'),
        pytest.param(OF_GIT, OTHERS, (OF_GIT.git_blob, BLOB_OF_OTHERS), 1, id='git blob id'),
        pytest.param(WITHOUT_HASH, ROWS + b'{}\n', ('101 rows; expected 100',), 1, id='rows'),
        pytest.param(BOOLQ, Answer(ROWS, num_bytes=5346), (), 3, id='broken off after 99 of 100 rows'),
        pytest.param(WITHOUT_HASH, Answer(ROWS, num_bytes=5346), (), 3, id='broken off, no hash'),
        pytest.param(BOOLQ, Answer(b'no', 403), ('403',), 3, id='forbidden'),
        pytest.param(BOOLQ, Answer(b'no', 404), ('404',), 3, id='not found'),
        pytest.param(ALGEBRA, parquet_of(PROBLEMS[:2]), ('2 rows; expected 3',), 1, id='converted rows'),
        pytest.param(ALGEBRA, b'PAR1 and no more', ('cannot be read as the published parquet',), 1, id='not parquet'),
        pytest.param(ALGEBRA, parquet_of([{'problem': 'x'}]), ('cannot be read as the published',), 1, id='columns'),
        pytest.param(ALGEBRA, parquet_of([*PROBLEMS, EMPTY]), ('row 4: problem is empty',), 1, id='empty problem'),
        pytest.param(PRO, parquet_of([QUESTION, WRONG]), ('row 2: answer_index is 3', '0..2'), 1, id='gold'),
        pytest.param(PRO, parquet_of([QUESTION, PADDED]), ('row 2: N/A is before',), 1, id='padding between options'),
        pytest.param(HASHED, parquet_of(PROBLEMS), (HASHED.sha256,), 3, id='sha256 of what is converted'),
    ],
)
def test_a_failed_download_writes_nothing_and_says_why(
    server: Server, tmp_path: Path, file: DataFile, answer: Answer | bytes, words: tuple[str, ...], num_requests: int
):
    server.give(answer)
    outcome = fetch_file(file, tmp_path, num_retries=2)
    assert (outcome.status, outcome.place) == ('failed', file.url)
    assert all(word in outcome.detail for word in words), outcome.detail
    assert files_in(tmp_path) == {} and len(server.paths) == num_requests


@pytest.mark.parametrize('first', [Answer(ROWS, num_bytes=3000), Answer(b'', 503), Answer(b'', 429), OTHERS])
def test_temporary_failures_are_retried(server: Server, tmp_path: Path, first: Answer | bytes):
    server.give(first, ROWS)
    assert fetch_file(BOOLQ, tmp_path, num_retries=1).status == 'fetched'
    assert files_in(tmp_path) == {BOOLQ.path: ROWS} and len(server.paths) == 2


def test_a_published_parquet_file_is_converted(server: Server, tmp_path: Path):
    server.give(parquet_of(PROBLEMS))
    assert fetch_file(ALGEBRA, tmp_path).status == 'fetched'
    lines = (tmp_path / ALGEBRA.path).read_text().splitlines()
    assert len(lines) == 3 and lines[0].startswith('{"problem": "$0 + 1$?", "level": "Level 1", "type": "Algebra", ')


@pytest.mark.parametrize('file', [file for file in read_manifest() if file.converter], ids=lambda file: file.path)
def test_real_files_are_reproduced_byte_for_byte_from_parquet(file: DataFile):
    path = SHARED_DATA / file.path
    if not path.is_file():
        pytest.skip(f'{path} is not there')
    content = path.read_bytes()
    rows = [json.loads(line) for line in content.decode().split('\n')[:-1]]
    if file.converter == 'mmlu_pro':
        rows = [{**row, 'options': row['options'] + ['N/A'] * (10 - len(row['options']))} for row in rows]
    published = parquet_of([{'extra': 1, **row} for row in rows])
    assert convert(published, replace(file, sha256=None), 'test.parquet') == content


def test_an_unwritable_data_root_is_an_error(server: Server):
    server.give(ROWS)
    with pytest.raises(RecordError, match='/proc/nowhere'):
        fetch_file(BOOLQ, Path('/proc/nowhere'))


def test_files_are_selected_by_task_category_path_or_stem():
    for name in ('jeopardy', 'world_knowledge/jeopardy_all.jsonl', 'world_knowledge/jeopardy_all', 'jeopardy_all'):
        assert [file.path for file in select_files([name])] == ['world_knowledge/jeopardy_all.jsonl']
    assert len(select_files(['safety'])) == 4
    assert len(select_files(['safety', 'bbq', 'copa'])) == 5
    assert len(select_files([])) == 72
    with pytest.raises(ConfigError) as raised:
        select_files(['jepardy', 'copa', 'moon'])
    assert len(raised.value.problems) == 2 and "did you mean 'jeopardy'" in raised.value.problems[0]


def test_the_origin_of_a_file_is_found_by_its_content(tmp_path, monkeypatch):
    sample = PATH.parent / 'commonsense_reasoning' / 'copa.jsonl'
    copied, other = (tmp_path / name for name in ('commonsense_reasoning/copa.jsonl', 'other.jsonl'))
    copied.parent.mkdir()
    copied.write_bytes(sample.read_bytes())
    other.write_text('{}')
    assert [origin_of([path]) for path in (sample, copied, other)] == ['sample', 'sample', 'own']
    copied.write_bytes(b'{}\n')
    assert origin_of([copied]) == 'unofficial'
    copa = next(file for file in read_manifest() if file.task == 'copa')
    known = replace(copa, git_blob=git_blob_id(b'{}\n'), sha256=None)
    monkeypatch.setattr('llmfoundry_gauntlet.data.published.read_manifest', lambda: (known,))
    assert origin_of([copied]) == 'published'
    assert origin_of([copied, other]) == 'own' and origin_of([copied, sample]) == 'sample' and origin_of([]) == 'own'
