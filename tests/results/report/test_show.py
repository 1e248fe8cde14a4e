"""`gauntlet show` in all formats, and frames: the numbers of the records, marks, and reasons of absent numbers."""

from __future__ import annotations

import csv
import doctest
import functools
import io
import json
import operator
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_line import loaded_by
from recorded_runs import (
    BASELINES,
    BATCHES,
    CHOICES,
    LINES,
    QUESTIONS,
    RIDDLES,
    ROWS,
    TOPICS,
    accuracy_of,
    copy_run,
    edited,
    record_of,
    rows_of_table,
    samples_of,
)
from rich.cells import cell_len

from llmfoundry_gauntlet import read_runs, samples_frame, scores_frame
from llmfoundry_gauntlet.results import runs as runs_module
from llmfoundry_gauntlet.results.report.tables import without_markdown
from llmfoundry_gauntlet.results.runs import summarize_again

GROUPED = ['reading', CHOICES, RIDDLES, 'rest', TOPICS, LINES]  # of `CATEGORIES`; choices are in both
AVERAGES = ['core', 'reading alone']
SAMPLE = 'sample data, not the benchmark'


def rows_of_markdown(out: str) -> dict[str, list[str]]:
    """Return the cells of each row by its first cell; the header has an empty first cell."""
    lines = [line for line in out.splitlines() if line.startswith('|')]
    assert len({cell_len(line) for line in lines}) == 1, 'pipes are not aligned'
    assert set(lines.pop(1)) == set('|:-')
    rows = []
    for line in lines:
        cells = line.removeprefix('| ').removesuffix(' |').split(' | ')
        rows.append([cell.strip() for cell in cells])
    assert len({len(row) for row in rows}) == 1
    return {name: cells for name, *cells in rows}


@pytest.fixture
def shown(gauntlet):
    """Return the output of `gauntlet show`."""

    def call(*words: Any, form: str = 'table') -> str:
        status, out, err = gauntlet('show', *words, '--format', form)
        assert (status, err) == (0, '')
        return out

    return call


def formatted(measure: dict[str, Any]) -> list[str]:
    """Return a value and its error as in a table."""
    return [f'{measure["value"]:.3f}', f'{measure["standard_error"]:.3f}']


# Numbers.


def numbers_of(record: dict[str, Any]) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """Return all measures of a record by kind, name, part and metric."""
    measures = {}
    for kind, group in (('category', 'categories'), ('average', 'averages')):
        for name, measure in record['composites'][group].items():
            measures[kind, name, '', 'Composite'] = measure
            measures[kind, name, '', 'gold_bits_per_byte'] = record['composites']['gold_bits_per_byte'][name]
    for key, task in record['tasks'].items():
        for part, score in {'': task, **task.get('categories', {})}.items():
            for metric, measure in score['metrics'].items():
                measures['task', key, part, metric] = measure
    for label, perturbation in record['score']['agieval']['perturbations'].items():
        for metric, content in perturbation.items():
            if isinstance(content, dict):  # else a count
                parts = {'': content} if 'value' in content else content
                for part, measure in parts.items():
                    measures['perturbation', f'agieval/{label}', part, metric] = measure
    return measures


def test_csv_json_and_frames_have_every_number_in_full_precision(shown, training: Path):
    rows = list(csv.DictReader(io.StringIO(shown(training, form='csv'))))
    rows_of_json = json.loads(shown(training, form='json'))
    frame = scores_frame(read_runs(str(training))).astype(object)

    for batch in BATCHES.values():
        folder = training / f'ba{batch}'
        numbers = {}
        for row in rows:
            if (row['run'], row['batch']) == (str(folder), str(batch)):
                score = row['kind'], row['name'], row['part'], row['metric']
                numbers[score] = row['value'], row['standard_error']
        expected = {}
        for score, measure in numbers_of(record_of(folder)).items():
            numbers_of_score = (measure.get('value'), measure.get('standard_error'))
            expected[score] = tuple('' if number is None else repr(number) for number in numbers_of_score)
        assert len(numbers) > 60
        assert numbers == expected
    assert [{key: '' if value is None else str(value) for key, value in row.items()} for row in rows_of_json] == rows
    assert frame.where(frame.notna(), None).to_dict('records') == rows_of_json


