"""docs/compatibility.md names every private name of other libraries in the source, and only what exists.

Mutations: remove a row; rename a function that it names, or a test; use a private name that it lacks, as an attribute,
in an import, or as a string; change a pin.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from paths import ROOT

PAGE = ROOT / 'docs' / 'compatibility.md'
PACKAGE = ROOT / 'llmfoundry_gauntlet'
SOURCES = sorted([*PACKAGE.rglob('*.py'), *(ROOT / 'scripts').rglob('*.py')])
PINS, OF_TESTS = 'Pins', 'Private names in tests'
DOCUMENTED = {'_exit', '_getframe', '_current_frames'}  # of os and sys: Python documents them
PRIVATE = re.compile(r'_[A-Za-z]\w*')
DOTTED = re.compile(r'[A-Za-z_][\w.]*')
PLACE = re.compile(r'([\w/]+\.py)(?::(\w+))?')
TEST = re.compile(r'([\w/]+\.py)::(\w+)')


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: its section, and the texts of its cells."""

    section: str
    cells: tuple[str, ...]

    def code(self, column: int) -> list[str]:
        """Return the inline code of a cell."""
        return re.findall(r'`([^`]+)`', self.cells[column])

    def __str__(self) -> str:
        return f'{self.section}: {self.cells[0][:60]}'


def read_rows() -> Iterator[Row]:
    """Yield the rows of all tables of the page, without their heads."""
    section = ''
    for line in PAGE.read_text('utf-8').splitlines():
        if line.startswith('## '):
            section = line.removeprefix('## ')
        elif line.startswith('| ') and not line.startswith(('| name |', '| bound |')):
            yield Row(section=section, cells=tuple(cell.strip() for cell in line.strip('|').split(' | ')))


ROWS = list(read_rows())
NAMES = [row for row in ROWS if row.section != PINS]
each_name = pytest.mark.parametrize('row', NAMES, ids=str)
each_pin = pytest.mark.parametrize('row', [row for row in ROWS if row.section == PINS], ids=str)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text('utf-8'))


def definition_in(path: Path, name: str) -> ast.stmt | None:
    """Return the function, class or constant of a module that has this name."""
    for statement in tree_of(path).body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and statement.name == name:
            return statement
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if name in {target.id for target in targets if isinstance(target, ast.Name)}:
                return statement
    return None


def strings_of_docs(tree: ast.AST) -> set[int]:
    """Return the ids of the nodes that are docstrings."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, 'body', None), list)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def texts_in(tree: ast.AST) -> set[str]:
    """Return all names and strings in a part of a module, without its comments and docstrings."""
    texts: set[str] = set()
    docs = strings_of_docs(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            texts.add(node.id)
        elif isinstance(node, ast.Attribute):
            texts.add(node.attr)
        elif isinstance(node, ast.arg):
            texts.add(node.arg)
        elif isinstance(node, ast.keyword):
            texts |= {str(node.arg), ast.unparse(node)}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            texts.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            texts |= imported_by(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            texts.add(node.value)
    return texts


def imported_by(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the components of the names in an import."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names.append(node.module or '')
    return {part for name in names for part in name.split('.')}


def is_in(name: str, texts: set[str]) -> bool:
    """Return whether a name of the page is in the code: by its last component, or as a part of a string."""
    if DOTTED.fullmatch(name):
        return name.rpartition('.')[2] in texts or name in texts
    return any(name in text for text in texts)


def own_names(tree: ast.AST) -> set[str]:
    """Return the names that a module defines: functions, classes, variables, parameters and attributes of `self`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ('self', 'cls')


