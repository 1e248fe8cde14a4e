"""`gauntlet report`: numbers equal the recorded ones, and absent ones have a reason."""

from __future__ import annotations

import functools
import json
import operator
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run_cli
from recorded_runs import (
    AGIEVAL,
    BATCHES,
    CHOICES,
    RIDDLES,
    TOPICS,
    answers_of,
    copy_run,
    edited,
    record_of,
    score_yaml,
    with_truncated_prompts,
    write_answers,
)
from report_pages import HOSTILE, LONG, Cell, Page, hostile_run, read_page, shown

MINUS = '\u2212'


@pytest.fixture
def report(gauntlet, tmp_path: Path):
    """Return the page of these runs."""

    def call(*words: Any) -> Page:
        out = tmp_path / f'report{len(list(tmp_path.glob("report*.html")))}.html'
        status, printed, err = gauntlet('report', *words, '--out', out)
        assert status == 0, err
        assert str(out) in printed
        return read_page(out)

    return call


@pytest.fixture(scope='module')
def pages(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """Return the pages of one run, of three runs, and of a training run."""
    folder = tmp_path_factory.mktemp('pages')
    for name, batch in BATCHES.items():
        copy_run(runs[name], folder / 'training' / f'ba{batch}', batch=batch)
    wanted = {'one': [runs['a']], 'three': [runs[name] for name in 'abc'], 'training': [folder / 'training']}
    for name, found in wanted.items():
        assert run_cli('report', *found, '--out', folder / f'{name}.html') == 0
    return {name: read_page(folder / f'{name}.html') for name in wanted}


def check_cell(cell: Cell, measure: dict[str, Any]) -> None:
    """Check that a cell has the recorded number exactly and shows three places."""
    assert (cell.value, cell.error) == (measure['value'], measure.get('standard_error'))
    shown, _, error = cell.text.partition(' ')
    assert shown == f'{measure["value"]:.3f}'.replace('-', MINUS).replace(f'{MINUS}0.000', '0.000')
    if measure.get('standard_error'):
        assert error == f'\u00b1\u00a0{measure["standard_error"]:.3f}'


def test_averages_have_the_tasks_that_contribute_most_to_their_error(runs: dict[str, Path], report, tmp_path: Path):
    folder = copy_run(runs['a'], tmp_path / 'run')
    with edited(folder) as record:
        averages = record['composites']['averages']
        averages['core']['variance_shares'] = {'v/0-shot': 0.41, 'w': 0.29, 'x': 0.16, 'y': 0.08, 'z': 0.06}
        del averages['reading alone']['variance_shares']  # as in older records
    text = report(folder).text
    assert 'error of core, by share of its variance: 41 % v/0-shot, 29 % w, 16 % x, 14 % 2 other tasks' in text
    assert 'error of reading alone' not in text


def composites_of(run: Path) -> dict[str, dict[str, Any]]:
    composites = record_of(run)['composites']
    return {**composites['averages'], **composites['categories']}


def test_the_table_of_scores_equals_the_record(pages, runs):
    record, measures = record_of(runs['a']), composites_of(runs['a'])
    rows = {row[0].text: row[1:] for row in pages['one'].body_rows('Scores')}
    chances = {CHOICES: 1 / 3, TOPICS: 0.25, RIDDLES: 0.0, 'lines/0-shot': 0.0}
    assert list(rows)[:8] == ['core', 'reading alone', 'reading', CHOICES, RIDDLES, 'rest', TOPICS, 'lines/0-shot']
    assert ('wbr', {}) in pages['one'].elements  # after underscores and slashes of names
    for name, measure in measures.items():
        check_cell(rows[name][0], measure)
    for key, entry in record['tasks'].items():
        accuracy, chance, majority, items, seconds, _ = rows[key]
        check_cell(accuracy, next(iter(entry['metrics'].values())))
        assert chance.value == chances[key]
        assert majority.value == entry['metrics'].get('MajorityClass', {}).get('value')
        assert (items.value, seconds.value) == (entry['num_items'], record['timing']['tasks'][key])


def test_intervals_are_drawn_between_their_ends(pages, runs):
    """On an axis from the lowest end of all to 1."""
    record, measures = record_of(runs['a']), composites_of(runs['a'])
    for entry in record['tasks'].values():
        measures['task'] = next(iter(entry['metrics'].values()))
        low = min([0.0, *(measure['confidence_interval'][0] for measure in measures.values())])
    lines = [
        attributes for tag, attributes in pages['one'].elements if tag == 'line' and attributes.get('class') != 'chance'
    ]
    first = measures['core']['confidence_interval']
    ends = [f'{100 * (end - low) / (1 - low):.1f}%' for end in first]
    assert [lines[0]['x1'], lines[0]['x2']] == ends


def test_score_table_equals_the_record(pages, runs):
    perturbations = record_of(runs['a'])['score']['agieval']['perturbations']
    head, *rows = pages['one'].tables['agieval']
    names = [cell.text for cell in head[1:]]
    assert names == list(perturbations)
    measures = ['accuracy', 'consistency_rate', 'consistency_rate_reference', 'accuracy_worst', 'accuracy_mean']
    measures += ['accuracy_best', 'all_variants_right', 'unparsed_rate']
    variants = {one: perturbations[one]['accuracy_by_variant'] for one in names}
    assert [row[0].text for row in rows] == [*measures, *(variant for one in names for variant in variants[one])]
    for name, *cells in rows:
        for perturbation, cell in zip(names, cells, strict=True):
            measure = {**perturbations[perturbation], **variants[perturbation]}.get(name.text)
            assert cell.text == '' if measure is None else check_cell(cell, measure) is None


def test_several_runs_are_side_by_side(pages, runs):
    rows = {row[0].text: row[1:] for row in pages['three'].body_rows('Scores')}
    for name, run in enumerate('abc'):
        for composite, measure in composites_of(runs[run]).items():
            check_cell(rows[composite][name], measure)
    assert pages['three'].runs == ['a', 'b', 'c']


def rows_of_charts(charts: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the points of each chart."""
    return [[row for rows in chart['datasets'].values() for row in rows if 'batch' in row] for chart in charts]


def test_the_page_has_banners_marks_and_intervals(report, runs: dict[str, Path], tmp_path: Path):
    folder = copy_run(runs['a'], tmp_path / 'run')
    with edited(folder) as record:
        for entry in (*record['tasks'].values(), *record['score'].values()):
            entry['data_origin'] = 'sample'
        record['tasks'][CHOICES].update(num_truncated=3, effective_shots=1.4)
        measure = record['tasks'][RIDDLES]['metrics']['InContextLearningGenerationExactMatchAccuracy']
        measure.update(value=0.0, standard_error=0.0, confidence_interval=[0.0, 0.35])
        record['config']['max_seq_len'] = 128
    page = report(folder, '--no-prompts')
    assert sum(attributes.get('class') == 'banner' for _, attributes in page.elements) == 2
    assert 'Sample data, not the benchmark.' in page.text
    assert 'Prompts of 1 of 4 tasks are shortened to fit 128 tokens.' in page.text
    rows = {row[0].text: row[1:] for row in page.body_rows('Scores')}
    assert f'{CHOICES}\u2020 1.4 shots on average' in rows
    assert (rows[RIDDLES][0].text, rows[RIDDLES][0].error) == ('0.000 [0.00, 0.35]', 0.0)
    assert 'error: the standard error, or the 95 % interval where that is 0 or unknown' in page.text


def test_curves_show_the_recorded_numbers_of_every_checkpoint(pages, runs):
    curves = {rows[0]['name']: rows for rows in rows_of_charts(json.loads(pages['training'].scripts[0]))}
    assert curves.keys() >= {'core', 'reading', 'rest'}
    for name in ('core', 'reading'):
        for row, (run, batch) in zip(curves[name], BATCHES.items(), strict=True):
            measure = composites_of(runs[run])[name]
            assert (row['batch'], row['value']) == (batch, measure['value'])
            assert [row['low'], row['high']] == measure['confidence_interval']


def test_curves_have_one_axis_and_a_line_at_chance(pages):
    charts = json.loads(pages['training'].scripts[0])
    composites, tasks = charts[:4], charts[4:]
    for group, chances in ((composites, {0.0}), (tasks, {0.0, 0.25, 1 / 3})):
        assert len(group) == 4
        domains = {json.dumps(chart['layer'][2]['encoding']['y']['scale']['domain']) for chart in group}
        assert len(domains) == 1
        rows = [row for chart in group for rows in chart['datasets'].values() for row in rows]
        assert {row['value'] for row in rows if row.get('mark') == 'chance'} == chances
        low, high = json.loads(*domains)
        assert all(low <= row['low'] <= row['high'] <= high for row in rows if 'low' in row)


def test_the_training_loss_is_drawn_over_the_axis_of_the_curves(report, training: Path):
    """The first evaluation, before any batch, has none."""
    losses = dict(zip([100, 400, 1000], [3.5, 2.25, 2.0], strict=True))
    for batch, loss in losses.items():
        with edited(training / f'ba{batch}') as record:
            record['training']['loss'] = loss
    charts = json.loads(report(training).scripts[0])
    assert len(charts) == 5 + 4
    by_name = {rows[0]['name']: chart for chart, rows in zip(charts, rows_of_charts(charts), strict=True)}
    assert {one['batch']: one['value'] for one in rows_of_charts([by_name['training loss']])[0]} == losses
    for chart in charts:
        layer = chart['layer'][-1]['encoding']
        assert layer['x']['scale']['domain'] == [20, 1000]
    assert 'domain' not in by_name['training loss']['layer'][-1]['encoding']['y']['scale']


@pytest.mark.parametrize('case', [('three', f'b {MINUS} a', 'b'), ('training', f'ba1000 {MINUS} ba400', 'd')])
def test_differences_equal_those_of_compare(pages, runs, compared, case):
    """A training run's last checkpoint is compared with the one before."""
    page, title, other = case
    pair = (runs['a'], runs['b'], runs['c']) if page == 'three' else (runs['c'], runs[other])
    found = compared(*pair)[0]
    rows = {row[0].text: row for row in pages[page].body_rows(title)}
    differences = {**found['composites'], **found['tasks'], **found['score']}
    assert {*rows} == {*differences}
    for name, one in differences.items():
        _, first, second, difference, p_holm, detectable = rows[name]
        assert p_holm.text.endswith('*') == (one['p_holm'] < 0.05)
        assert [first.value, second.value] == [one['first'].get('value'), one['second'].get('value')]
        assert difference.value == one['difference'].get('value')
        assert [p_holm.value, detectable.value] == [one['p_holm'], one['detectable']]


def test_runs_are_compared_over_items_with_equal_prompts(report, runs, make_run, tmp_path: Path):
    other = with_truncated_prompts(runs['b'], tmp_path / 'short', {CHOICES: [1, 4, 9]}, config={'max_seq_len': 128})
    page = report(runs['a'], other)
    (differences,) = [name for name in page.tables if f' {MINUS} ' in name]
    assert CHOICES in [row[0].text for row in page.body_rows(differences)]
    assert f'(max_seq_len none / 128): {CHOICES} 3 of 12' in page.text
    page = report(runs['a'], make_run('other', [CHOICES], tasks={'choices': {'prompt_string': 'Think.\n'}}))
    assert not [name for name in page.tables if f' {MINUS} ' in name]
    assert f'cannot be compared: {CHOICES}: ' in page.text and '(prompt_string' in page.text


def test_absent_numbers_have_reasons(report, unscored, tmp_path: Path):
    run = copy_run(unscored[1], tmp_path / 'run')
    with edited(run) as record:
        record['tasks']['human_eval/0-shot'] = {'reason': 'there is no sandbox'}
    page = report(run, '--no-prompts')
    names = [row[0].text for row in page.body_rows('Scores')]
    assert 'reading' in names and CHOICES in names  # as a heading, and as some items have a score
    for text in ('composites over tasks without a score are absent: reading', 'there is no sandbox: human_eval/0-shot'):
        assert text in page.text
    assert not re.search(r'\bnan\b|undefined|None', page.text, re.IGNORECASE)


def test_a_run_without_a_gauntlet_or_of_only_score_has_a_page(report, gauntlet, make_run, data: Path, tmp_path: Path):
    page = report(make_run('bare', [RIDDLES]))
    assert 'no gauntlet' in page.text
    assert [row[0].text for row in page.body_rows('Scores')] == [RIDDLES]
    answers = write_answers(tmp_path, answers_of(0, [AGIEVAL]))
    words = ['--outputs', answers, '--score', score_yaml(tmp_path), '--data-root', data]
    assert gauntlet('run', *words, '--out', tmp_path / 'alone')[0] == 0
    page = report(tmp_path / 'alone')
    assert 'agieval' in page.tables and page.body_rows('Scores')[0][0].text == 'SCORE'
    assert AGIEVAL in page.samples[0].text


def test_checkpoints_of_a_folder_are_one_run(report, training: Path, runs, tmp_path: Path):
    copy_run(runs['a'], tmp_path / 'all' / 'alone')
    training.rename(tmp_path / 'all' / 'training')
    assert report(tmp_path / 'all').runs == ['alone', 'training']
    one_by_one = [tmp_path / 'all' / 'training' / name for name in ('ba20', 'ba1000')]
    assert report(*one_by_one).runs == ['ba20', 'ba1000']


def test_too_many_runs_are_an_error(gauntlet, runs, tmp_path: Path):
    for number in range(9):
        copy_run(runs['a'], tmp_path / 'many' / str(number))
    status, _, err = gauntlet('report', tmp_path / 'many', '--out', tmp_path / 'page.html')
    assert status == 2 and ' 9 ' in err and ' 8' in err


DAMAGED: dict[str, tuple[tuple[str, ...], Any]] = {  # by the name in the error: keys and their value
    'composites.categories.reading': (('composites', 'categories', 'reading', 'value'), float('nan')),
    'composites.averages.core': (('composites', 'averages', 'core'), '0.5'),
    f'tasks.{CHOICES}': (('tasks', CHOICES, 'num_items'), -1),
    f'tasks.{CHOICES}.metrics: is': (('tasks', CHOICES, 'metrics'), [0.5]),
    f'tasks.{CHOICES}.metrics.BrierScore': (('tasks', CHOICES, 'metrics', 'BrierScore', 'standard_error'), -0.25),
    f'tasks.{TOPICS}.categories.a': (('tasks', TOPICS, 'categories', 'a'), 3),
    'timing.seconds': (('timing', 'seconds'), 'long'),
    'training.batch': (('training',), {'batch': 'last'}),
    'score.agieval.perturbations.prompt': (('score', 'agieval', 'perturbations', 'prompt'), None),
    'tasks': (('tasks',), 10**400),
    'model': (('model',), 'large'),
    "the key 'timing'": (('timing',), ...),  # left out
    "the key 'score'": (('score',), ...),
}


@pytest.mark.parametrize('place', DAMAGED)
def test_a_damaged_record_is_an_error_naming_the_key(gauntlet, runs, tmp_path: Path, place: str):
    run = copy_run(runs['a'], tmp_path / 'run')
    (*above, key), value = DAMAGED[place]
    with edited(run) as record:
        entry = functools.reduce(operator.getitem, above, record)
        entry[key] = value
        if value is ...:
            del entry[key]
    status, _, err = gauntlet('report', run, '--out', tmp_path / 'page.html')
    assert status == 2
    assert f'{run}/results.json: {place}' in err
    assert not (tmp_path / 'page.html').exists()


def test_an_existing_page_is_replaced_only_with_overwrite(gauntlet, runs, tmp_path: Path):
    """And it is the same each time."""
    out, other = tmp_path / 'page.html', tmp_path / 'other.html'
    out.write_text('mine')
    status, _, err = gauntlet('report', runs['a'], '--out', out)
    assert status == 2 and '--overwrite' in err
    assert out.read_text() == 'mine'
    assert gauntlet('report', runs['a'], '--out', out, '--overwrite')[0] == 0
    assert gauntlet('report', runs['a'], '--out', other)[0] == 0
    assert out.read_bytes() == other.read_bytes() and b'<!DOCTYPE html>' in out.read_bytes()
    assert gauntlet('report', runs['a'], '--out', tmp_path, '--overwrite')[0] == 2


def test_missing_packages_are_named_with_the_install_command(gauntlet, runs, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'altair', None)
    monkeypatch.setitem(sys.modules, 'vl_convert', None)
    status, _, err = gauntlet('report', runs['a'], '--out', tmp_path / 'page.html')
    assert status == 2
    assert 'altair, vl_convert' in err and "pip install 'llmfoundry-gauntlet[report]'" in err


def test_hostile_texts_are_escaped(report, tmp_path: Path):
    page = report(hostile_run(tmp_path / 'hostile'), '--title', HOSTILE[0], '--samples', 50)
    assert len(page.scripts) == 3
    for place in range(len(HOSTILE)):
        assert shown(place) in page.text
    assert '1337' not in page.text
    for tag, attributes in page.elements:
        assert tag not in ('img', 'iframe', 'object', 'link', 'base')
        assert not [name for name in attributes if name.startswith('on')]
        assert (attributes.get('href') or '#').startswith('#')
        assert 'src' not in attributes and 'style' not in attributes
    assert LONG not in page.text
    assert 'of 100,000 characters left out' in page.text


def test_security_policy_allows_only_the_scripts_and_style_of_the_page(pages):
    page = pages['one']
    (policy,) = [
        attributes['content']
        for tag, attributes in page.elements
        if tag == 'meta' and attributes.get('http-equiv') == 'Content-Security-Policy'
    ]
    parts = dict(part.split(' ', 1) for part in policy.split('; '))
    assert parts['default-src'] == parts['base-uri'] == parts['form-action'] == "'none'"
    assert re.fullmatch(r"('sha256-[\w+/=]+' ?){2}", parts['script-src'])
    assert re.fullmatch(r"'sha256-[\w+/=]+'", parts['style-src'])
