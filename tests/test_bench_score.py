"""The benchmark of SCORE: its rows, its figures, and our contenders on a tiny model."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))

import score
import score_suite
from generation_summary import Agreement
from score_ours import Alone, ScoreReplies, Separate, Together
from score_suite import FULL, QUICK, ROWS
from score_summary import ChoiceResult, ReplyResult
from summary import Measurement

MODEL = ROOT / 'tests' / 'fixtures' / 'models' / 'rotary_bos'
OWN = replace(
    score_suite.SOURCES[1],
    data_root=ROOT / 'eval_data',
    prompts=ROOT / 'eval_data' / 'score' / 'prompts' / 'mmlu_pro.json',
)


def measured(cpu_seconds: float, **details) -> list[Measurement]:
    return [Measurement(num_items=2, wall_seconds=2 * cpu_seconds, cpu_seconds=cpu_seconds, details=details)]


def choices() -> ChoiceResult:
    rounds = {
        'together': measured(6.0, tokens={'all': 1000, 'unique': 570, 'run': 600}),
        'separate': measured(8.0, tokens={'all': 1000, 'unique': 970, 'run': 980}),
        'alone': measured(10.0, tokens={'all': 1000, 'unique': 970, 'run': 1000}),
    }
    return ChoiceResult(row=ROWS[0], vocabulary=8000, rounds=rounds, num_choices=20, num_same=20)


def replies() -> ReplyResult:
    ours = {
        'lengths': [10, 30],
        'prompt_lengths': [50, 50],
        'prompt_tokens': 60,
        'mean_rows': 1.5,
        'prompts': ['a', 'b'],
    }
    lm_eval = {'batch_size': 8, 'tried_cpu_seconds': {8: 3.0}, 'prompts': ['a', 'b', 'b']}
    rounds = {'ours': measured(2.0, **ours), 'lm_eval': measured(3.0, **lm_eval)}
    return ReplyResult(row=ROWS[2], vocabulary=8000, rounds=rounds, agreement=Agreement(compared=2, same=1, near=1))


def test_a_line_of_choices_has_seconds_per_question_and_shares_of_all_tokens():
    line = json.loads(json.dumps(choices().as_json()))
    assert (line['together'], line['separate'], line['alone']) == (3.0, 4.0, 5.0)
    assert (line['together/alone'], line['together/separate']) == (0.6, 0.75)
    assert line['shares_of_tokens'] == {'unique': 0.57, 'run_together': 0.6, 'run_apart': 0.98}
    assert '0.600 (<= 0.62) met' in choices().line()
    assert '0.600 (<= 0.55) MISSED' in replace(choices(), row=replace(ROWS[0], target=0.55)).line()


def test_a_line_of_replies_has_the_ratio_and_why_texts_differ():
    line = json.loads(json.dumps(replies().as_json()))
    assert (line['ours'], line['lm_eval'], line['lm-eval/ours'], line['is_met']) == (1.0, 1.5, 1.5, False)
    assert line['prompts'] == {'ours': 2, 'lm_eval': 3}
    assert '1.50 (>= 2) MISSED' in replies().line()
    assert replies().line().split()[-2:] == ['0.600', '1/2']
    again, differing = replies().remarks()
    assert 'asks 1 prompts again' in again
    assert 'within 0.001 of the next best' in differing


def test_a_quick_run_asks_no_more_questions():
    for row in ROWS:
        assert 0 < QUICK.num_items(row, 'ours') <= FULL.num_items(row, 'ours')
    assert [row.items[0] for row in ROWS[:2]] == [200, 200]
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_questions_are_of_all_categories_and_fewer_are_among_more(tmp_path: Path):
    found = {}
    for wanted in (14, 28, 1000):
        ((root, count),) = score_suite.write_questions(OWN, wanted, wanted, tmp_path).items()
        rows = [json.loads(line) for line in (root / score_suite.ROWS_FILE).read_text('utf-8').splitlines()]
        assert len(rows) == count
        found[wanted] = {row['question_id'] for row in rows}
        assert len({row['category'] for row in rows}) == 14
    assert found[14] < found[28] < found[1000]


def test_parts_have_each_question_once(tmp_path: Path):
    parts = score_suite.write_questions(OWN, 28, 9, tmp_path)
    assert sorted(parts.values()) == [9, 9, 10]
    rows = [line for root in parts for line in (root / score_suite.ROWS_FILE).read_text('utf-8').splitlines()]
    (whole,) = score_suite.write_questions(OWN, 28, 28, tmp_path)
    assert sorted(rows) == sorted((whole / score_suite.ROWS_FILE).read_text('utf-8').splitlines())


def test_answers_to_parts_are_added_up():
    first = {'wall_seconds': 1.0, 'cpu_seconds': 2.0, 'predictions': [1, 2], 'tokens': {'all': 5, 'run': 4}}
    other = {'wall_seconds': 0.5, 'cpu_seconds': 1.0, 'predictions': [3], 'tokens': {'all': 2, 'run': 1}}
    assert score.joined([first]) is first
    assert score.joined([first, other]) == {
        'wall_seconds': 1.5,
        'cpu_seconds': 3.0,
        'predictions': [1, 2, 3],
        'tokens': {'all': 7, 'run': 5},
    }


def test_texts_come_in_the_order_of_our_prompts():
    assert score.in_order_of(['a', 'b'], ['b', 'a', 'a'], ['to b', 'to a', 'to a']) == ['to a', 'to b']
    with pytest.raises(ValueError, match='2 prompts are asked by one of'):
        score.in_order_of(['a', 'b'], ['a', 'c'], ['', ''])


def test_choices_are_counted():
    assert score.compared([1, None, 3], [1, None, 2]) == {'num_choices': 3, 'num_same': 2}


@pytest.mark.parametrize('row', ROWS[:2], ids=lambda row: row.name)
def test_variants_apart_are_chosen_as_together_and_run_no_fewer_tokens(row: score_suite.ScoreRow, tmp_path: Path):
    (root,) = score_suite.write_questions(OWN, 3, 3, tmp_path)
    answers = []
    for contender in (Together(), Separate(), Alone()):
        contender.load(str(MODEL))
        answers.append(contender.measure(entry=row.entry(OWN.prompts), data_root=str(root), max_seq_len=512))
    together, separate, alone = answers
    assert together['predictions'] == separate['predictions'] == alone['predictions']
    assert together['tokens']['all'] == separate['tokens']['all'] == alone['tokens']['all'] == alone['tokens']['run']
    assert together['tokens']['unique'] < separate['tokens']['unique'] <= separate['tokens']['run']


def test_replies_come_with_their_prompts_which_are_run_in_part(tmp_path: Path):
    (root,) = score_suite.write_questions(OWN, 2, 2, tmp_path)
    contender = ScoreReplies()
    contender.load(str(MODEL))
    entry = {**ROWS[2].entry(OWN.prompts), 'max_new_tokens': 3}
    answer = contender.measure(entry=entry, data_root=str(root), max_seq_len=512)
    assert len(answer['prompts']) == len(answer['predictions']) == len(set(answer['prompts']))
    assert answer['prompt_tokens'] < sum(answer['prompt_lengths'])
    assert contender.gaps(texts=answer['predictions']) == []
