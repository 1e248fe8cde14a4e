"""docs/security.md names a test for each promise, and the package runs code nowhere but where a reason is given.

Mutations: rename a test that the page names; read a file with pickle, eval, or torch.load without weights_only; trust a
model's code without being asked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT

from llmfoundry_gauntlet.runtime.checkpoints import OF_METADATA

PAGE = ROOT / 'docs' / 'security.md'
PACKAGE = ROOT / 'llmfoundry_gauntlet'
TEST = re.compile(r'`([\w/]+\.py)::(\w+)`')


def promises() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each promise of the page's tables with its tests: file below tests/ and function."""
    lines = PAGE.read_text('utf-8').splitlines()
    starts = [number + 2 for number, line in enumerate(lines) if line == '| promise | tests |']
    rows = []
    for start in starts:
        for line in lines[start:]:
            if not line.startswith('| '):
                break
            promise, _, tests = line.strip('| ').partition(' | ')
            rows.append((promise, TEST.findall(tests)))
    return rows


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text('utf-8'))


def test_each_promise_of_the_page_names_tests_that_exist():
    rows = promises()

    assert len(rows) > 20
    assert [promise for promise, tests in rows if not tests] == []
    named = {test for _, tests in rows for test in tests}
    for file, function in sorted(named):
        tree = tree_of(ROOT / 'tests' / file)
        functions = {statement.name for statement in tree.body if isinstance(statement, ast.FunctionDef)}
        assert function in functions, f'{file}::{function}'
    assert set(TEST.findall(PAGE.read_text('utf-8'))) == named  # none stands where it would not be looked for


def test_every_attack_on_the_sandbox_is_named_on_the_page():
    file = 'scoring/code/test_attacks.py'
    tree = tree_of(ROOT / 'tests' / file)
    attacks = {name for name in (getattr(statement, 'name', '') for statement in tree.body) if name.startswith('test_')}

    assert attacks == {function for named, function in TEST.findall(PAGE.read_text('utf-8')) if named == file}


def test_the_page_names_the_classes_that_metadata_may_have():
    """Those of torch; the rest are plain containers, paths and types of numbers."""
    text = PAGE.read_text('utf-8')

    of_torch = [name for module, names in OF_METADATA.items() if 'distributed' in module for name in names]
    assert [name for name in of_torch if f'`{name}`' not in text] == []


# Calls that run code or start a program: built-in functions, the last names of others, and `load` of some modules.
BUILT_IN = {'eval', 'exec', 'compile', '__import__'}
RUNNING = {
    'import_module',
    'run_module',
    'run_path',
    'system',
    'popen',
    'Popen',
    'Unpickler',
    'unsafe_load',
    'full_load',
    'read_pickle',
}
LOADERS = {'pickle', 'marshal', 'shelve', 'dill', 'joblib', 'cloudpickle', 'torch', 'np', 'numpy', 'yaml', 'point'}
# Where the package does so, and what: nothing of a file that somebody else wrote.
REASONS = {
    # Modules of this package, and of packages that are installed: the first loads task types by their entry points.
    ('config/resources.py', 'point.load'): 'the entry points of installed packages',
    ('__init__.py', 'import_module'): 'names of this package',
    ('data/hub.py', 'import_module'): 'httpx, as huggingface_hub has it',
    ('evaluation/run.py', 'import_module'): 'our engine',
    ('results/report/sections.py', 'importlib.import_module'): 'altair',
    ('results/runs.py', 'importlib.import_module'): 'pandas',
    ('tasks/lm_eval_source.py', 'import_module'): 'lm-eval, torch and our own runtime',
    ('runtime/loggers.py', 'importlib.import_module'): 'the client of a logger, from a table',
    # Programs of ours.
    ('results/files.py', 'subprocess.run'): 'git',
    ('scoring/mathematics.py', 'subprocess.Popen'): 'the worker for expressions',
    (
        'scoring/code/compilers.py',
        'subprocess.run',
    ): 'the version of the compiler, and the library of ziglang',
    ('scoring/code/sandbox.py', 'subprocess.Popen'): 'the sandbox',
    # Files of others.
    ('runtime/checkpoints.py', 'torch.load'): 'with weights_only',
    ('runtime/checkpoints.py', 'pickle.Unpickler'): 'which refuses all classes but those of metadata',
    ('tasks/prepare.py', 'np.load'): 'which unpickles nothing unless it is told to',
    # Programs of models, in the sandbox.
    ('scoring/code/runners/python_runner.py', 'compile'): 'in the sandbox',
    ('scoring/code/runners/python_runner.py', 'exec'): 'in the sandbox',
    ('scoring/code/runners/python_runner.py', 'eval'): 'in the sandbox',
    ('scoring/code/runners/python_runner.py', 'importlib.import_module'): 'in the sandbox',
}


def runs_something(name: str) -> bool:
    module, _, function = name.rpartition('.')
    if not module and function in BUILT_IN:
        return True
    if function in ('load', 'loads'):
        return module in LOADERS
    return function in RUNNING or (module == 'subprocess' and function not in ('TimeoutExpired', 'CalledProcessError'))


def places_that_run_something() -> Iterator[tuple[str, str]]:
    """Yield module and dotted name of each call that can run code, and of each class made from one that can."""
    for path in sorted(PACKAGE.rglob('*.py')):
        for node in ast.walk(tree_of(path)):
            called = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
            for name in map(ast.unparse, called):
                if runs_something(name):
                    yield path.relative_to(PACKAGE).as_posix(), name


def test_the_package_runs_code_only_where_a_reason_is_given():
    assert set(places_that_run_something()) == REASONS.keys()


@pytest.mark.parametrize(
    'argument',
    [
        'weights_only=False',
        'trust_remote_code=True',
        'allow_pickle=True',
        'shell=True',
    ],
)
def test_no_call_in_the_package_has_an_argument_that_trusts_a_file(argument: str):
    name, _, value = argument.partition('=')
    for path in sorted(PACKAGE.rglob('*.py')):
        for node in ast.walk(tree_of(path)):
            keywords = node.keywords if isinstance(node, ast.Call) else []
            trusting = [keyword for keyword in keywords if keyword.arg == name and ast.unparse(keyword.value) == value]
            assert trusting == [], f'{path}:{node.lineno}'
    # A call of torch.load without the argument would leave the choice to the version of torch.
    source = (PACKAGE / 'runtime' / 'checkpoints.py').read_text('utf-8')
    assert source.count('torch.load(') == source.count("map_location='cpu', weights_only=True")
