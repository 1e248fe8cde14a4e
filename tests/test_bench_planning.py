"""The benchmark of planning: which rows and tasks it takes, and that it runs."""

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))

import planning


@pytest.mark.parametrize(('percent', 'rows'), [(10, [0, 10]), (30, [0, 3, 6, 10, 13]), (100, list(range(15)))])
def test_a_share_is_spread_over_the_file(write_jsonl, tmp_path, percent: int, rows: list[int]):
    write_jsonl('data/a/rows.jsonl', list(range(15)))
    planning.write_share(
        [{'dataset_uri': 'a/rows.jsonl'}], tmp_path / 'data', planning.SHARES[percent], tmp_path / 'out'
    )
    assert [json.loads(line) for line in (tmp_path / 'out/a/rows.jsonl').read_text().splitlines()] == rows


def test_tasks_without_a_file_and_those_that_cannot_be_run_are_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in (
        'safety/bbq_standin.jsonl',
        'reading_comprehension/squad.jsonl',
        'symbolic_problem_solving/gsm8k.jsonl',
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = {entry['label']: entry['dataset_uri'] for entry in planning.task_entries(tmp_path)}
    assert found == {'squad': 'reading_comprehension/squad.jsonl', 'bbq': 'safety/bbq_standin.jsonl'}


@pytest.mark.slow
def test_the_benchmark_runs_on_our_own_rows(tmp_path):
    for name in ('yamls', 'eval_data'):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, ROOT / 'scripts/bench/planning.py', '--quick', '--data-root', 'eval_data']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ}, check=True)
    assert '10 %' in done.stdout
    (share,) = json.loads((tmp_path / 'runs/bench/planning.json').read_text())['shares']
    assert share['without_cache']['items'] == share['with_cache']['items'] > 44
    assert share['without_cache']['tokens'] == share['with_cache']['tokens']
