"""The contents of wheel and sdist; a wheel alone suffices for the commands that need no model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from paths import ROOT

BUILD = 'import sys, setuptools.build_meta as m; print(getattr(m, sys.argv[1])(sys.argv[2]))'
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that git tracks."""
    if not (ROOT / '.git').exists() or shutil.which('git') is None:
        pytest.skip('not a git clone: the files of the project are unknown')
    folder = tmp_path_factory.mktemp('source')
    tracked = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, check=True).stdout
    for name in tracked.decode().rstrip('\0').split('\0'):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build(source: Path, kind: str, target: Path) -> Path:
    """Build a wheel or an sdist with the backend that pyproject.toml names."""
    command = [sys.executable, '-c', BUILD, f'build_{kind}', str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope='module')
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and unpack an sdist."""
    folder = tmp_path_factory.mktemp('sdist')
    with tarfile.open(build(source, 'sdist', folder)) as archive:
        archive.extractall(folder, filter='data')
    return folder / f'llmfoundry_gauntlet-{PROJECT["version"]}'


@pytest.fixture(scope='module')
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from the sdist, as pip does."""
    return build(sdist, 'wheel', tmp_path_factory.mktemp('wheel'))


def test_the_wheel_has_the_whole_package_and_the_sdist_the_license(wheel: Path, sdist: Path, source: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if '.dist-info/' not in name}
    package = source / 'llmfoundry_gauntlet'
    own = {path.relative_to(source).as_posix() for path in package.rglob('*') if path.is_file()}
    linked = {
        f'llmfoundry_gauntlet/{path.relative_to(source).as_posix()}'
        for folder in ('eval_data', 'yamls')
        for path in (source / folder).rglob('*')
        if path.is_file()
    }
    assert {'llmfoundry_gauntlet/eval_data/manifest.tsv', 'llmfoundry_gauntlet/yamls/tasks/gauntlet_v0.1.yaml'} < linked
    assert names == own | linked
    for name in ('LICENSE', 'CHANGELOG.md', 'README.md', 'pyproject.toml'):
        assert (sdist / name).is_file(), name


def test_the_version_is_in_one_place_and_in_the_changelog(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith('.dist-info/METADATA'))
        lines = archive.read(metadata).decode().splitlines()
    assert f'Version: {PROJECT["version"]}' in lines and 'License-Expression: Apache-2.0' in lines
    assert f'## {PROJECT["version"]}\n' in (ROOT / 'CHANGELOG.md').read_text()
    spoken = [path for path in (ROOT / 'llmfoundry_gauntlet').glob('*.py') if PROJECT['version'] in path.read_text()]
    assert spoken == []


def test_optional_dependencies_are_extras():
    heavy = ('wandb', 'mlflow', 'tensorboard', 'peft', 'boto3', 's3fs', 'altair', 'vl-convert', 'pytest', 'moto')
    assert not [line for line in PROJECT['dependencies'] if line.startswith(heavy)]
    assert set(PROJECT['optional-dependencies']) == {
        *('wandb', 'mlflow', 'tensorboard', 'peft', 's3', 'gcs', 'azure', 'report', 'llm-foundry', 'dev')
    }


@pytest.mark.parametrize('extra', ['mlflow', 'llm-foundry'])
def test_extras_with_mlflow_exclude_sqlalchemy_that_it_cannot_use(extra: str):
    """MLflow below 3, which Composer 0.32 needs, fails with SQLAlchemy 2.1."""
    wanted = {one.name: one for one in map(Requirement, PROJECT['optional-dependencies'][extra])}
    assert '2.0.58' in wanted['sqlalchemy'].specifier and '2.1.0' not in wanted['sqlalchemy'].specifier


def test_an_installed_wheel_works_in_any_folder(wheel: Path, tmp_path: Path):
    target, elsewhere = tmp_path / 'site', tmp_path / 'elsewhere'
    elsewhere.mkdir()
    install = ['pip', 'install', '--quiet', '--disable-pip-version-check', '--no-deps', '--no-index', '--target']
    subprocess.run([sys.executable, '-m', *install, target, wheel], check=True, capture_output=True)
    environment = {**os.environ, 'PYTHONPATH': str(target), 'PYTHONSAFEPATH': '1'}

    def run(*words: str) -> str:
        command = [sys.executable, '-m', 'llmfoundry_gauntlet', *words]
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [sys.executable, '-c', 'import llmfoundry_gauntlet; print(llmfoundry_gauntlet.__file__)']
    found = subprocess.run(where, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(target))
    assert '57 tasks' in run('ls') and 'sample' in run('ls', 'copa')
    assert 'rows of 57 tasks' in run('validate', '--tasks', 'yamls/tasks/gauntlet_v0.1.yaml')
    assert '72 files' in run('data', 'ls')
    assert 'eval_gauntlet' in run('train', '--help') and 'resume=true' in run('eval', '--help')
    assert (target / 'bin' / 'gauntlet').is_file()
