"""YAML files are read as OmegaConf reads them, which is asked only where something is to be filled in."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.errors import ConfigError

OURS = sorted((ROOT / 'yamls').rglob('*.yaml'))
UPSTREAM = sorted((SHARED_DATA / 'upstream_yamls').rglob('*.yaml'))

SCALARS = """
numbers: [1, -1, 1_000, 0x1F, 0o17, 017, 1e3, 1e-3, 2.5e4, -1.5E+2, 1.e2, 1.0, .5, .inf, -.inf]
texts: [1e, e3, 1-3, 2020-01-01, 2020-01-01 10:00:00, 1.2.3, '1e3', "yes", v1e3, 1e3x, 1_e]
words: [yes, no, on, off, true, False, null, ~, '', NULL]
times: [1:30, 12:30:45]
1: a number for a key
true: another
nothing:
block: |
  two
  lines
folded: >-
  one
  line
base: &base {a: 1, b: 2}
derived: {<<: *base, b: 3}
"""


def read_text(tmp_path: Path, text: str, *overrides: str) -> dict:
    path = tmp_path / 'file.yaml'
    path.write_text(text)
    return read_yaml(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_text(tmp_path, text, *overrides)
    (problem,) = caught.value.problems
    assert problem.startswith(f'{tmp_path / "file.yaml"}: ')
    return problem.removeprefix(f'{tmp_path / "file.yaml"}: ')


@pytest.mark.parametrize('path', OURS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_our_files_are_read_as_omegaconf_reads_them(path):
    assert repr(read_yaml(path)) == repr(OmegaConf.to_container(OmegaConf.load(path)))


@pytest.mark.skipif(not UPSTREAM, reason='needs ../shared/data, which is not here')
def test_upstreams_files_are_read_as_omegaconf_reads_them():
    assert len(UPSTREAM) > 5
    for path in UPSTREAM:
        content = OmegaConf.load(path)
        if '${' not in path.read_text():
            assert repr(read_yaml(path)) == repr(OmegaConf.to_container(content)), path


def test_each_kind_of_value_is_read_as_omegaconf_reads_it(tmp_path):
    content = read_text(tmp_path, SCALARS)
    assert repr(content) == repr(OmegaConf.to_container(OmegaConf.load(tmp_path / 'file.yaml')))
    assert content['numbers'][6:9] == [1000.0, 0.001, 25000.0] and content['texts'][3] == '2020-01-01'
    assert content['derived'] == {'a': 1, 'b': 3} and content['numbers'][-1] == -math.inf


def test_values_are_the_same_with_and_without_omegaconf(tmp_path):
    whole = read_text(tmp_path, SCALARS)
    assert repr(read_text(tmp_path, SCALARS + 'more: ${base.a}\n')) == repr({**whole, 'more': 1})
    assert repr(read_text(tmp_path, SCALARS, 'base.a=5')) == repr({**whole, 'base': {'a': 5, 'b': 2}})


def test_an_empty_file_is_an_empty_mapping(tmp_path):
    assert read_text(tmp_path, '') == read_text(tmp_path, '# nothing\n') == {}
    assert read_text(tmp_path, '', 'a.b=1e-2') == {'a': {'b': 0.01}}


@pytest.mark.parametrize(
    ('text', 'problem'),
    [
        ('a: 1\nb: 2\na: 3\n', 'is not valid YAML: duplicate key a in a mapping in line 3, column 1'),
        ('a: &x [*x]\n', 'is not valid YAML: found unconstructable recursive node in line 1, column 4'),
        ('a: [1\n', 'is not valid YAML: while parsing a flow sequence in line 1, column 4 did not find expected'),
        ('a: !!python/object/apply:os.getcwd []\n', 'is not valid YAML: could not determine a constructor for the tag'),
        ('? [1]\n: 2\n', 'is not valid YAML: while constructing a mapping in line 1, column 1 found unhashable key'),
        ('- 1\n', 'is a list at its top; allowed: a mapping'),
        ('a: ${b}\n', "an interpolation cannot be resolved: Interpolation key 'b' not found"),
        ('a: ${b\n', "no viable alternative at input '${b'"),
    ],
)
def test_unreadable_files_are_errors_that_name_the_place(tmp_path, text, problem):
    assert refusal(tmp_path, text).startswith(problem)


def test_an_invalid_override_is_named(tmp_path):
    assert refusal(tmp_path, 'a: 1\n', 'a=[1').startswith('a=[1: ')


def test_omegaconf_is_only_imported_for_interpolations_and_overrides(tmp_path):
    path = tmp_path / 'file.yaml'
    code = 'import sys; from llmfoundry_gauntlet.config.yaml import read_yaml; read_yaml(sys.argv[1]); '
    code += 'print("omegaconf" in sys.modules)'
    for text, is_loaded in (('a: 1\n', 'False\n'), ('a: 1\nb: ${a}\n', 'True\n')):
        path.write_text(text)
        done = subprocess.run([sys.executable, '-c', code, path], capture_output=True, text=True, check=True)
        assert done.stdout == is_loaded
