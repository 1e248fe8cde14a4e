import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.tasks.base import fewshot_indices, fixed_indices, with_shots
from llmfoundry_gauntlet.types import Example

# llm-foundry 0.22.0's get_fewshot_sample_idxs with one Random(1234), 12 rows, 3 shots; the order is the set's.
RECORDED = [
    (1, 9, 7), (0, 10, 5), (0, 10, 3), (0, 9, 5), (9, 11, 7), (1, 2, 11),
    (0, 1, 11), (8, 1, 3), (1, 10, 7), (8, 10, 1), (0, 9, 4), (8, 1, 4),
]  # fmt: skip


def test_shots_are_those_of_the_reference_in_its_order():
    assert list(fewshot_indices(12, 3, seed=1234)) == RECORDED
    assert list(fewshot_indices(3, 10, seed=1234)) == [(1, 2), (0, 2), (0, 1)]


@pytest.mark.parametrize('num_shots', [1, 3, 10, 100])
def test_an_example_is_never_its_own_shot_and_shots_are_distinct(num_shots: int):
    for index, shots in enumerate(fewshot_indices(12, num_shots, seed=5)):
        assert index not in shots
        assert len(set(shots)) == len(shots)
        assert len(shots) == min(num_shots, 11)


def test_without_shots_or_other_examples_there_are_none():
    assert list(fewshot_indices(3, 0, seed=1)) == [(), (), ()]
    assert list(fewshot_indices(1, 10, seed=1)) == [()]


def test_shots_are_from_the_category_and_every_category_restarts_the_seed():
    examples = [Example(row=i, content=i, category='ab'[i % 2]) for i in range(20)]
    pairs = list(with_shots(examples, 4, seed=1234))
    assert [example.category for example, _ in pairs] == ['a'] * 10 + ['b'] * 10
    assert all(shot.category == example.category for example, shots in pairs for shot in shots)
    positions = [[shot.row // 2 for shot in shots] for _, shots in pairs]
    assert positions[:10] == positions[10:]


def fixed(questions: str, num_shots: int, seed: int = 5) -> list[str]:
    """Return the shots of each question as text; a letter is a question."""
    return [''.join(questions[i] for i in shots) for shots in fixed_indices(questions, num_shots, seed=seed)]


def test_fixed_shots_are_drawn_once_and_a_spare_replaces_the_item_itself():
    """Those of 4, 5, 2 and 7 are drawn: the shots e, f, c and the spare h."""
    assert random.Random(5).sample(range(8), 4) == [4, 5, 2, 7]
    assert fixed('abcdefgh', 3) == ['efc', 'efc', 'efh', 'efc', 'hfc', 'ehc', 'efc', 'efc']


def test_fixed_shots_never_contain_the_item_even_with_duplicate_rows():
    """The distinct questions are first at 0, 1, 3 and 4; the draw is the shots d, e, b and the spare a."""
    assert random.Random(5).sample([0, 1, 3, 4], 4) == [3, 4, 1, 0]
    assert fixed('abadebdd', 3) == ['deb', 'dea', 'deb', 'aeb', 'dab', 'dea', 'aeb', 'aeb']


@given(questions=st.text('abcdef', min_size=1, max_size=20), num_shots=st.integers(0, 8), seed=st.integers(0, 50))
def test_fixed_shots_are_the_same_for_all_items_they_do_not_contain(questions: str, num_shots: int, seed: int):
    rows = fixed(questions, num_shots, seed)
    others = len(set(questions)) - 1
    for question, shots in zip(questions, rows, strict=True):
        assert question not in shots
        assert len(shots) == len(set(shots)) == min(num_shots, others)
    common = {shots for question, shots in zip(questions, rows, strict=True) if question not in ''.join(rows)}
    assert len(common) <= 1


def test_fixed_shots_are_fewer_if_there_are_too_few_others():
    assert [set(shots) for shots in fixed('abc', 10)] == [{'b', 'c'}, {'a', 'c'}, {'a', 'b'}]
    assert fixed('aaaa', 10) == ['', '', '', '']
    assert fixed('abc', 0) == ['', '', '']


def test_fixed_shots_are_drawn_within_the_category():
    examples = [Example(row=i, content=f'{i}', category='ab'[i % 2]) for i in range(20)]
    pairs = list(with_shots(examples, 4, seed=1234, question_of=lambda example: example.content))
    assert all(shot.category == example.category for example, shots in pairs for shot in shots)
    prefixes = [tuple(shot.row // 2 for shot in shots) for _, shots in pairs]
    assert prefixes[:10] == prefixes[10:]
    assert len(set(prefixes)) == 5  # the common one, and one for each shot
