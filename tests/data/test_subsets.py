"""Fewer items: the same always, a smaller number's among a larger one's, every category in proportion."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.data.examples import subset
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.types import Example

CATEGORIES = st.lists(st.sampled_from([None, 'a', 'b', 'c', 'd']), max_size=60)
SHARES = st.floats(0, 1)  # of all items


def number(share: float, categories: list[str | None]) -> int:
    """So many of all items, one at least."""
    return max(1, round(share * len(categories)))


def examples(categories: list[str | None]) -> list[Example]:
    return [Example(row=row, content=row, category=category) for row, category in enumerate(categories)]


@given(categories=CATEGORIES, count=st.integers(1, 70))
def test_a_subset_has_the_requested_size_in_the_original_order(categories, count):
    every = examples(categories)
    taken = subset(every, count)
    assert len(taken) == min(count, len(every))
    assert taken == [example for example in every if example in taken]
    assert subset(every, None) == every


@given(categories=CATEGORIES, shares=st.tuples(SHARES, SHARES))
def test_subsets_are_nested(categories, shares):
    every = examples(categories)
    few, more = sorted(number(share, categories) for share in shares)
    rows = {example.row for example in subset(every, more)}
    assert {example.row for example in subset(every, few)} <= rows


@given(categories=CATEGORIES, share=SHARES)
def test_categories_are_sampled_in_proportion(categories, share):
    """There is one share of which the number from each category differs by half an item at most."""
    taken = Counter(example.category for example in subset(examples(categories), number(share, categories)))
    sizes = Counter(categories)
    lowest = max(((taken[category] - 0.5) / size for category, size in sizes.items()), default=0)
    highest = min(((taken[category] + 0.5) / size for category, size in sizes.items()), default=0)
    assert lowest <= highest + 1e-12


@given(categories=CATEGORIES, share=SHARES, seed=st.integers(0, 5))
def test_row_order_does_not_change_the_subset(categories, share, seed):
    every, count = examples(categories), number(share, categories)
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


def test_row_content_decides_rather_than_position(write_jsonl, tmp_path):
    rows = [{'query': f'{n}?', 'choices': ['a', 'b'], 'gold': n % 2} for n in range(40)]
    chosen = []
    for name, lines in (('rows', rows), ('others', rows[::-1])):
        write_jsonl(f'{name}.jsonl', lines)
        entry = {'label': 't', 'dataset_uri': f'{name}.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}
        data = load_data(decode_settings({'tasks': [entry], 'data_root': str(tmp_path), 'subset_items': 10}))
        chosen.append({example.content.query for example in data.asked('t/0-shot')})
    assert chosen[0] == chosen[1] and len(chosen[0]) == 10
