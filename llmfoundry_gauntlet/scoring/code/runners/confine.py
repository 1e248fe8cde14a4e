"""Replace bubblewrap if it is not installed: `confine.py --args FD --starter PID -- COMMAND...`.

It is process 1 of namespaces that `unshare` has created, and does what bubblewrap's options say: its own root, no
capabilities, a seccomp filter. Then it starts COMMAND, waits for it, and exits with its status, or 128 plus the number
of a signal. An error before COMMAND starts is printed in one line, and COMMAND is not run.

The options are in a file, each ended by a zero byte. PID is the process that started all this: if it is gone, or shares
one of the requested namespaces, nothing is run. Of bubblewrap this does what `Sandbox` uses, with three differences:
folders in memory have a file limit too, /dev has neither terminals nor /dev/core, and the only network interface stays
down. It starts for every program, so it imports little.
"""

import ctypes
import errno
import os
import sys

NAMESPACES = {f'--unshare-{name}': name for name in ('ipc', 'net', 'pid', 'user', 'uts')}
OPTIONS = {  # with the number of their arguments
    **dict.fromkeys((*NAMESPACES, '--unshare-cgroup-try', '--die-with-parent', '--new-session'), 0),
    **dict.fromkeys(('--uid', '--gid', '--hostname', '--chdir', '--cap-drop', '--cap-add', '--seccomp'), 1),
    **dict.fromkeys(('--perms', '--size', '--dir', '--tmpfs', '--proc', '--dev', '--remount-ro'), 1),
    **dict.fromkeys(('--ro-bind', '--symlink', '--ro-bind-data'), 2),
}
CAPABILITIES = {'CAP_SETGID': 6, 'CAP_SETUID': 7}
DEVICES = ('null', 'zero', 'full', 'random', 'urandom')
LINKS = {'fd': '/proc/self/fd', 'stdin': '/proc/self/fd/0', 'stdout': '/proc/self/fd/1', 'stderr': '/proc/self/fd/2'}
BASE, OLD, NEW = '/tmp', '/oldroot', '/newroot'  # BASE becomes the root for a while, and holds the other two
FEWEST_FILES, BYTES_PER_FILE = 64, 4096
ESCAPES = {b'\\040': b' ', b'\\011': b'\t', b'\\012': b'\n', b'\\043': b'#', b'\\134': b'\\'}  # in mountinfo

READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, REMOUNT = 1, 2, 4, 8, 32
BIND, RECURSIVE, PRIVATE, DETACH = 0x1000, 0x4000, 0x40000, 2
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, READ_BOUNDING, DROP_BOUNDING = 1, 4, 22, 23, 24
SET_NO_NEW_PRIVILEGES, FILTER = 38, 2
CAPABILITY_VERSION, MOST_CAPABILITIES = 0x20080522, 64
SIGINT, SIGKILL, SIGPIPE, SIGCHLD, SIGXFSZ = 2, 9, 13, 17, 25

LIBC = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (('length', ctypes.c_ushort), ('code', ctypes.c_char_p))


def call(
    name: str, *arguments: int | str | ctypes.Array[ctypes.c_uint32] | ctypes.Array[ctypes.c_char_p] | None
) -> None:
    """Call a function of the C library. Raise OSError."""
    encoded = [os.fsencode(value) if isinstance(value, str) else value for value in arguments]
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in encoded]
    if getattr(LIBC, name)(*values) == -1:
        said = ' '.join(value for value in arguments if isinstance(value, str))
        raise OSError(ctypes.get_errno(), f'{name}: {os.strerror(ctypes.get_errno())}', said)


def read_all(descriptor: int) -> bytes:
    """Return the rest of a descriptor's content and close it."""
    with open(descriptor, 'rb') as stream:
        return stream.read()


def parse(text: bytes) -> list[tuple[str, list[str]]]:
    """Return options with their arguments, in order. Raise ValueError."""
    words = iter(os.fsdecode(text).split('\0')[:-1])
    operations = []
    for name in words:
        if name not in OPTIONS:
            raise ValueError(f'unknown option {name!r}')
        arguments = [word for _, word in zip(range(OPTIONS[name]), words, strict=False)]
        if len(arguments) < OPTIONS[name]:
            raise ValueError(f'{name} needs {OPTIONS[name]} arguments')
        operations.append((name, arguments))
    return operations


def parent_of(pid: str) -> str:
    """Return the process that started another, in the numbering of the mounted /proc."""
    with open(f'/proc/{pid}/stat') as stream:
        return stream.read().rpartition(')')[2].split()[1]


