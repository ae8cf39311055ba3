"""No orphans: hosts that die in every way, with workers that are idle, busy or stuck holding the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from edgellama.runtime import parent

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")

_HOST = """
import ctypes, os, subprocess, sys, threading, time
from edgellama.runtime import parent
child = '''
import ctypes, os, sys, threading, time
from edgellama.runtime import parent
armed = parent.arm()
if not armed:
    parent.watch()
print(os.getpid(), armed, flush=True)
if sys.argv[1] == "frozen":
    ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock
time.sleep(60)
'''
def start():
    command = [sys.executable, "-c", child, sys.argv[1]]
    kept.append(subprocess.Popen(command, env=os.environ | parent.child_environment()))
kept = []
if sys.argv[2] == "main":
    start()
else:
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
if sys.argv[3] == "exit":
    time.sleep(1.0)
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Any]:
    hosts: list[subprocess.Popen[str]] = []
    children: list[int] = []

    def run(state: str, thread: str, ending: str) -> tuple[subprocess.Popen[str], psutil.Process, bool]:
        command = [sys.executable, "-c", _HOST, state, thread, ending]
        host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        hosts.append(host)
        assert host.stdout is not None
        pid, armed = host.stdout.readline().split()
        children.append(int(pid))
        return host, psutil.Process(int(pid)), armed == "True"

    yield run
    for host in hosts:
        host.kill()
        host.wait()
        assert host.stdout is not None
        host.stdout.close()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def _ends(process: psutil.Process, within_seconds: float) -> bool:
    end = time.monotonic() + within_seconds
    while time.monotonic() < end:
        try:
            if process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@linux_only
@pytest.mark.parametrize("state", ["idle", "frozen"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_kernel_ends_the_worker_of_a_killed_host(start: Any, state: str, number: int) -> None:
    host, child, armed = start(state, "main", "wait")
    assert armed
    time.sleep(0.2)
    host.send_signal(number)
    assert _ends(child, 2.0)


@posix_only
def test_a_host_that_leaves_takes_its_worker_along(start: Any) -> None:
    _host, child, _armed = start("idle", "main", "exit")
    assert _ends(child, 10.0)


@posix_only
def test_a_worker_started_from_a_passing_thread_lives_on_but_not_longer_than_the_host(start: Any) -> None:
    host, child, armed = start("idle", "thread", "wait")
    assert not armed  # the kernel's signal would come at the end of that thread
    time.sleep(0.5)
    assert child.is_running()
    assert child.status() != psutil.STATUS_ZOMBIE
    host.kill()
    assert _ends(child, 5.0)


@posix_only
def test_a_host_that_died_before_the_worker_looked() -> None:
    code = "from edgellama.runtime import parent\nparent.arm()\nprint('still here')"
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    environment = os.environ | {parent.PARENT_VARIABLE: f"{dead.pid}:main"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_nobody_said_who_the_host_is() -> None:
    assert parent.arm({}) is False
    before = threading.active_count()
    parent.watch({})
    parent.watch({parent.PARENT_VARIABLE: "garbage:main"})
    assert threading.active_count() == before


def test_the_variable_names_process_and_thread() -> None:
    assert parent.child_environment() == {parent.PARENT_VARIABLE: f"{os.getpid()}:main"}
    found: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: found.append(parent.child_environment()))
    thread.start()
    thread.join()
    assert found == [{parent.PARENT_VARIABLE: f"{os.getpid()}:thread"}]


@linux_only
def test_a_kernel_that_refuses_is_not_trusted() -> None:
    class Libc:
        def prctl(self, *arguments: int) -> int:
            assert arguments[:2] == (1, 9)
            return -1

    assert parent.arm({parent.PARENT_VARIABLE: f"{os.getppid()}:main"}, Libc()) is False


@posix_only
def test_the_watcher_calls_when_a_process_ends() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    told = threading.Event()
    parent.watch({parent.PARENT_VARIABLE: f"{other.pid}:thread"}, told.set)
    assert not told.wait(0.2) or sys.platform != "linux"
    other.kill()
    other.wait()
    assert told.wait(10)


# ---- Windows, with a stand-in for its kernel


class _Kernel32:
    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "SetInformationJobObject":
                raw = ctypes.string_at(arguments[2], arguments[3])
                arguments = (*arguments[:2], raw)
            self.calls.append((name, *arguments))
            return 0 if name == self.refuses else {"CreateJobObjectW": 40, "OpenProcess": 50}.get(name, 1)

        return call


def test_the_job_kills_its_processes_with_its_last_handle() -> None:
    kernel = _Kernel32()
    job = parent.JobObject(kernel)
    job.add(1234)
    job.close()
    job.close()
    names = [call[0] for call in kernel.calls]
    assert names == [
        "CreateJobObjectW", "SetInformationJobObject", "OpenProcess",
        "AssignProcessToJobObject", "CloseHandle", "CloseHandle",
    ]  # fmt: skip
    _, job_handle, information_class, raw = kernel.calls[1]
    assert (job_handle, information_class) == (40, 9)  # JobObjectExtendedLimitInformation
    if ctypes.sizeof(ctypes.c_void_p) == 8:
        assert len(raw) == 144  # sizeof(JOBOBJECT_EXTENDED_LIMIT_INFORMATION) on 64-bit Windows
        assert int.from_bytes(raw[16:20], "little") == 0x2400  # kill on close, die on unhandled exception
    assert kernel.calls[2] == ("OpenProcess", 0x101, False, 1234)
    assert kernel.calls[3] == ("AssignProcessToJobObject", 40, 50)
    assert kernel.calls[4:] == [("CloseHandle", 50), ("CloseHandle", 40)]


@pytest.mark.parametrize("refuses", ["CreateJobObjectW", "SetInformationJobObject"])
def test_windows_refuses_a_job(refuses: str) -> None:
    kernel = _Kernel32(refuses)
    with pytest.raises(OSError, match=refuses):
        parent.JobObject(kernel)
    assert (("CloseHandle", 40) in kernel.calls) == (refuses == "SetInformationJobObject")


@pytest.mark.parametrize("refuses", ["OpenProcess", "AssignProcessToJobObject"])
def test_windows_refuses_a_process(refuses: str) -> None:
    kernel = _Kernel32(refuses)
    job = parent.JobObject(kernel)
    with pytest.raises(OSError, match=refuses):
        job.add(7)
    assert (("CloseHandle", 50) in kernel.calls) == (refuses == "AssignProcessToJobObject")


@posix_only
def test_elsewhere_the_host_has_nothing_to_bind() -> None:
    assert parent.bind(os.getpid()) is None
    with pytest.raises(OSError, match="Windows"):
        parent.JobObject()
