"""`gauntlet data ls` and `fetch` with small manifests, and with the real files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import object_store
import pytest
from object_store import S3Server
from paths import ROOT, SHARED_DATA
from test_published import PROBLEMS, files_in, parquet_of

from llmfoundry_gauntlet.data import published
from llmfoundry_gauntlet.data.published import read_manifest, select_files

s3_server = object_store.s3_server
Gauntlet = Callable[..., tuple[int, str, str]]
COPA, BOOLQ, MATH = 'commonsense_reasoning/copa.jsonl', 'reading_comprehension/boolq.jsonl', 'score/hendrycks_math/'
ROWS = {path: f'{{"query": "{path}"}}\n'.encode() * 3 for path in (COPA, BOOLQ)}
ALGEBRA_LINES = ''.join(json.dumps(row) + '\n' for row in PROBLEMS).encode()


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('HF_HUB_OFFLINE', 'HF_DATASETS_OFFLINE', 'HF_ENDPOINT'):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a manifest of two files with hashes and one without, which is converted."""
    files = [
        replace(
            file, num_rows=3, num_bytes=len(ROWS[file.path]), git_blob=None, sha256=sha256(ROWS[file.path]).hexdigest()
        )
        for file in select_files(['copa', 'boolq'])
    ]
    (algebra,) = select_files([f'{MATH}algebra'])
    monkeypatch.setattr(published, 'read_manifest', lambda: (*files, replace(algebra, num_rows=3)))


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def statuses(out: str) -> dict[str, str]:
    """Return the status in each line by the file's stem."""
    lines = [line for line in out.splitlines() if '.jsonl' in line]
    return {Path(line[15:].split()[0]).stem: line[:15].strip() for line in lines}


@pytest.mark.usefixtures('small_manifest')
@pytest.mark.parametrize('folder', ['', 'scripts/eval/local_data/', 'x/y/', 'commonsense_reasoning/'])
def test_files_are_copied_from_anywhere_below_a_folder(gauntlet: Gauntlet, tmp_path: Path, folder: str):
    source, to = tmp_path / 'from', tmp_path / 'to'
    write(source / f'{folder}{COPA}', ROWS[COPA])
    write(source / f'{folder}boolq.jsonl', ROWS[BOOLQ])
    write(source / f'{folder}algebra.jsonl', ALGEBRA_LINES)
    write(source / 'a' / 'copa.jsonl', b'other bytes, and further up')
    write(source / '.git' / 'copa.jsonl', b'hidden')

    status, out, err = gauntlet('data', 'fetch', '--from', source, '--to', to)

    assert (status, err) == (0, '') and out.splitlines()[-1] == '3 files: 3 copied'
    assert files_in(to) == {**ROWS, f'{MATH}algebra.jsonl': ALGEBRA_LINES}
    again = gauntlet('data', 'fetch', '--from', source, '--to', to)
    assert again[1].splitlines()[-1] == '3 files: 3 there already'


@pytest.mark.usefixtures('small_manifest')
def test_a_copy_replaces_other_bytes_only_if_asked(gauntlet: Gauntlet, tmp_path: Path):
    source, to = tmp_path / 'from', tmp_path / 'to'
    write(source / COPA, ROWS[COPA])
    mine = write(to / COPA, b'mine\n')

    status, _, err = gauntlet('data', 'fetch', 'copa', '--from', source, '--to', to)
    assert status == 1 and f'{mine}: ' in err and '--overwrite' in err and mine.read_bytes() == b'mine\n'

    assert gauntlet('data', 'fetch', 'copa', '--from', source, '--to', to, '--overwrite')[0] == 0
    assert mine.read_bytes() == ROWS[COPA]


@pytest.mark.usefixtures('small_manifest')
def test_files_are_copied_from_an_s3_bucket(gauntlet: Gauntlet, tmp_path: Path, s3_server: S3Server):
    pytest.importorskip('s3fs')
    for name, content in (('copa.jsonl', ROWS[COPA]), ('boolq.jsonl', b'{}\n')):
        s3_server.client.put_object(Bucket=s3_server.bucket, Key=f'deep/{name}', Body=content)
    for folder in (f's3://{s3_server.bucket}', s3_server.uri('deep/')):
        status, out, err = gauntlet('data', 'fetch', '--from', folder, '--to', tmp_path, '--overwrite')
        assert status == 1 and s3_server.uri('deep/boolq.jsonl: ') in err
        assert statuses(out)['boolq'] == 'failed' and statuses(out)['algebra'] == 'missing'
        assert files_in(tmp_path) == {COPA: ROWS[COPA]}
    status, _, err = gauntlet('data', 'fetch', '--from', s3_server.uri('elsewhere'), '--to', tmp_path)
    assert status == 2 and s3_server.uri('elsewhere') in err


