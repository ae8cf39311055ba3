"""Run as a process of its own by `edgellama doctor`: loads the native library and says what it is, as JSON on stdout.

A broken build may die at its first instruction; here it takes nobody along.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any


def report() -> dict[str, Any]:
    """What the library says of itself."""
    import llama_cpp

    from edgellama.engine import ggml

    llama_cpp.llama_backend_init()
    return {
        "version": llama_cpp.__version__,
        "system_info": llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(),
        "gpu_offload": bool(llama_cpp.llama_supports_gpu_offload()),
        "folder": str(ggml.library_folder()),
        "ggml_version": ggml.version(),
        "devices": [asdict(device) for device in ggml.devices()],
    }


if __name__ == "__main__":
    result = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the library prints to stdout as it likes
    json.dump(report(), result)
    result.close()
    sys.stdout.flush()
