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
TINY_RANGE, HUGE_RANGE = F(2.0**-100), F(2.0**120)


@kernel
def affine(x: Any, w: Any, levels: Any, lane: Any, top: Any, rmin: Any, rdelta: Any, steps: Any, absolute: Any) -> Any:
    """One lane of `search.affine` on x[n, lanes], w[n, lanes]: fills levels[:, lane], returns (scale, minimum)."""
    n = x.shape[0]
    low, high = x[0, lane], x[0, lane]
    sum_w = w[0, lane]
    sum_x = F(sum_w * x[0, lane])
    for i in range(1, n):
        value = x[i, lane]
        if value < low:
            low = value
        if value > high:
            high = value
        sum_w = F(sum_w + w[i, lane])
        sum_x = F(sum_x + F(w[i, lane] * value))
    if low > F(0):
        low = F(0)
    if high == low:
        for i in range(n):
            levels[i, lane] = F(0)
        return F(0), F(-low)
    iscale = F(F(top) / F(high - low))
    scale = F(F(1) / iscale)
    best = F(0)
    for i in range(n):
        q = F(max(0, min(top, nearest_int(F(iscale * F(x[i, lane] - low))))))
        levels[i, lane] = q
        diff = F(F(F(scale * q) + low) - x[i, lane])
        best = F(best + F(w[i, lane] * (F(abs(diff)) if absolute else F(diff * diff))))
    trial = np.empty(n, np.float32)
    for step in range(steps + 1):
        iscale = F(F(F(rmin + F(rdelta * F(step))) + F(top)) / F(high - low))
        sum_l, sum_l2, sum_xl = F(0), F(0), F(0)
        for i in range(n):
            q = F(max(0, min(top, nearest_int(F(iscale * F(x[i, lane] - low))))))
            trial[i] = q
            wl = F(w[i, lane] * q)
            sum_l, sum_l2, sum_xl = F(sum_l + wl), F(sum_l2 + F(wl * q)), F(sum_xl + F(wl * x[i, lane]))
        det = F(F(sum_w * sum_l2) - F(sum_l * sum_l))
        if det > F(0):
            new_scale = F(F(F(sum_w * sum_xl) - F(sum_x * sum_l)) / det)
            new_low = F(F(F(sum_l2 * sum_x) - F(sum_l * sum_xl)) / det)
            if new_low > F(0):
                new_low = F(0)
                new_scale = F(sum_xl / sum_l2)
            cost = F(0)
            for i in range(n):
                diff = F(F(F(new_scale * trial[i]) + new_low) - x[i, lane])
                cost = F(cost + F(w[i, lane] * (F(abs(diff)) if absolute else F(diff * diff))))
            if cost < best:
                for i in range(n):
                    levels[i, lane] = trial[i]
                best, scale, low = cost, new_scale, new_low
    return scale, F(-low)


@kernel
def positive_scales(x: Any, w: Any, top: Any, levels: Any) -> Any:
    """Quantize n non-negative scales x to 0..top with weights w (make_qp_quants): fills `levels`, returns the scale."""
    n = x.shape[0]
    largest = F(0)
    for i in range(n):
        largest = largest if largest > x[i] else x[i]
    if largest < F(1e-15):
        for i in range(n):
            levels[i] = 0
        return F(0)
    iscale = F(F(top) / largest)
    scale = F(F(1) / iscale)
    best = F(0)
    for i in range(n):
        level = nearest_int(F(iscale * x[i])) & 255  # stored as a byte before it is used
        diff = F(x[i] - F(scale * F(level)))
        best = F(best + F(F(w[i] * diff) * diff))
    for step in range(-4, 5):
        if step == 0:
            continue
        trial_iscale = F(F(F(F(0.1) * F(step)) + F(top)) / largest)
        trial_scale = F(F(1) / trial_iscale)
        cost = F(0)
        for i in range(n):
            level = min(top, nearest_int(F(trial_iscale * x[i])))
            diff = F(x[i] - F(trial_scale * F(level)))
            cost = F(cost + F(F(w[i] * diff) * diff))
        if cost < best:
            best, iscale = cost, trial_iscale
    sum_lx, sum_l2 = F(0), F(0)
    for i in range(n):
        level = min(top, nearest_int(F(iscale * x[i]))) & 255
        levels[i] = level
        sum_lx = F(sum_lx + F(F(w[i] * x[i]) * F(level)))
        sum_l2 = F(sum_l2 + F(F(w[i] * F(level)) * F(level)))
    for _ in range(5):
        changed = False
        for i in range(n):
            old = F(levels[i])
            lx = F(sum_lx - F(F(w[i] * x[i]) * old))
            l2 = F(sum_l2 - F(F(w[i] * old) * old))
            if lx > F(0) and l2 > F(0):
                level = min(top, nearest_int(F(F(x[i] * l2) / lx)))
                if level != levels[i]:
                    new = F(level)
                    lx = F(lx + F(F(w[i] * x[i]) * new))
                    l2 = F(l2 + F(F(w[i] * new) * new))
                    if F(F(lx * lx) * sum_l2) > F(F(sum_lx * sum_lx) * l2):
                        levels[i] = level & 255
                        sum_lx, sum_l2 = lx, l2
                        changed = True
        if not changed:
            break
    return F(sum_lx / sum_l2) if sum_l2 > F(0) else F(0)


@kernel
def signed_scales(x: Any, w: Any, half: Any, levels: Any) -> Any:
    """Quantize n scales x to levels 0..2*half-1 around `half` with weights w (make_qx_quants): returns the scale."""
    n = x.shape[0]
    extreme, magnitude = F(0), F(0)
    for i in range(n):
        if abs(x[i]) > magnitude:
            magnitude, extreme = F(abs(x[i])), x[i]
    if magnitude < F(1e-15):
        for i in range(n):
            levels[i] = 0
        return F(0)
    iscale = F(F(-half) / extreme)
    kept = iscale
    scale, best = F(0), F(0)
    for step in range(-10, 10):
        if step == 0:
            continue
        if step > -10:
            iscale = F(-F(F(half) + F(F(0.1) * F(step))) / extreme)
        sum_lx, sum_l2 = F(0), F(0)
        for i in range(n):
            level = F(max(-half, min(half - 1, nearest_int(F(iscale * x[i])))))
            sum_lx = F(sum_lx + F(F(w[i] * x[i]) * level))
            sum_l2 = F(sum_l2 + F(F(w[i] * level) * level))
        if step == -10:  # the plain scale comes first and is kept unless beaten
            scale = F(sum_lx / sum_l2) if sum_l2 != F(0) else F(0)
            best = F(scale * sum_lx)
        elif sum_l2 > F(0) and F(sum_lx * sum_lx) > F(best * sum_l2):
            kept = iscale
            scale = F(sum_lx / sum_l2)
            best = F(scale * sum_lx)
    for i in range(n):
        levels[i] = half + max(-half, min(half - 1, nearest_int(F(kept * x[i]))))
    return scale
