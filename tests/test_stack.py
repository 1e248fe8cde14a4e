"""The versions that the package supports, those that its tests run with, and what is said about others."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from paths import ROOT

from llmfoundry_gauntlet import stack
from llmfoundry_gauntlet.stack import UnsupportedVersionError, check_stack

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']
LOCKS = {
    'composer': ('requirements/composer.txt', 'dev', '3.11'),
    'newest': ('requirements/newest.txt', 'test', '3.13'),
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
    file, extra, _ = LOCKS[name]
    pins = pins_of(ROOT / file)

    for requirement in [*requirements_of(None), *requirements_of(extra)]:
        pin = pins.get(re.sub('[_.]', '-', requirement.name.lower()))
        assert pin is not None, f'{requirement.name} has no pin in {file}'
        assert requirement.specifier.contains(pin), f'{requirement}: pinned to {pin} in {file}'


def test_the_newest_stack_has_no_composer():
    assert 'mosaicml' not in pins_of(ROOT / 'requirements/newest.txt')


@pytest.mark.parametrize('name', LOCKS)
def test_the_first_line_of_a_lock_is_the_command_that_makes_it(name: str):
    file, extra, python = LOCKS[name]
    first_line = (ROOT / file).read_text('utf-8').splitlines()[0]

    assert f'uv pip compile -p {python} --no-header --no-annotate --extra {extra} pyproject.toml' in first_line


def test_supported_versions_are_those_of_the_requirements():
    required = {requirement.name: requirement.specifier for requirement in requirements_of(None)}

    assert {name: SpecifierSet(bounds) for name, bounds in stack.SUPPORTED.items()} == {
        name: required[name] for name in stack.SUPPORTED
    }


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Return a function that lets a version of torch seem to be installed."""

    def set_torch(version: str) -> None:
        versions = {'torch': version}
        monkeypatch.setattr(stack, 'version', lambda name: versions.get(name, stack.SUPPORTED[name][2:].split(',')[0]))
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