def test_only_accuracies_have_a_chance(shown, runs: dict[str, Path]):
    rows = csv.DictReader(io.StringIO(shown(runs['a'], form='csv')))

    chance = {row['metric']: row['chance'] for row in rows if row['name'] == CHOICES}
    assert chance.pop('InContextLearningMultipleChoiceAccuracy') == repr(1 / 3)
    assert set(chance.values()) == {''}


def test_accuracies_of_score_have_the_chance_of_guessing_beside_them(shown, runs: dict[str, Path], changed):
    """Mutation: the chance of one run beside several, whose questions may have other numbers of options."""
    alone = rows_of_markdown(shown(runs['a'], form='markdown'))
    of_two = rows_of_markdown(shown(runs['a'], runs['b'], form='markdown'))
    other = changed({})
    with edited(other) as record:
        record['score']['agieval']['chance'] = 0.2
    of_others = rows_of_markdown(shown(runs['a'], other, form='markdown'))

    chance = f'{1 / len(QUESTIONS[0]["options"]):.3f}'
    assert [alone['agieval prompt accuracy'][2], of_two['agieval prompt accuracy'][4]] == [chance, chance]
    assert [alone['agieval prompt consistency_rate'][2], of_two['agieval prompt consistency_rate'][4]] == ['', '']
    assert of_others['agieval prompt accuracy'][4] == ''


def test_scores_of_score_have_the_best_constant_letter_beside_them(shown, runs: dict[str, Path], changed):
    """Mutation: the constant letter of one run beside several, whose questions may be others."""
    other = changed({})
    with edited(other) as record:
        by_letter = record['score']['agieval']['perturbations']['prompt']['accuracy_by_constant_letter']
        by_letter |= {'A': {'value': 0.2}, 'B': {'value': 0.9}, 'C': {'value': 0.4}}
        del record['score']['agieval']['perturbations']['prompt']['consistency_rate_by_constant_letter']  # as of 0.2.0

    alone = rows_of_markdown(shown(other, form='markdown'))
    of_two = rows_of_markdown(shown(runs['a'], runs['b'], form='markdown'))
    of_others = rows_of_markdown(shown(runs['a'], other, form='markdown'))

    assert alone['agieval prompt accuracy'][-1] == '0.900'
    assert alone['agieval prompt consistency_rate'][-1] == ''
    assert of_two['agieval prompt consistency_rate'][-1] == '1.000'
    assert of_others['agieval prompt accuracy'][-1] == ''


def test_constant_letters_have_a_column_only_beside_questions_with_options(shown, runs: dict[str, Path], changed):
    of_problems = changed({})
    with edited(of_problems) as record:
        for scores in record['score']['agieval']['perturbations'].values():
            # As of MATH, whose answers are no options.
            scores |= {'accuracy_by_constant_letter': {}, 'consistency_rate_by_constant_letter': {}}

    assert 'constant: the highest value of one letter' in shown(runs['a'])
    assert 'constant:' not in shown(of_problems)


def test_run_with_json_prints_only_json(gauntlet, make_run, data: Path, tmp_path: Path):
    make_run('answers of lines', [LINES])  # which leaves its answers and tasks
    words = ('--outputs', tmp_path / 'answers.jsonl', '--tasks', tmp_path / 'tasks.yaml')

    status, out, _ = gauntlet('run', *words, '--data-root', data, '--out', tmp_path / 'out', '--format', 'json')

    assert status == 0
    assert {row['name'] for row in json.loads(out)} == {LINES}


def test_frames_of_samples_have_the_lines_of_the_files(training: Path):
    runs = read_runs(str(training))

    frame = samples_frame(runs)

    for run in runs:
        rows_of_run = frame[(frame.batch == run.batch) & (frame.task == CHOICES)]
        lines = samples_of(run.folder, CHOICES)
        for name in ('row', 'score', 'prompt_sha256', 'logprobs'):
            assert list(rows_of_run[name]) == [line[name] for line in lines]


