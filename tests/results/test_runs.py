"""Runs that are read back: all numbers are recomputed from the samples, and what is damaged is named."""

from __future__ import annotations

import functools
import json
import math
import operator
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import (
    AGIEVAL,
    CHOICES,
    LINES,
    RIDDLES,
    ROWS,
    SIZES,
    VARIANTS,
    accuracy_of,
    answers_of,
    edited,
    files_of,
    gauntlet_yaml,
    read_lines,
    record_of,
    samples_path,
    score_yaml,
    write_lines,
)

from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.results.runs import read_run


@pytest.fixture
def recompute(gauntlet, tmp_path: Path):
    """Return a function that recomputes a run from its samples into a folder of the test."""

    def recompute(run: Path, *more: Any, name: str = 'again') -> Path:
        status, _, err = gauntlet('run', '--from', run, *more, '--out', tmp_path / name)
        assert status == 0, err
        return tmp_path / name

    return recompute


# The same numbers again.


def test_recomputed_results_are_identical_without_data_or_yaml_files(make_run, recompute, data: Path, tmp_path: Path):
    own = shutil.copytree(data, tmp_path / 'own')
    score = score_yaml(own, {'dataset': 'choices', 'perturbations': ['option_order']})
    name = {'task': 'score_choices', 'num_shots': 0}
    of_choices = [
        {**name, 'row': row, 'variant': variant, 'text': f'The best answer is {letter}'}
        for row in range(SIZES[CHOICES])
        for variant, letter in zip(VARIANTS[:3], 'ABC', strict=True)
    ]
    sampling = {'max_new_tokens': 9, 'do_sample': True, 'temperature': 0.5, 'seed': 3}
    changes = {
        'lines': {'max_seq_len': 99, 'batch_size': 3},
        'riddles': {'early_stopping_criteria': ['\n\n'], 'generation_kwargs': sampling},
    }
    answers = [*answers_of(0), *of_choices]
    run = make_run('run', ROWS, '--score', score, '--data-root', own, answers=answers, gauntlet={}, tasks=changes)
    shutil.rmtree(own)
    for path in tmp_path.glob('*.*'):
        path.unlink()

    files = files_of(recompute(run))

    names = [*(key.replace('/', '_') for key in (*ROWS, AGIEVAL)), 'score_choices_0-shot']
    assert sorted(files) == ['results.json', *sorted(f'samples/{name}.jsonl' for name in names)]
    assert files == files_of(run)
    record = record_of(run)
    assert 0 < record['composites']['averages']['core']['value'] < 1
    assert 0 < record['score']['agieval']['perturbations']['prompt']['consistency_rate']['value'] < 1


@pytest.mark.parametrize('more', ['--semantics=reference', '--fewshot=fixed', '--sandbox=none'])
def test_recomputing_uses_the_settings_of_the_run(make_run, recompute, more: str):
    run = make_run('run', ROWS, more, gauntlet={})
    assert files_of(recompute(run)) == files_of(run)
    config = record_of(run)['config']
    fewshot = ('fixed', 1) if 'fixed' in more else ('reference', None)
    assert (config['fewshot'], config.get('fewshot_version')) == fewshot


@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
def test_non_finite_log_probabilities_are_read_back(make_run, recompute, semantics: str):
    answers = answers_of(0, [CHOICES])
    answers[2]['logprobs'] = [None, -1.0, -2.0]
    run = make_run('run', [CHOICES], '--semantics', semantics, answers=answers)
    assert files_of(recompute(run)) == files_of(run)
    (result,) = [result for result in read_run(run).results[CHOICES] if result.key.row == 2]
    assert result.logprobs is not None and math.isnan(result.logprobs[0]) and result.logprobs[1] == -1
    assert (result.score is None) == (semantics == 'corrected')


def test_recomputing_keeps_the_training_point_and_tasks_that_did_not_run(run: Path, recompute):
    kept = {
        'training': {'batch': 300, 'epoch': 1, 'token': 7, 'checkpoint': 'ep1-ba300.pt'},
        'model': {'name': 'mine', 'class': 'Mine', 'num_parameters': 5},
        'timing': {'seconds': 3.5, 'tasks': {CHOICES: 3.5}, 'model_tokens': 9, 'scoring': 'stream'},
        'environment': {'python': 'old', 'gpu': 'any'},
    }
    programs = {'reason': 'there is no sandbox'}
    with edited(run) as record:
        record.update(kept)
        record['tasks']['programs/0-shot'] = programs
        benchmarks = record['composites']['gauntlet']['categories'][1]['benchmarks']
        benchmarks.append({'name': 'programs', 'num_fewshot': 0})
    record = record_of(recompute(run))
    assert {key: record[key] for key in kept} == kept
    assert record['metrics']['gauntlet/seconds'] == 3.5
    assert record['tasks']['programs/0-shot'] == programs
    reason = 'benchmarks without a score: programs/0-shot (there is no sandbox)'
    assert record['composites']['categories']['rest'] == {'reason': reason}


