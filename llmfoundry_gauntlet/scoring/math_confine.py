"""Deny a process what arithmetic does not need: new processes, programs, connections, files to write.

sympy's parser evaluates model output as Python. It may use only a few names; this is the second line of defence.
Without seccomp filters in the kernel there is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal

from llmfoundry_gauntlet.scoring.code.sandbox import (
    ALLOW,
    DENY,
    JUMP_EQUAL,
    JUMP_SET,
    LOAD,
    RETURN,
    Instruction,
    bpf_program,
)

# System calls that are left, by machine (Linux, asm/unistd.h): memory, time, signals, and reading files.
ALLOWED = {
    'x86_64': (
        *(0, 1, 3, 5, 8, 16, 17, 72),  # read, write, close, fstat, lseek, ioctl, pread64, fcntl
        *(4, 6, 21, 79, 89, 217, 262, 267, 269, 332, 439),  # stat, lstat, access, getcwd, readlink, getdents64, ...
        *(9, 10, 11, 12, 25, 28),  # mmap, mprotect, munmap, brk, mremap, madvise
        *(13, 14, 15, 38, 131),  # rt_sigaction, rt_sigprocmask, rt_sigreturn, setitimer, sigaltstack
        *(24, 39, 96, 98, 102, 104, 107, 108, 186, 202, 204, 228, 229, 318, 334),  # time, ids, futex, getrandom
        *(60, 231),  # exit, exit_group
    ),
    'aarch64': (
        *(63, 64, 57, 80, 62, 29, 67, 25),
        *(79, 48, 17, 78, 61, 291, 439),
        *(222, 226, 215, 214, 216, 233),
        *(134, 135, 139, 103, 132),
        *(124, 172, 169, 165, 174, 175, 176, 177, 178, 98, 123, 113, 114, 278, 293),
        *(93, 94),
    ),
}
OPENAT = {'x86_64': 257, 'aarch64': 56}
THIRD_ARGUMENT = 32  # offset in struct seccomp_data: the flags of openat
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEATH_SIGNAL, SET_SECCOMP, NO_NEW_PRIVILEGES = 1, 22, 38
FILTER = 2


class Program(ctypes.Structure):
    """The C struct sock_fprog."""

    _fields_ = (('length', ctypes.c_ushort), ('code', ctypes.c_char_p))


def confine() -> None:
    """Confine this process, which then dies with the one that forked it."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if platform.machine() not in ALLOWED:
        return
    code = allow_list(platform.machine())
    program = Program(len(code) // 8, code)
    with contextlib.suppress(OSError):
        library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        library.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0)


def allow_list(machine: str) -> bytes:
    """Return a BPF program that denies all but the calls above, and opening files except for reading."""
    refuse = (RETURN, 0, 0, DENY | errno.EPERM)
    code: list[Instruction] = []
    for number in ALLOWED[machine]:
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    code += [
        (JUMP_EQUAL, 1, 0, OPENAT[machine]),
        refuse,
        (LOAD, 0, 0, THIRD_ARGUMENT),
        (JUMP_SET, 0, 1, WRITES),
        refuse,
        (RETURN, 0, 0, ALLOW),
    ]
    return bpf_program(machine, code)