@pytest.mark.usefixtures('small_manifest')
def test_a_published_parquet_file_is_copied_as_json_lines(gauntlet: Gauntlet, tmp_path: Path):
    write(tmp_path / 'from' / 'hub' / 'algebra' / 'test-00000-of-00001.parquet', parquet_of(PROBLEMS))
    write(tmp_path / 'from' / 'hub' / 'geometry' / 'test-00000-of-00001.parquet', b'another subject')
    assert gauntlet('data', 'fetch', '--from', tmp_path / 'from', '--to', tmp_path / 'to', 'score_math')[0] == 0
    assert files_in(tmp_path / 'to') == {f'{MATH}algebra.jsonl': ALGEBRA_LINES}


@pytest.mark.usefixtures('small_manifest')
def test_missing_or_empty_folders_and_unknown_names_are_user_errors(gauntlet: Gauntlet, tmp_path: Path):
    file = write(tmp_path / 'from' / 'copa.jsonl', ROWS[COPA])
    (tmp_path / 'empty').mkdir()

    def fetch(source: Path, *names: str) -> tuple[int, str]:
        status, _, err = gauntlet('data', 'fetch', *names, '--from', source, '--to', tmp_path / 'to')
        return status, err

    assert fetch(tmp_path / 'none')[0] == 2
    assert fetch(file)[0] == 2
    status, err = fetch(tmp_path / 'from', 'cpa', 'nothing')
    assert status == 2 and "did you mean 'copa'" in err and 'nothing: ' in err
    status, err = fetch(tmp_path / 'empty')
    assert status == 2 and 'copa.jsonl' in err
    assert not (tmp_path / 'to').exists()