def test_frames_of_an_evaluation_equal_those_of_its_record(training: Path):
    run = read_runs(str(training))[0]
    evaluation = summarize_again(run, None, allow_missing=False)

    def comparable(frame: pd.DataFrame) -> pd.DataFrame:
        # An evaluation has no place in a training.
        return frame.drop(columns=['run', 'batch', 'token'], errors='ignore')

    pd.testing.assert_frame_equal(comparable(evaluation.to_pandas()), comparable(run.to_pandas()))
    pd.testing.assert_frame_equal(comparable(evaluation.samples()), comparable(run.samples()))


def test_examples_in_the_docstrings_of_runs_work(training: Path):
    run = read_runs(str(training))[0]

    failed, tried = doctest.testmod(runs_module, extraglobs={'run': run})

    assert failed == 0
    assert tried > 0


# Tables.


def test_markdown_has_errors_beside_values_and_composites_at_the_beginning(shown, runs: dict[str, Path]):
    record = record_of(runs['a'])

    rows = rows_of_markdown(shown(runs['a'], form='markdown'))

    assert rows.pop('') == ['a', 'error', 'chance', 'majority', 'constant']
    names = [name.strip('*') for name in rows]
    bits = 'gold_bits_per_byte (lower is better)'
    assert names[:11] == [*AVERAGES, *GROUPED, bits, 'rest bits/byte', 'SCORE']
    assert [name.strip('*') for name in rows if name[0] == '*'] == [*AVERAGES, 'reading', 'rest', bits, 'SCORE']
    # The answers to riddles are from elsewhere, so that reading and both averages have no bits.
    assert rows['rest bits/byte'] == [*formatted(record['composites']['gold_bits_per_byte']['rest']), '', '', '']
    for name in ('reading', 'rest'):
        assert rows[f'**{name}**'] == [*formatted(record['composites']['categories'][name]), '', '', '']
    for key in ROWS:
        metrics = record['tasks'][key]['metrics']
        majority = f'{metrics["MajorityClass"]["value"]:.3f}' if 'MajorityClass' in metrics else ''
        assert rows[key] == [*formatted(accuracy_of(record, key)), f'{BASELINES[key]:.3f}', majority, '']
    score = record['score']['agieval']['perturbations']['prompt']['accuracy']
    assert rows['agieval prompt accuracy'][:2] == formatted(score)


def test_markdown_of_a_training_has_a_column_and_an_error_for_each_checkpoint(shown, training: Path):
    header, accuracies = [], []
    for batch in BATCHES.values():
        header += [f'ba{batch}', 'error']
        accuracies += formatted(accuracy_of(record_of(training / f'ba{batch}'), LINES))

    rows = rows_of_markdown(shown(training, form='markdown'))

    assert rows[''] == [*header, 'chance', 'constant']
    assert rows[LINES] == [*accuracies, f'{BASELINES[LINES]:.3f}', '']


def test_the_terminal_shows_composites_at_the_end_and_where_the_files_are(shown, runs: dict[str, Path]):
    record = record_of(runs['a'])

    out = shown(runs['a'])

    rows = rows_of_table(out)
    assert list(rows)[2:10] == [*GROUPED, *AVERAGES]
    assert rows[TOPICS][:3] == [*formatted(accuracy_of(record, TOPICS)), '0.250']
    path, _, totals = out.splitlines()[-1].partition(': ')
    num_items = sum(entry['num_items'] for entry in (*record['tasks'].values(), *record['score'].values()))
    assert path == str(runs['a'] / 'results.json')
    assert totals == f'4 tasks, 1 SCORE dataset, {num_items} items, {record["timing"]["seconds"]:.1f} s'


