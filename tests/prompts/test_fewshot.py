import pytest

from llmfoundry_gauntlet.prompts.fewshot import fewshot_indices, with_shots
from llmfoundry_gauntlet.values import Example

# llm-foundry 0.22.0's get_fewshot_sample_idxs with one Random(1234), 12 rows, 3 shots; the order is the set's.
RECORDED = [
    (1, 9, 7), (0, 10, 5), (0, 10, 3), (0, 9, 5), (9, 11, 7), (1, 2, 11),
    (0, 1, 11), (8, 1, 3), (1, 10, 7), (8, 10, 1), (0, 9, 4), (8, 1, 4),
]  # fmt: skip


def test_shots_are_the_draws_of_the_reference_in_its_order():
    assert list(fewshot_indices(12, 3, seed=1234)) == RECORDED
    assert list(fewshot_indices(3, 10, seed=1234)) == [(1, 2), (0, 2), (0, 1)]


@pytest.mark.parametrize('num_shots', [1, 3, 10, 100])
def test_an_example_is_never_its_own_shot_and_no_shot_comes_twice(num_shots: int):
    for index, shots in enumerate(fewshot_indices(12, num_shots, seed=5)):
        assert index not in shots
        assert len(set(shots)) == len(shots)
        assert len(shots) == min(num_shots, 11)


def test_without_shots_or_other_examples_there_are_none():
    assert list(fewshot_indices(3, 0, seed=1)) == [(), (), ()]
    assert list(fewshot_indices(1, 10, seed=1)) == [()]


def test_shots_stay_inside_the_category_and_every_category_starts_anew():
    examples = [Example(row=i, content=i, category='ab'[i % 2]) for i in range(20)]
    pairs = list(with_shots(examples, 4, seed=1234))
    assert [example.category for example, _ in pairs] == ['a'] * 10 + ['b'] * 10
    assert all(shot.category == example.category for example, shots in pairs for shot in shots)
    positions = [[shot.row // 2 for shot in shots] for _, shots in pairs]
    assert positions[:10] == positions[10:]
