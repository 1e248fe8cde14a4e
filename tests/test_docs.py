"""Documentation names what there is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / 'docs' / 'architecture.md').read_text('utf-8')
NAMES = sorted(set(re.findall(r'`([a-z_]+(?:\.\w+)+)`', TEXT)) - {'results.json'})
ROOMS = sorted(set(re.findall(r'`([a-z]+)`', ''.join(line for line in TEXT.splitlines() if line.startswith('| `')))))
TESTS = sorted(set(re.findall(r'`(tests/[\w/]+\.py)`', TEXT)))
CHANGES = [
    line
    for line in (ROOT / 'docs' / 'extending.md').read_text('utf-8').splitlines()
    if re.match(r'\| (a|models) .*`', line)
]
FILES = re.compile(r'`((?:[\w.]+/)+[\w.]*|\w+\.py)`')


@pytest.mark.parametrize('name', NAMES)
def test_a_name_of_the_architecture_is_there(name: str):
    *module, last = name.split('.')
    package = importlib.import_module('.'.join(('llmfoundry_gauntlet', *module)))
    if not hasattr(package, last):
        importlib.import_module(f'llmfoundry_gauntlet.{name}')


def test_the_rooms_are_those_of_the_package():
    folder = ROOT / 'llmfoundry_gauntlet'
    there = {path.stem for path in folder.iterdir() if path.suffix == '.py' or (path / '__init__.py').is_file()}
    assert set(ROOMS) == there - {'__init__', '__main__'}


def test_the_tests_of_the_architecture_are_there():
    assert len(TESTS) > 10
    assert [name for name in TESTS if not (ROOT / name).is_file()] == []


def test_the_files_that_a_change_touches_are_there():
    assert len(CHANGES) >= 10
    for change in CHANGES:
        names = FILES.findall(change)
        assert names
        for name in names:
            assert (ROOT / name).exists() or (ROOT / 'llmfoundry_gauntlet' / name).exists(), name
