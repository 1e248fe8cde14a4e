"""The packages that a Python with torch and transformers lacks, from a folder of wheels.

It needs no environment of its own, and no network: machines with a GPU often have neither pip's index nor a disk of
their own. A wheel is unpacked for this run alone, and whatever is installed already goes first.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent.parent / 'requirements' / 'newest.txt'
# What the package imports in these parts, and neither torch, transformers nor huggingface-hub brings along. All else
# that it requires is for other things: tables, data from the Hub, mathematics of SCORE, statistics of comparisons.
NEEDED = {'omegaconf': 'omegaconf'}  # the package of each module


class MissingWheelsError(Exception):
    """Packages are neither installed nor in a folder of wheels; the message has the command that gets them."""


def use_wheels(folder: Path | None) -> None:
    """Make the packages that are not installed importable from a folder of wheels. Raise MissingWheelsError."""
    if folder is not None:
        add_wheels(folder)
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if not missing:
        return
    place = folder or Path('wheels')
    searched = '' if folder is None else f' and have no wheel in {folder}'
    raise MissingWheelsError(
        f'{", ".join(missing)}: are not installed in {sys.executable}{searched}; where there is a network: '
        f'pip download --no-deps --dest {place} {" ".join(map(pinned, missing))}; then --wheels {place}'
    )


def add_wheels(folder: Path) -> None:
    """Unpack the wheels of a folder, and import from there what is not installed. Raise MissingWheelsError."""
    wheels = sorted(folder.glob('*.whl'))
    if not wheels:
        raise MissingWheelsError(f'--wheels: {folder} has no files *.whl')
    unpacked = tempfile.mkdtemp(prefix='wheels-')
    atexit.register(shutil.rmtree, unpacked, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    sys.path.append(unpacked)


def pinned(package: str) -> str:
    """Return the requirement of a package with the version that the tests run with."""
    for line in REQUIREMENTS.read_text('utf-8').splitlines():
        name, _, version = line.partition('==')
        if name.strip() == package and version:
            return f'{package}=={version.strip()}'
    return package
