"""Sources of configuration: a key of a YAML file, or plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from llmfoundry_gauntlet.config.decode import Problems, describe
from llmfoundry_gauntlet.config.yaml import open_yaml, plain
from llmfoundry_gauntlet.errors import ConfigError

UPSTREAM_YAML_FOLDERS = ('eval/yamls/', 'scripts/eval/yamls/')
MAX_REDIRECTS = 5

PATH, MAPPING = 'a path', 'a mapping'
LISTS = {'a list of paths': PATH, 'a list of mappings': MAPPING}  # and the kind of their entries
SOURCES = {  # what each of the settings that name a source may be
    'tasks': (PATH, *LISTS),
    'gauntlet': (PATH, MAPPING),
    'score': (PATH, MAPPING, 'a list of mappings'),
}


def check_source(value: Any, key: str, problems: Problems) -> None:
    """Note a value that the setting `key` cannot be; in a list, every entry that is not of the list's kind."""
    kinds = [LISTS[kind] for kind in SOURCES[key] if kind in LISTS]
    if not (isinstance(value, (list, tuple)) and value and kinds):
        if kind_of(value) not in SOURCES[key]:
            problems.add(key, f'is {describe(value)}; allowed: {alternatives(SOURCES[key])}')
        return
    first = kind_of(value[0])
    allowed = kinds if first not in kinds else [first]
    for index, entry in enumerate(value):
        if kind_of(entry) not in allowed:
            problems.add(f'{key}[{index}]', f'is {describe(entry)}; allowed: {alternatives(allowed)}')


def kind_of(value: Any) -> str | None:
    """Return PATH or MAPPING, or None for anything else and for what is empty."""
    if isinstance(value, (str, Path)) and str(value).strip():
        return PATH
    return MAPPING if isinstance(value, Mapping) and value else None


def alternatives(words: Sequence[str]) -> str:
    """Return 'a, b or c'."""
    return ' or '.join(filter(None, (', '.join(words[:-1]), words[-1])))


def source_name(source: Any, key: str) -> str:
    """Return how a source is called in messages: its path, or the key's name for plain values."""
    return str(source) if isinstance(source, (str, Path)) else f'<{key}>'


def read_key(path: Path, key: str, problems: Problems) -> Any:
    """The value of a top-level key as plain Python; where it is a path, the value of that file's key."""
    for _ in range(MAX_REDIRECTS):
        node = read_mapping(path, key, problems)
        if not isinstance(node, str):
            return node
        target = find_yaml(node, path)
        if target is None:
            problems.add(key, f'there is no file {node!r} (looked in the working directory and beside {path.name})')
            return None
        path = target
        problems.source = str(path)
    problems.add(key, f'paths lead on from file to file more than {MAX_REDIRECTS} times')
    return None


def read_mapping(path: Path, key: str, problems: Problems) -> Any:
    """The value of `key` in one YAML file, interpolations resolved; None and a problem where that fails."""
    try:
        content = open_yaml(path)
        if key in content:
            node = plain(content, f'{path}: {key}', key)
            if node is None:
                problems.add(key, 'is empty')
            return node
    except ConfigError as error:
        problems.found.extend(error.problems)
        return None
    found = f'found: {", ".join(map(str, content))}' if content else 'the file is empty'
    problems.add('', f"the key '{key}' is missing; {found}")
    return None


def find_yaml(name: str, referrer: Path) -> Path | None:
    """A YAML file named inside another: from the working directory, or beside the file that names it.

    Upstream's files name each other from llm-foundry's `scripts` folder; that prefix is dropped where needed.
    """
    names = [name, *(name[len(prefix) :] for prefix in UPSTREAM_YAML_FOLDERS if name.startswith(prefix))]
    candidates = [Path(name), *(referrer.parent / PurePosixPath(candidate) for candidate in names)]
    return next((candidate for candidate in candidates if candidate.is_file()), None)
