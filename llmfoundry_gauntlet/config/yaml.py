"""Read YAML files with OmegaConf, which is imported on use, and decode typed values."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode, SequenceNode

from llmfoundry_gauntlet.config.resources import path_problem, shipped
from llmfoundry_gauntlet.errors import (
    MOST_SHOWN,
    Caught,
    ConfigError,
    Problems,
    closest,
    describe,
    join,
    named,
    suggestion,
)

TYPE_NAMES = {str: 'text', int: 'a whole number', float: 'a number', bool: 'true or false', dict: 'a mapping'}
UPSTREAM_YAML_FOLDERS = ('eval/yamls/', 'scripts/eval/yamls/')
Lines = dict[str, tuple[int, str]]  # the line of each dotted path, and the label of the entry around it
KEY_OF_MESSAGE = re.compile(r'(\w+)[.:\[]')  # the key at the beginning of a message about a value
SUFFIXES = ('.yaml', '.yml')
YAML_LOADER = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)  # of libyaml, if PyYAML was built with it
INVALID = object()  # an element of a list or a mapping that is not valid
LABELS = ('label', 'name', 'dataset')  # keys that name an entry: a task, a benchmark or category, a SCORE dataset


class InvalidValuesError(ValueError):
    """Settings with invalid values; each of the `problems` begins with the key that it is about."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__('; '.join(self.problems))


def raise_invalid_values(problems: Iterable[str]) -> None:
    """Raise one InvalidValuesError with all problems, if there are any."""
    problems = list(problems)
    if problems:
        raise InvalidValuesError(problems)


class YamlProblems(Problems):
    """Collect the problems of a source that may be a YAML file, each with its dotted path and then also its line."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self._lines: dict[str, Lines] = {}  # by source, which changes where a file names another

    def line_of(self, path: str) -> str:
        """Return ':LINE (LABEL)' of a dotted path, or of its closest parent in the file; '' if there is none."""
        if not self.source.endswith(SUFFIXES):
            return ''
        if self.source not in self._lines:
            self._lines[self.source] = lines_of(self.source)
        lines = self._lines[self.source]
        ends_of_parents = [separator.start() for separator in re.finditer(r'[.[]', path)]
        candidates = [path, *(path[:end] for end in reversed(ends_of_parents))]
        closest_known = next((candidate for candidate in candidates if candidate in lines), None)
        if closest_known is None:
            return ''
        line, label = lines[closest_known]
        return f':{line} ({label})' if label else f':{line}'


def decode(cls: type, value: Any, path: str, problems: Problems) -> Any:
    """Return an instance of the dataclass `cls` from a mapping, or None and all problems if anything in it is invalid.

    Unknown keys are problems, unless `cls.ignore_unknown_keys` is true; those in `cls.without_effect` are ignored.
    """
    num_problems = len(problems.messages)
    decoded = decode_partly(cls, value, path, problems)
    return decoded if len(problems.messages) == num_problems else None


def decode_partly(cls: type, value: Any, path: str, problems: Problems) -> Any:
    """Return an instance of the dataclass `cls` from a mapping, with defaults in place of invalid values.

    None if an invalid or missing value has no default. For checks that should run although problems have been found;
    `decode` returns valid instances only.
    """
    if not isinstance(value, Mapping):
        problems.add(path, f'is {describe(value)}; allowed: a mapping')
        return None
    hints = hints_of(cls)
    arguments: dict[str, Any] = {}
    stand_ins: dict[str, Any] = {}  # for invalid and missing values without a default
    absent = add_unknown_keys(cls, value, path, problems)  # keys without a valid value
    for item in fields(cls):
        name, num_problems = item.name, len(problems.messages)
        is_required = item.default is MISSING and item.default_factory is MISSING
        if name not in value and not is_required:
            continue
        decoded = None
        if name in value:
            decoded = decode_value(hints[name], value[name], join(path, name), problems)
        else:
            problems.add(path, f"the key '{name}' is missing")
        # The rest of a list or mapping with invalid elements is checked too.
        if len(problems.messages) == num_problems or decoded:
            arguments[name] = decoded
            continue
        absent.add(name)
        if is_required:
            stand_ins[name] = stand_in(hints[name])
    if not stand_ins:
        return construct(cls, arguments, absent, path, problems)
    with Caught():  # a plug-in's class may not expect stand-ins; that values are missing is reported already
        construct(cls, {**arguments, **stand_ins}, absent, path, problems)
    return None


def add_unknown_keys(cls: type, value: Mapping[Any, Any], path: str, problems: Problems) -> set[str]:
    """Add a problem for each key that the dataclass `cls` does not have; return the keys that may have been meant."""
    if getattr(cls, 'ignore_unknown_keys', False):
        return set()
    names = [item.name for item in fields(cls)]
    allowed = [*names, *getattr(cls, 'without_effect', ())]
    meant = set()
    for key in value:
        if key in allowed:
            continue
        problems.add(join(path, str(key)), f"unknown key '{key}'{suggestion(str(key), allowed)}")
        similar = closest(str(key), allowed)
        if similar is not None and similar not in value:
            meant.add(similar)
    return meant


def construct(cls: type, arguments: Mapping[str, Any], absent: Collection[str], path: str, problems: Problems) -> Any:
    """Return an instance of a dataclass; if it refuses values, add its problems and take the defaults in their place.

    Problems that mention a key of `absent`, which has no valid value, are left out: they may be about its stand-in.
    None if the class refuses the defaults too, or a refused value has none.
    """
    try:
        return cls(**arguments)
    except ValueError as error:
        messages = error.problems if isinstance(error, InvalidValuesError) else (str(error),)
    refused = set()
    for message in messages:
        if any(mentions(message, key) for key in absent):
            continue
        beginning = KEY_OF_MESSAGE.match(message)
        key = beginning[1] if beginning and beginning[1] in arguments else ''
        problems.add(path, message, key=key)
        refused.add(key)
    accepted = {key: value for key, value in arguments.items() if key not in refused}
    with contextlib.suppress(TypeError, ValueError):
        return cls(**accepted)
    return None


def mentions(message: str, key: str) -> bool:
    """Return whether a message names a key, or the option that it is on the command line."""
    return any(re.search(rf'(?<!\w){re.escape(name)}\b', message) for name in (key, named(key)))


def stand_in(hint: Any) -> Any:
    """Return a value of this type that stands for a missing one while the others are checked."""
    stand_ins: dict[Any, Any] = {str: 'x', int: 1, float: 1.0, bool: False, tuple: (), dict: {}}
    return stand_ins.get(typing.get_origin(hint) or hint)


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, cached because resolving them is slow."""
    return typing.get_type_hints(cls)


