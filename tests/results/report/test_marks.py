"""Marks of sample data, shortened prompts and errors that are 0, in tables and on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compared_runs import CHOICES, RIDDLES, copy_run, record_of, rows_of_table
from report_pages import read_page

SAMPLE = 'sample data, not the benchmark'
SHORTENED = 'rompts of 1 of 5 tasks are shortened to fit 128 tokens; 10-shot is 1.4 on average'
LONG = f'{"a_task_whose_name_is_" * 4}long/10-shot'


@pytest.fixture
def changed(runs: dict[str, Path], tmp_path: Path):
    """Return a function that copies a run and changes entries of its tasks; others have data of the user."""

    def change(entries: dict[str, dict[str, Any]], *, origin: str = 'own') -> Path:
        folder = copy_run(runs['a'], tmp_path / f'run{len(list(tmp_path.iterdir()))}')
        record = record_of(folder)
        for entry in (*record['tasks'].values(), *record['score'].values()):
            entry['data_origin'] = origin
        for key, changes in entries.items():
            record['tasks'][key] = {**record['tasks'].get(key, record['tasks'][CHOICES]), **changes}
        record['config']['max_seq_len'] = 128
        (folder / 'results.json').write_text(json.dumps(record))
        return folder

    return change


@pytest.mark.parametrize('form', ['table', 'markdown'])
def test_tables_say_which_data_are_samples(gauntlet, changed, form: str):
    def shown(folder: Path) -> str:
        return ' '.join(gauntlet('show', folder, '--format', form)[1].split())

    assert shown(changed({}, origin='sample')).startswith(f'Eval Gauntlet ({SAMPLE}) ')
    part = shown(changed({RIDDLES: {'data_origin': 'sample'}}))
    assert part.startswith(f'Eval Gauntlet (1 of 5 tasks: {SAMPLE}) ') and f'- {SAMPLE}: {RIDDLES}' in part
    copies = shown(changed({RIDDLES: {'data_origin': 'unofficial'}}))
    assert copies.startswith('Eval Gauntlet ') and f'unofficial copies of the data: {RIDDLES}' in copies
    assert SAMPLE not in shown(changed({}, origin='published'))


@pytest.mark.parametrize('form', ['table', 'markdown'])
def test_tables_mark_tasks_with_shortened_prompts(gauntlet, changed, form: str):
    folder = changed({'more/10-shot': {'num_truncated': 3, 'effective_shots': 1.4}, RIDDLES: {'effective_shots': 0.0}})
    record = record_of(folder)
    del record['tasks']['lines/0-shot']
    (folder / 'results.json').write_text(json.dumps(record))
    out = ' '.join(gauntlet('show', folder, '--format', form)[1].split())
    assert 'more/10-shot\u2020 ' in out and f'{CHOICES} ' in out
    assert f'- \u2020 p{SHORTENED.replace("5 tasks", "4 tasks")}' in out


def test_the_page_has_banners_marks_and_intervals(gauntlet, changed, tmp_path: Path):
    interval = {'value': 0.0, 'standard_error': 0.0, 'confidence_interval': [0.0, 0.35]}
    metrics = {'InContextLearningGenerationExactMatchAccuracy': interval}
    shortened = {'num_truncated': 3, 'effective_shots': 1.4}
    folder = changed({CHOICES: shortened, RIDDLES: {'metrics': metrics}}, origin='sample')
    assert gauntlet('report', folder, '--out', tmp_path / 'page.html', '--no-prompts')[0] == 0
    page = read_page(tmp_path / 'page.html')
    assert sum(attributes.get('class') == 'banner' for _, attributes in page.elements) == 2
    assert f'S{SAMPLE[1:]}.' in page.text and 'Prompts of 1 of 4 tasks are shortened to fit 128 tokens.' in page.text
    rows = {row[0].text: row[1:] for row in page.body_rows('Scores')}
    assert f'{CHOICES}\u2020 1.4 shots on average' in rows
    assert (rows[RIDDLES][0].text, rows[RIDDLES][0].error) == ('0.000 [0.00, 0.35]', 0.0)
    assert 'error: the standard error, or the 95 % interval where that is 0 or unknown' in page.text


@pytest.mark.parametrize('form', ['table', 'markdown'])
def test_an_interval_stands_in_place_of_an_error_of_0(gauntlet, changed, form: str):
    interval = {'value': 1.0, 'standard_error': 0.0, 'confidence_interval': [0.646, 1.0]}
    folder = changed({RIDDLES: {'metrics': {'InContextLearningGenerationExactMatchAccuracy': interval}}})
    out = gauntlet('show', folder, '--format', form)[1]
    (line,) = [line for line in out.splitlines() if RIDDLES in line]
    assert line.replace('|', ' ').split()[1:4] == ['1.000', '[0.65,', '1.00]']
    assert '- error: the standard error, or the 95 % interval where that is 0 or unknown' in out


def test_tables_of_a_pipe_have_80_columns_and_names_keep_their_shots(gauntlet, changed):
    out = gauntlet('show', *(changed({LONG: {'num_truncated': 1}}) for _ in range(3)))[1]
    assert max(map(len, out.splitlines()[:-3])) <= 80  # of the table; paths follow
    (name,) = [name for name in rows_of_table(out) if '\u2026' in name]
    assert name.startswith('a_task_whose') and name.endswith('long/10-shot\u2020')
