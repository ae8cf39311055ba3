"""macOS: a sandbox profile for this process, by libSystem's sandbox_init (deprecated, and still what browsers use)."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellama.runtime.confine import Needs


def profile(needs: Needs, libraries: Iterable[Path], home: Path) -> str:
    """The profile in the sandbox's own language: rules that come later win."""
    writable = (*needs.writable, Path("/private/var/folders"), Path(tempfile.gettempdir()).resolve())
    lines = [
        "(version 1)",
        "(allow default)",
        "(deny network*)",
        "(deny process-exec*)",
        "(deny file-write*)",
        f"(deny file-read-data (subpath {_quoted(home)}))",
        *(f"(allow file-read-data (subpath {_quoted(path)}))" for path in (*libraries, *needs.readable)),
        *(f"(allow file-read-data file-write* (subpath {_quoted(path)}))" for path in writable),
        '(allow file-write-data (literal "/dev/null") (literal "/dev/dtracehelper"))',
    ]
    return "\n".join(lines)


def apply(needs: Needs, libraries: Iterable[Path], library: Any = None) -> list[str]:
    """Confine this process; returns what holds."""
    system = library if library is not None else ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    message = ctypes.c_char_p()
    text = profile(needs, libraries, Path.home()).encode()
    if system.sandbox_init(text, ctypes.c_uint64(0), ctypes.byref(message)) != 0:
        return []
    return ["no-network", "no-exec", "sandbox"]


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