def test_numbers_are_recomputed_from_the_samples(run: Path, recompute):
    """A wrong line is corrected only in the samples."""
    lines = read_lines(samples_path(run, LINES))
    wrong = next(line for line in lines if line['score'] == 0)
    wrong['score'] = 1.0
    write_lines(samples_path(run, LINES), lines)

    before, after = record_of(run), record_of(recompute(run))

    assert accuracy_of(after, LINES)['value'] - accuracy_of(before, LINES)['value'] == pytest.approx(1 / 9)
    rest_before = before['composites']['categories']['rest']['value']
    rest_after = after['composites']['categories']['rest']['value']
    assert rest_after - rest_before == pytest.approx(9 / 35 / 9)  # a line's share of the category


def test_another_gauntlet_changes_only_composites_and_their_version(run: Path, recompute, tmp_path: Path):
    benchmarks = [
        {'name': 'lines', 'num_fewshot': 0, 'random_baseline': 0.5},
        {'name': 'riddles', 'num_fewshot': 0, 'random_baseline': 0.1},
    ]
    path = gauntlet_yaml(tmp_path, categories=[{'name': 'other', 'benchmarks': benchmarks}], averages=None)

    files_before, files_after = files_of(run), files_of(recompute(run, '--gauntlet', path))

    before, after = json.loads(files_before.pop('results.json')), json.loads(files_after.pop('results.json'))
    assert files_after == files_before
    composites, composites_before = after.pop('composites'), before.pop('composites')
    lines, riddles = accuracy_of(after, LINES)['value'], accuracy_of(after, RIDDLES)['value']
    expected = (9 * (lines - 0.5) / 0.5 + 7 * (riddles - 0.1) / 0.9) / 16
    assert composites['categories']['other']['value'] == pytest.approx(expected, abs=1e-15)
    assert composites['averages'] == {'default_average': composites['categories']['other']}
    assert composites['version'] != composites_before['version']

    prefix = 'icl/metrics/eval_gauntlet/'
    of_gauntlet = {name.removeprefix(prefix) for name in after['metrics'] if name.startswith(prefix)}
    assert of_gauntlet == {
        'other',
        'other/standard_error',
        'default_average',
        'default_average/standard_error',
    }
    for record in (before, after):
        record['metrics'] = {name: value for name, value in record['metrics'].items() if not name.startswith(prefix)}
    assert after == before


def test_a_gauntlet_can_be_added_to_a_run(make_run, recompute, runs: dict[str, Path], tmp_path: Path):
    bare = make_run('bare', ROWS)
    still_bare = recompute(bare, name='still bare')
    with_gauntlet = recompute(bare, '--gauntlet', gauntlet_yaml(tmp_path))

    assert record_of(bare)['composites'] is None
    assert record_of(still_bare)['composites'] is None
    assert record_of(with_gauntlet)['composites'] == record_of(runs['a'])['composites']


def test_a_category_over_a_task_that_did_not_run_is_absent(make_run, recompute, tmp_path: Path):
    bare = make_run('bare', ROWS)
    benchmarks = [{'name': 'lines', 'num_fewshot': 0}, {'name': 'lines', 'num_fewshot': 5}]
    path = gauntlet_yaml(tmp_path, categories=[{'name': 'all', 'benchmarks': benchmarks}], averages=None)
    categories = record_of(recompute(bare, '--gauntlet', path, name='other'))['composites']['categories']
    assert categories == {'all': {'reason': 'benchmarks without a score: lines/5-shot (did not run)'}}


def test_allow_missing_applies_to_recomputing(unscored: tuple[Path, Path], recompute):
    run = unscored[1]
    assert files_of(recompute(run, '--allow-missing')) == files_of(run)
    strict = recompute(run, name='strict')
    task = record_of(strict)['tasks'][CHOICES]
    assert accuracy_of(record_of(strict), CHOICES) == {'reason': '2 of 12 items unscored: there is no answer'}
    assert task['num_unscored'] == 2
    assert files_of(recompute(strict, '--allow-missing', name='back')) == files_of(run)
    frame = read_run(strict).to_pandas()
    assert frame[frame.value.isna()].reason.notna().all() and CHOICES in {*frame[frame.value.isna()].name}


# Runs that cannot be read or recomputed.


@pytest.fixture
def refusal(gauntlet, tmp_path: Path) -> Callable[..., str]:
    """Return a function that tries to recompute a run, which writes nothing, and returns the error."""

    def refusal(run: Path, *more: Any, out: Any = tmp_path / 'again') -> str:
        status, _, err = gauntlet('run', '--from', run, '--out', out, *more)
        assert status == 2 and 'internal error' not in err and not (tmp_path / 'again').exists()
        return err

    return refusal


