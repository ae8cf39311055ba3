"""No orphans: the worker ends when its host does, however the host ends and whatever the worker is doing.

    Linux     prctl(PR_SET_PDEATHSIG, SIGKILL): the kernel kills the worker, also while native code holds the GIL
    macOS     a thread waits for kqueue's NOTE_EXIT
    Windows   the host puts the worker into a job object that the system kills when its last handle closes
    all       the worker's reader leaves when the pipe from the host ends

The kernel's signal goes off when the *thread* that started the worker ends, not the process. So it is armed only when
that was the host's main thread; else a thread of the worker waits for the end of the host's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

PARENT_VARIABLE = "EDGELLAMA_PARENT"
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_POLL_SECONDS = 0.5


# ---- in the host


def child_environment() -> dict[str, str]:
    """Variables to add to the worker's environment; call it in the thread that starts the worker."""
    lasting = threading.current_thread() is threading.main_thread()
    return {PARENT_VARIABLE: f"{os.getpid()}:{'main' if lasting else 'thread'}"}


class JobObject:
    """A Windows job object: its processes die when its handle closes, so at the latest with us.

    They also show no crash dialogue. The number of processes is not limited: the `python.exe` of a virtual environment
    starts the real one as its child. `kernel32` is the DLL or a stand-in.
    """

    def __init__(self, kernel32: Any = None) -> None:
        self._kernel32 = kernel32 if kernel32 is not None else _kernel32()
        self._handle: int | None = self._kernel32.CreateJobObjectW(None, None) or None
        if self._handle is None:
            raise OSError("CreateJobObjectW failed")
        limits = _ExtendedLimits()
        limits.basic.limit_flags = _KILL_ON_JOB_CLOSE | _DIE_ON_UNHANDLED_EXCEPTION
        if not self._kernel32.SetInformationJobObject(
            self._handle, _EXTENDED_LIMIT_INFORMATION, ctypes.byref(limits), ctypes.sizeof(limits)
        ):
            self.close()
            raise OSError("SetInformationJobObject failed")

    def add(self, pid: int) -> None:
        """Put a process into the job; raises OSError when the system refuses (it is gone, or in a job that forbids)."""
        handle = self._kernel32.OpenProcess(_PROCESS_SET_QUOTA | _PROCESS_TERMINATE, False, pid)
        if not handle:
            raise OSError(f"OpenProcess({pid}) failed")
        try:
            if not self._kernel32.AssignProcessToJobObject(self._handle, handle):
                raise OSError(f"AssignProcessToJobObject({pid}) failed")
        finally:
            self._kernel32.CloseHandle(handle)

    def close(self) -> None:
        """Close the handle, which ends every process in the job."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._kernel32.CloseHandle(handle)


def bind(pid: int) -> JobObject | None:
    """Tie a process just started to the life of this one, where that is the host's part (Windows).

    Keep what it returns for as long as the process shall live. None elsewhere, or where the system refuses: the end of
    the pipe still ends the worker.
    """
    if sys.platform != "win32":
        return None
    with contextlib.suppress(OSError):
        job = JobObject()
        try:
            job.add(pid)
        except OSError:
            job.close()
            raise
        return job
    return None


_KILL_ON_JOB_CLOSE = 0x2000
_DIE_ON_UNHANDLED_EXCEPTION = 0x400
_EXTENDED_LIMIT_INFORMATION = 9
_PROCESS_TERMINATE = 0x1
_PROCESS_SET_QUOTA = 0x100


class _BasicLimits(ctypes.Structure):
    """JOBOBJECT_BASIC_LIMIT_INFORMATION (winnt.h)."""

    _fields_ = (
        ("per_process_user_time_limit", ctypes.c_int64),
        ("per_job_user_time_limit", ctypes.c_int64),
        ("limit_flags", ctypes.c_uint32),
        ("minimum_working_set_size", ctypes.c_size_t),
        ("maximum_working_set_size", ctypes.c_size_t),
        ("active_process_limit", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority_class", ctypes.c_uint32),
        ("scheduling_class", ctypes.c_uint32),
    )


class _ExtendedLimits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION (winnt.h)."""

    _fields_ = (
        ("basic", _BasicLimits),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory_limit", ctypes.c_size_t),
        ("job_memory_limit", ctypes.c_size_t),
        ("peak_process_memory_used", ctypes.c_size_t),
        ("peak_job_memory_used", ctypes.c_size_t),
    )


def _kernel32() -> Any:
    if sys.platform != "win32":
        raise OSError("job objects are a thing of Windows")
    dll = ctypes.WinDLL("kernel32", use_last_error=True)
    handle = ctypes.c_void_p
    dll.CreateJobObjectW.restype = dll.OpenProcess.restype = handle
    dll.CreateJobObjectW.argtypes = [handle, ctypes.c_wchar_p]
    dll.OpenProcess.argtypes = [ctypes.c_uint32, ctypes.c_int, ctypes.c_uint32]
    dll.SetInformationJobObject.argtypes = [handle, ctypes.c_int, handle, ctypes.c_uint32]
    dll.AssignProcessToJobObject.argtypes = [handle, handle]
    dll.CloseHandle.argtypes = [handle]
    return dll


# ---- in the worker


def arm(environment: Mapping[str, str] = os.environ, libc: Any = None) -> bool:
    """Ask the kernel to kill this process with its host (Linux); call it first thing in the worker's main thread.

    Leaves at once when the host is gone already. Returns whether the kernel does it; else `watch` is needed.
    """
    expected, lasting = _parent(environment)
    armed = False
    if sys.platform == "linux" and lasting:
        libc = libc if libc is not None else ctypes.CDLL(None, use_errno=True)
        armed = libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0) == 0
    # The host may have died before prctl: then no signal ever comes.
    if expected is not None and sys.platform != "win32" and os.getppid() != expected:
        os._exit(0)
    return armed


def watch(environment: Mapping[str, str] = os.environ, on_death: Callable[[], None] | None = None) -> None:
    """Start the thread that ends this process (or calls `on_death`) when its host is gone."""
    expected, _ = _parent(environment)
    if expected is None or sys.platform == "win32":
        return
    leave = on_death if on_death is not None else _leave
    threading.Thread(target=_wait_for_death, args=(expected, leave), name="parent", daemon=True).start()


def _leave() -> None:
    os._exit(0)


def _parent(environment: Mapping[str, str]) -> tuple[int | None, bool]:
    """The host's process id and whether its main thread started us; None when nobody said."""
    pid, _, thread = environment.get(PARENT_VARIABLE, "").partition(":")
    return (int(pid), thread == "main") if pid.isascii() and pid.isdigit() else (None, False)


def _wait_for_death(pid: int, on_death: Callable[[], None]) -> None:
    if sys.platform == "darwin":
        _wait_kqueue(pid)
    elif sys.platform == "linux":
        _wait_pidfd(pid)
    while sys.platform != "win32" and os.getppid() == pid:
        time.sleep(_POLL_SECONDS)
    on_death()


def _wait_kqueue(pid: int) -> None:
    if sys.platform != "darwin":
        return
    with contextlib.suppress(OSError), contextlib.closing(select.kqueue()) as queue:
        event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD | select.KQ_EV_ONESHOT, select.KQ_NOTE_EXIT)
        queue.control([event], 1, None)


def _wait_pidfd(pid: int) -> None:
    if sys.platform != "linux":
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # kernels before 5.3, or the host is gone: polling tells
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    finally:
        os.close(descriptor)
