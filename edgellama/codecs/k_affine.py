"""Q2_K, Q4_K and Q5_K: superblocks of 256 as sub-blocks with a scale and a minimum each.

Layouts (ggml-common.h): Q2_K 84 bytes = scales[16] (4-bit scale, 4-bit minimum), qs[64], d f16, dmin f16.
Q4_K 144 bytes = d f16, dmin f16, scales[12] (eight 6-bit scales and minima), qs[128]. Q5_K 176 bytes adds qh[32].
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from gguf import GGMLQuantizationType

from edgellama.codecs import definitions, search
from edgellama.codecs.base import Codec, register
from edgellama.codecs.compiling import kernel
from edgellama.codecs.rounding import nearest_int, put_half

F = np.float32

_q2_plain = search.affine(16, 3, -0.5, 0.1, 15, 16, absolute=True)
_q2_weighted = search.affine(16, 3, -0.9, 0.05, 36, 16)
_q4_plain = search.affine(32, 15, -1.0, 0.1, 20, 8)
_q4_weighted = search.affine(32, 15, -0.9, 0.05, 36, 8)
_q5_plain = search.affine(32, 31, -0.5, 0.1, 15, 8)
_q5_weighted = search.affine(32, 31, -0.9, 0.05, 36, 8)


@kernel
def _spread(x: Any, lanes: Any) -> Any:
    """Transpose 256 values into lanes[n, sub-blocks]."""
    n, count = lanes.shape
    for j in range(count):
        for i in range(n):
            lanes[i, j] = x[n * j + i]


@kernel
def _wide_ranges(x: Any) -> Any:
    """Whether every sub-block of x[n, lanes] is flat or has a range the lanes may divide by."""
    n, count = x.shape
    for j in range(count):
        low, high = F(0), x[0, j]
        for i in range(n):
            low = min(low, x[i, j])
            high = max(high, x[i, j])
        span = F(high - low)
        if not (span == F(0) or (span > definitions.TINY_RANGE and span < definitions.HUGE_RANGE)):
            return False
    return True


@kernel
def _plain_weights(x: Any, w: Any) -> Any:
    """w = sqrt(mean square of the sub-block) + |x|."""
    n, count = x.shape
    total = np.zeros(count, np.float32)
    for i in range(n):
        for j in range(count):
            total[j] = F(total[j] + F(x[i, j] * x[i, j]))
    for j in range(count):
        total[j] = np.sqrt(F(total[j] / F(n)))
    for i in range(n):
        for j in range(count):
            w[i, j] = F(total[j] + F(abs(x[i, j])))


@kernel
def _importance_weights(importance: Any, sigma2: Any, x: Any, w: Any, sums: Any) -> Any:
    """w = importance * sqrt(sigma2 + x*x), and its sum per sub-block."""
    n, count = x.shape
    for j in range(count):
        sums[j] = F(0)
    for i in range(n):
        for j in range(count):
            w[i, j] = F(importance[n * j + i] * np.sqrt(F(sigma2 + F(x[i, j] * x[i, j]))))
    for i in range(n):
        for j in range(count):
            sums[j] = F(sums[j] + w[i, j])


@kernel
def _sum_of_squares(x: Any) -> Any:
    total = F(0)
    for i in range(x.shape[0]):
        total = F(total + F(x[i] * x[i]))
    return total


@kernel
def _requantize(x: Any, lanes: Any, j: Any, d: Any, dm: Any, top: Any, codes: Any) -> Any:
    """Codes of sub-block j against its rounded scale d and minimum dm; the search's own levels where d is 0."""
    n = lanes.shape[0]
    if d == F(0):
        for i in range(n):
            codes[n * j + i] = np.uint8(lanes[i, j])
    else:
        for i in range(n):
            q = nearest_int(F(F(x[n * j + i] + dm) / d))
            codes[n * j + i] = np.uint8(max(0, min(top, q)))


@kernel
def _pack_scales(scales: Any, minima: Any, y: Any) -> Any:
    """Eight 6-bit scales and minima into y[4:16]."""
    for j in range(4):
        y[4 + j], y[8 + j] = scales[j], minima[j]
    for j in range(4, 8):
        y[8 + j] = (scales[j] & 15) | ((minima[j] & 15) << 4)
        y[j] |= (scales[j] >> 4) << 6
        y[4 + j] |= (minima[j] >> 4) << 6


