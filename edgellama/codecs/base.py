"""The Codec seam: rows of float32 to packed blocks and back, one codec per GGUF tensor type, self-registering."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from edgellama.errors import UnsupportedError, UsageError

Rows = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Kernel = Callable[[Rows, Rows, Bytes], None]
"""Fills blocks: x float32[blocks, block], weights float32[blocks_per_row or 0, block], y uint8[blocks, block_bytes]."""

_MODULES = ("floats", "legacy", "k_affine", "k_symmetric", "nonlinear", "microscaling", "ternary", "native")


@dataclass(frozen=True, slots=True)
class Codec:
    """Quantizes and dequantizes one tensor type. `kernel` is None where only dequantizing exists."""

    type: GGMLQuantizationType
    kernel: Kernel | None
    takes_weights: bool = False
    by_row: bool = False
    """The kernel sees whole rows (x float32[rows, k]) since its definition uses a statistic of the row."""
    compiled: tuple[Any, ...] = ()
    """The kernel's parts for Numba, where it is not one function of it."""
    native: bool = False
    """The kernel is llama.cpp's own."""

    @property
    def block(self) -> int:
        """Values per block."""
        return int(GGML_QUANT_SIZES[self.type][0])

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return int(GGML_QUANT_SIZES[self.type][1])

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k values; raises UsageError when k is no multiple of the block."""
        if k % self.block:
            raise UsageError(f"rows of {k} values do not divide into {self.type.name} blocks of {self.block}")
        return k // self.block * self.block_bytes

    def quantize(self, rows: Rows, weights: Rows | None = None, out: Bytes | None = None) -> Bytes:
        """float32[n, k] -> uint8[n, row_bytes]; `weights` float32[k] are importances (ignored where ggml ignores them).

        Byte-identical to ggml_quantize_chunk of llama.cpp's default x86-64 build.
        """
        if self.kernel is None:
            raise UnsupportedError(f"quantizing to {self.type.name} is not available")
        n, k = rows.shape
        result = np.empty((n, self.row_bytes(k)), np.uint8) if out is None else out
        x = np.ascontiguousarray(rows, np.float32)
        importance = np.empty(0, np.float32)
        if weights is not None and self.takes_weights:
            if weights.shape != (k,):
                raise UsageError(f"importance weights have shape {weights.shape}, rows have {k} values")
            importance = np.ascontiguousarray(weights, np.float32)
        if self.by_row:
            self.kernel(x, importance.reshape(-1, k), result)
        else:
            self.kernel(
                x.reshape(-1, self.block), importance.reshape(-1, self.block), result.reshape(-1, self.block_bytes)
            )
        return result

    def dequantize(self, data: Bytes) -> Rows:
        """uint8[n, row_bytes] -> float32[n, k]."""
        from gguf.quants import dequantize

        values: Rows = dequantize(np.ascontiguousarray(data), self.type)
        return values


_registry: dict[GGMLQuantizationType, Codec] = {}


def register(codec: Codec) -> Codec:
    """Add a codec; each module of this room registers its own when it is imported."""
    _registry[codec.type] = codec
    return codec


def codecs() -> dict[GGMLQuantizationType, Codec]:
    """All codecs. Loads the kernels' modules (numba), but compiles nothing yet."""
    for module in _MODULES:
        importlib.import_module(f"edgellama.codecs.{module}")
    return dict(_registry)


def codec(type: GGMLQuantizationType) -> Codec:
    """The codec of a tensor type; raises UnsupportedError where there is none."""
    found = codecs().get(type)
    if found is None:
        raise UnsupportedError(f"there is no codec for tensor type {type.name}")
    return found
