"""The code in the documentation works: commands parse and run, YAML decodes, Python runs."""

from __future__ import annotations

import ast
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import run_cli
from docs_blocks import TEXTS, Block, blocks_of, commands_of, inline_code, sessions_of
from omegaconf import OmegaConf
from paths import ROOT
from recorded_runs import copy_run

from llmfoundry_gauntlet.cli import app
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.suite import load_gauntlet, load_suite

BLOCKS = [block for page in TEXTS for block in blocks_of(page)]
TROUBLE = ROOT / 'docs' / 'troubleshooting.md'
UNKNOWN = '...'  # stands for any text in a message
LANGUAGES = {'', 'bash', 'json', 'python', 'text', 'toml', 'yaml'}
SYSTEM = {'.', 'export', 'git', 'python3.11', 'ulimit'}  # programs whose arguments are not checked
TARGETS = set(re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']


def named(blocks: list[Block]) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in blocks]


@cache
def command_tree() -> Any:
    return typer.main.get_command(app)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the subcommand that the words name, and the words after its name."""
    command, rest = command_tree(), list(words)
    while hasattr(command, 'commands') and rest and not rest[0].startswith('-'):
        assert rest[0] in command.commands, f'there is no command {rest[0]!r}'
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def check_gauntlet(words: list[str]) -> None:
    """Raise if `gauntlet` does not accept the words."""
    command, rest = command_of(words)
    if rest or not hasattr(command, 'commands'):  # `gauntlet` alone prints an introduction
        command.make_context(command.name, list(rest))


def check_command(words: list[str]) -> None:
    program, rest = words[0].removeprefix('.venv/bin/'), words[1:]
    if program == 'gauntlet':
        check_gauntlet(rest)
    elif program == 'composer':
        launched = rest[2:] if rest[0] == '-n' else rest
        if launched[0] == '-m':
            assert launched[1] == PROJECT['name'].replace('-', '_')
            check_gauntlet(launched[2:])
        else:
            files = [word for word in launched if word.startswith(('scripts/', 'yamls/'))]
            assert files[0] == launched[0]
            assert [name for name in files if not (ROOT / name).is_file()] == []
    elif program == 'make':
        assert {word for word in rest if '=' not in word} <= TARGETS
    elif program == 'python':
        assert (ROOT / rest[0]).is_file()
        text = (ROOT / rest[0]).read_text()
        assert [word for word in rest[1:] if word.startswith('--') and f"'{word}'" not in text] == []
    elif program == 'pip':
        for extras in re.findall(r'llmfoundry-gauntlet\[([\w,-]+)\]', ' '.join(rest)):
            assert set(extras.split(',')) <= set(PROJECT['optional-dependencies'])
        assert [
            rest[i + 1] for i, word in enumerate(rest) if word in ('-c', '-r') and not (ROOT / rest[i + 1]).is_file()
        ] == []
    elif program == 'pre-commit':
        assert (ROOT / '.pre-commit-config.yaml').is_file()
    else:
        assert program in SYSTEM, program


def check_yaml(block: Block) -> None:
    """Decode a YAML block by its top keys."""
    from llmfoundry_gauntlet.composer.loggers import LOGGERS, check

    values: Any = OmegaConf.to_container(OmegaConf.create(block.text))
    known = {'icl_tasks', 'eval_gauntlet', 'score', 'callbacks', 'loggers'}
    assert set(values) <= known, f'{block.place}: nothing here decodes {sorted(set(values) - known)}'
    if 'icl_tasks' in values:
        assert load_suite(values['icl_tasks']).tasks
    if 'eval_gauntlet' in values:
        assert load_gauntlet(values['eval_gauntlet']).categories
    if 'score' in values:
        assert len(load_suite(None, None, values['score']).tasks) == len(values['score'])
    for name, entry in values.get('callbacks', {}).items():
        settings = decode_settings(entry)
        if name == 'eval_gauntlet':
            load_suite(settings.tasks, settings.gauntlet, settings.score)
    for name, entry in values.get('loggers', {}).items():
        assert check('loggers', LOGGERS, name, entry) == []


@pytest.fixture(scope='session')
def recorded(tiny_llamas: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate a tiny model."""
    from llmfoundry_gauntlet import evaluate

    out = tmp_path_factory.mktemp('recorded') / 'run'
    task = {'label': 'copa', 'dataset_uri': 'commonsense_reasoning/copa.jsonl', 'num_fewshot': [0]}
    evaluate(
        tiny_llamas / 'plain',
        tasks=[{**task, 'icl_task_type': 'multiple_choice'}],
        data_root=ROOT / 'eval_data',
        out=out,
    )
    return out


