"""TQ1_0 and TQ2_0: blocks of 256 values -1, 0, 1 with one float16 scale.

Layouts (ggml-common.h): TQ1_0 54 bytes = qs[48] and qh[4] of base-3 digits, d f16. TQ2_0 66 bytes = qs[64], d f16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from edgellama.codecs.base import Codec, register
from edgellama.codecs.compiling import kernel
from edgellama.codecs.rounding import put_half, round_half_away

F = np.float32


@kernel
def _trits(x: Any, codes: Any) -> Any:
    """Codes 0, 1, 2 for -1, 0, 1 times the largest magnitude, which is returned."""
    magnitude = F(0)
    for i in range(256):
        magnitude = max(magnitude, F(abs(x[i])))
    inverse = F(F(1) / magnitude) if magnitude != F(0) else F(0)
    for i in range(256):
        value = F(x[i] * inverse)
        codes[i] = (round_half_away(value) if abs(value) < F(8388608.0) else np.int32(0)) + 1
    return magnitude


@kernel
def _digits(codes: Any, first: Any, stride: Any, count: Any) -> Any:
    """`count` codes as base-3 digits of a fraction of 256, padded to five digits."""
    q = 0
    for n in range(count):
        q = q * 3 + codes[first + n * stride]
    for _ in range(5 - count):
        q *= 3
    return np.uint8((q * 256 + 242) // 243)


@kernel
def quantize_tq1_0(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 256] -> uint8[blocks, 54]; importance has no effect."""
    codes = np.empty(256, np.int32)
    for block in range(x.shape[0]):
        d = _trits(x[block], codes)
        for m in range(32):
            y[block, m] = _digits(codes, m, 32, 5)
        for m in range(16):
            y[block, 32 + m] = _digits(codes, 160 + m, 16, 5)
        for m in range(4):
            y[block, 48 + m] = _digits(codes, 240 + m, 4, 4)
        put_half(y[block], 52, d)


@kernel
def quantize_tq2_0(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 256] -> uint8[blocks, 66]; importance has no effect."""
    codes = np.empty(256, np.int32)
    for block in range(x.shape[0]):
        d = _trits(x[block], codes)
        for half in range(2):
            for m in range(32):
                at = 128 * half + m
                packed = codes[at] | (codes[at + 32] << 2) | (codes[at + 64] << 4) | (codes[at + 96] << 6)
                y[block, 32 * half + m] = np.uint8(packed & 255)
        put_half(y[block], 64, d)


register(Codec(GGMLQuantizationType.TQ1_0, quantize_tq1_0))
register(Codec(GGMLQuantizationType.TQ2_0, quantize_tq2_0))
