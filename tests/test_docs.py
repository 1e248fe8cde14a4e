"""The code, commands, names and links in the documentation work, and its site loads nothing from elsewhere.

A block that cannot be run has `<!-- not run: reason -->` on the line before it: its commands are checked and its Python
is compiled all the same. `title="name"` in the first line of a block writes it to that file.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from command_line import commands_of, run_cli
from markdown_it import MarkdownIt
from omegaconf import OmegaConf
from paths import ROOT
from recorded_runs import copy_run

import llmfoundry_gauntlet
from llmfoundry_gauntlet.cli import app
from llmfoundry_gauntlet.config.gate import GatePolicy
from llmfoundry_gauntlet.config.settings import EvaluationSettings, decode_settings
from llmfoundry_gauntlet.config.tasks import SETTINGS, TaskSpec
from llmfoundry_gauntlet.config.yaml import decode
from llmfoundry_gauntlet.errors import Problems
from llmfoundry_gauntlet.evaluation.suite import load_suite

sys.path.insert(0, str(ROOT / 'scripts'))

import train

PACKAGE = ROOT / 'llmfoundry_gauntlet'
PAGES = sorted((ROOT / 'docs').glob('*.md'))
TEXTS = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *PAGES]
TROUBLE, ARCHITECTURE = ROOT / 'docs' / 'troubleshooting.md', ROOT / 'docs' / 'architecture.md'
OTHERS = [ROOT / 'CHANGELOG.md', ROOT / 'SECURITY.md']  # whose links alone are checked
COMMANDS: Any = typer.main.get_command(app)
LANGUAGES = {'', 'bash', 'json', 'python', 'text', 'toml', 'yaml'}
LAUNCHERS = {'composer', 'torchrun'}
SYSTEM = {
    '.',
    *LAUNCHERS,
    'export',
    'git',
    'pre-commit',
    'python3',
    'python3.11',
    'twine',
    'ulimit',
    'uv',
}  # whose arguments are not checked
MODULES = {'build'}  # that `python -m` runs, beside our own
UNKNOWN = '...'  # any text in a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; `line` is the line of its text in the page, from 1."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    is_run: bool

    @property
    def place(self) -> str:
        return f'{self.page.name}:{self.line}'


@cache
def tokens_of(page: Path) -> list[Any]:
    return MarkdownIt().enable('table').parse(page.read_text('utf-8'))


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    blocks = []
    for before, token in pairwise([None, *tokens_of(page)]):
        if token.type == 'fence':
            language, _, rest = token.info.strip().partition(' ')
            title = re.search('title="(.+?)"', rest)
            is_marked = before is not None and re.fullmatch('<!-- not run: (.+?) -->', before.content.strip())
            keys = {'page': page, 'line': token.map[0] + 2, 'language': language, 'text': token.content}
            blocks.append(Block(**keys, title=title and title[1], is_run=not is_marked))
    return blocks


def inline_code(page: Path) -> list[str]:
    """Return the inline code of a page, with single spaces."""
    parts = [part for token in tokens_of(page) for part in token.children or ()]
    return [' '.join(part.content.split()) for part in parts if part.type == 'code_inline']


BLOCKS = [block for page in TEXTS for block in blocks_of(page)]
each_page = pytest.mark.parametrize('page', TEXTS, ids=lambda page: page.name)


def each_block(*languages: str) -> Any:
    blocks = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize('block', blocks, ids=lambda block: block.place)


def test_all_blocks_are_in_a_checked_language():
    assert {block.place: block.language for block in BLOCKS if block.language not in LANGUAGES} == {}
    assert len(BLOCKS) > 40


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the subcommand of `gauntlet` that the words name, and the words after its name."""
    command, rest = COMMANDS, list(words)
    while hasattr(command, 'commands') and rest and not rest[0].startswith('-'):
        assert rest[0] in command.commands, f'there is no command {rest[0]!r}'
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def check_command(words: list[str]) -> None:
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    program, rest = words[0].removeprefix('.venv/bin/'), words[1:]
    files = [word for word in words if word.startswith(('scripts/', 'yamls/', 'requirements/'))]
    assert [name for name in files if not (ROOT / name).is_file()] == []
    if program in LAUNCHERS and '-m' in rest:
        program, rest = 'gauntlet', rest[rest.index(PACKAGE.name) + 1 :]
    if program == 'gauntlet':
        command, rest = command_of(rest)
        if rest or command is not COMMANDS:  # which prints an introduction
            command.make_context(command.name, list(rest))
    elif program == 'make':
        targets = re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE)
        assert {word for word in rest if '=' not in word} <= set(targets)
    elif program == 'python' and rest[0] == '-m':
        assert rest[1] in MODULES, rest[1]
    elif program == 'python':
        script = (ROOT / rest[0]).read_text()
        assert [word for word in rest[1:] if word.startswith('--') and f"'{word}'" not in script] == []
    elif program == 'pip':
        for extras in re.findall(r'llmfoundry-gauntlet\[([\w,-]+)\]', ' '.join(rest)):
            assert set(extras.split(',')) <= set(project['optional-dependencies'])
    else:
        assert program in SYSTEM, program


