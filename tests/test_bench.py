"""The benchmark: its rows, its arithmetic, and our contenders on a tiny model."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT
from transformers import LlamaForCausalLM

sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))

import materials
import ours
import parts
import run
import worker
from bare_forward import bare_batches
from contenders import Contender, ContenderError
from parts import PARTS, SCORE_ROWS, SCORING_ROWS, WRITING_ROWS, ZERO_SHOT, Place
from table import RowResult, group_lines, group_means, row_line
from worker import measure

from llmfoundry_gauntlet.engine.plan import plan
from llmfoundry_gauntlet.tasks import base
from llmfoundry_gauntlet.types import Example, ItemKey, ScoreRequest

MODEL = ROOT / 'tests' / 'fixtures' / 'models' / 'rotary_bos'
LIKELIHOOD = PARTS['likelihood']


def measured(num_items: int, *cpu_seconds: float, **answer: Any) -> list[dict[str, Any]]:
    answer = {'predictions': [], 'notes': {}, 'num_items': num_items, **answer}
    return [{**answer, 'wall_seconds': 2 * seconds, 'cpu_seconds': seconds} for seconds in cpu_seconds]


def result(row: parts.TaskRow, *, seconds: float = 1.0, lm_eval: float = 2.0) -> RowResult:
    rounds = {
        'ours': measured(10, seconds, 9 * seconds, seconds, predictions=[1, 0, 1], notes={'padding': '0.25'}),
        'bare_forward': measured(10, 0.5),
        'llm_foundry': measured(2, 20.0, predictions=[1, 1]),
        'lm_eval': measured(10, lm_eval, predictions=[1, 0, 1], batch_size=8),
    }
    return RowResult(row=row, vocabulary=8000, rounds=rounds)


def test_a_row_has_medians_per_item_ratios_and_the_number_of_equal_predictions():
    record = json.loads(json.dumps(result(SCORING_ROWS[0]).as_json()))
    assert record['seconds'] == {'ours': 0.1, 'bare_forward': 0.05, 'llm_foundry': 10.0, 'lm_eval': 0.2}
    assert record['wall_seconds']['ours'] == 0.2
    assert record['ratios'] == {'llm_foundry/ours': 100, 'lm_eval/ours': 2, 'ours/bare_forward': 2}
    assert record['same'] == {'llm_foundry': [1, 2], 'lm_eval': [3, 3]}
    cells = row_line(LIKELIHOOD, result(SCORING_ROWS[0])).split()
    assert cells[:10] == [
        'copa/0-shot',
        '8,000',
        '10/2',
        '0.1000',
        '0.0500',
        '10.0000',
        '0.2000',
        '100.00',
        '2.00',
        '2.00',
    ]
    assert cells[-2:] == ['padding', '0.25']


def test_ratios_of_a_group_are_averaged_geometrically_and_compared_with_its_targets():
    two = [row for row in SCORING_ROWS if row.group is ZERO_SHOT][:2]
    results = [result(two[0], lm_eval=2.0), result(two[1], lm_eval=8.0)]
    (group, means), (total, _) = group_means(LIKELIHOOD, results)
    assert (group, total) == (ZERO_SHOT, LIKELIHOOD.total)
    assert list(means.values()) == pytest.approx([100.0, 4.0, 2.0])
    zero_shot = group_lines(LIKELIHOOD, results)[1]
    assert '100.00 (>= 50) met' in zero_shot
    assert '4.00 (>= 1.5) met' in zero_shot
    assert '2.00 (<= 1.1) MISSED' in zero_shot


def test_texts_are_compared_by_prompt_if_both_contenders_name_their_prompts():
    rounds = {
        'ours': measured(2, 1.0, predictions=['x', 'y'], prompts=['a', 'b']),
        'lm_eval': measured(2, 1.0, predictions=['y', 'z', 'z'], prompts=['b', 'a', 'a'], batch_size=8),
    }
    assert RowResult(row=SCORE_ROWS[2], vocabulary=8000, rounds=rounds).num_same('lm_eval') == (1, 2)


@pytest.mark.parametrize('part', PARTS)
def test_a_quick_run_has_all_rows_and_contenders_with_no_more_items(part: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    place = Place(ROOT / 'eval_data', tmp_path)
    assert len({row.name for row in PARTS[part].rows}) == len(PARTS[part].rows)
    asked = set()
    for row in PARTS[part].rows:
        assert 0 < row.items[1] <= row.items[0]
        jobs = row.jobs(place, quick=True)
        asked |= jobs.keys()
        assert {name for ratio in row.group.targets for name in ratio.split('/')} <= jobs.keys()
    assert asked == PARTS[part].contenders.keys()


def test_rows_are_taken_from_the_start_and_shots_from_many_more(tmp_path: Path):
    chosen = {}
    for row in SCORING_ROWS:
        path = row.write_rows(Place(ROOT / 'eval_data', tmp_path), 3)
        chosen[row.name] = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(chosen['copa/0-shot']) == 3
    assert len(chosen['piqa/10-shot']) == 16
    assert chosen['piqa/10-shot'][:3] == chosen['piqa/0-shot']
    assert {line['category'] for line in chosen['mmlu/5-shot']} == {'nutrition'}


def test_questions_of_score_are_of_all_categories_and_fewer_are_among_more(tmp_path: Path):
    source, found = ROOT / 'eval_data' / parts.QUESTIONS_FILE, {}
    for wanted in (14, 28, 1000):
        root = parts.write_questions(source, wanted, tmp_path)
        rows = [json.loads(line) for line in (root / parts.QUESTIONS_FILE).read_text('utf-8').splitlines()]
        found[wanted] = {row['question_id'] for row in rows}
        assert len({row['category'] for row in rows}) == 14
    assert found[14] < found[28] < found[1000]


@pytest.mark.parametrize(
    ('num_tokens', 'mean_length', 'num_reads'), [(3066, 15.33, 1125), (24564, 2047.0, 43), (3500, 600.0, 172)]
)
def test_the_bare_forward_runs_the_planned_tokens_and_reads(num_tokens: int, mean_length: float, num_reads: int):
    batches = bare_batches(num_tokens=num_tokens, mean_length=mean_length, num_reads=num_reads, tokens_per_batch=4096)
    assert sum(batch.num_rows * batch.length for batch in batches) == pytest.approx(num_tokens, rel=0.005)
    assert sum(batch.num_rows * batch.num_reads for batch in batches) == num_reads
    assert all(batch.num_rows * batch.length <= 4096 for batch in batches)
    assert all(batch.length == pytest.approx(mean_length, rel=0.06) for batch in batches)


def test_the_shape_of_a_plan_counts_distinct_sequences_tokens_and_reads():
    # [0 1] is run once for both letters, [3 2 5] for both endings; read after [0 1], [3 2] and [3 2 5]
    letters, texts = ([7], [8]), ([5, 6], [5, 7])
    requests = [request(0, [0, 1], letters), request(1, [3, 2], texts)]
    planned = SimpleNamespace(
        items={one.key: SimpleNamespace(request=one) for one in requests},
        batches=tuple(plan(requests, tokens_per_batch=64)),
        tokens_per_batch=64,
    )
    shape = ours.plan_shape(planned)
    assert shape == ours.Shape(num_tokens=5, mean_length=(2 + 3) / 2, num_reads=3, tokens_per_batch=64)


def request(row: int, context: list[int], continuations: tuple[list[int], ...]) -> ScoreRequest:
    ids = np.array(context, np.int32)
    return ScoreRequest(
        key=ItemKey('task', row),
        contexts=(ids,) * len(continuations),
        continuations=tuple(np.array(continuation, np.int32) for continuation in continuations),
    )


def test_lm_eval_tries_no_batch_size_that_would_do_the_same_or_not_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, 'available_bytes', lambda: 10**12)
    assert list(run.batch_sizes({'count': 100, 'longest': 1024}, 8000)) == [8, 16, 32]
    assert list(run.batch_sizes({'count': 12, 'longest': 1024}, 8000)) == [8, 16]
    assert list(run.batch_sizes({'count': 5, 'longest': 1024}, 8000)) == [8]
    monkeypatch.setattr(run, 'available_bytes', lambda: 10**9)
    assert list(run.batch_sizes({'count': 100, 'longest': 1024}, 8000)) == [8]


def test_the_first_items_have_the_shots_that_they_have_among_all():
    examples = [Example(row=row, content=row) for row in range(20)]
    whole = list(base.with_shots(examples, 3, seed=1))
    with ours.first_items(5):
        assert list(base.with_shots(examples, 3, seed=1)) == whole[:5]
    assert list(base.with_shots(examples, 3, seed=1)) == whole


def test_a_trained_tokenizer_puts_a_bos_before_a_text():
    tokenizer = materials.make_tokenizer(['the cat and the dog'] * 5, 300)
    ids = tokenizer('the cat')['input_ids']
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids[1:]) == 'the cat'
    assert tokenizer('the cat', add_special_tokens=False)['input_ids'] == ids[1:]


def test_a_lively_copy_has_larger_layers_and_its_own_row_for_eos(tmp_path: Path):
    folder = tmp_path / 'llama'
    folder.symlink_to(MODEL)
    copy = materials.lively_folder(folder, 0.0)
    before, after = LlamaForCausalLM.from_pretrained(MODEL), LlamaForCausalLM.from_pretrained(copy)
    assert torch.equal(after.model.layers[1].mlp.up_proj.weight, before.model.layers[1].mlp.up_proj.weight * 3)
    assert after.lm_head.weight[1].abs().max() == 0
    assert torch.equal(after.lm_head.weight[2:], before.lm_head.weight[2:])
    assert materials.lively_folder(folder, 0.0) == copy != materials.lively_folder(folder, 0.4)


ECHO = """
class Echo:
    def load(self, **arguments):
        print('noise')
        return arguments
    def measure(self):
        raise ValueError('no such row')
