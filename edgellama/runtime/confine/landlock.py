"""Landlock (landlock(7)): after it, a process opens only files beneath the paths of its rules."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_CHANGE_DIR = 0x1FF0  # remove and make entries of every kind
_REFER = 1 << 13  # from ABI 2 on
_TRUNCATE = 1 << 14  # 3
_IOCTL_DEVICE = 1 << 15  # 5
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_BIND_CONNECT_TCP = 0b11  # 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11  # 6

READ = _READ_FILE | _READ_DIR
WRITE = READ | _WRITE_FILE | _CHANGE_DIR | _REFER | _TRUNCATE
DEVICE = READ | _WRITE_FILE | _TRUNCATE | _IOCTL_DEVICE


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def restrict(libc: Any, rules: Iterable[tuple[Path, int]]) -> list[str]:
    """Allow only what the rules (path, READ or WRITE or DEVICE) say; returns what holds: `landlock` or nothing.

    It binds the calling thread and those it starts. Paths that do not exist are left out.
    """
    abi = libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if abi < 1:
        return []
    ruleset, size = _ruleset(abi)
    descriptor = libc.syscall(_CREATE, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    if descriptor < 0:
        return []
    try:
        for path, access in rules:
            _allow(libc, descriptor, path, access & ruleset.handled_access_fs)
        if libc.syscall(_RESTRICT, descriptor, 0) != 0:
            return []
    finally:
        os.close(descriptor)
    return ["landlock" if _alone() else "landlock (not for threads that ran before)"]


def _ruleset(abi: int) -> tuple[_Ruleset, int]:
    files = _EXECUTE | _WRITE_FILE | _READ_FILE | _READ_DIR | _CHANGE_DIR
    files |= (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0) | (_IOCTL_DEVICE if abi >= 5 else 0)
    ruleset = _Ruleset(files, _BIND_CONNECT_TCP if abi >= 4 else 0, _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0)
    return ruleset, 24 if abi >= 6 else 16 if abi >= 4 else 8


def _allow(libc: Any, ruleset: int, path: Path, access: int) -> None:
    try:
        descriptor = os.open(path, getattr(os, "O_PATH", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return
    try:
        rule = _PathBeneath(access if path.is_dir() else access & _OF_FILES, descriptor)
        libc.syscall(_ADD, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _alone() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208
    except OSError:
        return False
