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


ZERO_SHOT_ROWS = [row for row in LIKELIHOOD_ROWS if row.group is ZERO_SHOT]


@pytest.fixture
def results() -> list[RowResult]:
    """Return those of two rows, which differ in the seconds of lm_eval."""
    return [result(ZERO_SHOT_ROWS[0], lm_eval=2.0), result(ZERO_SHOT_ROWS[1], lm_eval=8.0)]


def test_a_row_has_medians_per_item_their_ratios_and_equal_predictions(results: list[RowResult]):
    record = results[0].as_json()

    assert record['seconds'] == {'ours': 0.1, 'bare_forward': 0.05, 'llm_foundry': 10.0, 'lm_eval': 0.2}
    assert record['ratios'] == {'llm_foundry/ours': 100, 'lm_eval/ours': 2, 'ours/bare_forward': 2}
    # Equal predictions, and those that both have.
    assert tuple(record['same']['llm_foundry']) == (1, 2)
    assert tuple(record['same']['lm_eval']) == (3, 3)
    assert record['same'].keys() == {'llm_foundry', 'lm_eval'}


def test_a_row_of_the_table_has_items_and_seconds_of_each_contender(results: list[RowResult]):
    first_row = rows_table(results).splitlines()[2].split()

    assert first_row[:7] == [ZERO_SHOT_ROWS[0].name, '8000', '10/2', '0.1', '0.05', '10', '0.2']


def test_a_group_has_geometric_means_of_ratios(results: list[RowResult]):
    (_, means), _ = group_means(LIKELIHOOD, results)

    assert list(means.values()) == pytest.approx([100.0, 4.0, 2.0])


def test_a_missed_target_is_shown_beside_the_mean(results: list[RowResult]):
    assert '2.00 (<= 1.1) MISSED' in groups_table(LIKELIHOOD, results)


@pytest.mark.parametrize('part', PARTS)
def test_a_quick_run_has_all_rows_and_contenders(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)

    contenders_with_jobs = set()
    for row in PARTS[part].rows:
        jobs = row.jobs(Place(ROOT / 'eval_data', tmp_path), quick=True)
        contenders_with_jobs |= jobs.keys()
        contenders_of_targets = {name for ratio in row.group.targets for name in ratio.split('/')}
        assert contenders_of_targets <= jobs.keys()

    assert contenders_with_jobs >= PARTS[part].contenders.keys()


@pytest.mark.parametrize(
    ('num_tokens', 'mean_length', 'num_reads'),
    [
        (3066, 15.33, 1125),  # many short rows
        (24564, 2047.0, 43),  # two rows fill a batch
        (3500, 600.0, 172),
    ],
)
def test_the_bare_forward_runs_the_planned_tokens_and_reads(num_tokens: int, mean_length: float, num_reads: int):
    batches = bare_batches(num_tokens=num_tokens, mean_length=mean_length, num_reads=num_reads, tokens_per_batch=4096)

    assert sum(batch.num_rows * batch.length for batch in batches) == num_tokens
    assert sum(batch.num_rows * batch.num_reads for batch in batches) == num_reads
    assert all(batch.num_rows * batch.length <= 4096 for batch in batches)


def test_variants_run_one_by_one_give_the_same_choices_for_more_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(parts, 'SCORE_SOURCES', parts.SCORE_SOURCES[1:])
    jobs = SCORE_ROWS[0].jobs(Place(ROOT / 'eval_data', tmp_path), quick=True)

    def answer_of(contender: ours.Ours, name: str) -> dict[str, Any]:
        contender.load(str(MODEL))
        return contender.measure(**{**jobs[name], 'max_seq_len': 512})

    together = answer_of(ours.Ours(), 'ours')
    alone = answer_of(ours.Alone(), 'alone')

    assert together['predictions'] == alone['predictions']
    assert together['num_items'] == alone['num_items'] == 4
    share_of_tokens_run = float(together['notes']['tokens run'].split()[0])
    assert share_of_tokens_run < 1
