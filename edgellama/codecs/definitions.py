"""Scalar forms of the searches: for the few values of a superblock's scales, and for inputs the lanes cannot take.

Written from the behaviour of ggml-quants.c (make_qkx2/3_quants, make_qp_quants, make_qx_quants) of the pinned
llama.cpp; float32 in its order, wrap-around of nearest_int included.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellama.codecs.compiling import kernel
from edgellama.codecs.rounding import nearest_int

F = np.float32
ZERO, ONE = F(0), F(1)
TINY_RANGE, HUGE_RANGE = F(2.0**-100), F(2.0**120)


@kernel
def affine(x: Any, w: Any, levels: Any, lane: Any, top: Any, rmin: Any, rdelta: Any, steps: Any, absolute: Any) -> Any:
    """One lane of `search.affine` on x[n, lanes], w[n, lanes]: fills levels[:, lane], returns (scale, minimum)."""
    n = x.shape[0]
    low, high = x[0, lane], x[0, lane]
    sum_w = w[0, lane]
    sum_x = sum_w * x[0, lane]
    for i in range(1, n):
        value = x[i, lane]
        if value < low:
            low = value
        if value > high:
            high = value
        sum_w = sum_w + w[i, lane]
        sum_x = sum_x + w[i, lane] * value
    if low > ZERO:
        low = ZERO
    if high == low:
        for i in range(n):
            levels[i, lane] = ZERO
        return ZERO, -low
    iscale = F(top) / (high - low)
    scale = ONE / iscale
    best = ZERO
    for i in range(n):
        q = F(max(0, min(top, nearest_int(iscale * (x[i, lane] - low)))))
        levels[i, lane] = q
        diff = scale * q + low - x[i, lane]
        best = best + w[i, lane] * (abs(diff) if absolute else diff * diff)
    trial = np.empty(n, np.float32)
    for step in range(steps + 1):
        iscale = (rmin + rdelta * F(step) + F(top)) / (high - low)
        sum_l, sum_l2, sum_xl = ZERO, ZERO, ZERO
        for i in range(n):
            q = F(max(0, min(top, nearest_int(iscale * (x[i, lane] - low)))))
            trial[i] = q
            wl = w[i, lane] * q
            sum_l, sum_l2, sum_xl = sum_l + wl, sum_l2 + wl * q, sum_xl + wl * x[i, lane]
        det = sum_w * sum_l2 - sum_l * sum_l
        if det > ZERO:
            new_scale = (sum_w * sum_xl - sum_x * sum_l) / det
            new_low = (sum_l2 * sum_x - sum_l * sum_xl) / det
            if new_low > ZERO:
                new_low = ZERO
                new_scale = sum_xl / sum_l2
            cost = ZERO
            for i in range(n):
                diff = new_scale * trial[i] + new_low - x[i, lane]
                cost = cost + w[i, lane] * (abs(diff) if absolute else diff * diff)
            if cost < best:
                for i in range(n):
                    levels[i, lane] = trial[i]
                best, scale, low = cost, new_scale, new_low
    return scale, -low


@kernel
def positive_scales(x: Any, w: Any, top: Any, levels: Any) -> Any:
    """Quantize n non-negative scales x to 0..top with weights w (make_qp_quants): fills `levels`, returns the scale."""
    n = x.shape[0]
    largest = ZERO
    for i in range(n):
        largest = largest if largest > x[i] else x[i]
    if largest < F(1e-15):
        for i in range(n):
            levels[i] = 0
        return ZERO
    iscale = F(top) / largest
    scale = ONE / iscale
    best = ZERO
    for i in range(n):
        level = nearest_int(iscale * x[i]) & 255  # stored as a byte before it is used
        diff = x[i] - scale * F(level)
        best = best + w[i] * diff * diff
    for step in range(-4, 5):
        if step == 0:
            continue
        trial_iscale = (F(0.1) * F(step) + F(top)) / largest
        trial_scale = ONE / trial_iscale
        cost = ZERO
        for i in range(n):
            level = min(top, nearest_int(trial_iscale * x[i]))
            diff = x[i] - trial_scale * F(level)
            cost = cost + w[i] * diff * diff
        if cost < best:
            best, iscale = cost, trial_iscale
    sum_lx, sum_l2 = ZERO, ZERO
    for i in range(n):
        level = min(top, nearest_int(iscale * x[i])) & 255
        levels[i] = level
        sum_lx = sum_lx + w[i] * x[i] * F(level)
        sum_l2 = sum_l2 + w[i] * F(level) * F(level)
    for _ in range(5):
        changed = False
        for i in range(n):
            old = F(levels[i])
            lx = sum_lx - w[i] * x[i] * old
            l2 = sum_l2 - w[i] * old * old
            if lx > ZERO and l2 > ZERO:
                level = min(top, nearest_int(x[i] * l2 / lx))
                if level != levels[i]:
                    new = F(level)
                    lx = lx + w[i] * x[i] * new
                    l2 = l2 + w[i] * new * new
                    if lx * lx * sum_l2 > sum_lx * sum_lx * l2:
                        levels[i] = level & 255
                        sum_lx, sum_l2 = lx, l2
                        changed = True
        if not changed:
            break
    return sum_lx / sum_l2 if sum_l2 > ZERO else ZERO


@kernel
def signed_scales(x: Any, w: Any, half: Any, levels: Any) -> Any:
    """Quantize n scales x to levels 0..2*half-1 around `half` with weights w (make_qx_quants): returns the scale."""
    n = x.shape[0]
    extreme, magnitude = ZERO, ZERO
    for i in range(n):
        if abs(x[i]) > magnitude:
            magnitude, extreme = abs(x[i]), x[i]
    if magnitude < F(1e-15):
        for i in range(n):
            levels[i] = 0
        return ZERO
    iscale = F(-half) / extreme
    kept = iscale
    scale, best = ZERO, ZERO
    for step in range(-10, 10):
        if step == 0:
            continue
        if step > -10:
            iscale = -(F(half) + F(0.1) * F(step)) / extreme
        sum_lx, sum_l2 = ZERO, ZERO
        for i in range(n):
            level = F(max(-half, min(half - 1, nearest_int(iscale * x[i]))))
            sum_lx = sum_lx + F(w[i] * x[i] * level)
            sum_l2 = sum_l2 + F(F(w[i] * level) * level)
        if step == -10:  # the plain scale comes first and is kept unless beaten
            scale = sum_lx / sum_l2 if sum_l2 != ZERO else ZERO
            best = scale * sum_lx
        elif sum_l2 > ZERO and sum_lx * sum_lx > best * sum_l2:
            kept = iscale
            scale = sum_lx / sum_l2
            best = scale * sum_lx
    for i in range(n):
        levels[i] = half + max(-half, min(half - 1, nearest_int(kept * x[i])))
    return scale
