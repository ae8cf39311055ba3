"""Types quantized by ggml's own kernels until ours exist: IQ1, IQ2, IQ3 and Q1_0, through ctypes.

The library comes with llama-cpp-python; it is found without importing that package.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

from gguf import GGMLQuantizationType

from edgellama.codecs.base import Bytes, Codec, Rows, register
from edgellama.errors import UnsupportedError, UsageError

_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q1_0")
_ASSERTED = frozenset({"IQ1_S", "IQ2_XXS", "IQ2_XS"})
"""ggml aborts the process when these come without importance weights."""


@functools.cache
def library() -> ctypes.CDLL:
    """libggml-base of the installed llama-cpp-python; raises UnsupportedError where there is none."""
    found = importlib.util.find_spec("llama_cpp")
    folders = [Path(place) / "lib" for place in (found.submodule_search_locations or ())] if found else []
    for folder in folders:
        for file in sorted(folder.glob("*ggml-base*")) if folder.is_dir() else []:
            loaded = ctypes.CDLL(str(file))
            loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
            loaded.ggml_quantize_chunk.argtypes = [
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_void_p,
                *[ctypes.c_int64] * 3,
                ctypes.c_void_p,
            ]
            return loaded
    raise UnsupportedError(
        "the IQ1, IQ2, IQ3 and Q1_0 types need llama.cpp's library, which is not installed",
        "pip install 'edgellama[llamacpp]', or choose another recipe",
    )


def _kernel(kind: GGMLQuantizationType) -> Callable[[Rows, Rows, Bytes], None]:
    def quantize(x: Rows, importance: Rows, y: Bytes) -> None:
        if not importance.shape[0] and kind.name in _ASSERTED:
            raise UsageError(f"{kind.name} needs an importance matrix", "give one with --imatrix")
        pointer = importance.ctypes.data if importance.shape[0] else None
        library().ggml_quantize_chunk(int(kind), x.ctypes.data, y.ctypes.data, 0, *x.shape, pointer)

    return quantize


for _name in _TYPES:
    _type = GGMLQuantizationType[_name]
    register(Codec(_type, _kernel(_type), takes_weights=True, by_row=True, native=True))
