"""Rows of data files as examples, and subsets: the same always, nested, every category in proportion."""

from __future__ import annotations

import functools
import http.server
import random
import threading
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.data.examples import subset
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.types import Example

ROW = {'query': 'Sky?', 'choices': ['blue', 'green'], 'gold': 0}
PASSAGE = {'context': 'two and two are', 'continuation': 'four'}
SCHEMA = {'context_options': ['a', 'b'], 'continuation': 'c', 'gold': 1}
CATEGORIES = st.lists(st.sampled_from([None, 'a', 'b', 'c', 'd']), max_size=60)
COUNTS = st.integers(1, 70)


def task(kind: str, uri: str = 'rows.jsonl', **keys):
    entry = {'label': 't', 'dataset_uri': uri, 'num_fewshot': [0], 'icl_task_type': kind, **keys}
    return load_suite([entry]).tasks[0]


def read(folder, kind: str, **keys):
    return task(kind, **keys).read(folder).examples


def problems(folder, kind: str, **keys) -> list[str]:
    with pytest.raises(DataError) as raised:
        read(folder, kind, **keys)
    return [line.replace(f'{folder}/', '') for line in raised.value.problems]


def test_rows_keep_line_numbers(write_jsonl, tmp_path):
    write_jsonl('rows.jsonl', [ROW, '', ROW])
    assert [example.row for example in read(tmp_path, 'multiple_choice')] == [0, 2]


def test_a_category_is_read_only_if_the_task_has_categories(write_jsonl, tmp_path):
    write_jsonl('rows.jsonl', [{**ROW, 'category': 'x'}])
    (without,) = read(tmp_path, 'multiple_choice')
    (example,) = read(tmp_path, 'multiple_choice', has_categories=True)
    assert (without.category, example.category) == (None, 'x')


def test_top_level_strings_are_stripped_unless_the_task_says_otherwise(write_jsonl, tmp_path):
    write_jsonl('rows.jsonl', [{**ROW, 'query': ' Sky? ', 'choices': [' blue', 'green']}])

    (stripped,) = read(tmp_path, 'multiple_choice')
    (unchanged,) = read(tmp_path, 'multiple_choice', strip_dataset=False)

    assert stripped.content.query == 'Sky?'
    assert unchanged.content.query == ' Sky? '
    assert stripped.content.choices == unchanged.content.choices == (' blue', 'green')


def test_malformed_rows_are_listed_with_file_and_line(write_jsonl, tmp_path):
    rows = [
        ROW,
        {**ROW, 'gold': 2},
        {**ROW, 'gold': True},
        {**ROW, 'gold': '0'},
        {**ROW, 'choices': 'blue'},
        {**ROW, 'choices': ['blue', '']},
        {**ROW, 'query': 7},
        {'querry': 'Sky?', 'choices': ['a', 'b'], 'gold': 0},
        {**ROW, 'choices': ['a', 'b', 'c'], 'gold': 3},
        [1],
    ]
    write_jsonl('rows.jsonl', rows)
    assert problems(tmp_path, 'multiple_choice') == [
        'rows.jsonl:2: gold is 2 but there are 2 choices (0..1)',
        'rows.jsonl:3: gold is True; allowed: a whole number 0..1',
        "rows.jsonl:4: gold is '0'; allowed: a whole number 0..1",
        "rows.jsonl:5: choices is 'blue'; allowed: a list of two or more texts",
        "rows.jsonl:6: choices[1] is ''; allowed: a non-empty text",
        'rows.jsonl:7: query is 7; allowed: text',
        "rows.jsonl:8: the key 'query' is missing, did you mean 'querry'?",
        'rows.jsonl:9: gold is 3 but there are 3 choices (0..2)',
        'rows.jsonl:10: is list; allowed: a JSON object',
    ]


@pytest.mark.parametrize(
    ('kind', 'rows', 'keys', 'problem'),
    [
        ('schema', [], {}, 'rows.jsonl: has no rows; allowed: one JSON object per line'),
        ('schema', [SCHEMA], {'uri': 'none.jsonl'}, 'none.jsonl: there is no such data file'),
        ('schema', [{**SCHEMA, 'gold': -1}], {}, 'rows.jsonl:1: gold is -1 but there are 2 choices (0..1)'),
        ('language_modeling', [{**PASSAGE, 'continuation': ' '}], {}, 'rows.jsonl:1: continuation is empty'),
        (
            'language_modeling',
            [{**PASSAGE, 'category': 'sums'}, PASSAGE],
            {'has_categories': True},
            "rows.jsonl:2: the key 'category' is missing; found: context, continuation",
        ),
    ],
)
def test_other_faults_are_named(write_jsonl, tmp_path, kind: str, rows: list, keys: dict, problem: str):
    write_jsonl('rows.jsonl', rows)
    (found,) = problems(tmp_path, kind, **keys)
    assert found.startswith(problem)


@pytest.mark.parametrize('prefix', ['', 'eval/local_data/', 'scripts/eval/local_data/'])
def test_upstream_path_prefixes_are_dropped(write_jsonl, tmp_path, prefix: str):
    write_jsonl('world/rows.jsonl', [PASSAGE])
    assert len(read(tmp_path, 'language_modeling', uri=f'{prefix}world/rows.jsonl')) == 1


