"""Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: blocks of 32 with one float16 scale, the _1 types with a float16 minimum.

Layouts (ggml-common.h): Q4_0 = d, qs[16]; Q4_1 = d, m, qs[16]; Q5_0 = d, qh u32, qs[16]; Q5_1 = d, m, qh u32, qs[16];
Q8_0 = d, qs i8[32]. With importance weights the block search of the K types is used, eight blocks side by side, and the
weight of a value depends on the mean square of its whole row: those kernels see rows.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from gguf import GGMLQuantizationType

from edgellama.codecs import definitions, search
from edgellama.codecs.base import Codec, register
from edgellama.codecs.compiling import kernel
from edgellama.codecs.rounding import put_half, round_half_away, truncate

F = np.float32
ZERO, ONE = F(0), F(1)
LANES = 8

_signed4 = search.symmetric(32, 8, LANES)
_signed5 = search.symmetric(32, 16, LANES)
_affine4 = search.affine(32, 15, -0.9, 0.05, 36, LANES)
_affine5 = search.affine(32, 31, -0.9, 0.05, 36, LANES)


@kernel
def _pack(codes: Any, y: Any, at: Any, five_bits: Any) -> Any:
    """32 codes into nibbles at y[at:], their fifth bits before them."""
    for i in range(16):
        y[at + i] = (codes[i] & 15) | ((codes[i + 16] & 15) << 4)
    if five_bits:
        for g in range(4):
            bits = 0
            for i in range(8):
                bits |= ((codes[8 * g + i] >> 4) & 1) << i
            y[at - 4 + g] = np.uint8(bits)


@kernel
def _plain_signed(x: Any, half: Any, codes: Any, y: Any) -> Any:
    """Q4_0 and Q5_0 without importance."""
    magnitude, extreme = ZERO, ZERO
    for i in range(32):
        if abs(x[i]) > magnitude:
            magnitude, extreme = abs(x[i]), x[i]
    d = extreme / F(-half)
    inverse = ONE / d if d != ZERO else ZERO
    put_half(y, 0, d)
    offset, top = F(half + F(0.5)), 2 * half - 1
    for i in range(32):
        codes[i] = np.uint8(min(top, truncate(x[i] * inverse + offset)) & 255)


@kernel
def _plain_affine(x: Any, top: Any, capped: Any, codes: Any, y: Any) -> Any:
    """Q4_1 and Q5_1 without importance."""
    low, high = F(3.4028234663852886e38), F(-3.4028234663852886e38)
    for i in range(32):
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
    d = (high - low) / F(top)
    inverse = ONE / d if d != ZERO else ZERO
    put_half(y, 0, d)
    put_half(y, 2, low)
    for i in range(32):
        code = truncate((x[i] - low) * inverse + F(0.5))
        codes[i] = np.uint8((min(top, code) if capped else code) & 255)


@kernel
def _load(row: Any, importance: Any, sigma2: Any, first: Any, xs: Any, w: Any) -> Any:
    """Blocks first .. first+7 of a row into lanes; lanes past the end are zero. Whether all ranges suit the lanes."""
    wide = True
    for lane in range(LANES):
        at = 32 * (first + lane)
        low, high = ZERO, ZERO
        for i in range(32):
            inside = at + i < row.size
            value = row[at + i] if inside else ZERO
            xs[i, lane] = value
            w[i, lane] = importance[at + i] * np.sqrt(sigma2 + value * value) if inside else ZERO
            high = value if i == 0 else max(high, value)
            low = min(low, value)
        span = high - low
        if not (span == ZERO or (span > definitions.TINY_RANGE and span < definitions.HUGE_RANGE)):
            wide = False
    return wide


@kernel
def _row_sigma2(row: Any) -> Any:
    total = ZERO
    for i in range(row.size):
        total = total + row[i] * row[i]
    return total / F(row.size)


@kernel
def _scratch() -> Any:
    return (
        np.empty((32, LANES), np.float32),
        np.empty((32, LANES), np.float32),
        np.empty((32, LANES), np.float32),
        np.empty((2, LANES), np.float32),
        np.empty(32, np.uint8),
    )


@kernel
def _weighted_signed(x: Any, importance: Any, half: Any, size: Any, y: Any) -> Any:
    xs, w, levels, found, codes = _scratch()
    a, b, c, e = (
        nb.uint64(xs.ctypes.data),
        nb.uint64(w.ctypes.data),
        nb.uint64(levels.ctypes.data),
        nb.uint64(found.ctypes.data),
    )
    for r in range(x.shape[0]):
        sigma2 = _row_sigma2(x[r])
        blocks = x.shape[1] // 32
        for first in range(0, blocks, LANES):
            _load(x[r], importance, sigma2, first, xs, w)
            if half == 8:
                _signed4(a, b, c, e)
            else:
                _signed5(a, b, c, e)
            for lane in range(min(LANES, blocks - first)):
                out = y[r, (first + lane) * size : (first + lane + 1) * size]
                put_half(out, 0, found[0, lane])
                for i in range(32):
                    codes[i] = np.uint8(levels[i, lane])
                _pack(codes, out, size - 16, half == 16)


@kernel
def _weighted_affine(x: Any, importance: Any, top: Any, size: Any, y: Any) -> Any:
    xs, w, levels, found, codes = _scratch()
    a, b, c, e = (
        nb.uint64(xs.ctypes.data),
        nb.uint64(w.ctypes.data),
        nb.uint64(levels.ctypes.data),
        nb.uint64(found.ctypes.data),
    )
    for r in range(x.shape[0]):
        sigma2 = _row_sigma2(x[r])
        blocks = x.shape[1] // 32
        for first in range(0, blocks, LANES):
            if not _load(x[r], importance, sigma2, first, xs, w):
                for lane in range(LANES):
                    found[0, lane], found[1, lane] = definitions.affine(
                        xs, w, levels, lane, top, F(-0.9), F(0.05), 36, False
                    )
            elif top == 15:
                _affine4(a, b, c, e)
            else:
                _affine5(a, b, c, e)
            for lane in range(min(LANES, blocks - first)):
                out = y[r, (first + lane) * size : (first + lane + 1) * size]
                put_half(out, 0, found[0, lane])
                put_half(out, 2, -found[1, lane])
                for i in range(32):
                    codes[i] = np.uint8(levels[i, lane])
                _pack(codes, out, size - 16, top == 31)


@kernel
def quantize_q4_0(x: Any, importance: Any, y: Any) -> Any:
    """float32[rows, k] -> uint8[rows, k / 32 * 18]."""
    if importance.shape[0]:
        _weighted_signed(x, importance[0], 8, 18, y)
        return
    codes = np.empty(32, np.uint8)
    for r in range(x.shape[0]):
        for block in range(x.shape[1] // 32):
            out = y[r, block * 18 : block * 18 + 18]
            _plain_signed(x[r, block * 32 : block * 32 + 32], 8, codes, out)
            _pack(codes, out, 2, False)


@kernel
def quantize_q5_0(x: Any, importance: Any, y: Any) -> Any:
    """float32[rows, k] -> uint8[rows, k / 32 * 22]."""
    if importance.shape[0]:
        _weighted_signed(x, importance[0], 16, 22, y)
        return
    codes = np.empty(32, np.uint8)
    for r in range(x.shape[0]):
        for block in range(x.shape[1] // 32):
            out = y[r, block * 22 : block * 22 + 22]
            _plain_signed(x[r, block * 32 : block * 32 + 32], 16, codes, out)
            _pack(codes, out, 6, True)


@kernel
def quantize_q4_1(x: Any, importance: Any, y: Any) -> Any:
    """float32[rows, k] -> uint8[rows, k / 32 * 20]."""
    if importance.shape[0]:
        _weighted_affine(x, importance[0], 15, 20, y)
        return
    codes = np.empty(32, np.uint8)
    for r in range(x.shape[0]):
        for block in range(x.shape[1] // 32):
            out = y[r, block * 20 : block * 20 + 20]
            _plain_affine(x[r, block * 32 : block * 32 + 32], 15, True, codes, out)
            _pack(codes, out, 4, False)


@kernel
def quantize_q5_1(x: Any, importance: Any, y: Any) -> Any:
    """float32[rows, k] -> uint8[rows, k / 32 * 24]."""
    if importance.shape[0]:
        _weighted_affine(x, importance[0], 31, 24, y)
        return
    codes = np.empty(32, np.uint8)
    for r in range(x.shape[0]):
        for block in range(x.shape[1] // 32):
            out = y[r, block * 24 : block * 24 + 24]
            _plain_affine(x[r, block * 32 : block * 32 + 32], 31, False, codes, out)
            _pack(codes, out, 8, True)


@kernel
def quantize_q8_0(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 32] -> uint8[blocks, 34]."""
    for block in range(x.shape[0]):
        magnitude = ZERO
        for i in range(32):
            magnitude = max(magnitude, abs(x[block, i]))
        d = magnitude / F(127)
        inverse = ONE / d if d != ZERO else ZERO
        put_half(y[block], 0, d)
        for i in range(32):
            value = x[block, i] * inverse
            y[block, 2 + i] = np.uint8((round_half_away(value) if abs(value) < F(8388608.0) else np.int32(0)) & 255)


register(Codec(GGMLQuantizationType.Q4_0, quantize_q4_0, takes_weights=True, by_row=True))
register(Codec(GGMLQuantizationType.Q4_1, quantize_q4_1, takes_weights=True, by_row=True))
register(Codec(GGMLQuantizationType.Q5_0, quantize_q5_0, takes_weights=True, by_row=True))
register(Codec(GGMLQuantizationType.Q5_1, quantize_q5_1, takes_weights=True, by_row=True))
register(Codec(GGMLQuantizationType.Q8_0, quantize_q8_0))
