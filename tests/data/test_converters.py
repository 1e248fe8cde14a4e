"""MMLU-Pro and MATH out of parquet: rows by hand, and the real files out of parquet files with their rows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from paths import SHARED_DATA
from test_download import parquet_of

from llmfoundry_gauntlet.data.download import convert
from llmfoundry_gauntlet.data.manifest import DataFile, read_manifest, select_files
from llmfoundry_gauntlet.errors import DataError

PRO = {
    'question_id': 7,
    'question': 'Which of these floats in the straße?',
    'options': ['lead', 'cork', 'iron'],
    'answer': 'B',
    'answer_index': 1,
    'cot_content': '',
    'category': 'physics',
    'src': 'hand-written',
}
SUM = {'problem': 'What is $1 + 1$?', 'level': 'Level 1', 'type': 'Number Theory', 'solution': 'It is $\\boxed{2}$.'}
(MMLU_PRO,) = (replace(file, sha256=None) for file in select_files(['score_mmlu_pro']))
(NUMBER_THEORY,) = select_files(['number_theory'])
CONVERTED = [replace(file, sha256=None) for file in read_manifest() if file.converter]


def problems_of(file: DataFile, content: bytes) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        convert(content, file, 'test.parquet')
    return caught.value.problems


@pytest.mark.parametrize('file', CONVERTED, ids=lambda file: file.path)
def test_real_files_are_reproduced_byte_for_byte(file: DataFile):
    path = SHARED_DATA / file.path
    if not path.is_file():
        pytest.skip(f'{path} is not there')
    content = path.read_bytes()
    rows = [json.loads(line) for line in content.decode().split('\n')[:-1]]
    if file.converter == 'mmlu_pro':
        rows = [{**row, 'options': row['options'] + ['N/A'] * (10 - len(row['options']))} for row in rows]
    assert convert(parquet_of([{'extra': 1, **row} for row in rows]), file, 'test.parquet') == content


@pytest.mark.parametrize(
    ('file', 'row', 'words'),
    [
        (MMLU_PRO, {**PRO, 'answer_index': 3}, ('answer_index is 3', '0..2')),
        (MMLU_PRO, {**PRO, 'options': ['cork', 'N/A', 'iron']}, ('N/A',)),
        (NUMBER_THEORY, {**SUM, 'problem': ''}, ('problem is empty',)),
    ],
)
def test_a_malformed_row_is_named(file: DataFile, row: dict[str, Any], words: tuple[str, ...]):
    right = PRO if file is MMLU_PRO else SUM
    (problem,) = problems_of(file, parquet_of([right, row]))
    assert problem.startswith('test.parquet: row 2: ') and all(word in problem for word in words)


def test_other_bytes_missing_columns_and_files_that_are_not_parquet_are_errors():
    (published,) = select_files(['score_mmlu_pro'])
    (problem,) = problems_of(published, parquet_of([PRO]))
    assert published.sha256 in problem
    for content in (parquet_of([{'problem': 'x', 'answer': 'y'}]), b'PAR1 and no more'):
        (problem,) = problems_of(NUMBER_THEORY, content)
        assert problem.startswith('test.parquet: cannot be read as the published parquet file: ')
