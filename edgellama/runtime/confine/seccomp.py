"""seccomp-BPF (seccomp(2)): a filter that refuses a few system calls with EPERM, for every thread of the process."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from dataclasses import dataclass
from typing import Any

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_RET_ALLOW = 0x7FFF0000
_RET_EPERM = 0x00050000 | errno.EPERM
_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15
_JUMP_GREATER_EQUAL = 0x35
_RETURN = 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # struct seccomp_data
_X32_BIT = 0x40000000
_AF_UNIX = 1
_IO_URING_SETUP = 425  # the same on every architecture


@dataclass(frozen=True, slots=True)
class _Abi:
    """Numbers of an architecture: AUDIT_ARCH_* and of its system calls (syscalls(2))."""

    audit: int
    seccomp: int
    socket: int
    socketpair: int
    denied: tuple[int, ...]
    """execve, execveat, ptrace, process_vm_readv, process_vm_writev (and socketcall, which hides its family)."""


_GENERIC = (277, 198, 199, (221, 281, 117, 270, 271))
_ABIS = {
    "x86_64": _Abi(0xC000003E, 317, 41, 53, (59, 322, 101, 310, 311)),
    "i686": _Abi(0x40000003, 354, 359, 360, (11, 358, 26, 347, 348, 102)),
    "aarch64": _Abi(0xC00000B7, *_GENERIC),
    "riscv64": _Abi(0xC00000F3, *_GENERIC),
    "loongarch64": _Abi(0xC0000102, *_GENERIC),
    "armv7l": _Abi(0x40000028, 383, 281, 288, (11, 387, 26, 376, 377, 102)),
    "ppc64le": _Abi(0xC0000015, 358, 326, 333, (11, 362, 26, 351, 352, 102)),
}
_IN_32_BITS = {"x86_64": "i686", "aarch64": "armv7l", "armv8l": "armv7l", "armv6l": "armv7l"}

Instruction = tuple[int, int, int, int]


def restrict(libc: Any, *, local_sockets: bool) -> list[str]:
    """Refuse sockets (but local ones where allowed), other programs and other processes; returns what holds.

    Needs no_new_privs. Nothing on an architecture whose numbers are not known here.
    """
    abi = _abi()
    if abi is None or sys.byteorder != "little":
        return []
    code = program(abi, local_sockets=local_sockets)
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
    # struct sock_fprog: u16 length, then a pointer at its natural alignment
    fprog = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(filters)))
    set_filter, all_threads = 1, 1  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC
    done = libc.syscall(abi.seccomp, set_filter, all_threads, ctypes.byref(fprog)) == 0
    if not done:
        done = libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(fprog), 0, 0) == 0
    return ["no-network", "no-exec"] if done else []


def program(abi: _Abi, *, local_sockets: bool) -> list[Instruction]:
    """The filter. Calls of a foreign architecture (int 0x80, x32) are refused as a whole."""
    code = [_load(_ARCHITECTURE_AT), (_JUMP_EQUAL, 1, 0, abi.audit), _refuse(), _load(_NUMBER_AT)]
    if abi is _ABIS["x86_64"]:
        code += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), _refuse()]
    denied = (*abi.denied, _IO_URING_SETUP, *(() if local_sockets else (abi.socket, abi.socketpair)))
    for number in denied:
        code += [(_JUMP_EQUAL, 0, 1, number), _refuse()]
    if local_sockets:
        for number in (abi.socket, abi.socketpair):
            code += [
                (_JUMP_EQUAL, 0, 3, number),
                _load(_ARGUMENTS_AT),
                (_JUMP_EQUAL, 1, 0, _AF_UNIX),
                _refuse(),
                _load(_NUMBER_AT),
            ]
    return [*code, (_RETURN, 0, 0, _RET_ALLOW)]


def _abi() -> _Abi | None:
    if sys.platform == "win32":
        return None
    machine = os.uname().machine
    if sys.maxsize <= 2**32:  # a 32-bit Python, perhaps on a 64-bit kernel
        machine = _IN_32_BITS.get(machine, machine)
    return _ABIS.get({"i386": "i686", "i586": "i686", "amd64": "x86_64"}.get(machine, machine))


def _load(offset: int) -> Instruction:
    return (_LOAD, 0, 0, offset)


def _refuse() -> Instruction:
    return (_RETURN, 0, 0, _RET_EPERM)
