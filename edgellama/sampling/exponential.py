"""exp() with the same bits on every machine: only correctly rounded operations, in a fixed order.

NumPy's and libm's exp differ in the last bit from processor to processor, which now and then moves a draw or a cut.
exp(x) = 2^(-n/64) * exp(r) with n = round(-x * 64 / ln 2) and |r| <= ln 2 / 128: a table for the power and a polynomial
of degree 3 for the rest (after P. T. P. Tang, "Table-driven implementation of the exponential function in IEEE
floating-point arithmetic", ACM TOMS 15, 1989). Relative error below 4e-11 before the rounding to float32.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_PARTS = 64
_LN2 = float.fromhex("0x1.62e42fefa39efp-1")
_SCALE = -_PARTS / _LN2
_STEP = _LN2 / _PARTS
_LOWEST = np.float32(-104.0)
"""Below, the result is 0 in float32 (the smallest denormal is exp(-103.28))."""
_BLOCK = 8192
"""Elements worked on at once: the temporaries stay in the processor's cache."""


def _powers() -> NDArray[np.float64]:
    """2^(-n/64) for every n that occurs, from square roots and halving alone."""
    roots = [0.5]
    for _ in range(6):
        roots.append(math.sqrt(roots[-1]))
    fractions = [math.prod(roots[6 - bit] for bit in range(6) if j >> bit & 1) for j in range(_PARTS)]
    halvings = math.ceil(float(_LOWEST) / -_LN2) + 1
    return np.concatenate([np.ldexp(fractions, -whole) for whole in range(halvings)])


_POWERS = _powers()


def exp(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """exp of values <= 0 (-inf gives 0), float32[n] to float32[n]. NaN is not allowed."""
    if len(x) <= _BLOCK:
        return _exp_block(x).astype(np.float32)
    result = np.empty(x.shape, np.float32)
    for start in range(0, len(x), _BLOCK):
        part = slice(start, start + _BLOCK)
        result[part] = _exp_block(x[part])
    return result


def _exp_block(x: NDArray[np.float32]) -> NDArray[np.float64]:
    r = np.maximum(x, _LOWEST).astype(np.float64)
    n = r * _SCALE
    np.rint(n, out=n)
    powers = _POWERS[n.astype(np.int32)]
    n *= _STEP
    r += n
    value = r * (1 / 6)
    value += 0.5
    value *= r
    value += 1.0
    value *= r
    value += 1.0
    value *= powers
    return value
