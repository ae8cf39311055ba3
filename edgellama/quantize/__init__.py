"""Tensor stream to quantized tensor stream: recipes, importance matrices, slab pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellama.quantize.api import Job, Options, Result, quantize_file, quantize_rows

__all__ = ["Job", "Options", "Result", "quantize_file", "quantize_rows"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from edgellama.quantize import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
