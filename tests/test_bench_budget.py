"""The bench of time budgets: what it asks, and what it prints."""

from __future__ import annotations

import importlib.util
import json

import pytest
from paths import ROOT

from llmfoundry_gauntlet.suite import load_suite


@pytest.fixture(scope='module')
def bench():
    """The script."""
    spec = importlib.util.spec_from_file_location('bench_budget', ROOT / 'scripts/bench/budget.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tasks_at_hand_and_the_gauntlet_over_them_fit_together(bench, monkeypatch):
    monkeypatch.chdir(ROOT)
    tasks = bench.tasks_at_hand('eval_data')
    suite = load_suite(tasks, bench.gauntlet_over(tasks))
    assert len(suite.tasks) == 57 - 8  # all but those with programs
    assert [category.name for category in suite.gauntlet.categories][-1] == 'safety'
    fewer = [task for task in tasks if task['label'] in ('copa', 'gsm8k')]
    (first, second) = load_suite(fewer, bench.gauntlet_over(fewer)).gauntlet.categories
    assert [one.name for one in (*first.benchmarks, *second.benchmarks)] == ['copa', 'gsm8k']


def test_each_evaluation_has_a_line_with_its_share_of_the_budget(bench, capsys):
    evaluations = [
        {'items': 5, 'all_items': 90, 'average_error': 0.05, 'seconds': 11.0},
        {'items': 5, 'all_items': 90, 'average_error': None, 'seconds': 9.5},
    ]
    bench.print_job(10, json.loads(json.dumps(evaluations)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        'time_budget 10s, 90 items at hand',
        '  evaluation 0:  11.00 s, 110.0% of the budget, 5 items, average ± 0.0500; finds out which items fit',
        '  evaluation 1:   9.50 s,  95.0% of the budget, 5 items',
    ]