@each_block('bash')
def test_commands_and_their_options_exist(block: Block):
    assert commands_of(block.text)
    for words in commands_of(block.text):
        check_command(words)


@each_page
def test_inline_commands_have_the_options_they_name(page: Path):
    for text in inline_code(page):
        match = re.fullmatch(r'(?:\.venv/bin/)?gauntlet ([a-z-].*)', text)
        if match is None or '{' in text:
            continue
        # Brackets around what may be left out, and dots for what follows, are no words of a command.
        words = re.sub(r'[\[\]]|\.\.\.', ' ', match[1]).split()
        command, rest = command_of(words)
        options = {name for parameter in (*command.params, *COMMANDS.params) for name in parameter.opts}
        assert {word for word in rest if word.startswith('--')} <= options | {'--help'}, text


def check_yaml(block: Block) -> None:
    """Decode a YAML block by its top keys."""
    values: Any = OmegaConf.to_container(OmegaConf.create(block.text))
    if block.title == 'gate.yaml':
        problems = Problems(block.place)
        assert decode(GatePolicy, values, '', problems), problems.messages
        return
    if 'output_type' in values:  # a task in lm-eval's format
        from lm_eval.config.task import TaskConfig

        assert TaskConfig(**values).task
        return
    assert set(values) <= {'icl_tasks', 'eval_gauntlet', 'score', 'callbacks', 'loggers'}
    if 'icl_tasks' in values:
        assert load_suite(values['icl_tasks']).tasks
    if 'eval_gauntlet' in values:
        assert load_suite(None, values['eval_gauntlet']).gauntlet
    if 'score' in values:
        assert len(load_suite(None, None, values['score']).tasks) == len(values['score'])
    for name, entry in values.get('callbacks', {}).items():
        settings = decode_settings(entry)
        if name == 'eval_gauntlet':
            load_suite(settings.tasks, settings.gauntlet, settings.score)
    for name, entry in values.get('loggers', {}).items():
        arguments = inspect.signature(train.SECTIONS['loggers'][name]).parameters
        assert train.unknown_keys(f'{name}: ', entry, arguments) == []


