"""`gauntlet data ls / fetch / import / verify` with small manifests, and with the real files."""

from __future__ import annotations

import json
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
def test_files_are_imported_from_anywhere_below_a_folder(gauntlet: Gauntlet, tmp_path: Path, folder: str):
    source, to = tmp_path / 'from', tmp_path / 'to'
    write(source / f'{folder}{COPA}', ROWS[COPA])
    write(source / f'{folder}boolq.jsonl', ROWS[BOOLQ])
    write(source / f'{folder}algebra.jsonl', ALGEBRA_LINES)
    write(source / 'a' / 'copa.jsonl', b'other bytes, and further up')
    write(source / '.git' / 'copa.jsonl', b'hidden')
    status, out, err = gauntlet('data', 'import', source, '--to', to)
    assert (status, err) == (0, '') and out.splitlines()[-1] == '3 files: 3 imported'
    assert files_in(to) == {**ROWS, f'{MATH}algebra.jsonl': ALGEBRA_LINES}
    assert gauntlet('data', 'import', source, '--to', to)[1].splitlines()[-1] == '3 files: 3 there already'
    status, out, _ = gauntlet('data', 'verify', to)
    assert status == 0 and statuses(out) == {'copa': 'right', 'boolq': 'right', 'algebra': 'no hash'}
    there = write(to / COPA, b'mine\n')
    status, _, err = gauntlet('data', 'import', source, '--to', to)
    assert status == 1 and f'{there}: ' in err and '--overwrite' in err and there.read_bytes() == b'mine\n'
    assert gauntlet('data', 'import', source, '--to', to, '--overwrite')[0] == 0 and files_in(to)[COPA] == ROWS[COPA]


@pytest.mark.usefixtures('small_manifest')
def test_files_are_imported_and_verified_from_an_s3_bucket(gauntlet: Gauntlet, tmp_path: Path, s3_server: S3Server):
    pytest.importorskip('s3fs')
    for name, content in (('copa.jsonl', ROWS[COPA]), ('boolq.jsonl', b'{}\n')):
        s3_server.client.put_object(Bucket=s3_server.bucket, Key=f'deep/{name}', Body=content)
    for folder in (f's3://{s3_server.bucket}', s3_server.uri('deep/')):
        status, out, err = gauntlet('data', 'import', folder, '--to', tmp_path, '--overwrite')
        assert status == 1 and statuses(out)['boolq'] == 'failed' and s3_server.uri('deep/boolq.jsonl: ') in err
        assert files_in(tmp_path) == {COPA: ROWS[COPA]}
        status, out, _ = gauntlet('data', 'verify', folder)
        assert status == 1 and statuses(out) == {'copa': 'right', 'boolq': 'other bytes', 'algebra': 'missing'}
    status, _, err = gauntlet('data', 'import', s3_server.uri('elsewhere'), '--to', tmp_path)
    assert status == 2 and s3_server.uri('elsewhere') in err


@pytest.mark.usefixtures('small_manifest')
def test_a_published_parquet_file_is_imported_as_json_lines(gauntlet: Gauntlet, tmp_path: Path):
    write(tmp_path / 'from' / 'hub' / 'algebra' / 'test-00000-of-00001.parquet', parquet_of(PROBLEMS))
    write(tmp_path / 'from' / 'hub' / 'geometry' / 'test-00000-of-00001.parquet', b'another subject')
    assert gauntlet('data', 'import', tmp_path / 'from', '--to', tmp_path / 'to', 'score_math')[0] == 0
    assert files_in(tmp_path / 'to') == {f'{MATH}algebra.jsonl': ALGEBRA_LINES}


@pytest.mark.usefixtures('small_manifest')
@pytest.mark.parametrize('command', ['import', 'verify'])
def test_missing_or_empty_folders_and_unknown_names_are_user_errors(gauntlet: Gauntlet, tmp_path: Path, command: str):
    to = ('--to', tmp_path / 'to') if command == 'import' else ()
    file = write(tmp_path / 'from' / 'copa.jsonl', ROWS[COPA])
    assert gauntlet('data', command, tmp_path / 'none', *to)[0] == 2
    assert gauntlet('data', command, file, *to)[0] == 2
    status, _, err = gauntlet('data', command, tmp_path / 'from', *to, 'cpa', 'nothing')
    assert status == 2 and "did you mean 'copa'" in err and 'nothing: ' in err
    (tmp_path / 'empty').mkdir()
    status, _, err = gauntlet('data', command, tmp_path / 'empty', *to)
    assert status == (2 if command == 'import' else 0) and ('copa.jsonl' in err) == (command == 'import')
    assert not (tmp_path / 'to').exists()