def foreign_names(tree: ast.AST, inherited: set[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name in a module that it does not define.

    They are attributes, parts of imports, and strings such as those of `getattr` or of a table of patched methods;
    not the fixed parts of f-strings. `inherited` are the names that `self` may have from classes of other modules.
    """
    own = own_names(tree) | DOCUMENTED
    f_strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts_of_f_strings = {id(part) for f_string in f_strings for part in f_string.values}
    for node in ast.walk(tree):
        names: Iterable[str] = ()
        if isinstance(node, ast.Attribute):
            is_inherited = node.attr in inherited and is_self(node.value)
            names = [] if is_inherited else [node.attr]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = imported_by(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts_of_f_strings:
            names = node.value.split('.') if DOTTED.fullmatch(node.value) else []
        for name in names:
            if PRIVATE.fullmatch(name) and name not in own:
                yield node.lineno, name


def module_of(path: Path) -> str:
    """Return a module as the page names it."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def listed_names() -> set[tuple[str, str]]:
    """Return each module that the page names with each component of a name that the module uses."""
    listed = set()
    for row in NAMES:
        components = {component for name in row.code(0) for component in name.split('.')}
        for place in row.code(1):
            module, _, _ = place.partition(':')
            listed |= {(module, component) for component in components}
    return listed


def test_every_private_name_of_another_library_is_on_the_page():
    """With each module that uses it."""
    listed = listed_names()
    inherited = {name for path in PACKAGE.rglob('*.py') for name in own_names(tree_of(path))}

    missing = []
    for path in SOURCES:
        for line, name in foreign_names(tree_of(path), inherited):
            if (module_of(path), name) not in listed:
                missing.append(f'{path.relative_to(ROOT)}:{line}: {name}')

    assert missing == []


@pytest.mark.parametrize(
    'code',
    [
        'model._new',
        'getattr(model, "_new", None)',
        'setattr(model, "_new", 1)',
        'TABLE = {"Family": ("_new", None)}',
        'from torch.nn import _new',
        'import torch._new.nn',
        'from torch._new import nn',
        'self._new()',
    ],
)
def test_a_new_private_name_is_found_in_any_form(code: str):
    assert [name for _, name in foreign_names(ast.parse(code))] == ['_new']


@pytest.mark.parametrize(
    'code',
    [
        'self._own = 1; other._own',
        'def _own(): ...\n_own()',
        'f"a_{name}_b"',
        'a.__b__',
    ],
)
def test_names_of_a_module_itself_are_not_foreign(code: str):
    assert list(foreign_names(ast.parse(code))) == []


@each_name
def test_what_a_row_names_is_where_it_says(row: Row):
    """Each name is in a place of the row, and each place has a name of the row."""
    folder = PACKAGE if row.section != OF_TESTS else ROOT
    names = row.code(0)
    texts_by_place = {}
    for place in row.code(1):
        match = PLACE.fullmatch(place)
        assert match is not None, place
        path = (ROOT if place.startswith('scripts/') else folder) / match[1]
        assert path.is_file(), place
        part = definition_in(path, match[2]) if match[2] else tree_of(path)
        assert part is not None, place
        texts_by_place[place] = texts_in(part)

    assert names
    assert texts_by_place
    for name in names:
        assert any(is_in(name, texts) for texts in texts_by_place.values()), name
    for place, texts in texts_by_place.items():
        assert any(is_in(name, texts) for name in names), place


@pytest.mark.parametrize('row', [row for row in NAMES if row.section != OF_TESTS], ids=str)
def test_the_tests_of_a_row_exist(row: Row):
    """A use without a test says so."""
    assert len(row.cells) == 5
    matches = [TEST.fullmatch(text) for text in row.code(3)]
    tests = [match for match in matches if match is not None]

    assert tests or row.cells[3].startswith('none')
    for match in tests:
        path = ROOT / 'tests' / match[1]
        assert path.is_file(), match[0]
        assert definition_in(path, match[2]) is not None, match[0]


@each_pin
def test_pins_are_as_the_page_says(row: Row):
    (file,) = row.code(1)
    words_of_file = re.findall(r'[^\s"\']+', (ROOT / file).read_text('utf-8'))
    bounds = [bound for bound in row.code(0) if re.search('[<>=]', bound)]

    assert bounds
    assert [bound for bound in bounds if bound not in words_of_file] == []


def is_bound_below_a_major_version(requirement: Requirement) -> bool:
    return any(bound.operator == '<' and '.' in bound.version for bound in requirement.specifier)


def test_every_upper_bound_below_a_major_version_is_on_the_page():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']
    lines = list(project['dependencies'])
    for lines_of_extra in project['optional-dependencies'].values():
        lines += lines_of_extra
    requirements = [Requirement(line) for line in lines]
    listed = {Requirement(bound).name for row in ROWS if row.section == PINS for bound in row.code(0)}

    bound = [requirement for requirement in requirements if is_bound_below_a_major_version(requirement)]

    assert len(bound) > 6
    assert [str(requirement) for requirement in bound if requirement.name not in listed] == []
