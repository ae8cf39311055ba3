"""GGUF files: validation of hostile input, plain-read headers, crash-safe writing. Importing it is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellama.gguf_io.architectures import ARCHITECTURES
from edgellama.gguf_io.header import Header, Kind, read, require_model
from edgellama.gguf_io.identity import file_identity
from edgellama.gguf_io.types import ArrayInfo, GGMLType, TensorInfo, ValueType, tensor_bytes

if TYPE_CHECKING:
    from edgellama.gguf_io.writer import GGUFWriter, TensorSpec, Typed, header_bytes, writing

__all__ = [
    "ARCHITECTURES",
    "ArrayInfo",
    "GGMLType",
    "GGUFWriter",
    "Header",
    "Kind",
    "TensorInfo",
    "TensorSpec",
    "Typed",
    "ValueType",
    "file_identity",
    "header_bytes",
    "read",
    "require_model",
    "tensor_bytes",
    "writing",
]

_WRITER = frozenset({"GGUFWriter", "TensorSpec", "Typed", "header_bytes", "writing"})


def __getattr__(name: str) -> Any:
    if name in _WRITER:
        from edgellama.gguf_io import writer

        return getattr(writer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
