"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 E2M1 values with one power-of-two scale (E8M0).

Layout (ggml-common.h): e u8, qs[16].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from edgellama.codecs.base import Codec, register
from edgellama.codecs.compiling import kernel
from edgellama.codecs.rounding import float_of

F = np.float32
_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # E2M1, doubled


@kernel
def _half_scale(e: Any) -> Any:
    """2**(e - 128) as float32, the scale that goes with doubled values."""
    if e < 2:
        return float_of(np.int32(0x00200000 << e))
    return float_of(np.int32((e - 1) << 23))


@kernel
def quantize_mxfp4(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 32] -> uint8[blocks, 17]; importance has no effect."""
    codes, best = np.empty(32, np.uint8), np.empty(32, np.float32)
    for block in range(x.shape[0]):
        magnitude = F(0)
        for i in range(32):
            size = F(abs(x[block, i]))
            magnitude = size if magnitude < size else magnitude
        exponent = np.int32(0)
        if magnitude > F(0):
            floor = np.int32(math.floor(F(math.log2(np.float64(magnitude)))))
            exponent = np.int32(floor + np.int32(125)) & np.int32(255)
        scale = _half_scale(exponent)
        for i in range(32):
            codes[i], best[i] = 0, F(abs(F(F(_VALUES[0] * scale) - x[block, i])))
        for candidate in range(1, 16):
            value = F(_VALUES[candidate] * scale)
            for i in range(32):
                error = F(abs(F(value - x[block, i])))
                closer = error < best[i]
                codes[i] = np.uint8(candidate) if closer else codes[i]
                best[i] = error if closer else best[i]
        y[block, 0] = np.uint8(exponent)
        for i in range(16):
            y[block, 1 + i] = codes[i] | (codes[i + 16] << 4)


register(Codec(GGMLQuantizationType.MXFP4, quantize_mxfp4))