def check_starter(starter: str, operations: list[tuple[str, list[str]]]) -> None:
    """Raise OSError unless `starter` is alive, this process dies with it, and it shares no namespace with it."""
    call('prctl', SET_DEATH_SIGNAL, SIGKILL, 0, 0, 0)
    if os.getpid() != 1:
        raise OSError('this is not the first process of a namespace')
    if parent_of(parent_of('self')) != starter:
        raise OSError(f'process {starter} is gone')
    asked = [name for name, _ in operations]
    for name in ('mnt', *(NAMESPACES[name] for name in asked if name in NAMESPACES)):
        try:
            theirs = os.readlink(f'/proc/{starter}/ns/{name}')
        except PermissionError:
            if '--unshare-user' in asked:
                return  # this is a user namespace, which has no power over those of others
            raise
        if os.readlink(f'/proc/self/ns/{name}') == theirs:
            raise OSError(f'the {name} namespace is not new')


def make_folder(path: str, perms: int = 0o755) -> None:
    """Create a folder and its parents."""
    if not os.path.isdir(path):
        os.makedirs(path)
        os.chmod(path, perms)


def make_file(path: str) -> None:
    """Create an empty file to mount upon."""
    make_folder(os.path.dirname(path))
    if not os.path.exists(path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))


def restrict(path: str, flags: int = READ_ONLY | NO_SUID | NO_DEVICES) -> None:
    """Make a mount read-only. Its flags are kept: a user namespace may not remove them."""
    kept = os.statvfs(path).f_flag & NO_PROGRAMS
    call('mount', None, path, None, REMOUNT | BIND | flags | kept, None)


def mounts_below(path: str) -> list[str]:
    """Return the mounts below a path, without the path itself."""
    with open(f'{OLD}/proc/self/mountinfo', 'rb') as stream:
        points = [line.split(b' ', 5)[4] for line in stream]
    for escaped, character in ESCAPES.items():
        points = [point.replace(escaped, character) for point in points]
    return [point for point in map(os.fsdecode, points) if point.startswith(path + '/')]


def bind(source: str, path: str) -> None:
    """Mount a path of the old root, with everything mounted below it, read-only."""
    if os.path.isdir(source):
        make_folder(path)
    else:
        make_file(path)
    call('mount', source, path, None, BIND | RECURSIVE, None)
    restrict(path)
    for point in mounts_below(os.path.realpath(path)):
        try:
            restrict(point)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.ENOENT, errno.EINVAL):
                raise  # the others are out of reach, below another mount or a closed folder, and so for programs


def bind_data(descriptor: int, path: str, perms: int) -> None:
    """Mount the content of a descriptor as a read-only file."""
    with open('/data', 'xb') as stream:
        stream.write(read_all(descriptor))
    os.chmod('/data', perms)
    make_file(path)
    call('mount', '/data', path, None, BIND, None)
    restrict(path)
    os.unlink('/data')


def mount_memory(path: str, perms: int = 0o755, size: int | None = None) -> None:
    """Mount an empty folder in memory. A byte limit is also a file limit, as file names use memory too."""
    make_folder(path)
    data = f'mode={perms:o}'
    if size is not None:
        data += f',size={size},nr_inodes={max(FEWEST_FILES, size // BYTES_PER_FILE)}'
    call('mount', 'tmpfs', path, 'tmpfs', NO_SUID | NO_DEVICES, data)


def mount_devices(path: str) -> None:
    """Mount the devices that any program may expect, and no others."""
    mount_memory(path, size=FEWEST_FILES * BYTES_PER_FILE)
    for name in DEVICES:
        make_file(f'{path}/{name}')
        call('mount', f'{OLD}/dev/{name}', f'{path}/{name}', None, BIND, None)
        restrict(f'{path}/{name}', READ_ONLY | NO_SUID | NO_PROGRAMS)
    for name, target in LINKS.items():
        os.symlink(target, f'{path}/{name}')
    make_folder(f'{path}/shm')


