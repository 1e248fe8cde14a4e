"""The documentation names existing code, links and options, and its site loads nothing from elsewhere."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from docs_blocks import PAGES, TEXTS, blocks_of, inline_code
from paths import ROOT

from llmfoundry_gauntlet.cli import app
from llmfoundry_gauntlet.config.settings import EvaluationSettings
from llmfoundry_gauntlet.config.tasks import SETTINGS, TaskSpec
from llmfoundry_gauntlet.config.training import TrainConfig

LINK = re.compile(r'\]\(([^)#\s]+)(?:#([\w-]+))?\)')
TEXT = (ROOT / 'docs' / 'extending.md').read_text('utf-8').partition('## The path of an item')[2]
NAMES = sorted(set(re.findall(r'`([a-z_]+(?:\.\w+)+)`', TEXT)) - {'results.json'})
PACKAGES = sorted(set(re.findall(r'`([a-z]+)`', ''.join(line for line in TEXT.splitlines() if line.startswith('| `')))))
TESTS = sorted(set(re.findall(r'`(tests/[\w/]+\.py)`', TEXT)))


@pytest.mark.parametrize('name', NAMES)
def test_names_in_the_architecture_exist(name: str):
    pkgutil.resolve_name(f'llmfoundry_gauntlet.{name}')


def test_the_architecture_lists_every_package():
    folder = ROOT / 'llmfoundry_gauntlet'
    there = {path.stem for path in folder.iterdir() if path.suffix == '.py' or (path / '__init__.py').is_file()}
    assert set(PACKAGES) == there - {'__init__', '__main__'}


def test_tests_in_the_architecture_exist():
    assert len(TESTS) > 10
    assert [name for name in TESTS if not (ROOT / name).is_file()] == []


def test_the_files_in_extending_exist():
    page = (ROOT / 'docs' / 'extending.md').read_text('utf-8')
    changes = [line for line in page.splitlines() if re.match(r'\| (a|an|models|clusters) .*`', line)]
    assert len(changes) >= 10
    for change in changes:
        names = re.findall(r'`((?:[\w.]+/)+[\w.]*|\w+\.py)`', change)
        assert names
        for name in names:
            assert (ROOT / name).exists() or (ROOT / 'llmfoundry_gauntlet' / name).exists(), name


def heads_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    heads = re.findall(r'^#+ (.+)$', page.read_text('utf-8'), re.MULTILINE)
    return {re.sub(r'\s+', '-', re.sub(r'[^\w\s-]', '', head).strip().lower()) for head in heads}


@pytest.mark.parametrize('page', [pytest.param(page, id=page.name) for page in TEXTS])
def test_links_lead_to_files_and_headings(page: Path):
    for target, head in LINK.findall(page.read_text('utf-8')):
        if target.startswith(('http://', 'https://')):
            continue
        assert (page.parent / target).exists(), target
        assert not head or head in heads_of(page.parent / target), f'{target}#{head}'


@pytest.fixture(scope='module')
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the documentation as `make docs` does."""
    folder = tmp_path_factory.mktemp('site')
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', '--site-dir', str(folder)]
    environment = {**os.environ, 'NO_MKDOCS_2_WARNING': '1'}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path):
    assert {path.stem for path in site.glob('*.html')} == {page.stem for page in PAGES} | {'404'}


def test_the_site_loads_nothing_from_elsewhere(site: Path):
    loads = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="?(?:https?:)?//[^>]*>')
    pages = {path.name: path.read_text('utf-8') for path in site.glob('*.html')}
    assert len(pages) > 10 and all('assets/javascripts' in page for page in pages.values())
    assert {name: loads.findall(page) for name, page in pages.items() if loads.search(page)} == {}


def test_the_training_page_shows_every_setting_with_its_default():
    [block] = [block for block in blocks_of(ROOT / 'docs' / 'training.md') if block.language == 'yaml']
    shown = yaml.safe_load(block.text)['callbacks']['eval_gauntlet']
    fields = {field.name: field.default for field in dataclasses.fields(EvaluationSettings)}
    assert list(shown) == list(fields)
    defaults = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    given = {'tasks', 'gauntlet'}
    assert {name: shown[name] for name in set(fields) - given} == {name: defaults[name] for name in set(fields) - given}


def test_getting_started_has_every_command():
    def names(command: Any, name: str) -> list[str]:
        inner = getattr(command, 'commands', {})
        return [one for word, part in inner.items() for one in names(part, f'{name} {word}')] if inner else [name]

    spoken = inline_code(ROOT / 'docs' / 'index.md')
    wanted = names(typer.main.get_command(app), 'gauntlet')
    assert len(wanted) > 10
    assert [name for name in wanted if not any(text.startswith(name) for text in spoken)] == []


@pytest.mark.parametrize(
    ('page', 'kind', 'elsewhere'),
    [
        ('tasks', TaskSpec, {*SETTINGS, 'label', 'dataset_uri', 'num_fewshot', 'metric_names', 'generation_kwargs'}),
        ('training', TrainConfig, set()),
    ],
)
def test_the_pages_on_tasks_and_training_have_every_key(page: str, kind: Any, elsewhere: set[str]):
    spoken = set(re.findall(r'\w+', ' '.join(inline_code(ROOT / 'docs' / f'{page}.md'))))
    assert {field.name for field in dataclasses.fields(kind)} - elsewhere <= spoken
