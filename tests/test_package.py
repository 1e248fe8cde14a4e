"""Public names, imports, the YAML files and data of the package, and what wheel and sdist contain and do elsewhere.

Mutations: leave templates, runners or sample data out of the package's data; let setuptools add tests to the sdist; let
the new environment read the .pth files of this one.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from command_line import loaded_by
from packaging.requirements import Requirement
from paths import HAS_COMPOSER, ROOT
from programs import can_run_all

import llmfoundry_gauntlet
from llmfoundry_gauntlet import EvaluationSettings, errors
from llmfoundry_gauntlet.config import score, settings, tasks
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.data.published import git_blob_id, read_manifest
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
        'bubblewrap',
        'nodejs',
        'ziglang',
        'pytest',
        'moto',
    )
    assert not [line for line in PROJECT['dependencies'] if line.startswith(heavy)]
    assert set(PROJECT['optional-dependencies']) == {
        'code',
        'composer',
        'cpp',
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
        'huggingface',
        'lm-eval',
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
    folder = tmp_path_factory.mktemp('wheel')
    unpacked = shutil.copytree(sdist, folder / 'unpacked')  # where the backend leaves files of its own
    return build(unpacked, 'wheel', folder)


def files_in(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel by name, except those that describe it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if '.dist-info/' not in name}


@pytest.mark.slow
def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: Path, source: Path):
    package = source / 'llmfoundry_gauntlet'
    own = {path.relative_to(source).as_posix() for path in package.rglob('*') if path.is_file()}
    linked = {
        f'llmfoundry_gauntlet/{path.relative_to(source).as_posix()}'
        for folder in ('eval_data', 'yamls')
        for path in (source / folder).rglob('*')
        if path.is_file()
    }

    assert 'llmfoundry_gauntlet/yamls/tasks/gauntlet_v0.1.yaml' in linked and 'llmfoundry_gauntlet/py.typed' in own
    assert files_in(wheel).keys() == own | linked


@pytest.mark.slow
def test_a_wheel_of_the_sdist_has_the_bytes_of_one_of_the_tree(wheel: Path, source: Path, tmp_path: Path):
    tree = shutil.copytree(source, tmp_path / 'tree', symlinks=True)

    assert files_in(build(tree, 'wheel', tmp_path)) == files_in(wheel)


@pytest.mark.slow
def test_the_sdist_has_the_license_and_no_tests(sdist: Path):
    names = {path.name for path in sdist.iterdir()}

    assert names == {
        *('CHANGELOG.md', 'CITATION.cff', 'LICENSE', 'MANIFEST.in', 'README.md', 'SECURITY.md', 'pyproject.toml'),
        *('PKG-INFO', 'setup.cfg'),  # which setuptools makes
        *('llmfoundry_gauntlet', 'llmfoundry_gauntlet.egg-info'),
    }


@pytest.mark.slow
def test_the_wheel_has_none_of_the_published_data(wheel: Path):
    """Its rows were written for this project; those of others have their own licences."""
    manifest = read_manifest()
    hashes_of_others = {file.git_blob for file in manifest} | {file.sha256 for file in manifest}
    data = {name: content for name, content in files_in(wheel).items() if name.endswith('.jsonl')}

    assert len(data) == len(manifest)
    for name, content in data.items():
        assert hashes_of_others.isdisjoint({git_blob_id(content), hashlib.sha256(content).hexdigest()}), name
        assert content.count(b'\n') < 100, name


@pytest.mark.slow
def test_the_version_is_in_one_place_and_in_the_changelog(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith('.dist-info/METADATA'))
        lines = archive.read(metadata).decode().splitlines()
    assert f'Version: {VERSION}' in lines and 'License-Expression: Apache-2.0' in lines
    (first, *_) = re.findall(r'^## (\d.*)$', (ROOT / 'CHANGELOG.md').read_text('utf-8'), re.MULTILINE)
    version, _, date = first.partition(' — ')
    citation = (ROOT / 'CITATION.cff').read_text('utf-8')
    assert version == VERSION
    assert re.fullmatch(r'\d{4}-\d{2}-\d{2}', date)
    assert f'\nversion: {VERSION}\ndate-released: {date}\n' in citation
    spoken = [path.name for path in (ROOT / 'llmfoundry_gauntlet').glob('*.py') if VERSION in path.read_text()]
    assert spoken == ['stack.py']


@pytest.fixture(scope='module')
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a new virtual environment, which has the libraries of this one but not its package."""
    folder = tmp_path_factory.mktemp('environment')
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
    pip = [sys.executable, '-m', 'pip', '--quiet', '--disable-pip-version-check', '--python', folder / 'bin' / 'python']
    subprocess.run([*pip, 'install', '--no-deps', '--no-index', wheel], check=True, capture_output=True)

    # Python reads no .pth file of a folder that another one names: there this package is a link to the tree.
    (packages,) = folder.glob('lib/python*/site-packages')
    libraries = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}
    (packages / 'libraries.pth').write_text('\n'.join(libraries))
    return folder


@pytest.fixture
def in_empty_folder(environment: Path, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a program of the new environment in an empty folder and returns what it prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith('PYTHON')}

    def run(program: str, *words: str | Path) -> str:
        command = [environment / 'bin' / program, *words]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


WHERE = """
import sys
from importlib.metadata import distribution
import llmfoundry_gauntlet
print(llmfoundry_gauntlet.__file__)
print(distribution('llmfoundry-gauntlet').locate_file(''))
print(*sys.path, *sys.modules, sep='\\n')
"""


@pytest.mark.slow
def test_an_installed_wheel_works_in_any_folder(in_empty_folder: Callable[..., str], environment: Path):
    module, distribution, *loaded = in_empty_folder('python', '-c', WHERE).splitlines()
    assert Path(module).is_relative_to(environment) and Path(distribution).is_relative_to(environment)
    # Nothing leads to the tree: no path, and no finder of an editable installation.
    assert str(ROOT) not in loaded and not [name for name in loaded if name.startswith('__editable__')]

    assert in_empty_folder('gauntlet', '--version').strip() == VERSION
    assert '57 tasks' in in_empty_folder('gauntlet', 'ls') and 'sample' in in_empty_folder('gauntlet', 'ls', 'copa')
    assert 'rows of 57 tasks' in in_empty_folder('gauntlet', 'validate', '--tasks', 'yamls/tasks/gauntlet_v0.1.yaml')
    assert '72 files' in in_empty_folder('gauntlet', 'data', 'ls')
    assert 'resume=true' in in_empty_folder('gauntlet', 'eval', '--help')


@pytest.mark.slow
def test_an_installed_wheel_evaluates_a_model(in_empty_folder: Callable[..., str], tiny_llamas: Path, tmp_path: Path):
    """All 57 tasks, so that every file of the wheel is read; and a report, whose templates are files too."""
    in_empty_folder(
        'gauntlet', 'run', '--model', tiny_llamas / 'plain', '--limit', '1', '--device', 'cpu', '--out', 'run'
    )
    in_empty_folder('gauntlet', 'report', 'run', '--out', 'report.html')

    tasks = json.loads((tmp_path / 'run' / 'results.json').read_text())['tasks']
    assert len(tasks) == 57
    for name, task in tasks.items():
        is_program = name.startswith('human_eval')
        assert task['num_items'] == 1 or (is_program and not can_run_all() and task['reason']), name
    assert {path.name for path in tmp_path.iterdir()} == {'run', 'report.html'}
