"""The rows that come with the project: every file, in the form of the published one, with none of its sentences."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.data.clusters import RULES
from llmfoundry_gauntlet.data.manifest import read_manifest

FOLDER = ROOT / 'eval_data'
LEAST_ROWS = 12
SHINGLE_WORDS = 8
FILES = [file.path.removesuffix('.jsonl') for file in read_manifest() if not file.path.startswith('score/')]
LEAST_SHARE, GREATEST_SHARE = 0.1, 0.6  # of the rows whose right choice stands in one place

# The words of a form are the published files'; what stands around them is ours.
FRAMES = re.compile(
    r'Below is a story followed by .*? the previous questions\.|Is the following statement true or false\? Output .*?\n'
    r"|Let's do some find-the-common-.*? in common\?|Given a sentence, select the correct language among the choices"
    r'|The following paragraphs each describe .*? within each paragraph\.|What is the moral of this story\?'
    r'|Which of the following (statements is consistent with the situation above|sentences best characterizes)'
    r'|Who does the pronoun "\w+" refer to in the previous sentence\? A:|A\. yes\nB\. no\nC\. maybe'
    r'|Does the passage below contain sensitive information\?\nPassage:|Length of longest common subsequence:'
    r'|Complete the rest of the sequence, making sure that the parentheses are closed properly\.'
    r'|Given two strings, determine the length of the longest common subsequence\.|#include ?<\w+(\.h)?>'
    r'|Determine whether the given sequence of parentheses is properly matched\.|using namespace std;',
    re.DOTALL,
)
RARE_SOURCES = {'mmlu', 'agi_eval_sat_math', 'math_qa'}  # few published rows have a passage, or are long enough


@functools.cache
def rows_of(name: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f'{name}.jsonl').read_text(encoding='utf-8').split('\n')[:-1]]


def published(name: str) -> list[dict[str, Any]]:
    folder = SHARED_DATA / 'local_data'
    if not (folder / f'{name}.jsonl').is_file():
        pytest.skip(f'the published {name}.jsonl is not here')
    return rows_of(name, folder)


def test_the_57_tasks_have_a_file_each_and_score_its_15():
    tasks = read_yaml(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')['icl_tasks']
    assert len(FILES) == len(tasks) == 57
    assert {task['dataset_uri'].removesuffix('.jsonl') for task in tasks} == set(FILES)
    there = {str(path.relative_to(FOLDER)).removesuffix('.jsonl') for path in FOLDER.rglob('*.jsonl')}
    score = {name for name in there if name.startswith('score/')}
    assert there - score == set(FILES)
    assert len(score) == 15


@pytest.mark.parametrize('name', FILES)
def test_every_file_has_twelve_rows_or_more_with_the_keys_of_the_published_ones(name: str):
    assert len(rows_of(name)) >= LEAST_ROWS
    assert len({tuple(row) for row in rows_of(name)}) == 1
    assert {tuple(row) for row in rows_of(name)} == {tuple(row) for row in published(name)}


def test_every_line_is_json_in_one_form_without_signs_that_cannot_be_seen():
    for path in FOLDER.rglob('*.jsonl'):
        for line in path.read_bytes().decode('utf-8').splitlines(keepends=True):
            assert line == json.dumps(json.loads(line), ensure_ascii=False) + '\n', path.name
            assert not re.search(r'[\u0080-\u00a0\u200b-\u200f\ufeff\ufffd]', line), path.name


@pytest.mark.parametrize('name', [name for name in FILES if 'gold' in rows_of(name)[0]])
def test_right_choices_are_spread_over_their_places(name: str):
    rows = rows_of(name)
    (num_choices,) = {len(row.get('choices') or row['context_options']) for row in rows}
    golds = Counter(row['gold'] for row in rows)
    assert sorted(golds) == list(range(num_choices))
    for count in golds.values():
        assert LEAST_SHARE * len(rows) <= count <= GREATEST_SHARE * len(rows)


@pytest.mark.parametrize('name', [name for name in FILES if Path(name).name in RULES.keys() - RARE_SOURCES])
def test_the_rule_of_a_file_finds_the_source_of_each_row(name: str):
    for row in rows_of(name):
        assert RULES[Path(name).name](row), row


@pytest.mark.parametrize('task', ['world_knowledge/jeopardy_all', 'world_knowledge/mmlu', 'safety/bbq'])
def test_categories_are_published_ones_and_equally_large(task: str):
    counts = Counter(row['category'] for row in rows_of(task))
    assert len(counts) >= 4 and set(counts.values()) == {4}
    assert set(counts) <= {row['category'] for row in published(task)}


def shingles(text: str) -> Iterator[str]:
    """All runs of so many words that are not numbers or single letters alone, outside of the words of the form."""
    for part in FRAMES.split(text):
        words = re.findall(r'\w+', (part or '').casefold())
        for start in range(len(words) - SHINGLE_WORDS + 1):
            run = words[start : start + SHINGLE_WORDS]
            if sum(len(word) > 1 and word.isalpha() for word in run) > SHINGLE_WORDS / 2:
                yield ' '.join(run)


def texts_in(value: object) -> Iterator[str]:
    """The strings anywhere inside a JSON value, but not the keys of mappings, nor the tests of programs."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        parts = value if isinstance(value, list) else [value[key] for key in value if not key.startswith('test')]
        for part in parts:
            yield from texts_in(part)


def common_shingles(ours: list[Any], published: list[Any]) -> tuple[set[str], set[str]]:
    """All runs in our rows, and those of them that occur in published ones."""
    runs = {run for text in texts_in(ours) for run in shingles(text)}
    beginnings, common = {tuple(run.split()[:3]) for run in runs}, set()
    for text in texts_in(published):
        words = re.findall(r'\w+', text.casefold())
        for start, beginning in enumerate(zip(words, words[1:], words[2:], strict=False)):
            if beginning in beginnings:
                common.add(' '.join(words[start : start + SHINGLE_WORDS]))
    return runs, runs & common


@pytest.mark.slow
@pytest.mark.parametrize('name', FILES)
def test_no_eight_words_in_a_row_are_those_of_the_published_file(name: str):
    assert common_shingles(rows_of(name), published(name))[1] == set()


def test_the_page_about_these_rows_counts_them():
    page = (ROOT / 'docs' / 'models.md').read_text(encoding='utf-8')
    said = {name: int(rows) for name, rows in re.findall(r'^\| `(\w+)` \| \d+ \| (\d+) \|$', page, re.MULTILINE)}
    names = [str(path.relative_to(FOLDER)).removesuffix('.jsonl') for path in FOLDER.rglob('*.jsonl')]
    rows = Counter(name.split('/')[0] for name in names for _ in rows_of(name))
    assert said == rows
    assert f'{rows.total():,} in {len(names)} files' in page