def test_absent_numbers_are_empty_with_a_reason(gauntlet, shown, unscored: tuple[Path, Path], tmp_path: Path):
    """Mutation: write 0 for an absent number."""
    run = tmp_path / 'again'

    status, out, err = gauntlet('run', '--from', unscored[1], '--out', run, '--format', 'csv')

    assert (status, err) == (0, '')
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(out)):
        if not row['part']:
            rows.setdefault((row['kind'], row['name']), row)  # a task's first is its accuracy
    reason = rows['task', CHOICES]['reason']
    assert rows['task', CHOICES]['value'] == '' and '2 of 12 items' in reason
    assert rows['category', 'reading']['value'] == '' and rows['category', 'reading']['reason']
    assert rows['task', LINES]['value'] != '' and rows['task', LINES]['reason'] == ''
    text = shown(run, form='markdown')
    assert CHOICES not in rows_of_markdown(text)
    assert f'\n- {reason}: {CHOICES}' in text and f'- {reason}: {CHOICES}' in shown(run)
    assert '- composites over tasks without a score are absent: reading, rest, core' in ' '.join(text.split())
    assert shown(run).splitlines()[-1].endswith(f'; 1 task has no score: {CHOICES}')


def test_duplicate_runs_are_shown_once_and_named_by_what_differs(shown, runs, tmp_path: Path):
    first, second = (copy_run(runs[name], tmp_path / name / 'ba7', batch=7) for name in 'ab')

    header = rows_of_markdown(shown(first, second, tmp_path, form='markdown'))['']

    assert header == ['a', 'error', 'b', 'error', 'chance', 'constant']


def test_markdown_syntax_in_names_is_escaped(shown, runs: dict[str, Path], tmp_path: Path):
    run = copy_run(runs['a'], tmp_path / 'a|b_*c*_<b>')

    assert r'a\|b\_\*c\*\_\<b>' in shown(run, form='markdown').splitlines()[2]


def test_all_signs_of_markdown_are_escaped():
    assert without_markdown('_a_b_ `c`\n[d](e) \\') == r'\_a_b\_ \`c\` \[d](e) \\'


@pytest.mark.slow
def test_show_and_compare_import_nothing_heavy(runs: dict[str, Path], training: Path):
    names = ('torch', 'composer', 'transformers', 'datasets', 'sympy', 'pandas', 'altair')
    commands = [
        ('show', runs['a'], runs['b']),
        ('compare', training),
        ('compare', runs['a'], training),
    ]
    for words in commands:
        assert loaded_by(*words, names=names) == []


# Marks.


@pytest.fixture
def changed(runs: dict[str, Path], tmp_path: Path):
    """Return a function that copies a run and changes entries of its tasks; others have data of the user."""

    def change(entries: dict[str, dict[str, Any]], *, origin: str = 'own') -> Path:
        folder = copy_run(runs['a'], tmp_path / f'run{len(list(tmp_path.iterdir()))}')
        with edited(folder) as record:
            for entry in (*record['tasks'].values(), *record['score'].values()):
                entry['data_origin'] = origin
            for key, changes in entries.items():
                record['tasks'][key] = {**record['tasks'].get(key, record['tasks'][CHOICES]), **changes}
            record['config']['max_seq_len'] = 128
        return folder

    return change


def test_runs_with_different_numbers_of_items_have_them_beside_their_scores(shown, runs: dict[str, Path], changed):
    """Mutation: all tasks have their numbers; a run without the task counts as one with other items."""
    other = changed({CHOICES: {'num_items': 1500}})
    with edited(other) as record:
        del record['tasks'][LINES]
        record['score']['agieval']['perturbations']['prompt']['num_questions'] = 1500

    rows = rows_of_markdown(shown(runs['a'], other, form='markdown'))

    assert rows[''][-1] == 'n'
    assert {name: cells[-1] for name, cells in rows.items() if cells[-1] and name} == {
        CHOICES: '12 / 1,500',
        'agieval prompt accuracy': f'{len(QUESTIONS)} / 1,500',
        'agieval prompt consistency_rate': f'{len(QUESTIONS)} / 1,500',
    }
    assert 'n: the number of items of each run' in shown(runs['a'], other)


def test_runs_with_as_many_items_of_each_task_have_no_column_of_them(shown, runs: dict[str, Path]):
    text = shown(runs['a'], runs['b'], form='markdown')

    assert 'n' not in rows_of_markdown(text)['']
    assert 'number of items' not in text
    assert 'as many items' not in text


