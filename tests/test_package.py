"""Public names, imports, the YAML files and data of the package, and what wheel and sdist contain."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from command_line import loaded_by
from packaging.requirements import Requirement
from paths import HAS_COMPOSER, ROOT

import llmfoundry_gauntlet
from llmfoundry_gauntlet import EvaluationSettings, errors
from llmfoundry_gauntlet.config import score, settings, tasks
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.stack import VERSION

TASKS, GAUNTLET = ROOT / 'yamls/tasks/gauntlet_v0.1.yaml', ROOT / 'yamls/gauntlets/eval_gauntlet_v0.1.yaml'
SOURCES = {'tasks': 'icl_tasks', 'gauntlet': 'eval_gauntlet', 'score': 'score'}
HEAVY = ('torch', 'composer', 'transformers', 'datasets', 'pandas', 'altair')
SLOW_TO_LOAD = (*HEAVY, 'pyarrow', 'sympy', 'requests', 'fsspec')
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
BADGES = ROOT / 'docs' / 'images'
BUILD = 'import sys, setuptools.build_meta as m; print(getattr(m, sys.argv[1])(sys.argv[2]))'


def test_all_is_sorted_and_every_name_exists():
    names = llmfoundry_gauntlet.__all__
    assert names == sorted(names)
    assert set(names) == set(llmfoundry_gauntlet._HOMES)
    for name in names:
        if HAS_COMPOSER or llmfoundry_gauntlet._HOMES[name] != 'composer':
            assert getattr(llmfoundry_gauntlet, name).__name__ == name
    with pytest.raises(AttributeError, match='nothing'):
        _ = llmfoundry_gauntlet.nothing


def test_importing_and_commands_without_a_model_load_no_heavy_libraries():
    modules = ('cli', 'evaluation.run', 'results.runs', 'results.report.printing')
    code = f'import sys, {", ".join(f"llmfoundry_gauntlet.{name}" for name in modules)}\n'
    code += 'from llmfoundry_gauntlet import Evaluation, Run, read_run, samples_frame, scores_frame\n'
    code += f'print([name for name in {HEAVY} if name in sys.modules])'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'
    assert loaded_by('ls', names=(*SLOW_TO_LOAD, 'numpy')) == []
    assert loaded_by('validate', '--tasks', TASKS, '--no-data', names=(*SLOW_TO_LOAD, 'numpy')) == []
    assert loaded_by('explain', 'copa', names=SLOW_TO_LOAD) == []
    for words in (('ls',), ('fetch', '--help')):
        assert loaded_by('data', *words, names=(*SLOW_TO_LOAD, 'pooch')) == []


def test_imports_respect_the_layers():
    tool = Path(sys.executable).parent / 'lint-imports'
    done = subprocess.run([tool, '--no-cache'], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    'path', sorted((ROOT / 'yamls').rglob('*.yaml')), ids=lambda path: f'{path.parent.name}-{path.stem}'
)
def test_every_yaml_of_the_package_is_valid(path: Path, monkeypatch):
    """Files that it names are checked too, relative to the repository."""
    monkeypatch.chdir(ROOT)
    values = read_yaml(path)
    if path.parent.name == 'train':
        values = values['callbacks']['eval_gauntlet']
    if path.parent.name in ('train', 'eval'):
        known = {item.name for item in fields(EvaluationSettings)}
        found = decode_settings({key: value for key, value in values.items() if key in known})
        assert load_suite(found.tasks, found.gauntlet, found.score).warnings == ()
        return
    sources = {key: path if name in values else None for key, name in SOURCES.items()}
    suite = load_suite(**sources, is_partial='icl_tasks' not in values)
    assert suite.tasks or suite.gauntlet


def test_settings_are_frozen_and_keyword_only():
    for module in (score, settings, tasks):
        for name, value in vars(module).items():
            if is_dataclass(value) and value.__module__ == module.__name__:
                assert value.__dataclass_params__.frozen and all(item.kw_only for item in fields(value)), name
                assert '__slots__' in vars(value), name


def test_every_error_is_public():
    ours = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert ours and ours <= set(llmfoundry_gauntlet.__all__)


def test_the_gauntlet_has_the_specified_tasks():
    suite = load_suite(TASKS, GAUNTLET)
    assert (len(suite.tasks), suite.warnings) == (57, ())
    assert len([task for task in suite.tasks if task.label.startswith('human_eval')]) == 8
    assert {category.name: len(category.benchmarks) for category in suite.gauntlet.categories} == {
        'world_knowledge': 7,
        'commonsense_reasoning': 8,
        'language_understanding': 7,
        'symbolic_problem_solving': 15,
        'reading_comprehension': 8,
        'safety': 4,
        'programming': 8,
    }
    averages = {name: len(members) for name, members in suite.gauntlet.averages.items()}
    assert averages == {'core_average': 5, 'gauntlet_average': 7}


def test_shots_and_baselines_differ_from_upstream_only_where_specified(upstream_yamls: Path):
    ours = load_suite(TASKS, GAUNTLET)
    theirs = load_suite(upstream_yamls / 'tasks_v0.1.yaml', upstream_yamls / 'eval_gauntlet_v0.1.yaml')
    shots = {task.label: task.num_fewshot for task in ours.tasks}
    different = {task.label for task in theirs.tasks if shots[task.label] != task.num_fewshot}
    assert different == {'enterprise_pii_classification', 'winogender_mc_male', 'winogender_mc_female'}
    assert len(shots) - len(theirs.tasks) == 8  # the code tasks, which upstream keeps elsewhere

    def baselines(suite):
        return {b.name: b.random_baseline for category in suite.gauntlet.categories for b in category.benchmarks}

    assert baselines(ours).items() >= baselines(theirs).items()


def test_optional_dependencies_are_extras():
    heavy = (
        'mosaicml',
        'wandb',
        'mlflow',
        'tensorboard',
        'peft',
        'boto3',
        's3fs',
        'altair',
        'vl-convert',
        'pytest',
        'moto',
    )
    assert not [line for line in PROJECT['dependencies'] if line.startswith(heavy)]
    assert set(PROJECT['optional-dependencies']) == {
        'composer',
        'wandb',
        'mlflow',
        'tensorboard',
        'peft',
        's3',
        'gcs',
        'azure',
        'report',
        'llm-foundry',
        'dev',
        'test',
        'gguf',
        'device-map',
    }


@pytest.mark.parametrize('extra', ['dev', 'llm-foundry'])
def test_extras_with_mlflow_exclude_sqlalchemy_that_it_cannot_use(extra: str):
    """MLflow below 3, which Composer 0.32 needs, fails with SQLAlchemy 2.1."""
    wanted = {one.name: one for one in map(Requirement, PROJECT['optional-dependencies'][extra])}

    assert '2.0.58' in wanted['sqlalchemy'].specifier and '2.1.0' not in wanted['sqlalchemy'].specifier


def test_badges_say_what_the_project_declares():
    """They are files of ours: a picture from elsewhere would tell others who reads README."""
    texts = {path.stem: re.findall('<text .*>(.+)</text>', path.read_text()) for path in BADGES.glob('*.svg')}
    pythons = [line.rpartition(' ')[2] for line in PROJECT['classifiers'] if 'Python :: 3.' in line]
    jobs = yaml.safe_load((ROOT / '.github' / 'workflows' / 'ci.yml').read_text())['jobs']
    stacks = [row['stack'] for row in jobs['fast']['strategy']['matrix']['include']]

    assert texts == {
        'ci': ['CI', ' | '.join(stacks)],
        'python': ['Python', ' | '.join(pythons)],
        'licence': ['licence', PROJECT['license']],
    }
    assert all(f'](docs/images/{name}.svg)' in (ROOT / 'README.md').read_text('utf-8') for name in texts)


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
    return folder / f'llmfoundry_gauntlet-{VERSION}'


@pytest.fixture(scope='module')
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from the sdist, as pip does."""
    return build(sdist, 'wheel', tmp_path_factory.mktemp('wheel'))


@pytest.mark.slow
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
    assert 'llmfoundry_gauntlet/yamls/tasks/gauntlet_v0.1.yaml' in linked and 'llmfoundry_gauntlet/py.typed' in own
    assert names == own | linked
    for name in ('LICENSE', 'CHANGELOG.md', 'README.md', 'pyproject.toml'):
        assert (sdist / name).is_file(), name


@pytest.mark.slow
def test_the_version_is_in_one_place_and_in_the_changelog(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith('.dist-info/METADATA'))
        lines = archive.read(metadata).decode().splitlines()
    assert f'Version: {VERSION}' in lines and 'License-Expression: Apache-2.0' in lines
    assert f'## {VERSION}\n' in (ROOT / 'CHANGELOG.md').read_text()
    assert f'\nversion: {VERSION}\n' in (ROOT / 'CITATION.cff').read_text()
    spoken = [path.name for path in (ROOT / 'llmfoundry_gauntlet').glob('*.py') if VERSION in path.read_text()]
    assert spoken == ['stack.py']


@pytest.mark.slow
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
    assert 'resume=true' in run('eval', '--help')
    assert (target / 'bin' / 'gauntlet').is_file()