@kernel
def _plain_scales(found: Any, scales: Any, minima: Any) -> Any:
    """Largest scale and minimum of found[2, 8], and all as 6-bit levels of them."""
    max_scale, max_min = F(0), F(0)
    for j in range(8):
        max_scale = found[0, j] if found[0, j] > max_scale else max_scale
        max_min = found[1, j] if found[1, j] > max_min else max_min
    inv_scale = F(F(63) / max_scale) if max_scale > F(0) else F(0)
    inv_min = F(F(63) / max_min) if max_min > F(0) else F(0)
    for j in range(8):
        scales[j] = min(63, nearest_int(F(inv_scale * found[0, j])) & 255)
        minima[j] = min(63, nearest_int(F(inv_min * found[1, j])) & 255)
    return F(max_scale / F(63)), F(max_min / F(63))


@kernel
def _unpacked(y: Any, j: Any) -> Any:
    """6-bit scale and minimum of sub-block j as a reader of the block sees them."""
    if j < 4:
        return y[4 + j] & 63, y[8 + j] & 63
    return (y[8 + j] & 15) | ((y[j] >> 6) << 4), (y[8 + j] >> 4) | ((y[4 + j] >> 6) << 4)


@kernel
def _close_block(x: Any, lanes: Any, d: Any, dmin: Any, scales: Any, minima: Any, top: Any, codes: Any, y: Any) -> Any:
    """Header of a Q4_K or Q5_K block, and the codes that belong to it."""
    d, dmin = put_half(y, 0, d), put_half(y, 2, dmin)
    _pack_scales(scales, minima, y)
    for j in range(8):
        scale, minimum = _unpacked(y, j)
        _requantize(x, lanes, j, F(d * F(scale)), F(dmin * F(minimum)), top, codes)


@kernel
def _pack_nibbles(codes: Any, y: Any, at: Any) -> Any:
    for g in range(4):
        for i in range(32):
            y[at + 32 * g + i] = (codes[64 * g + i] & 15) | ((codes[64 * g + 32 + i] & 15) << 4)


@kernel
def _pack_fifth_bits(codes: Any, y: Any) -> Any:
    for i in range(32):
        bits = np.uint8(0)
        for g in range(8):
            bits |= (codes[32 * g + i] >> 4) << g
        y[16 + i] = bits


@kernel
def _addresses(x: Any, w: Any, levels: Any, out: Any) -> Any:
    return nb.uint64(x.ctypes.data), nb.uint64(w.ctypes.data), nb.uint64(levels.ctypes.data), nb.uint64(out.ctypes.data)


@kernel
def _scalar_search(
    x: Any, w: Any, levels: Any, out: Any, top: Any, rmin: Any, rdelta: Any, steps: Any, absolute: Any
) -> Any:
    for j in range(x.shape[1]):
        out[0, j], out[1, j] = definitions.affine(x, w, levels, j, top, rmin, rdelta, steps, absolute)


@kernel
def quantize_q4_k(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 256] -> uint8[blocks, 144]."""
    xs, w, levels = np.empty((32, 8), np.float32), np.empty((32, 8), np.float32), np.empty((32, 8), np.float32)
    found, sums, codes = np.empty((2, 8), np.float32), np.empty(8, np.float32), np.empty(256, np.uint8)
    scales, minima = np.empty(8, np.int32), np.empty(8, np.int32)
    a, b, c, e = _addresses(xs, w, levels, found)
    for block in range(x.shape[0]):
        row = x[block]
        _spread(row, xs)
        wide = _wide_ranges(xs)
        if importance.shape[0]:
            sigma2 = F(F(F(2) * _sum_of_squares(row)) / F(256))
            _importance_weights(importance[block % importance.shape[0]], sigma2, xs, w, sums)
            if wide:
                _q4_weighted(a, b, c, e)
            else:
                _scalar_search(xs, w, levels, found, 15, F(-0.9), F(0.05), 36, False)
            d = definitions.positive_scales(found[0], sums, 63, scales)
            dmin = definitions.positive_scales(found[1], sums, 63, minima)
        else:
            _plain_weights(xs, w)
            if wide:
                _q4_plain(a, b, c, e)
            else:
                _scalar_search(xs, w, levels, found, 15, F(-1.0), F(0.1), 20, False)
            d, dmin = _plain_scales(found, scales, minima)
        _close_block(row, levels, d, dmin, scales, minima, 15, codes, y[block])
        _pack_nibbles(codes, y[block], 16)


@kernel
def quantize_q5_k(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 256] -> uint8[blocks, 176]."""
    xs, w, levels = np.empty((32, 8), np.float32), np.empty((32, 8), np.float32), np.empty((32, 8), np.float32)
    found, sums, codes = np.empty((2, 8), np.float32), np.empty(8, np.float32), np.empty(256, np.uint8)
    scales, minima = np.empty(8, np.int32), np.empty(8, np.int32)
    a, b, c, e = _addresses(xs, w, levels, found)
    for block in range(x.shape[0]):
        row = x[block]
        _spread(row, xs)
        wide = _wide_ranges(xs)
        if importance.shape[0]:
            sigma2 = F(F(F(2) * _sum_of_squares(row)) / F(256))
            _importance_weights(importance[block % importance.shape[0]], sigma2, xs, w, sums)
            if wide:
                _q5_weighted(a, b, c, e)
            else:
                _scalar_search(xs, w, levels, found, 31, F(-0.9), F(0.05), 36, False)
            d = definitions.positive_scales(found[0], sums, 63, scales)
            dmin = definitions.positive_scales(found[1], sums, 63, minima)
            for j in range(8):
                scales[j], minima[j] = min(63, scales[j]), min(63, minima[j])
        else:
            _plain_weights(xs, w)
            if wide:
                _q5_plain(a, b, c, e)
            else:
                _scalar_search(xs, w, levels, found, 31, F(-0.5), F(0.1), 15, False)
            d, dmin = _plain_scales(found, scales, minima)
        _close_block(row, levels, d, dmin, scales, minima, 31, codes, y[block])
        _pack_nibbles(codes, y[block], 48)
        _pack_fifth_bits(codes, y[block])


