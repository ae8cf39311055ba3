"""IQ4_NL and IQ4_XS: 4-bit levels on a fixed nonlinear grid.

Layouts (ggml-common.h): IQ4_NL 18 bytes = d f16, qs[16]. IQ4_XS 136 bytes = d f16, scales_h u16, scales_l[4], qs[128]:
eight sub-blocks of 32 with 6-bit scales.
"""

from __future__ import annotations

import itertools
from typing import Any

import numba as nb
import numpy as np
from gguf import GGMLQuantizationType

from edgellama.codecs import search
from edgellama.codecs.base import Codec, register
from edgellama.codecs.compiling import kernel
from edgellama.codecs.rounding import nearest_int, put_half

F = np.float32
ZERO, ONE = F(0), F(1)
LANES = 8
VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MIDDLES = np.array([(a + b) / 2 for a, b in itertools.pairwise(VALUES)], np.float32)

_search = search.nonlinear(32, VALUES, 7, LANES)


@kernel
def _level(value: Any) -> Any:
    level = 0
    for i in range(15):
        level += 0 if value < _MIDDLES[i] else 1
    return np.uint8(level)


@kernel
def _weigh(x: Any, importance: Any, sigma2: Any, lane: Any, xs: Any, w: Any) -> Any:
    """Put one block of 32 and its weights into a lane."""
    for i in range(32):
        xs[i, lane] = x[i]
        square = x[i] * x[i]
        w[i, lane] = importance[i] * np.sqrt(sigma2 + square) if importance.size else square


@kernel
def _sigma2(x: Any) -> Any:
    total = ZERO
    for i in range(x.size):
        total = total + x[i] * x[i]
    return total * (F(2) / F(x.size))


@kernel
def _pack(levels: Any, y: Any) -> Any:
    for i in range(16):
        y[i] = levels[i] | (levels[i + 16] << 4)


@kernel
def quantize_iq4_nl(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 32] -> uint8[blocks, 18]."""
    xs, w = np.zeros((32, LANES), np.float32), np.zeros((32, LANES), np.float32)
    found, levels, none = np.empty((2, LANES), np.float32), np.empty(32, np.uint8), np.empty(0, np.float32)
    for first in range(0, x.shape[0], LANES):
        count = min(LANES, x.shape[0] - first)
        for lane in range(count):
            row = x[first + lane]
            qw = importance[(first + lane) % importance.shape[0]] if importance.shape[0] else none
            _weigh(row, qw, _sigma2(row), lane, xs, w)
        _search(nb.uint64(xs.ctypes.data), nb.uint64(w.ctypes.data), nb.uint64(0), nb.uint64(found.ctypes.data))
        for lane in range(count):
            scale = found[0, lane]
            put_half(y[first + lane], 0, scale)
            inverse = ONE / scale if scale != ZERO else ZERO
            for i in range(32):
                levels[i] = _level(inverse * x[first + lane, i])
            _pack(levels, y[first + lane, 2:])


@kernel
def quantize_iq4_xs(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 256] -> uint8[blocks, 136]."""
    xs, w = np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32)
    found, levels, none = np.empty((2, LANES), np.float32), np.empty(32, np.uint8), np.empty(0, np.float32)
    for block in range(x.shape[0]):
        row, out = x[block], y[block]
        qw = importance[block % importance.shape[0]] if importance.shape[0] else none
        sigma2 = _sigma2(row)
        for j in range(8):
            _weigh(row[32 * j : 32 * j + 32], qw[32 * j : 32 * j + 32], sigma2, j, xs, w)
        _search(nb.uint64(xs.ctypes.data), nb.uint64(w.ctypes.data), nb.uint64(0), nb.uint64(found.ctypes.data))
        extreme, magnitude = ZERO, ZERO
        for j in range(8):
            if abs(found[0, j]) > magnitude:
                magnitude, extreme = abs(found[0, j]), found[0, j]
        d = -extreme / F(32)
        put_half(out, 0, d)
        inverse = ONE / d if d != ZERO else ZERO
        high = 0
        for j in range(4):
            out[4 + j] = 0
        for j in range(8):
            scale = max(-32, min(31, nearest_int(inverse * found[0, j])))
            step = d * F(scale)
            inverse_step = F(ONE / step) if step != ZERO else ZERO
            for i in range(32):
                levels[i] = _level(inverse_step * row[32 * j + i])
            _pack(levels, out[8 + 16 * j :])
            out[4 + j // 2] |= np.uint8(((scale + 32) & 15) << (4 * (j % 2)))
            high |= ((scale + 32) >> 4) << (2 * j)
        out[2], out[3] = np.uint8(high & 255), np.uint8(high >> 8)


register(Codec(GGMLQuantizationType.IQ4_NL, quantize_iq4_nl, takes_weights=True))
register(Codec(GGMLQuantizationType.IQ4_XS, quantize_iq4_xs, takes_weights=True))
