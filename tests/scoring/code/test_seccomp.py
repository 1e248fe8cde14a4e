"""The seccomp filter, run by a small interpreter of its instructions."""

from __future__ import annotations

import struct

import pytest

from llmfoundry_gauntlet.scoring.code.sandbox import (
    ALLOW,
    AUDIT_ARCH,
    CLONE,
    CLONE3,
    CLONE_THREAD,
    DENIED,
    KILL,
    SandboxError,
    seccomp_filter,
)

DENY = 0x00050001  # with EPERM
MACHINES = tuple(DENIED)
FORK_FLAGS, NEW_USER = 0x01200011, 0x10000000
FREE = {'x86_64': (0, 1, 9, 39, 59, 60, 202, 257), 'aarch64': (56, 63, 64, 93, 98, 172, 221, 222)}


def decision(code: bytes, number: int, architecture: int, argument: int = 0) -> int:
    data = struct.pack('<iIQQ', number, architecture, 0, argument)
    accumulator = place = 0
    program = list(struct.iter_unpack('<HBBI', code))
    while True:
        kind, yes, no, value = program[place]
        place += 1
        if kind == 0x06:
            return value
        if kind == 0x20:
            (accumulator,) = struct.unpack_from('<I', data, value)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[kind]
            place += yes if holds else no


@pytest.mark.parametrize('machine', MACHINES)
@pytest.mark.parametrize('may_fork', [False, True])
def test_denied_and_allowed_calls(machine: str, may_fork: bool):
    code = seccomp_filter(may_fork=may_fork, machine=machine)
    architecture = AUDIT_ARCH[machine]
    assert len(code) // 8 < 4096
    forks = {57, 58} if machine == 'x86_64' else set()
    for number in DENIED[machine]:
        assert decision(code, number, architecture) == (ALLOW if may_fork and number in forks else DENY)
    for number in FREE[machine]:
        assert decision(code, number, architecture) == ALLOW
    assert decision(code, CLONE3, architecture) == 0x00050026  # ENOSYS
    assert decision(code, CLONE[machine], architecture, FORK_FLAGS) == (ALLOW if may_fork else DENY)
    assert decision(code, CLONE[machine], architecture, FORK_FLAGS | NEW_USER) == DENY
    assert decision(code, CLONE[machine], architecture, CLONE_THREAD | 0x3D0F00) == ALLOW


def test_other_architectures_are_killed():
    code = seccomp_filter(may_fork=False, machine='x86_64')
    assert decision(code, 1, 0x40000003) == KILL  # i386
    assert decision(code, 0x40000000 + 57, AUDIT_ARCH['x86_64']) == KILL  # x32


def test_an_unknown_machine_is_an_error():
    with pytest.raises(SandboxError, match='cannot be confined on riscv64; allowed: x86_64, aarch64'):
        seccomp_filter(may_fork=False, machine='riscv64')
