"""The system calls that a sandboxed program may not make, as a classic BPF program for seccomp.

A list of what is denied: kernels add harmless calls that interpreters come to need, and namespaces, an empty network
and the absence of capabilities are there besides. What is denied makes processes, leaves the limits of one process
(memory that belongs to no process, other processes' memory), or is a door into the kernel that no solution needs.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

from llmfoundry_gauntlet.scoring.code.outcomes import SandboxError

# Numbers by machine (Linux, asm/unistd.h); None where a machine has no such call.
DENIED = {
    'x86_64': (
        *(57, 58),  # fork, vfork
        *(29, 30, 31, 64, 65, 66, 68, 69, 70, 240),  # System V shared memory, semaphores, messages; mq_open
        *(101, 310, 311, 312),  # ptrace, process_vm_readv, process_vm_writev, kcmp
        *(155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 433, 442),  # mounts, roots, namespaces
        *(248, 249, 250, 298, 319, 321, 323, 425, 426, 427, 447),  # keys, perf, memfd, bpf, userfaultfd, io_uring
        *(103, 134, 139, 153, 163, 167, 168, 169, 172, 173, 175, 176, 179, 246, 304, 313, 320),  # the machine itself
        *(424, 434, 438),  # pidfd_send_signal, pidfd_open, pidfd_getfd
    ),
    'aarch64': (
        *(180, 186, 187, 188, 189, 190, 191, 192, 193, 194, 195, 196, 197),
        *(117, 270, 271, 272),
        *(39, 40, 41, 51, 97, 268, 428, 429, 430, 431, 432, 433, 442),
        *(217, 218, 219, 241, 279, 280, 282, 425, 426, 427, 447),
        *(60, 89, 116, 104, 105, 106, 142, 224, 225, 265, 273, 294),
        *(424, 434, 438),
    ),
}
FORKS = {'x86_64': (57, 58), 'aarch64': ()}
CLONE = {'x86_64': 56, 'aarch64': 220}
CLONE3 = 435
SOCKET = {'x86_64': 41, 'aarch64': 198}
AF_UNIX = 1  # others reach beyond network namespaces (vsock), or hold memory that is nobody's
AUDIT_ARCH = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
X32_BIT = 0x40000000
CLONE_THREAD = 0x00010000
NEW_NAMESPACES = 0x7E020080

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (little-endian)
ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def seccomp_filter(*, may_fork: bool, machine: str | None = None) -> bytes:
    """Return the filter for this machine. Without `may_fork` a program stays one process; threads are allowed.

    Raise SandboxError for a machine with unknown system calls.
    """
    machine = machine or platform.machine()
    if machine not in DENIED:
        raise SandboxError(f'programs cannot be confined on {machine}; allowed: {", ".join(DENIED)}')
    denied = [number for number in DENIED[machine] if not (may_fork and number in FORKS[machine])]
    code: list[Instruction] = []
    if machine == 'x86_64':
        code += [(JUMP_GREATER_EQUAL, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    for number in denied:
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, DENY | errno.EPERM)]
    # clone3 has its flags in memory, where a filter cannot look; glibc then falls back to clone.
    code += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, DENY | errno.ENOSYS), (JUMP_EQUAL, 0, 3, CLONE[machine])]
    code.append((LOAD, 0, 0, FIRST_ARGUMENT))
    code.append((JUMP_SET, 0, 1, NEW_NAMESPACES) if may_fork else (JUMP_SET, 1, 0, CLONE_THREAD))
    code.append((RETURN, 0, 0, DENY | errno.EPERM))
    code += [
        (LOAD, 0, 0, NUMBER),
        (JUMP_EQUAL, 0, 3, SOCKET[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_EQUAL, 1, 0, AF_UNIX),
        (RETURN, 0, 0, DENY | errno.EAFNOSUPPORT),
    ]
    return bpf_program(machine, [*code, (RETURN, 0, 0, ALLOW)])


def bpf_program(machine: str, code: Sequence[Instruction]) -> bytes:
    """Return a filter whose `code` starts with the number of a call loaded; other machines' calls are killed."""
    start: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    return b''.join(struct.pack('<HBBI', *instruction) for instruction in [*start, *code])
