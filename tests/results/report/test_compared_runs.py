"""`gauntlet compare` with two and three runs and other metrics, checked with NumPy on samples and rows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from command_line import loaded_by
from compared_runs import (
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
    samples_of,
)
from paired_estimates import bits_per_byte, check_differences, cluster_of, composites_of, paired, score_differences


def test_fixture_runs_differ_and_have_clusters(runs: dict[str, Path]):
    """Precondition of the tests below."""
    for key, rows in ROWS.items():
        first, second = (np.array([s['score'] for s in samples_of(runs[name], key)]) for name in 'ab')
        assert 0 < first.mean() < 1 and 0 < second.mean() < 1 and (first != second).any()
        names = {s['row']: s['cluster'] for s in samples_of(runs['a'], key)}
        ours = {row: cluster_of(key, row) for row in range(len(rows))}
        assert [names[i] == names[j] for i in names for j in names] == [ours[i] == ours[j] for i in ours for j in ours]
    assert len({cluster_of(LINES, row) for row in range(9)}) == 8
    differences = score_differences(runs['a'], runs['b'])
    assert all(estimate.value != 0 for estimate in differences.values())


# Two runs.


def test_task_differences_are_paired_by_item_with_clustered_errors(compared, runs: dict[str, Path]):
    (found,) = compared(runs['a'], runs['b'])
    assert (found['first'], found['second']) == (str(runs['a']), str(runs['b']))
    assert found['warnings'] == []
    check_differences(found['tasks'], {key: paired(key, runs['a'], runs['b']) for key in ROWS})
    assert {key: one['num_items'] for key, one in found['tasks'].items()} == SIZES
    for place, name in (('first', 'a'), ('second', 'b')):
        for key, task in record_of(runs[name])['tasks'].items():
            assert found['tasks'][key][place] == next(iter(task['metrics'].values()))


def test_composite_errors_count_a_passage_shared_by_tasks_once(compared, runs: dict[str, Path]):
    (found,) = compared(runs['a'], runs['b'])
    tasks = {key: paired(key, runs['a'], runs['b']) for key in ROWS}
    expected = composites_of(tasks, SIZES)
    check_differences(found['composites'], expected)
    apart = math.hypot(
        *(SIZES[key] / 35 / (1 - BASELINES[key]) * tasks[key].error for key in CATEGORIES['rest'])
    )  # as if no passage were in two tasks
    assert abs(expected['rest'].error - apart) > 0.01 * apart
    counts = {'reading': 12 + 7, 'rest': 14 + 9 + 12, 'core': 12 + 7 + 14 + 9, 'reading alone': 12 + 7}
    assert {name: one['num_items'] for name, one in found['composites'].items()} == counts
    for place, name in (('first', 'a'), ('second', 'b')):
        composites = record_of(runs[name])['composites']
        own = composites['categories'] | composites['averages']
        assert {key: one[place] for key, one in found['composites'].items()} == own


def test_score_differences_are_over_questions(compared, runs: dict[str, Path]):
    (found,) = compared(runs['a'], runs['b'])
    check_differences(found['score'], score_differences(runs['a'], runs['b']))
    assert {one['num_items'] for one in found['score'].values()} == {len(QUESTIONS)}
    for name, one in found['score'].items():
        dataset, perturbation, metric = name.split()
        for place, run in (('first', 'a'), ('second', 'b')):
            assert one[place] == record_of(runs[run])['score'][dataset]['perturbations'][perturbation][metric]


def test_a_run_does_not_differ_from_itself(compared, runs: dict[str, Path], tmp_path: Path):
    again = copy_run(runs['a'], tmp_path / 'again')
    for (found,) in (compared(runs['a'], again), compared(runs['a'], runs['a'])):
        assert found['warnings'] == []
        everything = [*found['tasks'].values(), *found['composites'].values(), *found['score'].values()]
        assert len(everything) == 4 + 4 + 4
        for one in everything:
            assert one['difference'] == {'value': 0, 'standard_error': 0}
            assert (one['p_value'], one['p_holm'], one['detectable']) == (1, 1, None)


def test_the_table_shows_both_runs_and_every_difference(
    gauntlet, compared, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(runs['a'].parent)
    status, out, _ = gauntlet('compare', 'a', 'b')
    assert status == 0
    assert out.splitlines()[0].strip() == 'accuracy: b \u2212 a'
    table = rows_of_table(out)
    (found,) = compared('a', 'b')
    entries = found['tasks'] | found['composites'] | found['score']
    assert list(table) == list(entries)
    for name, one in entries.items():
        first, second, difference = (one[place]['value'] for place in ('first', 'second', 'difference'))
        error = one['difference']['standard_error']
        p, p_holm = one['p_value'], one['p_holm']
        assert table[name] == [
            f'{first:.3f}',
            f'{second:.3f}',
            f'{difference:+.3f}',
            f'±{error:.3f}',
            f'{p:.4f}' if p >= 0.0001 else '<0.0001',
            (f'{p_holm:.4f}' if p_holm >= 0.0001 else '<0.0001') + ('*' if p_holm < 0.05 else ''),
            f'{one["detectable"]:.3f}',
            str(one['num_items']),
        ]
    assert 'Holm' in out and 'warning' not in out


def test_a_star_marks_significant_differences(gauntlet, make_run, monkeypatch: pytest.MonkeyPatch):
    """All lines are wrong, then right: a sign test of 8 clusters has p = 2 / 256, and twice that after Holm."""
    keys = [LINES, RIDDLES]
    wrong = [answer | ({'is_argmax': False} if 'is_argmax' in answer else {}) for answer in answers_of(0, keys)]
    right = [answer | ({'is_argmax': True} if 'is_argmax' in answer else {}) for answer in answers_of(0, keys)]
    first, _ = make_run('wrong', keys, answers=wrong), make_run('right', keys, answers=right)
    monkeypatch.chdir(first.parent)
    table = rows_of_table(gauntlet('compare', 'wrong', 'right')[1])
    assert table[LINES] == ['0.000', '1.000', '+1.000', '±0.000', f'{1 / 128:.4f}', f'{1 / 64:.4f}*', '-', '9']
    assert table[RIDDLES][2:7] == ['+0.000', '±0.000', '1.0000', '1.0000', '-']


def test_names_with_brackets_are_printed_as_they_are(
    gauntlet, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ('llama[old]', 'llama[/new]'):
        copy_run(runs['a'], tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for others in (['llama[/new]'], ['llama[/new]', 'llama[old]']):
        status, out, err = gauntlet('compare', 'llama[old]', *others)
        assert (status, err) == (0, '')
        assert 'llama[old]' in out and 'llama[/new]' in out


# More than two runs.


def test_each_further_run_is_compared_with_the_first(
    gauntlet, compared, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(runs['a'].parent)
    found = compared('a', 'b', 'c')
    assert [(one['first'], one['second']) for one in found] == [('a', 'b'), ('a', 'c')]
    for one, other in zip(found, 'bc', strict=True):
        assert [one] == compared('a', other)
    status, out, _ = gauntlet('compare', 'a', 'b', 'c')
    assert status == 0
    assert out == ''.join(gauntlet('compare', 'a', other)[1] for other in 'bc')


def test_a_task_missing_from_one_run_has_no_difference_there(
    gauntlet, make_run, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    few = make_run('few', [CHOICES, LINES])
    monkeypatch.chdir(runs['a'].parent)
    status, out, _ = gauntlet('compare', 'a', 'b', few)
    assert status == 0
    assert RIDDLES not in rows_of_table(out[out.index(f'{few} \u2212 a') :])
    assert f'warning: {few} has no {TOPICS}, {RIDDLES}, {AGIEVAL}' in ' '.join(out.split())


# Another metric.


def test_another_metric_is_compared_for_tasks_that_have_it(compared, gauntlet, runs: dict[str, Path]):
    (found,) = compared(runs['a'], runs['b'], '--metric', 'GoldBitsPerByte')
    keys = [CHOICES, TOPICS, LINES]
    check_differences(found['tasks'], {key: paired(key, runs['a'], runs['b'], bits_per_byte(key)) for key in keys})
    assert found['composites'] == found['score'] == {}
    status, out, _ = gauntlet('compare', runs['a'], runs['b'], '--metric', 'GoldBitsPerByte')
    assert status == 0 and out.startswith('GoldBitsPerByte: ')
    assert list(rows_of_table(out)) == keys


def test_an_absent_metric_has_a_reason(compared, gauntlet, runs: dict[str, Path]):
    (found,) = compared(runs['a'], runs['b'], '--metric', 'TruncatedShare')
    assert list(found['tasks']) == [RIDDLES]
    reason = 'TruncatedShare is not known of 7 of 7 items'
    assert found['tasks'][RIDDLES]['difference'] == found['tasks'][RIDDLES]['first'] == {'reason': reason}
    assert found['tasks'][RIDDLES]['p_value'] is found['tasks'][RIDDLES]['p_holm'] is None
    assert compared(runs['a'], runs['b'], '--metric', 'CutShare')[0] == found  # its earlier name
    _, out, _ = gauntlet('compare', runs['a'], runs['b'], '--metric', 'TruncatedShare')
    assert rows_of_table(out)[RIDDLES][:7] == ['-', '-', '-', '', '-', '-', '-']
    assert f'- {reason}: {RIDDLES}' in out


# Start-up.


def test_compare_imports_no_torch_composer_or_transformers(runs: dict[str, Path], training: Path):
    names = ('torch', 'composer', 'transformers', 'datasets', 'sympy')
    for words in ([runs['a'], runs['b']], [training], [runs['a'], runs['b'], '--format', 'json']):
        assert loaded_by('compare', *words, names=names) == []