@each_block('json', 'python', 'yaml')
def test_blocks_parse(block: Block, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    if block.language == 'yaml':
        check_yaml(block)
    elif block.language == 'python':
        compile(block.text, block.place, 'exec')
    else:
        rows = block.text.splitlines() if block.title else [block.text]
        assert all(isinstance(json.loads(row), dict) for row in rows)


@pytest.fixture(scope='module')
def recorded(tiny_llamas: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate a tiny model."""
    from llmfoundry_gauntlet import evaluate

    out = tmp_path_factory.mktemp('recorded') / 'run'
    task = {'label': 'copa', 'dataset_uri': 'commonsense_reasoning/copa.jsonl', 'num_fewshot': [0]}
    tasks = [{**task, 'icl_task_type': 'multiple_choice'}]
    evaluate(tiny_llamas / 'plain', tasks=tasks, data_root=ROOT / 'eval_data', out=out)
    return out


@pytest.fixture
def place(tiny_llamas: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a working directory with what pages assume: the project's files, a model, and runs."""
    for name in ('yamls', 'eval_data'):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / 'MODEL').symlink_to(tiny_llamas / 'plain')
    for name in ('baseline', 'candidate', 'a', 'b', 'c'):
        shutil.copytree(recorded, tmp_path / 'runs' / name)
    for batch in (0, 1050, 1400):
        copy_run(recorded, tmp_path / 'runs/demo/gauntlet' / f'ba{batch}', batch=batch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@each_page
def test_code_of_a_page_runs(page: Path, place: Path):
    names: dict[str, Any] = {'__name__': '__main__'}
    if page.name == 'README.md':  # which assumes a model
        import torch
        from composer.models import HuggingFaceModel

        from llmfoundry_gauntlet.runtime.models import open_model

        with open_model('MODEL') as source:
            names['model'] = HuggingFaceModel(source.load(torch.device('cpu')), source.tokenizer)
    for block in blocks_of(page):
        if block.title is not None:
            Path(block.title).write_text(block.text)
        if block.is_run and block.language == 'python':
            exec(compile('\n' * (block.line - 1) + block.text, page, 'exec'), names)  # lines as in the page
        for words in commands_of(block.text) if block.is_run and block.language == 'bash' else ():
            assert words[0] == 'gauntlet', f'{block.place}: {words[0]} is not run here; say so before the block'
            assert run_cli(*words[1:]) == 0, f'{block.place}: {" ".join(words)}'


@pytest.mark.slow
def test_the_loop_of_the_training_page_evaluates_on_two_ranks(place: Path):
    """With the items that one process has."""
    [block] = [block for block in blocks_of(ROOT / 'docs' / 'training.md') if block.title == 'loop.py']
    Path('loop.py').write_text(block.text)
    torchrun = [Path(sys.executable).parent / 'torchrun', '--standalone', '--nproc-per-node', '2']  # on a free port
    samples = []
    for launcher in ([sys.executable], torchrun):
        subprocess.run([*launcher, 'loop.py'], check=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
        folders = [Path('runs/mine/gauntlet', name) for name in ('ba2', 'ba4')]
        samples.append([(folder / 'samples/copa_0-shot.jsonl').read_text() for folder in folders])
        shutil.rmtree('runs/mine')
    of_one_process, of_two_ranks = samples
    assert of_two_ranks == of_one_process
    assert of_one_process[0] != of_one_process[1]  # the model was trained between them


SESSIONS = [
    (block.place, *session.split('\n', 1))
    for block in blocks_of(TROUBLE)
    for session in re.split(r'^\$ ', block.text, flags=re.MULTILINE)[1:]
]


@pytest.mark.slow
@pytest.mark.parametrize(('block', 'command', 'lines'), SESSIONS)
def test_commands_print_what_troubleshooting_shows(
    block: str, command: str, lines: str, place: Path, gauntlet: Callable[..., Any], caplog: pytest.LogCaptureFixture
):
    for block_of_page in blocks_of(TROUBLE):
        if block_of_page.title is not None:
            Path(block_of_page.title).write_text(block_of_page.text)
    [words] = commands_of(command)

    status, out, err = gauntlet(*words[1:])

    assert status in (1, 2) or 'error: ' not in lines
    for line in lines.splitlines():
        pattern = '.*'.join(re.escape(part.strip()) for part in line.split(UNKNOWN))
        assert re.search(pattern, out + err + caplog.text), err


def texts_of(path: Path) -> list[str]:
    """Return every string of a module, with UNKNOWN for what is formatted into it."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else UNKNOWN for part in node.values]
            texts.append(''.join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.sub(r'%[sdg]|%\.\d[a-z]|{}', UNKNOWN, node.value))
    return texts


def test_messages_in_troubleshooting_exist_in_the_package():
    texts_of_first_column = re.findall(r'^\| `(.+?)` \|', TROUBLE.read_text('utf-8'), re.MULTILINE)
    messages = [text for text in texts_of_first_column if UNKNOWN in text or ' ' in text]
    texts_of_package = '\n'.join(text for path in PACKAGE.rglob('*.py') for text in texts_of(path))

    for message in messages:
        # The parts between the formatted values; shorter parts would be found anywhere.
        long_parts = [part.strip() for part in message.split(UNKNOWN) if len(part.strip()) > 7]
        assert long_parts, message
        assert [part for part in long_parts if part not in texts_of_package] == []


def path_of_an_item() -> str:
    return ARCHITECTURE.read_text('utf-8').partition('## The path of an item')[2]


def test_names_on_the_path_of_an_item_and_of_the_page_on_speed_exist():
    speed = (ROOT / 'docs' / 'speed.md').read_text('utf-8')
    names = set(re.findall(r'`([a-z_]+(?:\.\w+)+)`', path_of_an_item() + speed))

    for name in names - {'results.json'}:
        pkgutil.resolve_name(f'{PACKAGE.name}.{name}')


def test_the_path_of_an_item_has_every_package():
    rows = [line for line in path_of_an_item().splitlines() if line.startswith('| `')]
    packages_named = set(re.findall(r'`([a-z_]+)`', ''.join(rows)))

    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix == '.py' or (path / '__init__.py').is_file()}
    assert packages_named == packages - {'__init__', '__main__'}


def test_files_on_the_architecture_page_exist():
    lines = ARCHITECTURE.read_text('utf-8').splitlines()
    rows = [line for line in lines if re.match(r'\| (a|an|models|clusters) .*`|\|.*`tests/', line)]
    files = re.findall(r'`((?:[\w.]+/)+[\w.]*|\w+\.py)`', ''.join(rows))

    assert len(rows) > 20
    assert len(files) > 40
    assert [name for name in files if not (ROOT / name).exists() and not (PACKAGE / name).exists()] == []


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of all headings: small letters, hyphens for spaces, no other signs."""
    headings = re.findall(r'^#+ (.+)$', page.read_text('utf-8'), re.MULTILINE)
    without_signs = [re.sub(r'[^\w\s-]', '', heading).strip().lower() for heading in headings]
    return {re.sub(r'\s+', '-', heading) for heading in without_signs}


@pytest.mark.parametrize('page', [*TEXTS, *OTHERS], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path):
    for target, head in re.findall(r'\]\(([^)#\s]+)(?:#([\w-]+))?\)', page.read_text('utf-8')):
        if not target.startswith(('http://', 'https://')):
            assert (page.parent / target).exists(), target
            assert not head or head in anchors_of(page.parent / target), f'{target}#{head}'


@pytest.fixture(scope='module')
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built from a copy of the documentation."""
    # The site is written beside its configuration, so that is copied; the sources are only read.
    folder = tmp_path_factory.mktemp('site')
    shutil.copytree(ROOT / 'docs', folder / 'docs')
    shutil.copy(ROOT / 'mkdocs.yml', folder)
    (folder / 'llmfoundry_gauntlet').symlink_to(PACKAGE)
    command = [sys.executable, '-m', 'zensical', 'build', '--strict']
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / 'site'


@pytest.fixture(scope='module')
def site(site_folder: Path) -> dict[str, str]:
    """Return every page of the site by its name."""
    return {path.stem: path.read_text('utf-8') for path in site_folder.glob('*.html')}


def test_every_page_is_in_the_site(site: dict[str, str]):
    assert site.keys() == {page.stem for page in PAGES} | {'404'}


def test_the_site_loads_nothing_from_elsewhere(site: dict[str, str]):
    from_elsewhere = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="?(?:https?:)?//[^>]*>')

    assert all('assets/javascripts' in page for page in site.values())
    assert {name: from_elsewhere.findall(page) for name, page in site.items() if from_elsewhere.search(page)} == {}


@pytest.mark.slow
def test_the_search_works_from_disk(site_folder: Path, browser: Any):
    page = browser.new_page()
    page.goto((site_folder / 'index.html').as_uri())

    page.keyboard.press('Control+k')
    page.keyboard.type('time budget')

    page.get_by_text(re.compile(r'^[1-9]\d* results$')).wait_for()


def test_every_public_name_is_on_the_api_page(site: dict[str, str]):
    headings = set(re.findall(r'<h3[^>]*id="([\w.]+)"', site['api']))

    for name in llmfoundry_gauntlet.__all__:
        public = getattr(llmfoundry_gauntlet, name)
        assert f'{public.__module__}.{public.__qualname__}' in headings, name


def test_the_training_page_shows_every_setting_with_its_default():
    minimal, full = [block for block in blocks_of(ROOT / 'docs' / 'training.md') if block.language == 'yaml']
    assert len(minimal.text.splitlines()) == 4
    shown = yaml.safe_load(full.text)['callbacks']['eval_gauntlet']

    defaults = {field.name: field.default for field in dataclasses.fields(EvaluationSettings)}
    assert list(shown) == list(defaults)
    for name in defaults.keys() - {'tasks', 'gauntlet'}:
        default = defaults[name]
        assert shown[name] == (list(default) if isinstance(default, tuple) else default), name


def names_of_commands(command: Any, name: str) -> list[str]:
    """Return the full name of each command below this one."""
    commands = getattr(command, 'commands', {})
    if not commands:
        return [name]
    names = []
    for word, inner in commands.items():
        names += names_of_commands(inner, f'{name} {word}')
    return names


def test_getting_started_has_every_command():
    code_on_page = inline_code(ROOT / 'docs' / 'index.md')
    names = names_of_commands(COMMANDS, 'gauntlet')

    assert len(names) > 10
    assert [name for name in names if not any(code.startswith(name) for code in code_on_page)] == []


def words_in_code_of(page: str) -> set[str]:
    return set(re.findall(r'\w+', ' '.join(inline_code(ROOT / 'docs' / page))))


def test_the_page_on_tasks_has_every_key():
    elsewhere = {*SETTINGS, 'label', 'dataset_uri', 'num_fewshot', 'metric_names', 'generation_kwargs'}
    keys = {field.name for field in dataclasses.fields(TaskSpec)}
    assert keys - elsewhere <= words_in_code_of('tasks.md')


def test_the_training_page_has_every_key_of_the_training_script():
    assert {*train.OWN_KEYS, *train.SECTIONS, *train.REQUIRED} <= words_in_code_of('training.md')