def perform(name: str, arguments: list[str], perms: int, size: int | None) -> None:
    """Run one step of building the root; other options are ignored."""
    path = NEW + arguments[-1] if arguments else NEW
    if name == '--dir':
        make_folder(path, perms)
    elif name == '--symlink':
        make_folder(os.path.dirname(path))
        os.symlink(arguments[0], path)
    elif name == '--ro-bind':
        bind(arguments[0], path)
    elif name == '--ro-bind-data':
        bind_data(int(arguments[0]), path, perms)
    elif name == '--tmpfs':
        mount_memory(path, perms, size)
    elif name == '--proc':
        make_folder(path)
        call('mount', 'proc', path, 'proc', NO_SUID | NO_DEVICES | NO_PROGRAMS, None)
    elif name == '--dev':
        mount_devices(path)
    elif name == '--remount-ro':
        restrict(path.rstrip('/'))


def build_root(operations: list[tuple[str, list[str]]]) -> None:
    """Create the root that the options describe, and remove the old one."""
    for name, arguments in operations:
        if name == '--ro-bind':
            arguments[0] = OLD + os.path.realpath(arguments[0], strict=True)
    call('mount', None, '/', None, PRIVATE | RECURSIVE, None)
    call('mount', 'tmpfs', BASE, 'tmpfs', NO_SUID | NO_DEVICES, 'mode=0755')
    os.mkdir(BASE + OLD)
    call('pivot_root', BASE, BASE + OLD)
    os.chdir('/')
    mount_memory(NEW)
    perms, size = 0o755, None
    for name, arguments in operations:
        if name == '--perms':
            perms = int(arguments[0], 8)
        elif name == '--size':
            size = int(arguments[0])
        else:
            perform(name, arguments, perms, size)
            perms, size = 0o755, None
    call('umount2', OLD, DETACH)
    os.chdir(NEW)
    call('pivot_root', '.', '.')
    call('umount2', '.', DETACH)
    os.chdir('/')


def confine(capabilities: int, code: bytes | None) -> None:
    """Restrict this process to these capabilities and the system calls of a filter."""
    for number in range(MOST_CAPABILITIES):
        if LIBC.prctl(READ_BOUNDING, number, 0, 0, 0) == 1 and not capabilities >> number & 1:
            call('prctl', DROP_BOUNDING, number, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    call('capset', header, (ctypes.c_uint32 * 6)(capabilities, capabilities, 0, 0, 0, 0))  # ambient ones go with them
    call('prctl', SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if code is not None:
        program = Program(len(code) // 8, code)
        call('prctl', SET_SECCOMP, FILTER, ctypes.addressof(program), 0, 0)


def become(command: list[str]) -> None:
    """Replace this process by a command, with the signals that Python has changed restored."""
    LIBC.signal(SIGPIPE, None)
    LIBC.signal(SIGXFSZ, None)
    call('execvp', command[0], (ctypes.c_char_p * (len(command) + 1))(*map(os.fsencode, command)))


def wait_for(child: int) -> int:
    """Return the exit status of a child, or 128 plus the number of a signal. Other children are ignored."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    if len(arguments) < 6 or arguments[:5:2] != ['--args', '--starter', '--']:
        raise ValueError('usage: confine.py --args FD --starter PID -- COMMAND...')
    operations = parse(read_all(int(arguments[1])))
    settings = {name: (values or [''])[0] for name, values in operations}
    capabilities = sum({1 << CAPABILITIES[values[0]] for name, values in operations if name == '--cap-add'})
    code = read_all(int(settings['--seccomp'])) if '--seccomp' in settings else None
    inherited = [int(name) for name in os.listdir('/proc/self/fd')]
    umask = os.umask(0o022)
    check_starter(arguments[3], operations)
    build_root(operations)
    if '--hostname' in settings:
        call('sethostname', settings['--hostname'], len(os.fsencode(settings['--hostname'])))
    call('prctl', SET_DUMPABLE, 0, 0, 0, 0)
    LIBC.signal(SIGINT, None)
    LIBC.signal(SIGCHLD, None)
    gate, gate_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(gate_end)
        os.read(gate, 1)  # until this process's parent is confined
        if '--new-session' in settings:
            os.setsid()
        os.chdir(settings.get('--chdir', '/'))
        os.umask(umask)
        confine(capabilities, code)
        become(arguments[5:])
    confine(0, code)
    call('prctl', SET_DEATH_SIGNAL, SIGKILL, 0, 0, 0)
    for descriptor in (*inherited, gate, gate_end):  # nobody is to wait for an end of a pipe that this process has
        os.closerange(descriptor, descriptor + 1)
    return wait_for(child)


if __name__ == '__main__':
    try:
        status = main(sys.argv[1:])
    except (OSError, ValueError, LookupError) as error:
        os.write(2, f'confine: {error}\n'.encode(errors='replace'))
        status = 1
    os._exit(status)
