"""Q3_K and Q6_K: superblocks of 256 as 16 sub-blocks of 16 with a signed scale each and no minimum.

Layouts (ggml-common.h): Q3_K 110 bytes = hmask[32], qs[64], scales[12] (sixteen 6-bit), d f16.
Q6_K 210 bytes = ql[128], qh[64], scales i8[16], d f16.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from gguf import GGMLQuantizationType

from edgellama.codecs import definitions, search
from edgellama.codecs.base import Codec, register
from edgellama.codecs.compiling import kernel
from edgellama.codecs.rounding import nearest_int, put_half, requantize

F = np.float32
ZERO, ONE = F(0), F(1)

_q3_refined = search.refined(16, 4, 16)
_q3_weighted = search.symmetric(16, 4, 16)
_q6_plain = search.symmetric(16, 32, 16, weigh=search.weigh_by_square)
_q6_weighted = search.symmetric(16, 32, 16)


@kernel
def _spread(x: Any, lanes: Any) -> Any:
    """Transpose 256 values into lanes[16, 16]."""
    for j in range(16):
        own, lane = x[16 * j : 16 * j + 16], lanes[:, j]
        for i in range(16):
            lane[i] = own[i]


@kernel
def _requantize(x: Any, lanes: Any, j: Any, d: Any, half: Any, codes: Any) -> Any:
    """Codes 0..2*half-1 of sub-block j against its rounded scale; the search's own levels where that is 0."""
    if d == ZERO:
        for i in range(16):
            codes[16 * j + i] = np.uint8(lanes[i, j])
    else:
        at = nb.uint64(x.ctypes.data) + 64 * j
        requantize(at, nb.uint64(codes.ctypes.data) + 16 * j, 1, ZERO, d, half, 2 * half - 1)


@kernel
def _largest(scales: Any) -> Any:
    """The first scale of largest magnitude, and that magnitude."""
    extreme, magnitude = ZERO, ZERO
    for j in range(16):
        if abs(scales[j]) > magnitude:
            magnitude, extreme = F(abs(scales[j])), scales[j]
    return extreme, magnitude


@kernel
def quantize_q6_k(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 256] -> uint8[blocks, 210]."""
    xs, w, levels = np.empty((16, 16), np.float32), np.empty((16, 16), np.float32), np.empty((16, 16), np.float32)
    found, codes = np.empty((2, 16), np.float32), np.empty(256, np.uint8)
    a, b, c, e = (
        nb.uint64(xs.ctypes.data),
        nb.uint64(w.ctypes.data),
        nb.uint64(levels.ctypes.data),
        nb.uint64(found.ctypes.data),
    )
    for block in range(x.shape[0]):
        row, out = x[block], y[block]
        _spread(row, xs)
        if importance.shape[0]:
            _spread(importance[block % importance.shape[0]], w)
            _q6_weighted(a, b, c, e)
        else:
            _q6_plain(a, b, c, e)
        extreme, magnitude = _largest(found[0])
        if magnitude < F(1e-15):
            for i in range(210):
                out[i] = 0
            continue
        iscale = F(-128) / extreme
        d = put_half(out, 208, ONE / iscale)
        for j in range(16):
            scale = np.int8(min(127, nearest_int(iscale * found[0, j])))
            out[192 + j] = np.uint8(scale)
            _requantize(row, levels, j, d * F(scale), 32, codes)
        _pack_q6(codes, out)


@kernel
def _pack_q6(codes: Any, out: Any) -> Any:
    for half in range(2):
        four = codes[128 * half : 128 * half + 128].reshape(4, 32)
        low, high = out[64 * half : 64 * half + 64].reshape(2, 32), out[128 + 32 * half : 160 + 32 * half]
        for i in range(32):
            q1, q2, q3, q4 = four[0, i], four[1, i], four[2, i], four[3, i]
            low[0, i] = np.uint8(q1 & 15) | np.uint8(q3 << 4)
            low[1, i] = np.uint8(q2 & 15) | np.uint8(q4 << 4)
            high[i] = np.uint8(q1 >> 4) | np.uint8((q2 >> 4) << 2) | np.uint8((q3 >> 4) << 4) | np.uint8((q4 >> 4) << 6)


@kernel
def _q3_scales(found: Any, levels: Any) -> Any:
    """6-bit levels of 16 scales without importance; returns what one level stands for."""
    extreme, _ = _largest(found)
    if extreme == ZERO:
        for j in range(16):
            levels[j] = 0  # the stored bits; a reader takes them as -32, times a d of 0
        return ZERO
    iscale = F(-32) / extreme
    for j in range(16):
        wrapped = np.int8(nearest_int(iscale * found[j]))  # C keeps it in a byte before clamping
        levels[j] = max(0, min(63, np.int32(wrapped) + 32))
    return ONE / iscale


@kernel
def quantize_q3_k(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 256] -> uint8[blocks, 110]."""
    xs, w, levels = np.empty((16, 16), np.float32), np.empty((16, 16), np.float32), np.empty((16, 16), np.float32)
    found, sums, codes = np.empty((2, 16), np.float32), np.empty(16, np.float32), np.empty(256, np.uint8)
    scales = np.zeros(16, np.int32)
    a, b, c, e = (
        nb.uint64(xs.ctypes.data),
        nb.uint64(w.ctypes.data),
        nb.uint64(levels.ctypes.data),
        nb.uint64(found.ctypes.data),
    )
    for block in range(x.shape[0]):
        row, out = x[block], y[block]
        _spread(row, xs)
        if importance.shape[0]:
            _q3_weights(row, importance[block % importance.shape[0]], xs, w, sums)
            _q3_weighted(a, b, c, e)
            d = definitions.signed_scales(found[0], sums, 32, scales)
        else:
            _q3_refined(a, c, e)
            d = _q3_scales(found[0], scales)
        d = put_half(out, 108, d)
        for j in range(16):
            _requantize(row, levels, j, d * F(scales[j] - 32), 4, codes)
        _pack_q3(codes, scales, out)


@kernel
def _q3_weights(row: Any, importance: Any, xs: Any, w: Any, sums: Any) -> Any:
    total = ZERO
    for i in range(256):
        total = total + row[i] * row[i]
    sigma2 = F(2) * total / F(256)
    for j in range(16):
        sums[j] = ZERO
    for i in range(16):
        for j in range(16):
            w[i, j] = importance[16 * j + i] * np.sqrt(sigma2 + xs[i, j] * xs[i, j])
            sums[j] = sums[j] + w[i, j]


@kernel
def _pack_q3(codes: Any, scales: Any, out: Any) -> Any:
    for j in range(12):
        out[96 + j] = 0
    for j in range(16):
        out[96 + j % 8] |= (scales[j] & 15) << (4 * (j // 8))
        out[104 + j % 4] |= (scales[j] >> 4) << (2 * (j // 4))
    for i in range(32):
        bits = np.uint8(0)
        for g in range(8):
            bits |= (codes[32 * g + i] >> 2) << g
        out[i] = bits
    for half in range(2):
        for i in range(32):
            at = 128 * half + i
            low = (
                (codes[at] & 3)
                | ((codes[at + 32] & 3) << 2)
                | ((codes[at + 64] & 3) << 4)
                | ((codes[at + 96] & 3) << 6)
            )
            out[32 + 32 * half + i] = low


register(Codec(GGMLQuantizationType.Q3_K, quantize_q3_k, takes_weights=True))
register(Codec(GGMLQuantizationType.Q6_K, quantize_q6_k, takes_weights=True))
