"""The versions that the package supports, those that its tests run with, and what is said about others."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from paths import HAS_COMPOSER, ROOT

from llmfoundry_gauntlet import stack
from llmfoundry_gauntlet.stack import UnsupportedVersionError, check_stack

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']
LOCKS = {
    'composer': ('requirements/composer.txt', ('dev', 'cpp'), '3.11'),
    'newest': ('requirements/newest.txt', ('test', 'cpp'), '3.13'),
}


def requirements_of(extra: str | None) -> list[Requirement]:
    """Return the requirements of an extra, with those of the extras that it names; None: of the package itself."""
    texts = PROJECT['dependencies'] if extra is None else PROJECT['optional-dependencies'][extra]
    found = []
    for requirement in map(Requirement, texts):
        if requirement.name == PROJECT['name']:
            for inner in sorted(requirement.extras):
                found += requirements_of(inner)
        else:
            found.append(requirement)
    return found


def pins_of(lock: Path) -> dict[str, Version]:
    lines = [line for line in lock.read_text('utf-8').splitlines() if line and not line.startswith('#')]
    pins = dict(line.split('==') for line in lines)
    return {name: Version(version) for name, version in pins.items()}


@pytest.mark.parametrize('name', LOCKS)
def test_every_requirement_is_pinned_within_its_bounds(name: str):
    file, extras, _ = LOCKS[name]
    pins = pins_of(ROOT / file)

    for requirement in (one for extra in (None, *extras) for one in requirements_of(extra)):
        pin = pins.get(re.sub('[_.]', '-', requirement.name.lower()))
        assert pin is not None, f'{requirement.name} has no pin in {file}'
        assert requirement.specifier.contains(pin), f'{requirement}: pinned to {pin} in {file}'


def test_the_newest_stack_has_no_composer():
    assert 'mosaicml' not in pins_of(ROOT / 'requirements/newest.txt')


@pytest.mark.parametrize('name', LOCKS)
def test_the_first_line_of_a_lock_is_the_command_that_makes_it(name: str):
    file, extras, python = LOCKS[name]
    first_line = (ROOT / file).read_text('utf-8').splitlines()[0]

    options = ' '.join(f'--extra {extra}' for extra in extras)
    assert f'uv pip compile -p {python} --no-header --no-annotate {options} pyproject.toml' in first_line


def test_supported_versions_are_those_of_the_requirements():
    required = {requirement.name: requirement.specifier for requirement in requirements_of(None)}

    assert {name: SpecifierSet(bounds) for name, bounds in stack.SUPPORTED.items()} == {
        name: required[name] for name in stack.SUPPORTED
    }


def test_composer_with_newer_libraries_gets_those_that_are_supported():
    """The overrides are of Composer's own bounds; torchvision follows torch."""
    lines = (ROOT / 'requirements/overrides.txt').read_text('utf-8').splitlines()
    overrides = {line.name: line.specifier for line in map(Requirement, lines[1:])}
    assert overrides.pop('torchvision') == SpecifierSet()

    supported = {name: SpecifierSet(bounds) for name, bounds in stack.SUPPORTED.items()}

    assert overrides == {name: supported[name] for name in ('torch', 'transformers', 'numpy')}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that puts the metadata of another version of torch before that of the installed one."""

    def set_torch(version: str) -> None:
        folder = tmp_path / f'torch-{version}.dist-info'
        folder.mkdir()
        (folder / 'METADATA').write_text(f'Metadata-Version: 2.4\nName: torch\nVersion: {version}\n')
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv('PYTHONPATH', str(tmp_path))
        check_stack.cache_clear()

    yield set_torch
    check_stack.cache_clear()


@pytest.mark.parametrize('version', ['2.6.0', '2.7.0+cu126', '2.15.0+cu132'])
def test_supported_versions_pass_without_a_word(installed, version: str):
    installed(version)

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        check_stack()


def test_an_older_version_is_an_error_that_says_which_and_what_is_supported(installed):
    installed('2.5.1')

    with pytest.raises(
        UnsupportedVersionError, match=r'^torch 2\.5\.1 is installed; supported: torch>=2\.6,<2\.16; pip'
    ):
        check_stack()


def test_a_newer_version_is_a_warning(installed):
    installed('2.16.0')

    with pytest.warns(UserWarning, match=r'torch 2\.16\.0 is installed; supported: torch>=2\.6,<2\.16'):
        check_stack()


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)


def test_a_command_with_an_older_version_ends_with_one_line(installed):
    installed('2.5.1')

    done = python('-m', 'llmfoundry_gauntlet', 'run', '--model', 'any', '--out', 'any')

    assert done.returncode == 2
    assert done.stdout == ''
    (line,) = done.stderr.splitlines()
    assert line.startswith('error: torch 2.5.1 is installed; supported: torch>=2.6,<2.16')


def test_a_command_with_a_newer_version_runs_after_one_warning(installed):
    installed('2.16.0')

    done = python('-m', 'llmfoundry_gauntlet', 'ls')

    assert done.returncode == 0
    assert '57 tasks' in done.stdout
    assert done.stderr.count('UserWarning: torch 2.16.0 is installed; supported: torch>=2.6,<2.16') == 1


IMPORTS = {
    'a public name': 'from llmfoundry_gauntlet import evaluate',
    'the plug-in': 'import llmfoundry_gauntlet.composer.foundry_plugin',
}


@pytest.mark.parametrize('kind', IMPORTS)
def test_an_import_with_an_older_version_says_so_before_torch_is_loaded(installed, kind: str):
    if kind == 'the plug-in' and not HAS_COMPOSER:
        pytest.skip('mosaicml is not installed')
    installed('2.5.1')
    program = (
        f'try:\n    {IMPORTS[kind]}\n'
        'except ImportError as error:\n    print(error)\n'
        'import sys\n'
        'print("torch" in sys.modules)\n'
    )

    done = python('-c', program)

    message, is_loaded = done.stdout.splitlines()
    assert message.startswith('torch 2.5.1 is installed; supported: torch>=2.6,<2.16')
    assert is_loaded == 'False'
