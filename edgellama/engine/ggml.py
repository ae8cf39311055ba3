"""The few ggml functions that llama-cpp-python's bindings lack: devices and their memory, thread pools, tensor reads.

Only the pinned version's layouts are declared here; `bindings.py` checks the version before anything is called.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import EngineLoadError

_LIBRARIES = ("ggml-base", "ggml", "ggml-cpu", "llama")
_KINDS = ("cpu", "gpu", "igpu", "accel", "meta")
MAX_THREADS = 512


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device of the loaded library. Memory is None where ggml has no true figure (CPU: free equals total)."""

    name: str
    description: str
    kind: str
    """`cpu`, `gpu`, `igpu`, `accel` (a helper of the CPU such as BLAS) or `meta`."""
    free_bytes: int | None
    total_bytes: int | None


class _ThreadPoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", ctypes.c_bool * MAX_THREADS),
        ("n_threads", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


def library_folder() -> Path:
    """Where llama-cpp-python keeps its shared libraries. Raises `EngineLoadError` when it is not installed."""
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    if override:
        return Path(override)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise EngineLoadError("llama-cpp-python is not installed", "pip install 'edgellama[llamacpp]'")
    return Path(spec.submodule_search_locations[0]) / "lib"


def library_files() -> tuple[Path, ...]:
    """The shared libraries there, symbolic links resolved."""
    names = ("*.dll",) if sys.platform == "win32" else ("*.so*", "*.dylib")
    return tuple(sorted({file.resolve() for pattern in names for file in library_folder().glob(pattern)}))


def library_identity() -> str:
    """A short hash over name, size and time of every shared library: changes when the build does."""
    digest = hashlib.blake2b(digest_size=8)
    for file in library_files():
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    folder = library_folder()
    patterns = {"win32": ("{}.dll", "lib{}.dll"), "darwin": ("lib{}.dylib", "lib{}.so")}.get(
        sys.platform, ("lib{}.so",)
    )
    found = []
    for name in _LIBRARIES:  # parts may be linked into one file, so a missing one is no fault yet
        path = next((p for pattern in patterns if (p := folder / pattern.format(name)).exists()), None)
        if path is None:
            continue
        try:
            found.append(ctypes.CDLL(str(path)))
        except OSError as error:
            raise EngineLoadError(f"{path}: {error}", "reinstall llama-cpp-python on this machine") from error
    return tuple(found)


@functools.cache
def function(name: str, result: Any, *arguments: Any) -> Any:
    """An exported function by name, with its ctypes signature. Raises `EngineLoadError` when no library has it."""
    prototype = ctypes.CFUNCTYPE(result, *arguments)
    for library in _libraries():
        try:
            return prototype((name, library))
        except AttributeError:
            continue
    raise EngineLoadError(
        f"{name} is not in the libraries of {library_folder()}", "reinstall the pinned llama-cpp-python"
    )


def version() -> str:
    """ggml's own version."""
    return bytes(function("ggml_version", ctypes.c_char_p)()).decode()


def devices() -> tuple[Device, ...]:
    """All devices of the loaded library, in its order."""
    count = function("ggml_backend_dev_count", ctypes.c_size_t)
    if not count():  # a build with backends as plug-ins finds none until told where
        load_all = function("ggml_backend_load_all_from_path", None, ctypes.c_char_p)
        load_all(os.fsencode(library_folder()))
    get = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return tuple(_device(get(i)) for i in range(count()))


def _device(pointer: int) -> Device:
    name = function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)(pointer)
    description = function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)(pointer)
    number = function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(pointer)
    kind = _KINDS[number] if 0 <= number < len(_KINDS) else "meta"
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    size_pointer = ctypes.POINTER(ctypes.c_size_t)
    memory = function("ggml_backend_dev_memory", None, ctypes.c_void_p, size_pointer, size_pointer)
    memory(pointer, ctypes.byref(free), ctypes.byref(total))
    known = kind in ("gpu", "igpu") and total.value > 0
    return Device(
        name=(name or b"").decode(errors="replace"),
        description=(description or b"").decode(errors="replace"),
        kind=kind,
        free_bytes=free.value if known else None,
        total_bytes=total.value if known else None,
    )


def read_tensor(tensor: int, offset: int, target: NDArray[np.uint8]) -> None:
    """Copy bytes of a tensor (a `ggml_tensor *`, also one on a device) from `offset` into `target`, uint8[n]."""
    get = function("ggml_backend_tensor_get", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    get(tensor, target.ctypes.data, offset, target.nbytes)


class ThreadPools:
    """A pool of threads for steps and one for prompts, kept over calls, and attached to a llama.cpp context.

    Builds without OpenMP start and join threads for every graph unless they have one.
    """

    def __init__(self, context: int, threads: int, prefill_threads: int) -> None:
        self._context = context
        self._pools: list[int] = []
        try:
            small = self._new(threads)
            large = small if prefill_threads == threads else self._new(prefill_threads)
            attach = function("llama_attach_threadpool", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
            attach(context, small, large)
        except EngineLoadError:
            self._free()
            raise

    def _new(self, threads: int) -> int:
        params = function("ggml_threadpool_params_default", _ThreadPoolParams, ctypes.c_int)(threads)
        if (params.n_threads, params.strict_cpu, params.paused) != (threads, False, False) or params.poll > 100:
            raise EngineLoadError("ggml_threadpool_params has another layout", "reinstall the pinned llama-cpp-python")
        pool = function("ggml_threadpool_new", ctypes.c_void_p, ctypes.POINTER(_ThreadPoolParams))(ctypes.byref(params))
        if not pool:
            raise EngineLoadError(f"a pool of {threads} threads could not be started", "use fewer threads")
        self._pools.append(int(pool))
        return int(pool)

    def close(self) -> None:
        """Detach from the context (which must still exist) and end the threads."""
        if self._pools:
            function("llama_detach_threadpool", None, ctypes.c_void_p)(self._context)
            self._free()

    def _free(self) -> None:
        while self._pools:
            function("ggml_threadpool_free", None, ctypes.c_void_p)(self._pools.pop())
