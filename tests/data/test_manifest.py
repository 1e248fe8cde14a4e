"""The form of every line of the manifest, and the published files against it where they are at hand."""

from __future__ import annotations

import csv
import re

import pytest
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.score import AGIEVAL, MATH, MMLU_PRO
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.data.manifest import COLUMNS, PATH, DataFile, git_blob_id, read_manifest, select_files
from llmfoundry_gauntlet.data.score_rows import FILES
from llmfoundry_gauntlet.errors import ConfigError

LINES = PATH.read_text(encoding='utf-8').splitlines()
ROWS = list(csv.DictReader(LINES, dialect='excel-tab'))
TASKS = {task['label']: task for task in read_yaml(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')['icl_tasks']}
SCORE_TASKS = {'score_mmlu_pro': MMLU_PRO, 'score_agieval': AGIEVAL, 'score_math': MATH}
FORMS = {
    'path': r'[a-z_]+(/[a-z0-9_]+)?/[A-Za-z0-9_.-]+\.jsonl',
    'task': r'[a-z0-9_]+',
    'rows': r'[1-9]\d*',
    'bytes': r'([1-9]\d*)?',
    'git_blob': r'([0-9a-f]{40})?',
    'sha256': r'([0-9a-f]{64})?',
    'repository': r'(github|huggingface):[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+',
    'revision': r'[0-9a-f]{40}',
    'source': r'[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*',
    'licence': r'unknown|[A-Za-z]+(-[A-Za-z0-9.]+)*',
    'converter': r'(mmlu_pro|math)?',
}
PUBLISHED = [file for file in read_manifest() if file.converter is None]


def found_of(file: DataFile):
    """Where the real file lies, if it does."""
    paths = (SHARED_DATA / 'local_data' / file.path, SHARED_DATA / file.path)
    return next((path for path in paths if path.is_file()), None)


def test_the_columns_are_those_that_are_read():
    assert tuple(LINES[0].split('\t')) == COLUMNS == tuple(FORMS)
    assert {line.count('\t') for line in LINES} == {len(COLUMNS) - 1}


@pytest.mark.parametrize('row', ROWS, ids=lambda row: f'{row["path"]}-{row["repository"]}')
def test_every_field_has_its_form(row):
    wrong = {name: row[name] for name, form in FORMS.items() if re.fullmatch(form, row[name]) is None}
    assert wrong == {}
    assert '..' not in row['path'] and '..' not in row['source']


def test_no_two_files_have_the_same_name():
    """Files are found by their names, whatever folder they lie in."""
    assert len({file.path.rpartition('/')[2].casefold() for file in read_manifest()}) == len(ROWS) == 72


def test_every_file_of_the_tasks_and_of_score_is_in_it_and_no_other():
    of_tasks = {task['dataset_uri'] for task in TASKS.values()}
    of_score = {path for paths in FILES.values() for path in paths}
    assert {file.path for file in read_manifest()} == of_tasks | of_score
    assert len(of_tasks) == 57 and len(of_score) == 15


def test_every_file_has_the_label_of_its_task():
    for file in read_manifest():
        if file.task in SCORE_TASKS:
            assert file.path in FILES[SCORE_TASKS[file.task]]
        else:
            assert TASKS[file.task]['dataset_uri'] == file.path


def test_every_address_is_of_a_commit():
    for file in read_manifest():
        assert re.fullmatch(r'https://[a-z.]+/[^\s*?#]+', file.url) and f'/{file.revision}/' in file.url, file.path


def test_a_mirror_of_the_hub_is_named_by_the_environment(monkeypatch):
    (file,) = select_files(['score_mmlu_pro'])
    monkeypatch.setenv('HF_ENDPOINT', 'https://mirror.example/')
    assert file.url == (
        'https://mirror.example/datasets/TIGER-Lab/MMLU-Pro/resolve/b189ec765aa7ed75c8acfea42df31fdae71f97be/'
        'data/test-00000-of-00001.parquet'
    )


def test_each_file_of_the_gauntlet_has_the_id_that_llm_foundry_publishes():
    for file in read_manifest():
        if file.task not in SCORE_TASKS:
            assert file.git_blob is not None and file.converter is None, file.path
            assert file.source == f'scripts/eval/local_data/{file.path}'


@pytest.mark.parametrize('file', PUBLISHED, ids=lambda file: file.path)
def test_the_published_file_is_as_the_manifest_says(file):
    path = found_of(file)
    if path is None:
        pytest.skip(f'{file.path} (../shared/data) is not here')
    content = path.read_bytes()
    if file.task in ('hellaswag', 'mmlu'):  # which are reconstructions
        assert file.difference(content) is not None
    else:
        assert file.difference(content) is None
        assert (len(content), git_blob_id(content)) == (file.num_bytes, file.git_blob)
    lines = content.split(b'\n')
    assert len([line for line in lines if line.strip()]) == file.num_rows


def test_the_ids_are_those_of_the_list_that_llm_foundry_was_read_from():
    listed = ROOT.parent / 'shared' / 'reference' / 'upstream_blobs.tsv'
    if not listed.is_file():
        pytest.skip(f'{listed} is not here')
    with listed.open(encoding='utf-8', newline='') as lines:
        blobs = {row['path']: row for row in csv.DictReader(lines, dialect='excel-tab')}
    for file in read_manifest():
        if file.source in blobs:
            row = blobs.pop(file.source)
            assert file.git_blob == row['git_blob_sha1'], file.path
            assert row['bytes_if_known'] in ('', str(file.num_bytes)), file.path
    assert len([path for path in blobs if path.endswith('.jsonl')]) < 20  # of tasks that are not in this Gauntlet


def test_names_are_those_of_tasks_categories_paths_and_stems():
    for name in ('jeopardy', 'world_knowledge/jeopardy_all.jsonl', 'world_knowledge/jeopardy_all', 'jeopardy_all'):
        assert [file.path for file in select_files([name])] == ['world_knowledge/jeopardy_all.jsonl']
    assert len(select_files(['safety'])) == 4
    assert len(select_files(['safety', 'bbq', 'copa'])) == 5
    assert len(select_files([])) == 72
    with pytest.raises(ConfigError) as raised:
        select_files(['jepardy', 'copa', 'moon'])
    assert len(raised.value.problems) == 2 and "did you mean 'jeopardy'" in raised.value.problems[0]
