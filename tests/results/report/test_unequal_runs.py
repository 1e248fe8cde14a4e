"""`gauntlet compare` with runs that differ in rows, tasks, gauntlets or settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared_runs import AGIEVAL, BASELINES, CHOICES, LINES, RIDDLES, ROWS, SIZES, TOPICS, answers_of, copy_run
from paired_estimates import check_differences, combined, composites_of, paired


def without_score(key: str, reason: str) -> dict[str, str]:
    return {'reason': f'benchmarks without a score: {key} ({reason})'}


@pytest.mark.parametrize('is_turned', [False, True])
def test_rows_missing_from_one_run_are_left_out_of_both(
    compared, runs: dict[str, Path], tmp_path: Path, is_turned: bool
):
    part = copy_run(runs['b'], tmp_path / 'part', without={CHOICES: [0, 4, 7], TOPICS: [1, 13]})
    pair = (part, runs['a']) if is_turned else (runs['a'], part)
    (found,) = compared(*pair)
    tasks = {key: paired(key, *pair) for key in ROWS}
    sizes = {**SIZES, CHOICES: 9, TOPICS: 12}
    check_differences(found['tasks'], tasks)
    check_differences(found['composites'], composites_of(tasks, sizes))
    assert {key: one['num_items'] for key, one in found['tasks'].items()} == sizes
    assert found['composites']['reading']['num_items'] == 9 + 7
    for warning, key, counts in zip(found['warnings'], (CHOICES, TOPICS), ((12, 9), (14, 12)), strict=True):
        first, second = sorted(counts, reverse=not is_turned)
        assert warning.startswith(f'{key}: {min(counts)} ') and warning.endswith(f' {first} and {second}')


def test_tasks_without_an_item_in_common_have_no_difference(compared, runs: dict[str, Path], tmp_path: Path):
    one = copy_run(runs['a'], tmp_path / 'one', without={RIDDLES: [0, 1, 2]})
    other = copy_run(runs['b'], tmp_path / 'other', without={RIDDLES: [3, 4, 5, 6]})
    (found,) = compared(one, other)
    task, reason = found['tasks'][RIDDLES], 'the runs have no item in common'
    assert (task['difference'], task['num_items'], task['p_holm']) == ({'reason': reason}, 0, None)
    assert found['composites']['reading']['difference'] == without_score(RIDDLES, reason)


def test_tasks_with_unscored_items_are_compared_only_with_allow_missing(compared, unscored):
    (found,) = compared(*unscored)
    reason = '2 of 12 items unscored: there is no answer'
    assert found['tasks'][CHOICES]['difference'] == found['tasks'][CHOICES]['second'] == {'reason': reason}
    assert found['composites']['reading']['difference'] == without_score(CHOICES, reason)
    expected = {key: paired(key, *unscored) for key in ROWS}  # over the items that are scored in both
    del found['tasks'][CHOICES]
    check_differences(found['tasks'], {key: expected[key] for key in (TOPICS, LINES, RIDDLES)})
    check_differences(compared(*unscored, '--allow-missing')[0]['tasks'], expected)


def test_tasks_of_only_one_run_are_left_out_with_a_warning(compared, make_run, runs: dict[str, Path]):
    few = make_run('few', [CHOICES, RIDDLES])
    (found,), (turned,) = compared(runs['a'], few), compared(few, runs['a'])
    assert list(found['tasks']) == [CHOICES, RIDDLES] and found['score'] == {}
    (warning,) = found['warnings']
    assert str(few) in warning and f'{TOPICS}, {LINES}, {AGIEVAL}' in warning
    assert turned['warnings'] == [warning]
    assert found['composites']['reading']['difference']['value'] == 0
    assert found['composites']['rest']['difference'] == without_score(f'{TOPICS}, {LINES}', 'did not run')
    assert turned['composites'] == {}  # the first has no gauntlet


def test_another_gauntlet_is_a_warning_and_the_first_is_used(compared, make_run, runs: dict[str, Path]):
    other = make_run('other', ROWS, answers=answers_of(2, ROWS), gauntlet={'weighting': 'EQUAL'})
    (found,), (turned,) = compared(runs['a'], other), compared(other, runs['a'])
    assert AGIEVAL in found['warnings'][0] and 'gauntlets differ' in found['warnings'][1]
    assert f'by that of {runs["a"]}' in found['warnings'][1] and f'by that of {other}' in turned['warnings'][1]
    tasks = {key: paired(key, runs['a'], other) for key in ROWS}
    check_differences(found['composites'], composites_of(tasks, SIZES))
    expected = combined([tasks[CHOICES], tasks[RIDDLES]], [1 / 2 / (1 - BASELINES[CHOICES]), 1 / 2]).value
    assert turned['composites']['reading']['difference']['value'] == pytest.approx(-expected, abs=1e-13)


def test_other_semantics_and_fewshot_are_warnings(compared, make_run):
    one = make_run('one', [LINES])
    other = make_run('other', [LINES], '--semantics', 'reference', '--fewshot', 'fixed')
    (found,) = compared(one, other)
    assert found['warnings'] == ['semantics is corrected and reference', 'fewshot is reference and fixed']
