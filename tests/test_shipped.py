"""The YAML files and sample data of the package are found from any working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmfoundry_gauntlet.config.resources import PACKAGE, shipped


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_missing_from_the_working_directory_are_the_packages(elsewhere: Path):
    name = 'yamls/tasks/gauntlet_v0.1.yaml'
    assert shipped(name) == PACKAGE / name and shipped(name).is_file()
    (elsewhere / 'yamls' / 'tasks').mkdir(parents=True)
    assert shipped(name) == PACKAGE / name
    (elsewhere / name).write_text('mine')
    assert shipped(name) == Path(name)


@pytest.mark.parametrize('name', ['yamls/none.yaml', 'other/yamls/tasks', 'eval_data_of_mine', '', '/yamls', '.'])
def test_other_paths_are_unchanged(elsewhere: Path, name: str):
    assert shipped(name) == Path(name)


def test_the_commands_of_the_readme_work_in_any_folder(elsewhere: Path, gauntlet):
    tasks = ('--tasks', 'yamls/tasks/gauntlet_v0.1.yaml', '--gauntlet', 'yamls/gauntlets/eval_gauntlet_v0.1.yaml')
    status, out, err = gauntlet('validate', *tasks, '--score', 'yamls/score/mmlu_pro.yaml')
    assert status == 0, err
    assert 'rows of 58 tasks' in out
    status, out, err = gauntlet('export', *tasks[:2], '--limit', 2, '--out', 'requests.jsonl')
    assert status == 0, err
    assert (elsewhere / 'requests.jsonl').is_file()


def test_a_missing_data_root_is_not_replaced(elsewhere: Path, gauntlet):
    status, _, err = gauntlet('validate', '--tasks', 'yamls/tasks/gauntlet_v0.1.yaml', '--data-root', 'data')
    assert status == 1
    assert 'below data:' in err and 'eval_data' not in err