@kernel
def quantize_q2_k(x: Any, importance: Any, y: Any) -> Any:
    """float32[blocks, 256] -> uint8[blocks, 84]."""
    xs, w, levels = np.empty((16, 16), np.float32), np.empty((16, 16), np.float32), np.empty((16, 16), np.float32)
    found, sums, codes = np.empty((2, 16), np.float32), np.empty(16, np.float32), np.empty(256, np.uint8)
    scales, minima = np.zeros(16, np.int32), np.zeros(16, np.int32)
    a, b, c, e = _addresses(xs, w, levels, found)
    for block in range(x.shape[0]):
        row, out = x[block], y[block]
        _spread(row, xs)
        wide = _wide_ranges(xs)
        if importance.shape[0]:
            sigma2 = F(_sum_of_squares(row) / F(256))
            _importance_weights(importance[block % importance.shape[0]], sigma2, xs, w, sums)
            if wide:
                _q2_weighted(a, b, c, e)
            else:
                _scalar_search(xs, w, levels, found, 3, F(-0.9), F(0.05), 36, False)
            d = definitions.positive_scales(found[0], sums, 15, scales)
            dmin = definitions.positive_scales(found[1], sums, 15, minima)
        else:
            for i in range(16):
                for j in range(16):
                    w[i, j] = abs(xs[i, j])
            if wide:
                _q2_plain(a, b, c, e)
            else:
                _scalar_search(xs, w, levels, found, 3, F(-0.5), F(0.1), 15, True)
            d = _q2_scales(found[0], scales)
            dmin = _q2_scales(found[1], minima)
        for j in range(16):
            out[j] = np.uint8((scales[j] | (minima[j] << 4)) & 255)
        d, dmin = put_half(out, 80, d), put_half(out, 82, dmin)
        for j in range(16):
            _requantize(row, levels, j, F(d * F(out[j] & 15)), F(dmin * F(out[j] >> 4)), 3, codes)
        for half in range(2):
            for i in range(32):
                at = 128 * half + i
                out[16 + 32 * half + i] = (
                    codes[at] | (codes[at + 32] << 2) | (codes[at + 64] << 4) | (codes[at + 96] << 6)
                )


@kernel
def _q2_scales(found: Any, levels: Any) -> Any:
    """4-bit levels of 16 scales or minima; returns what one level stands for."""
    largest = F(0)
    for j in range(16):
        largest = found[j] if found[j] > largest else largest
    if not largest > F(0):
        for j in range(16):
            levels[j] = 0
        return F(0)
    inverse = F(F(15) / largest)
    for j in range(16):
        levels[j] = nearest_int(F(inverse * found[j]))
    return F(largest / F(15))


register(Codec(GGMLQuantizationType.Q2_K, quantize_q2_k, takes_weights=True))
register(Codec(GGMLQuantizationType.Q4_K, quantize_q4_k, takes_weights=True))
register(Codec(GGMLQuantizationType.Q5_K, quantize_q5_k, takes_weights=True))
