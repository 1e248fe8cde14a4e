"""Locate the package's YAML files and sample data, the cache directory, and plugins of installed packages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from llmfoundry_gauntlet.errors import ConfigError

Entry = TypeVar('Entry')

PACKAGE = Path(__file__).parent.parent
FOLDERS = ('yamls', 'eval_data')

MOST_NAME_BYTES = 255  # of a file or folder, in every common file system
MOST_PATH_BYTES = 4095

VARIABLE = 'LLMFOUNDRY_GAUNTLET_CACHE'  # a directory, or OFF
OFF = 'off'
FOLDER = 'llmfoundry_gauntlet'  # in the user's cache directory
TASK_TYPES = 'llmfoundry_gauntlet.task_types'  # each a subclass of Task
METRICS = 'llmfoundry_gauntlet.metrics'  # each a function from a Task to its additional Metrics
PERTURBATIONS = 'llmfoundry_gauntlet.perturbations'  # each a function from an Example to its variants


def shipped(path: str | Path) -> Path:
    """Return a path, or the package's own file if the path does not exist and begins with 'yamls' or 'eval_data'."""
    path = Path(path)
    if path.parts[:1] and path.parts[0] in FOLDERS and not path.exists() and (PACKAGE / path).exists():
        return PACKAGE / path
    return path


def path_problem(path: str) -> str | None:
    """Return why no file or folder can have this path, so that it is known before anything is computed, or None."""
    if '\0' in path:
        return 'contains a NUL character; allowed: a path'
    num_bytes = len(path.encode('utf-8', 'surrogatepass'))
    longest = max((len(name.encode('utf-8', 'surrogatepass')) for name in path.split('/')), default=0)
    if longest > MOST_NAME_BYTES:
        return f'has a name of {longest} bytes; allowed: {MOST_NAME_BYTES} bytes for the name of a file or folder'
    if num_bytes > MOST_PATH_BYTES:
        return f'has {num_bytes} bytes; allowed: {MOST_PATH_BYTES} bytes for a path'
    return None


def path_problems(key: str, path: str | None) -> Iterator[str]:
    """Yield a problem if the value of a key cannot be the path of a file or folder; None is allowed."""
    problem = None if path is None else path_problem(path)
    if problem is not None:
        yield f'{key}: {problem}'


def cache_folder(part: str) -> Path | None:
    """Return one cache's directory, in the one set by the environment variable or in the user's cache directory.

    None if caching is disabled or there is no home directory.
    """
    named = os.environ.get(VARIABLE, '')
    if named:
        return None if named.lower() == OFF else Path(os.path.expanduser(named)) / part
    base = os.environ.get('XDG_CACHE_HOME', '')
    if not os.path.isabs(base):
        base = os.path.expanduser('~/.cache')
    return Path(base) / FOLDER / part if os.path.isabs(base) else None


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Return a group's entry points sorted by name, without loading them. Raise ConfigError for duplicate names."""
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f'{package_of(other)} and {package_of(point)} both have an entry point {point.name} in {group}; '
                'uninstall one of them'
            )
    return points


@cache
def load_installed(group: str) -> dict[str, Any]:
    """Return the objects of a group's entry points. Raise ConfigError if one cannot be imported."""
    loaded = {}
    for name, point in installed(group).items():
        try:
            loaded[name] = point.load()
        except (ImportError, AttributeError, SyntaxError) as error:
            raise plugin_error(group, name, f'cannot be loaded ({error}); fix or uninstall the package') from error
    return loaded


def call_installed(group: str, name: str, kind: type[Entry], *arguments: Any) -> list[Entry]:
    """Call an entry point's function and return its items. Raise ConfigError if one is not of this kind."""
    function = load_installed(group)[name]
    allowed = f'allowed: a function that returns {kind.__name__} objects'
    if not callable(function):
        raise plugin_error(group, name, f'is {function!r}; {allowed}')
    found = function(*arguments)
    items = list(found) if isinstance(found, Iterable) else [found]
    for item in items:
        if not isinstance(item, kind):
            raise plugin_error(group, name, f'returned {item!r}; {allowed}, in a list or one by one')
    return items


def plugin_error(group: str, name: str, problem: str) -> ConfigError:
    """Return an error that names an entry point and its package."""
    return ConfigError(f'{package_of(installed(group)[name])}: its entry point {name} in {group} {problem}')


def plugin_of(traceback: TracebackType | None) -> str | None:
    """Return the entry point and package whose module is innermost in a traceback; None if there is none."""
    modules = {
        point.module.partition('.')[0]: f'{package_of(point)}: its entry point {name} in {group}'
        for group in (TASK_TYPES, METRICS, PERTURBATIONS)
        for name, point in installed(group).items()
    }
    found = None
    while traceback is not None:
        found = modules.get(traceback.tb_frame.f_globals.get('__name__', '').partition('.')[0], found)
        traceback = traceback.tb_next
    return found


def package_of(point: EntryPoint) -> str:
    """Return the name of the package that defines an entry point."""
    return point.value if point.dist is None else f'{point.dist.name} {point.dist.version}'
