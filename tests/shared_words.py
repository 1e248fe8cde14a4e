"""Sequences of 13 words that evaluation rows share with another text.

A match of 13 words is what the GPT-3 report calls an overlap (arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from paths import ROOT

from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.data.score_rows import FILES, read_score_rows
from llmfoundry_gauntlet.evaluation.suite import load_suite

NUM_WORDS = 13
SAMPLE_DATA = str(ROOT / 'eval_data')
TASKS = ROOT / 'yamls/tasks/gauntlet_v0.1.yaml'

Sequences = set[int]


@dataclass(frozen=True)
class Row:
    """A row of the sample data, and the sequences of its text that are not those of its file's template."""

    file: str
    line: int
    sequences: Sequences


def sequences_of(text: str) -> Sequences:
    """Return a hash of every 13 consecutive words, which are letters and digits in lower case."""
    words = re.findall(r'[^\W_]+', text.lower())
    return {hash(tuple(words[start : start + NUM_WORDS])) for start in range(len(words) - NUM_WORDS + 1)}


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings anywhere in a JSON value, except for keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


def text_of(line: str) -> str:
    return '\n'.join(strings_in(json.loads(line)))


def texts_of_rows(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the text of each row of files of JSON lines."""
    for path in paths:
        with path.open(encoding='utf-8') as lines:
            yield from map(text_of, lines)


@cache
def sample_rows() -> tuple[Row, ...]:
    """Return all rows of the sample data that have 13 words or more."""
    sources = {**sources_of_tasks(), **sources_of_score()}
    rows = chain.from_iterable(rows_of_file(path, sources_of_rows) for path, sources_of_rows in sources.items())
    return tuple(row for row in rows if row.sequences)


def sources_of_tasks() -> dict[str, list[str]]:
    """Return the source, such as a passage, of each row of the Gauntlet's files."""
    tasks = load_suite(read_yaml(TASKS)['icl_tasks']).tasks
    return {task.dataset_uri: [example.cluster for example in task.read(SAMPLE_DATA).examples] for task in tasks}


def sources_of_score() -> dict[str, list[str]]:
    """Return the source of each row of SCORE's files."""
    sources = {}
    for dataset, paths in FILES.items():
        spec = load_suite(None, None, {'dataset': dataset}).tasks[-1].spec
        by_stem: dict[str | None, list[str]] = defaultdict(list)
        for example in read_score_rows(spec, SAMPLE_DATA).examples:
            by_stem[example.file].append(example.cluster)
        for path in paths:
            stem = Path(path).stem if len(paths) > 1 else None
            sources[path] = by_stem[stem]
    return sources


def rows_of_file(uri: str, sources: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a file; sequences in more than two sources, and a tenth of them, are its template."""
    lines = Path(SAMPLE_DATA, uri).read_text(encoding='utf-8').splitlines()
    sequences = [sequences_of(text_of(line)) for line in lines]
    by_source: dict[str, Sequences] = defaultdict(set)
    for source, of_row in zip(sources, sequences, strict=True):
        by_source[source] |= of_row
    num_sources = Counter(chain.from_iterable(by_source.values()))
    limit = max(2, len(by_source) / 10)
    template = {sequence for sequence, count in num_sources.items() if count > limit}
    for line, of_row in enumerate(sequences, start=1):
        yield Row(uri, line, of_row - template)


def shares_found(texts: Iterable[str]) -> dict[tuple[str, int], float]:
    """Return the share of its sequences that are in the texts, by file and line of each row that has one."""
    wanted = set().union(*(row.sequences for row in sample_rows()))
    present: Sequences = set()
    for text in texts:
        present |= wanted & sequences_of(text)
    counts = {(row.file, row.line): len(row.sequences & present) / len(row.sequences) for row in sample_rows()}
    return {place: share for place, share in counts.items() if share}
