"""Run a hostile program as one confined process, with bubblewrap's namespaces, a seccomp filter and resource limits.

The sandbox has no network, no user files, no environment variables of ours and no other processes, only one small
temporary folder in memory. The program can create threads but no processes, so killing it leaves nothing behind, and
the limits of one process cover everything it does.

As root, the program gets its own user id, which owns nothing; as a plain user, it gets a user namespace. If bubblewrap
does not work here, nothing is run, unless the caller asks for `rlimits` (only limits: the program sees the user's files
and the network) or `none`.

Not covered: the names of empty files in `/tmp` use memory that is not counted (up to 750 MB for a program that creates
nothing else), and with `rlimits` or `none` a program may leave its process group and keep running.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_gauntlet.errors import as_given
from llmfoundry_gauntlet.scoring.code.tools import bubblewraps, install

# System call numbers by machine (Linux, asm/unistd.h).
FORKS: dict[str, tuple[int, ...]] = {  # fork, vfork
    'x86_64': (57, 58),
    'aarch64': (),
}
SHARED_BETWEEN_PROCESSES = {  # System V shared memory, semaphores, messages; mq_open
    'x86_64': (29, 30, 31, 64, 65, 66, 68, 69, 70, 240),
    'aarch64': (180, 186, 187, 188, 189, 190, 191, 192, 193, 194, 195, 196, 197),
}
OTHER_PROCESSES = {  # ptrace, process_vm_readv, process_vm_writev, kcmp
    'x86_64': (101, 310, 311, 312),
    'aarch64': (117, 270, 271, 272),
}
PIDFDS = {  # pidfd_send_signal, pidfd_open, pidfd_getfd
    'x86_64': (424, 434, 438),
    'aarch64': (424, 434, 438),
}
MOUNTS = {  # mounts, roots, namespaces
    'x86_64': (155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 433, 442),
    'aarch64': (39, 40, 41, 51, 97, 268, 428, 429, 430, 431, 432, 433, 442),
}
KERNEL = {  # keys, perf, memfd, bpf, userfaultfd, io_uring
    'x86_64': (248, 249, 250, 298, 319, 321, 323, 425, 426, 427, 447),
    'aarch64': (217, 218, 219, 241, 279, 280, 282, 425, 426, 427, 447),
}
MACHINE = {  # the machine itself: logs, accounting, swap, ports, modules, quotas, restart, files by handle
    'x86_64': (103, 134, 139, 153, 163, 167, 168, 169, 172, 173, 175, 176, 179, 246, 304, 313, 320),
    'aarch64': (60, 89, 116, 104, 105, 106, 142, 224, 225, 265, 273, 294),
}
DENIED_GROUPS = (FORKS, SHARED_BETWEEN_PROCESSES, OTHER_PROCESSES, MOUNTS, KERNEL, MACHINE, PIDFDS)
DENIED = {machine: tuple(number for group in DENIED_GROUPS for number in group[machine]) for machine in FORKS}
CLONE = {'x86_64': 56, 'aarch64': 220}
CLONE3 = 435
SOCKET = {'x86_64': 41, 'aarch64': 198}
AF_UNIX = 1  # other families reach beyond network namespaces (vsock), or hold memory that no process accounts for
AUDIT_ARCH = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
X32_BIT = 0x40000000
CLONE_THREAD = 0x00010000
NEW_NAMESPACES = 0x7E020080

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (little-endian)
ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
AUTO, BUBBLEWRAP, RLIMITS, NONE = 'auto', 'bubblewrap', 'rlimits', 'none'
MIB = 2**20
INSIDE = '/gauntlet'  # folder of our files in a sandbox; shell scripts use the variable FILES
SYSTEM = ('/bin', '/sbin', '/lib', '/lib32', '/lib64', '/etc/alternatives', '/etc/ld.so.cache', '/nix/store')
FIRST_UID, NUM_UIDS = 20_000, 45_000  # all within the 65,536 ids that a container usually has
# Folders under /usr that may hold a user's files, or differ between machines.
NOT_THE_SYSTEMS = (
    '/usr/src',
    '/usr/local/src',
    '/usr/lib/python3/dist-packages',
    '/usr/local/lib/python3*/dist-packages',
    '/usr/local/lib/python3*/site-packages',
)
PROBE_SECONDS = 20
MAX_MESSAGE = 2000  # bytes of a sandbox's error output


LATE = 'not done in time'


class Outcome(NamedTuple):
    """The result of a completion: passed or failed. The reason contains no text of the completion or of any file."""

    passed: bool
    reason: str | None


class CannotRun(Exception):
    """Raised if a completion cannot be run because of its problem or this machine."""


class SandboxError(Exception):
    """Raised if no program can run properly on this machine."""


class Undecided(Exception):
    """Raised if the result of a completion is undecided; it counts as wrong."""


def seccomp_filter(*, may_fork: bool, machine: str | None = None) -> bytes:
    """Return the filter for this machine. Without `may_fork` a program stays one process; threads are allowed.

    Raise SandboxError for a machine whose system calls are unknown.
    """
    machine = machine or platform.machine()
    if machine not in DENIED:
        raise SandboxError(f'programs cannot be confined on {machine}; allowed: {", ".join(DENIED)}')
    code: list[Instruction] = []

    # The numbers of the x32 interface are another set of the same calls.
    if machine == 'x86_64':
        code += [
            (JUMP_GREATER_EQUAL, 0, 1, X32_BIT),
            (RETURN, 0, 0, KILL),
        ]

    allowed = FORKS[machine] if may_fork else ()
    for number in DENIED[machine]:
        if number not in allowed:
            code += [
                (JUMP_EQUAL, 0, 1, number),
                (RETURN, 0, 0, DENY | errno.EPERM),
            ]

    # clone3 takes its flags from memory, which a filter cannot read; on ENOSYS glibc falls back to clone.
    code += [
        (JUMP_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, DENY | errno.ENOSYS),
    ]

    # clone makes threads or, with `may_fork`, processes in the same namespaces.
    code += [
        (JUMP_EQUAL, 0, 3, CLONE[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_SET, 0, 1, NEW_NAMESPACES) if may_fork else (JUMP_SET, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, DENY | errno.EPERM),
    ]

    # Sockets of one family.
    code += [
        (LOAD, 0, 0, NUMBER),
        (JUMP_EQUAL, 0, 3, SOCKET[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_EQUAL, 1, 0, AF_UNIX),
        (RETURN, 0, 0, DENY | errno.EAFNOSUPPORT),
    ]
    return bpf_program(machine, [*code, (RETURN, 0, 0, ALLOW)])


def bpf_program(machine: str, code: Sequence[Instruction]) -> bytes:
    """Return a filter whose `code` starts with a call's number loaded; calls of other architectures are killed."""
    start: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    return b''.join(struct.pack('<HBBI', *instruction) for instruction in [*start, *code])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """The limits of one program; with `counts_reserved` memory is address space, otherwise writable memory only."""

    cpu_seconds: int = 5
    memory_bytes: int = 1024 * MIB
    counts_reserved: bool = True
    file_bytes: int = 32 * MIB
    tmp_bytes: int = 64 * MIB
    threads: int = 64
    open_files: int = 64


