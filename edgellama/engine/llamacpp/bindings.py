"""The low-level bindings, imported once, checked against the pinned version, with their log captured."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from typing import Any

from edgellama.engine import ggml
from edgellama.engine.llamacpp.log import RING
from edgellama.errors import EngineLoadError

PINNED = "0.3.36"
_ADVICE = f"pip install 'llama-cpp-python=={PINNED}' (with the CMAKE_ARGS of your device), or reinstall edgellama"
_SIZES = {"llama_model_params": 80, "llama_context_params": 160, "llama_batch": 56}
_MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "use_extra_bufts": True, "load_mtp": False}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "flash_attn_type": -1,
    "type_k": 1,
    "type_v": 1,
    "offload_kqv": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
}


@functools.cache
def bindings() -> Any:
    """The module `llama_cpp.llama_cpp`, ready for use. Raises `EngineLoadError` when it is missing or another version.

    Its version and, through the library's own default values, the layout of its structs are checked: they changed
    often, and a wrong one corrupts memory without a word.
    """
    _check_version()
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion would else attach a debugger
    module = _import()
    _check_layout(module)
    _capture_log(module)
    module.llama_backend_init()
    return module


def _check_version() -> None:
    try:
        found = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineLoadError("llama-cpp-python is not installed", _ADVICE) from error
    if found.split("+")[0] != PINNED:
        raise EngineLoadError(f"llama-cpp-python {found} is installed, this version works with {PINNED}", _ADVICE)


def _import() -> Any:
    """Import the low-level module without its package, which would bring Jinja, pickle and a log printer along."""
    ready = sys.modules.get("llama_cpp.llama_cpp")
    if ready is not None:
        return ready
    shell = None
    spec = importlib.util.find_spec("llama_cpp")
    if "llama_cpp" not in sys.modules and spec is not None and spec.submodule_search_locations is not None:
        shell = types.ModuleType("llama_cpp")
        shell.__path__ = list(spec.submodule_search_locations)
        sys.modules["llama_cpp"] = shell
    try:
        return importlib.import_module("llama_cpp.llama_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise EngineLoadError(f"llama.cpp's library cannot be loaded: {error}", _ADVICE) from error
    finally:
        if shell is not None:
            del sys.modules["llama_cpp"]  # whoever imports the package itself gets all of it


def _check_layout(module: Any) -> None:
    for name, size in _SIZES.items():
        actual = ctypes.sizeof(getattr(module, name))
        if actual != size:
            raise EngineLoadError(f"{name} has {actual} bytes, {size} are expected", _ADVICE)
    for params, expected in (
        (module.llama_model_default_params(), _MODEL_DEFAULTS),
        (module.llama_context_default_params(), _CONTEXT_DEFAULTS),
    ):
        found = {name: getattr(params, name) for name in expected}
        if found != expected:
            raise EngineLoadError(
                f"llama.cpp's library does not fit its bindings: {type(params).__name__} is {found}", _ADVICE
            )


def _capture_log(module: Any) -> None:
    @module.llama_log_callback  # type: ignore[untyped-decorator]
    def keep(level: int, text: bytes | None, _data: object) -> None:
        RING.write(level, text or b"")

    module.edgellama_log_callback = keep  # must live as long as the library
    module.llama_log_set(keep, None)


def backend_build() -> str:
    """Identity of the native code: versions, instruction sets, devices, library files. Part of verdict keys."""
    module = bindings()
    system = " ".join(module.llama_print_system_info().decode(errors="replace").split())
    names = ", ".join(f"{d.name} ({d.description})" for d in ggml.devices())
    return (
        f"llama-cpp-python {PINNED}; llama.cpp {module.llama_version().decode()}; ggml {ggml.version()}; "
        f"{system}; {names}; libraries {ggml.library_identity()}"
    )


def uses_openmp() -> bool:
    """Whether the CPU code runs on OpenMP's threads (which outlive a graph by themselves)."""
    return b"OPENMP = 1" in bindings().llama_print_system_info()
