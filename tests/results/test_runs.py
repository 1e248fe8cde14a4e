"""Runs that are read back: all numbers are recomputed from the samples."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from answered_runs import GAUNTLET, ROWS, answers, data_of, edit, files_of, record_of, words, write_yaml
from command_line import run_cli

from llmfoundry_gauntlet.results.files import write_lines
from llmfoundry_gauntlet.results.runs import read_run, read_runs
from llmfoundry_gauntlet.results.samples import samples_file

# The same numbers again.


def test_recomputed_results_are_identical_without_data_or_yaml_files(make_run, recompute, source: Path, tmp_path: Path):
    run = make_run()
    shutil.rmtree(source)
    (tmp_path / 'answers.jsonl').unlink()
    found = files_of(recompute(run))
    names = ['choices_1-shot', 'lines_1-shot', 'riddles_1-shot', 'score_agieval_0-shot', 'score_choices_0-shot']
    assert sorted(found) == ['results.json', *(f'samples/{name}.jsonl' for name in names)]
    assert found == files_of(run)
    record = record_of(run)
    assert 0 < record['composites']['averages']['all of it']['value'] < 1
    assert 0 < record['score']['agieval']['perturbations']['prompt']['consistency_rate']['value'] < 1


@pytest.mark.parametrize('more', ['--semantics=reference', '--fewshot=fixed', '--sandbox=none'])
def test_recomputing_uses_the_settings_of_the_run(make_run, recompute, more: str):
    run = make_run(more)
    assert files_of(recompute(run)) == files_of(run)


def test_recomputed_results_of_a_subset_are_identical(make_run, recompute, source: Path, tmp_path: Path):
    names = ('task', 'num_shots', 'file', 'row', 'variant')
    limit = ['--limit', 3]
    files = [word for word in words(source) if '--gauntlet' not in str(word)]
    assert run_cli('export', *files, *limit, '--out', tmp_path / 'requests.jsonl') == 0
    requests = [json.loads(line) for line in (tmp_path / 'requests.jsonl').read_text().splitlines()]
    asked = {tuple(request[name] for name in names) for request in requests}
    lines = [line for line in answers() if tuple(line.get(name) for name in names) in asked]
    assert len(lines) == len(requests) < len(answers()) / 1.2
    run = make_run(*limit, lines=lines)
    assert files_of(recompute(run)) == files_of(run)


def test_recomputed_pmi_is_identical(make_run, recompute, source: Path):
    tasks = json.loads((source / 'tasks.yaml').read_text())['icl_tasks']
    write_yaml(source / 'tasks.yaml', icl_tasks=[tasks[0] | {'pmi_context': 'Antwort:'}, *tasks[1:]])
    alone = [
        {'task': 'choices', 'num_shots': 1, 'row': row, 'variant': 'alone', 'logprobs': [-1.5, -1.0 - row]}
        for row in range(8)
    ]
    run = make_run(lines=[*answers(), *alone])
    metrics = record_of(run)['tasks']['choices/1-shot']['metrics']
    credits = []
    for answer, other, row in zip(answers(), alone, ROWS['choices'], strict=False):
        gains = [one - without for one, without in zip(answer['logprobs'], other['logprobs'], strict=True)]
        best = [place for place, gain in enumerate(gains) if gain == max(gains)]
        credits.append(1 / len(best) if row['gold'] in best else 0)
    macro = (sum(credits[::2]) / 4 + sum(credits[1::2]) / 4) / 2
    assert metrics['PMINormalizedMatch']['value'] == pytest.approx(macro, abs=1e-15)
    assert 0 < macro < 1 and macro != metrics['InContextLearningMultipleChoiceAccuracy']['value']
    assert files_of(recompute(run)) == files_of(run)


@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
def test_non_finite_log_probabilities_are_read_back(make_run, recompute, semantics: str):
    lines = answers()
    (choice,) = [line for line in lines if line['task'] == 'choices' and line['row'] == 2]
    choice['logprobs'] = [None, -1.0]
    run = make_run('--semantics', semantics, lines=lines)
    assert files_of(recompute(run)) == files_of(run)
    (result,) = [result for result in read_run(run).results['choices/1-shot'] if result.key.row == 2]
    assert result.logprobs is not None and math.isnan(result.logprobs[0]) and result.logprobs[1] == -1
    assert (result.score is None) == (semantics == 'corrected')


def test_recomputed_results_with_unsupported_tasks_are_identical(recompute, source: Path, tmp_path: Path):
    """Without a path there is no prlimit, and no sandbox for programs."""
    write_lines(source / 'programs.jsonl', [json.dumps({'prompt': 'def f():\n', 'entry_point': 'f', 'test': 'f()'})])
    tasks = json.loads((source / 'tasks.yaml').read_text())['icl_tasks']
    program = {'label': 'programs', 'dataset_uri': 'programs.jsonl', 'num_fewshot': [0]}
    write_yaml(source / 'tasks.yaml', icl_tasks=[{**program, 'icl_task_type': 'code_evaluation'}, *tasks])
    benchmark = {'name': 'programs', 'num_fewshot': 0}
    categories = [*GAUNTLET['categories'], {'name': 'programming', 'benchmarks': [benchmark]}]
    write_yaml(source / 'gauntlet.yaml', eval_gauntlet={'categories': categories})
    write_lines(tmp_path / 'answers.jsonl', map(json.dumps, answers()))
    script = 'from llmfoundry_gauntlet.cli import main; main()'
    arguments = ['run', '--outputs', tmp_path / 'answers.jsonl', *words(source), '--out', tmp_path / 'run']
    done = subprocess.run(
        [sys.executable, '-c', script, *map(str, arguments)],
        env={**os.environ, 'PATH': ''},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path / 'run')
    assert 'prlimit is missing' in record['tasks']['programs/0-shot']['reason']
    assert 'prlimit is missing' in record['composites']['categories']['programming']['reason']
    assert files_of(recompute(tmp_path / 'run')) == files_of(tmp_path / 'run')


def test_recomputing_keeps_the_training_point(make_run, recompute):
    kept = {
        'training': {'batch': 300, 'epoch': 1, 'token': 7, 'checkpoint': 'ep1-ba300.pt'},
        'model': {'name': 'mine', 'class': 'Mine', 'num_parameters': 5},
        'timing': {'seconds': 3.5, 'tasks': {'choices/1-shot': 3.5}, 'model_tokens': 9, 'scoring': 'stream'},
        'environment': {'python': 'old', 'gpu': 'any'},
    }
    record = record_of(recompute(edit(make_run(), lambda record: record.update(kept))))
    assert {key: record[key] for key in kept} == kept
    assert record['metrics']['gauntlet/seconds'] == 3.5


def test_numbers_are_recomputed_from_the_samples(make_run, recompute):
    """A wrong line is corrected only in the samples."""
    run = make_run()
    path = samples_file(run, 'lines/1-shot')
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line['score'] for line in lines] == [1, 1, 0, 1, 1]
    lines[2]['score'] = 1.0
    write_lines(path, map(json.dumps, lines))
    records = [record_of(folder) for folder in (run, recompute(run))]
    assert [record['metrics']['metrics/lines/1-shot/InContextLearningLMAccuracy'] for record in records] == [0.8, 1]
    before, after = (record['composites']['categories']['words']['value'] for record in records)
    assert after - before == pytest.approx(0.2 / 2, abs=1e-15)


def test_another_gauntlet_changes_only_composites_and_their_version(make_run, recompute, tmp_path: Path):
    run = make_run()
    benchmarks = [
        {'name': 'lines', 'num_fewshot': 1, 'random_baseline': 0.5},
        {'name': 'riddles', 'num_fewshot': 1, 'random_baseline': 0.1},
    ]
    other = {'categories': [{'name': 'other', 'benchmarks': benchmarks}], 'weighting': 'SAMPLE_SZ'}
    path = write_yaml(tmp_path / 'other.yaml', eval_gauntlet=other)
    before, after = files_of(run), files_of(recompute(run, '--gauntlet', path))
    earlier, later = (json.loads(files.pop('results.json')) for files in (before, after))
    assert after == before
    composites = later.pop('composites')
    expected = (5 * (0.8 - 0.5) / 0.5 + 4 * (0.75 - 0.1) / 0.9) / 9  # riddle 0 alone is wrong
    assert composites['categories']['other']['value'] == pytest.approx(expected, abs=1e-15)
    assert composites['averages'] == {'default_average': composites['categories']['other']}
    assert composites['gauntlet']['weighting'] == 'SAMPLE_SZ'
    assert composites['version'] != earlier.pop('composites')['version']
    prefix = 'icl/metrics/eval_gauntlet'
    assert {name.removeprefix(prefix) for name in later['metrics'] if name.startswith(prefix)} == {
        f'/{name}{end}' for name in ('other', 'default_average') for end in ('', '/standard_error')
    }
    for record in (earlier, later):
        record['metrics'] = {name: value for name, value in record['metrics'].items() if not name.startswith(prefix)}
    assert later == earlier


def test_a_gauntlet_can_be_added_to_a_run(make_run, recompute, source: Path, tmp_path: Path):
    with_gauntlet = make_run()
    arguments = ['--tasks', source / 'tasks.yaml', '--score', source / 'score.yaml', '--data-root', source]
    out = tmp_path / 'bare'
    assert run_cli('run', '--outputs', tmp_path / 'answers.jsonl', *arguments, '--out', out) == 0
    assert record_of(out)['composites'] is None
    assert record_of(recompute(out, name='still bare'))['composites'] is None
    again = recompute(out, '--gauntlet', source / 'gauntlet.yaml')
    assert record_of(again)['composites'] == record_of(with_gauntlet)['composites']


def test_a_benchmark_that_did_not_run_is_named(make_run, recompute, tmp_path: Path):
    benchmarks = [{'name': 'lines', 'num_fewshot': 1}, {'name': 'lines', 'num_fewshot': 5}]
    gauntlet = {'categories': [{'name': 'all', 'benchmarks': benchmarks}]}
    path = write_yaml(tmp_path / 'other.yaml', eval_gauntlet=gauntlet)
    categories = record_of(recompute(make_run(), '--gauntlet', path))['composites']['categories']
    assert categories == {'all': {'reason': 'benchmarks without a score: lines/5-shot (did not run)'}}


def test_allow_missing_applies_to_recomputing(make_run, recompute):
    lines = [line for line in answers() if line['task'] != 'riddles' or line['row'] > 1]
    run = make_run('--allow-missing', lines=lines)
    assert files_of(recompute(run, '--allow-missing')) == files_of(run)
    name = 'InContextLearningGenerationExactMatchAccuracy'
    found = record_of(run)['tasks']['riddles/1-shot']['metrics'][name]
    assert (found['value'], found['standard_error']) == (1, 0)
    assert found['confidence_interval'] == pytest.approx([2 / (2 + 1.959964**2), 1])  # Wilson's, of two items
    strict = recompute(run, name='strict')
    task = record_of(strict)['tasks']['riddles/1-shot']
    assert task['metrics'][name] == {'reason': '2 of 4 items unscored: there is no answer'}
    assert task['num_unscored'] == 2
    assert files_of(recompute(strict, '--allow-missing', name='back')) == files_of(run)


# Reading.


def test_a_run_knows_its_tasks_items_and_training_batch(make_run, source: Path):
    run = read_run(make_run())
    data = data_of(source)
    assert list(run.tasks) == [task.key for task in data.suite.tasks]
    own = {task.key: task for task in data.suite.tasks}
    for key in ('choices/1-shot', 'lines/1-shot', 'riddles/1-shot', 'score_agieval/0-shot'):
        assert run.tasks[key] == own[key]
    assert run.data.suite.gauntlet == data.suite.gauntlet
    assert run.data.digests == data.digests and run.data.settings.semantics == 'corrected'
    assert {key: len(results) for key, results in run.results.items()} == {
        'choices/1-shot': 8,
        'lines/1-shot': 5,
        'riddles/1-shot': 4,
        'score_agieval/0-shot': 4 * 12,
        'score_choices/0-shot': 8 * 2,
    }
    assert run.batch is None


def test_runs_are_read_in_order_of_training(make_run, tmp_path: Path):
    run = make_run()
    for batch in (100, 20, 3):
        shutil.copytree(run, tmp_path / 'runs' / f'ba{batch}')
        edit(tmp_path / 'runs' / f'ba{batch}', lambda record, batch=batch: record.update(training={'batch': batch}))
    assert [found.batch for found in read_runs(tmp_path / 'runs')] == [3, 20, 100]
