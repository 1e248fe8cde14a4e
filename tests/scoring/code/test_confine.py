"""`confine.py` in bubblewrap's place, with the options that `Sandbox` has for bubblewrap, in all ways there are.

In one long file: each way goes through the same checks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmfoundry_gauntlet.scoring.code import sandbox as sandbox_module
from llmfoundry_gauntlet.scoring.code.sandbox import (
    BUBBLEWRAP,
    Command,
    Limits,
    Mount,
    Sandbox,
    environment,
    in_memory,
    seccomp_filter,
)

CONFINE = Path(sandbox_module.__file__).parent / 'runners' / 'confine.py'
NOBODY = ('--reuid=65534', '--regid=65534', '--clear-groups')
NAMESPACES = ('--mount', '--pid', '--net', '--ipc', '--uts')
USER = ('--user', '--map-user=20000', '--map-group=20000', '--keep-caps')
SECONDS = 20
RAN = 'the command was run'
PTRACE_ATTACH = 16


@dataclass(frozen=True)
class Way:
    """A way to start the launcher: its user, namespaces and Python."""

    as_root: bool
    privileges: tuple[str, ...]
    namespaces: tuple[str, ...]
    python: str
    confine: str

    def line(
        self, options: int, starter: int, user: Sequence[str], namespaces: Sequence[str] | None = None
    ) -> list[str]:
        """Return the words before the command."""
        chosen = self.namespaces if namespaces is None else namespaces
        return [
            *('setpriv', *self.privileges, '--pdeathsig', 'KILL', '--'),
            *('unshare', *chosen, '--fork', '--kill-child=KILL', '--'),
            *(self.python, '-I', '-S', '-B', self.confine, '--args', str(options), '--starter', str(starter), '--'),
            *user,
        ]


def a_python(privileges: Sequence[str]) -> str:
    """One that these privileges may run."""
    tried = ('-I', '-S', '-c', 'import ctypes, sys; sys.exit(sys.version_info < (3, 11))')
    for path in (os.path.realpath(sys.executable), '/usr/bin/python3'):
        line = ['setpriv', *privileges, '--', 'env', path, *tried]  # env, for setpriv itself may still read all
        if subprocess.run(line, capture_output=True).returncode == 0:
            return path
    pytest.skip('there is no Python 3.11 that a plain user may run')


@pytest.fixture(scope='module')
def open_folder() -> Iterator[Path]:
    """A folder that any user may read, which the tests' own is not."""
    folder = Path(tempfile.mkdtemp(prefix='confine-'))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=['root', 'root in a user namespace', 'a plain user'], scope='module')
def way(request: pytest.FixtureRequest, open_folder: Path) -> Way:
    for tool in ('unshare', 'setpriv'):
        if shutil.which(tool) is None:
            pytest.skip(f'{tool} is not installed')
    is_root = os.geteuid() == 0
    if not is_root and request.param != 'a plain user':
        pytest.skip('this is not root')
    privileges = NOBODY if is_root and request.param == 'a plain user' else ()
    namespaces = NAMESPACES if request.param == 'root' else (*USER, *NAMESPACES)
    tried = ['setpriv', *privileges, '--', 'unshare', *namespaces, '--fork', 'true']
    failure = subprocess.run(tried, capture_output=True, text=True, cwd='/').stderr
    if failure:
        pytest.skip(failure)
    confine = open_folder / 'confine.py'
    shutil.copyfile(CONFINE, confine)
    confine.chmod(0o644)
    return Way(request.param == 'root', tuple(privileges), tuple(namespaces), a_python(privileges), str(confine))


@contextlib.contextmanager
def prepared(
    way: Way, command: Command, *, extra: Sequence[str] = (), without: Sequence[str] = ()
) -> Iterator[tuple[int, list[str], list[int]]]:
    """The descriptor of the options, the command from its change of user on, and what is to be inherited."""
    plan = Sandbox(BUBBLEWRAP, as_root=way.as_root)
    code = in_memory(seccomp_filter(may_fork=command.may_fork))
    options = [*plan._options(command), *extra, *([] if 'seccomp' in without else ['--seccomp', str(code)])]
    if 'proc' in without:
        at = options.index('/proc/1') - 3
        assert options[at : at + 6] == ['--size', '4096', '--tmpfs', '/proc/1', '--remount-ro', '/proc/1']
        del options[at : at + 6]
    args = in_memory(b''.join(os.fsencode(option) + b'\0' for option in options))
    yield args, [*plan._user(), *map(str, command.arguments)], [args, code, *command.descriptors]
    for descriptor in (args, code):
        os.close(descriptor)


