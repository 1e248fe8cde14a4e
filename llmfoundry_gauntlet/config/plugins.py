"""Plug-ins: the entry points of other installed packages, by group."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from llmfoundry_gauntlet.errors import ConfigError

TASK_TYPES = 'llmfoundry_gauntlet.task_types'  # each a subclass of Task
METRICS = 'llmfoundry_gauntlet.metrics'  # each a function from a Task to its further Metrics
PERTURBATIONS = 'llmfoundry_gauntlet.perturbations'  # each a function from an Example to its variants


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """A group's entry points by name and in that order, none of them loaded. Raises ConfigError for a name twice."""
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
    """Return what a group's entry points stand for. Raises ConfigError where one cannot be imported."""
    loaded = {}
    for name, point in installed(group).items():
        try:
            loaded[name] = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f'{package_of(point)}: its entry point {name} in {group} cannot be loaded ({error}); mend it, or '
                'uninstall the package'
            ) from error
    return loaded


def package_of(point: EntryPoint) -> str:
    """The package that an entry point is of."""
    return point.value if point.dist is None else point.dist.name
