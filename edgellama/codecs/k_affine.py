"""Q2_K, Q4_K and Q5_K: superblocks of 256 as sub-blocks with a scale and a minimum each.

Layouts (ggml-common.h): Q2_K 84 bytes = scales[16] (4-bit scale, 4-bit minimum), qs[64], d f16, dmin f16.
Q4_K 144 bytes = d f16, dmin f16, scales[12] (eight 6-bit scales and minima), qs[128]. Q5_K 176 bytes adds qh[32].

Sixteen sub-blocks are searched side by side: those of one Q2_K superblock, or of two Q4_K or Q5_K ones. Superblocks
whose ranges the lanes may not divide by are marked `odd` and done again by the scalar definition; that is compiled only
when there is one.
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
ZERO = F(0)
LANES = 16

_q2_plain = search.affine(16, 3, -0.5, 0.1, 15, LANES, absolute=True, weigh=search.weigh_by_size)
_q2_weighted = search.affine(16, 3, -0.9, 0.05, 36, LANES)
_q4_plain = search.affine(32, 15, -1.0, 0.1, 20, LANES, weigh=search.weigh_by_spread)
_q4_weighted = search.affine(32, 15, -0.9, 0.05, 36, LANES)
_q5_plain = search.affine(32, 31, -0.5, 0.1, 15, LANES, weigh=search.weigh_by_spread)
_q5_weighted = search.affine(32, 31, -0.9, 0.05, 36, LANES)


@kernel
def _at(array: Any) -> Any:
    return nb.uint64(array.ctypes.data)


@kernel
def _load(row: Any, first: Any, xs: Any) -> Any:
    """Put the sub-blocks of 256 values into lanes `first`, ... of xs[n, lanes].

    Returns whether each is flat or has a range the lanes may divide by.
    """
    n = xs.shape[0]
    wide = True
    for j in range(256 // n):
        own, lane = row[n * j : n * j + n], xs[:, first + j]
        low, high = ZERO, own[0]
        for i in range(n):
            value = own[i]
            lane[i] = value
            low = min(low, value)
            high = max(high, value)
        span = high - low
        if not (span == ZERO or (span > definitions.TINY_RANGE and span < definitions.HUGE_RANGE)):
            wide = False
    return wide


@kernel
def _plain_weights(xs: Any, w: Any) -> Any:
    """w = sqrt(mean square of the sub-block) + |x|."""
    n = xs.shape[0]
    total = np.zeros(LANES, np.float32)
    for i in range(n):
        for j in range(LANES):
            total[j] += xs[i, j] * xs[i, j]
    for j in range(LANES):
        total[j] = np.sqrt(total[j] / F(n))
    for i in range(n):
        for j in range(LANES):
            w[i, j] = total[j] + abs(xs[i, j])


@kernel
def _importance_weights(row: Any, importance: Any, factor: Any, first: Any, xs: Any, w: Any, sums: Any) -> Any:
    """w = importance * sqrt(factor * mean square of the superblock + x*x), and its sum per sub-block."""
    n = xs.shape[0]
    total = ZERO
    for i in range(256):
        total += row[i] * row[i]
    sigma2 = factor * total / F(256)
    for j in range(256 // n):
        lane, one = first + j, ZERO
        for i in range(n):
            w[i, lane] = importance[n * j + i] * np.sqrt(sigma2 + xs[i, lane] * xs[i, lane])
        for i in range(n):
            one += w[i, lane]
        sums[lane] = one


@kernel
def _scratch(n: Any) -> Any:
    """x, weights and levels of the lanes, what is found for them, sums of weights, codes, and levels of the scales."""
    floats = np.zeros((3 * n + 3, LANES), np.float32)
    xs, w, levels, rest = floats[:n], floats[n : 2 * n], floats[2 * n : 3 * n], floats[3 * n :]
    return xs, w, levels, rest[:2], rest[2], np.empty(256, np.uint8), np.zeros((2, LANES), np.int32)


@kernel
def _plain_scales(found: Any, levels: Any) -> Any:
    """6-bit levels of eight scales or minima; returns what one level stands for."""
    largest = ZERO
    for j in range(8):
        largest = found[j] if found[j] > largest else largest
    inverse = F(63) / largest if largest > ZERO else ZERO
    for j in range(8):
        levels[j] = min(63, nearest_int(inverse * found[j]) & 255)
    return largest / F(63)


@kernel
def _requantize(row: Any, lanes: Any, lane: Any, j: Any, d: Any, dm: Any, top: Any, codes: Any) -> Any:
    """Codes of sub-block j against its rounded scale d and minimum dm; the search's own levels where d is 0."""
    n = lanes.shape[0]
    if d == ZERO:
        for i in range(n):
            codes[n * j + i] = np.uint8(lanes[i, lane])
    else:
        requantize(_at(row) + 4 * n * j, _at(codes) + n * j, n // 16, dm, d, 0, top)


@kernel
def _close(row: Any, lanes: Any, first: Any, d: Any, dmin: Any, steps: Any, codes: Any, y: Any) -> Any:
    """A Q4_K or Q5_K block from its scales' unit, its minima's unit and their levels, steps[2, 8 of lanes]."""
    five = y.size == 176
    d, dmin = put_half(y, 0, d), put_half(y, 2, dmin)
    scales, minima = steps[0], steps[1]
    for j in range(4):
        y[4 + j], y[8 + j] = scales[j], minima[j]
    for j in range(4, 8):
        y[8 + j] = (scales[j] & 15) | ((minima[j] & 15) << 4)
        y[j] |= (scales[j] >> 4) << 6
        y[4 + j] |= (minima[j] >> 4) << 6
    for j in range(8):
        if j < 4:  # as a reader of the block sees them
            scale, minimum = y[4 + j] & 63, y[8 + j] & 63
        else:
            scale, minimum = (y[8 + j] & 15) | ((y[j] >> 6) << 4), (y[8 + j] >> 4) | ((y[4 + j] >> 6) << 4)
        _requantize(row, lanes, first + j, j, d * F(scale), dmin * F(minimum), 31 if five else 15, codes)
    at = 48 if five else 16
    for g in range(4):
        low, high, out = codes[64 * g : 64 * g + 32], codes[64 * g + 32 : 64 * g + 64], y[at + 32 * g :]
        for i in range(32):
            out[i] = np.uint8(low[i] & 15) | np.uint8(high[i] << 4)
    if five:
        out = y[16:48]
        out[:] = 0
        for g in range(8):
            own = codes[32 * g : 32 * g + 32]
            for i in range(32):
                out[i] |= np.uint8((own[i] >> 4) << g)


@kernel
def _close_plain(row: Any, lanes: Any, first: Any, found: Any, steps: Any, codes: Any, y: Any) -> Any:
    d = _plain_scales(found[0, first : first + 8], steps[0])
    dmin = _plain_scales(found[1, first : first + 8], steps[1])
    _close(row, lanes, first, d, dmin, steps, codes, y)


@kernel
def _close_weighted(row: Any, lanes: Any, first: Any, found: Any, sums: Any, steps: Any, codes: Any, y: Any) -> Any:
    own = sums[first : first + 8]
    d = definitions.positive_scales(found[0, first : first + 8], own, 63, steps[0, :8])
    dmin = definitions.positive_scales(found[1, first : first + 8], own, 63, steps[1, :8])
    if y.size == 176:
        for j in range(8):
            steps[0, j], steps[1, j] = min(63, steps[0, j]), min(63, steps[1, j])
    _close(row, lanes, first, d, dmin, steps, codes, y)


@kernel
def _q4_k_plain(x: Any, y: Any, odd: Any) -> Any:
    xs, w, levels, found, _, codes, steps = _scratch(32)
    for block in range(0, x.shape[0], 2):
        for half in range(2):
            at = min(block + half, x.shape[0] - 1)
            odd[at] = 0 if _load(x[at], 8 * half, xs) else 1
        _q4_plain(_at(xs), _at(w), _at(levels), _at(found))
        for half in range(2):
            at = min(block + half, x.shape[0] - 1)
            _close_plain(x[at], levels, 8 * half, found, steps, codes, y[at])


@kernel
def _q4_k_weighted(x: Any, importance: Any, y: Any, odd: Any) -> Any:
    xs, w, levels, found, sums, codes, steps = _scratch(32)
    period = importance.shape[0]
    for block in range(0, x.shape[0], 2):
        for half in range(2):
            at = min(block + half, x.shape[0] - 1)
            odd[at] = 0 if _load(x[at], 8 * half, xs) else 1
            _importance_weights(x[at], importance[at % period], F(2), 8 * half, xs, w, sums)
        _q4_weighted(_at(xs), _at(w), _at(levels), _at(found))
        for half in range(2):
            at = min(block + half, x.shape[0] - 1)
            _close_weighted(x[at], levels, 8 * half, found, sums, steps, codes, y[at])


@kernel
def _q5_k_plain(x: Any, y: Any, odd: Any) -> Any:
    xs, w, levels, found, _, codes, steps = _scratch(32)
    for block in range(0, x.shape[0], 2):
        for half in range(2):
            at = min(block + half, x.shape[0] - 1)
            odd[at] = 0 if _load(x[at], 8 * half, xs) else 1
        _q5_plain(_at(xs), _at(w), _at(levels), _at(found))
        for half in range(2):
            at = min(block + half, x.shape[0] - 1)
            _close_plain(x[at], levels, 8 * half, found, steps, codes, y[at])


@kernel
def _q5_k_weighted(x: Any, importance: Any, y: Any, odd: Any) -> Any:
    xs, w, levels, found, sums, codes, steps = _scratch(32)
    period = importance.shape[0]
    for block in range(0, x.shape[0], 2):
        for half in range(2):
            at = min(block + half, x.shape[0] - 1)
            odd[at] = 0 if _load(x[at], 8 * half, xs) else 1
            _importance_weights(x[at], importance[at % period], F(2), 8 * half, xs, w, sums)
        _q5_weighted(_at(xs), _at(w), _at(levels), _at(found))
        for half in range(2):
            at = min(block + half, x.shape[0] - 1)
            _close_weighted(x[at], levels, 8 * half, found, sums, steps, codes, y[at])


@kernel
def _scalar_k(x: Any, importance: Any, y: Any, odd: Any) -> Any:
    """The Q4_K or Q5_K superblocks marked in `odd`, by the scalar definition."""
    xs, w, levels, found, sums, codes, steps = _scratch(32)
    five = y.shape[1] == 176
    top = 31 if five else 15
    for block in range(x.shape[0]):
        if odd[block] == 0:
            continue
        _load(x[block], 0, xs)
        weighted = importance.shape[0] > 0
        if weighted:
            _importance_weights(x[block], importance[block % importance.shape[0]], F(2), 0, xs, w, sums)
        else:
            _plain_weights(xs, w)
        rmin, rdelta, tries = (F(-0.5), F(0.1), 15) if five else (F(-1.0), F(0.1), 20)
        if weighted:
            rmin, rdelta, tries = F(-0.9), F(0.05), 36
        for j in range(8):
            found[0, j], found[1, j] = definitions.affine(xs, w, levels, j, top, rmin, rdelta, tries, False)
        if weighted:
            _close_weighted(x[block], levels, 0, found, sums, steps, codes, y[block])
        else:
            _close_plain(x[block], levels, 0, found, steps, codes, y[block])


@kernel
def _q2_scales(found: Any, levels: Any) -> Any:
    """4-bit levels of 16 scales or minima; returns what one level stands for."""
    largest = ZERO
    for j in range(16):
        largest = found[j] if found[j] > largest else largest
    if not largest > ZERO:
        for j in range(16):
            levels[j] = 0
        return ZERO
    inverse = F(15) / largest
    for j in range(16):
        levels[j] = nearest_int(inverse * found[j])
    return largest / F(15)


@kernel
def _q2_close(row: Any, lanes: Any, d: Any, dmin: Any, steps: Any, codes: Any, y: Any) -> Any:
    for j in range(16):
        y[j] = np.uint8((steps[0, j] | (steps[1, j] << 4)) & 255)
    d, dmin = put_half(y, 80, d), put_half(y, 82, dmin)
    for j in range(16):
        _requantize(row, lanes, j, j, d * F(y[j] & 15), dmin * F(y[j] >> 4), 3, codes)
    for half in range(2):
        for i in range(32):
            at = 128 * half + i
            y[16 + 32 * half + i] = codes[at] | (codes[at + 32] << 2) | (codes[at + 64] << 4) | (codes[at + 96] << 6)


@kernel
def _q2_k_plain(x: Any, y: Any, odd: Any) -> Any:
    xs, w, levels, found, _, codes, steps = _scratch(16)
    for block in range(x.shape[0]):
        row = x[block]
        odd[block] = 0 if _load(row, 0, xs) else 1
        _q2_plain(_at(xs), _at(w), _at(levels), _at(found))
        d, dmin = _q2_scales(found[0], steps[0]), _q2_scales(found[1], steps[1])
        _q2_close(row, levels, d, dmin, steps, codes, y[block])


@kernel
def _q2_k_weighted(x: Any, importance: Any, y: Any, odd: Any) -> Any:
    xs, w, levels, found, sums, codes, steps = _scratch(16)
    for block in range(x.shape[0]):
        row = x[block]
        odd[block] = 0 if _load(row, 0, xs) else 1
        _importance_weights(row, importance[block % importance.shape[0]], F(1), 0, xs, w, sums)
        _q2_weighted(_at(xs), _at(w), _at(levels), _at(found))
        d = definitions.positive_scales(found[0], sums, 15, steps[0])
        dmin = definitions.positive_scales(found[1], sums, 15, steps[1])
        _q2_close(row, levels, d, dmin, steps, codes, y[block])


@kernel
def _scalar_q2_k(x: Any, importance: Any, y: Any, odd: Any) -> Any:
    """The Q2_K superblocks marked in `odd`, by the scalar definition."""
    xs, w, levels, found, sums, codes, steps = _scratch(16)
    for block in range(x.shape[0]):
        if odd[block] == 0:
            continue
        row = x[block]
        _load(row, 0, xs)
        weighted = importance.shape[0] > 0
        if weighted:
            _importance_weights(row, importance[block % importance.shape[0]], F(1), 0, xs, w, sums)
        else:
            w[:] = np.abs(xs)
        rmin, rdelta, tries = (F(-0.9), F(0.05), 36) if weighted else (F(-0.5), F(0.1), 15)
        for j in range(16):
            found[0, j], found[1, j] = definitions.affine(xs, w, levels, j, 3, rmin, rdelta, tries, not weighted)
        if weighted:
            d = definitions.positive_scales(found[0], sums, 15, steps[0])
            dmin = definitions.positive_scales(found[1], sums, 15, steps[1])
        else:
            d, dmin = _q2_scales(found[0], steps[0]), _q2_scales(found[1], steps[1])
        _q2_close(row, levels, d, dmin, steps, codes, y[block])


def _codec(kind: GGMLQuantizationType, plain: Any, weighted: Any, scalar: Any) -> Codec:
    def quantize(x: Any, importance: Any, y: Any) -> None:
        odd = np.zeros(len(x), np.uint8)
        if len(importance):
            weighted(x, importance, y, odd)
        else:
            plain(x, y, odd)
        if odd.any():
            scalar(x, importance, y, odd)

    return Codec(kind, quantize, takes_weights=True, compiled=(plain, weighted, scalar))


register(_codec(GGMLQuantizationType.Q2_K, _q2_k_plain, _q2_k_weighted, _scalar_q2_k))
register(_codec(GGMLQuantizationType.Q4_K, _q4_k_plain, _q4_k_weighted, _scalar_k))
register(_codec(GGMLQuantizationType.Q5_K, _q5_k_plain, _q5_k_weighted, _scalar_k))