def test_runs_and_folders_are_not_overwritten_unless_asked(refusal, gauntlet, run: Path, tmp_path: Path):
    before = files_of(run)
    (tmp_path / 'link').symlink_to(run)
    for out in (run, tmp_path / 'link', f'{run}/', f'{run}/samples/..'):
        assert f'{out}'.rstrip('/') in refusal(run, '--overwrite', out=out)
        assert files_of(run) == before
    other = tmp_path / 'other'
    (other / 'samples').mkdir(parents=True)
    (other / 'samples' / 'old_0-shot.jsonl').write_text('{}\n')
    assert f'{other}: is not empty' in refusal(run, out=other)
    assert sorted(files_of(other)) == ['samples/old_0-shot.jsonl']
    assert gauntlet('run', '--from', run, '--out', other, '--overwrite')[0] == 0
    assert files_of(other) == before


def problems_of(run: Path) -> str:
    """Return why a run cannot be read."""
    with pytest.raises(RecordError) as raised:
        read_run(run)
    return '\n'.join(raised.value.problems)


@pytest.mark.parametrize(
    ('change', 'fact'),
    [
        # No line of a sample.
        ('{"score": nu', ''),
        ('[1]', ''),
        ('null', ''),
        ('7', ''),
        ('', ''),
        ('{"row": 1}', ''),
        # A field that is left out.
        ({'row': ...}, "'row'"),
        ({'score': ...}, "'score'"),
        ({'cluster': ...}, "'cluster'"),
        ({'prompt_sha256': ...}, "'prompt_sha256'"),
        # A value of another kind.
        ({'score': 'high'}, 'score is '),
        ({'text': 7}, 'text is '),
        ({'gold': [1]}, 'gold is '),
        ({'row': '3'}, 'row is '),
        ({'reason': {}}, 'reason is '),
        ({'prompt_sha256': None}, 'prompt_sha256 is '),
        ({'cluster': 'a passage'}, 'base 16'),
        ({'num_tokens': ['4']}, 'num_tokens[0] is '),
        ({'metrics': [1]}, 'metrics is '),
        ({'metrics': {'StrictMatch': 'yes'}}, 'metrics.StrictMatch is '),
    ],
)
def test_a_damaged_line_of_samples_is_named_by_file_and_line(run: Path, change: Any, fact: str):
    path = samples_path(run, RIDDLES)
    lines = read_lines(path)
    lines[2] = change if isinstance(change, str) else {**lines[2], **change}
    if isinstance(change, dict):
        lines[2] = {name: value for name, value in lines[2].items() if value is not ...}
    write_lines(path, lines)
    problem = problems_of(run)
    assert problem.startswith(f'{path}:3: ') and fact in problem and '\n' not in problem


@pytest.mark.parametrize('places', [[1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 2, 3, 4, 5, 6]])
def test_samples_of_another_record_are_an_error(run: Path, places: list[int]):
    """A line is missing, there is a duplicate, or a duplicate is in place of another line."""
    path = samples_path(run, RIDDLES)
    lines = read_lines(path)
    write_lines(path, [lines[place] for place in places])
    assert problems_of(run).startswith(f'{path}: has {len(places)} lines of ')


def forget(*path: str) -> Callable[[Path], None]:
    """Return a function that removes a path from a record."""

    def change(run: Path) -> None:
        with edited(run) as record:
            del functools.reduce(operator.getitem, path[:-1], record)[path[-1]]

    return change


def put(content: str) -> Callable[[Path], object]:
    return lambda run: (run / 'results.json').write_text(content)


def of_unknown_type(run: Path) -> None:
    with edited(run) as record:
        record['tasks'][LINES]['spec']['icl_task_type'] = 'made_elsewhere'


BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    'a task without its settings': (
        forget('tasks', RIDDLES, 'spec'),
        ['{run}/results.json: ', f'how {RIDDLES} was asked', 'evaluate again'],
    ),
    'SCORE without its settings': (forget('score', 'agieval', 'spec'), ['{run}/results.json: ', 'evaluate again']),
    'composites without a gauntlet': (forget('composites', 'gauntlet'), ['{run}/results.json: ', 'evaluate again']),
    'no settings': (forget('config'), ['{run}/results.json: ', 'evaluate again']),
    'no SCORE': (forget('score'), ['{run}/results.json: ', 'evaluate again']),
    'no JSON': (put('{'), ['{run}/results.json: cannot be read']),
    'a list': (put('[]'), ['{run}/results.json: is not a results file of format 1']),
    'another format': (put('{"format_version": 0}'), ['{run}/results.json: is not a results file of format 1']),
    'no training': (put('{"format_version": 1}'), ['{run}/results.json: training: is empty; it cannot be used']),
    'an unknown type': (of_unknown_type, ['{run}/results.json', 'made_elsewhere']),
    'no samples': (lambda run: samples_path(run, RIDDLES).unlink(), ['riddles_0-shot.jsonl: cannot be read']),
    'no run': (shutil.rmtree, ['--from: {run} has no results.json']),
}


@pytest.mark.parametrize('case', BROKEN)
def test_a_run_that_cannot_be_used_is_named(refusal, run: Path, case: str):
    damage, facts = BROKEN[case]
    damage(run)
    problem = refusal(run)
    assert [fact for fact in facts if fact.format(run=run) not in problem] == []