def test_a_task_may_rename_the_keys_of_a_row(write_jsonl, tmp_path):
    write_jsonl('rows.jsonl', [{'q': 'Sky?', 'answers': ['blue', 'green'], 'gold': 0}])
    (example,) = read(tmp_path, 'multiple_choice', context_key='q', choices_key='answers')
    assert example.content.choices == ('blue', 'green')


def test_rows_are_read_over_http(write_jsonl, tmp_path):
    write_jsonl('rows.jsonl', [PASSAGE])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f'http://127.0.0.1:{server.server_port}'
        assert read(tmp_path, 'language_modeling', uri=f'{address}/rows.jsonl')[0].content.continuation == 'four'
        assert 'no such file' in problems(tmp_path, 'language_modeling', uri=f'{address}/none.jsonl')[0]
        server.shutdown()


def test_a_row_may_name_its_cluster(write_jsonl, tmp_path):
    rows = [{'query': f'{n}?', 'choices': ['a', 'b'], 'gold': 0, 'page': page} for n, page in enumerate([7, 7, '7', 8])]
    write_jsonl('rows.jsonl', rows)
    examples = read(tmp_path, 'multiple_choice', cluster_key='page')
    first, second, third, fourth = (example.cluster for example in examples)
    assert first == second and len({first, third, fourth}) == 3
    (problem, *_) = problems(tmp_path, 'multiple_choice', cluster_key='pages')
    assert problem.startswith("rows.jsonl:1: the key 'pages' is missing, did you mean 'page'")


def examples(categories: list[str | None]) -> list[Example]:
    return [Example(row=row, content=row, category=category) for row, category in enumerate(categories)]


@given(categories=CATEGORIES, count=COUNTS)
def test_a_subset_has_the_requested_size_in_the_original_order(categories, count):
    every = examples(categories)
    taken = subset(every, count)
    assert len(taken) == min(count, len(every))
    assert taken == [example for example in every if example in taken]
    assert subset(every, None) == every


@given(categories=CATEGORIES, counts=st.tuples(COUNTS, COUNTS))
def test_subsets_are_nested(categories, counts):
    every = examples(categories)
    few, more = sorted(counts)
    rows = {example.row for example in subset(every, more)}
    assert {example.row for example in subset(every, few)} <= rows


@given(categories=CATEGORIES, count=COUNTS)
def test_categories_are_sampled_in_proportion(categories, count):
    """Each category's number is within half an item of the same share."""
    num_taken = Counter(example.category for example in subset(examples(categories), count))
    num_rows = Counter(categories)

    # The shares that each category allows; one share is in the ranges of all.
    least_shares = [(num_taken[category] - 0.5) / size for category, size in num_rows.items()]
    most_shares = [(num_taken[category] + 0.5) / size for category, size in num_rows.items()]
    assert max(least_shares, default=0) <= min(most_shares, default=0) + 1e-12


@given(categories=CATEGORIES, count=COUNTS, seed=st.integers(0, 5))
def test_row_order_does_not_change_the_subset(categories, count, seed):
    every = examples(categories)
    shuffled = random.Random(seed).sample(every, len(every))
    assert {example.row for example in subset(shuffled, count)} == {example.row for example in subset(every, count)}


def test_the_chosen_rows_are_fixed_across_versions():
    """By SHA-256 of file and row: a change here breaks curves over checkpoints. Computed by sha256sum."""
    every = [Example(row=row, content=None, file='f') for row in range(20)]
    assert [example.row for example in subset(every, 4)] == [2, 8, 9, 16]


def test_equal_row_numbers_of_two_files_are_sampled_independently():
    every = [Example(row=row, content=None, file=file) for file in 'ab' for row in range(30)]
    taken = subset(every, 20)
    rows = {file: {example.row for example in taken if example.file == file} for file in 'ab'}
    assert rows['a'] != rows['b']
    assert len(taken) == 20


def passages(sizes: list[int], category: str | None = None) -> list[Example]:
    """Return `sizes[i]` questions on passage i."""
    names = [f'{index:016x}' for index, size in enumerate(sizes) for _ in range(size)]
    return [Example(row=row, content=None, category=category, cluster=name) for row, name in enumerate(names)]


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=20), count=st.integers(1, 60))
def test_every_cluster_gives_an_item_before_any_gives_another(sizes, count):
    every = passages(sizes)
    taken = Counter(example.cluster for example in subset(every, count))
    assert taken.total() == min(count, len(every))
    most = max(taken.values())
    for index, size in enumerate(sizes):
        assert taken[f'{index:016x}'] >= min(size, most - 1)


def test_items_of_a_cluster_are_taken_by_content():
    every = [replace(one, digest=letter * 16) for one, letter in zip(passages([3]), 'cab', strict=True)]
    assert [one.row for one in subset(every, 1)] == [1]
    assert [one.row for one in subset(every[::-1], 2)] == [2, 1]
