"""Where a task's data file is, and its rows as plain mappings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.errors import DataError

UPSTREAM_DATA_FOLDERS = ('eval/local_data/', 'scripts/eval/local_data/')
HUGGING_FACE = 'hf://'

NumberedRow = tuple[int, Any]  # 0-based line number, parsed JSON


def locate(uri: str, data_root: str | Path) -> Path:
    """The file that a `dataset_uri` names: below `data_root`, else from the working directory.

    Upstream's prefixes are dropped first. Raises DataError naming every place that was looked at.
    """
    name = next((uri[len(prefix) :] for prefix in UPSTREAM_DATA_FOLDERS if uri.startswith(prefix)), uri)
    candidates = [Path(data_root) / name, Path(name)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = ', '.join(dict.fromkeys(str(candidate) for candidate in candidates))
    raise DataError(f'{uri}: there is no such data file (looked for {looked}); set data_root to its folder')


def read_task_rows(task: TaskSpec, data_root: str | Path) -> tuple[str, list[NumberedRow]]:
    """How the task's data are called in messages, and all rows with their 0-based line numbers."""
    uri = task.dataset_uri
    if uri.startswith(HUGGING_FACE):
        source, rows = uri, list(enumerate(hugging_face_rows(task)))
    else:
        source = uri if '://' in uri else str(locate(uri, data_root))
        rows = read_rows(source)
    if not rows:
        raise DataError(f'{source}: has no rows; allowed: one JSON object a line')
    return source, rows


def read_rows(source: str) -> list[NumberedRow]:
    """All rows of a JSON lines file: a path, or a URL of a file system that fsspec knows (https, s3, gs, oci)."""
    import fsspec

    try:
        with fsspec.open(source, 'rt', encoding='utf-8') as lines:
            return list(json_lines(lines, source))
    except (OSError, ImportError, ValueError) as error:
        raise DataError(f'{source}: cannot be read as UTF-8 text: {error}') from error


def json_lines(lines: Iterator[str], source: str) -> Iterator[NumberedRow]:
    """The JSON value of each line that is not blank. Raises DataError with all malformed lines."""
    problems = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            problems.append(f'{source}:{number + 1}: malformed JSON: {error.msg} at column {error.colno}')
    if problems:
        raise DataError(problems)


def hugging_face_rows(task: TaskSpec) -> list[Mapping[str, Any]]:
    """Rows of a data set on the Hugging Face hub, its columns joined as `hf_parsing_map` says."""
    import datasets

    name = task.dataset_uri[len(HUGGING_FACE) :]
    try:
        data = datasets.load_dataset(name, **(task.hf_loading_vars or {}))
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f'{task.dataset_uri}: cannot be loaded: {error}') from error
    if isinstance(data, dict):
        raise DataError(f'{task.dataset_uri}: has the splits {", ".join(data)}; name one in hf_loading_vars.split')
    if not task.hf_parsing_map:
        return list(data)
    return [
        {key: ' '.join(str(row[column]) for column in columns) for key, columns in task.hf_parsing_map.items()}
        for row in data
    ]
