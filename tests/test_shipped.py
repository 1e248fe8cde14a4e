"""The YAML files and rows of the package are there for whoever works in a folder of his own."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmfoundry_gauntlet.config.resources import PACKAGE, shipped


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_in_no_folder_of_ones_own_is_the_packages(elsewhere: Path):
    name = 'yamls/tasks/gauntlet_v0.1.yaml'
    assert shipped(name) == PACKAGE / name and shipped(name).is_file()
    (elsewhere / 'yamls' / 'tasks').mkdir(parents=True)
    assert shipped(name) == PACKAGE / name
    (elsewhere / name).write_text('mine')
    assert shipped(name) == Path(name)


@pytest.mark.parametrize('name', ['yamls/none.yaml', 'other/yamls/tasks', 'eval_data_of_mine', '', '/yamls', '.'])
def test_other_paths_stay_what_they_are(elsewhere: Path, name: str):
    assert shipped(name) == Path(name)


def test_the_commands_of_the_readme_work_in_any_folder(elsewhere: Path, gauntlet):
    tasks = ('--tasks', 'yamls/tasks/gauntlet_v0.1.yaml', '--gauntlet', 'yamls/gauntlets/eval_gauntlet_v0.1.yaml')
    status, out, err = gauntlet('validate', *tasks, '--score', 'yamls/score/mmlu_pro.yaml')
    assert status == 0, err
    assert 'rows of 58 tasks' in out
    status, out, err = gauntlet('export', *tasks[:2], '--limit', 2, '--out', 'requests.jsonl')
    assert status == 0, err
    assert (elsewhere / 'requests.jsonl').is_file()


def test_a_data_root_that_is_not_there_is_no_other(elsewhere: Path, gauntlet):
    status, _, err = gauntlet('validate', '--tasks', 'yamls/tasks/gauntlet_v0.1.yaml', '--data-root', 'data')
    assert status == 1
    assert 'there is no such data file (looked for data/' in err
