"""`--format`: the same scores as a table, in Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import loaded_by
from compared_runs import BASELINES, CHOICES, LINES, RIDDLES, ROWS, TOPICS, copy_run, record_of, rows_of_table
from rich.cells import cell_len

from llmfoundry_gauntlet.results.report.tables import plain

COMPOSITES = ['reading', 'rest', 'core', 'reading alone']
GROUPED = ['reading', CHOICES, RIDDLES, 'rest', TOPICS, LINES]  # of `CATEGORIES`; choices are in both
AVERAGES = ['core', 'reading alone']


def rows_of_markdown(out: str) -> dict[str, list[str]]:
    """Return the cells of each row by its first cell; the header has an empty first cell."""
    lines = [line for line in out.splitlines() if line.startswith('|')]
    assert len({cell_len(line) for line in lines}) == 1, 'pipes are not aligned'
    assert set(lines.pop(1)) == set('|:-')
    rows = [[cell.strip() for cell in line.removeprefix('| ').removesuffix(' |').split(' | ')] for line in lines]
    assert len({len(row) for row in rows}) == 1
    return {row[0]: row[1:] for row in rows}


def rows_of_csv(out: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(out)))


def printed(gauntlet: Any, *words: Any) -> str:
    status, out, err = gauntlet(*words)
    assert (status, err) == (0, '')
    return out


def formatted(measure: dict[str, Any]) -> list[str]:
    """Return a value and its error as in a table."""
    return [f'{measure["value"]:.3f}', f'{measure["standard_error"]:.3f}']


def test_markdown_has_composites_first_and_errors_beside_values(gauntlet, runs: dict[str, Path]):
    rows = rows_of_markdown(printed(gauntlet, 'show', runs['a'], '--format', 'markdown'))
    record = record_of(runs['a'])
    assert rows.pop('') == ['a', 'error', 'chance', 'majority']
    names = [name.strip('*') for name in rows]
    assert names == [*AVERAGES, *GROUPED, 'SCORE', *names[9:]]
    assert [name.strip('*') for name in rows if name[0] == '*'] == [*AVERAGES, 'reading', 'rest', 'SCORE']
    for name in ('reading', 'rest'):
        assert rows[f'**{name}**'] == [*formatted(record['composites']['categories'][name]), '', '']
    for key in ROWS:
        metrics = record['tasks'][key]['metrics']
        majority = f'{metrics["MajorityClass"]["value"]:.3f}' if 'MajorityClass' in metrics else ''
        assert rows[key] == [*formatted(next(iter(metrics.values()))), f'{BASELINES[key]:.3f}', majority]
    score = record['score']['agieval']['perturbations']['prompt']['accuracy']
    assert rows['agieval prompt accuracy'][:2] == formatted(score)


def test_markdown_of_several_runs_has_two_columns_for_each(gauntlet, training: Path):
    rows = rows_of_markdown(printed(gauntlet, 'show', training, '--format', 'markdown'))
    assert rows[''] == ['ba20', 'error', 'ba100', 'error', 'ba400', 'error', 'ba1000', 'error']
    records = [record_of(training / f'ba{batch}') for batch in (20, 100, 400, 1000)]
    metrics = [next(iter(record['tasks'][LINES]['metrics'].values())) for record in records]
    assert rows[LINES] == [cell for measure in metrics for cell in formatted(measure)]


def test_csv_has_every_number_in_full_precision(gauntlet, runs: dict[str, Path]):
    rows = rows_of_csv(printed(gauntlet, 'show', runs['a'], runs['b'], '--format', 'csv'))
    for name in ('a', 'b'):
        record = record_of(runs[name])
        mine = {
            (row['kind'], row['name'], row['part'], row['metric']): (row['value'], row['standard_error'])
            for row in rows
            if row['run'] == str(runs[name])
        }
        expected = {}
        for kind, group in (('category', 'categories'), ('average', 'averages')):
            for label, measure in record['composites'][group].items():
                expected[kind, label, '', 'Composite'] = measure
        for key, task in record['tasks'].items():
            for part, score in {'': task, **task.get('categories', {})}.items():
                expected.update({('task', key, part, metric): m for metric, m in score['metrics'].items()})
        for label, entry in record['score']['agieval']['perturbations'].items():
            for metric, found in entry.items():
                if isinstance(found, dict):
                    parts = {'': found} if 'value' in found else found
                    expected.update({('perturbation', f'agieval/{label}', p, metric): m for p, m in parts.items()})
        assert mine.keys() == expected.keys() and len(mine) > 60
        for key, (value, error) in mine.items():
            assert value == repr(expected[key]['value']) if 'value' in expected[key] else value == ''
            assert error == (repr(expected[key]['standard_error']) if 'standard_error' in expected[key] else '')
    chance = {row['metric']: row['chance'] for row in rows if row['name'] == CHOICES}
    assert chance.pop('InContextLearningMultipleChoiceAccuracy') == repr(1 / 3)
    assert set(chance.values()) == {''}


def test_json_has_the_rows_of_csv(gauntlet, runs: dict[str, Path]):
    found = json.loads(printed(gauntlet, 'show', runs['a'], '--format', 'json'))
    rows = rows_of_csv(printed(gauntlet, 'show', runs['a'], '--format', 'csv'))
    assert [{key: '' if value is None else str(value) for key, value in row.items()} for row in found] == rows


def test_run_with_json_prints_only_json(gauntlet, make_run, runs: dict[str, Path], tmp_path):
    make_run('answers of lines', [LINES])  # which leaves its answers and tasks
    words = ('--outputs', tmp_path / 'answers.jsonl', '--tasks', tmp_path / 'tasks.yaml')
    root = runs['a'].parent.parent
    data = next(root.glob('data*/lines.jsonl')).parent
    status, out, _ = gauntlet('run', *words, '--data-root', data, '--out', tmp_path / 'out', '--format', 'json')
    assert status == 0
    assert {row['name'] for row in json.loads(out)} == {LINES}


def test_terminal_table_ends_with_the_files(gauntlet, runs: dict[str, Path]):
    out = printed(gauntlet, 'show', runs['a'])
    record = record_of(runs['a'])
    value, error = formatted(next(iter(record['tasks'][TOPICS]['metrics'].values())))
    assert rows_of_table(out)[TOPICS][:3] == [value, error, '0.250']
    assert list(rows_of_table(out))[2:10] == [*GROUPED, *AVERAGES]
    assert rows_of_table(out)['seconds'][0] == f'{record["timing"]["seconds"]:.1f}'
    assert out.splitlines()[-1] == str(runs['a'] / 'results.json')


def test_absent_numbers_are_empty_with_a_reason(gauntlet, unscored: tuple[Path, Path], tmp_path: Path):
    """Mutation: write 0 for an absent number."""
    run = tmp_path / 'again'
    status, out, err = gauntlet('run', '--from', unscored[1], '--out', run, '--format', 'csv')
    assert (status, err) == (0, '')
    rows = {(row['kind'], row['name']): row for row in reversed(rows_of_csv(out)) if not row['part']}
    reason = rows['task', CHOICES]['reason']
    assert rows['task', CHOICES]['value'] == '' and '2 of 12 items' in reason
    assert rows['category', 'reading']['value'] == '' and rows['category', 'reading']['reason']
    assert rows['task', LINES]['value'] != '' and rows['task', LINES]['reason'] == ''
    text = printed(gauntlet, 'show', run, '--format', 'markdown')
    assert CHOICES not in rows_of_markdown(text)
    assert f'\n- {reason}: {CHOICES}' in text
    assert f'- {reason}: {CHOICES}' in printed(gauntlet, 'show', run)


def test_duplicate_runs_are_shown_once_and_named_by_what_differs(gauntlet, runs, tmp_path):
    first, second = (copy_run(runs[name], tmp_path / name / 'ba7', batch=7) for name in 'ab')
    rows = rows_of_markdown(printed(gauntlet, 'show', first, second, tmp_path, '--format', 'markdown'))
    assert rows[''] == ['a', 'error', 'b', 'error']


def test_markdown_syntax_in_names_is_escaped(gauntlet, runs: dict[str, Path], tmp_path):
    run = copy_run(runs['a'], tmp_path / 'a|b_*c*_<b>')
    header = printed(gauntlet, 'show', run, '--format', 'markdown').splitlines()[2]
    assert r'a\|b\_\*c\*\_\<b>' in header
    assert plain('_a_b_ `c`\n[d](e) \\') == r'\_a_b\_ \`c\` \[d](e) \\'


@pytest.mark.parametrize('form', ['markdown', 'csv'])
def test_comparisons_equal_those_of_json(gauntlet, compared, runs: dict[str, Path], form: str):
    (found,) = compared(runs['a'], runs['b'])
    out = printed(gauntlet, 'compare', runs['a'], runs['b'], '--format', form)
    every = {**found['composites'], **found['tasks'], **found['score']}
    if form == 'csv':
        rows = {row['name']: row for row in rows_of_csv(out)}
        assert rows.keys() == every.keys()
        for name, one in every.items():
            assert float(rows[name]['difference']) == one['difference']['value']
            assert float(rows[name]['standard_error'] or 0) == one['difference'].get('standard_error', 0)
            assert rows[name]['p_holm'] == ('' if one['p_holm'] is None else repr(one['p_holm']))
            assert (rows[name]['first_run'], rows[name]['second_run']) == (str(runs['a']), str(runs['b']))
        return
    rows = rows_of_markdown(out)
    names = [name.strip('*') for name in rows if name]
    groups = [found[kind] for kind in ('composites', 'tasks', 'score')]
    sizes = [[abs(group[name]['difference']['value']) for name in names if name in group] for group in groups]
    assert {*names} == {*every} and all(found == sorted(found, reverse=True) for found in sizes)
    for key in ROWS:
        one = every[key]['difference']
        assert rows[key][2:4] == [f'{one["value"]:+.3f}', f'{one["standard_error"]:.3f}']


def test_trends_equal_those_of_json(gauntlet, compared, training: Path):
    found = compared(training)
    rows = rows_of_csv(printed(gauntlet, 'compare', training, '--format', 'csv'))
    assert {row['name']: float(row['slope']) for row in rows} == {
        name: one['slope']['value'] for name, one in found.items()
    }
    names = list(rows_of_markdown(printed(gauntlet, 'compare', training, '--format', 'markdown')))
    assert {*names[1:5]} == {f'**{name}**' for name in COMPOSITES} and {*names[5:]} == {*ROWS}


def test_warnings_are_not_in_csv(gauntlet, unscored: tuple[Path, Path]):
    status, out, err = gauntlet('compare', *unscored, '--allow-missing', '--format', 'csv')
    assert status == 0 and 'warning: ' not in out
    assert err.startswith('warning: ')


@pytest.mark.parametrize('command', ['show', 'compare'])
def test_show_and_compare_import_nothing_heavy(runs: dict[str, Path], training: Path, command: str):
    names = ('torch', 'composer', 'transformers', 'datasets', 'sympy', 'pandas', 'altair')
    for words in ([runs['a'], runs['b']], [training], [runs['a'], runs['b'], '--format', 'csv']):
        assert loaded_by(command, *words, names=names) == []
