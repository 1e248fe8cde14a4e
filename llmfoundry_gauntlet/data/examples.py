"""Read and check the rows of a data file as Examples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.tasks import TaskSpec
from llmfoundry_gauntlet.data.clusters import cluster_of
from llmfoundry_gauntlet.data.collection import paused_collection
from llmfoundry_gauntlet.data.fields import RowError, field_value, text_field
from llmfoundry_gauntlet.data.files import read_task_rows
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.types import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """A task's examples, the stems of its optional files that are absent, and warnings about its data."""

    examples: Sequence[Example]
    absent: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@paused_collection()
def read_examples(task: TaskSpec, data_root: str | Path, parse: Callable[[Mapping[str, Any]], Any]) -> list[Example]:
    """Read all examples of a task in file order. Raises DataError with every malformed row.

    Top-level strings are stripped unless the task sets `strip_dataset: false`; strings in lists are not
    (llm-foundry 0.22, `eval/datasets/utils.py:strip_data`).
    """
    source, rows = read_task_rows(task, data_root)
    problems: list[str] = []
    examples = []
    for number, row in rows:
        try:
            examples.append(parse_row(number, row, task, parse))
        except RowError as error:
            problems.append(error.at(f'{source}:{number + 1}'))
    problems.extend(uneven_choices(source, examples))
    if problems:
        raise DataError(problems)
    return examples


def parse_row(number: int, row: Any, task: TaskSpec, parse: Callable[[Mapping[str, Any]], Any]) -> Example:
    """Parse one row as an Example. Raises RowError."""
    if not isinstance(row, Mapping):
        raise RowError(f'is {type(row).__name__}; allowed: a JSON object')
    if task.strips_rows:
        row = {key: value.strip() if isinstance(value, str) else value for key, value in row.items()}
    category = text_field(row, 'category', allow_empty=False) if task.has_categories else None
    key = task.cluster_key
    return Example(
        row=number,
        category=category,
        content=parse(row),
        digest=digest_of(row),
        cluster=cluster_of(stem_of(task.dataset_uri), row)
        if key is None
        else cluster_of('', {key: field_value(row, key)}),
    )


def digest_of(row: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a row's content regardless of key order."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def stem_of(uri: str) -> str:
    """Return the name of a data file without its folder and suffixes."""
    return Path(uri).name.partition('.jsonl')[0]


def uneven_choices(source: str, examples: list[Example]) -> list[str]:
    """Return a problem for each row whose number of choices differs from the first row's."""
    counts = [(example.row, getattr(example.content, 'num_choices', 1)) for example in examples]
    return [
        f'{source}:{row + 1}: has {count} choices; allowed: {counts[0][1]}, as in line {counts[0][0] + 1}'
        for row, count in counts
        if count != counts[0][1]
    ]
