"""Run by the environment's Python in a process of its own: load llama.cpp's library and name its devices, as JSON."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

_TYPES = ("cpu", "gpu", "igpu", "accel", "meta")


def _library(folder: Path, name: str) -> ctypes.CDLL:
    for file_name in (f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll", f"lib{name}.dll"):
        if (folder / file_name).exists():
            return ctypes.CDLL(str(folder / file_name))
    raise OSError(f"{folder} holds no {name} library")


def look() -> dict[str, object]:
    """Version of the bindings and every device: name, description, type, memory in bytes."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    folder = Path(llama_cpp.__file__).parent / "lib"
    ggml, base = _library(folder, "ggml"), _library(folder, "ggml-base")
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for function in (base.ggml_backend_dev_name, base.ggml_backend_dev_description):
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    base.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    base.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    base.ggml_backend_dev_memory.restype = None
    devices = []
    for number in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(number)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = base.ggml_backend_dev_type(device)
        devices.append({
            "name": base.ggml_backend_dev_name(device).decode("utf-8", "replace"),
            "description": base.ggml_backend_dev_description(device).decode("utf-8", "replace"),
            "type": _TYPES[kind] if 0 <= kind < len(_TYPES) else str(kind),
            "free_bytes": free.value,
            "total_bytes": total.value,
        })  # fmt: skip
    return {"version": llama_cpp.__version__, "devices": devices}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look()) + "\n")
