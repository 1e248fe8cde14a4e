"""The benchmark of replies: its rows, how texts are compared, and our contender on a tiny model."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT
from transformers import LlamaForCausalLM

sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))

import generation
import materials
from generation_suite import FULL, QUICK, REPLIES, ROWS, SAMPLED
from generation_summary import Agreement, ReplyResult, SampleResult
from ours_replies import OurReplies, num_common
from summary import Measurement

MODEL = ROOT / 'tests' / 'fixtures' / 'models' / 'rotary_bos'


def measured(num_items: int, cpu_seconds: float, **details) -> list[Measurement]:
    return [Measurement(num_items=num_items, wall_seconds=2 * cpu_seconds, cpu_seconds=cpu_seconds, details=details)]


def result() -> ReplyResult:
    ours = {'lengths': [10, 30], 'prompt_lengths': [5, 6], 'wasted': 0.25, 'idle': 0.5, 'mean_rows': 1.5}
    rounds = {
        'ours': measured(2, 1.0, **ours),
        'llm_foundry': measured(1, 3.0),
        'lm_eval': measured(2, 1.4, batch_size=8, tried_cpu_seconds={8: 1.4}),
    }
    agreements = {'lm_eval': Agreement(compared=2, same=2), 'llm_foundry': Agreement(compared=1, same=0, cut=1)}
    return ReplyResult(row=ROWS[0], vocabulary=8000, max_new_tokens=40, rounds=rounds, agreements=agreements)


def test_a_line_of_the_results_has_seconds_per_item_and_tokens_per_wall_second():
    line = json.loads(json.dumps(result().as_json()))
    wanted = {'task': 'gsm8k', 'num_shots': 3, 'vocab': 8000, 'max_seq_len': 1024, 'lengths': 'vary'}
    assert {key: line[key] for key in wanted} == wanted
    assert [line[name] for name in REPLIES] == [0.5, 3.0, 0.7]
    assert (line['mean_new_tokens'], line['longest_new_tokens']) == (20, 30)
    assert line['tokens_per_second'] == 40 / 2.0
    assert (line['wasted_slots'], line['idle_rows']) == (0.25, 0.5)


def test_the_table_says_which_target_is_met_and_why_texts_differ():
    cells = result().line()
    assert '6.00 (>= 1) met' in cells
    assert '1.40 (>= 1.5) MISSED' in cells
    assert result().reasons() == ['    llm_foundry: 1 as llm-foundry has cut the prompt']


def test_samples_are_seconds_per_reply_together_and_apart():
    way = {'wall_seconds': 8.0, 'num_new': 1024, 'prompt_tokens': 2048, 'mean_rows': 16.0}
    rounds = [{'together': {**way, 'cpu_seconds': 8.0}, 'apart': {**way, 'cpu_seconds': 24.0}}]
    found = SampleResult(row=SAMPLED, vocabulary=8000, num_prompts=2, rounds=rounds)
    assert (found.as_json()['ours'], found.as_json()['apart']) == (0.5, 1.5)
    assert found.as_json()['tokens_per_second'] == 128
    assert found.lines()[0].endswith('3.00 times faster than without')


def test_every_row_has_stops_and_a_limit_and_a_quick_run_has_no_more_items():
    for row in ROWS:
        assert 0 < QUICK.num_items(row, 'ours') <= FULL.num_items(row, 'ours')
        assert 0 < QUICK.num_items(row, 'llm_foundry') <= QUICK.num_items(row, 'ours')
        entry = row.entry(lambda _: 335)
        assert entry['early_stopping_criteria'] == list(row.stops)
        assert entry['generation_kwargs'] == {'max_new_tokens': 64 if row.lengths == 'limit' else 335}
        assert entry['num_fewshot'] == [3]


def test_texts_that_differ_are_told_apart_by_the_gap_and_by_the_cut():
    gaps = [(1, 1e-5), (2, 0.5), (3, 0.5)]
    bench = SimpleNamespace(contenders={'ours': SimpleNamespace(ask=lambda *_, **__: gaps)})
    found = generation.ReplyBench.agreement(
        bench, ['a', 'b', 'c', 'd', 'e'], ['a', 'B', 'C', 'D'], [False, False, True, False, False]
    )
    assert found == Agreement(compared=4, same=1, near=1, cut=1, others=1)


@pytest.mark.parametrize(
    ('stops', 'text'), [((), 'one, two. three'), (('.', ', '), 'one'), (('four',), 'one, two. three')]
)
def test_a_reply_is_cut_at_its_first_stop(stops: tuple[str, ...], text: str):
    assert generation.up_to_stop('one, two. three', stops) == text


def test_the_beginning_of_two_texts_is_counted():
    assert [num_common('abc', 'abd'), num_common('ab', 'abc'), num_common('', 'a')] == [2, 2, 0]


def test_a_lively_copy_has_larger_layers_and_its_own_row_for_eos(tmp_path: Path):
    folder = tmp_path / 'llama'
    folder.symlink_to(MODEL)
    copy = materials.lively_folder(folder, 0.0)
    before, after = LlamaForCausalLM.from_pretrained(MODEL), LlamaForCausalLM.from_pretrained(copy)
    assert torch.equal(after.model.layers[1].mlp.up_proj.weight, before.model.layers[1].mlp.up_proj.weight * 3)
    assert after.lm_head.weight[1].abs().max() == 0
    assert torch.equal(after.lm_head.weight[2:], before.lm_head.weight[2:])
    assert materials.lively_folder(folder, 0.0) == copy != materials.lively_folder(folder, 0.4)


@pytest.fixture(scope='module')
def replies() -> OurReplies:
    contender = OurReplies()
    assert 'key-value cache' in contender.load(str(MODEL))['way']
    return contender


def test_our_replies_end_at_their_stop_and_differ_where_two_logits_are_near(replies: OurReplies, tmp_path: Path):
    row = ROWS[-1]
    source = {'rows_file': str(materials.write_rows(row, 3, str(ROOT / 'eval_data'), tmp_path)), 'max_seq_len': 512}
    task = row.entry(lambda entry: min(replies.token_limit(task=entry, **source), 12))
    free = replies.measure(task={**task, 'early_stopping_criteria': []}, num_items=3, **source)
    assert free['lengths'] == [12, 12, 12]
    assert replies.gaps(texts=free['predictions']) == []
    first, second, _ = free['predictions']
    ((index, gap),) = replies.gaps(texts=[first, second[:-1], ''][:2])
    assert (index, gap > 0) == (1, True)
    stop = first[len(first) // 2 :][:2]
    stopped = replies.measure(task={**task, 'early_stopping_criteria': [stop]}, num_items=3, **source)
    assert stopped['predictions'][0] == first[: first.find(stop)]
    assert stopped['lengths'][0] < 12


def test_a_prompt_is_run_once_for_several_replies(replies: OurReplies, tmp_path: Path):
    rows = materials.write_rows(SAMPLED, 4, str(ROOT / 'eval_data'), tmp_path)
    task = SAMPLED.entry(lambda _: 0) | {'generation_kwargs': {'max_new_tokens': 3}}
    found = replies.measure_samples(
        task=task, rows_file=str(rows), max_seq_len=512, num_prompts=2, num_samples=3, length=40
    )
    assert [found[way]['prompt_tokens'] for way in ('together', 'apart')] == [2 * 40, 6 * 40]
    assert [found[way]['num_new'] for way in ('together', 'apart')] == [6 * 3, 6 * 3]
