"""The cost model of the scaling benchmark, on cases that can be worked out by hand."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from character_tokenizer import CharacterTokenizer
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))

import scaling
import scaling_precision
import scaling_summary
import scaling_work
from scaling_model import (
    SHAPES,
    Device,
    Forwards,
    PoolWork,
    Shape,
    break_even_tokens,
    forward_flops,
    forward_seconds,
    free_bytes,
    gather_seconds,
    num_entries,
    num_steps,
    pool_seconds,
    replies_seconds,
    scoring_seconds,
)

from llmfoundry_gauntlet.config.specs import BenchmarkSpec, CategorySpec, GauntletSpec
from llmfoundry_gauntlet.engine.pools import Pool
from llmfoundry_gauntlet.values import GenerateRequest, ItemKey

# 2 layers of 4 * 4 * 2 + 2 * 4 * 2 + 3 * 4 * 8 = 144 parameters, and 2 * 10 * 4 = 80 of embeddings and output layer.
SMALL = Shape(name='small', num_layers=2, width=4, inner=8, num_heads=2, num_cached=1, vocabulary=10)
UNHURRIED = Device(  # 100 operations, 1,000 bytes a second, 200 and 50 over links
    flops=200,
    share_of_flops=0.5,
    bandwidth=2000,
    share_of_bandwidth=0.5,
    memory=100_000,
    launch_seconds=0.01,
    near_ranks=2,
    near_link=200,
    far_link=50,
)


def pool(prompts: tuple[int, ...], replies: tuple[int, ...], num_rows: int) -> PoolWork:
    return PoolWork(
        prompt_tokens=sum(prompts),
        prompt_pairs=0.0,
        prompts=prompts,
        replies=replies,
        num_rows=num_rows,
        tokens_per_batch=100,
    )


def test_a_shape_has_the_parameters_of_its_matrices():
    assert SMALL.cached_width == 2
    assert SMALL.layer_parameters == 2 * 16 + 2 * 8 + 3 * 32
    assert SMALL.parameters == 2 * 144 + 80
    assert SMALL.cached_per_token == 2 * 2 * 2


def test_the_four_sizes_have_about_the_parameters_of_their_names():
    found = [shape.parameters / 1e9 for shape in SHAPES]
    assert found == pytest.approx([0.162, 1.18, 6.9, 69.3], rel=0.02)  # the first with 77M of embeddings


def test_operations_of_a_forward_are_those_of_tokens_pairs_and_reads():
    assert forward_flops(SMALL, 1, 0, 0) == 2 * 2 * 144
    assert forward_flops(SMALL, 0, 1, 0) == 4 * 2 * 4
    assert forward_flops(SMALL, 0, 0, 1) == 2 * 10 * 4


def test_a_forward_takes_its_operations_or_reading_the_weights_or_starting_kernels():
    """Mutation: the sum of them."""
    assert forward_seconds(SMALL, UNHURRIED, 10, 0, 0) == pytest.approx(10 * 576 / 100)
    assert forward_seconds(SMALL, UNHURRIED, 0.01, 0, 0) == pytest.approx(368 * 2 / 1000)
    slow = replace(UNHURRIED, launch_seconds=3.0)
    assert forward_seconds(SMALL, slow, 0.01, 0, 0) == pytest.approx(2 * 3.0)


def test_weights_come_over_the_nodes_links_or_over_those_between_nodes():
    assert gather_seconds(SMALL, UNHURRIED, 1) == 0
    assert gather_seconds(SMALL, UNHURRIED, 2) == pytest.approx(736 / 2 / 200)
    assert gather_seconds(SMALL, UNHURRIED, 4) == pytest.approx(736 * 3 / 4 / 50)
    assert break_even_tokens(SMALL, UNHURRIED, 4) == pytest.approx(736 * 3 / 4 / 50 / 5.76)


def test_a_step_takes_as_long_as_its_slowest_rank():
    """Mutation: the slowest rank of all steps together, which is 15 tokens."""
    tokens = np.array([[10.0, 5.0], [4.0, 10.0]])
    forwards = Forwards(tokens=tokens, pairs=0 * tokens, reads=0 * tokens)
    whole, waiting = scoring_seconds(forwards, SMALL, UNHURRIED)
    assert whole == pytest.approx(20 * 5.76)
    assert waiting == pytest.approx(1 - (7 + 7.5) / 20)
    slow_links = replace(UNHURRIED, near_link=1.0)
    assert scoring_seconds(forwards, SMALL, slow_links, 2) == (pytest.approx(2 * 736 / 2), 0)
    nothing = np.zeros((2, 0))
    assert scoring_seconds(Forwards(tokens=nothing, pairs=nothing, reads=nothing), SMALL, UNHURRIED) == (0.0, 0.0)


@pytest.mark.parametrize(
    ('replies', 'num_rows', 'steps'),
    [((5, 1, 1, 1), 2, 5), ((3, 3, 3), 2, 6), ((4,), 8, 4), ((), 1, 0), ((2, 2, 2), 1, 6)],
)
def test_a_reply_begins_as_soon_as_a_row_is_free(replies: tuple[int, ...], num_rows: int, steps: int):
    assert num_steps(replies, num_rows) == steps


def test_prompts_enter_all_at_once_and_then_by_an_eighth_of_the_rows():
    assert num_entries(16, 16) == 1
    assert num_entries(20, 16) == 1 + 2
    assert num_entries(5, 2) == 1 + 3


def test_a_step_of_replies_reads_weights_and_what_is_kept():
    """Three steps of two rows, eight columns wide: 8 numbers of 2 bytes a token; the prompts in one forward."""
    fast = replace(UNHURRIED, flops=1e9)
    seconds, forwards, rows = pool_seconds(pool((5, 5), (3, 3), 2), SMALL, fast)
    step = (736 + 2 * 8 * 8 * 2) / 1000
    assert forwards == 3 + 1
    assert rows == 2
    assert seconds == pytest.approx(3 * step + 0.736)
    shared, _, _ = pool_seconds(pool((5, 5), (3, 3), 2), SMALL, fast, 4)
    assert shared == pytest.approx(4 * 736 * 3 / 4 / 50)


def test_ranks_wait_for_each_other_after_every_pool():
    fast = replace(UNHURRIED, flops=1e9)
    long, short, none = pool((5,), (9,), 1), pool((5,), (1,), 1), pool((), (), 1)
    one, _, _ = pool_seconds(long, SMALL, fast)
    whole, waiting = replies_seconds([[long, short], [short, long]], SMALL, fast)
    assert whole == pytest.approx(2 * one)
    assert 0.3 < waiting < 0.5
    assert replies_seconds([[long], [none]], SMALL, fast) == (pytest.approx(one), pytest.approx(0.5))
    assert replies_seconds([[], []], SMALL, fast) == (0.0, 0.0)


def test_what_training_leaves_is_memory_less_state_and_what_a_forward_gathers():
    assert free_bytes(SMALL, UNHURRIED) == 100_000 - 368 * 16
    assert free_bytes(SMALL, UNHURRIED, 4) == 100_000 - 368 * 4 - (2 * 144 + 80) * 2


def test_a_model_that_does_not_fit_has_no_budget_and_one_that_does_a_power_of_two():
    largest = SHAPES[-1]
    assert scaling.budget_of(largest, Device(), 1, 64, 10**8) is None
    assert scaling.budget_of(largest, Device(), 64, 64, 10**8) == 4096
    assert scaling.budget_of(SHAPES[0], Device(), 1, 8, 10**8) == 32768
    assert scaling.budget_of(SHAPES[0], Device(), 1, 8, 4 * 8 * 10_000) == 8192


def gauntlet() -> GauntletSpec:
    """Two categories, of one task and of two; chance is 0.5 in the last."""
    one, two, three = (
        BenchmarkSpec(name=name, num_fewshot=0, random_baseline=chance)
        for name, chance in (('a', 0.0), ('b', 0.0), ('c', 0.5))
    )
    return GauntletSpec(
        weighting='EQUAL',
        subtract_random_baseline=True,
        rescale_accuracy=True,
        averages=None,
        categories=(
            CategorySpec(name='first', benchmarks=(one,)),
            CategorySpec(name='second', benchmarks=(two, three)),
        ),
    )


KEYS = ('a/0-shot', 'b/0-shot', 'c/0-shot')


def test_the_average_moves_with_a_task_as_categories_and_chance_have_it():
    slopes = scaling_precision.slopes_of(gauntlet(), dict.fromkeys(KEYS, 10))
    assert slopes == pytest.approx(dict(zip(KEYS, (1 / 2, 1 / 4, 1 / 4 / 0.5), strict=True)))


def test_assumed_accuracies_are_above_chance():
    assert list(scaling_precision.assumed_accuracies(gauntlet(), 0.4).values()) == pytest.approx([0.4, 0.4, 0.7])


def test_the_standard_error_is_that_of_independent_items():
    slopes, accuracies = {'a': 0.5, 'b': 2.0}, {'a': 0.5, 'b': 0.1}
    found = scaling_precision.standard_error(slopes, accuracies, {'a': 100, 'b': 9})
    assert found == pytest.approx(math.sqrt(0.25 * 0.25 / 100 + 4 * 0.09 / 9))


def test_more_time_is_more_precise_and_all_items_are_all_there_is():
    """Mutation: the allocation is given no seconds."""
    items, accuracies = dict.fromkeys(KEYS, 100), dict.fromkeys(KEYS, 0.5)
    seconds = dict(zip(KEYS, (0.01, 0.04, 0.01), strict=True))

    def within(budget: float) -> scaling_precision.Precision:
        return scaling_precision.precision_in(budget, gauntlet(), seconds, items, accuracies)

    short, longer, whole = within(1), within(3), within(7)
    assert short.seconds <= 1
    assert 1 < longer.seconds <= 3
    assert short.standard_error > longer.standard_error > whole.standard_error
    assert (whole.items, whole.seconds) == (300, pytest.approx(6.0))
    assert whole.standard_error == pytest.approx(math.sqrt((0.25 + 1 / 16 + 0.25) * 0.25 / 100))


def test_a_time_that_is_too_short_is_said_to_be():
    row = {'size': '1B', 'ranks': 8, 'time': '1 s', 'budget': 1.0, 'items': 6, 'seconds': 2.5, 'standard_error': 0.1}
    assert scaling_summary.precision_row(row)[3:] == ('2.5 at least', 'too few seconds', '')
    assert scaling_summary.precision_row({**row, 'budget': 3.0})[3:] == ('2.5', '6', '0.1000')


def test_the_work_of_a_task_is_counted_on_its_rows(write_jsonl, tmp_path):
    """Contexts of 7 tokens with bos, of which 4 are the same; continuations of 1 and 2, whose last is never an input.
    Two rows of 2,048 tokens where they are padded."""
    write_jsonl('rows.jsonl', [{'context': 'abc123', 'continuation': 'd'}, {'context': 'abc456', 'continuation': 'ef'}])
    task = {
        'label': 'pair',
        'dataset_uri': 'rows.jsonl',
        'num_fewshot': [0],
        'icl_task_type': 'language_modeling',
    }
    prepared, _ = scaling_work.prepare({'tasks': [task], 'data_root': str(tmp_path)}, CharacterTokenizer(), None)
    (work,) = scaling_work.task_works(prepared, 1000, 0.5)
    assert (work.items, work.rows, work.reads) == (2, 2, 1 + 2)
    assert work.prompt_tokens == 2 * 7
    assert work.padded_tokens == 2 * 2048
    assert work.run_tokens == 4 + 3 + (3 + 1)
    assert work.pools == ()


def test_prompts_of_a_pool_count_what_they_begin_with_once():
    """Of 100 and 103 tokens, 100 alike; a third request for the first. Replies are half as long as they may be."""
    first = np.arange(100, dtype=np.int32)
    contexts = (first, np.append(first, [7, 8, 9]).astype(np.int32), first)
    requests = tuple(
        GenerateRequest(key=ItemKey('t/0-shot', row), context=context, max_new_tokens=20)
        for row, context in enumerate(contexts)
    )
    work = scaling_work.pool_work(Pool(requests=requests, num_rows=3, tokens_per_batch=500), 0.5)
    assert work.prompt_tokens == 103
    assert work.prompt_pairs == sum(range(1, 104))
    assert (work.prompts, work.replies) == ((100, 103, 100), (10, 10, 10))


def test_plans_are_measured_on_ranks(write_jsonl, tmp_path):
    """Eight rows of equal length, each a batch: nobody has more, as on three ranks one of them is run twice."""
    letters = 'abcdefgh'
    write_jsonl('rows.jsonl', [{'context': letter * 30, 'continuation': 'x'} for letter in letters])
    task = {'label': 'eight', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'}
    prepared, _ = scaling_work.prepare({'tasks': [task], 'data_root': str(tmp_path)}, CharacterTokenizer(), None)
    work = scaling.Work(prepared, 0.5)
    two, three = work.shared(40, 2), work.shared(40, 3)
    assert (two.forwards.tokens.shape, three.forwards.tokens.shape) == ((2, 4), (3, 3))
    assert (two.above_mean, two.waiting) == (0, 0)
    assert three.above_mean == 0
    assert work.shared(40, 2) is two
    assert scaling_work.above_mean([3, 1]) == 0.5
    assert scaling_work.above_mean([0, 0]) == 0