def decode_value(hint: Any, value: Any, path: str, problems: Problems) -> Any:
    """Return `value` as the annotated type, or None with a problem for a wrong type."""
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)]
        # A value of several kinds, such as a path or a list, is checked by its dataclass or where it is read, which
        # knows the kind that is meant and says what is allowed.
        if value is None or len(kinds) > 1:
            return value
        return decode_value(kinds[0], value, path, problems)
    if isinstance(hint, type) and is_dataclass(hint):
        return decode_partly(hint, value, path, problems)
    if origin is tuple:
        return decode_list(arguments[0], value, path, problems)
    if origin is dict:
        return decode_mapping(arguments[1], value, path, problems)
    return decode_scalar(hint, value, path, problems)


def decode_list(hint: Any, value: Any, path: str, problems: Problems) -> tuple[Any, ...] | None:
    """Return the valid elements of a list as the annotated type, or None with a problem if it is none."""
    if not isinstance(value, (list, tuple)):
        problems.add(path, f'is {describe(value)}; allowed: a list')
        return None
    elements = [decode_element(hint, element, f'{path}[{index}]', problems) for index, element in enumerate(value)]
    return tuple(element for element in elements if element is not INVALID)


def decode_mapping(hint: Any, value: Any, path: str, problems: Problems) -> dict[Any, Any] | None:
    """Return the valid values of a mapping as the annotated type, or None with a problem if it is none."""
    if not isinstance(value, Mapping):
        problems.add(path, f'is {describe(value)}; allowed: a mapping')
        return None
    elements = {key: decode_element(hint, element, join(path, str(key)), problems) for key, element in value.items()}
    return {key: element for key, element in elements.items() if element is not INVALID}


def decode_element(hint: Any, value: Any, path: str, problems: Problems) -> Any:
    """Return an element of a list or a mapping as the annotated type, or INVALID with a problem."""
    num_problems = len(problems.messages)
    decoded = decode_value(hint, value, path, problems)
    # The rest of a list or mapping with invalid elements is checked too.
    return decoded if len(problems.messages) == num_problems or decoded else INVALID


