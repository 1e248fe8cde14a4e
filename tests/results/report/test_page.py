"""`gauntlet report` in headless Chromium: the recorded numbers, samples as sent, no requests and no foreign script."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run_cli
from journals import item
from recorded_runs import (
    AGIEVAL,
    BATCHES,
    CHOICES,
    LINES,
    LOSS_BATCHES,
    LOSSES,
    RIDDLES,
    ROWS,
    TOPICS,
    answers_of,
    copy_run,
    edited,
    record_of,
    record_run,
    samples_of,
    samples_path,
    with_shortened_prompts,
    write_lines,
)

from llmfoundry_gauntlet.results.report.page import kinds_of, make_sample
from llmfoundry_gauntlet.results.report.sections import evaluations_section
from llmfoundry_gauntlet.results.runs import find_runs
from llmfoundry_gauntlet.types import Prompt

MINUS = '\u2212'
SHOTS = 'riddles/2-shot'
WITH_ONE_SHOT = 'Twice 6? 12\nTwice 0?'
READ = """() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const text = (one) => one.textContent.replace(/\\s+/g, ' ').trim();
  const number = (text) => text ? Number(text) : null;
  const cell = (one) => ({ text: text(one), value: number(one.dataset.value), error: number(one.dataset.error) });
  const rows = (table) => [...table.rows].map((row) => [...row.cells].map(cell));
  return {
    tables: Object.fromEntries(all('table:has(caption)').map((one) => [text(one.caption), rows(one)])),
    title: document.title,
    heading: text(document.querySelector('h1')),
    leads: all('.lead').map(text),
    bars: all('#changes .plot svg').map((svg) => ({
      kind: svg.querySelector('g')?.getAttribute('class'),
      value: svg.querySelector('circle')?.getAttribute('cx'),
      zero: svg.querySelector('.chance').getAttribute('x1'),
    })),
    runs: all('.runs b').map(text),
    banners: all('.banner').map(text),
    intervals: all('.plot line:not(.chance)').map((one) => [one.getAttribute('x1'), one.getAttribute('x2')]),
    charts: JSON.parse(document.getElementById('page-data').textContent),
    samples: all('.sample').map((one) => (
      { text: text(one), passages: all('pre', one).map((pre) => pre.textContent) })),
    text: text(document.querySelector('main')),
  };
}"""


@pytest.fixture(scope='module')
def read(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that makes a page and returns what it holds in a browser without JavaScript."""
    folder = tmp_path_factory.mktemp('pages')

    def call(*words: Any) -> Any:
        out = folder / f'{len(list(folder.iterdir()))}.html'
        assert run_cli('report', *words, '--out', out) == 0
        with browser.new_context(java_script_enabled=False) as context:
            page = context.new_page()
            page.goto(out.as_uri())
            return page.evaluate(READ)

    return call