@pytest.mark.parametrize(
    ('changes', 'config', 'is_other'),
    [
        ({'data_sha256': 'another'}, {}, True),
        ({'subset_items': 12}, {'subset_version': 99}, True),
        ({'data_sha256': 'another', 'num_items': 10}, {}, False),  # which the column of numbers says
        ({'data_sha256': None}, {}, False),  # unknown
    ],
)
def test_tasks_with_as_many_items_but_others_are_named(
    shown, runs: dict[str, Path], changed, changes, config, is_other
):
    other = changed({CHOICES: changes})
    with edited(other) as record:
        record['config'] |= config

    text = ' '.join(shown(runs['a'], other).split())

    assert (f'or the choice of subsets differ: {CHOICES}' in text) == is_other


@pytest.mark.parametrize('form', ['table', 'markdown'])
def test_tables_say_which_data_are_samples(shown, changed, form: str):
    def text(folder: Path) -> str:
        return ' '.join(shown(folder, form=form).split())

    of_samples = text(changed({}, origin='sample'))
    in_part_of_samples = text(changed({RIDDLES: {'data_origin': 'sample'}}))
    of_copies = text(changed({RIDDLES: {'data_origin': 'unofficial'}}))
    of_published_data = text(changed({}, origin='published'))

    assert of_samples.startswith(f'Eval Gauntlet ({SAMPLE}) ')
    assert in_part_of_samples.startswith(f'Eval Gauntlet (1 of 5 tasks: {SAMPLE}) ')
    assert f'- {SAMPLE}: {RIDDLES}' in in_part_of_samples
    assert of_copies.startswith('Eval Gauntlet ')
    assert f'unofficial copies of the data: {RIDDLES}' in of_copies
    assert SAMPLE not in of_published_data


@pytest.mark.parametrize('form', ['table', 'markdown'])
def test_tables_mark_shortened_prompts(shown, changed, form: str):
    run = changed(
        {
            'more/10-shot': {'num_shortened': 3, 'effective_shots': 1.4},
            RIDDLES: {'effective_shots': 0.0},  # as many as were asked for
        }
    )

    words = ' '.join(shown(run, form=form).split())

    assert 'more/10-shot\u2020 ' in words
    assert f'{CHOICES} ' in words
    assert '- \u2020 prompts of 1 of 5 tasks are shortened to fit 128 tokens; 10-shot is 1.4 on average' in words


def test_a_note_names_tasks_with_many_generations_without_a_delimiter(shown, changed):
    """From a tenth of the generations on, with the share in each run.

    Mutations: no threshold; the share of the last run alone.
    """

    def lacking(*shares: float) -> dict[str, Any]:
        accuracy = {'value': 0.5, 'standard_error': 0.1}
        return {
            f'cot{place}/3-shot': {'metrics': {'Accuracy': accuracy, 'NoDelimiterShare': {'value': share}}}
            for place, share in enumerate(shares)
        }

    one, other = changed(lacking(0.65, 0.1, 0.09)), changed(lacking(0.0, 1.0))

    words = ' '.join(shown(one).split())
    of_both = ' '.join(shown(one, other).split())

    note = '- generations without the cot_delimiter before their answer, so that all of the text is compared: '
    assert f'{note}cot0/3-shot 65 %, cot1/3-shot 10 % ' in words
    assert 'cot2/3-shot 9 %' not in words
    assert f'{note}cot0/3-shot 65 % and 0 %, cot1/3-shot 10 % and 100 % ' in of_both
    of_equal = ' '.join(shown(changed(lacking(1.0)), changed(lacking(1.0))).split())
    assert f'{note}cot0/3-shot 100 % ' in of_equal  # once


@pytest.mark.parametrize('form', ['table', 'markdown'])
def test_tables_have_intervals_in_place_of_errors_of_0(shown, changed, form: str):
    interval = {'value': 1.0, 'standard_error': 0.0, 'confidence_interval': [0.646, 1.0]}
    metrics = {'InContextLearningGenerationExactMatchAccuracy': interval}

    out = shown(changed({RIDDLES: {'metrics': metrics}}), form=form)

    (line,) = [line for line in out.splitlines() if RIDDLES in line]
    assert line.replace('|', ' ').split()[1:4] == ['1.000', '[0.65,', '1.00]']
    words = ' '.join(out.split())
    assert '- error: the standard error, or the 95 % interval where that is 0 or unknown' in words