@pytest.mark.usefixtures('small_manifest')
def test_copies_need_no_network(gauntlet: Gauntlet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    write(tmp_path / 'from' / COPA, ROWS[COPA])
    assert gauntlet('data', 'fetch', 'copa', '--from', tmp_path / 'from', '--to', tmp_path / 'to')[0] == 0
    assert files_in(tmp_path / 'to') == {COPA: ROWS[COPA]}


@pytest.mark.usefixtures('small_manifest')
def test_ls_compares_files_with_the_published_ones(gauntlet: Gauntlet, tmp_path: Path):
    write(tmp_path / COPA, ROWS[COPA])
    boolq = write(tmp_path / BOOLQ, ROWS[BOOLQ].replace(b'\n', b'\r\n'))

    status, out, _ = gauntlet('data', 'ls', '--data-root', tmp_path, '--json')

    listed = {file['task']: file for file in json.loads(out)}
    assert status == 1
    assert {task: file['status'] for task, file in listed.items()} == {
        'copa': 'published',
        'boolq': 'other bytes',
        'score_math': 'missing',
    }
    expected = sha256(ROWS[BOOLQ]).hexdigest()
    assert expected in listed['boolq']['detail'] and listed['copa']['detail'] is None
    status, out, _ = gauntlet('data', 'ls', '--data-root', tmp_path)
    assert status == 1 and out.splitlines()[-1].startswith(f'{boolq}: sha256 is ') and expected in out
    assert gauntlet('data', 'ls', 'copa', 'score_math', '--data-root', tmp_path)[0] == 0


@pytest.mark.usefixtures('small_manifest')
@pytest.mark.parametrize(
    ('content', 'status'),
    [
        (ALGEBRA_LINES, 'no hash'),
        (ALGEBRA_LINES[:-5], 'no hash'),  # an unfinished last row is still a row
        (ALGEBRA_LINES + b'{}\n', 'other bytes'),
    ],
)
def test_ls_compares_the_number_of_rows_where_no_hash_is_known(
    gauntlet: Gauntlet, tmp_path: Path, content: bytes, status: str
):
    write(tmp_path / f'{MATH}algebra.jsonl', content)
    exit_status, out, _ = gauntlet('data', 'ls', 'score_math', '--data-root', tmp_path, '--json')
    (file,) = json.loads(out)
    assert (file['status'], exit_status) == (status, int(status == 'other bytes'))


def test_fetch_prints_a_line_per_file_and_failures_last(gauntlet: Gauntlet, tmp_path: Path, monkeypatch):
    monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')
    write(tmp_path / MATH / 'geometry.jsonl', b'{}\n' * 479)
    words = ('data', 'fetch', 'geometry', 'precalculus', '--to', tmp_path, '--retries', 0)
    status, out, err = gauntlet(*words)
    assert status == 1 and statuses(out) == {'geometry': 'there already', 'precalculus': 'failed'}
    assert out.splitlines()[-1] == '2 files: 1 there already, 1 failed'
    assert err.startswith(f'error: {MATH}precalculus.jsonl: http://127.0.0.1:9/datasets/EleutherAI/hendrycks_math/')
    assert gauntlet('data', 'fetch', 'geometry', '--to', tmp_path)[0] == 0
    assert gauntlet('data', 'fetch', 'geometri', '--to', tmp_path)[0] == 2
    assert gauntlet('data', 'fetch', 'geometry', '--to', tmp_path, '--retries', -1)[0] == 2


@pytest.mark.parametrize('variable', [None, 'HF_HUB_OFFLINE', 'HF_DATASETS_OFFLINE'])
def test_offline_lists_missing_files_with_their_urls(gauntlet: Gauntlet, tmp_path: Path, monkeypatch, variable):
    monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')
    if variable is not None:
        monkeypatch.setenv(variable, '1')
    write(tmp_path / MATH / 'geometry.jsonl', b'{}\n' * 479)
    write(tmp_path / MATH / 'precalculus.jsonl', b'{}\n')
    words = ('data', 'fetch', 'copa', 'geometry', 'precalculus', '--to', tmp_path)
    status, out, _ = gauntlet(*words, *(() if variable else ('--offline',)))
    assert status == 1
    assert statuses(out) == {'copa': 'missing', 'geometry': 'no hash', 'precalculus': 'other bytes'}
    (copa,) = [line for line in out.splitlines() if 'copa' in line]
    assert copa.endswith(select_files(['copa'])[0].url)
    (precalculus,) = [line for line in out.splitlines() if 'precalculus' in line]
    assert 'http://127.0.0.1:9/' in precalculus
    assert '1 rows; expected 546' in precalculus
    if variable is not None:
        assert variable in out


def test_ls_knows_the_sample_data_wherever_it_lies(gauntlet: Gauntlet, tmp_path: Path):
    write(tmp_path / COPA, b'x' * 14627)
    write(tmp_path / BOOLQ, (ROOT / 'eval_data' / BOOLQ).read_bytes())

    status, out, _ = gauntlet('data', 'ls', '--data-root', tmp_path, '--json')

    states = {file['task']: file['status'] for file in json.loads(out)}
    assert status == 1
    assert (states.pop('copa'), states.pop('boolq'), {*states.values()}) == ('other bytes', 'sample', {'missing'})
    status, out, _ = gauntlet('data', 'ls', '--data-root', ROOT / 'eval_data', '--json')
    assert status == 0 and {file['status'] for file in json.loads(out)} == {'sample'}


def test_ls_prints_a_row_for_each_file(gauntlet: Gauntlet, tmp_path: Path):
    write(tmp_path / COPA, b'x' * 14627)
    _, out, _ = gauntlet('data', 'ls', 'copa', 'bbq', '--data-root', tmp_path)
    rows = [line.split() for line in out.splitlines()]
    assert [COPA, 'copa', 'other', 'bytes', '100', '14,627', 'BSD-2-Clause', 'mosaicml/llm-foundry'] in rows
    last = ' '.join(rows[-2])  # before the file with other bytes
    assert '2 files, 58,592 rows' in last and '1 other bytes' in last and '1 missing' in last


def test_ls_names_a_file_that_cannot_be_read(gauntlet: Gauntlet, tmp_path: Path):
    (tmp_path / COPA).mkdir(parents=True)
    status, out, _ = gauntlet('data', 'ls', 'copa', '--data-root', tmp_path)
    assert status == 1 and f'{tmp_path / COPA}: ' in out.splitlines()[-1]


def test_ls_prints_only_urls(gauntlet: Gauntlet):
    status, out, err = gauntlet('data', 'ls', 'copa', 'score_mmlu_pro', '--urls')
    copa, mmlu_pro = out.splitlines()
    assert status == 0 and err == ''
    assert copa.startswith('https://raw.githubusercontent.com/mosaicml/llm-foundry/') and copa.endswith(COPA)
    assert mmlu_pro.startswith('https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro/resolve/')
    assert len(gauntlet('data', 'ls', '--urls')[1].splitlines()) == 72


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason='the real evaluation files (../shared/data) are not here')
def test_all_real_files_are_the_published_ones_except_two_reconstructions(gauntlet: Gauntlet, tmp_path: Path):
    status, out, _ = gauntlet('data', 'fetch', '--from', SHARED_DATA, '--to', tmp_path)
    assert status == 1 and out.splitlines()[-1] == '72 files: 61 copied, 9 missing, 2 failed'
    found = statuses(out)
    assert {stem for stem, state in found.items() if state == 'failed'} == {'mmlu', 'hellaswag'}

    copies = files_in(tmp_path)
    assert len(copies) == 61
    assert all(file.num_rows == copies[file.path].count(b'\n') for file in read_manifest() if file.path in copies)
    status, out, _ = gauntlet('data', 'ls', '--data-root', tmp_path, '--json')
    assert status == 0
    states = Counter(file['status'] for file in json.loads(out))
    assert states == {'published': 53, 'missing': 11, 'no hash': 8}