"""


def test_a_worker_answers_requests_and_reports_what_went_wrong(tmp_path: Path):
    (tmp_path / 'echo.py').write_text(ECHO)
    command = [sys.executable, worker.__file__, 'echo:Echo']
    contender = Contender(command, tmp_path / 'log', {'PYTHONPATH': str(tmp_path), 'OMP_NUM_THREADS': '1'})
    try:
        assert contender.ask('load', model_folder='here') == {'model_folder': 'here'}
        with pytest.raises(ContenderError, match='no such row'):
            contender.ask('measure')
        assert contender.ask('load', model_folder='there') == {'model_folder': 'there'}
        contender.process.kill()
        with pytest.raises(ContenderError, match='ended with status -9'):
            contender.ask('load', model_folder='gone')
    finally:
        contender.close()


def test_the_measured_seconds_are_those_of_the_run_only():
    seconds, value = measure(lambda: np.ones(3).sum())
    assert value == 3
    assert 0 <= seconds['cpu_seconds'] < 1
    assert 0 < seconds['wall_seconds'] < 1


@pytest.fixture(scope='module')
def contenders() -> dict[str, ours.Ours]:
    """Ours and alone, with the tiny model."""
    found: dict[str, ours.Ours] = {'ours': ours.Ours(), 'alone': ours.Alone()}
    for contender in found.values():
        assert 'key-value cache' in contender.load(str(MODEL))['way']
    return found


@pytest.fixture
def ask(contenders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The answer of a contender to a row's job, on our own rows; keywords change the job."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(parts, 'SCORE_SOURCES', parts.SCORE_SOURCES[1:])

    def call(name: str, row: parts.Row, **changes: Any) -> dict[str, Any]:
        job = row.jobs(Place(ROOT / 'eval_data', tmp_path), quick=True)[name]
        return contenders[name].measure(**{**job, 'max_seq_len': 512, **changes})

    return call


def test_our_answer_counts_items_and_the_tokens_that_were_run(ask):
    answer = ask('ours', SCORING_ROWS[0], num_items=3)
    assert (answer['num_items'], len(answer['predictions'])) == (3, 3)
    assert answer['shape']['num_reads'] >= answer['sequences']['count'] == 6


def test_our_generations_end_at_their_stop_or_limit(ask):
    row = replace(WRITING_ROWS[-1], stops=(), max_new_tokens=12)
    free = ask('ours', row, num_items=3)
    assert free['notes']['new tokens'] == '12, at most 12'
    first = free['predictions'][0]
    stop = first[len(first) // 2 :][:2]
    stopped = ask('ours', replace(row, stops=(stop,)), num_items=3)
    assert stopped['predictions'][0] == first[: first.find(stop)]


@pytest.mark.parametrize('row', SCORE_ROWS[:2], ids=lambda row: row.name)
def test_variants_alone_choose_as_together_and_run_every_token(ask, row: parts.ScoreRow):
    together, alone = (ask(name, row) for name in ('ours', 'alone'))
    assert together['predictions'] == alone['predictions']
    assert together['num_items'] == alone['num_items'] == 4
    assert alone['notes']['tokens run'].startswith('1.000 ')
    assert float(together['notes']['tokens run'].split()[0]) < 1


def test_our_generations_of_score_come_with_their_prompts(ask):
    row = replace(SCORE_ROWS[2], max_new_tokens=3)
    answer = ask('ours', row)
    assert len(answer['prompts']) == len(answer['predictions']) == len(set(answer['prompts'])) > answer['num_items']
    assert float(answer['notes']['prompt tokens run']) < 1