def test_notes_name_the_limit_that_ended_many_generations(shown, changed):
    """The tasks with the largest shares first, five for each limit; below a tenth no note.

    Mutations: no threshold; every task is named; tasks in the order of the record.
    """

    def at_limit(share: float, tokens: int = 4, setting: str = 'generation_kwargs.max_new_tokens') -> dict[str, Any]:
        return {'ended_at_limit': {'share': share, 'tokens': tokens, 'setting': setting}}

    tasks = {f't{place}/0-shot': at_limit(place / 10) for place in range(1, 8)}
    few = {RIDDLES: at_limit(0.09)}
    long = {'long/2-shot': at_limit(1.0, 64, 'half of max_seq_len')}

    words = ' '.join(shown(changed({**tasks, **few, **long})).split())

    assert (
        '- 70 % of generations of t7/0-shot, 60 % of t6/0-shot, 50 % of t5/0-shot, 40 % of t4/0-shot, '
        '30 % of t3/0-shot and 2 more tasks ended at the limit of 4 tokens (generation_kwargs.max_new_tokens)'
    ) in words
    assert '- 100 % of generations of long/2-shot ended at the limit of 64 tokens (half of max_seq_len)' in words
    assert '9 % of' not in words


def test_records_without_the_limit_of_generations_have_no_note_of_it(shown, changed):
    words = ' '.join(shown(changed({RIDDLES: {'ended_at_limit': None}})).split())

    assert 'ended at the limit' not in words


def test_tables_of_a_pipe_have_80_columns_and_names_keep_their_shots(shown, changed):
    name = f'{"a_task_whose_name_is_" * 4}long/10-shot'
    three_runs = [changed({name: {'num_shortened': 1}}) for _ in range(3)]

    out = shown(*three_runs)

    lines_of_table = out.splitlines()[:-3]  # paths follow
    assert max(map(len, lines_of_table)) <= 80
    (shortened_name,) = [name for name in rows_of_table(out) if '\u2026' in name]
    assert shortened_name.startswith('a_task_whose')
    assert shortened_name.endswith('long/10-shot\u2020')


# The results format of lm-evaluation-harness 0.4.


@pytest.fixture
def run_for_lm_eval(run: Path) -> Path:
    """Return a run with a label of several shots, a task without a score, and a task that is scored in part."""
    with edited(run) as record:
        record['model'] = {'name': 'meta/llama', 'class': 'LlamaForCausalLM', 'num_parameters': 7}
        record['timing'].update(started='2026-01-02T03:04:05+00:00', seconds=1.5)
        tasks = record['tasks']
        tasks['lines/5-shot'] = {**tasks[LINES], 'metrics': {'InContextLearningLMAccuracy': {'value': 0.25}}}
        tasks['programs/0-shot'] = {**tasks[LINES], 'metrics': {'PassAt10': {'value': 0.5, 'standard_error': 0.1}}}
        tasks['absent/0-shot'] = {'reason': 'no sandbox'}
        tasks[RIDDLES].update(num_unscored=2, num_rows=40)
    return run


def test_lm_evals_format_names_tasks_with_their_shots_only_where_a_label_has_several(shown, run_for_lm_eval: Path):
    content = json.loads(shown(run_for_lm_eval, form='lm-eval'))

    for key in ('results', 'configs', 'versions', 'n-shot', 'n-samples', 'higher_is_better', 'group_subtasks'):
        assert content[key].keys() == {'choices', 'topics', 'lines_0-shot', 'lines_5-shot', 'riddles', 'programs'}
    assert (content['n-shot']['lines_0-shot'], content['n-shot']['lines_5-shot']) == (0, 5)


