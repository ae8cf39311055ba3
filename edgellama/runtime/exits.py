"""What a dead child's exit code means, in words, on each platform; and whether it was killed for want of memory."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

EXIT_TOLD = 1
"""The worker said in a `WorkerFailed` why it left."""
EXIT_INTERNAL = 70
"""An invariant of ours broke in the worker (sysexits.h: EX_SOFTWARE)."""

_SIGNALS = {
    "SIGILL": "an illegal instruction",
    "SIGSEGV": "an invalid memory access",
    "SIGBUS": "a memory page that could not be read (file cut or medium removed, or memory failure)",
    "SIGFPE": "an arithmetic fault",
    "SIGABRT": "a failed check in native code",
    "SIGSYS": "a forbidden system call",
    "SIGTRAP": "a trap in native code",
    "SIGXCPU": "its limit of processor time",
    "SIGXFSZ": "its limit of file size",
}
_SENT = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}

_NTSTATUS = {
    0xC0000005: "an invalid memory access",
    0xC0000006: "a memory page that could not be read (medium removed?)",
    0xC0000017: "a lack of memory",
    0xC000001D: "an illegal instruction",
    0xC0000025: "a fault that could not be handled",
    0xC000008E: "an arithmetic fault",
    0xC0000094: "an arithmetic fault",
    0xC0000096: "a privileged instruction",
    0xC00000FD: "a stack overflow",
    0xC000012D: "a lack of memory (commit limit)",
    0xC0000135: "a missing DLL",
    0xC0000139: "a DLL of the wrong version",
    0xC000013A: "Ctrl-C",
    0xC0000142: "a DLL that did not start",
    0xC0000374: "a damaged heap",
    0xC0000409: "a failed check in native code",
    0xC0000420: "a failed check in native code",
    0x40000015: "a failed check in native code",
    0x80000003: "a breakpoint in native code",
}
"""winerror.h and ntstatus.h, as process exit codes."""
_NTSTATUS_FROM = 0x40000000


def describe(returncode: int, *, out_of_memory: bool = False, platform: str = sys.platform) -> str:
    """What happened to a process, as words that follow its name: "died of an illegal instruction (SIGILL)".

    `returncode` is `Popen.returncode`: negative for a signal, on Windows possibly an NTSTATUS, signed or not.
    """
    status = returncode & 0xFFFFFFFF
    if status >= _NTSTATUS_FROM and (platform == "win32" or returncode < -_NTSTATUS_FROM):
        return f"died of {_NTSTATUS.get(status, 'an exception')} (0x{status:08X})"
    if returncode < 0:
        return _describe_signal(-returncode, out_of_memory)
    if returncode == 0:
        return "ended"
    if returncode == 3 and platform == "win32":
        return "died of a failed check in native code (exit code 3)"
    if returncode == EXIT_INTERNAL:
        return f"failed for an internal reason (exit code {EXIT_INTERNAL})"
    return f"ended with exit code {returncode}"


def _describe_signal(number: int, out_of_memory: bool) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if out_of_memory:
        return f"was killed by the system for lack of memory ({name})"
    if name == "SIGKILL":
        return "was killed (SIGKILL), by someone or by the system for lack of memory"
    if name in _SENT:
        return f"was ended from outside ({name})"
    return f"died of {_SIGNALS.get(name, 'a signal')} ({name})"


class OutOfMemoryKills:
    """Counts the kernel's out-of-memory kills around us: in our control groups (v1, v2), else on the whole machine.

    Take one before a child starts; when it dies of SIGKILL, `grew()` tells whether the kernel killed something for
    memory meanwhile. False where nothing can be read.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._before = self._counts()

    def grew(self) -> bool:
        """Whether any counter is larger than when this object was made."""
        return any(count > self._before.get(place, count) for place, count in self._counts().items())

    def _counts(self) -> dict[Path, int]:
        places = [self._proc / "vmstat", *self._group_files()]
        return {place: count for place in places if (count := _oom_kills(place)) is not None}

    def _group_files(self) -> list[Path]:
        try:
            lines = (self._proc / "self" / "cgroup").read_text("utf-8", "surrogateescape").splitlines()
        except OSError:
            return []
        found: list[Path] = []
        for line in lines:
            _number, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            relative = group.lstrip("/")
            if controllers == "":
                # In a container the path may be the host's: then the mount's own root is our group.
                found += [self._cgroups / relative / "memory.events", self._cgroups / "memory.events"]
            elif "memory" in controllers.split(","):
                mount = self._cgroups / "memory"
                found += [mount / relative / "memory.oom_control", mount / "memory.oom_control"]
        return list(dict.fromkeys(found))


def _oom_kills(path: Path) -> int | None:
    try:
        for line in path.read_text("ascii", "replace").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                return int(value)
    except OSError:
        pass
    return None
