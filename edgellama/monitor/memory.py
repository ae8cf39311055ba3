"""How much memory there really is: what the system has available, capped by the control groups and limits we run under.

psutil reports the whole machine even in a container, and ggml reports total as free, so neither alone may be believed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_PROC = Path("/proc")
_UNLIMITED = 1 << 60
"""cgroup v1 writes a huge page-rounded number for "no limit"."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One ceiling on our memory: `limit_bytes` in all, `available_bytes` of it still free; `source` sets it."""

    limit_bytes: int
    available_bytes: int
    source: str


def limits(proc: Path = _PROC) -> list[MemoryLimit]:
    """Every ceiling that holds for this process, the machine itself first."""
    machine = psutil.virtual_memory()
    found = [MemoryLimit(int(machine.total), int(machine.available), "system")]
    found += _cgroup_limits(proc)
    found += _address_space_limit()
    return found


def available_bytes(proc: Path = _PROC) -> int:
    """Memory a new allocation may use: the smallest of all ceilings, never negative."""
    return max(0, min(limit.available_bytes for limit in limits(proc)))


def total_bytes(proc: Path = _PROC) -> int:
    """The largest amount of memory this process could ever have."""
    return max(0, min(limit.limit_bytes for limit in limits(proc)))


def resident_bytes(pid: int | None = None) -> int | None:
    """Resident size of a process (this one by default); None when it is gone or not ours to read."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):
        return None


def swap_bytes() -> tuple[int, int] | None:
    """Total and free swap; None where it cannot be read."""
    try:
        swap = psutil.swap_memory()
    except (psutil.Error, OSError, RuntimeError):
        return None
    return int(swap.total), int(swap.free)


def _address_space_limit() -> list[MemoryLimit]:
    if sys.platform == "win32":
        return []
    import resource

    soft, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft >= _UNLIMITED:
        return []
    return [MemoryLimit(soft, soft, "address-space limit (ulimit -v)")]


# ---- control groups


def _cgroup_limits(proc: Path) -> list[MemoryLimit]:
    try:
        groups = _groups(proc / "self" / "cgroup")
        mounts = list(_mounts(proc / "self" / "mountinfo"))
    except OSError:
        return []
    found: list[MemoryLimit] = []
    for mount in mounts:
        group = groups.get("memory" if mount.version == 1 else "")
        if group is None:
            continue
        for folder in _ancestors(mount, group):
            found += _v1(folder) if mount.version == 1 else _v2(folder)
    return found


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str
    point: Path
    version: int


def _groups(path: Path) -> dict[str, str]:
    """Controller ("" for v2) to group path."""
    groups: dict[str, str] = {}
    for line in path.read_text("utf-8", "surrogateescape").splitlines():
        _number, separator, rest = line.partition(":")
        controllers, second, group = rest.partition(":")
        if separator and second:
            groups |= dict.fromkeys(controllers.split(","), group)
    return groups


def _mounts(path: Path) -> Iterator[_Mount]:
    for line in path.read_text("utf-8", "surrogateescape").splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield _Mount(_unescape(fields[3]), Path(_unescape(fields[4])), 2)
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield _Mount(_unescape(fields[3]), Path(_unescape(fields[4])), 1)


def _unescape(field: str) -> str:
    """mountinfo writes blanks and backslashes as octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _ancestors(mount: _Mount, group: str) -> Iterator[Path]:
    """Folders of the group and its ancestors under the mount, as far as this namespace shows them."""
    inside = PurePosixPath(group)
    if inside.is_relative_to(mount.root):
        inside = inside.relative_to(mount.root)
    parts = [part for part in inside.parts if part not in {"/", ".."}]
    for length in range(len(parts), -1, -1):
        folder = mount.point.joinpath(*parts[:length])
        if folder.is_dir():
            yield folder


def _v2(folder: Path) -> list[MemoryLimit]:
    ceilings = [value for name in ("memory.max", "memory.high") if (value := _number(folder / name)) is not None]
    used = _number(folder / "memory.current")
    if not ceilings or used is None:
        return []
    used -= _stat(folder / "memory.stat", "inactive_file")
    limit = min(ceilings)
    return [MemoryLimit(limit, limit - used, f"control group {folder}")]


def _v1(folder: Path) -> list[MemoryLimit]:
    limit = _number(folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return []
    used -= _stat(folder / "memory.stat", "total_inactive_file")
    return [MemoryLimit(limit, limit - used, f"control group {folder}")]


def _number(path: Path) -> int | None:
    """The number in a control file; None for "max", a huge v1 value, or no such file."""
    try:
        value = int(path.read_text("ascii").strip())
    except (OSError, ValueError):
        return None
    return value if value < _UNLIMITED else None


def _stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text("ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