def decode_scalar(hint: Any, value: Any, path: str, problems: Problems) -> Any:
    """Return text, a number or a truth value as the annotated type, or None with a problem."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)  # bool is a subclass of int
    if hint is float and is_whole:
        if abs(value) > sys.float_info.max:
            problems.add(path, f'is {describe(value)}; allowed: a number that a float can hold')
            return None
        return float(value)
    if not isinstance(value, hint) or (hint is int and not is_whole):
        problems.add(path, f'is {describe(value)}; allowed: {TYPE_NAMES[hint]}')
        return None
    return value


def open_yaml(path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Return a YAML file's mapping with `key=value` overrides, interpolations unresolved. Raise ConfigError."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    where = str(path)
    if problem := path_problem(where):
        raise ConfigError(f'{where[:MOST_SHOWN]}...: {problem}')
    try:
        check_top(shipped(path))
        content = OmegaConf.load(shipped(path))
        assert isinstance(content, DictConfig)  # an empty file too
        if not overrides:
            return content
        where = f'{path}: {" ".join(overrides)}'
        return OmegaConf.merge(content, OmegaConf.from_dotlist(list(overrides)))
    except FileNotFoundError as error:
        raise ConfigError(f'{path}: there is no such file') from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{path}: cannot be read: {error}') from error
    except yaml.YAMLError as error:
        message = ' '.join(str(error).split()).replace(f'"{shipped(path).absolute()}", ', '')
        raise ConfigError(f'{where}: is not valid YAML: {message}') from error
    except OmegaConfBaseException as error:
        raise ConfigError(f'{where}: {" ".join(str(error).split())}') from error


def check_top(path: Path) -> None:
    """Raise ConfigError if a YAML file is a list or a single value; OmegaConf would read a text as YAML once more."""
    with path.absolute().open(encoding='utf-8') as file:
        root = yaml.compose(file, YAML_LOADER)
    if root is not None and not isinstance(root, MappingNode):
        kind = 'a list' if isinstance(root, SequenceNode) else 'a single value'
        raise ConfigError(f'{path}: is {kind} at its top; allowed: a mapping')


def resolve_interpolations(content: Any, where: str, key: str | None = None) -> Any:
    """Return the mapping, or one of its values, as plain Python with interpolations resolved.

    Raise ConfigError naming `where`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = content if key is None else content[key]
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise ConfigError(f'{where}: an interpolation cannot be resolved: {message}') from error


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a whole YAML file as plain Python. Raise ConfigError."""
    content: dict[str, Any] = resolve_interpolations(open_yaml(path, overrides), str(path))
    return content


def lines_of(source: str) -> Lines:
    """Return the line of every dotted path of a YAML file, and the label of the entry around it; {} if unreadable."""
    try:
        root = yaml.compose(shipped(source).read_text(encoding='utf-8'), YAML_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    lines: Lines = {}
    todo = [('', root, '')]  # dotted path, node, and the label around it
    while todo:
        path, node, label = todo.pop()
        if isinstance(node, MappingNode):
            label = label_of(node) or label
            for key, value in node.value:
                below = join(path, str(key.value))
                lines[below] = (key.start_mark.line + 1, label)
                todo.append((below, value, label))
            # An element of a list is known by the label in it, which its list did not know.
            if path.endswith(']'):
                lines[path] = (node.start_mark.line + 1, label)
        elif isinstance(node, SequenceNode):
            for index, value in enumerate(node.value):
                below = f'{path}[{index}]'
                lines[below] = (value.start_mark.line + 1, label)
                todo.append((below, value, label))
    return lines


def label_of(node: MappingNode) -> str | None:
    """Return the value of the first of LABELS that a mapping has, None without one."""
    values = {str(key.value): value for key, value in node.value}
    labels = [values[name].value for name in LABELS if isinstance(values.get(name), ScalarNode)]
    return str(labels[0]) if labels else None


def source_name(source: Any, key: str) -> str:
    """Return the name of a source for messages: its path, or `<key>` for plain values."""
    return str(source) if isinstance(source, (str, Path)) else f'<{key}>'


def read_key(path: Path, key: str, problems: Problems) -> Any:
    """Return the value of a top-level key as plain Python; if it is a path, the value of that file's key."""
    node = read_mapping(path, key, problems)
    if not isinstance(node, str):
        return node
    if problem := path_problem(node):
        problems.add(key, problem)
        return None
    target = find_yaml(node, path)
    if target is None:
        problems.add(key, f'there is no file {node!r} (looked in the working directory and beside {path.name})')
        return None
    problems.source = str(target)
    return read_mapping(target, key, problems)


def read_mapping(path: Path, key: str, problems: Problems) -> Any:
    """Return the value of `key` in one YAML file with interpolations resolved; None and a problem on failure."""
    try:
        content = open_yaml(path)
        if key in content:
            node = resolve_interpolations(content, f'{path}: {key}', key)
            if node is None:
                problems.add(key, 'is empty')
            return node
    except ConfigError as error:
        problems.messages.extend(error.problems)
        return None
    keys = f'found: {", ".join(map(str, content))}' if content else 'the file is empty'
    problems.add('', f"the key '{key}' is missing; {keys}")
    return None


def find_yaml(name: str, referrer: Path) -> Path | None:
    """Return the path of a YAML file that `referrer` names, in the working directory or beside `referrer`, or None.

    llm-foundry's files name each other relative to its `scripts` folder; that prefix is dropped if needed.
    """
    names = [name, *(name[len(prefix) :] for prefix in UPSTREAM_YAML_FOLDERS if name.startswith(prefix))]
    candidates = [Path(name), *(referrer.parent / PurePosixPath(candidate) for candidate in names)]
    return next((candidate for candidate in candidates if candidate.is_file()), None)
