"""MMLU-Pro and MATH out of parquet: rows by hand, and the real files out of parquet files with their rows."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from paths import SHARED_DATA
from pyarrow import Table, parquet

from llmfoundry_gauntlet.data.download import CONVERTERS, convert
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
(MMLU_PRO,) = select_files(['score_mmlu_pro'])
(NUMBER_THEORY,) = select_files(['number_theory'])
CONVERTED = [file for file in read_manifest() if file.converter]


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(Table.from_pylist(rows), sink)
    return sink.getvalue()


def rows_of(file: DataFile, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    content = convert(parquet_of(rows), file, 'test.parquet')
    return [json.loads(line) for line in content.decode().split('\n')[:-1]]


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


def test_every_converter_in_the_manifest_exists():
    assert {file.converter for file in CONVERTED} == set(CONVERTERS)


def test_mmlu_pro_filler_options_are_removed_and_the_answer_adjusted():
    filled = {**PRO, 'options': ['lead', 'N/A', 'cork', 'iron', 'N/A'], 'answer': 'C', 'answer_index': 2}
    assert rows_of(MMLU_PRO, [PRO, filled]) == [PRO, PRO]


def test_a_letter_of_mmlu_pro_that_contradicts_the_index_is_kept():
    odd = {**PRO, 'answer': 'C'}
    filled = {**PRO, 'options': ['N/A', *PRO['options']], 'answer': 'D', 'answer_index': 2}
    assert rows_of(MMLU_PRO, [odd, filled]) == [odd, odd]


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        ({'question_id': None}, ('question_id',)),
        ({'answer_index': 3}, ('answer_index 3', 'A, B, C')),
        ({'answer': 'D'}, ("answer is 'D'", 'A, B, C')),
        ({'answer': ''}, ("answer is ''",)),
        ({'options': ['cork', 'N/A', 'iron']}, ('answer_index 1', 'A, C')),
        ({'options': ['cork', 'lead', 'N/A'], 'answer': 'C'}, ("answer is 'C'", 'A, B')),
        ({'category': ''}, ('category is empty',)),
        ({'cot_content': None}, ('cot_content',)),
    ],
)
def test_a_malformed_row_of_mmlu_pro_is_named(change: dict[str, Any], words: tuple[str, ...]):
    (problem,) = problems_of(MMLU_PRO, parquet_of([PRO, {**PRO, **change}]))
    assert problem.startswith('test.parquet: row 2: ') and all(word in problem for word in words)


def test_all_malformed_rows_of_math_are_named():
    rows = [{**SUM, 'type': 'Algebra'}, SUM, {**SUM, 'problem': ''}, {**SUM, 'solution': None}]
    problems = problems_of(NUMBER_THEORY, parquet_of(rows))
    assert [problem.split(': ')[1] for problem in problems] == ['row 1', 'row 3', 'row 4']
    assert "'Algebra'" in problems[0] and "'Number Theory'" in problems[0]


def test_missing_columns_and_files_that_are_not_parquet_are_errors():
    (problem,) = problems_of(NUMBER_THEORY, parquet_of([{'problem': 'x', 'answer': 'y'}]))
    assert 'level, type, solution are missing' in problem and 'problem, answer' in problem
    (problem,) = problems_of(NUMBER_THEORY, b'PAR1 and no more')
    assert problem.startswith('test.parquet: cannot be read as parquet: ')
