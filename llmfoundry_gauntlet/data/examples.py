"""Read and validate the rows of a data file as Examples, and select subsets of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.tasks import TaskSpec
from llmfoundry_gauntlet.data.clusters import cluster_of
from llmfoundry_gauntlet.data.readers import NumberedRow, RowError, field_value, read_task_rows, text_field
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.types import Example, FileSizes

SUBSET_VERSION = 2  # of the selection of subsets; stored in results
LEAST_CLUSTERS = 2  # a task needs two for a standard error


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """A task's examples, the stems of its optional files that are absent, and warnings about its data."""

    examples: Sequence[Example]
    absent: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read_examples(task: TaskSpec, data_root: str | Path, parse: Callable[[Mapping[str, Any]], Any]) -> list[Example]:
    """Read all examples of a task in file order. Raise DataError with every malformed row.

    Top-level strings are stripped unless the task sets `strip_dataset: false`; strings in lists are not
    (llm-foundry 0.22, `eval/datasets/utils.py:strip_data`).
    """

    def example_of(number: int, row: Mapping[str, Any]) -> Example:
        if task.strips_rows:
            row = {key: value.strip() if isinstance(value, str) else value for key, value in row.items()}
        if task.cluster_key is None:
            cluster = cluster_of(Path(task.dataset_uri).name.partition('.jsonl')[0], row)
        else:
            cluster = cluster_of('', {task.cluster_key: field_value(row, task.cluster_key)})
        return Example(
            row=number,
            category=text_field(row, 'category', allow_empty=False) if task.has_categories else None,
            content=parse(row),
            digest=digest_of(row),
            cluster=cluster,
        )

    problems: list[str] = []
    source, rows = read_task_rows(task, data_root, problems)
    examples = parse_rows(source, rows, example_of, problems)
    problems.extend(uneven_choices(source, examples))
    if problems:
        raise DataError(problems)
    return examples


def parse_rows(
    source: str,
    rows: Iterable[NumberedRow],
    parse: Callable[[int, Mapping[str, Any]], Example],
    problems: list[str],
) -> list[Example]:
    """Return the rows as examples; add those for which `parse` raises RowError to `problems`, with file and line."""
    examples = []
    for number, row in rows:
        try:
            if not isinstance(row, Mapping):
                raise RowError(f'is {type(row).__name__}; allowed: a JSON object')
            examples.append(parse(number, row))
        except RowError as error:
            problems.append(error.at(f'{source}:{number + 1}'))
    return examples


def digest_of(row: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a row's content regardless of key order."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def uneven_choices(source: str, examples: list[Example]) -> list[str]:
    """Return a problem for each row whose number of choices differs from the first row's."""
    counts = [(example.row, getattr(example.content, 'num_choices', 1)) for example in examples]
    return [
        f'{source}:{row + 1}: has {count} choices; allowed: {counts[0][1]}, as in line {counts[0][0] + 1}'
        for row, count in counts
        if count != counts[0][1]
    ]


def subset(examples: Sequence[Example], num_items: int | None) -> list[Example]:
    """Return the first `num_items` examples of `in_turns`, in their original order; all if `num_items` is None."""
    if num_items is None or num_items >= len(examples):
        return list(examples)
    return [examples[place] for place in sorted(in_turns(examples)[:num_items])]


def file_sizes(examples: Iterable[Example]) -> FileSizes:
    """Return the number of rows of each cluster, by category, in ascending order."""
    import numpy as np

    counts: dict[str | None, Counter[str]] = {}
    for example in examples:
        counts.setdefault(example.category, Counter())[cluster_name(example)] += 1
    return {category: np.sort(np.array([*of.values()], np.int64)) for category, of in counts.items()}


def cluster_name(example: Example) -> str:
    """Return the name of an example's cluster; without a cluster, a digest of the example's file and row."""
    return example.cluster or hashlib.sha256(repr((example.file, example.row)).encode()).hexdigest()


def in_turns(examples: Sequence[Example]) -> list[int]:
    """Return the positions of the examples in the order in which subsets take them (SUBSET_VERSION).

    Within a category every cluster, such as the questions on a passage, gives one example, then every cluster another,
    because scores are most precise with examples from many clusters. Clusters are ordered by name, a digest of the
    rows' content, and examples within a cluster by a digest of their own content. Categories alternate by the share of
    each taken so far. The order of the rows does not matter.
    """
    clusters: dict[tuple[str | None, str], list[int]] = {}
    for place, example in enumerate(examples):
        clusters.setdefault((example.category, cluster_name(example)), []).append(place)
    rounds: dict[str | None, list[tuple[int, str, int]]] = {}
    for (category, name), places in clusters.items():
        ordered = sorted(places, key=lambda place: (examples[place].digest, examples[place].file or '', place))
        rounds.setdefault(category, []).extend((turn, name, place) for turn, place in enumerate(ordered))
    turns = [
        ((number + 0.5) / len(found), name, place)
        for found in rounds.values()
        for number, (_, name, place) in enumerate(sorted(found))
    ]
    return [place for _, _, place in sorted(turns)]


def least_items(examples: Sequence[Example], order: Sequence[int]) -> int:
    """Return the least number of examples, taken in this order, that cover two clusters and every category."""
    categories = {example.category for example in examples}
    num_clusters = min(LEAST_CLUSTERS, len({cluster_name(example) for example in examples}))
    seen: set[str | None] = set()
    clusters: set[str] = set()
    for count, place in enumerate(order, 1):
        seen.add(examples[place].category)
        clusters.add(cluster_name(examples[place]))
        if len(clusters) >= num_clusters and seen == categories:
            return count
    return len(order)
