"""Linux: no_new_privs, Landlock, seccomp, by raw system calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from edgellama.runtime.confine import landlock, seccomp

if TYPE_CHECKING:
    from edgellama.runtime.confine import Needs

_PR_SET_NO_NEW_PRIVS = 38
_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/opt", "/nix/store", "/gnu/store", "/run/opengl-driver",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/localtime",
    "/etc/alternatives", "/etc/OpenCL", "/etc/vulkan", "/etc/glvnd", "/etc/nv_tegra_release", "/etc/passwd",
    "/sys",
)  # fmt: skip
_PROC = (
    "self", "sys", "driver", "bus", "cpuinfo", "devices", "filesystems", "interrupts", "loadavg", "meminfo", "modules",
    "stat", "uptime", "version", "vmstat", "zoneinfo",
)  # fmt: skip
"""Not the whole of /proc: it has the command lines, for root also the environments, of other processes."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_GPU_DEVICES = ("nvidia*", "nvhost*", "nvmap", "nvgpu", "dri", "kfd", "dxg", "mali*", "dma_heap", "udmabuf")
_GPU_CACHES = ("~/.nv", "~/.cache/nvidia", "~/.cache/mesa_shader_cache", "~/.cache/mesa_shader_cache_db", "~/.AMD")


def gpu_devices(folder: Path = Path("/dev")) -> tuple[Path, ...]:
    """Device nodes of graphics processors."""
    return tuple(sorted(node for pattern in _GPU_DEVICES for node in folder.glob(pattern)))


def apply(needs: Needs, libraries: Iterable[Path]) -> list[str]:
    """Confine this process; returns what holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return []
    held = ["no-new-privileges"]
    devices = gpu_devices() if needs.gpu else ()
    held += landlock.restrict(libc, _rules(needs, libraries, devices))
    held += seccomp.restrict(libc, local_sockets=bool(devices))
    return held


def _rules(needs: Needs, libraries: Iterable[Path], devices: Iterable[Path]) -> list[tuple[Path, int]]:
    rules = [(Path(name), landlock.READ) for name in _SYSTEM]
    rules += [(Path("/proc", name), landlock.READ) for name in _PROC]
    rules += [(folder, landlock.READ) for folder in (*libraries, *needs.readable, *_loader_folders())]
    rules += [(Path(name), landlock.DEVICE) for name in _DEVICES]
    rules += [(folder, landlock.WRITE) for folder in needs.writable]
    devices = list(devices)
    if devices:
        import tempfile

        rules += [(node, landlock.DEVICE) for node in devices]
        rules += [(Path(name), landlock.WRITE) for name in ("/dev/shm", tempfile.gettempdir())]  # noqa: S108
        with contextlib.suppress(RuntimeError):  # no home folder
            rules += [(Path(name).expanduser(), landlock.WRITE) for name in _GPU_CACHES]
    return rules


def _loader_folders() -> list[Path]:
    return [Path(name) for name in os.environ.get("LD_LIBRARY_PATH", "").split(":") if name.startswith("/")]
