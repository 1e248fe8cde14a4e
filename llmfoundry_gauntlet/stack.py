"""The versions of the libraries below this package that it supports: those of pyproject.toml, which a test compares."""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from llmfoundry_gauntlet.errors import GauntletError

VERSION = '0.2.0'  # of this package; pyproject.toml reads it here
SUPPORTED = {
    'torch': '>=2.6,<2.16',
    'transformers': '>=4.51,<5.25',
    'huggingface-hub': '>=0.33,<3',
    'datasets': '>=3.3,<6',
    'numpy': '>=1.26,<2.6',
}


class UnsupportedVersionError(GauntletError, ImportError):
    """A library is older than the versions that this package supports."""


def version_of(package: str) -> Version | None:
    """Return the installed version of a package, which is not imported; None if nothing says it."""
    try:
        # importlib.metadata.version() parses the whole description too: for all packages 20 ms instead of 2.
        metadata = distribution(package).read_text('METADATA') or ''
    except PackageNotFoundError:
        return None
    line = re.search(r'^Version: *(\S+)', metadata, re.MULTILINE)
    return None if line is None else Version(line[1])


@cache
def check_stack() -> None:
    """Check the installed versions, without an import of the libraries.

    Older ones raise UnsupportedVersionError. Newer ones, which a user has forced past this package's requirements, are
    a warning: the probe compares scores with the model's own, whatever a new version changes.
    """
    for package, bounds in SUPPORTED.items():
        installed = version_of(package)
        if installed is None:
            continue  # importing it says so
        supported = SpecifierSet(bounds)
        if supported.contains(installed, prereleases=True):
            continue
        oldest = min(Version(bound.version) for bound in supported)
        found = f'{package} {installed} is installed; supported: {package}{bounds}'
        if installed < oldest:
            raise UnsupportedVersionError(f"{found}; pip install '{package}{bounds}'")
        warnings.warn(f'{found}, with which the tests run', stacklevel=2)