@pytest.fixture(scope='module')
def rich(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Return a run of sample data with one shortened prompt, a task that did not run, and an error of 0."""
    folder = tmp_path_factory.mktemp('rich')
    with_shots = [{**answer, 'num_shots': 2} for answer in answers_of(0, [RIDDLES])]
    answers = [*answers_of(0), *with_shots]
    run = record_run(folder / 'run', data, [*ROWS, SHOTS, AGIEVAL], answers=answers, gauntlet={})
    with edited(run) as record:
        for entry in (*record['tasks'].values(), *record['score'].values()):
            entry['data_origin'] = 'sample'
        record['tasks'][CHOICES].update(num_shortened=3, effective_shots=1.4)
        record['tasks']['human_eval/0-shot'] = {'reason': 'there is no sandbox'}
        measure = record['tasks'][RIDDLES]['metrics']['InContextLearningGenerationExactMatchAccuracy']
        measure.update(value=0.0, standard_error=0.0, confidence_interval=[0.0, 0.35])
        record['config']['max_seq_len'] = 128
        averages = record['composites']['averages']
        averages['core']['variance_shares'] = {'v/0-shot': 0.41, 'w': 0.29, 'x': 0.16, 'y': 0.08, 'z': 0.06}
        del averages['reading alone']['variance_shares']  # as in records of 0.1.0
    first, *rest = samples_of(run, SHOTS)
    first.update(prompt_sha256=digest(WITH_ONE_SHOT), prompt_shortened=True)
    write_lines(samples_path(run, SHOTS), [first, *rest])
    with_num_tokens = [{**line, 'num_tokens': [3, 1, 2]} for line in samples_of(run, CHOICES)]
    write_lines(samples_path(run, CHOICES), with_num_tokens)
    return run


@pytest.fixture(scope='module')
def page(read: Callable[..., Any], rich: Path) -> Any:
    return read(rich, '--samples', 50)


@pytest.fixture(scope='module')
def training_page(read: Callable[..., Any], training: Path) -> Any:
    return read(training)


@pytest.fixture(scope='module')
def several(runs: dict[str, Path], data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return four runs, of which the third and the last have other prompts."""
    folder = tmp_path_factory.mktemp('several')
    rows_shortened = {CHOICES: [1, 4, 9]}
    short = with_shortened_prompts(runs['b'], folder / 'short', rows_shortened, config={'max_seq_len': 128})
    instructed = {'choices': {'prompt_string': 'Think.\n'}}
    other = record_run(folder / 'other', data, [CHOICES], tasks=instructed)
    return [runs['a'], runs['b'], short, other]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def composites_of(run: Path) -> dict[str, dict[str, Any]]:
    composites = record_of(run)['composites']
    return {**composites['averages'], **composites['categories']}


def check_cell(cell: Any, measure: dict[str, Any]) -> None:
    """Check that a cell has the recorded number exactly and shows three places."""
    assert (cell['value'], cell['error']) == (measure['value'], measure.get('standard_error'))
    shown, _, error = cell['text'].partition(' ')
    assert shown == f'{measure["value"]:.3f}'.replace('-', MINUS).replace(f'{MINUS}0.000', '0.000')
    if measure.get('standard_error'):
        assert error == f'\u00b1 {measure["standard_error"]:.3f}'


def table_of(page: Any, title: str) -> dict[str, list[Any]]:
    return {row[0]['text']: row[1:] for row in page['tables'][title][1:]}


def test_the_tables_of_a_run_equal_the_record(page, rich: Path):
    """An average without shares of its variance is that of a record of 0.1.0."""
    record = record_of(rich)
    rows = table_of(page, 'Scores')
    chances = {CHOICES: 1 / 3, TOPICS: 0.25, RIDDLES: 0.0, LINES: 0.0, SHOTS: None}
    marked = f'{CHOICES}\u2020 1.4 shots on average'
    assert list(rows)[:8] == ['core', 'reading alone', 'reading', marked, RIDDLES, 'rest', TOPICS, LINES]
    for name, measure in composites_of(rich).items():
        check_cell(rows[name][0], measure)
    for key, chance in chances.items():
        task = record['tasks'][key]
        accuracy, *others, _ = rows[marked if key == CHOICES else key]
        check_cell(accuracy, next(iter(task['metrics'].values())))
        assert [cell['value'] for cell in others] == [
            chance,
            task['metrics'].get('MajorityClass', {}).get('value'),
            None,  # the best constant letter, which is of SCORE
            task['num_items'],
            record['timing']['tasks'][key],
        ]
    # Where the error is 0, the interval is shown.
    assert rows[RIDDLES][0]['text'] == '0.000 [0.00, 0.35]'


def test_intervals_are_drawn_on_an_axis_from_the_lowest_end_to_1(page, rich: Path):
    composites = composites_of(rich)
    lowest_end = min(measure['confidence_interval'][0] for measure in composites.values())
    begin = min(0.0, lowest_end)
    ends_of_core = composites['core']['confidence_interval']
    assert page['intervals'][0] == [f'{100 * (end - begin) / (1 - begin):.1f}%' for end in ends_of_core]


def test_the_table_of_a_score_dataset_equals_the_record(page, rich: Path):
    perturbations = record_of(rich)['score']['agieval']['perturbations']
    variants = {name: measures['accuracy_by_variant'] for name, measures in perturbations.items()}
    metrics = [
        'accuracy',
        'chance',
        'accuracy of the best constant letter',
        'consistency_rate',
        'consistency_rate of the best constant letter',
        'consistency_rate_reference',
        'accuracy_worst',
        'accuracy_mean',
        'accuracy_best',
        'all_variants_right',
        'unparsed_rate',
        'accuracy_over_prompts',
        'consistency_rate_over_prompts',
        'prompt_deviation',
    ]

    head, *rows = page['tables']['agieval']

    assert [cell['text'] for cell in head[1:]] == list(perturbations)
    names_of_variants = [variant for of_perturbation in variants.values() for variant in of_perturbation]
    assert [name['text'] for name, *_ in rows] == [*metrics, *names_of_variants]
    of_baselines = {name['text']: [cell['value'] for cell in cells] for name, *cells in rows}
    assert of_baselines['chance'] == pytest.approx([1 / 3] * len(perturbations))
    for metric in ('accuracy', 'consistency_rate'):
        best = []
        for measures in perturbations.values():
            by_letter = measures[f'{metric}_by_constant_letter']
            best.append(max(measure['value'] for measure in by_letter.values()))
        assert of_baselines[f'{metric} of the best constant letter'] == best
    scores = [row for row in rows if row[0]['text'] != 'chance' and 'constant' not in row[0]['text']]
    for name, *cells in scores:
        for perturbation, cell in zip(perturbations, cells, strict=True):
            measures = {**perturbations[perturbation], **variants[perturbation]}
            if name['text'] in measures:
                check_cell(cell, measures[name['text']])
            else:
                assert cell['text'] == ''  # of another perturbation


def test_banners_and_notes_tell_what_the_numbers_are_worth(page):
    assert page['banners'] == [
        'Sample data, not the benchmark.',
        'Prompts of 1 of 5 tasks are shortened to fit 128 tokens.',
    ]
    for note in (
        'error: the standard error, or the 95 % interval where that is 0 or unknown',
        'error of core, by share of its variance: 41 % v/0-shot, 29 % w, 16 % x, 14 % 2 other tasks',
        'there is no sandbox: human_eval/0-shot',
    ):
        assert note in page['text']
    assert 'error of reading alone' not in page['text']


@pytest.mark.parametrize(
    ('config', 'fact'),
    [
        # Composites are absent where tasks are left out.
        ({'gauntlet': 'gauntlet.yaml', 'only': ['choices', 'lines']}, 'Only choices, lines of the gauntlet'),
        ({'gauntlet': 'gauntlet.yaml', 'only': None, 'missing': 'skip'}, 'A part of the gauntlet'),
        # There could be none.
        ({'gauntlet': None, 'only': ['choices']}, 'have no gauntlet'),
    ],
)
def test_a_page_without_composites_says_whether_there_is_a_gauntlet(data: Path, tmp_path: Path, config, fact):
    run = record_run(tmp_path / 'part', data, [CHOICES])
    with edited(run) as record:
        record['config'].update(config)
    out = tmp_path / 'page.html'

    assert run_cli('report', run, '--out', out, '--no-prompts') == 0

    assert fact in out.read_text()
    assert 'no composites' in out.read_text()


def test_a_run_of_only_score_has_a_page(read, data: Path, tmp_path: Path):
    run = record_run(tmp_path / 'alone', data, [AGIEVAL])

    page = read(run, '--no-prompts')

    assert 'no gauntlet' in page['text']
    assert 'agieval' in page['tables']
    assert page['tables']['Scores'][1][0]['text'] == 'SCORE'
    first_sample = page['samples'][0]['text']
    assert AGIEVAL in first_sample
    assert 'data files were not read' in first_sample


def check_differences(table: dict[str, list[Any]], comparison: dict[str, Any]) -> None:
    """Check that a table has the numbers of `gauntlet compare`."""
    entries = {**comparison['composites'], **comparison['tasks'], **comparison['score']}
    assert {*table} == {*entries}
    for name, entry in entries.items():
        # The difference is first, as a phone shows only the first columns.
        assert [cell['value'] for cell in table[name]] == [
            entry['difference'].get('value'),
            entry['first'].get('value'),
            entry['second'].get('value'),
            entry['p_holm'],
            entry['detectable'],
            None,  # its interval as a bar
        ]
        assert table[name][3]['text'].endswith('*') == (entry['p_holm'] < 0.05)


def test_several_runs_are_side_by_side_and_compared_over_items_with_equal_prompts(read, several, compared):
    a, b, short, _ = several

    page = read(*several, '--samples', 50)

    first, second, third, fourth = page['runs']
    assert [name.rpartition('/')[2] for name in page['runs']] == ['a', 'b', 'short', 'other']
    rows = table_of(page, 'Scores')
    for column, run in enumerate((a, b)):
        for name, measure in composites_of(run).items():
            check_cell(rows[name][column], measure)

    with_second, with_third = compared(a, b, short)
    check_differences(table_of(page, f'{second} {MINUS} {first}'), with_second)
    check_differences(table_of(page, f'{third} {MINUS} {first}'), with_third)
    assert len([name for name in page['tables'] if f' {MINUS} ' in name]) == 2
    assert f'(max_seq_len none / 128): {CHOICES} 3 of 12' in page['text']
    assert f'{fourth} {MINUS} {first} cannot be compared: {CHOICES}: ' in page['text']

    # An item is shown once, with the results of all runs.
    results = zip(*(samples_of(run, RIDDLES) for run in (a, b, short)), strict=True)
    expected = []
    for row, lines in enumerate(results):
        assert [line['row'] for line in lines] == [row, row, row]
        expected.append([f'Twice {row}?', f'{2 * row}', *(line['text'] for line in lines)])
    assert [sample['passages'] for sample in page['samples'] if RIDDLES in sample['text']] == expected


def test_numbers_of_items_are_shown_where_runs_differ_in_them(read, runs: dict[str, Path], tmp_path: Path):
    other = copy_run(runs['b'], tmp_path / 'other')
    with edited(other) as record:
        record['score']['agieval']['perturbations']['prompt']['num_questions'] = 1500

    page = read(runs['a'], other)

    header, *_ = page['tables']['Scores']
    place = [cell['text'] for cell in header[1:]].index('n')
    rows = table_of(page, 'Scores')
    num_questions = record_of(runs['a'])['score']['agieval']['perturbations']['prompt']['num_questions']
    numbers = [rows[name][place]['text'] for name in ('agieval prompt accuracy', LINES)]
    assert numbers == [f'{num_questions} / 1,500', '']
    shown = [cell['text'] for cell in table_of(page, 'agieval')['questions']]
    assert {f'{num_questions}', '1,500'} <= set(shown)


@pytest.fixture(scope='module')
def better(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a run that has all topics wrong and another that has them right, with equal answers to the rest."""
    folder = tmp_path_factory.mktemp('better')
    runs = []
    for name, is_right in (('baseline', False), ('candidate', True)):
        answers = answers_of(0, [CHOICES, TOPICS])
        for answer in answers:
            if answer['task'] == 'topics':
                gold = ROWS[TOPICS][answer['row']]['gold']
                # One of the rows is right in both, so that the differences of the items vary.
                chosen = gold if is_right or answer['row'] == 0 else (gold + 1) % len(answer['logprobs'])
                answer['logprobs'] = [-1.0 if choice == chosen else -9.0 for choice in range(len(answer['logprobs']))]
        runs.append(record_run(folder / name, data, [CHOICES, TOPICS], answers=answers))
    return runs


def test_the_page_of_two_runs_says_first_what_is_compared_and_what_differs_clearly(read, better: list[Path]):
    page = read(*better, '--no-prompts')

    assert page['title'] == page['heading'] == 'candidate compared with baseline'
    # The score is the mean of three categories; in that of row 0 three of four rows differ.
    assert page['leads'][0].startswith('candidate differs clearly')
    assert page['leads'][0].endswith(f'from baseline in 1 of 2 tasks ({TOPICS} +0.917).')


def test_the_bar_of_a_difference_has_colour_only_if_it_is_clear(read, better: list[Path]):
    page = read(*better, '--no-prompts')

    # The axis is from -1 to 1, and the differences are 0.917 and 0.
    clear, unclear = page['bars']
    assert clear == {'kind': 'run1', 'value': '95.8%', 'zero': '50.0%'}
    assert unclear == {'kind': 'unclear', 'value': '50.0%', 'zero': '50.0%'}


def test_averages_are_above_categories_in_a_comparison(read, runs: dict[str, Path]):
    page = read(runs['a'], runs['b'], '--no-prompts')
    assert {*[*table_of(page, f'b {MINUS} a')][:2]} == {'core', 'reading alone'}


@pytest.mark.parametrize(
    ('folders', 'shown', 'names'),
    [
        # A single run.
        (['llama/gauntlet/ba20', 'llama/gauntlet/ba100'], ['llama/gauntlet'], ['llama']),
        (['llama/gauntlet/ba20', 'llama/gauntlet/ba100'], ['.'], ['llama']),
        (['llama/gauntlet/ba20'], ['llama/gauntlet/ba20'], ['llama/ba20']),
        (['mine'], ['mine'], ['mine']),
        # Several.
        (['one/gauntlet/ba20', 'two/gauntlet/ba20'], ['one', 'two'], ['one', 'two']),
        (['one/gauntlet/ba20', 'one/ba20'], ['one'], ['ba20', 'gauntlet/ba20']),
    ],
)
def test_runs_have_names_rather_than_paths(
    runs: dict[str, Path], tmp_path: Path, folders: list[str], shown: list[str], names: list[str]
):
    for batch, folder in enumerate(folders):
        copy_run(runs['a'], tmp_path / folder, batch=batch)
    assert [run.name for run in find_runs([tmp_path / folder for folder in shown])] == names


def rows_of_charts(charts: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the points of each chart by its name."""
    rows_by_name = {}
    for chart in charts:
        rows = [row for dataset in chart['datasets'].values() for row in dataset if 'batch' in row]
        rows_by_name[rows[0]['name']] = rows
    return rows_by_name


def test_curves_show_every_checkpoint(training_page: Any, training: Path):
    curves = rows_of_charts(training_page['charts'])
    names = ['core', 'reading alone', 'training loss', 'reading', 'rest']
    assert [*curves][:5] == names
    assert {*curves} == {*names, *ROWS}
    for name in ('core', 'reading'):
        for row, batch in zip(curves[name], BATCHES.values(), strict=True):
            measure = composites_of(training / f'ba{batch}')[name]
            assert (row['batch'], row['value']) == (batch, measure['value'])
            assert [row['low'], row['high']] == measure['confidence_interval']
    assert {row['batch']: row['value'] for row in curves['training loss']} == LOSSES


def test_a_line_of_the_loss_goes_over_the_batches_of_its_mean(training_page: Any):
    losses = rows_of_charts(training_page['charts'])['training loss']
    assert {row['batch']: row['batches'] for row in losses} == LOSS_BATCHES
    assert {row['batch']: row['begin'] for row in losses} == {100: 20, 400: 100, 1000: 400}


def test_curves_have_the_same_axes_and_a_line_at_chance(training_page: Any):
    core, reading_alone, loss, reading, rest, *tasks = training_page['charts']
    for chart in training_page['charts']:
        assert encoding_of(chart)['x']['scale']['domain'] == [20, 1000]
    assert 'domain' not in encoding_of(loss)['y']['scale']

    check_scale([core, reading_alone, reading, rest], chances={0.0})
    check_scale(tasks, chances={0.0, 0.25, 1 / 3})
    assert encoding_of(tasks[0])['y']['scale']['domain'] == [0, 1]


def encoding_of(chart: dict[str, Any]) -> dict[str, Any]:
    """Return how the topmost layer of a chart, the line, is drawn."""
    return chart['layer'][-1]['encoding']


def check_scale(charts: list[dict[str, Any]], *, chances: set[float]) -> None:
    """Check that charts have one scale, on which all intervals have room, and lines at these chances."""
    low, high = encoding_of(charts[0])['y']['scale']['domain']
    marked_chances = set()
    for chart in charts:
        assert encoding_of(chart)['y']['scale']['domain'] == [low, high]
        for row in itertools.chain(*chart['datasets'].values()):
            if row.get('mark') == 'chance':
                marked_chances.add(row['value'])
            if 'low' in row:
                assert low <= row['low'] <= row['high'] <= high
    assert marked_chances == chances


def test_the_page_of_a_training_shows_changes_and_items_of_its_last_evaluation(
    training_page: Any, training: Path, compared
):
    (comparison,) = compared(training / 'ba400', training / 'ba1000')
    check_differences(table_of(training_page, f'ba1000 {MINUS} ba400'), comparison)
    for key in ROWS:
        first_rows = [line['row'] for line in samples_of(training / 'ba1000', key)[:5]]
        shown = [sample['text'] for sample in training_page['samples'] if key in sample['text']]
        assert len(shown) == 5
        assert all(f'row {row}' in text for row, text in zip(first_rows, shown, strict=True))


def test_a_page_replaces_a_file_only_if_asked(gauntlet, runs: dict[str, Path], tmp_path: Path):
    out = tmp_path / 'page.html'
    out.write_text('mine')

    status, _, err = gauntlet('report', runs['a'], '--out', out)

    assert status == 2
    assert '--overwrite' in err
    assert out.read_text() == 'mine'


def test_a_page_never_replaces_a_folder(gauntlet, runs: dict[str, Path], tmp_path: Path):
    status, _, err = gauntlet('report', runs['a'], '--out', tmp_path, '--overwrite')

    assert status == 2
    assert f'--out: {tmp_path} ' in err


def test_a_page_has_at_most_8_runs(gauntlet, runs: dict[str, Path], tmp_path: Path):
    for number in range(9):
        copy_run(runs['a'], tmp_path / 'many' / str(number))
    out = tmp_path / 'page.html'

    status, _, err = gauntlet('report', tmp_path / 'many', '--out', out)

    assert status == 2
    assert ' 9 ' in err and ' 8' in err
    assert not out.exists()


def test_a_page_that_is_made_again_is_the_same(gauntlet, runs: dict[str, Path], tmp_path: Path):
    first, second = tmp_path / 'first.html', tmp_path / 'second.html'
    for path in (first, second):
        status, _, _ = gauntlet('report', runs['a'], '--samples', 0, '--out', path)
        assert status == 0
    assert first.read_bytes() == second.read_bytes()
    assert b'class="sample"' not in first.read_bytes()


def test_missing_packages_are_named_with_what_installs_them(
    gauntlet, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, 'altair', None)
    monkeypatch.setitem(sys.modules, 'vl_convert', None)

    status, _, err = gauntlet('report', runs['a'], '--out', tmp_path / 'page.html')

    assert status == 2
    assert 'altair, vl_convert' in err
    assert "pip install 'llmfoundry-gauntlet[report]'" in err


# Samples.


def test_prompts_are_shown_as_sent(page, rich: Path):
    prompts = [sample['passages'][0] for sample in samples_on(page, RIDDLES)]
    assert prompts == [f'Twice {row}?' for row in range(7)]
    assert list(map(digest, prompts)) == [line['prompt_sha256'] for line in samples_of(rich, RIDDLES)]


def test_a_shortened_prompt_is_shown_with_the_shots_that_it_has_left(page):
    shortened, whole, *_ = samples_on(page, SHOTS)
    assert shortened['passages'][0] == WITH_ONE_SHOT
    assert 'Prompt 1-shot' in shortened['text']
    assert "shortened to the model's length" in shortened['text']
    assert whole['passages'][0] == 'Twice 0? 0\nTwice 6? 12\nTwice 1?'
    assert 'Prompt 2-shot' in whole['text']


def test_choices_are_ordered_by_the_log_probability_that_decides(page, rich: Path):
    for sample, line in zip(samples_on(page, CHOICES), samples_of(rich, CHOICES), strict=True):
        row = ROWS[CHOICES][line['row']]
        query, choices = row['query'], row['choices']

        # The mean over a choice's tokens decides.
        means = [value / count for value, count in zip(line['logprobs'], line['num_tokens'], strict=True)]
        best_first = sorted(zip(means, choices, strict=True), reverse=True)
        assert sample['passages'] == [query, *(choice for _, choice in best_first)]
        for mean in means:
            assert f'{mean:.3f}'.replace('-', MINUS) in sample['text']

        # Without opening the sample:
        predicted, gold = choices[line['predicted']], choices[line['gold']]
        assert f'{query} prediction {predicted} gold {gold} Prompt' in sample['text']


def samples_on(page: Any, key: str) -> list[Any]:
    """Return the items of a task on a page."""
    return [sample for sample in page['samples'] if f'{key} ' in sample['text']]


def test_prompts_that_changed_or_whose_data_are_elsewhere_are_not_shown(read, run: Path, data: Path, tmp_path: Path):
    own = shutil.copytree(data, tmp_path / 'own')
    changed_rows = [{**row, 'context': row['context'] + '!'} for row in ROWS[RIDDLES][:5]]
    write_lines(own / 'riddles.jsonl', changed_rows)
    (own / 'choices.jsonl').unlink()
    uri = 'https://example.invalid/topics.jsonl'
    with edited(run) as record:
        record['tasks'][TOPICS]['spec']['dataset_uri'] = uri
    reasons_by_task = {
        RIDDLES: ['rebuilt from the data file it differs'] * 5 + ['no longer has this row'] * 2,
        CHOICES: ['choices.jsonl: there is no such data file'] * 12,
        TOPICS: [uri] * 14,
    }
    beginnings_of_questions = ('Twice', 'Question', 'Topic')

    samples = read(run, '--data-root', own, '--samples', 50)['samples']

    for key, reasons in reasons_by_task.items():
        of_task = [sample for sample in samples if key in sample['text']]
        for sample, reason in zip(of_task, reasons, strict=True):
            assert reason in sample['text']
            assert not any(passage.startswith(beginnings_of_questions) for passage in sample['passages'])


def test_evaluations_are_named_once(runs: dict[str, Path], training: Path):
    """Mutation: the name of the run before that of its only evaluation, which is the same."""
    alone, of_two, of_training = (
        [row.name for row in evaluations_section(find_runs(folders)).tables[0].rows]
        for folders in ([runs['a']], [runs['a'], runs['b']], [runs['a'], training])
    )

    assert alone == ['a']
    assert of_two == ['a', 'b']
    name_of_run, *names_of_training = of_training
    assert name_of_run.endswith('a') and ' ' not in name_of_run
    assert [name.split()[-1] for name in names_of_training] == ['ba20', 'ba100', 'ba400', 'ba1000']
    assert all('training' in name for name in names_of_training)


def test_a_question_with_a_prompt_for_each_choice_has_each_of_them_once():
    """Mutation: every prompt with every continuation, which makes four of two."""
    prompt = Prompt(contexts=('The cup', 'The bag'), continuations=('is red.', 'is red.'))

    sample = make_sample([(0, item(0, logprobs=(-1.0, -2.0)))], prompt)

    assert sample.choices == ['The cup is red.', 'The bag is red.']


GENERATION = {'logprobs': None, 'predicted': None, 'gold': '4', 'score': 0.0, 'text': '4', 'answer': '4'}
TRUNCATED = 'truncated at the token limit'


@pytest.mark.parametrize(
    ('changes', 'kinds'),
    [
        # Choices.
        ({'score': 1.0}, ['right']),
        ({'score': 0.0}, ['wrong']),
        ({'score': 0.5, 'reason': 'tie of the choices 0, 1'}, ['partly right']),
        ({'score': None, 'reason': 'not finite'}, ['unscored']),
        # Generations, of which those that reach the limit are also truncated.
        (GENERATION | {'score': 1.0}, ['right']),
        (GENERATION | {'score': 1.0, 'reason': TRUNCATED}, ['right', 'truncated']),
        (GENERATION | {'score': 1.0, 'gold': None, 'metrics': {'TruncatedShare': 1.0}}, ['right', 'truncated']),
        # Generations without an answer.
        (GENERATION | {'answer': '', 'reason': 'empty generation'}, ['wrong', 'unparsed']),
        (
            GENERATION | {'reason': f'no answer found in the generation; {TRUNCATED}'},
            ['wrong', 'truncated', 'unparsed'],
        ),
        (GENERATION | {'reason': 'no delimiter found, so all of it is compared'}, ['wrong', 'unparsed']),
        (GENERATION | {'gold': 2}, ['wrong', 'unparsed']),
        # Code, which has no answer to find.
        (GENERATION | {'gold': None, 'answer': None, 'reason': 'AssertionError'}, ['wrong']),
    ],
)
def test_kinds_of_an_item(changes: dict[str, Any], kinds: list[str]):
    assert kinds_of(item(0, **changes)) == kinds
