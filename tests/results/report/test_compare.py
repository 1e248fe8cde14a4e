"""`gauntlet compare` of two and three runs, checked with NumPy on samples and rows."""

from __future__ import annotations

import csv
import io
import math
from itertools import chain
from pathlib import Path

import pytest
from paired_estimates import bits_per_byte, check_differences, combined, composites_of, paired, score_differences
from recorded_runs import (
    AGIEVAL,
    BASELINES,
    CATEGORIES,
    CHOICES,
    LINES,
    QUESTIONS,
    RIDDLES,
    ROWS,
    SIZES,
    TOPICS,
    answers_of,
    copy_run,
    record_of,
    rows_of_table,
)


def test_differences_are_paired_with_clustered_errors(compared, runs: dict[str, Path]):
    """Tasks are paired by item and SCORE by question; composites count a passage shared by tasks once."""
    (found,) = compared(runs['a'], runs['b'])
    tasks = {key: paired(key, runs['a'], runs['b']) for key in ROWS}
    composites = composites_of(tasks, SIZES)
    apart = math.hypot(
        *(SIZES[key] / 35 / (1 - BASELINES[key]) * tasks[key].error for key in CATEGORIES['rest'])
    )  # as if no passage were in two tasks
    assert abs(composites['rest'].error - apart) > 0.01 * apart
    score = score_differences(runs['a'], runs['b'])
    assert all(estimate.value != 0 for estimate in score.values())
    check_differences(found['tasks'], tasks)
    check_differences(found['composites'], composites)
    check_differences(found['score'], score)
    assert (found['first'], found['second'], found['warnings']) == (str(runs['a']), str(runs['b']), [])
    counts = {'reading': 12 + 7, 'rest': 14 + 9 + 12, 'core': 12 + 7 + 14 + 9, 'reading alone': 12 + 7}
    assert {key: one['num_items'] for key, one in found['tasks'].items()} == SIZES
    assert {name: one['num_items'] for name, one in found['composites'].items()} == counts
    assert {one['num_items'] for one in found['score'].values()} == {len(QUESTIONS)}
    for place, run in (('first', 'a'), ('second', 'b')):
        record = record_of(runs[run])
        recorded = record['composites']['categories'] | record['composites']['averages']
        assert {name: one[place] for name, one in found['composites'].items()} == recorded
        for key, task in record['tasks'].items():
            assert found['tasks'][key][place] == next(iter(task['metrics'].values()))
        for name, one in found['score'].items():
            dataset, perturbation, metric = name.split()
            assert one[place] == record['score'][dataset]['perturbations'][perturbation][metric]


