"""Things that a program finds in the sandbox, and what happens where there can be none.

Mutations: mount all of /etc; pass on the environment; leave out a limit; run programs where namespaces are forbidden.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest
from paths import ROOT
from programs import sandbox

from llmfoundry_gauntlet.errors import named_as_options
from llmfoundry_gauntlet.scoring.code.sandbox import (
    AUTO,
    FIRST_UID,
    MIB,
    Command,
    ProgramLimits,
    SandboxError,
    find_sandbox,
    started,
)

SECONDS = 20.0
SYSTEM_FOLDERS = {'bin', 'sbin', 'lib', 'lib32', 'lib64', 'usr', 'etc', 'nix', 'proc', 'dev'}
OWN_FOLDERS = {'gauntlet', 'tmp'}


def output_of(*arguments: str) -> list[str]:
    """Return the lines that a program prints in this machine's sandbox."""
    reading, writing = os.pipe()
    with open(reading, encoding='utf-8') as printed:
        with started(sandbox(), Command(arguments=arguments), stdout=writing) as running:
            os.close(writing)
            assert running.wait(SECONDS) == 0
            running.check_started()
        return printed.read().splitlines()


def test_a_program_sees_the_system_and_a_folder_of_its_own():
    names = set(output_of('ls', '-A', '/'))

    assert names - SYSTEM_FOLDERS - OWN_FOLDERS == set()
    assert {'usr', 'tmp'} <= names
    assert set(output_of('ls', '-A', '/etc')) <= {'alternatives', 'ld.so.cache'}
    assert output_of('ls', '-A', '/tmp') == []


def test_a_program_has_five_environment_variables_and_no_name_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('GAUNTLET_TEST_SECRET', 'secret')
    variables = dict(line.split('=', 1) for line in output_of('env'))

    # The shell that starts a program sets its own.
    assert variables.keys() - {'PWD', 'OLDPWD', 'SHLVL', '_'} == {'PATH', 'HOME', 'TMPDIR', 'LANG', 'FILES'}
    assert output_of('uname', '-n') == ['sandbox']


def test_a_program_runs_as_a_user_that_owns_nothing():
    (user,) = output_of('id', '-u')
    rights = [line for line in output_of('cat', '/proc/self/status') if line.startswith(('CapEff', 'CapPrm'))]

    assert int(user) >= FIRST_UID and int(user) != os.getuid()
    assert [line.split()[1] for line in rights] == ['0000000000000000'] * 2


def test_a_program_has_the_limits_that_the_page_on_security_states():
    """Those of Python's programs; test_attacks.py runs into each."""
    table = output_of('cat', '/proc/self/limits')
    hard_limits = {line[:26].strip(): line[26:].split()[1] for line in table[1:]}
    size_of_tmp = output_of('df', '--output=size', '--block-size=1', '/tmp')[-1]

    assert hard_limits['Max cpu time'] == '5'
    assert hard_limits['Max address space'] == str(1024 * MIB)
    assert hard_limits['Max file size'] == str(32 * MIB)
    assert hard_limits['Max core file size'] == '0'
    assert hard_limits['Max open files'] == '64'
    assert int(size_of_tmp) == 64 * MIB
    page = (ROOT / 'docs' / 'security.md').read_text('utf-8')
    stated = ['5 s of processor time', '1 GiB of memory', '64 MiB of `/tmp`', '64 open files of 32 MiB', '64 threads']
    assert [words for words in stated if words not in page] == []
    assert ProgramLimits().threads == 64


FIND = """
from llmfoundry_gauntlet.scoring.code.sandbox import SandboxError, find_sandbox
try:
    print('FOUND', find_sandbox())
except SandboxError as error:
    print('NONE', error)
"""


def found_by(prefix: Sequence[str] = ()) -> str:
    """Return what another process finds as the sandbox of the machine; `prefix` is a command that starts it."""
    command = [*prefix, sys.executable, '-c', FIND]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout


def test_where_namespaces_are_forbidden_there_is_no_sandbox_and_one_line_says_so():
    """Not simulated: in a user namespace that may have no others, as in a container without the right to make some."""
    sandbox()
    forbid = 'for kind in user mnt; do echo 0 > /proc/sys/user/max_${kind}_namespaces || exit 3; done; exec "$@"'
    within = ['unshare', '--user', '--map-root-user', 'sh', '-c', forbid, 'sh']
    can_forbid = shutil.which('unshare') and subprocess.run([*within, 'true'], capture_output=True).returncode == 0
    if not can_forbid:
        pytest.skip('no namespace can be made here in which others are forbidden')

    assert found_by().startswith('FOUND bubblewrap')
    (line,) = found_by(within).splitlines()
    assert line.startswith('NONE code tasks: bubblewrap cannot confine programs here')
    assert 'allow namespaces' in line


def test_what_to_do_without_a_tool_is_in_the_words_of_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Mutation: a message that names a key of YAML files to the user of an option."""
    monkeypatch.setenv('PATH', str(tmp_path))  # which has no prlimit
    find_anew = find_sandbox.__wrapped__  # not the sandbox that another test has found

    with pytest.raises(SandboxError, match='sandbox: none'):
        find_anew(AUTO)
    with named_as_options({'sandbox': '--sandbox'}), pytest.raises(SandboxError, match='--sandbox none'):
        find_anew(AUTO)
