"""`gauntlet compare` on runs that differ in more than the model: in rows, tasks, gauntlets, settings."""

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
def test_rows_that_one_run_lacks_are_left_out_of_both(compared, runs: dict[str, Path], tmp_path: Path, is_turned: bool):
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


def test_tasks_with_unscored_items_are_not_compared_without_being_allowed(compared, unscored):
    (found,) = compared(*unscored)
    reason = '2 of 12 items unscored: there is no answer'
    assert found['tasks'][CHOICES]['difference'] == found['tasks'][CHOICES]['second'] == {'reason': reason}
    assert found['composites']['reading']['difference'] == {
        'reason': f'benchmarks without a score: {CHOICES} ({reason})'
    }
    known = {key: paired(key, *unscored) for key in (TOPICS, LINES, RIDDLES)}
    check_differences({key: one for key, one in found['tasks'].items() if key != CHOICES}, known)


def test_the_items_that_are_scored_in_both_are_compared_where_that_is_allowed(compared, unscored):
    """Rows that one model did not answer say nothing of the difference: the other's go as well."""
    (found,) = compared(*unscored, '--allow-missing')
    check_differences(found['tasks'], {key: paired(key, *unscored) for key in ROWS})


def test_tasks_that_only_one_run_has_are_warned_of_and_left_out(compared, make_run, runs: dict[str, Path]):
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


def test_another_gauntlet_is_warned_of_and_that_of_the_first_is_taken(compared, make_run, runs: dict[str, Path]):
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


def test_other_semantics_and_ways_of_drawing_shots_are_warned_of(compared, make_run):
    one = make_run('one', [LINES])
    other = make_run('other', [LINES], '--semantics', 'reference', '--fewshot', 'fixed')
    (found,) = compared(one, other)
    assert found['warnings'] == ['semantics is corrected and reference', 'fewshot is reference and fixed']