def test_tables_and_csv_show_the_numbers_of_json_the_largest_first(
    gauntlet, compared, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv('COLUMNS', '120')  # enough for all names
    words = ('compare', runs['a'], runs['b'])
    status, out, _ = gauntlet(*words)
    assert status == 0 and out.splitlines()[0] == 'accuracy: b \u2212 a'
    table = rows_of_table(out)
    (found,) = compared(*words[1:])
    shares = found['composites']['core']['difference']['variance_shares']
    largest = max(shares, key=lambda key: shares[key])
    assert f'error of core, by share of its variance: {100 * shares[largest]:.0f} % {largest}, ' in ' '.join(
        out.split()
    )
    assert shares.keys() == ROWS.keys() and sum(shares.values()) == pytest.approx(1) and 'error of rest' not in out
    groups = [found[kind] for kind in ('tasks', 'composites', 'score')]
    by_size = [sorted(group, key=lambda name: -abs(group[name]['difference']['value'])) for group in groups]
    every = {name: one for group in groups for name, one in group.items()}
    assert [name for name in table if name in every] == list(chain(*by_size))
    markdown = gauntlet(*words, '--format', 'markdown')[1]
    names = [line.split('|')[1].strip(' *') for line in markdown.splitlines() if line.startswith('|')]
    assert names[2:] == [*by_size[1], *by_size[0], *by_size[2]]  # composites are first
    of_csv = {row['name']: row for row in csv.DictReader(io.StringIO(gauntlet(*words, '--format', 'csv')[1]))}
    assert of_csv.keys() == every.keys()
    for name, one in every.items():
        first, second, difference = (one[place]['value'] for place in ('first', 'second', 'difference'))
        error = one['difference']['standard_error']
        assert table[name] == [
            f'{first:.3f}',
            f'{second:.3f}',
            f'{difference:+.3f}',
            f'{error:.3f}',
            (f'{one["p_holm"]:.3f}' if one['p_holm'] >= 0.001 else '<0.001') + '*' * (one['p_holm'] < 0.05),
            f'{one["detectable"]:.3f}',
        ]
        row = of_csv[name]
        assert (row['first_run'], row['second_run']) == (str(runs['a']), str(runs['b']))
        assert [row[key] for key in ('difference', 'standard_error', 'p_holm')] == [
            repr(number) for number in (difference, error, one['p_holm'])
        ]


def test_a_star_marks_significant_differences(gauntlet, make_run, monkeypatch: pytest.MonkeyPatch):
    """All lines are wrong, then right: a sign test of 8 clusters has p = 2 / 256, and twice that after Holm."""
    keys = [LINES, RIDDLES]
    for name, is_argmax in (('wrong', False), ('right', True)):
        answers = [{**one, 'is_argmax': is_argmax} if 'is_argmax' in one else one for one in answers_of(0, keys)]
        monkeypatch.chdir(make_run(name, keys, answers=answers).parent)
    table = rows_of_table(gauntlet('compare', 'wrong', 'right')[1])
    assert table[LINES][:3] == ['0.000', '1.000', '+1.000'] and table[LINES][4:] == [f'{1 / 64:.3f}*', '-']
    assert table[LINES][3].startswith('[') and table[RIDDLES][-2:] == ['1.000', '-']


def test_each_further_run_is_compared_with_the_first(
    gauntlet, compared, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = ['llama[old]', 'llama[/new]', 'c']  # brackets are no markup
    for name, run in zip(names, 'abc', strict=True):
        copy_run(runs[run], tmp_path / name)
    monkeypatch.chdir(tmp_path)
    found = compared(*names)
    assert [(one['first'], one['second']) for one in found] == [(names[0], names[1]), (names[0], names[2])]
    for one, name in zip(found, names[1:], strict=True):
        (alone,) = compared(names[0], name)
        for task, difference in alone['tasks'].items():
            assert {**one['tasks'][task], 'p_holm': 0} == {**difference, 'p_holm': 0}
    p_values = [difference['p_value'] for one in found for difference in one['tasks'].values()]
    smallest = min((difference for one in found for difference in one['tasks'].values()), key=lambda d: d['p_value'])
    assert smallest['p_holm'] == min(1.0, smallest['p_value'] * len(p_values))  # of all that are shown
    status, out, err = gauntlet('compare', *names)
    assert (status, err) == (0, '') and all(name in out for name in names)


def test_another_metric_is_compared_for_tasks_that_have_it(compared, gauntlet, runs: dict[str, Path]):
    words = (runs['a'], runs['b'], '--metric', 'GoldBitsPerByte')
    (found,) = compared(*words)
    keys = [CHOICES, TOPICS, LINES]
    check_differences(found['tasks'], {key: paired(key, runs['a'], runs['b'], bits_per_byte(key)) for key in keys})
    assert found['composites'] == found['score'] == {}
    status, out, _ = gauntlet('compare', *words)
    assert status == 0 and out.startswith('GoldBitsPerByte: ') and {*keys} == {*rows_of_table(out)} & {*ROWS}


def test_an_absent_metric_has_a_reason(compared, gauntlet, runs: dict[str, Path]):
    words = (runs['a'], runs['b'], '--metric', 'TruncatedShare')
    (found,) = compared(*words)
    reason = 'TruncatedShare is not known of 7 of 7 items'
    assert found['tasks'].keys() == {RIDDLES}
    task = found['tasks'][RIDDLES]
    assert (task['difference'], task['first']) == ({'reason': reason}, {'reason': reason})
    assert (task['p_value'], task['p_holm']) == (None, None)
    assert compared(*words[:3], 'CutShare') == [found]  # its earlier name
    out = gauntlet('compare', *words)[1]
    assert RIDDLES not in rows_of_table(out) and f'- {reason}: {RIDDLES}' in out


# Runs that differ in rows, tasks, gauntlets or settings.


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