@dataclass(frozen=True, slots=True)
class Mount:
    """One of our files or folders inside the sandbox: a path or an open file's descriptor, readable at `target`."""

    source: str | int
    target: str
    is_program: bool = False

    def path(self, folder: str | None) -> str:
        """Return the path for a program: the target, or without isolation a path in a private folder."""
        if folder is None or self.source == self.target:
            return self.target
        return os.path.join(folder, os.path.basename(self.target))

    def put_into(self, folder: str) -> None:
        """Copy or link the source into `folder`, which stands in for the mount if there is no isolation."""
        path = self.path(folder)
        if isinstance(self.source, str):
            if path != self.source:
                os.symlink(self.source, path)
            return
        with open(path, 'wb') as stream:
            stream.write(os.pread(self.source, os.fstat(self.source).st_size, 0))
        os.chmod(path, 0o500 if self.is_program else 0o400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program with its arguments; a Mount among these becomes its path. `hidden` folders appear empty."""

    arguments: tuple[str | Mount, ...]
    mounts: tuple[Mount, ...] = ()
    hidden: tuple[str, ...] = ()
    limits: ProgramLimits = ProgramLimits()
    may_fork: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors of the mounts."""
        return [mount.source for mount in self.mounts if isinstance(mount.source, int)]


class Running:
    """A started program. `stop` leaves nothing of it behind.

    `errors` is the descriptor of messages from before the program started, empty if the sandbox was set up.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: int, folder: str | None) -> None:
        self.process = process
        self._errors = errors
        self._folder = folder

    def check_started(self) -> None:
        """Raise OSError if the sandbox could not be set up, which makes the program's result meaningless."""
        message = os.pread(self._errors, MAX_MESSAGE, 0).decode(errors='replace').strip()
        if message:
            raise OSError(message.splitlines()[-1])

    def wait(self, seconds: float) -> int:
        """Return the exit status, negative for a signal. Raise subprocess.TimeoutExpired."""
        ended = os.pidfd_open(self.process.pid)
        try:
            if not select.select([ended], [], [], max(0.0, seconds))[0]:
                raise subprocess.TimeoutExpired(self.process.args, seconds)
        finally:
            os.close(ended)
        return self.process.wait()

    def _kill_children(self) -> None:
        """Kill processes that bubblewrap may have started before it asked to die with its parent."""
        pid = self.process.pid
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGSTOP)  # so that it starts no more children
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            for child in Path(f'/proc/{pid}/task/{pid}/children').read_text().split():
                os.kill(int(child), signal.SIGKILL)

    def stop(self) -> None:
        """Kill the program and everything that belongs to it, and wait until it is gone."""
        if self.process.returncode is None:
            self._kill_children()
        if self.process.returncode is None or self._folder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._errors)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A way to run programs: `level` is the isolation; as root, each program gets its own user id.

    `bubblewrap` is the path of its executable.
    """

    level: str
    as_root: bool = False
    bubblewrap: str = 'bwrap'

    @property
    def is_isolated(self) -> bool:
        """Return whether programs cannot see the user's files."""
        return self.level == BUBBLEWRAP

    def __str__(self) -> str:
        return {
            BUBBLEWRAP: 'bubblewrap, no network, no files of yours',
            RLIMITS: 'only limits: programs see your files and the network',
            NONE: 'none: programs run as you',
        }[self.level]

    def start(
        self,
        command: Command,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Running:
        """Start a program in its own process group; descriptors keep their numbers inside."""
        with contextlib.ExitStack() as after_failure, contextlib.ExitStack() as always:
            errors = in_memory(b'')
            after_failure.callback(os.close, errors)
            folder = None
            if not self.is_isolated:
                folder = tempfile.mkdtemp(prefix='gauntlet-')
                after_failure.callback(shutil.rmtree, folder, ignore_errors=True)
            opened: list[int] = []
            always.callback(close_all, opened)
            process = subprocess.Popen(
                self._line(command, folder, opened),
                stdin=stdin,
                stdout=stdout,
                stderr=errors,
                cwd=folder or '/',
                env={**environment_variables(folder), **command.environment},
                pass_fds=[*pass_fds, *opened, *command.descriptors],
                start_new_session=True,
            )
            after_failure.pop_all()
        return Running(process, errors, folder)

    def _line(self, command: Command, folder: str | None, opened: list[int]) -> list[str]:
        """Return the whole command line; append the descriptors it needs to `opened`."""
        if folder is not None:
            for mount in command.mounts:
                mount.put_into(folder)
        arguments = [part.path(folder) if isinstance(part, Mount) else part for part in command.arguments]
        without_errors = ['sh', '-c', 'exec "$@" 2>/dev/null', 'sh', *arguments]
        if self.level == NONE:
            return without_errors
        counts_threads = self.is_isolated and self._has_threads()
        limited = [*prlimit(command.limits, counts_threads=counts_threads), *without_errors]
        if self.level == RLIMITS:
            return limited

        filter_descriptor = in_memory(seccomp_filter(may_fork=command.may_fork))
        opened.append(filter_descriptor)
        options = [*self._options(command), '--seccomp', str(filter_descriptor)]
        options_descriptor = in_memory(b''.join(option.encode() + b'\0' for option in options))
        opened.append(options_descriptor)
        return [self.bubblewrap, '--args', str(options_descriptor), '--', *self._user(), *limited]

    def _options(self, command: Command) -> Iterator[str]:
        """Yield bubblewrap's options; later ones may depend on the folders of earlier ones."""
        # Processes: they end with this one, and have namespaces and capabilities of their own.
        yield from ('--die-with-parent', '--new-session')
        yield from ('--unshare-ipc', '--unshare-pid', '--unshare-net')
        yield from ('--unshare-uts', '--hostname', 'sandbox')
        yield '--unshare-cgroup-try'
        yield from ('--cap-drop', 'ALL')
        if self.as_root:
            yield from ('--cap-add', 'CAP_SETUID', '--cap-add', 'CAP_SETGID')
        else:
            yield from ('--unshare-user', '--uid', str(FIRST_UID), '--gid', str(FIRST_UID))

        # The system, to be read only, and one folder to write to.
        yield from ('--perms', '0755', '--dir', '/etc')
        yield from system_mounts()
        yield from ('--proc', '/proc')
        yield from ('--size', '4096', '--tmpfs', '/proc/1', '--remount-ro', '/proc/1')
        yield from ('--remount-ro', '/proc')
        yield from ('--dev', '/dev', '--remount-ro', '/dev')
        yield from ('--perms', '1777', '--size', str(command.limits.tmp_bytes), '--tmpfs', '/tmp')

        # Our files, below folders that the user of the program may enter.
        folders = {parent for mount in command.mounts for parent in parents(mount.target)}
        for folder in sorted(folders):
            yield from ('--perms', '0755', '--dir', folder)
        for mount in command.mounts:
            if isinstance(mount.source, int):
                mode = '0555' if mount.is_program else '0444'
                yield from ('--perms', mode, '--ro-bind-data', str(mount.source), mount.target)
            else:
                yield from ('--ro-bind', mount.source, mount.target)
        for folder in command.hidden:
            yield from ('--size', '4096', '--tmpfs', folder, '--remount-ro', folder)
        yield from ('--remount-ro', '/', '--chdir', '/tmp')

    def _has_threads(self) -> bool:
        """Return whether a program's threads are counted separately, by user or by namespace (Linux 5.14)."""
        major, minor, *_ = platform.release().split('-')[0].split('.')  # 6.8.0-45-generic
        return self.as_root or (int(major), int(minor)) >= (5, 14)

    def _user(self) -> list[str]:
        """Return the command that, as root, runs a program as its own unprivileged user, with its own thread limit."""
        if not self.as_root:
            return []
        user = FIRST_UID + secrets.randbelow(NUM_UIDS)
        return ['setpriv', f'--reuid={user}', f'--regid={user}', '--clear-groups', '--inh-caps=-all', '--']


def prlimit(limits: ProgramLimits, *, counts_threads: bool) -> list[str]:
    """Return the command that sets limits."""
    memory = 'as' if limits.counts_reserved else 'data'
    line = [
        'prlimit',
        f'--{memory}={limits.memory_bytes}',
        f'--cpu={limits.cpu_seconds}',
        '--core=0',
        f'--fsize={limits.file_bytes}',
        f'--nofile={limits.open_files}',
    ]
    if counts_threads:
        line.append(f'--nproc={limits.threads}')
    return [*line, '--']


@functools.cache
def system_mounts() -> tuple[str, ...]:
    """Return bubblewrap options for the system's programs and libraries."""
    options = ['--ro-bind', '/usr', '/usr']
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            options += ['--symlink', os.readlink(path), name]
        elif path.exists():
            options += ['--ro-bind', name, name]
    for pattern in NOT_THE_SYSTEMS:
        for folder in Path('/').glob(pattern.lstrip('/')):
            if folder.is_dir() and not folder.is_symlink():
                options += ['--size', '4096', '--tmpfs', str(folder), '--remount-ro', str(folder)]
    return tuple(options)


def parents(target: str) -> list[str]:
    """Return the folders above a path that the system's mounts do not include."""
    return [str(folder) for folder in Path(target).parents if str(folder) != '/' and not folder.is_relative_to('/usr')]


def environment_variables(folder: str | None) -> dict[str, str]:
    """Return the environment variables of a program; `folder` is its private folder if there is no isolation."""
    own = folder or '/tmp'
    path = '/usr/local/bin:/usr/bin:/bin'
    return {'PATH': path, 'HOME': own, 'TMPDIR': own, 'LANG': 'C.UTF-8', 'FILES': folder or INSIDE}


def in_memory(content: bytes) -> int:
    """Return a descriptor of a file in memory with this content."""
    descriptor = os.memfd_create('gauntlet', os.MFD_CLOEXEC)
    try:
        with open(descriptor, 'wb', closefd=False) as stream:
            stream.write(content)
    except OSError:
        os.close(descriptor)
        raise
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def close_all(descriptors: list[int]) -> None:
    """Close all descriptors in the list."""
    for descriptor in descriptors:
        os.close(descriptor)


@contextlib.contextmanager
def file_in_memory(content: bytes) -> Iterator[int]:
    """Yield the descriptor of a file in memory and close it afterwards."""
    descriptor = in_memory(content)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def started(sandbox: Sandbox, command: Command, **descriptors: Any) -> Iterator[Running]:
    """Yield a running program, with descriptors as for `start`; nothing of it is left afterwards."""
    running = sandbox.start(command, **descriptors)
    try:
        yield running
    finally:
        running.stop()


@functools.cache
def find_sandbox(asked: str = AUTO) -> Sandbox:
    """Return the tested sandbox of this machine. Raise SandboxError, naming what is missing, if there is none."""
    if asked == NONE:
        return Sandbox(NONE)
    if not shutil.which('prlimit'):
        raise SandboxError(f'code tasks: prlimit is missing; install util-linux, or allow {as_given("sandbox", NONE)}')
    if asked == RLIMITS:
        return Sandbox(RLIMITS)
    if not sys.platform.startswith('linux'):
        raise SandboxError(f'code tasks: programs are confined only on Linux; {allow_hint()}')
    if not bubblewraps():
        raise SandboxError(f'code tasks: bubblewrap is missing; {install("bubblewrap", "code")}, {allow_hint()}')
    failures = []
    for bubblewrap in bubblewraps():
        for as_root in (True, False) if os.geteuid() == 0 else (False,):
            sandbox = Sandbox(BUBBLEWRAP, as_root=as_root, bubblewrap=bubblewrap)
            failure = try_out(sandbox)
            if failure is None:
                return sandbox
            failures.append(failure)
    raise SandboxError(
        f'code tasks: bubblewrap cannot confine programs here ({"; ".join(dict.fromkeys(failures))}); allow namespaces '
        '(sysctl kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0, or a '
        f'container with CAP_SYS_ADMIN), {allow_hint()}'
    )


def allow_hint() -> str:
    """Return how to run programs with less isolation, in the words of who gave the settings."""
    limited, none = as_given('sandbox', RLIMITS), as_given('sandbox', NONE)
    return f'or allow programs without isolation: {limited} (only limits), {none}'


def try_out(sandbox: Sandbox) -> str | None:
    """Return why a sandbox cannot be used, None if it can: a shell runs in it and cannot start a second process."""
    sees_system_only = 'test -e /usr && test ! -e /home && test ! -e /root'
    forks = '(:)'
    for script, works in ((sees_system_only, True), (forks, False)):
        command = Command(arguments=('sh', '-c', script))
        try:
            with started(sandbox, command) as running:
                status = running.wait(PROBE_SECONDS)
                running.check_started()
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if (status == 0) != works:
            return f'{script!r} went wrong'
    return None
