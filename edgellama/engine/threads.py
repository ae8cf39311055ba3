"""How many threads compute when nobody says: the fast physical cores this process may use."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_SLOW = 0.6
"""A core below this share of the fastest one's capacity waits more than it helps (big.LITTLE)."""


def default_threads() -> int:
    """Fast physical cores, limited by affinity and by the cgroup's quota; at least 1."""
    if sys.platform == "linux":
        return max(1, min(_fast_cores(os.sched_getaffinity(0), _CPUS), _quota(Path("/sys/fs/cgroup/cpu.max"))))
    if sys.platform == "darwin":
        count = ctypes.c_int(0)
        size = ctypes.c_size_t(ctypes.sizeof(count))
        for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
            if ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(count), ctypes.byref(size), None, 0) == 0:
                return max(1, count.value)
        return max(1, os.cpu_count() or 1)
    import psutil

    return max(1, psutil.cpu_count(logical=False) or os.cpu_count() or 1)


def _fast_cores(allowed: set[int], cpus: Path) -> int:
    """Physical cores among the logical CPUs `allowed`, slow ones left out."""
    capacity = {cpu: _read_number(cpus / f"cpu{cpu}" / "cpu_capacity") for cpu in allowed}
    best = max(capacity.values(), default=0.0)
    fast = {cpu for cpu, value in capacity.items() if value >= _SLOW * best}
    performance = _read_text(cpus.parent.parent / "cpu_core" / "cpus")  # Intel's fast cores, on hybrid ones only
    if performance:
        fast = (fast & _parse_list(performance)) or fast
    cores = {_read_text(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in fast}
    return len(cores)


def _quota(path: Path) -> int:
    """CPUs the cgroup grants, rounded up; unlimited when it says nothing."""
    words = _read_text(path).split()
    with contextlib.suppress(ValueError, IndexError, ZeroDivisionError):
        return max(1, math.ceil(int(words[0]) / int(words[1])))
    return sys.maxsize


def _parse_list(text: str) -> set[int]:
    """The kernel's list format: `0-3,8`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        with contextlib.suppress(ValueError):
            found.update(range(int(first), int(last or first) + 1))
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read_number(path: Path) -> float:
    text = _read_text(path)
    return float(text) if text.isdigit() else 0.0
