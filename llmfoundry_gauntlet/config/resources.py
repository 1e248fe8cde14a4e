"""Locate the package's YAML files and sample data, the cache directory, and task types of installed packages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import TracebackType
from typing import Any

from llmfoundry_gauntlet.errors import ConfigError

PACKAGE = Path(__file__).parent.parent
FOLDERS = ('yamls', 'eval_data')

MOST_NAME_BYTES = 255  # of a file or folder, in every common file system
MOST_PATH_BYTES = 4095

VARIABLE = 'LLMFOUNDRY_GAUNTLET_CACHE'  # a directory, or OFF
OFF = 'off'
FOLDER = 'llmfoundry_gauntlet'  # in the user's cache directory
TASK_TYPES = 'llmfoundry_gauntlet.task_types'  # entry points, each a subclass of Task


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
def installed_types() -> dict[str, EntryPoint]:
    """Return the entry points of task types sorted by name, without loading them. Raise ConfigError for duplicates."""
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=TASK_TYPES), key=lambda point: point.name):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f'{package_of(other)} and {package_of(point)} both have an entry point {point.name} in {TASK_TYPES}; '
                'uninstall one of them'
            )
    return points


@cache
def load_installed_types() -> dict[str, Any]:
    """Return the objects of the entry points of task types. Raise ConfigError if one cannot be imported."""
    loaded = {}
    for name, point in installed_types().items():
        try:
            loaded[name] = point.load()
        except (ImportError, AttributeError, SyntaxError) as error:
            raise plugin_error(name, f'cannot be loaded ({error}); fix or uninstall the package') from error
    return loaded


def plugin_error(name: str, problem: str) -> ConfigError:
    """Return an error that names the entry point of a task type and its package."""
    return ConfigError(f'{plugin_name(installed_types()[name])} {problem}')


def plugin_of(traceback: TracebackType | None) -> str | None:
    """Return the entry point and package whose module is innermost in a traceback; None if there is none."""
    names = {point.module.partition('.')[0]: plugin_name(point) for point in installed_types().values()}
    innermost = None
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get('__name__', '').partition('.')[0]
        innermost = names.get(module, innermost)
        traceback = traceback.tb_next
    return innermost


def plugin_name(point: EntryPoint) -> str:
    """Return the name of an entry point, with its package, for messages."""
    return f'{package_of(point)}: its entry point {point.name} in {TASK_TYPES}'


def package_of(point: EntryPoint) -> str:
    """Return the name of the package that defines an entry point."""
    return point.value if point.dist is None else f'{point.dist.name} {point.dist.version}'
