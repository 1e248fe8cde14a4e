import numpy as np

from llmfoundry_gauntlet.engine.trees import (
    Tree,
    lay_out_rows,
    lay_out_stream,
)
from llmfoundry_gauntlet.types import ItemKey, ScoreRequest


def request(row: int, context: list[int], *continuations: list[int]) -> ScoreRequest:
    shared = np.array(context, dtype=np.int32)
    return ScoreRequest(
        key=ItemKey('t/0-shot', row),
        contexts=(shared,) * len(continuations),
        continuations=tuple(np.array(ids, dtype=np.int32) for ids in continuations),
    )


def tree(*requests: ScoreRequest) -> Tree:
    return Tree(requests=requests, num_tokens=0)


def test_a_tree_is_laid_out_depth_first_with_its_longest_branch_first():
    """7 8, then branches of one and three tokens: the longer comes first, so that the chain is long."""
    stream = lay_out_stream([tree(request(0, [7, 8], [1, 5], [9, 4, 3, 6]))])
    assert stream.tokens.tolist() == [7, 8, 9, 4, 3, 1]
    assert stream.depths.tolist() == [0, 1, 2, 3, 4, 2]
    assert stream.ends.tolist() == [6, 6, 5, 5, 5, 6]
    assert stream.reads.tolist() == [1, 5, 1, 2, 3, 4]
    assert stream.targets.tolist() == [1, 5, 9, 4, 3, 6]
    assert stream.tree_starts.tolist() == [0, 6]


def test_nested_contexts_continue_each_other():
    """The second context extends the first and its answer, like questions on one passage."""
    first, second = request(0, [1, 2], [3, 4]), request(1, [1, 2, 3, 4, 5], [6])
    stream = lay_out_stream([tree(first, second)])
    assert stream.tokens.tolist() == [1, 2, 3, 4, 5]
    assert stream.reads.tolist() == [1, 2, 4]


def test_sequences_without_common_prefix_are_separate_trees():
    stream = lay_out_stream([tree(request(0, [1], [2]), request(1, [3], [2]))])
    assert stream.tree_starts.tolist() == [0, 1, 2]
    assert stream.ends.tolist() == [1, 2]


def test_a_cached_prefix_only_shifts_positions():
    stream = lay_out_stream([tree(request(0, [5, 6, 7], [1, 2], [3]))], 2)
    assert stream.tokens.tolist() == [7, 1]
    assert stream.depths.tolist() == [2, 3]
    assert stream.reads.tolist() == [0, 1, 0]


def test_padded_rows_are_distinct_and_repeat_their_last_token():
    rows = lay_out_rows([request(0, [1, 2], [3], [4]), request(1, [5], [6, 7, 8])])
    assert rows.tokens.tolist() == [[1, 2, 2], [5, 6, 7]]
    assert rows.lengths.tolist() == [2, 3]
    assert rows.reads.tolist() == [1, 1, 3, 4, 5]
    assert rows.targets.tolist() == [3, 4, 6, 7, 8]