@pytest.fixture
def place(tiny_llamas: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a working directory with what pages assume: the project's files, a model, and runs."""
    for name in ('yamls', 'eval_data'):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / 'MODEL').symlink_to(tiny_llamas / 'plain')
    for name in ('baseline', 'candidate', 'a', 'b', 'c'):
        shutil.copytree(recorded, tmp_path / 'runs' / name)
    for batch in (0, 1400):
        copy_run(recorded, tmp_path / 'runs/demo/gauntlet' / f'ba{batch}', batch=batch)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def names_of(page: Path) -> dict[str, Any]:
    """Return the names that the Python code of a page assumes."""
    names: dict[str, Any] = {'__name__': '__main__'}
    if page.name == 'README.md':
        import torch

        from llmfoundry_gauntlet.composer.models import composer_model, open_model

        with open_model('MODEL') as source:
            names['model'] = composer_model(source.load(torch.device('cpu')), source.tokenizer)
    return names


def run_block(block: Block, names: dict[str, Any]) -> None:
    if block.title is not None:
        Path(block.title).write_text(block.text)
    if block.reason is not None:
        return
    if block.language == 'python':
        exec(compile('\n' * (block.line - 1) + block.text, block.page, 'exec'), names)  # lines as in the page
    for words in block.commands if block.language == 'bash' else ():
        assert words[0] == 'gauntlet', f'{block.place}: {words[0]} is not run here; say so before the block'
        assert run_cli(*words[1:]) == 0, f'{block.place}: {" ".join(words)}'


def test_all_blocks_are_in_a_checked_language():
    assert {block.place: block.language for block in BLOCKS if block.language not in LANGUAGES} == {}
    assert len(BLOCKS) > 40


@pytest.mark.parametrize('block', named([block for block in BLOCKS if block.language == 'bash']))
def test_commands_and_their_options_exist(block: Block):
    assert block.commands
    for words in block.commands:
        check_command(words)


@pytest.mark.parametrize('page', [pytest.param(page, id=page.name) for page in TEXTS])
def test_inline_commands_have_the_options_they_name(page: Path):
    for text in inline_code(page):
        found = re.fullmatch(r'(?:\.venv/bin/)?gauntlet ([a-z-].*)', text)
        if found is None or '{' in text:
            continue
        words = re.sub(r'[\[\]]|\.\.\.', ' ', found[1]).split()
        command, rest = command_of(words)
        options = {name for parameter in (*command.params, *command_tree().params) for name in parameter.opts} | {
            '--help'
        }
        assert {word for word in rest if word.startswith('--')} <= options, f'{page.name}: {text}'


@pytest.mark.parametrize('block', named([block for block in BLOCKS if block.language in ('json', 'python', 'yaml')]))
def test_blocks_parse(block: Block, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    if block.language == 'yaml':
        check_yaml(block)
    elif block.language == 'python':
        compile(block.text, block.place, 'exec')
    else:
        rows = block.text.splitlines() if block.title else [block.text]
        assert all(isinstance(json.loads(row), dict) for row in rows)


@pytest.mark.parametrize('page', [pytest.param(page, id=page.name) for page in TEXTS])
def test_code_of_a_page_runs(page: Path, place: Path):
    names = names_of(page)
    for block in blocks_of(page):
        run_block(block, names)


def sessions() -> list[Any]:
    found = [(block.place, *session) for block in blocks_of(TROUBLE) for session in sessions_of(block)]
    return [
        pytest.param(command, lines, id=f'{place}-{number}') for number, (place, command, lines) in enumerate(found)
    ]


def parts_of(line: str) -> list[str]:
    return [part.strip() for part in line.split(UNKNOWN) if part.strip()]


@pytest.mark.parametrize(('command', 'lines'), sessions())
def test_commands_print_what_troubleshooting_shows(
    command: str, lines: list[str], place: Path, gauntlet: Callable[..., Any], caplog: pytest.LogCaptureFixture
):
    for block in blocks_of(TROUBLE):
        if block.title is not None:
            Path(block.title).write_text(block.text)
    [words] = commands_of(command)
    status, out, err = gauntlet(*words[1:])
    assert status in (1, 2) or not any(line.startswith('error: ') for line in lines)
    for line in lines:
        pattern = '.*'.join(re.escape(part.strip()) for part in line.split(UNKNOWN))
        assert re.search(pattern, out + err + caplog.text), err


def texts_of(path: Path) -> list[str]:
    """Return every string of a module, with UNKNOWN for what is formatted into it."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        if isinstance(node, ast.JoinedStr):
            texts.append(
                ''.join(str(part.value) if isinstance(part, ast.Constant) else UNKNOWN for part in node.values)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.sub(r'%[sdg]|%\.\d[a-z]|{}', UNKNOWN, node.value))
    return texts


def messages() -> list[str]:
    rows = re.findall(r'^\| `(.+?)` \|', TROUBLE.read_text('utf-8'), re.MULTILINE)
    return [row for row in rows if UNKNOWN in row or ' ' in row]


@pytest.fixture(scope='module')
def program() -> str:
    """Return all strings of the package."""
    return '\n'.join(text for path in (ROOT / 'llmfoundry_gauntlet').rglob('*.py') for text in texts_of(path))


@pytest.mark.parametrize('message', messages())
def test_messages_in_troubleshooting_exist_in_the_package(message: str, program: str):
    parts = [part for part in parts_of(message) if len(part) > 7]
    assert parts
    assert [part for part in parts if part not in program] == []