@pytest.mark.usefixtures('small_manifest')
def test_verify_reports_right_other_and_missing_files_as_json(gauntlet: Gauntlet, tmp_path: Path):
    write(tmp_path / COPA, ROWS[COPA])
    write(tmp_path / BOOLQ, ROWS[BOOLQ].replace(b'\n', b'\r\n'))
    status, out, _ = gauntlet('data', 'verify', tmp_path, '--json')
    found = {file['task']: file for file in json.loads(out)['files']}
    assert status == 1
    assert {task: file['status'] for task, file in found.items()} == {
        'copa': 'right',
        'boolq': 'other bytes',
        'score_math': 'missing',
    }
    assert found['boolq']['found'] == str(tmp_path / BOOLQ) and found['score_math']['found'] is None
    assert gauntlet('data', 'verify', tmp_path, 'copa', 'score_math')[0] == 0
    write(tmp_path / f'{MATH}algebra.jsonl', ALGEBRA_LINES[:-5])
    assert gauntlet('data', 'verify', tmp_path, 'score_math')[0] == 0  # an unfinished last row is still a row
    write(tmp_path / f'{MATH}algebra.jsonl', ALGEBRA_LINES + b'{}\n')
    assert gauntlet('data', 'verify', tmp_path, 'score_math')[0] == 1


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


def test_ls_says_where_each_file_comes_from(gauntlet: Gauntlet, tmp_path: Path):
    write(tmp_path / COPA, b'x' * 14627)
    write(tmp_path / BOOLQ, (ROOT / 'eval_data' / BOOLQ).read_bytes())
    status, out, _ = gauntlet('data', 'ls', '--data-root', tmp_path, '--json')
    there = {file['task']: file['there'] for file in json.loads(out)}
    assert status == 0
    assert (there.pop('copa'), there.pop('boolq'), {*there.values()}) == ('unofficial', 'sample', {'not there'})
    status, out, _ = gauntlet('data', 'ls', 'copa', 'bbq', '--data-root', tmp_path)
    rows = [line.split() for line in out.splitlines()]
    assert [COPA, 'copa', 'unofficial', '100', '14,627', 'BSD-2-Clause', 'mosaicml/llm-foundry'] in rows
    assert rows[-1] == ['2', 'files,', '58,592', 'rows']


def test_ls_prints_only_urls(gauntlet: Gauntlet):
    status, out, err = gauntlet('data', 'ls', 'copa', 'score_mmlu_pro', '--urls')
    copa, mmlu_pro = out.splitlines()
    assert status == 0 and err == ''
    assert copa.startswith('https://raw.githubusercontent.com/mosaicml/llm-foundry/') and copa.endswith(COPA)
    assert mmlu_pro.startswith('https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro/resolve/')
    assert len(gauntlet('data', 'ls', '--urls')[1].splitlines()) == 72


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason='the real evaluation files (../shared/data) are not here')
def test_all_real_files_verify_except_two_reconstructions(gauntlet: Gauntlet, tmp_path: Path):
    status, out, _ = gauntlet('data', 'import', SHARED_DATA, '--to', tmp_path)
    assert status == 1 and out.splitlines()[-1] == '72 files: 61 imported, 9 missing, 2 failed'
    found = statuses(out)
    assert {stem for stem, state in found.items() if state == 'failed'} == {'mmlu', 'hellaswag'}

    copies = files_in(tmp_path)
    assert len(copies) == 61
    assert all(file.num_rows == copies[file.path].count(b'\n') for file in read_manifest() if file.path in copies)
    status, out, _ = gauntlet('data', 'verify', tmp_path)
    assert status == 0 and out.splitlines()[-1] == '72 files: 53 right, 11 missing, 8 no hash'
