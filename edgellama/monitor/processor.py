"""The processor: its name, cores, and the instruction sets that matter for inference."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

KNOWN: tuple[str, ...] = (
    *("sse3", "ssse3", "sse4_1", "sse4_2", "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "fphp", "i8mm", "bf16", "sve", "sve2", "sme"),
    *("vsx", "rvv", "zvfh", "lasx", "lsx", "vxe"),
)
"""Names as Linux prints them, but for sse3, which it calls pni."""

_LINUX_NAMES = {"pni": "sse3"}
_WINDOWS = {13: "sse3", 36: "ssse3", 37: "sse4_1", 38: "sse4_2", 39: "avx", 40: "avx2", 41: "avx512f"}
_WINDOWS |= {19: "asimd", 43: "asimddp", 46: "sve"}
"""Numbers of `IsProcessorFeaturePresent` (winnt.h), and Linux's name for the same."""
_MAC = {
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.neon": "asimd",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.sse4_2": "sse4_2",
    "hw.optional.avx1_0": "avx",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.fma": "fma",
    "hw.optional.f16c": "f16c",
    "hw.optional.avx512f": "avx512f",
}


@dataclass(frozen=True, slots=True)
class Processor:
    """What computes. `features` is None where the system does not tell; `physical_cores` likewise."""

    name: str
    architecture: str
    physical_cores: int | None
    logical_cores: int
    usable_cores: int
    """Cores this process may run on."""
    features: tuple[str, ...] | None


def read() -> Processor:
    """The processor of this machine; what cannot be read is unknown, nothing is raised."""
    name, features = _read_system()
    logical = os.cpu_count() or 1
    return Processor(
        name=name or platform.processor() or "unknown",
        architecture=platform.machine(),
        physical_cores=_physical_cores(),
        logical_cores=logical,
        usable_cores=_usable_cores(logical),
        features=features,
    )


def _physical_cores() -> int | None:
    try:
        count = psutil.cpu_count(logical=False)
    except (OSError, psutil.Error, RuntimeError):
        return None
    return int(count) if count else None


def _usable_cores(logical: int) -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return logical


def _read_system() -> tuple[str, tuple[str, ...] | None]:
    if sys.platform == "win32":
        return _read_windows()
    if sys.platform == "darwin":
        return parse_sysctl(_sysctl())
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text("utf-8", "replace"))
    except OSError:
        return "", None


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...] | None]:
    """Name and known features out of Linux's /proc/cpuinfo. Features count only if every core has them."""
    name = ""
    common: set[str] | None = None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        key = key.strip().lower()
        if key in {"model name", "model", "cpu model", "cpu"} and not value.strip().isdigit():
            name = name or value.strip()
        elif key in {"flags", "features"}:
            words = {_LINUX_NAMES.get(word, word) for word in value.split()}
            common = words if common is None else common & words
        elif key == "isa":  # RISC-V: rv64imafdcv_zicsr_…
            words = set(value.strip().split("_")) | ({"rvv"} if re.match(r"rv\d+[a-z]*v", value.strip()) else set())
            common = words if common is None else common & words
    return name, None if common is None else tuple(word for word in KNOWN if word in common)


def _sysctl() -> str:
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw.optional"],
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")


def parse_sysctl(text: str) -> tuple[str, tuple[str, ...] | None]:
    """Name and known features out of `sysctl machdep.cpu.brand_string hw.optional` on macOS."""
    pairs = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    present = {_MAC[key] for key, value in pairs.items() if key in _MAC and value.strip() == "1"}
    features = tuple(word for word in KNOWN if word in present)
    return pairs.get("machdep.cpu.brand_string", ""), features if pairs else None


def _read_windows() -> tuple[str, tuple[str, ...] | None]:
    if sys.platform != "win32":
        return "", None
    import ctypes
    import winreg

    present = {name for number, name in _WINDOWS.items() if ctypes.windll.kernel32.IsProcessorFeaturePresent(number)}
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    except OSError:
        name = ""
    return name, tuple(word for word in KNOWN if word in present)
