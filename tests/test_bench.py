"""The benchmark's arithmetic: what is planned for the bare forward, medians, geometric means, which batch sizes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))

import materials
import ours
import run
import worker
from bare_forward import bare_batches
from contenders import Contender, ContenderError
from suite import FULL, GROUPS, QUICK, ROWS, ZERO_SHOT, Row
from summary import Measurement, RowResult, group_lines, group_means, row_line

from llmfoundry_gauntlet.engine.plan import plan
from llmfoundry_gauntlet.tasks import items
from llmfoundry_gauntlet.values import Example, ItemKey, ScoreRequest

KEYS = ['task', 'num_shots', 'vocab', 'max_seq_len', 'ours', 'llm_foundry', 'lm_eval', 'bare_forward']


def measured(num_items: int, *cpu_seconds: float, **details) -> list[Measurement]:
    return [
        Measurement(num_items=num_items, wall_seconds=2 * seconds, cpu_seconds=seconds, details=details)
        for seconds in cpu_seconds
    ]


def result(row: Row, *, ours: float = 1.0, lm_eval: float = 2.0) -> RowResult:
    rounds = {
        'ours': measured(10, ours, 9 * ours, ours, shape={}),
        'bare_forward': measured(10, 0.5),
        'llm_foundry': measured(2, 20.0),
        'lm_eval': measured(10, lm_eval),
    }
    return RowResult(row=row, vocabulary=8000, rounds=rounds, lm_eval_batch_size=8, num_same=2, num_compared=2)


def test_a_line_of_the_results_has_the_medians_per_item_under_eight_keys():
    line = result(ROWS[0]).as_json()
    assert list(line) == KEYS
    assert [line[key] for key in KEYS] == ['copa', 0, 8000, 1024, 0.1, 10.0, 0.2, 0.05]
    json.dumps(result(ROWS[0]).details())


def test_ratios_of_a_group_are_averaged_geometrically():
    two = [row for row in ROWS if row.group is ZERO_SHOT][:2]
    means = group_means([result(two[0], lm_eval=2.0), result(two[1], lm_eval=8.0)])
    assert means[ZERO_SHOT] == pytest.approx((100.0, 4.0, 2.0))
    assert len(means) == 2  # and the whole suite


def test_a_row_that_is_slower_than_lm_eval_is_named():
    slow, fast = result(ROWS[0], ours=3.0), result(ROWS[1])
    assert row_line(slow).endswith('YES')
    assert row_line(fast).endswith('no')
    assert group_lines([slow, fast])[0] == 'rows slower than lm-eval: copa/0-shot at 8000'
    assert group_lines([fast])[0] == 'rows slower than lm-eval: none'


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


def test_every_row_is_in_a_group_and_a_quick_run_has_all_rows_with_no_more_items():
    assert {row.group for row in ROWS} == set(GROUPS)
    for row in ROWS:
        assert 0 < QUICK.num_items(row, 'ours') <= FULL.num_items(row, 'ours')
        assert 0 < QUICK.num_items(row, 'llm_foundry') <= FULL.num_items(row, 'llm_foundry')
        assert materials.task_entry(row)['num_fewshot'] == [row.num_shots]


def test_rows_are_taken_from_the_start_and_shots_from_many_more(tmp_path: Path):
    chosen = {}
    for row in ROWS:
        path = materials.write_rows(row, 3, str(ROOT / 'eval_data'), tmp_path)
        chosen[row.name] = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(chosen['copa/0-shot']) == 3
    assert len(chosen['piqa/10-shot']) == 16
    assert chosen['piqa/10-shot'][:3] == chosen['piqa/0-shot']
    assert {line['category'] for line in chosen['mmlu/5-shot']} == {'nutrition'}


def test_the_first_items_have_the_shots_that_they_have_among_all():
    examples = [Example(row=row, content=row) for row in range(20)]
    whole = list(items.with_shots(examples, 3, seed=1))
    with ours.first_items(5):
        assert list(items.with_shots(examples, 3, seed=1)) == whole[:5]
    assert list(items.with_shots(examples, 3, seed=1)) == whole


def test_a_trained_tokenizer_puts_a_bos_before_a_text():
    tokenizer = materials.make_tokenizer(['the cat and the dog'] * 5, 300)
    ids = tokenizer('the cat')['input_ids']
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids[1:]) == 'the cat'
    assert tokenizer('the cat', add_special_tokens=False)['input_ids'] == ids[1:]


ECHO = """
class Echo:
    def load(self, **arguments):
        print('noise')
        return arguments
    def measure(self):
        raise ValueError('no such row')
"""


def test_a_worker_answers_requests_and_reports_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_the_seconds_are_of_the_run_alone():
    from timing import measure

    wall, cpu, value = measure(lambda: np.ones(3).sum())
    assert value == 3
    assert 0 <= cpu < 1
    assert 0 < wall < 1
