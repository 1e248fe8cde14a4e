"""Runs that cannot be read back or recomputed: the error names the problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answered_runs import edit, files_of

from llmfoundry_gauntlet.results.files import write_lines
from llmfoundry_gauntlet.results.samples import samples_file


@pytest.fixture
def refusal(gauntlet, tmp_path: Path) -> Callable[..., str]:
    """Return a function that tries to recompute a run, which writes nothing, and returns the error."""

    def refusal(run: Path, *more: Any, command: str = 'run', out: Path = tmp_path / 'again') -> str:
        arguments = ['--from', run, '--out', out] if command == 'run' else [run, run]
        status, _, err = gauntlet(command, *arguments, *more)
        assert status == 2 and 'internal error' not in err and not (tmp_path / 'again').exists()
        return err

    return refusal


def test_the_earlier_run_is_never_overwritten(refusal, make_run, tmp_path: Path):
    run = make_run()
    before = files_of(run)
    (tmp_path / 'link').symlink_to(run)
    for out in (run, tmp_path / 'link', f'{run}/', f'{run}/samples/..'):
        assert f'{out}'.rstrip('/') in refusal(run, '--overwrite', out=out)
        assert files_of(run) == before


def test_a_folder_is_replaced_only_with_overwrite(gauntlet, make_run, tmp_path: Path):
    run, other = make_run(), tmp_path / 'other'
    (other / 'samples').mkdir(parents=True)
    (other / 'samples' / 'old_0-shot.jsonl').write_text('{}\n')
    status, _, err = gauntlet('run', '--from', run, '--out', other)
    assert status == 2 and f'{other}: is not empty' in err
    assert sorted(files_of(other)) == ['samples/old_0-shot.jsonl']
    assert gauntlet('run', '--from', run, '--out', other, '--overwrite')[0] == 0
    assert files_of(other) == files_of(run)


@pytest.mark.parametrize(
    ('words', 'facts'),
    [
        (('--tasks', 'tasks.yaml'), ['--tasks', '--from']),
        (('--score', 'score.yaml'), ['--score', '--from']),
        (('--model', 'model'), ['--model', '--outputs']),
        (('--outputs', 'outputs'), ['--model', '--outputs']),
        (('--semantics', 'reference'), ['--semantics', '--from']),
        (('--fewshot', 'fixed'), ['--fewshot', '--from']),
        (('--limit', '3'), ['--limit', '--from']),
        (('--resume',), ['--resume', '--from']),
        (('--time-budget', '9s'), ['--time-budget', '--from']),
    ],
    ids=lambda words: words[0],
)
def test_options_without_effect_are_errors(refusal, make_run, words: tuple[str, ...], facts: list[str]):
    err = refusal(make_run(), *words)
    assert [fact for fact in facts if fact not in err] == []


@pytest.mark.parametrize('damaged', ['{"file": nu', '[1]', 'null', '7', '', '{"row": 1}'])
@pytest.mark.parametrize('command', ['run', 'compare'])
def test_a_damaged_line_of_samples_is_named_by_file_and_line(refusal, make_run, damaged: str, command: str):
    run = make_run()
    path = samples_file(run, 'lines/1-shot')
    lines = path.read_text().splitlines()
    write_lines(path, [*lines[:2], damaged, *lines[3:]])
    err = refusal(run, command=command)
    assert err.startswith(f'error: {path}:3: ') and len(err.splitlines()) == 1


@pytest.mark.parametrize('missing', ['row', 'score', 'cluster', 'prompt_sha256'])
def test_an_incomplete_sample_is_an_error(refusal, make_run, missing: str):
    run = make_run()
    path = samples_file(run, 'riddles/1-shot')
    lines = [json.loads(line) for line in path.read_text(encoding='utf-8').split('\n')[:-1]]
    del lines[3][missing]
    write_lines(path, map(json.dumps, lines))
    err = refusal(run)
    assert err.startswith(f'error: {path}:4: ') and missing in err


def test_missing_samples_are_named(refusal, make_run):
    run = make_run()
    samples_file(run, 'riddles/1-shot').unlink()
    assert refusal(run).startswith(f'error: {samples_file(run, "riddles/1-shot")}: cannot be read')


def forget(*path: str) -> Callable[[dict[str, Any]], None]:
    """Remove a path from a record."""

    def change(record: dict[str, Any]) -> None:
        for name in path[:-1]:
            record = record[name]
        del record[path[-1]]

    return change


@pytest.mark.parametrize(
    'path',
    [
        ('tasks', 'riddles/1-shot', 'spec'),
        ('score', 'agieval', 'spec'),
        ('composites', 'gauntlet'),
        ('config',),
        ('score',),
    ],
    ids='.'.join,
)
@pytest.mark.parametrize('command', ['run', 'compare'])
def test_a_record_of_an_older_version_is_an_error(refusal, make_run, path: tuple[str, ...], command: str):
    run = edit(make_run(), forget(*path))
    err = refusal(run, command=command)
    assert f'error: {run}/results.json: ' in err and 'evaluate again' in err
    assert 'riddles/1-shot' not in path or ('riddles/1-shot' in err and 'KeyError' not in err)


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('{', 'cannot be read'),
        ('[]', 'is not a results file of format 1'),
        ('{"format_version": 0}', 'is not a results file of format 1'),
        ('{"format_version": 1}', 'training: is empty; it cannot be used'),
    ],
)
def test_an_invalid_record_is_named(refusal, make_run, content: str, message: str):
    run = make_run()
    (run / 'results.json').write_text(content)
    assert refusal(run).startswith(f'error: {run}/results.json: {message}')


def test_a_task_of_an_unknown_type_is_named(refusal, make_run):
    run = make_run()
    edit(run, lambda record: record['tasks']['lines/1-shot']['spec'].update(icl_task_type='made_elsewhere'))
    err = refusal(run)
    assert f'{run}/results.json' in err and 'made_elsewhere' in err


def test_a_folder_without_a_run_is_named(refusal, tmp_path: Path):
    assert refusal(tmp_path / 'nowhere').startswith(f'error: {tmp_path}/nowhere/results.json: cannot be read')


@pytest.mark.parametrize(
    'places',
    [
        pytest.param([1, 2, 3, 4], id='a line is missing'),
        pytest.param([0, 0, 1, 2, 3, 4], id='a line is duplicated'),
        pytest.param([0, 0, 2, 3, 4], id='a line is there twice in place of another'),
    ],
)
def test_samples_of_another_record_are_an_error(refusal, make_run, places: list[int]):
    run = make_run()
    path = samples_file(run, 'lines/1-shot')
    lines = path.read_text().splitlines()
    write_lines(path, [lines[place] for place in places])
    assert refusal(run).startswith(f'error: {path}: has {len(places)} lines of ')
