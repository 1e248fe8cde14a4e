"""Find and load plug-ins: entry points of other installed packages, by group."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from llmfoundry_gauntlet.errors import ConfigError

TASK_TYPES = 'llmfoundry_gauntlet.task_types'  # each a subclass of Task
METRICS = 'llmfoundry_gauntlet.metrics'  # each a function from a Task to additional Metrics
PERTURBATIONS = 'llmfoundry_gauntlet.perturbations'  # each a function from an Example to its variants


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Return a group's entry points sorted by name, without loading them. Raises ConfigError for duplicate names."""
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
    """Return the objects of a group's entry points. Raises ConfigError if one cannot be imported."""
    loaded = {}
    for name, point in installed(group).items():
        try:
            loaded[name] = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f'{package_of(point)}: its entry point {name} in {group} cannot be loaded ({error}); fix or '
                'uninstall the package'
            ) from error
    return loaded


def package_of(point: EntryPoint) -> str:
    """Return the name of the package that defines an entry point."""
    return point.value if point.dist is None else point.dist.name
