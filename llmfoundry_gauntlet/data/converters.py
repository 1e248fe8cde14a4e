"""Convert the published parquet files of MMLU-Pro and MATH to JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from llmfoundry_gauntlet.config.decode import describe
from llmfoundry_gauntlet.data.fields import RowError, field_value, text_field, texts_field
from llmfoundry_gauntlet.data.manifest import DataFile
from llmfoundry_gauntlet.errors import DataError

Row = Mapping[str, Any]

MMLU_PRO_KEYS = ('question_id', 'question', 'options', 'answer', 'answer_index', 'cot_content', 'category', 'src')
LETTERS = 'ABCDEFGHIJ'
NO_OPTION = 'N/A'  # pads the options to ten in early revisions of MMLU-Pro
MATH_KEYS = ('problem', 'level', 'type', 'solution')
SUBJECTS = {
    'algebra': 'Algebra',
    'counting_and_probability': 'Counting & Probability',
    'geometry': 'Geometry',
    'intermediate_algebra': 'Intermediate Algebra',
    'number_theory': 'Number Theory',
    'prealgebra': 'Prealgebra',
    'precalculus': 'Precalculus',
}


def convert(content: bytes, file: DataFile, source: str) -> bytes:
    """Return the content of a data file, JSON lines, converted from the published parquet file.

    `source` is its path or URL, for messages. Raise DataError with every malformed row.
    """
    keys, parse = CONVERTERS[file.converter or '']
    lines, problems = [], []
    for number, row in enumerate(parquet_rows(content, keys, source), start=1):
        try:
            lines.append(f'{json.dumps(parse(row, file), ensure_ascii=False)}\n')
        except RowError as error:
            problems.append(error.at(f'{source}: row {number}'))
    if problems:
        raise DataError(problems)
    return ''.join(lines).encode()


def parquet_rows(content: bytes, columns: Sequence[str], source: str) -> Iterator[Row]:
    """Yield these columns of each row of a parquet file. Raise DataError."""
    from pyarrow import BufferReader, parquet  # type: ignore[import-untyped]

    try:
        with parquet.ParquetFile(BufferReader(content)) as table:
            found = table.schema_arrow.names
            missing = [column for column in columns if column not in found]
            if missing:
                raise DataError(f'{source}: the columns {", ".join(missing)} are missing; found: {", ".join(found)}')
            for batch in table.iter_batches(columns=list(columns)):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f'{source}: cannot be read as parquet: {error}') from error


def mmlu_pro_row(row: Row, file: DataFile) -> Row:
    """Return a row of MMLU-Pro without filler options, with `answer` and `answer_index` adjusted."""
    number = field_value(row, 'question_id')
    if not isinstance(number, int):
        raise RowError(f'question_id is {describe(number)}; allowed: a whole number')
    for key in ('question', 'category', 'src'):
        text_field(row, key, allow_empty=False)
    text_field(row, 'cot_content')
    options = texts_field(row, 'options')
    kept = [place for place, option in enumerate(options) if option != NO_OPTION]
    letter, index = text_field(row, 'answer'), field_value(row, 'answer_index')
    allowed = {LETTERS[place]: place for place in kept if place < len(LETTERS)}
    if letter not in allowed or index not in kept:
        raise RowError(f'answer is {letter!r}, answer_index {describe(index)}; allowed: {", ".join(allowed)}')
    changed = {
        'options': [options[place] for place in kept],
        'answer': LETTERS[kept.index(allowed[letter])],
        'answer_index': kept.index(index),
    }
    return {key: changed.get(key, row[key]) for key in MMLU_PRO_KEYS}


def math_row(row: Row, file: DataFile) -> Row:
    """Return a row of MATH unchanged. Raise RowError unless it belongs to the subject of the file."""
    for key in MATH_KEYS:
        text_field(row, key, allow_empty=False)
    subject = SUBJECTS[PurePosixPath(file.path).stem]
    if row['type'] != subject:
        raise RowError(f'type is {row["type"]!r}; allowed: {subject!r}')
    return {key: row[key] for key in MATH_KEYS}


CONVERTERS: Mapping[str, tuple[Sequence[str], Callable[[Row, DataFile], Row]]] = {
    'mmlu_pro': (MMLU_PRO_KEYS, mmlu_pro_row),
    'math': (MATH_KEYS, math_row),
}
