"""Random numbers by counting: the draw for a token is a function of (seed, index), on every machine, in any order.

Philox 4x64-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with numpy's conventions:
`uniform(seed, index)` is the first number of `numpy.random.Generator(numpy.random.Philox(key=seed, counter=index))`.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_MULTIPLIER_0 = 0xD2E7470EE14C6C93
_MULTIPLIER_1 = 0xCA5A826395121157
_WEYL_0 = 0x9E3779B97F4A7C15
_WEYL_1 = 0xBB67AE8584CAA73B
_ROUNDS = 10


def philox(key: int, counter: int) -> tuple[int, int, int, int]:
    """The block of four 64-bit numbers for a 128-bit key and a 256-bit counter."""
    k0, k1 = key & _MASK, (key >> 64) & _MASK
    c0, c1, c2, c3 = (counter >> shift & _MASK for shift in (0, 64, 128, 192))
    for _ in range(_ROUNDS):
        a = _MULTIPLIER_0 * c0
        b = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & _MASK, (a >> 64) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at `index` of an answer."""
    # numpy counts up before it draws, hence + 1.
    return float(philox(seed, index + 1)[0] >> 11) * 2.0**-53
