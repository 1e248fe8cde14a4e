"""The form of every line of the manifest, and what selects files in it."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import pytest
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.score import AGIEVAL, MATH, MMLU_PRO
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.data.manifest import PATH, git_blob_id, origin_of, read_manifest, select_files
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


def test_columns_are_the_documented_ones():
    assert tuple(LINES[0].split('\t')) == tuple(FORMS)
    assert {line.count('\t') for line in LINES} == {len(FORMS) - 1}


def test_fields_are_well_formed_and_file_names_unique():
    """Files are found by their names, whatever folder they lie in."""
    for row in ROWS:
        assert {name: row[name] for name, form in FORMS.items() if re.fullmatch(form, row[name]) is None} == {}
        assert '..' not in row['path'] and '..' not in row['source']
    assert len({file.path.rpartition('/')[2].casefold() for file in read_manifest()}) == len(ROWS) == 72


def test_manifest_lists_exactly_the_files_of_the_tasks_and_of_score():
    expected = {(label, task['dataset_uri']) for label, task in TASKS.items()}
    expected |= {(label, path) for label, dataset in SCORE_TASKS.items() for path in FILES[dataset]}
    assert {(file.task, file.path) for file in read_manifest()} == expected
    assert len(expected) == 57 + 15


def test_hf_endpoint_names_a_mirror_of_the_hub(monkeypatch):
    (file,) = select_files(['score_mmlu_pro'])
    monkeypatch.setenv('HF_ENDPOINT', 'https://mirror.example/')
    assert file.url == (
        'https://mirror.example/datasets/TIGER-Lab/MMLU-Pro/resolve/b189ec765aa7ed75c8acfea42df31fdae71f97be/'
        'data/test-00000-of-00001.parquet'
    )


def test_gauntlet_files_have_the_git_blob_id_of_llm_foundry():
    for file in read_manifest():
        if file.task not in SCORE_TASKS:
            assert file.git_blob is not None and file.converter is None, file.path
            assert file.source == f'scripts/eval/local_data/{file.path}'


def test_blob_ids_match_the_upstream_listing():
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
    monkeypatch.setattr('llmfoundry_gauntlet.data.manifest.read_manifest', lambda: (known,))
    assert origin_of([copied]) == 'published'
    assert origin_of([copied, other]) == 'own' and origin_of([copied, sample]) == 'sample' and origin_of([]) == 'own'


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason='the published files are not here')
def test_published_files_are_known_as_such():
    assert origin_of([SHARED_DATA / 'local_data' / 'commonsense_reasoning' / 'copa.jsonl']) == 'published'
