"""Where a part of the configuration comes from: a YAML file's key, or plain values."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from llmfoundry_gauntlet.config.decode import Problems
from llmfoundry_gauntlet.config.yaml_files import open_yaml, plain
from llmfoundry_gauntlet.errors import ConfigError

UPSTREAM_YAML_FOLDERS = ('eval/yamls/', 'scripts/eval/yamls/')
MAX_REDIRECTS = 5


def source_name(source: Any, key: str) -> str:
    """How a source is called in messages: its path, or the key's name for plain values."""
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