def confined(
    way: Way,
    command: Command,
    *,
    starter: int | None = None,
    before: Sequence[str] = (),
    namespaces: Sequence[str] | None = None,
    pass_fds: Sequence[int] = (),
    **changes: Sequence[str],
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result."""
    with prepared(way, command, **changes) as (args, arguments, inherited):
        return subprocess.run(
            [*before, *way.line(args, starter or os.getpid(), arguments, namespaces)],
            **{'cwd': '/', 'env': environment(None), 'start_new_session': True, 'timeout': SECONDS},
            **{'capture_output': True, 'text': True, 'stdin': subprocess.DEVNULL},
            pass_fds=[*inherited, *pass_fds],
        )


def said(way: Way, script: str, **settings: object) -> str:
    """The output of a shell script that must go well, and may start processes."""
    done = confined(way, Command(arguments=('sh', '-c', script), may_fork=True, **settings))
    assert (done.returncode, done.stderr) == (0, '')
    return done.stdout


@pytest.mark.parametrize(
    ('script', 'status'), [('exit 0', 0), ('exit 7', 7), ('kill -ABRT $$', 134), ('kill -KILL $$', 137)]
)
def test_the_status_is_the_commands(way: Way, script: str, status: int):
    done = confined(way, Command(arguments=('sh', '-c', script)))
    assert (done.returncode, done.stderr) == (status, '')


def test_orphans_are_reaped_and_do_not_change_the_status(way: Way):
    assert said(way, '(sleep 0.1 & ) ; sleep 0.3; echo /proc/[0-9]*') == '/proc/1 /proc/2\n'


def test_a_command_starts_as_bubblewraps_do(way: Way):
    """Its environment, its signals, its folder and its mask of modes are those that it would have."""
    environ = said(way, 'exec env').splitlines()
    assert sorted(line for line in environ if not line.startswith(('PWD=', 'OLDPWD=', '_=', 'SHLVL='))) == sorted(
        f'{name}={value}' for name, value in environment(None).items()
    )
    status = dict(line.split(':\t', 1) for line in said(way, 'cat /proc/self/status').splitlines())
    inherited = Path('/proc/self/status').read_text().partition('SigIgn:\t')[2].split()[0]  # nohup ignores SIGHUP
    own_signals = (2**31 - 1) & ~int(inherited, 16)  # those above are the C library's
    assert [int(status[name], 16) & own_signals for name in ('SigIgn', 'SigBlk')] == [0, 0]
    assert said(way, 'pwd; hostname; cut -d " " -f 6 /proc/$$/stat').split() == ['/tmp', 'sandbox', '2']  # its session
    masked = ['sh', '-c', 'umask 037 && exec "$@"', 'sh']
    assert confined(way, Command(arguments=('sh', '-c', 'umask')), before=masked).stdout == '0037\n'


def test_a_command_has_no_privileges_and_a_filter(way: Way):
    status = dict(line.split(':\t', 1) for line in said(way, 'cat /proc/self/status').splitlines())
    assert [status[name] for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb')] == ['0' * 16] * 4
    may_change_user = 1 << 6 | 1 << 7
    assert int(status['CapBnd'], 16) == (may_change_user if way.as_root else 0)
    assert (status['NoNewPrivs'], status['Seccomp'], status['Groups'].strip()) == ('1', '2', '')
    assert int(status['Uid'].split()[0]) >= 20_000


def test_all_namespaces_are_its_own(way: Way):
    names = ['net', 'mnt', 'pid', 'ipc', 'uts', *([] if way.as_root else ['user'])]
    theirs = said(way, ''.join(f'readlink /proc/self/ns/{name};' for name in names)).split()
    assert len(theirs) == len(names)
    assert not set(theirs) & {os.readlink(f'/proc/self/ns/{name}') for name in names}
    assert said(way, 'cat /proc/net/route /proc/net/unix').count('\n') <= 2  # the headings


def test_a_command_makes_no_process_and_no_mount(way: Way):
    done = confined(way, Command(arguments=('sh', '-c', '(echo forked)')))
    assert done.returncode != 0 and done.stdout == '' and 'fork' in done.stderr
    for tried in (['mount', '-t', 'tmpfs', 'none', '/tmp'], ['umount', '/proc/1'], ['unshare', '--user', 'true']):
        assert confined(way, Command(arguments=tuple(tried))).returncode != 0


def test_nothing_of_the_user_is_there(way: Way):
    system = {'bin', 'lib', 'lib32', 'lib64', 'nix', 'sbin', 'usr'}
    assert set(said(way, 'ls -A /').split()) - system == {'dev', 'etc', 'proc', 'tmp'}
    assert set(said(way, 'ls -A /etc').split()) <= {'alternatives', 'ld.so.cache'}
    assert said(way, 'ls -A /usr/src /tmp /proc/1 /dev/shm 2>&1 | grep -v : || true').strip() == ''
    devices = {'null', 'zero', 'full', 'random', 'urandom', 'fd', 'stdin', 'stdout', 'stderr', 'shm'}
    assert set(said(way, 'ls -A /dev').split()) == devices
    assert said(way, 'head -c 3 /dev/zero | wc -c; echo lost > /dev/null') == '3\n'


@pytest.mark.parametrize(
    'folder', ['/', '/etc', '/dev', '/dev/shm', '/proc/1', '/usr', '/usr/src', '/gauntlet', '/tmp']
)
def test_tmp_alone_can_be_written_to(way: Way, folder: str):
    with sandbox_module.file_in_memory(b'ours') as data:
        script = f'if test -d {folder} && (: > {folder}/new) 2>/dev/null; then echo written; fi'
        written = said(way, script, mounts=(Mount(data, '/gauntlet/ours'),))
    assert written == ('written\n' if folder == '/tmp' else '')


def test_settings_of_the_kernel_cannot_be_written(way: Way):
    paths = '/proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sysrq-trigger /dev/null/x'
    assert said(way, f'for path in {paths}; do if (: >> $path) 2>/dev/null; then echo $path; fi; done') == ''


def mounts_of(text: str) -> dict[str, set[str]]:
    """The options of mounts, by where they are."""
    fields = [line.split() for line in text.splitlines()]
    mounts = {words[4].replace('\\040', ' '): set(words[5].split(',')) for words in fields}
    assert len(mounts) == len(fields)  # none covers another, the old root among them
    return mounts


def test_every_mount_is_of_the_plan_and_read_only(way: Way):
    with sandbox_module.file_in_memory(b'ours') as data:
        ours = (Mount(data, '/gauntlet/ours'),)
        mounts = mounts_of(said(way, 'cat /proc/self/mountinfo', mounts=ours))
        plan = {'/', '/tmp', '/dev', *Sandbox(BUBBLEWRAP)._options(Command(arguments=(), mounts=ours))}
    assert {path for path in mounts if path not in plan and not path.startswith('/dev/')} == set()
    assert {path for path, options in mounts.items() if 'ro' not in options} == {'/tmp'}
    assert all('nosuid' in options for options in mounts.values())
    assert {path for path, options in mounts.items() if 'nodev' not in options} == {
        f'/dev/{name}' for name in ('null', 'zero', 'full', 'random', 'urandom')
    }


def test_a_mount_below_a_folder_is_read_only_too(way: Way, open_folder: Path):
    """Also where it may not be given back what it was denied, as in a user namespace."""
    if os.geteuid() != 0:
        pytest.skip('mounts can be made by root alone')
    below = open_folder / 'shown' / 'a folder' / 'below it'
    below.mkdir(parents=True, exist_ok=True)
    make = 'mount -t tmpfs -o mode=777,noexec none "$0" && echo here > "$0/file" && exec "$@"'
    shown = '/gauntlet/shown'
    command = Command(
        arguments=('sh', '-c', f'cd "{shown}/a folder/below it"; cat file; (: > new) || cat /proc/self/mountinfo'),
        mounts=(Mount(str(open_folder / 'shown'), shown),),
        may_fork=True,
    )
    done = confined(way, command, before=['unshare', '--mount', '--', 'sh', '-c', make, str(below)])
    first, _, mounts = done.stdout.partition('\n')
    assert first == 'here' and 'Read-only file system' in done.stderr
    assert {'ro', 'nosuid', 'nodev', 'noexec'} <= mounts_of(mounts)[f'{shown}/a folder/below it']


def test_tmp_has_a_limit_of_bytes_and_one_of_files(way: Way):
    small = Limits(tmp_bytes=40 * 4096)
    assert int(said(way, 'head -c 500000 /dev/zero > /tmp/x 2> /dev/null; wc -c < /tmp/x', limits=small)) <= 40 * 4096
    many = 'n=0; while test $n -lt 200 && (: > /tmp/$n) 2> /dev/null; do n=$((n + 1)); done; echo $n'
    assert 50 < int(said(way, many, limits=small)) <= 64
    links = ': > /tmp/x; n=0; while test $n -lt 200 && ln /tmp/x /tmp/$n 2> /dev/null; do n=$((n + 1)); done; echo $n'
    assert 50 < int(said(way, links, limits=small)) <= 64


def test_process_1_is_out_of_reach(way: Way):
    assert said(way, 'for n in 1 2 9 15 19; do kill -$n 1; done 2> /dev/null; sleep 0.1; echo here') == 'here\n'
    assert said(way, 'cd /proc/1; cat mem environ root/etc/passwd 2> /dev/null || echo none') == 'none\n'


@pytest.mark.skipif(not os.path.exists('/usr/bin/python3'), reason='there is no Python below /usr')
@pytest.mark.parametrize('without', [(), ('seccomp',), ('seccomp', 'proc')])
def test_process_1_cannot_be_traced_or_read(way: Way, without: tuple[str, ...]):
    """Not even where neither the filter nor the cover of its folder is there."""
    code = f"""
import ctypes
libc = ctypes.CDLL(None)
assert libc.ptrace({PTRACE_ATTACH}, 1, 0, 0) == -1
for name in ('mem', 'environ', 'maps', 'fd/0', 'root/tmp', 'cwd/tmp'):
    try:
        open('/proc/1/' + name).read(1)
    except OSError as error:
        assert not isinstance(error, IsADirectoryError), name
    else:
        raise AssertionError(name)
"""
    done = confined(way, Command(arguments=('/usr/bin/python3', '-I', '-S', '-c', code)), without=without)
    assert (done.returncode, done.stderr) == (0, '')


def test_descriptors_keep_their_numbers_and_no_other_is_there(way: Way):
    reading, writing = os.pipe()
    os.fchmod(writing, 0o666)
    with open(reading) as stream, sandbox_module.file_in_memory(b'ours') as data:
        command = Command(
            arguments=('sh', '-c', f'echo passed > /proc/self/fd/{writing}; exec ls /proc/self/fd'),
            mounts=(Mount(data, '/gauntlet/ours'),),
            may_fork=True,
        )
        done = confined(way, command, pass_fds=[writing])
        os.close(writing)
        assert stream.read() == 'passed\n'
    numbers = set(map(int, done.stdout.split()))
    assert {0, 1, 2, writing} <= numbers and len(numbers) == 5  # with that of the folder which is listed


def test_files_in_memory_are_there_to_be_read(way: Way):
    content = os.urandom(300_000).hex()
    with (
        sandbox_module.file_in_memory(content.encode()) as data,
        sandbox_module.file_in_memory(b'#!/bin/sh\necho ran') as tool,
    ):
        mounts = (Mount(data, '/gauntlet/data'), Mount(tool, '/gauntlet/tool', is_program=True))
        seen = said(
            way, 'cat /gauntlet/data; stat -c " %a" /gauntlet/data /gauntlet/tool; /gauntlet/tool', mounts=mounts
        )
    assert seen.split() == [content, '444', '555', 'ran']


WRONG = {
    'an unknown option': (['--bind', '/', '/'], "unknown option '--bind'"),
    'an option cut off': (['--ro-bind', '/usr'], '--ro-bind needs 2 arguments'),
    'a folder that is not there': (['--ro-bind', '/not/there', '/there'], '/not'),
    'a mount upon what is read-only': (['--tmpfs', '/usr/new'], '/usr/new'),
    'a folder to be in that is not there': (['--chdir', '/nowhere'], '/nowhere'),
    'an unknown capability': (['--cap-add', 'CAP_NEW'], 'CAP_NEW'),
    'a descriptor that is not open': (['--ro-bind-data', '987', '/there'], 'Bad file descriptor'),
    'a filter that is none': (['--seccomp', '0'], 'prctl: Invalid argument'),
}


@pytest.mark.parametrize('name', WRONG)
def test_what_goes_wrong_is_said_in_a_line_and_nothing_is_run(way: Way, name: str):
    extra, words = WRONG[name]
    done = confined(way, Command(arguments=('echo', RAN)), extra=extra, without=('seccomp',))
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.startswith('confine: ') and words in done.stderr and done.stderr.count('\n') == 1


def test_a_command_that_is_not_there_is_said_to_be(way: Way):
    done = confined(way, Command(arguments=('no-such-command',)))
    assert done.returncode != 0 and 'no-such-command' in done.stderr and done.stderr.count('\n') == 1


def test_nothing_is_run_for_a_starter_that_is_gone(way: Way):
    done = confined(way, Command(arguments=('echo', RAN)), starter=2**22 + 1)
    assert (done.returncode, done.stdout) == (1, '') and 'is gone' in done.stderr


@pytest.mark.parametrize('name', ['net', 'ipc', 'uts'])
def test_nothing_is_run_where_a_namespace_was_not_made(way: Way, name: str):
    if not way.as_root:
        pytest.skip('a user namespace cannot look at the starter')
    namespaces = [option for option in way.namespaces if option != f'--{name}']
    done = confined(way, Command(arguments=('echo', RAN)), namespaces=namespaces)
    assert (done.returncode, done.stdout, done.stderr) == (1, '', f'confine: the {name} namespace is not new\n')


def alive(mark: str) -> bool:
    """Return whether a process has this in its command line."""
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        with contextlib.suppress(OSError):
            if mark in path.read_text(errors='replace'):
                return True
    return False


def becomes(wanted: bool, mark: str) -> bool:
    """Waits until processes with a mark are there, or are not."""
    deadline = time.monotonic() + SECONDS
    while alive(mark) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive(mark) == wanted


def asleep(mark: str) -> bool:
    """Return whether the command itself sleeps."""
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        with contextlib.suppress(OSError):
            if path.read_bytes() == f'sleep\0{mark}\0'.encode():
                return True
    return False


def wait_until_asleep(mark: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not asleep(mark):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_left_when_the_outermost_process_is_killed(way: Way):
    mark, before = f'61.{os.getpid()}1', Path('/proc/self/mountinfo').read_text()
    with prepared(way, Command(arguments=('sleep', mark))) as (args, arguments, inherited):
        line = way.line(args, os.getpid(), arguments)
        process = subprocess.Popen(line, cwd='/', env=environment(None), pass_fds=inherited, start_new_session=True)
        wait_until_asleep(mark)
        (first,) = Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
        if os.geteuid() == 0:
            assert os.listdir(f'/proc/{first}/fd') == []  # which would keep the starter's pipes open
        process.kill()
        process.wait()
    assert becomes(False, mark)
    assert Path('/proc/self/mountinfo').read_text() == before


STARTER = """
import os, subprocess, sys
line = [str(os.getpid()) if word == '0' else word for word in sys.argv[2:]]
process = subprocess.Popen(line, pass_fds=eval(sys.argv[1]), start_new_session=True, cwd='/')
print('started', flush=True)
sys.exit(process.wait())
"""


@contextlib.contextmanager
def another_starter(
    way: Way, command: Command, *, before: Sequence[str] = (), namespaces: Sequence[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that has just started a command."""
    with prepared(way, command) as (args, arguments, inherited):
        line = way.line(args, 0, arguments, namespaces)
        starter = subprocess.Popen(
            [*before, sys.executable, '-c', STARTER, str(inherited), *line],
            **{'env': environment(None), 'pass_fds': inherited, 'text': True},
            **{'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE},
        )
        assert starter.stdout is not None and starter.stdout.readline() == 'started\n'
        try:
            yield starter
        finally:
            starter.kill()
            starter.communicate()


@pytest.mark.parametrize('pause', [0, 0.002, 0.005, 0.01, 0.02, None])
def test_nothing_is_left_when_the_starter_is_killed(way: Way, pause: float | None):
    """At whatever moment: while the sandbox is set up, or later (None)."""
    mark = f'61.{os.getpid()}2'
    with another_starter(way, Command(arguments=('sleep', mark))) as starter:
        if pause is None:
            wait_until_asleep(mark)
        else:
            time.sleep(pause)
        starter.kill()
    assert becomes(False, mark)


def test_nothing_is_run_where_the_mounts_are_the_starters(way: Way):
    """Else these would be lost. The starter here has some of its own, for a launcher that does not look."""
    if not way.as_root:
        pytest.skip('a user namespace cannot look at the starter')
    namespaces = [option for option in way.namespaces if option != '--mount']
    command = Command(arguments=('echo', RAN))
    with another_starter(way, command, before=['unshare', '--mount', '--'], namespaces=namespaces) as starter:
        assert starter.communicate(timeout=SECONDS) == ('', 'confine: the mnt namespace is not new\n')
    assert starter.returncode == 1
