"""`gauntlet compare` with two and three runs and other metrics, checked with NumPy on samples and rows."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from compared_runs import (
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
    label_of,
    record_of,
    rows_of_table,
)
from paired_estimates import bits_per_byte, check_differences, composites_of, paired, score_differences


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


def test_the_compared_scores_are_those_of_the_records(compared, runs: dict[str, Path]):
    (found,) = compared(runs['a'], runs['b'])
    for place, run in (('first', 'a'), ('second', 'b')):
        record = record_of(runs[run])
        composites = record['composites']['categories'] | record['composites']['averages']
        assert {name: one[place] for name, one in found['composites'].items()} == composites
        for key, task in record['tasks'].items():
            assert found['tasks'][key][place] == next(iter(task['metrics'].values()))
        for name, one in found['score'].items():
            dataset, perturbation, metric = name.split()
            assert one[place] == record['score'][dataset]['perturbations'][perturbation][metric]


def test_the_table_shows_both_runs_and_every_difference_by_size(
    gauntlet, compared, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv('COLUMNS', '120')  # enough for all names
    status, out, _ = gauntlet('compare', runs['a'], runs['b'])
    assert status == 0 and out.splitlines()[0] == 'accuracy: b \u2212 a'
    table = rows_of_table(out)
    (found,) = compared(runs['a'], runs['b'])
    groups = [found[kind] for kind in ('tasks', 'composites', 'score')]
    by_size = [sorted(group, key=lambda name: -abs(group[name]['difference']['value'])) for group in groups]
    assert [name for name in table if any(name in group for group in groups)] == list(chain(*by_size))
    for name, one in chain(*(group.items() for group in groups)):
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


def test_a_star_marks_significant_differences(gauntlet, make_run, monkeypatch: pytest.MonkeyPatch):
    """All lines are wrong, then right: a sign test of 8 clusters has p = 2 / 256, and twice that after Holm."""
    keys = [LINES, RIDDLES]
    for name, is_argmax in (('wrong', False), ('right', True)):
        answers = [{**one, 'is_argmax': is_argmax} if 'is_argmax' in one else one for one in answers_of(0, keys)]
        monkeypatch.chdir(make_run(name, keys, answers=answers).parent)
    table = rows_of_table(gauntlet('compare', 'wrong', 'right')[1])
    assert table[LINES][:3] == ['0.000', '1.000', '+1.000'] and table[LINES][4:] == [f'{1 / 64:.3f}*', '-']
    assert table[LINES][3].startswith('[') and table[RIDDLES][-2:] == ['1.000', '-']


def test_each_average_has_the_shares_of_its_tasks_in_the_variance(compared, gauntlet, make_run):
    """6 of 12 choices and 3 of 7 riddles become right: p (1 - p) / (n - 1), times 1.5 squared for the rescaled choices.

    The choices' 9/4 * 1/4 / 11 = 0.05114 and the riddles' 12/49 / 6 = 0.04082 are 56 % and 44 %.
    """

    def answers(num_choices: int, num_riddles: int) -> list[dict[str, Any]]:
        choices = [
            {'logprobs': [-1.0 if (place == row['gold']) == (number < num_choices) else -9.0 for place in range(3)]}
            for number, row in enumerate(ROWS[CHOICES])
        ]
        texts = [{'text': row['answer'] if number < num_riddles else '?'} for number, row in enumerate(ROWS[RIDDLES])]
        groups = {'choices': choices, 'riddles': texts}
        return [
            {'task': task, 'num_shots': 0, 'row': row, **answer}
            for task, group in groups.items()
            for row, answer in enumerate(group)
        ]

    benchmarks = {
        key: {'name': label_of(key), 'num_fewshot': 0, 'random_baseline': BASELINES[key]} for key in (CHOICES, RIDDLES)
    }
    categories = [{'name': 'reading', 'benchmarks': [*benchmarks.values()]}]
    changes = {'categories': categories, 'averages': {'core': ['reading']}, 'weighting': 'EQUAL'}
    words = {'gauntlet': changes, 'tasks': {'choices': {'cluster_key': None}}}
    first, second = (
        make_run(name, benchmarks, answers=answers(*counts), **words)
        for name, counts in {'a': (0, 0), 'b': (6, 3)}.items()
    )
    (found,) = compared(first, second)
    choices, riddles = 9 / 4 / 4 / 11, 12 / 49 / 6
    shares = {CHOICES: choices / (choices + riddles), RIDDLES: riddles / (choices + riddles)}
    assert found['composites']['core']['difference']['variance_shares'] == pytest.approx(shares)
    out = ' '.join(gauntlet('compare', first, second)[1].split())
    assert f'error of core, by share of its variance: 56 % {CHOICES}, 44 % {RIDDLES}' in out
    assert 'error of reading' not in out


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
