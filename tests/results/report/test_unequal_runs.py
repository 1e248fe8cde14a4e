"""`gauntlet compare` with runs that differ in rows, tasks, gauntlets or settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared_runs import (
    AGIEVAL,
    BASELINES,
    CHOICES,
    LINES,
    RIDDLES,
    ROWS,
    SIZES,
    TOPICS,
    answers_of,
    copy_run,
    record_of,
)
from paired_estimates import check_differences, combined, composites_of, paired


@pytest.mark.parametrize('is_turned', [False, True])
def test_rows_missing_from_one_run_are_left_out_of_both(
    compared, runs: dict[str, Path], tmp_path: Path, is_turned: bool
):
    lacking = {CHOICES: [0, 4, 7], TOPICS: [1, 13]}
    part = copy_run(runs['b'], tmp_path / 'part', without=lacking)
    pair = (part, runs['a']) if is_turned else (runs['a'], part)
    (found,) = compared(*pair)
    tasks = {key: paired(key, *pair) for key in ROWS}
    sizes = {**SIZES, CHOICES: 9, TOPICS: 12}
    check_differences(found['tasks'], tasks)
    check_differences(found['composites'], composites_of(tasks, sizes))
    assert {key: one['num_items'] for key, one in found['tasks'].items()} == sizes
    assert found['composites']['reading']['num_items'] == 9 + 7
    counts = {CHOICES: ('9 and 12' if is_turned else '12 and 9'), TOPICS: '12 and 14' if is_turned else '14 and 12'}
    assert found['warnings'] == [
        f'{CHOICES}: 9 items are in both, of {counts[CHOICES]}',
        f'{TOPICS}: 12 items are in both, of {counts[TOPICS]}',
    ]


def test_tasks_without_an_item_in_common_have_no_difference(compared, runs: dict[str, Path], tmp_path: Path):
    one = copy_run(runs['a'], tmp_path / 'one', without={RIDDLES: [0, 1, 2]})
    other = copy_run(runs['b'], tmp_path / 'other', without={RIDDLES: [3, 4, 5, 6]})
    (found,) = compared(one, other)
    reason = 'the runs have no item in common'
    assert found['tasks'][RIDDLES]['difference'] == {'reason': reason}
    assert found['tasks'][RIDDLES]['num_items'] == 0 and found['tasks'][RIDDLES]['p_holm'] is None
    assert found['composites']['reading']['difference'] == {
        'reason': f'benchmarks without a score: {RIDDLES} ({reason})'
    }


def test_tasks_with_unscored_items_are_not_compared_by_default(compared, unscored):
    (found,) = compared(*unscored)
    reason = '2 of 12 items unscored: there is no answer'
    assert found['tasks'][CHOICES]['difference'] == found['tasks'][CHOICES]['second'] == {'reason': reason}
    assert found['composites']['reading']['difference'] == {
        'reason': f'benchmarks without a score: {CHOICES} ({reason})'
    }
    known = {key: paired(key, *unscored) for key in (TOPICS, LINES, RIDDLES)}
    check_differences({key: one for key, one in found['tasks'].items() if key != CHOICES}, known)


def test_allow_missing_compares_items_scored_in_both(compared, unscored):
    """Items that are unscored in one run are left out of both."""
    (found,) = compared(*unscored, '--allow-missing')
    check_differences(found['tasks'], {key: paired(key, *unscored) for key in ROWS})


def test_tasks_of_only_one_run_are_left_out_with_a_warning(compared, make_run, runs: dict[str, Path]):
    few = make_run('few', [CHOICES, RIDDLES])
    (found,) = compared(runs['a'], few)
    assert list(found['tasks']) == [CHOICES, RIDDLES]
    assert found['warnings'] == [f'{few} has no {TOPICS}, {LINES}, {AGIEVAL}']
    assert found['composites']['reading']['difference']['value'] == 0
    assert found['composites']['rest']['difference'] == {
        'reason': f'benchmarks without a score: {TOPICS}, {LINES} (did not run)'
    }
    assert found['score'] == {}
    (turned,) = compared(few, runs['a'])
    assert turned['composites'] == {}  # the first has no gauntlet
    assert turned['warnings'] == found['warnings']


def test_another_gauntlet_is_a_warning_and_the_first_is_used(compared, make_run, runs: dict[str, Path]):
    answers = answers_of(2, ROWS)
    other = make_run('other', ROWS, answers=answers, gauntlet={'weighting': 'EQUAL'})
    versions = [record_of(run)['composites']['version'] for run in (runs['a'], other)]
    assert versions[0] != versions[1]
    (found,) = compared(runs['a'], other)
    assert found['warnings'] == [
        f'{other} has no {AGIEVAL}',
        f'the gauntlets differ (version {versions[0]} and {versions[1]}): in tasks, shots, rows, weights or '
        f'settings; composites are made by that of {runs["a"]}, over the items that both have',
    ]
    tasks = {key: paired(key, runs['a'], other) for key in ROWS}
    check_differences(found['composites'], composites_of(tasks, SIZES))
    (turned,) = compared(other, runs['a'])
    equal = [1 / 2 / (1 - BASELINES[CHOICES]), 1 / 2]
    expected = combined([tasks[CHOICES], tasks[RIDDLES]], equal).value
    assert turned['composites']['reading']['difference']['value'] == pytest.approx(-expected, abs=1e-13)


def test_other_semantics_and_fewshot_are_warnings(compared, make_run):
    one = make_run('one', [LINES])
    other = make_run('other', [LINES], '--semantics', 'reference', '--fewshot', 'fixed')
    (found,) = compared(one, other)
    assert found['warnings'] == ['semantics is corrected and reference', 'fewshot is reference and fixed']
