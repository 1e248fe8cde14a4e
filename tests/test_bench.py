"""The benchmark: its table, its jobs, and our contenders on a tiny model."""

import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))

import ours
import parts
from bare_forward import bare_batches
from parts import LIKELIHOOD_ROWS, PARTS, SCORE_ROWS, ZERO_SHOT, Place
from table import RowResult, group_means, groups_table, rows_table

MODEL = ROOT / 'tests' / 'fixtures' / 'models' / 'rotary_bos'
LIKELIHOOD = PARTS['likelihood']


def measured(num_items: int, *cpu_seconds: float, **answer: Any) -> list[dict[str, Any]]:
    answer = {'predictions': [], 'notes': {}, 'num_items': num_items, **answer}
    return [{**answer, 'wall_seconds': 2 * seconds, 'cpu_seconds': seconds} for seconds in cpu_seconds]


def result(row: parts.TaskRow, *, lm_eval: float) -> RowResult:
    rounds = {
        'ours': measured(10, 1.0, 9.0, 1.0, predictions=[1, 0, 1]),
        'bare_forward': measured(10, 0.5),
        'llm_foundry': measured(2, 20.0, predictions=[1, 1]),
        'lm_eval': measured(10, lm_eval, predictions=[1, 0, 1], batch_size=8),
    }
    return RowResult(row=row, vocabulary=8000, rounds=rounds)


def test_rows_have_medians_per_item_and_groups_geometric_means_compared_with_targets():
    two = [row for row in LIKELIHOOD_ROWS if row.group is ZERO_SHOT][:2]
    results = [result(two[0], lm_eval=2.0), result(two[1], lm_eval=8.0)]
    record = results[0].as_json()
    assert record['seconds'] == {'ours': 0.1, 'bare_forward': 0.05, 'llm_foundry': 10.0, 'lm_eval': 0.2}
    assert record['ratios'] == {'llm_foundry/ours': 100, 'lm_eval/ours': 2, 'ours/bare_forward': 2}
    assert {name: tuple(pair) for name, pair in record['same'].items()} == {'llm_foundry': (1, 2), 'lm_eval': (3, 3)}
    (_, means), _ = group_means(LIKELIHOOD, results)
    assert list(means.values()) == pytest.approx([100.0, 4.0, 2.0])
    assert '2.00 (<= 1.1) MISSED' in groups_table(LIKELIHOOD, results)
    assert rows_table(results).splitlines()[2].split()[:7] == [two[0].name, '8000', '10/2', '0.1', '0.05', '10', '0.2']


@pytest.mark.parametrize('part', PARTS)
def test_a_quick_run_has_all_rows_and_contenders(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    asked = set()
    for row in PARTS[part].rows:
        jobs = row.jobs(Place(ROOT / 'eval_data', tmp_path), quick=True)
        asked |= jobs.keys()
        assert {name for ratio in row.group.targets for name in ratio.split('/')} <= jobs.keys()
    assert asked >= PARTS[part].contenders.keys()


@pytest.mark.parametrize(
    ('num_tokens', 'mean_length', 'num_reads'), [(3066, 15.33, 1125), (24564, 2047.0, 43), (3500, 600.0, 172)]
)
def test_the_bare_forward_runs_the_planned_tokens_and_reads(num_tokens: int, mean_length: float, num_reads: int):
    batches = bare_batches(num_tokens=num_tokens, mean_length=mean_length, num_reads=num_reads, tokens_per_batch=4096)
    assert sum(batch.num_rows * batch.length for batch in batches) == num_tokens
    assert sum(batch.num_rows * batch.num_reads for batch in batches) == num_reads
    assert all(batch.num_rows * batch.length <= 4096 for batch in batches)


def test_variants_run_one_by_one_give_the_same_choices_for_more_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(parts, 'SCORE_SOURCES', parts.SCORE_SOURCES[1:])
    answers = {}
    for name, contender in (('ours', ours.Ours()), ('alone', ours.Alone())):
        contender.load(str(MODEL))
        job = SCORE_ROWS[0].jobs(Place(ROOT / 'eval_data', tmp_path), quick=True)[name]
        answers[name] = contender.measure(**{**job, 'max_seq_len': 512})
    assert answers['ours']['predictions'] == answers['alone']['predictions']
    assert answers['ours']['num_items'] == answers['alone']['num_items'] == 4
    assert float(answers['ours']['notes']['tokens run'].split()[0]) < 1
