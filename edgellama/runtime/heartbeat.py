"""The heartbeat: twice a second, also while a step is stuck in native code, what runs and how far it has come."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

INTERVAL_SECONDS = 0.5


def memory_bytes() -> tuple[int, int]:
    """Resident size of this process now and at its largest; 0 where unknown."""
    if sys.platform == "linux":
        return _from_status()
    import psutil

    info: Any = psutil.Process().memory_info()
    if sys.platform == "win32":
        return int(info.rss), int(info.peak_wset)
    import resource

    return int(info.rss), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _from_status(path: Path = Path("/proc/self/status")) -> tuple[int, int]:
    try:
        fields = dict(line.split(":", 1) for line in path.read_text("ascii", "replace").splitlines() if ":" in line)
        return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError, IndexError):
        return 0, 0


def start(beat: Callable[[], None], stopped: threading.Event, interval_seconds: float = INTERVAL_SECONDS) -> None:
    """Call `beat` at every interval on a thread of its own until `stopped`."""

    def run() -> None:
        while not stopped.wait(interval_seconds):
            beat()

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
