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


def test_the_earlier_run_is_never_overwritten(gauntlet, make_run, tmp_path: Path):
    run = make_run()
    before = files_of(run)
    (tmp_path / 'link').symlink_to(run)
    for out in (run, tmp_path / 'link', f'{run}/', f'{run}/samples/..'):
        status, _, err = gauntlet('run', '--from', run, '--out', out, '--overwrite')
        assert status == 2 and 'is the earlier run itself; give another folder' in err
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
    ('option', 'message'),
    [
        ('tasks', '--tasks: has no effect with --from'),
        ('score', '--score: has no effect with --from'),
        ('model', 'give one of --model, --outputs'),
        ('outputs', 'give one of --model, --outputs'),
    ],
)
def test_other_tasks_and_models_are_errors(gauntlet, make_run, source: Path, tmp_path: Path, option: str, message: str):
    run = make_run()
    out = tmp_path / 'again'
    status, _, err = gauntlet('run', '--from', run, f'--{option}', source / f'{option}.yaml', '--out', out)
    assert status == 2 and message in err
    assert not out.exists()


@pytest.mark.parametrize('damaged', ['{"file": nu', '[1]', 'null', '7', '', '{"row": 1}'])
def test_a_damaged_line_of_samples_is_named_by_file_and_line(gauntlet, make_run, tmp_path: Path, damaged: str):
    run, out = make_run(), tmp_path / 'again'
    path = samples_file(run, 'lines/1-shot')
    lines = path.read_text().splitlines()
    write_lines(path, [*lines[:2], damaged, *lines[3:]])
    for arguments in (['run', '--from', run, '--out', out], ['compare', run, run]):
        status, _, err = gauntlet(*arguments)
        assert status == 2
        assert err.startswith(f'error: {path}:3: is no sample of this version') and len(err.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize('missing', ['row', 'score', 'cluster', 'prompt_sha256'])
def test_an_incomplete_sample_is_an_error(gauntlet, make_run, tmp_path: Path, missing: str):
    run = make_run()
    path = samples_file(run, 'riddles/1-shot')
    lines = [json.loads(line) for line in path.read_text(encoding='utf-8').split('\n')[:-1]]
    del lines[3][missing]
    write_lines(path, map(json.dumps, lines))
    status, _, err = gauntlet('run', '--from', run, '--out', tmp_path / 'again')
    assert status == 2 and err.startswith(f'error: {path}:4: is no sample of this version') and missing in err


def test_missing_samples_are_named(gauntlet, make_run, tmp_path: Path):
    run = make_run()
    samples_file(run, 'riddles/1-shot').unlink()
    status, _, err = gauntlet('run', '--from', run, '--out', tmp_path / 'again')
    assert status == 2 and err.startswith(f'error: {samples_file(run, "riddles/1-shot")}: cannot be read')


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
def test_a_record_of_an_older_version_is_an_error(
    gauntlet, make_run, tmp_path: Path, path: tuple[str, ...], command: str
):
    run, whole = make_run(), make_run(name='whole')
    edit(run, forget(*path))
    out = tmp_path / 'again'
    arguments = {'run': ['--from', run, '--out', out], 'compare': [whole, run]}
    status, _, err = gauntlet(command, *arguments[command])
    assert status == 2
    assert f'error: {run}/results.json: ' in err and 'evaluate again' in err
    assert 'internal error' not in err and not out.exists()


def test_the_error_of_an_older_record_names_what_is_missing(gauntlet, make_run, tmp_path: Path):
    run = edit(make_run(), forget('tasks', 'riddles/1-shot', 'spec'))
    *_, err = gauntlet('run', '--from', run, '--out', tmp_path / 'again')
    assert 'riddles/1-shot' in err and 'KeyError' not in err


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('{', 'cannot be read'),
        ('[]', 'is not a results file of format 1'),
        ('{"format_version": 0}', 'is not a results file of format 1'),
        ('{"format_version": 1}', 'training: is empty; it cannot be used'),
    ],
)
def test_an_invalid_record_is_named(gauntlet, make_run, tmp_path: Path, content: str, message: str):
    run = make_run()
    (run / 'results.json').write_text(content)
    status, _, err = gauntlet('run', '--from', run, '--out', tmp_path / 'again')
    assert status == 2 and err.startswith(f'error: {run}/results.json: {message}')


def test_a_task_of_an_unknown_type_is_named(gauntlet, make_run, tmp_path: Path):
    run = edit(
        make_run(), lambda record: record['tasks']['lines/1-shot']['spec'].update(icl_task_type='made_elsewhere')
    )
    status, _, err = gauntlet('run', '--from', run, '--out', tmp_path / 'again')
    assert status == 2 and f'{run}/results.json' in err and 'made_elsewhere' in err


def test_a_folder_without_a_run_is_named(gauntlet, tmp_path: Path):
    status, _, err = gauntlet('run', '--from', tmp_path / 'nowhere', '--out', tmp_path / 'again')
    assert status == 2 and err.startswith(f'error: {tmp_path}/nowhere/results.json: cannot be read')
    assert not (tmp_path / 'again').exists()


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (('--semantics', 'reference'), '--semantics: has no effect with --from'),
        (('--fewshot', 'fixed'), '--fewshot: has no effect with --from'),
        (('--limit', '3'), '--limit: has no effect with --from'),
        (('--resume',), '--resume: has no effect with --from'),
        (('--time-budget', '9s'), '--time-budget: has no effect with --from'),
    ],
)
def test_options_without_effect_are_errors(gauntlet, make_run, tmp_path: Path, words: tuple[str, ...], message: str):
    status, _, err = gauntlet('run', '--from', make_run(), '--out', tmp_path / 'again', *words)
    assert status == 2 and message in err


@pytest.mark.parametrize(
    'change', ['a line is missing', 'a line is doubled', 'a line stands twice in place of another']
)
def test_samples_of_another_record_are_an_error(gauntlet, make_run, tmp_path: Path, change: str):
    run = make_run()
    path = run / 'samples' / 'lines_1-shot.jsonl'
    first, second, *others = path.read_text().splitlines(keepends=True)
    changed = {
        'a line is missing': [second, *others],
        'a line is doubled': [first, first, second, *others],
        'a line stands twice in place of another': [first, first, *others],
    }
    path.write_text(''.join(changed[change]))
    status, _, err = gauntlet('run', '--from', run, '--out', tmp_path / 'again')
    assert status == 2 and err.startswith(f'error: {path}: has {len(changed[change])} lines of ')
