"""YAML files: values, interpolations and overrides, and errors that name the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.errors import ConfigError


def read_text(tmp_path: Path, text: str, *overrides: str) -> dict[str, Any]:
    path = tmp_path / 'file.yaml'
    path.write_text(text)
    return read_yaml(path, overrides)


TEXT = """
number: 1e-3
text: 2020-01-01
copy: ${part.a}
part: &part {a: 1}
parts: [{<<: *part, b: 2}]
"""
VALUES = {'number': 0.001, 'text': '2020-01-01', 'copy': 1, 'part': {'a': 1}, 'parts': [{'a': 1, 'b': 2}]}


@pytest.mark.parametrize(
    ('text', 'overrides', 'values'),
    [
        # Numbers with an exponent, dates as text, interpolations and anchors.
        (TEXT, [], VALUES),
        # An override also changes what refers to its key, but not what an anchor has copied.
        (TEXT, ['part.a=5'], {**VALUES, 'copy': 5, 'part': {'a': 5}}),
        # Files without a key.
        ('', [], {}),
        ('# nothing\n', [], {}),
        ('', ['a.b=1e-2'], {'a': {'b': 0.01}}),
    ],
)
def test_numbers_dates_interpolations_and_overrides_are_read(
    tmp_path: Path, text: str, overrides: list[str], values: dict[str, Any]
):
    assert read_text(tmp_path, text, *overrides) == values


INVALID = 'is not valid YAML'


@pytest.mark.parametrize(
    ('text', 'problem'),
    [
        # Not YAML, or YAML of a kind that is not read.
        ('a: 1\nb: 2\na: 3\n', f'{INVALID}: while constructing a mapping in line 1, column 1 found duplicate'),
        ('a: &x [*x]\n', f'{INVALID}: YAML recursive aliases are not supported. in line 1, column 4'),
        ('a: [1\n', f'{INVALID}: while parsing a flow sequence in line 1, column 4 did not find expected'),
        ('a: !!python/object/apply:os.getcwd []\n', f'{INVALID}: could not determine a constructor for the'),
        ('? [1]\n: 2\n', f'{INVALID}: while constructing a mapping in line 1, column 1 found unhashable key'),
        # Not a mapping.
        ('- 1\n', 'is a list at its top; allowed: a mapping'),
        ('7\n', 'is a single value at its top; allowed: a mapping'),
        # Interpolations.
        ('a: ${b}\n', "an interpolation cannot be resolved: Interpolation key 'b' not found"),
        ('a: ${b\n', "no viable alternative at input '${b'"),
    ],
)
def test_an_unreadable_file_is_an_error_that_names_the_place(tmp_path: Path, text: str, problem: str):
    with pytest.raises(ConfigError) as raised:
        read_text(tmp_path, text)

    (message,) = raised.value.problems
    assert message.startswith(f'{tmp_path / "file.yaml"}: {problem}')


def test_an_unreadable_override_is_an_error_that_quotes_it(tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        read_text(tmp_path, 'a: 1\n', 'a=[1')

    (message,) = raised.value.problems
    assert message.startswith(f'{tmp_path / "file.yaml"}: a=[1: ')


@pytest.mark.parametrize(
    'value',
    [
        '!!python/object/apply:os.mkdir [PATH]',
        '!!python/object/new:os.mkdir [PATH]',
        "!!python/name:os.mkdir ''",
        "!!python/module:os ''",
    ],
)
def test_a_tag_calls_and_imports_nothing_of_python(tmp_path: Path, value: str):
    made = tmp_path / 'made'
    text = value.replace('PATH', repr(str(made)))

    for file, overrides in ((f'a: {text}\n', []), (f'a: [{{b: {text}}}]\n', []), ('a: 1\n', [f'a={text}'])):
        with pytest.raises(ConfigError, match='could not determine a constructor for the tag'):
            read_text(tmp_path, file, *overrides)

    assert not made.exists()
