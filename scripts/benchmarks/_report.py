"""What every benchmark prints with its figures: the machine, and medians with their spread."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgellama import __version__


def machine() -> dict[str, Any]:
    """Where and under what load the figures were taken."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "logical_cpus": os.cpu_count(),
        "load_average": [round(x, 2) for x in load] if load else None,
        "python": platform.python_version(),
        "edgellama": __version__,
    }


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor()


def cpu_seconds(pid: int) -> float:
    """CPU time another process of ours has used in all its threads."""
    if sys.platform == "linux":
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3): nanoseconds, where /proc has hundredths
    import psutil

    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def line(name: str, values: dict[str, float], unit: str, digits: int = 1) -> str:
    """One line of the report."""
    figures = f"{values['median']:,.{digits}f} ({values['min']:,.{digits}f} to {values['max']:,.{digits}f})"
    return f"  {name:<24} {figures} {unit}"