def test_lm_evals_format_has_its_names_of_our_metrics(shown, run_for_lm_eval: Path):
    """An unknown error is 'N/A'."""
    tasks = record_of(run_for_lm_eval)['tasks']
    metrics = {
        CHOICES: {'acc': 'InContextLearningMultipleChoiceAccuracy', 'acc_norm': 'CharacterNormalizedMatch'},
        RIDDLES: {'exact_match': 'InContextLearningGenerationExactMatchAccuracy'},
        'lines/5-shot': {'acc': 'InContextLearningLMAccuracy'},
        'programs/0-shot': {'pass@10': 'PassAt10'},
    }

    results = json.loads(shown(run_for_lm_eval, form='lm-eval'))['results']

    for key, own_names in metrics.items():
        alias = key.removesuffix('/0-shot').replace('/', '_')
        expected: dict[str, Any] = {'alias': alias}
        for name, own_name in own_names.items():
            measure = tasks[key]['metrics'][own_name]
            expected[f'{name},none'] = measure['value']
            expected[f'{name}_stderr,none'] = measure.get('standard_error', 'N/A')
        assert results[alias] == expected


def test_lm_evals_format_has_types_data_and_numbers_of_items(shown, run_for_lm_eval: Path):
    content = json.loads(shown(run_for_lm_eval, form='lm-eval'))

    types = {
        'choices': 'multiple_choice',
        'topics': 'multiple_choice',
        'lines_0-shot': 'loglikelihood',
        'riddles': 'generate_until',
    }
    assert {name: content['configs'][name]['output_type'] for name in types} == types
    assert content['configs']['choices']['dataset_path'] == 'choices.jsonl'
    assert content['n-samples']['choices'] == {'original': 12, 'effective': 12}
    assert content['n-samples']['riddles'] == {'original': 40, 'effective': 5}


def test_lm_evals_format_has_the_model_and_the_time(shown, run_for_lm_eval: Path):
    content = json.loads(shown(run_for_lm_eval, form='lm-eval'))

    assert content['config']['model_args'] == 'pretrained=meta/llama'
    assert content['config']['model_num_parameters'] == 7
    assert (content['model_name'], content['model_name_sanitized']) == ('meta/llama', 'meta__llama')
    assert datetime.fromtimestamp(content['date'], UTC) == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert content['total_evaluation_time_seconds'] == '1.5'


def test_lm_evals_format_is_of_the_last_evaluation_of_a_training(shown, training: Path):
    content = json.loads(shown(training, form='lm-eval'))

    last = accuracy_of(record_of(training / 'ba1000'), LINES)
    assert content['results']['lines']['acc,none'] == last['value']


def test_lm_evals_format_is_of_one_run(gauntlet, training: Path, runs: dict[str, Path], tmp_path: Path):
    """Checkpoints in one folder are one run, unless they are named one by one."""
    copy_run(runs['a'], tmp_path / 'all' / 'alone')
    shutil.copytree(training, tmp_path / 'all' / 'training')
    paths_by_names = {
        'a, b': [runs['a'], runs['b']],
        'ba20, ba1000': [training / 'ba20', training / 'ba1000'],
        'alone, training': [tmp_path / 'all'],
    }

    for names, paths in paths_by_names.items():
        status, _, err = gauntlet('show', *paths, '--format', 'lm-eval')
        assert status == 2
        assert '--format lm-eval' in err
        assert f'found 2 ({names})' in ' '.join(err.split())


# Records that cannot be shown.

# By the name in the error: the keys that lead to a value, and the value.
DAMAGED: dict[str, tuple[tuple[str, ...], Any]] = {
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
    # Left out.
    "the key 'timing'": (('timing',), ...),
    "the key 'score'": (('score',), ...),
}


@pytest.mark.parametrize('place', DAMAGED)
def test_a_damaged_record_is_an_error_naming_the_key(gauntlet, run: Path, place: str):
    (*above, key), value = DAMAGED[place]
    with edited(run) as record:
        entry = functools.reduce(operator.getitem, above, record)
        entry[key] = value
        if value is ...:
            del entry[key]

    status, out, err = gauntlet('show', run)

    assert (status, out) == (2, '')
    assert f'{run}/results.json: {place}' in err
